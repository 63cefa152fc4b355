"""Attention in operators on integers (matching/integer_steps.py): operators in float32 take their places.

Each operator becomes the one in float32 between a DequantizeLinear of each operand and a QuantizeLinear of its result,
which is what it stands for, and the form of QuantFormat.QDQ. The roundings of scores and probabilities that this leaves
are left out by the ordinary matcher (matching/activation_rounding.py), and only if the user vouches for it. So the
change is made only then. Query, key, value and the result keep their integers.

The change is made first, so that the ordinary matcher can say whether the attention matches; if not, it is undone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import onnx_ir as ir

from fa_compiler.passes.answer.decline import label
from fa_compiler.passes.answer.options import DROP_ROUNDINGS
from fa_compiler.passes.emit.build import AttrValue, Builder
from fa_compiler.passes.ir.nodes import is_op
from fa_compiler.passes.ir.surgery import ORDER
from fa_compiler.passes.matching.attention import Matcher
from fa_compiler.passes.matching.integer_steps import Integers, Step, integer_steps, is_contrib
from fa_compiler.passes.matching.softmax import anchors
from fa_compiler.passes.ops.movers import LAYOUT_OPS
from fa_compiler.passes.prepare.differences import Move, is_match

SINCE = 13
"""The first opset whose Softmax has one axis, and whose DequantizeLinear takes a scale of one number."""


def take_apart(graph: ir.Graph, matcher: Matcher, new_builder: Callable[[], Builder]) -> dict[ir.Node, Move]:
    """Put operators in float32 in the place of those on integers, where the attention then matches. Returns the changes
    by the softmaxes. The graph stays as it is where there are none."""
    moves: dict[ir.Node, Move] = {}
    if DROP_ROUNDINGS not in matcher.facts.options.assume:
        return moves
    for node in [each for each in graph if is_contrib(each, "QLinearSoftmax")]:
        steps = integer_steps(node, matcher.facts.info)
        builder = new_builder()
        if steps is not None and builder.opset >= SINCE:
            softmax, move = _moved(graph, steps, matcher, builder)
            moves.update({} if move is None else {softmax: move})
    return moves


def _moved(graph: ir.Graph, steps: list[Step], matcher: Matcher, builder: Builder) -> tuple[ir.Node, Move | None]:
    mark = builder.names.mark
    (old_softmax,) = (step.node for step in steps if step.op_type == "Softmax")
    name, made = label(old_softmax), _emitted(steps, builder)
    (new_softmax,) = (node for node in builder.nodes if is_op(node, "Softmax"))
    replaced = ((step.result.value, made[step.result.value]) for step in steps)
    move = replace(Move.of_nodes([step.node for step in steps], *replaced), assumed=(DROP_ROUNDINGS,))
    graph.meta[ORDER] = {}  # the graph is not sorted now
    anchor = next((each for each in anchors(graph, matcher.facts.info) if each.node is new_softmax), None)
    kept = move.settle(graph, anchor is not None and is_match(anchor, matcher), builder, mark)
    if kept is not None:
        new_softmax.name = name
    return new_softmax, kept


def _emitted(steps: list[Step], builder: Builder) -> dict[ir.Value, ir.Value]:
    """The values that take the places of the results."""
    made: dict[ir.Value, ir.Value] = {}
    for step in steps:
        operands = [_dequantised(each, made.get(each.value, each.value), builder) for each in step.operands]
        attributes: dict[str, AttrValue] = {"axis": -1} if step.op_type == "Softmax" else {}
        others: list[ir.Value | None] = []
        if is_op(step.node, *LAYOUT_OPS):
            others = list(step.node.inputs[1:])
            attributes = {each.name: each.value for each in step.node.attributes.values()}
        computed = builder.op(step.op_type, [*operands, *others], ir.DataType.FLOAT, attributes, stays=True)
        form = step.result
        made[form.value] = builder.op(
            "QuantizeLinear", [computed, form.scale, form.point], builder.info.dtype(form.point)
        )
    return made


def _dequantised(integers: Integers, value: ir.Value, builder: Builder) -> ir.Value:
    """The real numbers that a value of such integers stands for."""
    return builder.op("DequantizeLinear", [value, integers.scale, integers.point], ir.DataType.FLOAT)
