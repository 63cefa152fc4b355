"""Tensors in parts along an axis: a Concat joins its parts, and a Split cuts its whole.

    operator                      parts         whole
    ----------------------------  ------------  --------------
    Concat(part, ..; axis)        its operands  its result
    Split(whole; axis) -> part    its results   its operand

In both the parts lie in the whole in their order, one behind the other and without a gap. So one
record, `Parts`, serves both. It tells where an element comes from, which part of it a rank has, and
where a part begins. It also tells that a Concat of all parts of a Split is the whole. A Concat of a
single tensor, several times, is also a move (`Repeated`).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, AxisSpace
from fa_compiler.passes.algebra.cases import Number, case
from fa_compiler.passes.algebra.formula import Affine, Index, at_least_zero
from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.algebra.symbolic import Dim, consts
from fa_compiler.passes.ir.nodes import (
    input_of,
    inputs_of,
    int_attr,
    is_op,
    operand_at,
    sole,
    without_none,
)
from fa_compiler.passes.ops.context import (
    Context,
    Fact,
    Known,
    Shape,
    axis_in,
    content_fact,
    rank_of,
    rule,
    with_dims,
)
from fa_compiler.passes.ops.cuts import slice_bounds, slice_start
from fa_compiler.passes.ops.moves import (
    ArrayMove,
    Integers,
    Move,
    Reader,
    element,
    listed,
    mover,
    repeated,
    zero,
)

CONCAT_AXIS, SPLIT_AXIS = 1, 0
"""The axes of a Concat, before opset 4, and of a Split that name none."""


@dataclass(frozen=True)
class Parts:
    """A whole tensor, and its parts along `axis`, which is counted from the front."""

    node: ir.Node
    whole: ir.Value
    parts: tuple[ir.Value, ...]
    axis: int
    is_last: bool
    """Is the axis the last one?"""

    def size(self, part: ir.Value, known: Known) -> Dim | None:
        """The length of a part along the axis; None where it is unknown."""
        shape = known.sizes(part)
        return shape[self.axis] if self.axis < len(shape) else None

    def starts(self, known: Known) -> list[Dim | None]:
        """Where each part begins in the whole; None behind a part of unknown size."""
        start: Dim | None = Dim(0)
        starts: list[Dim | None] = []
        for part in self.parts:
            starts.append(start)
            start = if_known(operator.add, start, self.size(part, known))
        return starts

    def start(self, part: ir.Value, known: Known) -> Dim | None:
        """Where one part begins in the whole; None where that is unknown."""
        return self.starts(known)[self.parts.index(part)]

    def with_elements(self, known: Known) -> list[ir.Value]:
        """The parts that may have elements."""
        return [part for part in self.parts if self.size(part, known) != Dim(0)]


def concat_of(node: ir.Node | None, known: Known) -> Parts | None:
    """What a Concat joins; None for other nodes, and where the rank is unknown."""
    if not is_op(node, "Concat"):
        return None
    return _parts(node, node.outputs[0], inputs_of(node), CONCAT_AXIS, known)


def split_of(node: ir.Node | None, known: Known) -> Parts | None:
    """What a Split cuts; None for other nodes, and where the rank is unknown."""
    if not is_op(node, "Split"):
        return None
    return _parts(node, operand_at(node, 0), node.outputs, SPLIT_AXIS, known)


def _parts(
    node: ir.Node, whole: ir.Value, parts: Sequence[ir.Value], default: int, known: Known
) -> Parts | None:
    rank = len(known.sizes(whole))
    axis = axis_in(int_attr(node, "axis", default), rank)
    return None if axis is None else Parts(node, whole, tuple(parts), axis, axis == rank - 1)


def start_along(value: ir.Value, axis: int, known: Known) -> Dim | None:
    """Where a value begins along an axis of the tensor that a Slice with steps of 1, or a Split,
    cuts it from. None where that is unknown."""
    node = value.producer()
    whole, split = known.sizes(operand_at(node, 0)), split_of(node, known)
    if split is not None:
        return split.start(value, known) if split.axis == axis else None
    start = slice_start(node, axis, len(whole), known)
    return start if start is None or (start.const or 0) >= 0 else whole[axis] + start


def cut_from(value: ir.Value, known: Known) -> tuple[ir.Value, int, int] | None:
    """The tensor that a Slice or Split cuts a value from, the one dimension that it cuts, and where
    the value begins there. None where the value is not cut like that, or where the sizes of that
    dimension are unknown."""
    node = value.producer()
    source, shape = operand_at(node, 0), known.sizes(value)
    axis = _axis_cut(shape, known.sizes(source)) if is_op(node, "Slice", "Split") else None
    if node is None or axis is None or _begins_elsewhere(node, axis, len(shape), known):
        return None
    start = start_along(value, axis, known)
    place = None if start is None else start.const
    return None if place is None or place < 0 else (source, axis, place)


def _axis_cut(shape: Shape, whole: Shape) -> int | None:
    """The one dimension in which two shapes differ, if both sizes are numbers; else None."""
    cut = sole(
        axis for axis, (part, all_) in enumerate(zip(shape, whole, strict=False)) if part != all_
    )
    return None if cut is None or shape[cut].const is None or whole[cut].const is None else cut


def _begins_elsewhere(node: ir.Node, axis: int, rank: int, known: Known) -> bool:
    """May a Slice begin elsewhere than at 0 along another axis?"""
    bounds = slice_bounds(node, known, rank) if is_op(node, "Slice") else None
    return any(start.const not in (None, 0) for place, start, _ in bounds or () if place != axis)


@dataclass(frozen=True)
class EqualPart:
    """One of `count` equal parts of a tensor along an axis, which is counted from the front. A part
    of one element may be without the axis."""

    source: ir.Value
    axis: int
    count: int
    drops_axis: bool = False


def takes_parts(node: ir.Node | None) -> TypeGuard[ir.Node]:
    """Is this an operator that takes parts of a tensor along axes?"""
    return is_op(node, "Slice", "Split", "Gather")


def equal_part(value: ir.Value, known: Known) -> EqualPart | None:
    """What a value is an equal part of, by a Split, a Slice or a Gather of one number; None for
    other values. The count is 1 where the part is without the axis."""
    node = value.producer()
    source = operand_at(node, 0)
    shape = known.sizes(source)
    if not shape or not takes_parts(node):
        return None
    if is_op(node, "Slice"):
        return _equal_slice(node, source, shape, known)
    drops_axis = is_op(node, "Gather")
    if drops_axis and known.shape(operand_at(node, 1)) != ():
        return None
    if len({known.shape(output) for output in node.outputs}) > 1:
        return None
    return EqualPart(
        source, int_attr(node, "axis", SPLIT_AXIS) % len(shape), len(node.outputs), drops_axis
    )


def _equal_slice(node: ir.Node, source: ir.Value, shape: Shape, known: Known) -> EqualPart | None:
    """The one axis that a Slice cuts into equal parts, of which it takes a whole one; None where it
    names another axis, too."""
    result = node.outputs[0]
    cut, bound = cut_from(result, known), sole(slice_bounds(node, known, len(shape)))
    if cut is None or bound is None or bound[0] != cut[1]:
        return None
    _, axis, start = cut
    size, whole = known.sizes(result)[axis].const, shape[axis].const
    if not size or whole is None or whole % size or start % size:
        return None
    return EqualPart(source, axis, whole // size)


def equal_sizes(size: Dim, count: int) -> list[Dim]:
    """The sizes of the parts of a Split that names none: equal, and from opset 18 on the last one
    has what is left."""
    part = Dim.ceildiv(size, count)
    return [part] * (count - 1) + [size - part * (count - 1)]


def concat_on_arrays(node: ir.Node) -> Callable[..., np.ndarray]:
    """What a Concat makes of the arrays of one run. It raises what NumPy raises where the sizes do
    not fit."""
    axis = int_attr(node, "axis", CONCAT_AXIS)
    return lambda *arrays: np.concatenate(arrays, axis)


def split_on_arrays(
    node: ir.Node, shape: Sequence[int], integers: Integers
) -> list[ArrayMove] | None:
    """The moves from an array of this shape to each part of a Split; None where the parts do not
    fit."""
    axis = int_attr(node, "axis", SPLIT_AXIS)
    sizes: Sequence[int | None] | None = listed(node, "split", integers(1))
    if sizes is None:
        sizes = consts(equal_sizes(Dim(shape[axis]), len(node.outputs)))
    known = [size for size in sizes if size is not None and size >= 0]
    ends = list(itertools.accumulate(known))
    if len(known) < len(node.outputs) or ends[-1] != shape[axis]:
        return None
    return [_taken(range(end - size, end), axis) for size, end in zip(known, ends, strict=True)]


def _taken(places: range, axis: int) -> ArrayMove:
    return lambda array: np.take(array, places, axis)


@rule("Concat")
def _concat(ctx: Context) -> Fact:
    dtype = ctx.dtype(0)
    shapes = [ctx.shape(index) for index in range(len(ctx.facts))]
    ranks = {len(shape) for shape in without_none(shapes)}
    if len(ranks) != 1:
        return Fact(None, dtype)
    rank = ranks.pop()
    axis = ctx.axis_attr(rank, CONCAT_AXIS)
    if axis is None:
        return Fact(None, dtype)
    if (joined := _joined(ctx, rank, axis)) is not None:
        return joined
    return Fact(concat_shape(shapes, axis), dtype)


def concat_shape(shapes: Sequence[Shape | None], axis: int) -> Shape | None:
    """The shape of tensors that are joined along an axis. All known shapes have the same rank, and
    this axis."""
    known = without_none(shapes)
    result = []
    for index in range(len(known[0])):
        dims = [shape[index] for shape in known]
        if index == axis:
            total = sum(dims, Dim(0))
            result.append(total if len(known) == len(shapes) else Dim.fresh())
        else:
            # All of them are equal in a run that succeeds: take the one that says most.
            result.append(min(dims, key=_vagueness))
    return tuple(result)


def _joined(ctx: Context, rank: int, axis: int) -> Fact | None:
    """The fact of a Concat of known contents; None where a content is unknown."""
    contents, dtype = [ctx.content(index) for index in range(len(ctx.facts))], ctx.dtype(0)
    parts = without_none(contents)
    if rank == 1 and any(content.dtype == object for content in parts):
        return _joined_vectors(ctx)
    if len(parts) < len(contents):
        return None
    if len({(*part.shape[:axis], *part.shape[axis + 1 :]) for part in parts}) > 1:
        return Fact(None, dtype)  # no run succeeds
    return content_fact(np.concatenate(parts, axis), dtype)


def _joined_vectors(ctx: Context) -> Fact | None:
    """The fact of vectors of integers, one behind the other. Of a vector it is enough to know the
    length."""
    vectors = [ctx.vector(index) for index in range(len(ctx.facts))]
    if any(vector is None for vector in vectors):
        return None
    items = [item for vector in vectors for item in vector or []]
    joined = np.empty(len(items), dtype=object)
    joined[:] = items
    return content_fact(joined, ctx.dtype(0))


def _vagueness(dim: Dim) -> tuple[int, int]:
    if dim.is_const:
        return 0, 0
    return 2 - int(dim.is_known), len(dim.atoms)


def _one_tensor(node: ir.Node, known: Known) -> ir.Value | None:
    """The tensor that a Concat joins with itself."""
    first = input_of(node, 0)
    if len(node.inputs) < 2 or any(value is not first for value in node.inputs):
        return None
    return first


@rule("Split")
def _split(ctx: Context) -> list[Fact]:
    dtype = ctx.dtype(0)
    count = len(ctx.node.outputs)
    shape = ctx.shape(0)
    axis = ctx.axis_attr(rank_of(shape), SPLIT_AXIS)
    if shape is None or axis is None:
        return [Fact(None, dtype)] * count
    given, sizes = ctx.listed("split", 1, 13)
    if not given:
        sizes = equal_sizes(shape[axis], count)
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
            facts.append(Fact(with_dims(shape, axis, part), dtype))
    return facts


class Repeated(Move):
    """One tensor several times in turn, along an axis."""

    is_layout = True

    def arrangement(self, dims: Arrangement, space: AxisSpace, known: Known) -> Arrangement | None:
        return repeated(
            dims, int_attr(self.node, "axis", CONCAT_AXIS), len(self.node.inputs), True, space
        )


mover("Concat", form=Repeated, source=_one_tensor)


@dataclass(frozen=True)
class _Placed:
    """An operand of a Concat: its size along the axis, and the place where it begins."""

    value: ir.Value
    size: Dim
    start: Affine


_At = Callable[[_Placed, Affine], Number | None]
"""The element of a part at a place along the axis."""


@element("Concat")
def _joined_element(reader: Reader, node: ir.Node, index: Index) -> Number | None:
    """In one part where the part is known, in any part where the parts continue one another, and
    else a choice between the parts by the place."""
    joined = concat_of(node, reader.info)
    parts = if_known(_placed, joined, reader)
    if joined is None or parts is None:
        return None
    axis = joined.axis

    def at(part: _Placed, place: Affine) -> Number | None:
        return reader.number(part.value, (*index[:axis], place, *index[axis + 1 :]))

    place = index[axis]
    if place.const is not None:
        known = _part_at(place.const, parts)
        if known is None:
            return None
        if known:
            return at(known[0], place - known[0].start)
    continued = _continued(parts, place, at, reader)
    if continued is not None:
        return continued
    return _chosen_part(parts, place, at, reader)


def _placed(joined: Parts, reader: Reader) -> list[_Placed] | None:
    """What is joined, each with its size along the axis and the place where it begins; None where a
    shape is unknown."""
    parts: list[_Placed] = []
    start = zero(reader)
    for value in joined.parts:
        shape = reader.shape(value)
        if shape is None:
            return None
        parts.append(_Placed(value, shape[joined.axis], start))
        start = start + Affine.number(shape[joined.axis], reader.rank)
    return parts


def _continued(parts: Sequence[_Placed], place: Affine, at: _At, reader: Reader) -> Number | None:
    """The element in whichever part it is, where all parts hold one formula; None where they do
    not."""
    long = [part for part in parts if part.size.const != 1]
    candidates = {at(part, place - part.start) for part in long}
    if len(candidates) != 1:
        return None
    single = [part for part in parts if part.size.const == 1]
    pairs = [(at(part, zero(reader)), at(long[0], part.start - long[0].start)) for part in single]
    alike = all(one is not None and one == other for one, other in pairs)
    if not alike:
        return None
    return candidates.pop()


def _chosen_part(parts: Sequence[_Placed], place: Affine, at: _At, reader: Reader) -> Number | None:
    """The choice between the elements of all parts, by the place."""
    chosen: Number | None = None
    for part in reversed(parts):
        own = at(part, zero(reader) if part.size.const == 1 else place - part.start)
        if own is None:
            return None
        behind = place - part.start - Affine.number(part.size, reader.rank)
        chosen = own if chosen is None else case(at_least_zero(behind), chosen, own)
    return chosen


def _part_at(place: int, parts: Sequence[_Placed]) -> list[_Placed] | None:
    """The part of a Concat that holds a known place, in a list; an empty list where it is behind
    all parts, and None where it is unknown where a part begins or ends."""
    for part in parts:
        if part.start.const is None or part.size.const is None:
            return None
        if 0 <= place - part.start.const < part.size.const:
            return [part]
    return []
