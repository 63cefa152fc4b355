"""Attention in the operators on integers that ONNX Runtime's quantiser writes with
QuantFormat.QOperator.

    p = qlinear_softmax(qlinear_add(qlinear_matmul(q, k), mask))
    output = qlinear_matmul(p, v)

Grammar; the code cites the numbers of the cases. An integer stands for (integer - zero point) *
scale. The operators compute with these real numbers, and round the result to integers again:

    softmax :=
      1     QLinearSoftmax(scores)                         of com.microsoft, along the last axis
    scores, upwards from the softmax :=
      2     QLinearMatMul(query, key)                      where the search ends
      3   | QLinearAdd(scores, x) | QLinearMul(scores, x)  of com.microsoft, operands in either
                                                           order
      4   | layout(scores)                                 of the integers, which are the same ones
                                                           after it
      5   | QuantizeLinear(between(DequantizeLinear(scores)))    `between` are operators in float32,
                                                           which stay
    probabilities, downwards from the softmax :=
      6     softmax | layout(probabilities)
      7   | QuantizeLinear(between(DequantizeLinear(probabilities)))    as dynamo's guard against
                                                           NaN
    product, the only reader of the probabilities :=
      8     QLinearMatMul(probabilities, values)

All scales and zero points are one number. quantised_softmax.py puts operators in float32 in their
place.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import (
    data_readers,
    first,
    input_of,
    inputs_of,
    int_attr,
    is_op,
    nodes_of_type,
    number_of,
    operand_at,
    outputs_of,
    producer,
    reached,
    sole,
    without_none,
)
from fa_compiler.passes.ir.signatures import unknown_part
from fa_compiler.passes.ops.elementwise import FOUR_OPERATIONS
from fa_compiler.passes.ops.movers import LAYOUT_OPS
from fa_compiler.passes.values.shapes import ShapeInfo

CONTRIB = "com.microsoft"
SUMS = ("QLinearAdd", "QLinearMul")
BETWEEN = (
    *LAYOUT_OPS,
    "Cast",
    *FOUR_OPERATIONS,
    "Neg",
    "Where",
    "Max",
    "Min",
    "Clip",
    "IsNaN",
    "Expand",
)
"""5 and 7: operators in float32. The attention matcher, which follows, says what they may be."""
LONGEST = 16
"""More operators than this are not taken for one attention."""


@dataclass(frozen=True)
class Integers:
    """A tensor of integers as an operator takes or gives it: the value, its scale and its zero
    point."""

    value: ir.Value
    scale: ir.Value
    point: ir.Value


@dataclass(frozen=True)
class Step:
    """An operator on integers: the operator that it stands for, the operands that are integers of
    numbers, and the result. A layout operator has the other inputs of its node."""

    node: ir.Node
    op_type: str
    operands: tuple[Integers, ...]
    result: Integers


def is_contrib(node: ir.Node | None, *op_types: str) -> bool:
    """Is the node one of these operators of com.microsoft, with no part that is not known?"""
    return (
        node is not None
        and node.domain == CONTRIB
        and node.op_type in op_types
        and unknown_part(node) is None
    )


@dataclass(frozen=True)
class Form:
    """The inputs of an operator on integers: the operator that it stands for, the places of the
    operands, and the place of the result's scale. A scale stands behind each operand, and a zero
    point behind each scale."""

    op_type: str
    operands: tuple[int, ...]
    result: int


FORMS = {
    "QLinearMatMul": Form("MatMul", (0, 3), 6),
    "QLinearAdd": Form("Add", (0, 3), 6),
    "QLinearMul": Form("Mul", (0, 3), 6),
    "QLinearSoftmax": Form("Softmax", (0,), 3),  # 1
}


def integer_steps(softmax: ir.Node, info: ShapeInfo) -> list[Step] | None:
    """The operators of the grammar around a QLinearSoftmax, in the order of computation; None where
    it does not fit."""
    last, shape = _step(softmax, info), info.shape(softmax.outputs[0])
    if last is None or shape is None or int_attr(softmax, "axis", -1) not in (-1, len(shape) - 1):
        return None
    above = _scores(last.operands[0].value, info, LONGEST, set())
    below = above and _to_product(last.result, info, LONGEST)
    return above and below and [*above, last, *below]


def _scores(value: ir.Value, info: ShapeInfo, depth: int, seen: set[ir.Value]) -> list[Step] | None:
    """The operators that make scores (2 to 5). The last one makes these integers, or what they are
    rounded from. What is in `seen` was searched in vain."""
    node = value.producer()
    if node is None or depth == 0 or value.is_graph_output() or value in seen:
        return None
    seen.add(value)
    step = _step(node, info)
    if step is not None and step.op_type == "MatMul":  # 2
        return [step]
    above = first(_scores(source, info, depth - 1, seen) for source in _scores_before(node, step))
    if above is None or is_op(node, "QuantizeLinear"):
        return above
    return [*above, step or _layout_step(node, above[-1].result)]


def _scores_before(node: ir.Node, step: Step | None) -> list[ir.Value]:
    """Cases 3 to 5: the integers that may be the scores from which a node makes scores; `step` is
    what it computes."""
    if is_op(node, "QuantizeLinear"):  # 5
        makers = map(producer, reached(inputs_of(node)[:1], _operands_between, LONGEST))
        return [operand_at(maker, 0) for maker in nodes_of_type(makers, "DequantizeLinear")]
    if is_op(node, *LAYOUT_OPS):  # 4
        return inputs_of(node)[:1]
    if step is None or step.op_type == "Softmax":
        return []
    return [operand.value for operand in step.operands]  # 3


def _to_product(probabilities: Integers, info: ShapeInfo, depth: int) -> list[Step] | None:
    """The operators that follow the softmax, up to the product with the values (6 to 8)."""
    value = probabilities.value
    node = sole(data_readers(value))
    if node is None or depth == 0 or value.is_graph_output():
        return None
    if is_op(node, "DequantizeLinear"):  # 7
        rounded = _rounded_after(node, info)
        return None if rounded is None else _to_product(rounded, info, depth - 1)
    if is_op(node, *LAYOUT_OPS):  # 6
        step = _layout_step(node, probabilities)
        below = _to_product(step.result, info, depth - 1)
        return below and [step, *below]
    product = _step(node, info)  # 8
    if product is None or product.op_type != "MatMul" or product.operands[0].value is not value:
        return None
    return [product]


def _rounded_after(start: ir.Node, info: ShapeInfo) -> Integers | None:
    """Case 7: the integers that the results of a DequantizeLinear are rounded to, where only one
    node does so."""
    behind = reached(start.outputs, _results_between, LONGEST)
    readers = dict.fromkeys(reader for value in behind for reader in data_readers(value))
    end = sole(nodes_of_type(readers, "QuantizeLinear"))
    return None if end is None else _integers(end.outputs[0], end, 1, info)


def _operands_between(value: ir.Value) -> list[ir.Value]:
    node = value.producer()
    return inputs_of(node, *BETWEEN)


def _results_between(value: ir.Value) -> list[ir.Value]:
    return outputs_of(nodes_of_type(data_readers(value), *BETWEEN))


def _layout_step(node: ir.Node, form: Integers) -> Step:
    """A layout operator on integers of this form."""
    operand = Integers(operand_at(node, 0), form.scale, form.point)
    return Step(node, node.op_type, (operand,), Integers(node.outputs[0], form.scale, form.point))


def _step(node: ir.Node, info: ShapeInfo) -> Step | None:
    """An operator on integers; None for other nodes, and where a scale or zero point is missing or
    several numbers."""
    form = FORMS.get(node.op_type)
    if form is None or not (
        is_op(node, "QLinearMatMul") or is_contrib(node, "QLinearSoftmax", *SUMS)
    ):
        return None
    operands = [_integers(input_of(node, place), node, place + 1, info) for place in form.operands]
    result = _integers(node.outputs[0], node, form.result, info)
    known = tuple(without_none(operands))
    if result is None or len(known) < len(operands):
        return None
    return Step(node, form.op_type, known, result)


def _integers(
    value: ir.Value | None, node: ir.Node, place: int, info: ShapeInfo
) -> Integers | None:
    """The tensor whose scale and zero point are the inputs from `place` on; None where they are not
    one number each."""
    scale, point = operand_at(node, place), operand_at(node, place + 1)
    if value is None or None in map(number_of, (scale, point)):
        return None
    return Integers(value, scale, point) if info.dtype(scale) == ir.DataType.FLOAT else None
