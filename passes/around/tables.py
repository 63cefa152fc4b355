"""What is proven of the tables of cosines and sines of rotary positions.

Grammar; the code cites the numbers of the cases:

    table, whose halves along the last axis are equal :=
      1     Concat(f, f)                       along the last axis
      2   | numbers that are known             their halves are equal
      3   | Cos(table) | Sin(table) | Neg(table) | Cast(table) | Identity(table)
      4   | Unsqueeze(table)                   not of the last axis
      5   | Gather(table, rows)                along the first of several axes
      6   | Mul(table, number)                 in either order, one number
    bounded, never larger than 1 :=
      7     Cos(x) | Sin(x)
      8   | numbers that are known             none of them is larger
      9   | Cast(bounded) | Identity(bounded) | Neg(bounded) | Unsqueeze(bounded) | Gather(bounded, rows)
     10   | Concat(bounded, ...)
     11   | Mul(bounded, number)               of at most 1
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.ir.nodes import constant, int_attr, is_op, operand_at, operand_orders, operands, places_of
from fa_compiler.passes.values.shapes import ShapeInfo

DEEPEST = 12
"""The operators between a table and what its halves are made of."""
LARGEST = 1 << 23
"""The most numbers of a constant table that are compared."""
_POINTWISE = ("Cos", "Sin", "Neg", "Cast", "Identity")
_PASSED_ON = ("Cast", "Identity", "Neg", "Unsqueeze", "Gather")


def has_equal_halves(table: ir.Value, info: ShapeInfo) -> bool:
    """Is it proven that the halves of a table along its last axis are equal?"""
    value: ir.Value | None = table
    for _ in range(DEEPEST):
        if value is None:
            return False
        numbers, rank = constant(value, LARGEST), len(info.shape(value) or ())
        if numbers is not None:  # 2
            return numbers.ndim > 0 and _are_equal(numbers)
        node = value.producer()
        if is_op(node, "Concat"):
            parts = operands(node)
            return len(parts) == 2 and parts[0] is parts[1] and int_attr(node, "axis", 0) in (-1, rank - 1)  # 1
        value = _made_of(node, rank, info)
    return False


def _made_of(node: ir.Node | None, rank: int, info: ShapeInfo) -> ir.Value | None:
    """The operand of the maker of a table of this rank whose halves are equal if those of the table are; None where
    this is not known."""
    if is_op(node, *_POINTWISE):  # 3
        return operand_at(node, 0)
    if is_op(node, "Unsqueeze") and rank - 1 not in (places_of(node, rank) or [rank - 1]):  # 4
        return operand_at(node, 0)
    if is_op(node, "Gather") and int_attr(node, "axis", 0) == 0 and len(info.shape(node.inputs[0]) or ()) > 1:  # 5
        return operand_at(node, 0)
    factors = (other for number, other in operand_orders(node, "Mul") if info.scalar(number) is not None)
    return next(factors, None)  # 6


def is_bounded(table: ir.Value, info: ShapeInfo, depth: int = DEEPEST) -> bool:
    """Is it proven that no number of a table is larger than 1?"""
    node, numbers = table.producer(), constant(table, LARGEST)
    if numbers is not None:  # 8
        return bool(np.all(np.abs(numbers.astype(np.float64)) <= 1))
    if is_op(node, "Cos", "Sin"):  # 7
        return True
    if node is None or not depth:
        return False
    if is_op(node, "Concat"):  # 10
        return all(is_bounded(part, info, depth - 1) for part in dict.fromkeys(operands(node)))
    if is_op(node, "Mul"):
        return any(
            abs(info.scalar(number) or 2.0) <= 1 and is_bounded(other, info, depth - 1)  # 11
            for number, other in operand_orders(node, "Mul")
        )
    return is_op(node, *_PASSED_ON) and is_bounded(operand_at(node, 0), info, depth - 1)  # 9


def _are_equal(numbers: np.ndarray) -> bool:
    size = numbers.shape[-1]
    return size % 2 == 0 and bool(np.array_equal(numbers[..., : size // 2], numbers[..., size // 2 :]))
