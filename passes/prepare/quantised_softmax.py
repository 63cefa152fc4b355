"""Attention in operators on integers (matching/integer_steps.py): operators in float32 take their
places.

Each operator becomes the operator in float32 that it stands for, between a DequantizeLinear of each
operand and a QuantizeLinear of the result. This is the form of QuantFormat.QDQ. The ordinary
matcher leaves out the roundings of scores and probabilities (matching/activation_rounding.py) only
if the user vouches for that. So the change is made only then. Query, key, value and the result keep
their integers.

The change is a trial: it is kept if the ordinary matcher then takes the attention
(substitutions.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from fa_compiler.passes.answer.decline import label
from fa_compiler.passes.answer.options import DROP_ROUNDINGS
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.emit.operators import AttrValue
from fa_compiler.passes.emit.trial import Trial
from fa_compiler.passes.ir.nodes import is_op, nodes_of_type
from fa_compiler.passes.matching.attention import Matcher
from fa_compiler.passes.matching.integer_steps import Integers, Step, integer_steps, is_contrib
from fa_compiler.passes.matching.softmax import SoftmaxAnchor
from fa_compiler.passes.ops.movers import LAYOUT_OPS
from fa_compiler.passes.prepare.substitutions import Substitution, Substitutions, is_match_at

SINCE = 13
"""The first opset whose Softmax has one axis, and whose DequantizeLinear takes a scale of one
number."""


def take_apart(
    graph: ir.Graph,
    softmaxes: Sequence[SoftmaxAnchor],
    matcher: Matcher,
    new_builder: Callable[[], Builder],
) -> Substitutions:
    """Put operators in float32 in the place of those on integers, where the attention then matches.
    The graph stays as it is where there are none."""
    result, info = Substitutions(), matcher.facts.info
    if DROP_ROUNDINGS not in matcher.facts.options.assume:
        return result
    for node in [candidate for candidate in graph if is_contrib(candidate, "QLinearSoftmax")]:
        steps, builder = integer_steps(node, info), new_builder()
        if steps is None or builder.opset < SINCE:
            continue
        with Trial(builder) as trial:
            name, made = label(node), _emitted(steps, builder)
            (softmax,) = nodes_of_type(builder.nodes, "Softmax")
            replaced = ((step.result.value, made[step.result.value]) for step in steps)
            trial.replace(*replaced, nodes=[step.node for step in steps])
            if is_match_at(softmax, matcher) and (change := trial.keep()) is not None:
                softmax.name = name
                result.add(Substitution(change, assumed=(DROP_ROUNDINGS,)), softmax)
    return result


def _emitted(steps: list[Step], builder: Builder) -> dict[ir.Value, ir.Value]:
    """The values that take the places of the results."""
    made: dict[ir.Value, ir.Value] = {}
    for step in steps:
        operands = [
            _dequantised(integers, made.get(integers.value, integers.value), builder)
            for integers in step.operands
        ]
        attributes: dict[str, AttrValue] = {"axis": -1} if step.op_type == "Softmax" else {}
        others: list[ir.Value | None] = []
        if is_op(step.node, *LAYOUT_OPS):
            others = list(step.node.inputs[1:])
            attributes = {
                integers.name: integers.value for integers in step.node.attributes.values()
            }
        computed = builder.op(
            step.op_type, [*operands, *others], attributes, dtype=ir.DataType.FLOAT, stays=True
        )
        form = step.result
        made[form.value] = builder.op("QuantizeLinear", [computed, form.scale, form.point])
    return made


def _dequantised(integers: Integers, value: ir.Value, builder: Builder) -> ir.Value:
    """The real numbers that a value of such integers stands for."""
    return builder.op("DequantizeLinear", [value, integers.scale, integers.point])
