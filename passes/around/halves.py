"""The two halves of a tensor along an axis, as a Split or as two Slices, and its even and its odd
elements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import all_known, is_op, operand_at, sole
from fa_compiler.passes.ops.context import axis_in
from fa_compiler.passes.ops.parts import split_of
from fa_compiler.passes.values.shapes import ShapeInfo


@dataclass(frozen=True)
class Halves:
    """A tensor that is cut in two parts of equal size along an axis, counted from the back, and the
    nodes that cut it."""

    whole: ir.Value
    axis: int
    nodes: tuple[ir.Node, ...]


def halves_of(first: ir.Value, second: ir.Value, info: ShapeInfo) -> Halves | None:
    """The tensor whose halves two values are, in this order; None where they are no halves of one
    tensor."""
    one, other = first.producer(), second.producer()
    if one is not None and one is other:
        return _split(one, first, second, info)
    return _slices(first, second, info, lambda size: ((0, size // 2, 1), (size // 2, size, 1)))


def pairs_of(even: ir.Value, odd: ir.Value, info: ShapeInfo) -> Halves | None:
    """The tensor whose elements of even and of odd places two values are; None where they are
    not."""
    return _slices(even, odd, info, lambda size: ((0, size, 2), (1, size, 2)))


def _slices(
    first: ir.Value,
    second: ir.Value,
    info: ShapeInfo,
    places: Callable[[int], tuple[tuple[int, int, int], tuple[int, int, int]]],
) -> Halves | None:
    """The tensor of an even size of which two Slices give the parts at these places; None for other
    values."""
    left, right = (cut_by_slice(value.producer(), info) for value in (first, second))
    if left is None or right is None or (left.whole, left.axis) != (right.whole, right.axis):
        return None
    if left.size % 2 or (left.places, right.places) != places(left.size):
        return None
    return Halves(left.whole, left.axis - len(info.sizes(left.whole)), (left.node, right.node))


def _split(node: ir.Node, first: ir.Value, second: ir.Value, info: ShapeInfo) -> Halves | None:
    """The halves that a Split gives: its only outputs, of one shape."""
    split, shape = split_of(node, info), info.shape(first)
    if split is None or split.parts != (first, second) or not shape or info.shape(second) != shape:
        return None
    return Halves(split.whole, split.axis - len(shape), (node,))


@dataclass(frozen=True)
class Cut:
    """A part of a tensor along one axis of a known size: its start, its end and its step."""

    node: ir.Node
    whole: ir.Value
    axis: int
    size: int
    places: tuple[int, int, int]


def cut_by_slice(node: ir.Node | None, info: ShapeInfo) -> Cut | None:
    """What a Slice along one axis cuts; None for other nodes, and for bounds that are not known."""
    if not is_op(node, "Slice"):
        return None
    whole = operand_at(node, 0)
    shape = info.sizes(whole)
    bounds = (
        _number(node, place, name, info) for place, name in enumerate(("starts", "ends", "axes"), 1)
    )
    step = _number(node, 4, "steps", info) if operand_at(node, 4).name else 1
    numbers = all_known((*bounds, step))
    if numbers is None:
        return None
    start, end, named, by = numbers
    axis = axis_in(named, len(shape))
    size = None if axis is None else shape[axis].const
    if axis is None or size is None or by < 1:
        return None
    first, last = (
        max(0, min(size, place + size if place < 0 else place)) for place in (start, end)
    )
    return Cut(node, whole, axis, size, (first, last, by))


def _number(node: ir.Node, place: int, name: str, info: ShapeInfo) -> int | None:
    """The only start, end, axis or step of a Slice; None where there are several, or where it is
    not known."""
    if (attr := node.attributes.get(name)) is not None:
        return sole(attr.as_ints())
    number = info.integer(operand_at(node, place))
    return None if number is None else number.const
