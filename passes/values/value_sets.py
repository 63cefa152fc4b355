"""The numbers that a tensor can hold: they prove that a float mask contains only 0 and a very
negative number.

`ValueSets.of(value)` is a small set that contains every element the value can have in any run, or
None when no such set was found. A set never contains NaN: where an element could become NaN the
answer is None. What operators make of sets is in ops/numbers.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import constant, has_row, sole
from fa_compiler.passes.ops.numbers import BOOLEAN, PAIRWISE, SETS, ValueSet, set_of
from fa_compiler.passes.values.analysis import Analysis
from fa_compiler.passes.values.given_masks import inverted_mask


@dataclass
class ValueSets(Analysis[ValueSet]):
    """The value sets of one model; with `binary_masks` those of runs whose masks hold only 0 and 1
    (given_masks.py)."""

    binary_masks: bool = False

    def only(self, value: ir.Value | None) -> float | None:
        """The one number that a tensor holds in all runs; None where there are several, or unknown
        ones."""
        return sole(self.of(value))

    def only_besides_zero(self, value: ir.Value) -> float | None:
        """The one number that a tensor may hold besides 0; None where there is none, or it is not
        finite."""
        number = sole((self.of(value) or frozenset()) - {0.0})
        if number is not None and math.isfinite(number):
            return number
        return None

    def _compute(self, value: ir.Value) -> ValueSet | None:
        array = constant(value)
        if array is not None:
            return set_of(array)
        large = self.info.large.of(value)
        if large is not None:
            return large.numbers
        numbers = self._numbers_made(value)
        if numbers is None and self.info.dtype(value) == ir.DataType.BOOL:
            return BOOLEAN
        return numbers

    def _numbers_made(self, value: ir.Value) -> ValueSet | None:
        """The numbers that a node makes; None where it is an input, or the operator has no rule."""
        node = value.producer()
        if value.is_graph_input() or value.const_value is not None:
            return None
        if not has_row(node, SETS):
            return None
        inverted = (
            inverted_mask(node, self.only)
            if self.binary_masks and node.op_type in PAIRWISE
            else None
        )
        return inverted or SETS[node.op_type](node, self)
