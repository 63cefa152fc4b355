"""Slice, Split, Pad, Tile, Expand: operators that change the length of axes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim, product
from fa_compiler.passes.ir.nodes import input_of
from fa_compiler.passes.ops.context import (
    LIMIT,
    Content,
    Context,
    Fact,
    Known,
    as_axis_size,
    axis_in,
    broadcast,
    content_fact,
    fresh,
    rule,
)
from fa_compiler.passes.ops.cuts import pads_of
from fa_compiler.passes.ops.moves import Cut, Stretched, Unpadded, mover

_END = 10**9
"""A slice's end from here on means "to the end" (tf2onnx writes 1e9): no axis is that long."""


@rule("Slice")
def _slice(ctx: Context) -> Fact:
    shape, dtype = ctx.shape(0), ctx.dtype(0)
    if shape is None:
        return Fact(None, dtype)
    bounds = _attributes(ctx) if ctx.opset < 10 else _inputs(ctx)
    if bounds is None or len(set(map(len, bounds))) > 1:
        return Fact(fresh(len(shape)), dtype)
    result = list(shape)
    for axis, start, end, step in zip(*bounds, strict=True):
        place = axis_in(axis, len(shape))
        if place is None:
            return Fact(fresh(len(shape)), dtype)
        result[place] = sliced(shape[place], start, end, step)
    content = _cut_content(ctx, bounds, result)
    return Fact(tuple(result), dtype) if content is None else content_fact(content, dtype)


def _cut_content(ctx: Context, bounds: Bounds, result: Sequence[Dim]) -> Content | None:
    """The elements of a Slice of known content; None where they are unknown."""
    content = ctx.content(0)
    if content is None:
        return None
    cuts: list[slice | None] = [slice(None)] * content.ndim
    for axis, start, end, step in zip(*bounds, strict=True):
        cuts[axis] = _cut(start, end, step, content.shape[axis])
    known = [cut for cut in cuts if cut is not None]
    if len(known) == content.ndim:
        return np.asarray(content[tuple(known)], dtype=content.dtype)
    # A single element, all of which remains, is the element wherever the Slice starts.
    return content if content.size == 1 and all(dim == 1 for dim in result) else None


Bounds = tuple[Sequence[int], Sequence[Dim], Sequence[Dim], Sequence[Dim]]
"""Axes, starts, ends and steps of a Slice."""


def _attributes(ctx: Context) -> Bounds:
    """The bounds of an older Slice, which has them as attributes."""
    starts = [Dim(item) for item in ctx.ints_attr("starts") or []]
    ends = [Dim(item) for item in ctx.ints_attr("ends") or []]
    listed = ctx.ints_attr("axes")
    return list(range(len(starts))) if listed is None else listed, starts, ends, [Dim(1)] * len(starts)


def _inputs(ctx: Context) -> Bounds | None:
    """The bounds of a newer Slice, which has them as inputs. Unknown numbers are fresh. None where its axes are
    unknown."""
    found = ctx.ints(3) if ctx.has(3) else None
    counts = [len(vector) for vector in (ctx.vector(1), ctx.vector(2), found) if vector is not None]
    if (ctx.has(3) and found is None) or not counts:
        return None

    def numbers(place: int) -> Sequence[Dim]:
        return ctx.vector(place) or [Dim.fresh(None)] * counts[0]

    axes = list(range(counts[0])) if found is None else found
    return axes, numbers(1), numbers(2), numbers(4) if ctx.has(4) else [Dim(1)] * counts[0]


def _cut(start: Dim, end: Dim, step: Dim, length: int) -> slice | None:
    """The slice of an axis as a Python slice; None where it is unknown.

    Two kinds of reversed slices are left out. One begins before the first element: it holds that element in ONNX, and
    none in Python. The other ends at the largest number: it holds nothing in ONNX, and all elements down to the first
    in ONNX Runtime.
    """
    first, last, by = start.const, end.const, step.const
    if first is None or last is None or not by or (by < 0 and (first < -length or last >= _END)):
        return None
    # ONNX's INT_MIN end of a reversed slice means "before the first", which Python spells None.
    return slice(first, None if by < 0 and last <= -_END else last, by)


def sliced(dim: Dim, start: Dim, end: Dim, step: Dim) -> Dim:
    """The length of an axis of length `dim` after a Slice; a fresh size where the sign of a bound is unknown."""
    length, by = dim.const, step.const
    cut = None if length is None else _cut(start, end, step, length)
    if length is not None and cut is not None:
        return Dim(len(range(*cut.indices(length))))
    if by == -1 and start == -1 and end.const is not None and end.const <= -_END:
        return dim
    if by is None or by <= 0:
        return Dim.fresh()
    low, high = _clamped(dim, start), _clamped(dim, end)
    if low is None or high is None:
        return Dim.fresh()
    # Both lie between 0 and the length, whose sign is not always proven from its expression.
    kept = high - low if high == dim or low == 0 else Dim.max(high - low, 0)
    return Dim.ceildiv(kept, by)


def _clamped(dim: Dim, bound: Dim) -> Dim | None:
    """A bound of a Slice counted from the first element, from 0 to the length; None where its sign is unknown."""
    value = bound.const
    if (-dim - bound).is_at_least(0):
        return Dim(0)  # -0, too, which is not counted from the end: the axis has no elements then
    if value is not None and value >= _END:
        return dim
    if bound == -dim:
        return Dim(0)
    if bound.is_at_least(0):
        return Dim.min(bound, dim)
    if (-bound).is_at_least(1):
        return Dim.max(dim + bound, 0)
    return None


@rule("SplitToSequence")
def _split_to_sequence(ctx: Context) -> Fact:
    """Parts of the given sizes, or parts of one given size of which the last may be smaller."""
    unknown, shape, sizes = Fact(None, ctx.dtype(0)), ctx.shape(0), ctx.ints(1)
    axis = None if shape is None else axis_in(ctx.int_attr("axis", 0), len(shape))
    # ONNX ignores `keepdims` where sizes are given, ONNX Runtime does not.
    if shape is None or axis is None or sizes is None or not ctx.int_attr("keepdims", 1):
        return unknown
    if ctx.shape(1) == ():
        length, (part,) = shape[axis].const, sizes
        if length is None or part < 1 or length > LIMIT * part:
            return unknown
        sizes = [min(part, length - start) for start in range(0, length, part)]
    return Fact(None, ctx.dtype(0), parts=tuple((*shape[:axis], Dim(part), *shape[axis + 1 :]) for part in sizes))


@rule("SequenceConstruct", "SequenceErase", "ConcatFromSequence")
def _sequence(ctx: Context) -> Fact:
    """The type of the elements."""
    return Fact(None, ctx.dtype(0))


@rule("SequenceInsert")
def _sequence_insert(ctx: Context) -> Fact:
    return Fact(None, ctx.dtype(1))


@rule("SequenceAt")
def _sequence_at(ctx: Context) -> Fact:
    parts, index = ctx.fact(0).parts, ctx.ints(1)
    if parts is None or index is None or len(index) != 1 or not -len(parts) <= index[0] < len(parts):
        declared = ctx.node.outputs[0].shape
        return Fact(None if declared is None else fresh(len(declared)), ctx.dtype(0))
    return Fact(parts[index[0]], ctx.dtype(0))


@rule("Split")
def _split(ctx: Context) -> list[Fact]:
    dtype = ctx.dtype(0)
    count = len(ctx.node.outputs)
    shape = ctx.shape(0)
    if shape is None:
        return [Fact(None, dtype)] * count
    axis = axis_in(ctx.int_attr("axis", 0), len(shape))
    if axis is None:
        return [Fact(None, dtype)] * count
    if ctx.opset < 13:
        listed = ctx.ints_attr("split")
        sizes: list[Dim] | None = None if listed is None else [Dim(item) for item in listed]
        given = listed is not None
    else:
        given = ctx.has(1)
        sizes = ctx.vector(1) if given else None
    if not given:
        # Equal parts; from opset 18 on the last one takes what remains.
        part = Dim.ceildiv(shape[axis], count)
        sizes = [part] * (count - 1) + [shape[axis] - part * (count - 1)]
    if sizes is None or len(sizes) != count:
        sizes = [Dim.fresh() for _ in range(count)]
    facts = []
    content = ctx.content(0)
    offset = 0
    for part in sizes:
        length = part.const
        if content is not None and length is not None:
            index = [slice(None)] * axis + [slice(offset, offset + length)]
            facts.append(content_fact(content[tuple(index)], dtype))
            offset += length
        else:
            content = None
            facts.append(Fact((*shape[:axis], part, *shape[axis + 1 :]), dtype))
    return facts


@rule("Pad")
def _pad(ctx: Context) -> Fact:
    shape = ctx.shape(0)
    if shape is None:
        return Fact(None, ctx.dtype(0))
    rank = len(shape)
    if ctx.opset < 11:
        pads: list[Dim] | None = [Dim(item) for item in ctx.ints_attr("pads") or []]
    else:
        pads = ctx.vector(1)
    axes = list(range(rank))
    if ctx.has(3):
        listed = ctx.ints(3)
        places = [axis_in(axis, rank) for axis in listed] if listed is not None else [None]
        known = [place for place in places if place is not None]
        if len(known) < len(places):
            return Fact(fresh(rank), ctx.dtype(0))
        axes = known
    if pads is None or len(pads) != 2 * len(axes):
        return Fact(fresh(rank), ctx.dtype(0))
    result = list(shape)
    for index, axis in enumerate(axes):
        result[axis] = shape[axis] + pads[index] + pads[index + len(axes)]
    return Fact(tuple(result), ctx.dtype(0))


@rule("Tile")
def _tile(ctx: Context) -> Fact:
    shape = ctx.shape(0)
    repeats = ctx.vector(1)
    dtype = ctx.dtype(0)
    if ctx.opset < 6 or shape is None or repeats is None or len(repeats) != len(shape):
        rank = len(shape) if shape is not None else (None if repeats is None else len(repeats))
        return Fact(None if rank is None or ctx.opset < 6 else fresh(rank), dtype)
    result = tuple(dim * as_axis_size(times) for dim, times in zip(shape, repeats, strict=True))
    content = ctx.content(0)
    times = ctx.ints(1)
    known = times is not None and min(times, default=0) >= 1
    if content is not None and times is not None and known and 0 < content.size * math.prod(times) <= LIMIT:
        return content_fact(np.tile(content, times), dtype)
    return Fact(result, dtype)


@rule("Expand")
def _expand(ctx: Context) -> Fact:
    dtype = ctx.dtype(0)
    target = ctx.vector(1)
    if target is None:
        return Fact(None, dtype)
    # ONNX Runtime refuses a negative entry, so each entry is a size.
    shape = broadcast(ctx.shape(0), tuple(target))
    if shape is None:
        # The input may have a higher rank than the target asks for.
        return Fact(None, dtype)
    content = ctx.content(0)
    sizes = [dim.const for dim in shape]
    known = [length for length in sizes if length is not None]
    if content is not None and len(known) == len(sizes) and product(shape).const in range(1, LIMIT + 1):
        try:
            return content_fact(np.broadcast_to(content, known), dtype)
        except ValueError:  # an Expand that fails in every run
            pass
    return Fact(shape, dtype)


def _unpadded(node: ir.Node, known: Known) -> ir.Value | None:
    """What a Pad of no width pads."""
    pads = pads_of(node, known)
    return input_of(node, 0) if pads is not None and all(pad == 0 for pad in pads) else None


mover("Slice", form=Cut)
mover("Pad", form=Unpadded, source=_unpadded)
mover("Expand", "Tile", form=Stretched)
