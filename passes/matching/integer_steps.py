"""Attention in the operators on integers that ONNX Runtime's quantiser writes with QuantFormat.QOperator.

Grammar; the code cites the numbers of the cases. Each of these operators computes in real numbers what its name says,
of integers that stand for (integer - zero point) * scale, and rounds the result to integers again:

    softmax :=
      1     QLinearSoftmax(scores)                         of com.microsoft, along the last axis
    scores, upwards from the softmax :=
      2     QLinearMatMul(query, key)                      where the search ends
      3   | QLinearAdd(scores, x) | QLinearMul(scores, x)  of com.microsoft, operands in either order
    product, the only reader of the softmax :=
      4     QLinearMatMul(probabilities, values)

All scales and zero points are one number. quantised_softmax.py puts operators in float32 in their place.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.nodes import constant, distinct_consumers, input_of, int_attr, is_op
from fa_compiler.passes.values.shapes import ShapeInfo

CONTRIB = "com.microsoft"
SUMS = {"QLinearAdd": "Add", "QLinearMul": "Mul"}
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
    """An operator on integers: what it computes, its operands, and its result."""

    node: ir.Node
    op_type: str
    operands: tuple[Integers, ...]
    result: Integers


def is_contrib(node: ir.Node | None, *op_types: str) -> bool:
    """Is the node one of these operators of com.microsoft?"""
    return node is not None and node.domain == CONTRIB and node.op_type in op_types


def integer_steps(softmax: ir.Node, info: ShapeInfo) -> list[Step] | None:
    """The operators of the grammar around a QLinearSoftmax, in the order of computation; None where it does not fit."""
    last = _step(softmax, info)
    readers = distinct_consumers(softmax.outputs[0])
    product = _step(readers[0], info) if len(readers) == 1 and not softmax.outputs[0].is_graph_output() else None
    shape = info.shape(softmax.outputs[0])
    if last is None or product is None or product.op_type != "MatMul" or shape is None:
        return None
    if int_attr(softmax, "axis", -1) not in (-1, len(shape) - 1) or product.operands[0].value is not softmax.outputs[0]:
        return None
    above = _scores(last.operands[0].value, info, LONGEST)
    return None if above is None else [*above, last, product]


def _scores(value: ir.Value, info: ShapeInfo, left: int) -> list[Step] | None:
    """The operators that make scores (2 and 3)."""
    node = value.producer()
    step = None if node is None or left == 0 or value.is_graph_output() else _step(node, info)
    if step is None or step.op_type == "Softmax":
        return None
    if step.op_type == "MatMul":  # 2
        return [step]
    for operand in step.operands:  # 3
        if (above := _scores(operand.value, info, left - 1)) is not None:
            return [*above, step]
    return None


def _step(node: ir.Node, info: ShapeInfo) -> Step | None:
    """An operator on integers; None for other nodes, and where a scale or zero point is missing or several numbers."""
    if is_op(node, "QLinearMatMul"):
        op_type = "MatMul"
    elif is_contrib(node, *SUMS):
        op_type = SUMS[node.op_type]
    elif is_contrib(node, "QLinearSoftmax"):
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
