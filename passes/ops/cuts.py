"""The places where Slice and Pad cut. Their parameters were attributes in older opsets and are
inputs in newer ones."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim, consts
from fa_compiler.passes.ir.nodes import all_known, float_attr, input_of, is_op, text_attr
from fa_compiler.passes.ops.context import Known, axis_in

NO_PADS = (Dim(0), Dim(0))
"""Nothing is put before or behind an axis."""


def slice_bounds(node: ir.Node, known: Known, rank: int) -> list[tuple[int, Dim, int]] | None:
    """(axis, start, step) for each axis that a Slice of any opset cuts. None when one of them is
    unknown, or when an axis is out of range."""
    numbers = _vectors(node, known)
    if numbers is None:
        return None
    axes, starts, steps = numbers
    if not len(axes) == len(starts) == len(steps):  # ONNX Runtime refuses it when the model runs
        return None
    places, by = all_known(axis_in(axis.const, rank) for axis in axes), all_known(consts(steps))
    return None if places is None or by is None else list(zip(places, starts, by, strict=True))


_Vectors = tuple[Sequence[Dim], Sequence[Dim], Sequence[Dim]]
"""Axes, starts and steps of a Slice."""


def _vectors(node: ir.Node, known: Known) -> _Vectors | None:
    """The axes, starts and steps of a Slice of any opset. None where a number that is given is
    unknown."""
    if "starts" in node.attributes:
        return _attributes(node)
    vectors: list[tuple[Dim, ...] | None] = []
    for place in (1, 3, 4):
        value = input_of(node, place)
        numbers = _numbers(value, known)
        if value is not None and numbers is None:
            return None
        vectors.append(numbers)
    starts, axes, steps = vectors
    if starts is None:
        return None
    return axes or _first_axes(starts), starts, steps or (Dim(1),) * len(starts)


def _attributes(node: ir.Node) -> _Vectors:
    """The vectors of an older Slice, which has them as attributes and no steps."""
    starts = list(map(Dim, node.attributes["starts"].as_ints()))
    steps = [Dim(1)] * len(starts)
    if "axes" not in node.attributes:
        return _first_axes(starts), starts, steps
    return list(map(Dim, node.attributes["axes"].as_ints())), starts, steps


def _first_axes(starts: Sequence[Dim]) -> tuple[Dim, ...]:
    """As many axes as there are starts, from the first one on."""
    return tuple(map(Dim, range(len(starts))))


def _numbers(value: ir.Value | None, known: Known) -> tuple[Dim, ...] | None:
    """The integers of a small tensor of rank 0 or 1; None where they are unknown."""
    content = known.content(value)
    return (content,) if isinstance(content, Dim) else content


def pads_of(node: ir.Node, known: Known) -> tuple[Dim, ...] | None:
    """The numbers of elements that a Pad of any opset adds: before each dimension of its list, and
    then behind each dimension. None where they are unknown."""
    attr, given = node.attributes.get("pads"), input_of(node, 1)
    if attr is not None:
        return tuple(map(Dim, attr.as_ints()))
    pads = known.content(given)
    if not isinstance(pads, tuple):
        return None
    return pads


def pads_along(node: ir.Node, known: Known, rank: int) -> dict[int, tuple[Dim, Dim]] | None:
    """How many elements a Pad puts before and behind each axis that it names, counted from the
    front; None where that is unknown."""
    pads, named = pads_of(node, known), input_of(node, 3)
    axes = tuple(map(Dim, range(rank))) if named is None else _numbers(named, known)
    if pads is None or axes is None or len(pads) != 2 * len(axes):
        return None
    places = [axis_in(axis.const, rank) for axis in axes]
    pairs = zip(places, pads, pads[len(axes) :], strict=False)
    widths = {place: (before, behind) for place, before, behind in pairs if place is not None}
    return widths if len(widths) == len(axes) else None


def filler_of(node: ir.Node, known: Known) -> float | None:
    """The number that a Pad puts around a tensor; None where it is unknown, or where it copies
    elements."""
    value = input_of(node, 2)
    if text_attr(node, "mode", "constant") != "constant":
        return None
    return float_attr(node, "value", 0.0) if value is None else known.scalar(value)


def slice_start(node: ir.Node | None, axis: int, rank: int, known: Known) -> Dim | None:
    """Where a Slice with steps of 1 begins along an axis; None for other nodes, and where that is
    unknown."""
    bounds = slice_bounds(node, known, rank) if is_op(node, "Slice") else None
    if bounds is None or any(step != 1 for _, _, step in bounds):
        return None
    return next((start for place, start, _ in bounds if place == axis), Dim(0))
