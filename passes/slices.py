"""The parameters of Slice, which were attributes before opset 10 and are inputs since."""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.passes.nodes import input_of
from fa_compiler.passes.shapes import ShapeInfo
from fa_compiler.passes.symbolic import Dim


def slice_bounds(node: ir.Node, info: ShapeInfo, rank: int) -> list[tuple[int, Dim, int]] | None:
    """(axis, start, step) of a Slice of any opset; None when one is not known."""
    attr = node.attributes.get("starts")
    if attr is not None:
        starts = [Dim(number) for number in attr.as_ints()]
        listed = node.attributes.get("axes")
        axes = list(range(len(starts))) if listed is None else list(listed.as_ints())
        return [(axis % rank, start, 1) for axis, start in zip(axes, starts, strict=True)]
    vectors: list[tuple[Dim, ...] | None] = []
    for place in (1, 3, 4):
        value = input_of(node, place)
        found = None if value is None else info.content(value)
        if value is not None and found is None:
            return None
        vectors.append((found,) if isinstance(found, Dim) else found)
    begin, axis_numbers, steps = vectors
    if begin is None:
        return None
    axis_numbers = axis_numbers or tuple(Dim(axis) for axis in range(len(begin)))
    steps = steps or (Dim(1),) * len(begin)
    result: list[tuple[int, Dim, int]] = []
    for axis, start, step in zip(axis_numbers, begin, steps, strict=True):
        if axis.const is None or step.const is None:
            return None
        result.append((axis.const % rank, start, step.const))
    return result
