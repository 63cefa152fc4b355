"""Bounds on a tensor's elements: they prove that a bias cannot compete with the very negative
number of a mask.

A bound is an interval (low, high) and says whether an element may be NaN. Whoever asks has to say
what NaN means to the proof, by the function that is called:

    unless_nan(value)    the interval of every element that is not NaN. For proofs that hold for NaN
                         by themselves, because NaN stays NaN in both orders of the computation
    always(value)        the interval of every element; None where one may be NaN. For proofs that a
                         NaN would break

The interval of a computed integer is that of its type, because integers wrap around. That is enough
for biases that are computed from positions.

What operators make of bounds is in ops/numbers.py.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.intervals import Bound, Interval, bound_of, ends_of, hull
from fa_compiler.passes.ir.nodes import constant, input_of, is_op, number_of, without_none
from fa_compiler.passes.ops.elementwise import INTEGER_RANGES
from fa_compiler.passes.ops.movers import MOVES
from fa_compiler.passes.ops.numbers import INTERVALS, ROUNDING, kind_of
from fa_compiler.passes.values.analysis import Analysis

DEQUANTIZE_DOMAINS = ("", "ai.onnx", "com.microsoft")

BEYOND_ONE = 1 + 2.0**-20
"""More than the largest number that a Sigmoid or Tanh of ONNX Runtime gives."""


class Bounds(Analysis[Bound]):
    """The bounds of the values of one model."""

    def unless_nan(self, value: ir.Value | None) -> Interval | None:
        """The interval of every element that is not NaN, in every run; None where none is known."""
        bound = self.of(value)
        if bound is None:
            return None
        return bound.unless_nan

    def always(self, value: ir.Value | None) -> Interval | None:
        """The interval of every element, in every run; None where none is known or an element may
        be NaN."""
        bound = self.of(value)
        if bound is None or bound.may_be_nan:
            return None
        return bound.unless_nan

    def _compute(self, value: ir.Value) -> Bound | None:
        array = constant(value)
        if array is not None:
            return bound_of(array)
        large = self.info.large.of(value)
        if large is not None and large.numbers:
            return Bound((min(large.numbers), max(large.numbers)), False)
        dtype, node = self.info.dtype(value), value.producer()
        if dtype in INTEGER_RANGES:
            low, high = INTEGER_RANGES[dtype]
            return self._of_integers(node, (float(low), float(high)))
        if is_op(node, "Range") and dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
            return self._rounded(self._of_range(node), dtype)
        if (
            node is not None
            and node.op_type == "DequantizeLinear"
            and node.domain in DEQUANTIZE_DOMAINS
        ):
            return self._rounded(self._dequantised(node), dtype)
        if not is_op(node, *INTERVALS):
            return None
        return self._rounded(INTERVALS[node.op_type](node, self), dtype)

    def _dequantised(self, node: ir.Node) -> Bound | None:
        """The interval of (integers - zero point) * scale, by axis and block as well. None where
        the scale is not constant and finite: 0 times an infinite scale is NaN."""
        scale, given = constant(input_of(node, 1)), input_of(node, 2)
        integers = self.always(node.inputs[0])
        points = (0.0, 0.0) if given is None else self.always(given)
        if scale is None or not scale.size or not np.isfinite(scale.astype(np.float64)).all():
            return None
        scales = bound_of(scale)
        if integers is None or points is None or scales is None:
            return None
        # An integer of 32 bits is rounded before it is multiplied.
        ends = [
            float(np.float32(end)) for end in (integers[0] - points[1], integers[1] - points[0])
        ]
        products = ends_of([end * factor for end in ends for factor in scales.unless_nan])
        if products is None:
            return None
        return Bound(products, False)

    def _of_integers(self, node: ir.Node | None, every: Interval) -> Bound:
        """The bound of integers of a type that holds `every` one: that of a Range, moved or cast to
        a type that holds it; else that of the type."""
        bound = self._of_range(node)
        if is_op(node, "Cast", *MOVES) and self._has_integers(node.inputs[0]):
            bound = self.of(node.inputs[0])
        if bound is None or bound.unless_nan[0] < every[0] or every[1] < bound.unless_nan[1]:
            return Bound(every, False)
        return bound

    def _of_range(self, node: ir.Node | None) -> Bound | None:
        """The bound of a Range whose operands are known numbers. Floats are added up, and each
        addition may round: if all roundings are less than a step, the last number is within a step
        of the limit."""
        if not is_op(node, "Range"):
            return None
        known = without_none(map(number_of, node.inputs))
        if len(known) != 3 or not all(map(math.isfinite, known)) or known[2] == 0:
            return None
        start, limit, step = known
        if (count := math.ceil((limit - start) / step)) < 1:
            return Bound((0.0, 0.0), False)
        if all(isinstance(number, int) for number in known):
            last = start + (count - 1) * step
        elif count * max(abs(start), abs(limit)) * 2 * ROUNDING[ir.DataType.FLOAT] < abs(step):
            last = limit + step
        else:
            return None
        return Bound((float(min(start, last)), float(max(start, last))), False)

    @staticmethod
    def _rounded(bound: Bound | None, dtype: ir.DataType | None) -> Bound | None:
        """The bound of the numbers both before and after their type rounds them: ONNX Runtime
        computes 16-bit numbers in float32 and may keep them so. It is enough to round the ends,
        because rounding keeps the order of numbers. None where the rounding is unknown."""
        kind = kind_of(dtype)
        if bound is None or kind is None:
            return None
        with np.errstate(over="ignore"):
            rounded = bound_of(np.array(bound.unless_nan).astype(kind))
        return hull(bound, rounded)

    def _has_integers(self, value: ir.Value | None) -> bool:
        return self.info.dtype(value) in INTEGER_RANGES


class KernelBounds(Bounds):
    """The bounds of what the kernels of ONNX Runtime give: its Sigmoid up to 1 + 2^-23, and its
    Tanh up to 1 + 2^-22, of numbers around 8 and beyond. They matter where the sign of a difference
    decides, as in front of a logarithm: elsewhere the excess is that of a rounding."""

    def _compute(self, value: ir.Value) -> Bound | None:
        bound = super()._compute(value)
        if bound is None or not is_op(value.producer(), "Sigmoid", "Tanh"):
            return bound
        low, high = bound.unless_nan
        return Bound((low * BEYOND_ONE, high * BEYOND_ONE), bound.may_be_nan)
