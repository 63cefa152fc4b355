"""Slice, Pad, Tile, Expand: operators that change the length of axes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.algebra.symbolic import Dim, consts, product
from fa_compiler.passes.ir.nodes import all_known, first, input_of, sole
from fa_compiler.passes.ops.context import (
    LIMIT,
    Content,
    Context,
    Fact,
    Known,
    Shape,
    as_axis_size,
    axis_in,
    broadcast,
    content_fact,
    fact_of,
    fresh,
    rule,
    shape_rule,
    with_dims,
)
from fa_compiler.passes.ops.cuts import pads_of
from fa_compiler.passes.ops.moves import Cut, Stretched, Tiled, Unpadded, mover

_END = 10**9
"""A slice's end from here on means "to the end" (tf2onnx writes 1e9): no axis is that long."""


@rule("Slice")
def _slice(ctx: Context) -> Fact:
    shape, dtype = ctx.shape(0), ctx.dtype(0)
    if shape is None:
        return Fact(None, dtype)
    bounds = _bounds(ctx, len(shape))
    if bounds is None:
        return Fact(fresh(len(shape)), dtype)
    result = list(shape)
    for axis, start, end, step in bounds:
        result[axis] = sliced(shape[axis], start, end, step)
    content = _cut_content(ctx, bounds, result)
    return fact_of(content, tuple(result), dtype)


def _cut_content(ctx: Context, bounds: Bounds, result: Sequence[Dim]) -> Content | None:
    """The elements of a Slice of known content; None where they are unknown."""
    content = ctx.content(0)
    if content is None:
        return None
    cuts: list[slice | None] = [slice(None)] * content.ndim
    for axis, start, end, step in bounds:
        cuts[axis] = _cut(start, end, step, content.shape[axis])
    known = all_known(cuts)
    if known is not None:
        return np.asarray(content[tuple(known)], dtype=content.dtype)
    # A single element, all of which remains, is the element wherever the Slice starts.
    return content if content.size == 1 == product(result) else None


Bounds = Sequence[tuple[int, Dim, Dim, Dim]]
"""Axis, counted from the front, start, end and step of each cut of a Slice."""


def _bounds(ctx: Context, rank: int) -> Bounds | None:
    """The cuts of a Slice. Unknown numbers are fresh. None where an axis is unknown or out of
    range, and where there are not as many numbers of one kind as of another."""
    vectors = _attributes(ctx) if ctx.opset < 10 else _inputs(ctx)
    if vectors is None or len(set(map(len, vectors))) > 1:
        return None
    axes, *numbers = vectors
    places = all_known(axis_in(axis, rank) for axis in axes)
    return None if places is None else list(zip(places, *numbers, strict=True))


_Vectors = tuple[Sequence[int], Sequence[Dim], Sequence[Dim], Sequence[Dim]]
"""Axes, starts, ends and steps of a Slice."""


def _attributes(ctx: Context) -> _Vectors:
    """The numbers of an older Slice, which has them as attributes."""
    starts = list(map(Dim, ctx.ints_attr("starts") or []))
    ends = list(map(Dim, ctx.ints_attr("ends") or []))
    axes = ctx.ints_attr("axes")
    return range(len(starts)) if axes is None else axes, starts, ends, [Dim(1)] * len(starts)


def _inputs(ctx: Context) -> _Vectors | None:
    """The numbers of a newer Slice, which has them as inputs. Those that are unknown are fresh.
    None where its axes are unknown, or how many there are."""
    count = first(if_known(len, given) for given in (ctx.vector(1), ctx.vector(2), ctx.dims(3)))
    if count is None:
        return None

    def numbers(place: int) -> Sequence[Dim]:
        return ctx.vector(place) or [Dim.fresh(None)] * count

    axes = ctx.ints(3) if ctx.has(3) else range(count)
    steps = numbers(4) if ctx.has(4) else [Dim(1)] * count
    return None if axes is None else (axes, numbers(1), numbers(2), steps)


def _cut(start: Dim, end: Dim, step: Dim, length: int) -> slice | None:
    """The slice of an axis as a Python slice; None where it is unknown.

    Two kinds of reversed slices are left out. One begins before the first element: it holds that
    element in ONNX, and none in Python. The other ends at the largest number: it holds nothing in
    ONNX, and all elements down to the first in ONNX Runtime.
    """
    first, last, by = start.const, end.const, step.const
    if first is None or last is None or not by or (by < 0 and (first < -length or last >= _END)):
        return None
    if by < 0 and last <= -_END:
        # ONNX's INT_MIN end of a reversed slice means "before the first", which Python spells None.
        return slice(first, None, by)
    return slice(first, last, by)


def sliced(dim: Dim, start: Dim, end: Dim, step: Dim) -> Dim:
    """The length of an axis of length `dim` after a Slice; a fresh size where the sign of a bound
    is unknown."""
    length, by = dim.const, step.const
    if length is not None and (cut := _cut(start, end, step, length)) is not None:
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
    """A bound of a Slice counted from the first element, from 0 to the length; None where its sign
    is unknown."""
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
    return Fact(None, ctx.dtype(0), parts=_parts_of_sequence(ctx, ctx.shape(0) or ()))


def _parts_of_sequence(ctx: Context, shape: Shape) -> tuple[Shape, ...] | None:
    """Parts of the given sizes, or parts of one given size of which the last may be smaller; None
    where they are unknown."""
    sizes, axis = ctx.ints(1), ctx.axis_attr(len(shape))
    # ONNX ignores `keepdims` where sizes are given, ONNX Runtime does not.
    if axis is None or sizes is None or not ctx.int_attr("keepdims", 1):
        return None
    if ctx.shape(1) == ():
        length, (part,) = shape[axis].const, sizes
        if length is None or part < 1 or length > LIMIT * part:
            return None
        sizes = [min(part, length - start) for start in range(0, length, part)]
    return tuple(with_dims(shape, axis, Dim(part)) for part in sizes)


@rule("SequenceConstruct", "SequenceErase", "ConcatFromSequence")
def _sequence(ctx: Context) -> Fact:
    """The type of the elements."""
    return Fact(None, ctx.dtype(0))


@rule("SequenceInsert")
def _sequence_insert(ctx: Context) -> Fact:
    return Fact(None, ctx.dtype(1))


@rule("SequenceAt")
def _sequence_at(ctx: Context) -> Fact:
    parts = ctx.fact(0).parts or ()
    place = axis_in(sole(ctx.ints(1)), len(parts))
    if place is None:
        return Fact(fresh(if_known(len, ctx.node.outputs[0].shape)), ctx.dtype(0))
    return Fact(parts[place], ctx.dtype(0))


@shape_rule("Pad")
def _pad(ctx: Context, shape: Shape) -> Shape:
    _, pads = ctx.listed("pads", 1, 11)
    axes = _padded_axes(ctx, len(shape))
    if pads is None or axes is None or len(pads) != 2 * len(axes):
        return fresh(len(shape))
    result = list(shape)
    for index, axis in enumerate(axes):
        result[axis] = shape[axis] + pads[index] + pads[index + len(axes)]
    return tuple(result)


def _padded_axes(ctx: Context, rank: int) -> Sequence[int] | None:
    """The axes to which the widths of a Pad belong; None where they are unknown."""
    if not ctx.has(3):
        return range(rank)
    listed = ctx.ints(3)
    if listed is None:
        return None
    return all_known(axis_in(axis, rank) for axis in listed)


@rule("Tile")
def _tile(ctx: Context) -> Fact:
    shape = ctx.shape(0)
    repeats = ctx.vector(1)
    dtype = ctx.dtype(0)
    if ctx.opset < 6:
        return Fact(None, dtype)
    if shape is None or repeats is None or len(repeats) != len(shape):
        of_rank = repeats if shape is None else shape
        return Fact(fresh(if_known(len, of_rank)), dtype)
    result = tuple(dim * as_axis_size(times) for dim, times in zip(shape, repeats, strict=True))
    content, times = ctx.content(0), ctx.ints(1)
    if content is not None and times and _is_small(result):
        return content_fact(np.tile(content, times), dtype)
    return Fact(result, dtype)


def _is_small(shape: Shape) -> bool:
    """Has a tensor elements, and so few that its content is followed?"""
    return product(shape).const in range(1, LIMIT + 1)


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
    content, sizes = ctx.content(0), all_known(consts(shape))
    if content is not None and sizes is not None and _is_small(shape):
        try:
            return content_fact(np.broadcast_to(content, sizes), dtype)
        except ValueError:  # an Expand that fails in every run
            pass
    return Fact(shape, dtype)


def _unpadded(node: ir.Node, known: Known) -> ir.Value | None:
    """What a Pad of no width pads."""
    pads = pads_of(node, known)
    if pads is None or any(pad != 0 for pad in pads):
        return None
    return input_of(node, 0)


mover("Slice", form=Cut)
mover("Pad", form=Unpadded, source=_unpadded)
mover("Expand", form=Stretched)
mover("Tile", form=Tiled)
