"""The anchors: every softmax of a graph, in any spelling.

    softmax := Softmax(x), axis a                          opset >= 13: over axis a
                                                           opset < 13: over axes a.. flattened; taken when a is the last
             | Div(e, ReduceSum(e, axis a, keepdims=1))    e = Exp(Sub(x, ReduceMax(x, axis a, keepdims=1)))

             | Softmax(Sub(x, ReduceMax(x, axis a, keepdims=1))), axis a

Subtracting a row's maximum changes no softmax: where it is infinite both are NaN. The decomposed form is the operator's
own definition. Without the subtraction of the maximum, Div(e, ReduceSum(e)) with e = Exp(x), the value overflows where
Softmax does not: that form is an anchor only to be declined.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.nodes import int_attr, is_op, opset, reduced_axes
from fa_compiler.passes.shapes import ShapeInfo


@dataclass(frozen=True)
class SoftmaxAnchor:
    """A softmax over one axis. `nodes` are all nodes that compute it, the last of them gives `output`.

    `axis` is not negative, or None when it could not be told or is no single axis. `overflows` marks the form without
    the maximum subtracted.
    """

    scores: ir.Value
    output: ir.Value
    axis: int | None
    nodes: tuple[ir.Node, ...]
    overflows: bool = False

    @property
    def node(self) -> ir.Node:
        """The node the report names."""
        return self.nodes[-1]


def anchors(graph: ir.Graph, info: ShapeInfo) -> Iterator[SoftmaxAnchor]:
    """All anchors of one graph in its order, those of subgraphs not included."""
    for node in list(graph):
        if is_op(node, "Softmax") and node.inputs[0] is not None:
            axis = _axis(node, node.inputs[0], info)
            shift = _shifted_by_maximum(node.inputs[0], info)
            if shift is not None and shift[0] == axis:
                yield SoftmaxAnchor(shift[1], node.outputs[0], axis, (*shift[2], node))
            else:
                yield SoftmaxAnchor(node.inputs[0], node.outputs[0], axis, (node,))
        elif is_op(node, "Div") and (found := _decomposed(node, info)) is not None:
            yield found


def _axis(node: ir.Node, scores: ir.Value, info: ShapeInfo) -> int | None:
    shape = info.shape(scores)
    if shape is None:
        return None
    rank = len(shape)
    modern = opset(node) >= 13
    axis = int_attr(node, "axis", -1 if modern else 1)
    axis += rank if axis < 0 else 0
    return axis if 0 <= axis < rank and (modern or axis == rank - 1) else None


def _decomposed(div: ir.Node, info: ShapeInfo) -> SoftmaxAnchor | None:
    exponential, total = div.inputs[0], div.inputs[1]
    if exponential is None or total is None:
        return None
    summing, exp = total.producer(), exponential.producer()
    if not is_op(exp, "Exp") or not is_op(summing, "ReduceSum"):
        return None
    assert exp is not None and summing is not None
    if summing.inputs[0] is not exponential or exp.inputs[0] is None:
        return None
    scores = exp.inputs[0]
    axis = _reduced_axis(summing, scores, info)
    shift = _shifted_by_maximum(scores, info)
    if shift is None and axis is not None:
        return SoftmaxAnchor(scores, div.outputs[0], axis, (exp, summing, div), overflows=True)
    if shift is None or shift[0] != axis:
        return None
    return SoftmaxAnchor(shift[1], div.outputs[0], shift[0], (*shift[2], exp, summing, div))


def _shifted_by_maximum(value: ir.Value, info: ShapeInfo) -> tuple[int, ir.Value, tuple[ir.Node, ...]] | None:
    """For `x - max(x, axis)`: the axis, x and the two nodes."""
    sub = value.producer()
    if not is_op(sub, "Sub"):
        return None
    assert sub is not None
    scores, peak = sub.inputs[0], sub.inputs[1]
    maximum = peak.producer() if peak is not None else None
    if scores is None or not is_op(maximum, "ReduceMax"):
        return None
    assert maximum is not None
    axis = _reduced_axis(maximum, scores, info)
    return None if maximum.inputs[0] is not scores or axis is None else (axis, scores, (maximum, sub))


def _reduced_axis(node: ir.Node, scores: ir.Value, info: ShapeInfo) -> int | None:
    """The one axis a reduction with kept dimensions runs over."""
    shape = info.shape(scores)
    if shape is None or int_attr(node, "keepdims", 1) != 1:
        return None
    axes = reduced_axes(node)
    return axes[0] % len(shape) if axes is not None and len(axes) == 1 else None
