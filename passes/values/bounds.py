"""Bounds on a tensor's elements: they prove that a bias cannot compete with the very negative number of a mask.

`Bounds.of(value)` is an interval (low, high), or None. In every run it holds every element that is not NaN. The
interval of an integer is that of its type, because integers wrap around. That is enough for biases that are computed
from positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.movers import MOVES
from fa_compiler.passes.nodes import constant, input_of, is_op
from fa_compiler.passes.values.analysis import Analysis
from fa_compiler.passes.values.shape_rules.elementwise import INTEGER_RANGES
from fa_compiler.passes.values.symbolic import product
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
RISING: Mapping[str, Callable[[float], float]] = {
    "Exp": math.exp,
    "Sqrt": math.sqrt,
    "Softplus": lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x))),
}
"""Functions that rise with their operand, and give numbers from 0 on."""
INEXACT = 2.0**-20
"""How far kernels may be off in these functions, relatively. A square root is rounded correctly."""
POSITIVE = ("Abs", "Relu")
LIMITS = ("Clip", "Min", "Max")
REDUCTIONS = ("ReduceSum", "ReduceMean")
ROUNDING = {ir.DataType.FLOAT: 2.0**-24, ir.DataType.FLOAT16: 2.0**-11, ir.DataType.BFLOAT16: 2.0**-8}
"""How far a sum is rounded at most, relatively."""
ARITHMETIC = ("Split", "Cast", "Neg", "Add", "Sub", "Mul", "Div", "Reciprocal", "Where", "Concat")
EVERYTHING = (-math.inf, math.inf)
DEQUANTIZE_DOMAINS = ("", "ai.onnx", "com.microsoft")


class Bounds(Analysis[Interval]):
    """The bounds of the values of one model."""

    def _compute(self, value: ir.Value) -> Interval | None:
        array = constant(value)
        if array is not None:
            return _of_array(array)
        large = self.info.large.of(value)
        if large is not None and large.numbers:
            return min(large.numbers), max(large.numbers)
        dtype = self.info.dtype(value)
        if dtype in INTEGER_RANGES:
            low, high = INTEGER_RANGES[dtype]
            return float(low), float(high)
        node = value.producer()
        if node is not None and node.op_type == "DequantizeLinear" and node.domain in DEQUANTIZE_DOMAINS:
            return self._rounded(self._dequantised(node), dtype)
        if not is_op(node, *UNIT_RANGE, *MOVES, *RISING, *POSITIVE, *LIMITS, *ARITHMETIC, *REDUCTIONS):
            return None
        assert node is not None
        return self._rounded(self._of_node(node), dtype)

    def _dequantised(self, node: ir.Node) -> Interval | None:
        """The interval of (integers - zero point) * scale, by axis and block as well. None where the scale is not
        constant and finite: 0 times an infinite scale is NaN."""
        scale, given = constant(input_of(node, 1)), input_of(node, 2)
        integers = None if node.inputs[0] is None else self.of(node.inputs[0])
        points = (0.0, 0.0) if given is None else self.of(given)
        if scale is None or not scale.size or not np.isfinite(scale.astype(np.float64)).all():
            return None
        scales = _of_array(scale)
        if integers is None or points is None or scales is None:
            return None
        # An integer of 32 bits is rounded before it is multiplied.
        ends = [float(np.float32(end)) for end in (integers[0] - points[1], integers[1] - points[0])]
        return _ends([end * each for end in ends for each in scales])

    def _limited(self, node: ir.Node) -> Interval | None:
        """The interval of Clip, Min and Max. A bound on one operand is a bound on the result."""
        found = [self.of(value) or EVERYTHING for value in node.inputs if value is not None]
        if not found:
            return None
        if node.op_type == "Clip":
            low, high = self._limit(node, 1, "min", -math.inf), self._limit(node, 2, "max", math.inf)
            found = [_least(high, _most(low, found[0]))]
        result = found[0]
        for other in found[1:]:
            result = _least(result, other) if node.op_type == "Min" else _most(result, other)
        return None if result == EVERYTHING else result

    def _limit(self, node: ir.Node, index: int, attribute: str, default: float) -> Interval:
        """The interval of a limit of Clip, which is an attribute before opset 11."""
        value, given = input_of(node, index), node.attributes.get(attribute)
        number = default if given is None else given.as_float()
        return (number, number) if value is None else self.of(value) or EVERYTHING

    def _reduced(self, node: ir.Node, one: Interval) -> Interval | None:
        """The interval of a sum or mean of a known number of elements of this interval. Each addition may round."""
        source, result = node.inputs[0], node.outputs[0]
        shapes = self.info.shape(source) if source is not None else None, self.info.shape(result)
        unit = ROUNDING.get(self.info.dtype(result) or ir.DataType.UNDEFINED)
        if shapes[0] is None or shapes[1] is None or unit is None:
            return None
        ratio = product(shapes[0]).exact_div(product(shapes[1]))
        count = None if ratio is None else ratio.const
        if not count or count > LONGEST_SUM or not all(map(math.isfinite, one)):
            return None
        error = max(map(abs, one)) * math.expm1((count + 1) * math.log1p(unit))
        times = count if node.op_type == "ReduceSum" else 1
        return times * (one[0] - error), times * (one[1] + error)

    @staticmethod
    def _rounded(found: Interval | None, dtype: ir.DataType | None) -> Interval | None:
        """The interval of the numbers both before and after their type rounds them: ONNX Runtime computes 16-bit
        numbers in float32 and may keep them so. It is enough to round the ends, because rounding keeps the order of
        numbers. None where the rounding is unknown."""
        kind = NUMPY.get(dtype) if dtype is not None else None
        if found is None or kind is None:
            return None
        with np.errstate(over="ignore"):
            return _hull(_of_array(np.array(found)), _of_array(np.array(found).astype(kind)))

    def _of_node(self, node: ir.Node) -> Interval | None:
        op = node.op_type
        if op in UNIT_RANGE:
            return UNIT_RANGE[op]
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
        if op in RISING:
            known = first or EVERYTHING
            low, high = (max(each, 0.0) if op == "Sqrt" else min(each, 709.0) for each in known)
            error = 0.0 if op == "Sqrt" else INEXACT
            return RISING[op](low) * (1 - error), RISING[op](high) * (1 + error) if known[1] == high else math.inf
        if op in POSITIVE:
            low, high = first or EVERYTHING
            return max(low, 0.0 if op == "Relu" else -high, 0.0), max(high, 0.0 if op == "Relu" else -low)
        if op == "Mul" and node.inputs[0] is node.inputs[1] and first is None:
            return 0.0, math.inf
        if first is None:
            return None
        if op == "Reciprocal":
            return _quotient((1.0, 1.0), first)
        if op in REDUCTIONS:
            return self._reduced(node, first)
        if op == "Neg":
            return -first[1], -first[0]
        if op not in ("Add", "Sub", "Mul", "Div"):
            return first
        second = self.of(node.inputs[1])
        if second is None:
            return None
        if op == "Div":
            return _quotient(first, second)
        if op == "Mul":
            return _ends([a * b for a in first for b in second])
        low, high = second if op == "Add" else (-second[1], -second[0])
        return first[0] + low, first[1] + high


def _of_array(array: np.ndarray) -> Interval | None:
    if array.size == 0:
        return 0.0, 0.0
    if array.dtype.kind == "c":
        return None
    wide = array.astype(np.float64)
    low, high = float(wide.min()), float(wide.max())
    return None if math.isnan(low) or math.isnan(high) else (low, high)


def _quotient(one: Interval, other: Interval) -> Interval | None:
    """The interval of quotients; None where the divisor may be 0."""
    return _ends([a / b for a in one for b in other]) if other[0] > 0.0 or other[1] < 0.0 else None


def _ends(corners: list[float]) -> Interval | None:
    return None if any(map(math.isnan, corners)) else (min(corners), max(corners))


def _least(one: Interval, other: Interval) -> Interval:
    return min(one[0], other[0]), min(one[1], other[1])


def _most(one: Interval, other: Interval) -> Interval:
    return max(one[0], other[0]), max(one[1], other[1])


def _hull(one: Interval | None, other: Interval | None) -> Interval | None:
    return None if one is None or other is None else (min(one[0], other[0]), max(one[1], other[1]))
