"""Intervals of numbers of which some may be NaN, and arithmetic on them.

A number is proven not to be NaN if it is computed from such numbers, and from no combination that
makes NaN of numbers: infinity less infinity, infinity times 0, infinity divided by infinity, a root
or power of a negative number. An infinite end of an interval counts as an infinite number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Interval = tuple[float, float]

EVERYTHING = (-math.inf, math.inf)
INEXACT = 2.0**-20
"""How far kernels may be off in exponentials, logarithms and powers, relatively. A square root is
rounded correctly."""
SMALLEST_NORMAL = 2.0**-126
"""Below this number of float32 a kernel may give 0."""
LARGEST_EXPONENT = 709.0
"""Beyond this number the exponential is more than a float64 holds."""


@dataclass(frozen=True)
class Bound:
    """The interval of the elements that are not NaN, and whether an element may be NaN."""

    unless_nan: Interval
    may_be_nan: bool

    @property
    def is_finite(self) -> bool:
        """Is every element proven to be a finite number?"""
        return not self.may_be_nan and all(map(math.isfinite, self.unless_nan))


UNKNOWN = Bound(EVERYTHING, True)


def bound_of(array: np.ndarray) -> Bound | None:
    """The bound of the elements of an array; None where one is NaN or complex."""
    if array.size == 0:
        return Bound((0.0, 0.0), False)
    if array.dtype.kind == "c":
        return None
    wide = array.astype(np.float64)
    low, high = float(wide.min()), float(wide.max())
    if math.isnan(low) or math.isnan(high):
        return None
    return Bound((low, high), False)


def hull(one: Bound | None, other: Bound | None) -> Bound | None:
    """The bound of numbers of either."""
    if one is None or other is None:
        return None
    low, high = zip(one.unless_nan, other.unless_nan, strict=True)
    return Bound((min(low), max(high)), one.may_be_nan or other.may_be_nan)


def least(one: Interval, other: Interval) -> Interval:
    """The interval of the smaller of two numbers."""
    return min(one[0], other[0]), min(one[1], other[1])


def most(one: Interval, other: Interval) -> Interval:
    """The interval of the larger of two numbers."""
    return max(one[0], other[0]), max(one[1], other[1])


def negative(one: Bound) -> Bound:
    """The bound of -x."""
    return Bound((-one.unless_nan[1], -one.unless_nan[0]), one.may_be_nan)


def absolute(one: Bound) -> Bound:
    """The bound of |x|."""
    low, high = one.unless_nan
    return Bound((max(low, -high, 0.0), max(high, -low)), one.may_be_nan)


def rectified(one: Bound) -> Bound:
    """The bound of max(x, 0)."""
    low, high = one.unless_nan
    return Bound((max(low, 0.0), max(high, 0.0)), one.may_be_nan)


def plus(one: Bound, other: Bound) -> Bound:
    """The bound of sums; one of two opposite infinities is NaN."""
    (a, b), (c, d) = one.unless_nan, other.unless_nan
    opposite = (b == math.inf and c == -math.inf) or (a == -math.inf and d == math.inf)
    low, high = _unless_nan(a + c, -math.inf), _unless_nan(b + d, math.inf)
    return Bound((low, high), one.may_be_nan or other.may_be_nan or opposite)


def _unless_nan(end: float, unbounded: float) -> float:
    """The end of an interval; the unbounded one where it is NaN."""
    return unbounded if math.isnan(end) else end


def times(one: Bound, other: Bound) -> Bound | None:
    """The bound of products; one of 0 and an infinity is NaN. None where an end is such a
    product."""
    ends = ends_of([a * b for a in one.unless_nan for b in other.unless_nan])
    undefined = any(
        bound.unless_nan[0] <= 0.0 <= bound.unless_nan[1]
        and not all(map(math.isfinite, beside.unless_nan))
        for bound, beside in ((one, other), (other, one))
    )
    if ends is None:
        return None
    return Bound(ends, one.may_be_nan or other.may_be_nan or undefined)


def over(one: Bound, other: Bound) -> Bound | None:
    """The bound of quotients; one of two infinities is NaN. None where the divisor may be 0, or
    where an end is such a quotient."""
    low, high = other.unless_nan
    if not (low > 0.0 or high < 0.0):
        return None
    ends = ends_of([a / b for a in one.unless_nan for b in other.unless_nan])
    if ends is None:
        return None
    return Bound(ends, one.may_be_nan or other.may_be_nan)


def to_power(base: Bound, exponent: Bound, whole: bool) -> Bound | None:
    """The bound of powers; `whole` exponents are whole numbers. None where 0 may have an exponent
    below 0.

    A power of a number from 0 on rises or falls with the base, and with the exponent. So its
    extremes are at the ends of both intervals, and it is never NaN. A power of a negative number is
    NaN unless the exponent is whole. Then it is that of the absolute value, with either sign.
    """
    is_negative = base.unless_nan[0] < 0.0
    (low, high), (smallest, largest) = base.unless_nan, exponent.unless_nan
    if is_negative:
        low, high = max(0.0, -high), max(high, -low)
    if low == 0.0 and smallest < 0.0:
        return None
    with np.errstate(all="ignore"):
        corners = [
            float(np.float64(x) ** np.float64(y)) for x in (low, high) for y in (smallest, largest)
        ]
    ends = _inexact((min(corners), max(corners)))
    may_be_nan = base.may_be_nan or exponent.may_be_nan or (is_negative and not whole)
    if is_negative:
        ends = -ends[1], ends[1]
    return Bound(ends, may_be_nan)


def rising(function: Callable[[float], float], one: Bound) -> Bound:
    """The bound of a function that rises with its operand and gives numbers from 0 on."""
    low, high = (min(end, LARGEST_EXPONENT) for end in one.unless_nan)
    above = function(high) if one.unless_nan[1] == high else math.inf
    return Bound(_inexact((function(low), above)), one.may_be_nan)


def root(one: Bound) -> Bound:
    """The bound of square roots. That of a negative number is NaN."""
    low, high = (max(end, 0.0) for end in one.unless_nan)
    return Bound((math.sqrt(low), math.sqrt(high)), one.may_be_nan or one.unless_nan[0] < 0.0)


def _inexact(ends: Interval) -> Interval:
    """The interval of what kernels give for exact results of this interval, which is not below
    0."""
    low, high = ends[0] * (1.0 - INEXACT), max(ends[1] * (1.0 + INEXACT), SMALLEST_NORMAL)
    if not low >= SMALLEST_NORMAL:
        low = 0.0
    return low, high


def ends_of(corners: list[float]) -> Interval | None:
    """The least and the largest of these numbers; None where one is NaN."""
    if any(map(math.isnan, corners)):
        return None
    return min(corners), max(corners)
