"""The numbers that a tensor can hold at a position, and arithmetic on them. A number is a float
constant, an integer that is linear in the position, or a choice between two numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.formula import (
    Affine,
    AtLeastZero,
    BooleanLiteral,
    Formula,
    at_least_zero,
    choice,
    conjunction,
    disjunction,
    negation,
)
from fa_compiler.passes.ir.nodes import SIXTEEN_BITS

MAX_CASES = 8
"""A number with more cases than this is given up."""
INTEGERS = (
    ir.DataType.INT64,
    ir.DataType.INT32,
    ir.DataType.INT16,
    ir.DataType.INT8,
    ir.DataType.UINT8,
    ir.DataType.BOOL,
)
COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "Less": operator.lt,
    "LessOrEqual": operator.le,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "Equal": operator.eq,
}
ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Min": np.minimum,
    "Max": np.maximum,
}
BITS: Mapping[str, Callable[..., Any]] = {"BitwiseAnd": operator.and_, "BitwiseOr": operator.or_}
"""Operators on the bits of two integers, which are followed where both are known, as those of 0 and
1."""
EXACT_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
"""Float types that hold every position of a sequence that fits into memory."""
RANGES = {
    ir.DataType.INT64: (-(2**63), 2**63 - 1),
    ir.DataType.INT32: (-(2**31), 2**31 - 1),
    ir.DataType.INT16: (-(2**15), 2**15 - 1),
    ir.DataType.INT8: (-(2**7), 2**7 - 1),
    ir.DataType.UINT8: (0, 2**8 - 1),
    ir.DataType.BOOL: (0, 1),
    ir.DataType.FLOAT: (-(2**24), 2**24),
    ir.DataType.DOUBLE: (-(2**53), 2**53),
}
"""For each type, a range of integers all of which it holds."""
LARGEST_FACTOR = {
    ir.DataType.INT64: 2**24,
    ir.DataType.INT32: 2**10,
    ir.DataType.FLOAT: 2**4,
    ir.DataType.DOUBLE: 2**16,
}
"""For each type, the largest sum of the factors on positions and sizes in a number that it holds.
Positions and sizes are taken to be at most 2^19, so these parts stay within half of the type's
range. Other types hold no such number."""


@dataclass(frozen=True)
class Case:
    """`chosen` where the condition holds, else `other`."""

    condition: Formula
    chosen: Number
    other: Number


Number = float | Affine | Case
"""What a numeric tensor holds at a position: a float constant, an integer, or a choice between two
numbers."""


def count(number: Number) -> int:
    """How many numbers the nested choices lead to; 1 where there is no choice."""
    return count(number.chosen) + count(number.other) if isinstance(number, Case) else 1


def case(condition: Formula | None, chosen: Number | None, other: Number | None) -> Number | None:
    """The choice between two numbers, or one of them where there is nothing to choose; None where
    the condition or a number is unknown.

    An inner choice that shares a number with the outer one becomes a part of the outer condition.
    0.0 and -0.0 are one number here: no operation tells them apart.
    """
    if condition is None or chosen is None or other is None:
        return None
    if isinstance(condition, BooleanLiteral):
        return chosen if condition.value else other
    if chosen == other:
        return chosen
    if isinstance(chosen, Case) and other in (chosen.chosen, chosen.other):
        inner = chosen if other == chosen.other else _turned(chosen)
        return case(conjunction((condition, inner.condition)), inner.chosen, other)
    if isinstance(other, Case) and chosen in (other.chosen, other.other):
        inner = other if chosen == other.chosen else _turned(other)
        return case(disjunction((condition, inner.condition)), chosen, inner.other)
    return Case(condition, chosen, other)


def _turned(number: Case) -> Case:
    """The same choice by the opposite condition."""
    return Case(negation(number.condition), number.other, number.chosen)


def as_integer(number: Number | None) -> Affine | None:
    """The number if it is an integer, else None."""
    if not isinstance(number, Affine):
        return None
    return number


def condition_for(number: Number, test: Callable[[float | Affine], Formula]) -> Formula:
    """The condition under which a number passes a test."""
    if isinstance(number, Case):
        return choice(
            number.condition, condition_for(number.chosen, test), condition_for(number.other, test)
        )
    return test(number)


def nonzero(number: Number) -> Formula:
    """The condition under which a number is not 0."""
    return condition_for(number, lambda simple: unequal(simple, 0))


def unequal(number: float | Affine, other: int) -> Formula:
    """The condition under which a number differs from `other`."""
    if isinstance(number, Affine):
        const = number.const
        if const is not None:
            return BooleanLiteral(const != other)
        return disjunction(
            (at_least_zero(number + -(other + 1)), at_least_zero(number.times(-1) + (other - 1)))
        )
    return BooleanLiteral(number != other)


def compared(op: str, left: Number, right: Number) -> Formula | None:
    """The condition under which `left op right` holds; None when it is unknown."""
    if isinstance(left, Case) or isinstance(right, Case):
        return _compared_cases(op, left, right)
    if isinstance(left, Affine) and isinstance(right, Affine):
        return _compared_integers(op, left, right)
    a, b = _constant(left), _constant(right)
    if a is None or b is None:
        return _compared_mixed(op, left, right)
    return BooleanLiteral(COMPARE[op](a, b))


def _constant(number: float | Affine) -> float | None:
    """The number that is the same at every position and in every run; None for others."""
    return number.const if isinstance(number, Affine) else number


def _pairs(
    left: Number, right: Number
) -> tuple[Case, tuple[Number, Number], tuple[Number, Number]]:
    """The first operand that is a Case, and the pairs of operands with its two numbers in its
    place."""
    if isinstance(left, Case):
        return left, (left.chosen, right), (left.other, right)
    assert isinstance(right, Case)
    return right, (left, right.chosen), (left, right.other)


def _compared_cases(op: str, left: Number, right: Number) -> Formula | None:
    """`compared` where an operand is a Case: of both of its numbers, joined as the Case joins
    them."""
    split, first, second = _pairs(left, right)
    chosen, other = compared(op, *first), compared(op, *second)
    if chosen is None or other is None:
        return None
    extreme = _extreme(split)
    if split is not left or op == "Equal" or extreme is None:
        return choice(split.condition, chosen, other)
    # A maximum is less than a number if both of its operands are, and greater if one of them is.
    if (extreme == "Max") == op.startswith("Less"):
        return conjunction((chosen, other))
    return disjunction((chosen, other))


def _extreme(number: Case) -> str | None:
    """Whether a choice between two integers is their "Max" or their "Min"; None when it is
    neither."""
    if not isinstance(number.chosen, Affine) or not isinstance(number.other, Affine):
        return None
    gap = number.chosen - number.other
    if number.condition == AtLeastZero(gap):
        return "Max"
    if number.condition != AtLeastZero(gap.times(-1)):
        return None
    return "Min"


def _compared_mixed(op: str, left: float | Affine, right: float | Affine) -> Formula | None:
    """The comparison of an integer with a float that is a whole number; None for other floats."""
    rank = max(len(number.steps) for number in (left, right) if isinstance(number, Affine))
    one, other = whole(left, rank), whole(right, rank)
    if one is None or other is None:
        return None
    return _compared_integers(op, one, other)


def whole(number: float | Affine, rank: int) -> Affine | None:
    """The number as an integer; None where it is none."""
    if isinstance(number, Affine):
        return number
    if math.isfinite(number) and number == int(number):
        return Affine.number(int(number), rank)
    return None


def _compared_integers(op: str, left: Affine, right: Affine) -> Formula:
    if op == "Less":
        return at_least_zero(right - left + -1)
    if op == "LessOrEqual":
        return at_least_zero(right - left)
    if op == "Greater":
        return at_least_zero(left - right + -1)
    if op == "GreaterOrEqual":
        return at_least_zero(left - right)
    return conjunction((at_least_zero(left - right), at_least_zero(right - left)))


def if_representable(number: Number | None, dtype: ir.DataType | None) -> Number | None:
    """The number, if the type holds it without wrapping around or rounding; else None. In a number
    that depends on positions or sizes, these may use half of the type's range, and the constant
    part the other half."""
    if isinstance(number, Case):
        chosen, other = (
            if_representable(number.chosen, dtype),
            if_representable(number.other, dtype),
        )
        return case(number.condition, chosen, other)
    if not isinstance(number, Affine):
        return number
    if dtype not in RANGES:
        return None
    low, high = RANGES[dtype]
    if number.const is not None:
        if low <= number.const <= high:
            return number
        return None
    factors = (*number.steps, *number.offset.factors)
    fits = sum(map(abs, factors)) <= LARGEST_FACTOR.get(dtype, 0)
    if fits and low // 2 <= number.offset.addend <= high // 2:
        return number
    return None


def rounded(number: float, dtype: ir.DataType) -> float | None:
    """The number as a type rounds it; None for NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        result = float(np.array(number).astype(dtype.numpy()))
    if math.isnan(result):
        return None
    return result


def cast(number: Number | None, dtype: ir.DataType | None) -> Number | None:
    """The number after a cast; None when it is unknown. An integer may become a float, but a float
    no integer. The caller checks that the type holds the number (`if_representable`)."""
    if isinstance(number, Case):
        return case(number.condition, cast(number.chosen, dtype), cast(number.other, dtype))
    if isinstance(number, Affine):
        if dtype in INTEGERS or dtype in EXACT_FLOATS:
            return number
        if number.const is None or abs(number.const) > 256 or dtype not in SIXTEEN_BITS:
            return None
        return float(number.const)
    if number is None or dtype is None or dtype in INTEGERS:
        return None
    return rounded(number, dtype)


def arithmetic(
    op: str, left: Number | None, right: Number | None, dtype: ir.DataType | None
) -> Number | None:
    """`left op right`, rounded to the type where it is a float; None when it is unknown."""
    if left is None or right is None:
        return None
    if isinstance(left, Case) or isinstance(right, Case):
        split, first, second = _pairs(left, right)
        return case(split.condition, arithmetic(op, *first, dtype), arithmetic(op, *second, dtype))
    if isinstance(left, Affine) and isinstance(right, Affine):
        return _whole_arithmetic(op, left, right)
    a, b = _constant(left), _constant(right)
    if a is None or b is None or dtype is None or dtype in INTEGERS or op in BITS:
        return None
    with np.errstate(all="ignore"):
        result = ARITHMETIC[op](np.float64(a), np.float64(b))
    return rounded(float(result), dtype)


def _whole_arithmetic(op: str, left: Affine, right: Affine) -> Number | None:
    """`left op right` of two integers; None for a product that is not linear in the position, and
    for bits of integers that are not known."""
    if op in BITS:
        known = left.const is not None and right.const is not None
        return Affine.number(BITS[op](left.const, right.const), len(left.steps)) if known else None
    if op == "Add":
        return left + right
    if op == "Sub":
        return left - right
    if op in ("Min", "Max"):
        gap = right - left if op == "Min" else left - right
        return case(at_least_zero(gap), left, right)
    for a, b in ((left, right), (right, left)):
        if (factor := a.const) is not None:
            return b.times(factor)
    if left.is_number and right.is_number:
        return Affine.number(left.offset * right.offset, len(left.steps))
    return None
