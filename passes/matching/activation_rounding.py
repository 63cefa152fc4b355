"""Roundings of scores and probabilities to 8 or 16 bits and back, as quantisers write them around every operator (QDQ).

    rounded(x) := DequantizeLinear(QuantizeLinear(x, scale, zero_point), scale, zero_point)

Scale and zero point are constants of one number, equal in both nodes; the scale is finite and greater than 0.

A rounding moves a number by up to half of the scale, and one outside of the range of the integers by more. So it is
left out only if the user says that scores and probabilities need not be rounded, by
`--assume drop-activation-quantisation`. The fused model then computes what the model computed before these roundings
were put into it. A row that is masked everywhere by -inf is then NaN, as it was in that model; the integers have no
-inf.

The roundings of query, key, value and of the result stay where they are: no attention is declined for them.

Masks may widen the step of a rounding so far that all scores become one number, which breaks the quantised model. That
is said if an earlier rounding of the scores tells how large they can be (`lost_scores`).

Refused: a rounding of which something else reads the integers, and another scale or zero point on the way back, which
multiplies or shifts the numbers.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import DROP_ROUNDINGS
from fa_compiler.passes.ir.nodes import constant, data_readers, input_of, is_op, reached
from fa_compiler.passes.layout.contraction import any_contraction
from fa_compiler.passes.ops.movers import LAYOUT_OPS
from fa_compiler.passes.values.facts import Facts

HINT = (
    f"fuse the model before it is quantised; or --assume {DROP_ROUNDINGS}, if scores and probabilities need not be "
    "rounded to integers"
)


def rounding_ends(node: ir.Node) -> ir.Node | None:
    """The QuantizeLinear of the rounding that this DequantizeLinear ends; None for other nodes."""
    value = input_of(node, 0) if _is(node, "DequantizeLinear") else None
    start = None if value is None else value.producer()
    return start if start is not None and rounding_starts(start) is node else None


def rounding_starts(node: ir.Node) -> ir.Node | None:
    """The DequantizeLinear of the rounding that this QuantizeLinear begins; None for other nodes."""
    if not _is(node, "QuantizeLinear") or node.outputs[0].is_graph_output():
        return None
    readers = data_readers(node.outputs[0])
    end = readers[0] if len(readers) == 1 else None
    if end is None or not _is(end, "DequantizeLinear") or end.inputs[0] is not node.outputs[0]:
        return None
    scale = constant(input_of(node, 1))
    if scale is None or scale.size != 1 or not 0.0 < float(scale.reshape(-1)[0]) < np.inf:
        return None
    return end if all(_equal(input_of(node, index), input_of(end, index)) for index in (1, 2)) else None


def lost_scores(start: ir.Node, facts: Facts) -> str | None:
    """The sentence that says so if a rounding, which this QuantizeLinear begins, makes one number of all scores; None
    where that is not proven."""
    step = _number(start, 1)
    bounds = None if start.inputs[0] is None else _bounds(start.inputs[0], facts)
    if step is None or bounds is None or np.rint(bounds[0] / step) != np.rint(bounds[1] / step):
        return None
    return (
        f"the masks have widened the step of the scores to {step:.3g}, and all scores, which lie between "
        f"{bounds[0]:.3g} and {bounds[1]:.3g}, are rounded to one number"
    )


def with_lost_scores(decline: Decline, value: ir.Value, facts: Facts) -> Decline:
    """A decline about roundings, with the sentence of `lost_scores` if one of those above a softmax's input has one."""

    def upward(each: ir.Value) -> list[ir.Value]:
        node = each.producer()
        start = None if node is None else rounding_ends(node)
        passed = start is not None or is_op(node, *LAYOUT_OPS, "Cast", "Dropout", "Add", "Sub", "Where", "Mul", "Div")
        operands = () if node is None or not passed else node.inputs if start is None else start.inputs[:1]
        return [operand for operand in operands if operand is not None]

    if decline.hint != HINT:
        return decline
    ends = (each.producer() for each in reached([value], upward, 64))
    starts = [start for node in ends if node is not None and (start := rounding_ends(node)) is not None]
    sentences = [sentence for start in starts if (sentence := lost_scores(start, facts)) is not None]
    reason = "; ".join((decline.reason, *sentences[:1]))
    return Decline(decline.code, reason, decline.culprit, decline.hint)


def _bounds(value: ir.Value, facts: Facts) -> tuple[float, float] | None:
    """Between what numbers the scores in a value lie where no mask is, as an earlier rounding of their product says."""

    def upward(state: tuple[ir.Value, float]) -> list[tuple[ir.Value, float]]:
        each, factor = state
        node = each.producer()
        if node is None or not node.inputs:
            return []
        operands = [operand for operand in node.inputs if operand is not None]
        if is_op(node, *LAYOUT_OPS, "Cast", "Dropout", "Max", "Clip"):
            return [(operands[0], factor)]
        if is_op(node, "Add", "Sum", "Sub", "Where"):
            return [(operand, factor) for operand in operands if not is_op(node, "Sub") or operand is operands[0]]
        numbers = [facts.sets.only(operand) for operand in operands]
        if is_op(node, "Div") and numbers[1]:
            return [(operands[0], factor / numbers[1])]
        others = ((operands[0], numbers[1]), (operands[1], numbers[0])) if is_op(node, "Mul") else ()
        return [(operand, factor * number) for operand, number in others if number is not None]

    for each, factor in reached([(value, 1.0)], upward, 64):
        node = each.producer()
        start = None if node is None else rounding_ends(node)
        if start is None or not _is_product(start, facts):
            continue
        step, point, integers = _number(start, 1), _number(start, 2), facts.info.dtype(start.outputs[0])
        if step is not None and point is not None and integers is not None:
            limits = np.iinfo(integers.numpy())
            ends = [(int(limit) - point) * step * factor for limit in (limits.min, limits.max)]
            return min(ends), max(ends)
    return None


def _is_product(start: ir.Node, facts: Facts) -> bool:
    """Does a rounding begin with a product of two tensors? It may have been rounded before, and multiplied by a
    number."""
    value = start.inputs[0]
    while value is not None and (node := value.producer()) is not None:
        if any_contraction(node, facts.info) is not None:
            return all(constant(operand) is None for operand in node.inputs)
        if not is_op(node, *LAYOUT_OPS, "Mul", "Div", "Cast") and rounding_ends(node) is None:
            return False
        if is_op(node, "Mul", "Div") and not _is_single(node.inputs[1], facts):
            return False
        inner = rounding_ends(node)
        value = (inner or node).inputs[0]
    return False


def _is_single(value: ir.Value | None, facts: Facts) -> bool:
    shape = None if value is None else facts.info.shape(value)
    return shape is not None and all(size.const == 1 for size in shape)


def _number(node: ir.Node, index: int) -> float | None:
    """A constant of one number; 0 for an absent zero point."""
    value = input_of(node, index)
    array = constant(value)
    if array is None or array.size != 1:
        return 0.0 if value is None and index == 2 else None
    return float(array.reshape(-1)[0])


def _is(node: ir.Node, op_type: str) -> bool:
    """Is this such an operator, of ONNX or of com.microsoft, which has it for 16 bits?"""
    return is_op(node, op_type) or (node.domain, node.op_type) == ("com.microsoft", op_type)


def _equal(one: ir.Value | None, other: ir.Value | None) -> bool:
    """Are these equal constants of one number, or both absent?"""
    left, right = constant(one), constant(other)
    if left is None or right is None:
        return one is other is None
    return left.size == right.size == 1 and left.dtype == right.dtype and bool(left.reshape(-1) == right.reshape(-1))
