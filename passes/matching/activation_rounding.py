"""Roundings of scores and probabilities to 8 or 16 bits and back, as quantisers write them around
every operator (QDQ).

    q = (x / scale).round().add(zero_point).clamp(-128, 127)
    x = (q - zero_point) * scale

    rounded(x) := DequantizeLinear(QuantizeLinear(x, scale, zero_point), scale, zero_point)

Scale and zero point are constants of one number, equal in both nodes; the scale is finite and
greater than 0.

A rounding moves a number by up to half of the scale, and one outside of the range of the integers
by more. So it is left out only if the user says that scores and probabilities need not be rounded,
by `--assume drop-activation-quantisation`. The fused model then computes what the model computed
before these roundings were put into it. A row that is masked everywhere by -inf is then NaN, as it
was in that model; the integers have no -inf.

The roundings of query, key, value and of the result stay where they are: no attention is declined
for them.

Masks may widen the step of a rounding so far that all scores become one number, which breaks the
quantised model. The decline says so if an earlier rounding of the scores tells how large the scores
can be (`lost_scores`).

Refused: a rounding of which something else reads the integers, and another scale or zero point on
the way back, which multiplies or shifts the numbers.
"""

from __future__ import annotations

import math
from typing import TypeGuard

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import DROP_ROUNDINGS
from fa_compiler.passes.ir.nodes import (
    constant,
    data_readers,
    first,
    input_of,
    inputs_of,
    is_op,
    number_of,
    operand_at,
    reached,
    single,
    sole,
    without_none,
)
from fa_compiler.passes.layout.contraction import any_contraction
from fa_compiler.passes.ops.movers import LAYOUT_OPS
from fa_compiler.passes.values.facts import Facts

HINT = (
    f"fuse the model before it is quantised; or --assume {DROP_ROUNDINGS}, if scores and probabilities need not be "
    "rounded to integers"
)


SCORE_STEPS = (*LAYOUT_OPS, "Cast", "Dropout", "Add", "Sub", "Where", "Mul", "Div")
"""What may stand between a rounding of the scores and the softmax."""


def rounding_ends(node: ir.Node | None) -> ir.Node | None:
    """The QuantizeLinear of the rounding that this DequantizeLinear ends; None for other nodes."""
    if not _is_quantising(node, "DequantizeLinear"):
        return None
    start = operand_at(node, 0).producer()
    return start if rounding_starts(start) is node else None


def rounding_starts(node: ir.Node | None) -> ir.Node | None:
    """The DequantizeLinear of the rounding that this QuantizeLinear begins; None for other
    nodes."""
    if not _is_quantising(node, "QuantizeLinear") or node.outputs[0].is_graph_output():
        return None
    end, scale = sole(data_readers(node.outputs[0])), _number(node, 1)
    if not _is_quantising(end, "DequantizeLinear") or end.inputs[0] is not node.outputs[0]:
        return None
    if scale is None or not 0.0 < scale < math.inf:
        return None
    alike = all(_equal(input_of(node, place), input_of(end, place)) for place in (1, 2))
    return end if alike else None


def lost_scores(start: ir.Node, facts: Facts) -> str | None:
    """The sentence that says so if a rounding, which this QuantizeLinear begins, makes one number
    of all scores; None where that is not proven."""
    step, bounds = _number(start, 1), _bounds(operand_at(start, 0), facts)
    if step is None or bounds is None or np.rint(bounds[0] / step) != np.rint(bounds[1] / step):
        return None
    return (
        f"the masks have widened the step of the scores to {step:.3g}, and all scores, which lie between "
        f"{bounds[0]:.3g} and {bounds[1]:.3g}, are rounded to one number"
    )


def with_lost_scores(decline: Decline, value: ir.Value, facts: Facts) -> Decline:
    """A decline about roundings, with the sentence of `lost_scores` if one of those above a
    softmax's input has one."""
    if decline.hint != HINT:
        return decline
    starts = (rounding_ends(scores.producer()) for scores in reached([value], _scores_before, 64))
    sentence = first(lost_scores(start, facts) for start in without_none(starts))
    if sentence is None:
        return decline
    return Decline(decline.code, f"{decline.reason}; {sentence}", decline.culprit, decline.hint)


def _scores_before(value: ir.Value) -> list[ir.Value]:
    """The values that one step of the scores, or a rounding of them, makes a value of."""
    node = value.producer()
    if (start := rounding_ends(node)) is not None:
        return inputs_of(start)[:1]
    return inputs_of(node, *SCORE_STEPS)


def _bounds(value: ir.Value, facts: Facts) -> tuple[float, float] | None:
    """Between what numbers the scores in a value lie where no mask is, as an earlier rounding of
    their product says."""

    def upward(state: tuple[ir.Value, float]) -> list[tuple[ir.Value, float]]:
        return _scaled_operands(*state, facts)

    for scores, factor in reached([(value, 1.0)], upward, 64):
        start = rounding_ends(scores.producer())
        if start is None or not _is_product(start, facts):
            continue
        if (limits := _limits(start, facts)) is not None:
            ends = [limit * factor for limit in limits]
            return min(ends), max(ends)
    return None


def _scaled_operands(value: ir.Value, factor: float, facts: Facts) -> list[tuple[ir.Value, float]]:
    """The scores that one step makes a value of, and the factor on each up to the softmax, if a
    number has that factor behind the step."""
    node = value.producer()
    given = inputs_of(node)
    if is_op(node, *LAYOUT_OPS, "Cast", "Dropout", "Max", "Clip", "Sub"):
        return [(operand, factor) for operand in given[:1]]
    if is_op(node, "Add", "Sum", "Where"):
        return [(operand, factor) for operand in given]
    if not is_op(node, "Mul", "Div"):
        return []
    left, right = given
    number = facts.sets.only(right)
    if is_op(node, "Div"):
        return [(left, factor / number)] if number else []
    pairs = ((left, number), (right, facts.sets.only(left)))
    return [(scores, factor * other) for scores, other in pairs if other is not None]


def _limits(start: ir.Node, facts: Facts) -> tuple[float, float] | None:
    """The numbers that the smallest and the largest integer of a rounding stand for."""
    step, point, integers = _number(start, 1), _number(start, 2), facts.info.dtype(start.outputs[0])
    if step is None or point is None or integers is None:
        return None
    limits = np.iinfo(integers.numpy())
    return (int(limits.min) - point) * step, (int(limits.max) - point) * step


def _is_product(start: ir.Node, facts: Facts) -> bool:
    """Does a rounding begin with a product of two tensors? It may have been rounded before, and
    multiplied by a number."""
    value = operand_at(start, 0)
    while (node := value.producer()) is not None:
        if any_contraction(node, facts.info) is not None:
            return all(constant(operand) is None for operand in node.inputs)
        inner = rounding_ends(node)
        if inner is None and not is_op(node, *LAYOUT_OPS, "Mul", "Div", "Cast"):
            return False
        if is_op(node, "Mul", "Div") and not _is_single(operand_at(node, 1), facts):
            return False
        value = operand_at(inner or node, 0)
    return False


def _is_single(value: ir.Value, facts: Facts) -> bool:
    shape = facts.info.shape(value)
    return shape is not None and all(size.const == 1 for size in shape)


def _number(node: ir.Node, index: int) -> float | None:
    """A constant of one number; 0 for an absent zero point."""
    value = input_of(node, index)
    if value is None and index == 2:
        return 0.0
    number = number_of(value)
    return if_known(float, number)


def _is_quantising(node: ir.Node | None, op_type: str) -> TypeGuard[ir.Node]:
    """Is this such an operator, of ONNX or of com.microsoft, which has it for 16 bits?"""
    if node is None:
        return False
    return is_op(node, op_type) or (node.domain, node.op_type) == ("com.microsoft", op_type)


def _equal(one: ir.Value | None, other: ir.Value | None) -> bool:
    """Are these equal constants of one number, or both absent?"""
    left, right = single(one), single(other)
    if left is None or right is None:
        return one is other is None
    return left.dtype == right.dtype and bool(left.reshape(-1) == right.reshape(-1))
