"""Reads what an elementwise operator gives as a truth value, by its truth table over the numbers of
its operands.

    low = (~kept).float() * -3.4e38             # not 0 where ~kept is not 0
    left = 1 - listed.float() * kept.float()    # not 0 where listed is 0 or kept is 0

The numbers that an operand can hold are known and few (values/value_sets.py). For each choice of
one number from each operand the operator's own rule gives the number of the result, rounded as its
type rounds; no number is NaN. The result is a union where the table says so: for some operands and
a truth value of each, the result is w exactly where one of these operands has its value. No table
is read where a choice gives no number, or several.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.algebra.cases import COMPARE
from fa_compiler.passes.ir.nodes import all_known, inputs_of, is_op
from fa_compiler.passes.ops.context import Known
from fa_compiler.passes.ops.numbers import PAIRWISE, SETS, ValueSet
from fa_compiler.passes.values.facts import Facts

Row = tuple[tuple[bool, ...], bool]
"""The truth values of the operands, and that of the result."""


@dataclass(frozen=True)
class _Chosen:
    """The sets of a model in which some values hold one number each."""

    facts: Facts
    numbers: Mapping[ir.Value, float]

    @property
    def info(self) -> Known:
        return self.facts.info

    def of(self, value: ir.Value | None) -> ValueSet | None:
        """The numbers of a value."""
        if value is not None and value in self.numbers:
            return frozenset((self.numbers[value],))
        return self.facts.sets.of(value)


def united(node: ir.Node | None, when: bool, facts: Facts) -> list[tuple[ir.Value, bool]] | None:
    """The operands, each with a truth value, such that the result is `when` exactly where one of
    them has its value; None where that is not proven, and for other operators."""
    if not is_op(node, *PAIRWISE, *COMPARE, "Neg"):
        return None
    operands = list(dict.fromkeys(inputs_of(node)))
    table = _table(node, operands, facts)
    if table is None:
        return None
    for sides in itertools.product((None, True, False), repeat=len(operands)):
        parts = [
            (value, side) for value, side in zip(operands, sides, strict=True) if side is not None
        ]
        if parts and all(_holds(given, sides) is (result is when) for given, result in table):
            return parts
    return None


def _holds(given: Sequence[bool], sides: Sequence[bool | None]) -> bool:
    """Has one of the operands the truth value that is asked for?"""
    return any(own is side for own, side in zip(given, sides, strict=True))


def _table(node: ir.Node, operands: Sequence[ir.Value], facts: Facts) -> list[Row] | None:
    """The rows of the truth table, one for each choice of numbers; None where it is not known."""
    known = all_known(map(facts.sets.of, operands))
    if not known or not all(known):
        return None
    rows = list(_rows(node, operands, known, facts))
    return all_known(rows)


def _rows(
    node: ir.Node, operands: Sequence[ir.Value], known: Sequence[ValueSet], facts: Facts
) -> Iterator[Row | None]:
    for choice in itertools.product(*known):
        result = SETS[node.op_type](node, _Chosen(facts, dict(zip(operands, choice, strict=True))))
        if result is None or len(result) != 1:
            yield None
        else:
            (number,) = result
            yield tuple(each != 0.0 for each in choice), number != 0.0
