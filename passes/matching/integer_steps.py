"""Attention in the operators on integers that ONNX Runtime's quantiser writes with QuantFormat.QOperator.

Grammar; the code cites the numbers of the cases. Each of these operators computes in real numbers what its name says,
of integers that stand for (integer - zero point) * scale, and rounds the result to integers again:

    softmax :=
      1     QLinearSoftmax(scores)                         of com.microsoft, along the last axis
    scores, upwards from the softmax :=
      2     QLinearMatMul(query, key)                      where the search ends
      3   | QLinearAdd(scores, x) | QLinearMul(scores, x)  of com.microsoft, operands in either order
      4   | layout(scores)                                 of the integers, which are the same ones after it
      5   | QuantizeLinear(between(DequantizeLinear(scores)))    `between` are operators in float32, which stay
    probabilities, downwards from the softmax :=
      6     softmax | layout(probabilities)
      7   | QuantizeLinear(between(DequantizeLinear(probabilities)))    as dynamo's guard against NaN
    product, the only reader of the probabilities :=
      8     QLinearMatMul(probabilities, values)

All scales and zero points are one number. quantised_softmax.py puts operators in float32 in their place.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import constant, data_readers, input_of, int_attr, is_op, producer, reached
from fa_compiler.passes.ir.signatures import unknown_part
from fa_compiler.passes.ops.movers import LAYOUT_OPS
from fa_compiler.passes.values.shapes import ShapeInfo

CONTRIB = "com.microsoft"
SUMS = {"QLinearAdd": "Add", "QLinearMul": "Mul"}
BETWEEN = (*LAYOUT_OPS, "Cast", "Add", "Sub", "Mul", "Div", "Neg", "Where", "Max", "Min", "Clip", "IsNaN", "Expand")
"""5 and 7: operators in float32. The attention matcher, which follows, says what they may be."""
LONGEST = 16
"""More operators than this are not taken for one attention."""


@dataclass(frozen=True)
class Integers:
    """A tensor of integers as an operator takes or gives it: the value, its scale and its zero point."""

    value: ir.Value
    scale: ir.Value
    point: ir.Value


@dataclass(frozen=True)
class Step:
    """An operator on integers: what it computes, its operands that are integers of numbers, and its result. A layout
    operator has the other inputs of its node."""

    node: ir.Node
    op_type: str
    operands: tuple[Integers, ...]
    result: Integers


def is_contrib(node: ir.Node | None, *op_types: str) -> bool:
    """Is the node one of these operators of com.microsoft, with no part that is not known?"""
    return node is not None and node.domain == CONTRIB and node.op_type in op_types and unknown_part(node) is None


def integer_steps(softmax: ir.Node, info: ShapeInfo) -> list[Step] | None:
    """The operators of the grammar around a QLinearSoftmax, in the order of computation; None where it does not fit."""
    last, shape = _step(softmax, info), info.shape(softmax.outputs[0])
    if last is None or shape is None or int_attr(softmax, "axis", -1) not in (-1, len(shape) - 1):
        return None
    above = _scores(last.operands[0].value, info, LONGEST, set())
    below = None if above is None else _to_product(last.result, info, LONGEST)
    return None if above is None or below is None else [*above, last, *below]


def _scores(value: ir.Value, info: ShapeInfo, left: int, seen: set[ir.Value]) -> list[Step] | None:
    """The operators that make scores (2 to 5). The last one makes these integers, or what they are rounded from. What
    is in `seen` was searched in vain."""
    node = value.producer()
    if node is None or left == 0 or value.is_graph_output() or value in seen:
        return None
    seen.add(value)
    if is_op(node, "QuantizeLinear"):  # 5
        starts = map(producer, reached(node.inputs[:1], _operands_between, LONGEST))
        sources = [each.inputs[0] for each in starts if is_op(each, "DequantizeLinear")]
        found = (_scores(each, info, left - 1, seen) for each in sources if each is not None)
        return next((steps for steps in found if steps is not None), None)
    if is_op(node, *LAYOUT_OPS) and node.inputs[0] is not None:  # 4
        above = _scores(node.inputs[0], info, left - 1, seen)
        return None if above is None else [*above, _moving(node, above[-1].result)]
    step = _step(node, info)
    if step is None or step.op_type == "Softmax":
        return None
    if step.op_type == "MatMul":  # 2
        return [step]
    for operand in step.operands:  # 3
        if (above := _scores(operand.value, info, left - 1, seen)) is not None:
            return [*above, step]
    return None


def _to_product(probabilities: Integers, info: ShapeInfo, left: int) -> list[Step] | None:
    """The operators that follow the softmax, up to the product with the values (6 to 8)."""
    value = probabilities.value
    readers = data_readers(value)
    if len(readers) != 1 or left == 0 or value.is_graph_output():
        return None
    (node,) = readers
    if is_op(node, "DequantizeLinear"):  # 7
        behind = reached(node.outputs, _results_between, LONGEST)
        ends = dict.fromkeys(each for value in behind for each in data_readers(value) if is_op(each, "QuantizeLinear"))
        forms = [_integers(end.outputs[0], end, 1, info) for end in ends]
        return _to_product(forms[0], info, left - 1) if len(forms) == 1 and forms[0] is not None else None
    if is_op(node, *LAYOUT_OPS):  # 6
        step = _moving(node, probabilities)
        below = _to_product(step.result, info, left - 1)
        return None if below is None else [step, *below]
    product = _step(node, info)  # 8
    found = product is not None and product.op_type == "MatMul" and product.operands[0].value is value
    return [product] if product is not None and found else None


def _operands_between(value: ir.Value | None) -> list[ir.Value | None]:
    node = producer(value)
    return list(node.inputs) if is_op(node, *BETWEEN) else []


def _results_between(value: ir.Value) -> list[ir.Value]:
    return [output for node in data_readers(value) if is_op(node, *BETWEEN) for output in node.outputs]


def _moving(node: ir.Node, form: Integers) -> Step:
    """A layout operator on integers of this form."""
    assert node.inputs[0] is not None
    operand = Integers(node.inputs[0], form.scale, form.point)
    return Step(node, node.op_type, (operand,), Integers(node.outputs[0], form.scale, form.point))


def _step(node: ir.Node, info: ShapeInfo) -> Step | None:
    """An operator on integers; None for other nodes, and where a scale or zero point is missing or several numbers."""
    if is_op(node, "QLinearMatMul"):
        op_type = "MatMul"
    elif is_contrib(node, *SUMS):
        op_type = SUMS[node.op_type]
    elif is_contrib(node, "QLinearSoftmax"):  # 1
        op_type = "Softmax"
    else:
        return None
    operands = [_integers(input_of(node, k), node, k + 1, info) for k in ((0,) if op_type == "Softmax" else (0, 3))]
    result = _integers(node.outputs[0], node, 3 if op_type == "Softmax" else 6, info)
    known = tuple(each for each in operands if each is not None)
    return Step(node, op_type, known, result) if result is not None and len(known) == len(operands) else None


def _integers(value: ir.Value | None, node: ir.Node, place: int, info: ShapeInfo) -> Integers | None:
    """The tensor whose scale and zero point are the inputs from `place` on; None where they are not one number each."""
    scale, point = input_of(node, place), input_of(node, place + 1)
    numbers = [constant(each, limit=1) for each in (scale, point)]
    if value is None or scale is None or point is None or any(each is None or each.size != 1 for each in numbers):
        return None
    return Integers(value, scale, point) if info.dtype(scale) == ir.DataType.FLOAT else None
