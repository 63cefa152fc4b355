"""What is proven of the tables of cosines and sines of rotary positions, which hold the number of a
pair twice.

Grammar; the code cites the numbers of the cases:

    table, whose halves along the last axis are equal :=
      1     Concat(f, f)                       along the last axis
    table, whose neighbours along the last axis are equal :=
      2     Reshape(twice)                     [..., half, 2] as [..., 2 half]
    twice :=
      3     Tile(f) | Expand(f)                [..., half, 1] as [..., half, 2]
      4   | Concat(f, f)                       of [..., half, 1] along the last axis
    either of the tables :=
      5   | numbers that are known             they are compared
      6   | Cos(table) | Sin(table) | Neg(table) | Cast(table) | Identity(table)
      7   | Unsqueeze(table)                   not of the last axis
      8   | Gather(table, rows)                along the first of several axes
      9   | Mul(table, number)                 in either order, one number
    bounded, never larger than 1 :=
     10     Cos(x) | Sin(x)
     11   | numbers that are known             none of them is larger
     12   | Cast(bounded), Neg
     13   | the numbers of bounded tensors, moved, joined or chosen (`passed_on`)
     14   | Mul(bounded, number)               of at most 1
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ir.nodes import (
    ABSENT,
    constant,
    int_attr,
    is_op,
    operand_at,
    operand_orders,
    places_of,
)
from fa_compiler.passes.ops.movers import REPEATS
from fa_compiler.passes.ops.numbers import passed_on
from fa_compiler.passes.ops.parts import concat_of
from fa_compiler.passes.values.shapes import ShapeInfo

DEEPEST = 12
"""The operators between a table and what its halves are made of."""
LARGEST = 1 << 23
"""The most numbers of a constant table that are compared."""
_POINTWISE = ("Cos", "Sin", "Neg", "Cast", "Identity")


def has_equal_halves(table: ir.Value, info: ShapeInfo) -> bool:
    """Is it proven that the halves of a table along its last axis are equal?"""
    return _holds(table, info, _joins_twice, _halves)


def has_equal_neighbours(table: ir.Value, info: ShapeInfo) -> bool:
    """Is it proven that each number of even place along the last axis of a table is the next one,
    too?"""
    return _holds(table, info, _repeats, _neighbours)


_Pair = tuple[np.ndarray, np.ndarray]


def _halves(numbers: np.ndarray) -> _Pair:
    first, second = np.split(numbers, 2, -1)
    return first, second


def _neighbours(numbers: np.ndarray) -> _Pair:
    return numbers[..., ::2], numbers[..., 1::2]


def _holds(
    table: ir.Value,
    info: ShapeInfo,
    is_made_so: Callable[[ir.Node, ShapeInfo], bool],
    parts: Callable[[np.ndarray], _Pair],
) -> bool:
    """Is a table made so, or what its numbers are computed from one by one, or are the parts of
    known numbers equal?"""
    value = table
    for _ in range(DEEPEST):
        node, numbers = value.producer(), constant(value, LARGEST)
        if numbers is not None:  # 5
            return (
                numbers.ndim > 0 and numbers.shape[-1] % 2 == 0 and np.array_equal(*parts(numbers))
            )
        if node is None:
            return False
        if is_made_so(node, info):
            return True
        value = _made_of(node, len(info.sizes(value)), info)
    return False


def _joins_twice(node: ir.Node, info: ShapeInfo) -> bool:
    """Does a Concat join a tensor with itself along the last axis?"""
    joined = concat_of(node, info)
    # 1
    return (
        joined is not None
        and joined.is_last
        and len(joined.parts) == 2
        and len({*joined.parts}) == 1
    )


def _repeats(node: ir.Node, info: ShapeInfo) -> bool:
    """Does a Reshape put numbers that are repeated along a last axis of 2 beside each other?"""
    twice = operand_at(node, 0)
    maker, shape = twice.producer(), info.sizes(twice)
    if not is_op(node, "Reshape") or len(shape) < 2 or shape[-1] != 2:
        return False
    if info.shape(node.outputs[0]) != (*shape[:-2], shape[-2] * 2):  # 2
        return False
    single = info.shape(operand_at(maker, 0)) == (*shape[:-1], Dim(1))
    # 3 and 4
    return single and maker is not None and (is_op(maker, *REPEATS) or _joins_twice(maker, info))


def _made_of(node: ir.Node, rank: int, info: ShapeInfo) -> ir.Value:
    """The operand of the maker of a table of this rank which is such a table if this one is; ABSENT
    where this is not known."""
    if is_op(node, *_POINTWISE):  # 6
        return operand_at(node, 0)
    if is_op(node, "Unsqueeze") and rank - 1 not in (places_of(node, rank) or [rank - 1]):  # 7
        return operand_at(node, 0)
    # 8
    if (
        is_op(node, "Gather")
        and int_attr(node, "axis", 0) == 0
        and len(info.sizes(node.inputs[0])) > 1
    ):
        return operand_at(node, 0)
    factors = (
        other for number, other in operand_orders(node, "Mul") if info.scalar(number) is not None
    )
    return next(factors, ABSENT)  # 9


def is_bounded(table: ir.Value, info: ShapeInfo, depth: int = DEEPEST) -> bool:
    """Is it proven that no number of a table is larger than 1?"""
    node, numbers = table.producer(), constant(table, LARGEST)
    if numbers is not None:  # 11
        return bool(np.all(np.abs(numbers.astype(np.float64)) <= 1))
    if is_op(node, "Cos", "Sin"):  # 10
        return True
    if node is None or not depth:
        return False
    if given := passed_on(node):  # 13
        return all(is_bounded(operand, info, depth - 1) for operand in dict.fromkeys(given))
    if is_op(node, "Mul"):
        return any(
            abs(info.scalar(number) or 2.0) <= 1 and is_bounded(other, info, depth - 1)  # 14
            for number, other in operand_orders(node, "Mul")
        )
    return is_op(node, "Cast", "Neg") and is_bounded(operand_at(node, 0), info, depth - 1)  # 12
