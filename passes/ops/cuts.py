"""The places where Slice, Split and Pad cut. Their parameters were attributes in older opsets and are inputs in newer
ones."""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ir.nodes import input_of, int_attr, is_op
from fa_compiler.passes.ops.context import Known


def slice_bounds(node: ir.Node, known: Known, rank: int) -> list[tuple[int, Dim, int]] | None:
    """(axis, start, step) for each axis that a Slice of any opset cuts. None when one of them is unknown, or when an
    axis is out of range."""
    attr = node.attributes.get("starts")
    if attr is not None:
        starts = [Dim(number) for number in attr.as_ints()]
        listed = node.attributes.get("axes")
        axes = list(range(len(starts))) if listed is None else list(listed.as_ints())
        if len(axes) != len(starts):
            return None
        bounds = [(axis, start, 1) for axis, start in zip(axes, starts, strict=True)]
        return _within(bounds, rank)
    vectors: list[tuple[Dim, ...] | None] = []
    for place in (1, 3, 4):
        value = input_of(node, place)
        found = None if value is None else known.content(value)
        if value is not None and found is None:
            return None
        vectors.append((found,) if isinstance(found, Dim) else found)
    begin, axis_numbers, steps = vectors
    if begin is None:
        return None
    axis_numbers = axis_numbers or tuple(Dim(axis) for axis in range(len(begin)))
    steps = steps or (Dim(1),) * len(begin)
    if not len(axis_numbers) == len(begin) == len(steps):  # ONNX Runtime refuses it when the model runs
        return None
    result: list[tuple[int, Dim, int]] = []
    for axis, start, step in zip(axis_numbers, begin, steps, strict=True):
        if axis.const is None or step.const is None:
            return None
        result.append((axis.const, start, step.const))
    return _within(result, rank)


def _within(bounds: list[tuple[int, Dim, int]], rank: int) -> list[tuple[int, Dim, int]] | None:
    """The bounds with axes counted from the first one; None when an axis is out of range."""
    if not all(-rank <= axis < rank for axis, _, _ in bounds):
        return None
    return [(axis % rank, start, step) for axis, start, step in bounds]


def pads_of(node: ir.Node, known: Known) -> tuple[Dim, ...] | None:
    """What a Pad of any opset adds before each dimension that it names, and then behind each; None where unknown."""
    attr, given = node.attributes.get("pads"), input_of(node, 1)
    if attr is not None:
        return tuple(map(Dim, attr.as_ints()))
    pads = None if given is None else known.content(given)
    return pads if isinstance(pads, tuple) else None


def slice_start(node: ir.Node, axis: int, rank: int, known: Known) -> int | None:
    """Where a Slice with steps of 1 begins along an axis; None where that is unknown."""
    bounds = slice_bounds(node, known, rank)
    if bounds is None or any(step != 1 for _, _, step in bounds):
        return None
    return next((start.const for place, start, _ in bounds if place == axis), None)


def split_start(node: ir.Node, output: ir.Value, axis: int, known: Known) -> int | None:
    """Where an output of a Split into two parts begins along an axis; None where that is unknown."""
    shape = known.shape(output)
    if shape is None or len(node.outputs) != 2 or int_attr(node, "axis", 0) % len(shape) != axis:
        return None
    if node.outputs[0] is output:
        return 0
    first = known.shape(node.outputs[0])
    return None if first is None else first[axis].const


def cut_from(value: ir.Value, known: Known) -> tuple[ir.Value, int, int] | None:
    """The tensor that a Slice or Split cuts a value from, the one dimension that it cuts, and where the value begins
    there. None where the value is not cut like that, or where the sizes of that dimension are unknown."""
    node = value.producer()
    source = None if node is None else input_of(node, 0)
    shape, whole = known.shape(value), None if source is None else known.shape(source)
    if node is None or source is None or shape is None or whole is None or not is_op(node, "Slice", "Split"):
        return None
    cut = [axis for axis, (part, all_) in enumerate(zip(shape, whole, strict=True)) if part != all_]
    if len(cut) != 1 or shape[cut[0]].const is None or whole[cut[0]].const is None:
        return None
    (axis,) = cut
    if is_op(node, "Slice"):
        if any(
            slice_start(node, each, len(shape), known) not in (None, 0) for each in range(len(shape)) if each != axis
        ):
            return None
        start = slice_start(node, axis, len(shape), known)
    else:
        start = split_start(node, value, axis, known)
    if start is not None and start < 0:
        start += whole[axis].const or 0
    return None if start is None or start < 0 else (source, axis, start)
