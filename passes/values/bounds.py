"""Bounds on a tensor's elements: they prove that a bias cannot compete with the very negative number of a mask.

A bound is an interval (low, high) and says whether an element may be NaN. Whoever asks has to say what NaN means to
the proof, by the function that is called:

    unless_nan(value)    the interval of every element that is not NaN. For proofs that hold for NaN by themselves,
                         because NaN stays NaN in both orders of the computation
    always(value)        the interval of every element; None where one may be NaN. For proofs that a NaN would break

The interval of a computed integer is that of its type, because integers wrap around. That is enough for biases that are
computed from positions.

An element is proven not to be NaN if it is computed from such elements, and from no combination that makes NaN of
numbers: infinity less infinity, infinity times 0, infinity divided by infinity, a root or power of a negative number,
a sine of infinity, a Softmax of infinities, a sum whose parts overflow. An infinite end of an interval counts as an
infinite element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import product
from fa_compiler.passes.ir.nodes import constant, input_of, is_op
from fa_compiler.passes.ops.elementwise import INTEGER_RANGES
from fa_compiler.passes.ops.movers import MOVES
from fa_compiler.passes.values.analysis import Analysis
from fa_compiler.passes.values.value_sets import NUMPY

Interval = tuple[float, float]

LONGEST_SUM = 2**16
"""Sums of more elements have no bounds here."""
UNIT_RANGE = {
    "Sigmoid": (0.0, 1.0),
    "Softmax": (0.0, 1.0),
    "Tanh": (-1.0, 1.0),
    "Sin": (-1.0, 1.0),
    "Cos": (-1.0, 1.0),
}
OF_FINITE = ("Softmax", "Sin", "Cos")
"""Functions that make NaN of an infinity."""
RISING: Mapping[str, Callable[[float], float]] = {
    "Exp": math.exp,
    "Sqrt": math.sqrt,
    "Softplus": lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x))),
}
"""Functions that rise with their operand, and give numbers from 0 on."""
INEXACT = 2.0**-20
"""How far kernels may be off in these functions, relatively. A square root is rounded correctly."""
SMALLEST_NORMAL = 2.0**-126
"""Below this number of float32 a kernel may give 0."""
POSITIVE = ("Abs", "Relu")
LIMITS = ("Clip", "Min", "Max")
REDUCTIONS = ("ReduceSum", "ReduceMean")
ROUNDING = {ir.DataType.FLOAT: 2.0**-24, ir.DataType.FLOAT16: 2.0**-11, ir.DataType.BFLOAT16: 2.0**-8}
"""How far a sum is rounded at most, relatively."""
ARITHMETIC = ("Split", "Cast", "Neg", "Add", "Sub", "Mul", "Div", "Reciprocal", "Pow", "Where", "Concat")
EVERYTHING = (-math.inf, math.inf)
DEQUANTIZE_DOMAINS = ("", "ai.onnx", "com.microsoft")


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


class Bounds(Analysis[Bound]):
    """The bounds of the values of one model."""

    def unless_nan(self, value: ir.Value | None) -> Interval | None:
        """The interval of every element that is not NaN, in every run; None where none is known."""
        found = self.of(value)
        return None if found is None else found.unless_nan

    def always(self, value: ir.Value | None) -> Interval | None:
        """The interval of every element, in every run; None where none is known or an element may be NaN."""
        found = self.of(value)
        return None if found is None or found.may_be_nan else found.unless_nan

    def _compute(self, value: ir.Value) -> Bound | None:
        array = constant(value)
        if array is not None:
            return _of_array(array)
        large = self.info.large.of(value)
        if large is not None and large.numbers:
            return Bound((min(large.numbers), max(large.numbers)), False)
        dtype, node = self.info.dtype(value), value.producer()
        if dtype in INTEGER_RANGES:
            low, high = INTEGER_RANGES[dtype]
            return self._of_integers(node, (float(low), float(high)))
        if is_op(node, "Range") and dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
            return self._rounded(self._of_range(node), dtype)
        if node is not None and node.op_type == "DequantizeLinear" and node.domain in DEQUANTIZE_DOMAINS:
            return self._rounded(self._dequantised(node), dtype)
        if not is_op(node, *UNIT_RANGE, *MOVES, *RISING, *POSITIVE, *LIMITS, *ARITHMETIC, *REDUCTIONS):
            return None
        assert node is not None
        return self._rounded(self._of_node(node), dtype)

    def _dequantised(self, node: ir.Node) -> Bound | None:
        """The interval of (integers - zero point) * scale, by axis and block as well. None where the scale is not
        constant and finite: 0 times an infinite scale is NaN."""
        scale, given = constant(input_of(node, 1)), input_of(node, 2)
        integers = self.always(node.inputs[0])
        points = (0.0, 0.0) if given is None else self.always(given)
        if scale is None or not scale.size or not np.isfinite(scale.astype(np.float64)).all():
            return None
        scales = _of_array(scale)
        if integers is None or points is None or scales is None:
            return None
        # An integer of 32 bits is rounded before it is multiplied.
        ends = [float(np.float32(end)) for end in (integers[0] - points[1], integers[1] - points[0])]
        found = _ends([end * each for end in ends for each in scales.unless_nan])
        return None if found is None else Bound(found, False)

    def _of_integers(self, node: ir.Node | None, every: Interval) -> Bound:
        """The bound of integers of a type that holds `every` one: that of a Range, moved or cast to a type that holds
        it; else that of the type."""
        found = self._of_range(node)
        source = node.inputs[0] if node is not None and is_op(node, "Cast", *MOVES) else None
        if source is not None and self._has_integers(source):
            found = self.of(source)
        held = found is not None and every[0] <= found.unless_nan[0] and found.unless_nan[1] <= every[1]
        return found if found is not None and held else Bound(every, False)

    def _of_range(self, node: ir.Node | None) -> Bound | None:
        """The bound of a Range whose operands are known numbers. Floats are added up, and each addition may round: if
        all roundings are less than a step, the last number is within a step of the limit."""
        numbers = [constant(each) for each in node.inputs] if node is not None and is_op(node, "Range") else []
        found = [array.item() for array in numbers if array is not None and array.size == 1]
        if len(found) != 3 or not all(map(math.isfinite, found)) or found[2] == 0:
            return None
        start, limit, step = found
        if (count := math.ceil((limit - start) / step)) < 1:
            return Bound((0.0, 0.0), False)
        if all(isinstance(number, int) for number in found):
            last = start + (count - 1) * step
        elif count * max(abs(start), abs(limit)) * 2 * ROUNDING[ir.DataType.FLOAT] < abs(step):
            last = limit + step
        else:
            return None
        return Bound((float(min(start, last)), float(max(start, last))), False)

    def _limited(self, node: ir.Node) -> Bound | None:
        """The bound of Clip, Min and Max. A bound on one operand is a bound on the result."""
        operands = [self.of(value) or UNKNOWN for value in node.inputs if value is not None]
        if not operands:
            return None
        found = [each.unless_nan for each in operands]
        if node.op_type == "Clip":
            low, high = self._limit(node, 1, "min", -math.inf), self._limit(node, 2, "max", math.inf)
            found = [_least(high, _most(low, found[0]))]
        result = found[0]
        for other in found[1:]:
            result = _least(result, other) if node.op_type == "Min" else _most(result, other)
        return None if result == EVERYTHING else Bound(result, any(each.may_be_nan for each in operands))

    def _limit(self, node: ir.Node, index: int, attribute: str, default: float) -> Interval:
        """The interval of a limit of Clip, which is an attribute before opset 11."""
        value, given = input_of(node, index), node.attributes.get(attribute)
        number = default if given is None else given.as_float()
        return (number, number) if value is None else self.unless_nan(value) or EVERYTHING

    def _reduced(self, node: ir.Node, one: Bound) -> Bound | None:
        """The bound of a sum or mean of a known number of elements of this bound. Each addition may round. None where
        a sum may overflow."""
        source, result = node.inputs[0], node.outputs[0]
        shapes = self.info.shape(source) if source is not None else None, self.info.shape(result)
        dtype = self.info.dtype(result) or ir.DataType.UNDEFINED
        unit = ROUNDING.get(dtype)
        if shapes[0] is None or shapes[1] is None or unit is None:
            return None
        ratio = product(shapes[0]).exact_div(product(shapes[1]))
        count = None if ratio is None else ratio.const
        low, high = one.unless_nan
        largest = max(abs(low), abs(high))
        if not count or count > LONGEST_SUM or not largest * count < float(dtype.max) / 2:
            return None
        error = largest * math.expm1((count + 1) * math.log1p(unit))
        times = count if node.op_type == "ReduceSum" else 1
        return Bound((times * (low - error), times * (high + error)), one.may_be_nan)

    @staticmethod
    def _rounded(found: Bound | None, dtype: ir.DataType | None) -> Bound | None:
        """The bound of the numbers both before and after their type rounds them: ONNX Runtime computes 16-bit numbers
        in float32 and may keep them so. It is enough to round the ends, because rounding keeps the order of numbers.
        None where the rounding is unknown."""
        kind = NUMPY.get(dtype) if dtype is not None else None
        if found is None or kind is None:
            return None
        with np.errstate(over="ignore"):
            rounded = _of_array(np.array(found.unless_nan).astype(kind))
        return _hull(found, rounded)

    def _of_node(self, node: ir.Node) -> Bound | None:
        op = node.op_type
        if op == "Where":
            return _hull(self.of(node.inputs[1]), self.of(node.inputs[2]))
        if op == "Concat":
            result = self.of(node.inputs[0])
            for operand in node.inputs[1:]:
                result = _hull(result, self.of(operand))
            return result
        if op in LIMITS:
            return self._limited(node)
        first = self.of(node.inputs[0])
        if op in UNIT_RANGE:
            known = first or UNKNOWN
            return Bound(UNIT_RANGE[op], not known.is_finite if op in OF_FINITE else known.may_be_nan)
        if op in RISING:
            return _rising(op, first or UNKNOWN)
        if op in POSITIVE:
            known = first or UNKNOWN
            low, high = known.unless_nan
            ends = max(low, 0.0 if op == "Relu" else -high, 0.0), max(high, 0.0 if op == "Relu" else -low)
            return Bound(ends, known.may_be_nan)
        if op == "Mul" and node.inputs[0] is node.inputs[1] and first is None:
            return Bound((0.0, math.inf), True)
        if first is None:
            return None
        if op == "Reciprocal":
            return _quotient(Bound((1.0, 1.0), False), first)
        if op in REDUCTIONS:
            return self._reduced(node, first)
        if op == "Neg":
            return _negative(first)
        if op not in ("Add", "Sub", "Mul", "Div", "Pow"):
            return first
        second = self.of(node.inputs[1])
        if second is None:
            return None
        if op == "Pow":
            return _power(first, second, self._is_whole(node.inputs[1]))
        if op == "Div":
            return _quotient(first, second)
        if op == "Mul":
            return _product(first, second)
        return _sum(first, second if op == "Add" else _negative(second))

    def _has_integers(self, value: ir.Value) -> bool:
        dtype = self.info.dtype(value)
        return dtype is not None and dtype in INTEGER_RANGES

    def _is_whole(self, value: ir.Value | None) -> bool:
        """Is every element a whole number, by its type or as a constant?"""
        array = constant(value)
        if array is not None and array.dtype.kind == "f":
            return bool((np.isfinite(array) & (array == np.round(array))).all())
        return value is not None and self._has_integers(value)


def _of_array(array: np.ndarray) -> Bound | None:
    if array.size == 0:
        return Bound((0.0, 0.0), False)
    if array.dtype.kind == "c":
        return None
    wide = array.astype(np.float64)
    low, high = float(wide.min()), float(wide.max())
    return None if math.isnan(low) or math.isnan(high) else Bound((low, high), False)


def _rising(op: str, operand: Bound) -> Bound:
    """The bound of a function of RISING. A root of a negative number is NaN."""
    given = operand.unless_nan
    low, high = (max(each, 0.0) if op == "Sqrt" else min(each, 709.0) for each in given)
    ends = RISING[op](low), RISING[op](high) if given[1] == high or op == "Sqrt" else math.inf
    return Bound(ends if op == "Sqrt" else _inexact(ends), operand.may_be_nan or (op == "Sqrt" and given[0] < 0.0))


def _inexact(ends: Interval) -> Interval:
    """The interval of what kernels give for exact results of this interval, which is not below 0."""
    low = ends[0] * (1.0 - INEXACT)
    return low if low >= SMALLEST_NORMAL else 0.0, max(ends[1] * (1.0 + INEXACT), SMALLEST_NORMAL)


def _power(base: Bound, exponent: Bound, whole: bool) -> Bound | None:
    """The bound of powers; `whole` exponents are whole numbers. None where 0 may have an exponent below 0.

    A power of a number from 0 on rises or falls with the base, and with the exponent. So its extremes are at the ends
    of both intervals, and it is never NaN. A power of a negative number is NaN unless the exponent is whole. Then it is
    that of the absolute value, with either sign.
    """
    (low, high), (least, most) = base.unless_nan, exponent.unless_nan
    negative = low < 0.0
    if negative:
        low, high = max(0.0, -high), max(high, -low)
    if low == 0.0 and least < 0.0:
        return None
    with np.errstate(all="ignore"):
        corners = [float(np.float64(x) ** np.float64(y)) for x in (low, high) for y in (least, most)]
    ends = _inexact((min(corners), max(corners)))
    may_be_nan = base.may_be_nan or exponent.may_be_nan or (negative and not whole)
    return Bound((-ends[1], ends[1]) if negative else ends, may_be_nan)


def _sum(one: Bound, other: Bound) -> Bound:
    """The bound of sums; one of two opposite infinities is NaN."""
    (a, b), (c, d) = one.unless_nan, other.unless_nan
    opposite = (b == math.inf and c == -math.inf) or (a == -math.inf and d == math.inf)
    low, high = a + c, b + d
    ends = -math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high
    return Bound(ends, one.may_be_nan or other.may_be_nan or opposite)


def _product(one: Bound, other: Bound) -> Bound | None:
    """The bound of products; one of 0 and an infinity is NaN. None where an end is such a product."""
    ends = _ends([a * b for a in one.unless_nan for b in other.unless_nan])
    undefined = any(
        each.unless_nan[0] <= 0.0 <= each.unless_nan[1] and not all(map(math.isfinite, beside.unless_nan))
        for each, beside in ((one, other), (other, one))
    )
    return None if ends is None else Bound(ends, one.may_be_nan or other.may_be_nan or undefined)


def _quotient(one: Bound, other: Bound) -> Bound | None:
    """The bound of quotients; one of two infinities is NaN. None where the divisor may be 0, or where an end is such a
    quotient."""
    low, high = other.unless_nan
    if not (low > 0.0 or high < 0.0):
        return None
    ends = _ends([a / b for a in one.unless_nan for b in other.unless_nan])
    return None if ends is None else Bound(ends, one.may_be_nan or other.may_be_nan)


def _negative(one: Bound) -> Bound:
    return Bound((-one.unless_nan[1], -one.unless_nan[0]), one.may_be_nan)


def _ends(corners: list[float]) -> Interval | None:
    return None if any(map(math.isnan, corners)) else (min(corners), max(corners))


def _least(one: Interval, other: Interval) -> Interval:
    return min(one[0], other[0]), min(one[1], other[1])


def _most(one: Interval, other: Interval) -> Interval:
    return max(one[0], other[0]), max(one[1], other[1])


def _hull(one: Bound | None, other: Bound | None) -> Bound | None:
    if one is None or other is None:
        return None
    low, high = zip(one.unless_nan, other.unless_nan, strict=True)
    return Bound((min(low), max(high)), one.may_be_nan or other.may_be_nan)
