"""Takes a boolean mask apart into conditions, each of which excludes some keys.

    kept = causal & padding & ~hidden[:, None]                      # three conditions, True where a key is kept
    mask = (~kept).float() * -3.4e38

excluded(X, w), the conditions that together exclude where X as a truth value is w:

    1   Not(X), w                   excluded(X, not w)
    2   Or(X, Y), True              excluded(X, True) and excluded(Y, True)
        And(X, Y), False            excluded(X, False) and excluded(Y, False)
    3   Where(C, n, Y), w           excluded(C, True) and excluded(Y, w), where the number n is
                                    itself excluded
        Where(C, Y, n), w           excluded(C, False) and excluded(Y, w), likewise
    4   Add(X, Y), True             excluded(X, True) and excluded(Y, True), where both are proven
                                    to hold no positive number (nor NaN): such a sum is 0 only where
                                    both are
    5   any other arithmetic or comparison of tensors of few known numbers, such as X * low, 1 - X
        or X < 0.5: what its truth table says (truth_table.py)
    6   Cast from or to bool, Identity, Expand
                                    excluded(X, w)
    7   a Gather, or what only regroups dimensions, that adds or drops the axis of the heads, whose
                                    size is 1 excluded(X, w)
    8   numbers that are all admitted
                                    no condition
    9   anything else               a condition of its own

The cases 2 to 5 combine elements at one place, and 6 repeats them, so the operands may have
dimensions of 1, or fewer dimensions: each is aligned at its end with the mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile
from typing import TypeGuard

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import (
    inputs_of,
    int_attr,
    is_op,
    number_of,
    operand_at,
    producer,
    sole,
)
from fa_compiler.passes.ops.context import Shape, axis_in
from fa_compiler.passes.ops.movers import RESHAPES
from fa_compiler.passes.sparse.truth_table import united
from fa_compiler.passes.values.facts import Facts

MAX_PARTS = 64
"""Masks of more parts than this are not taken apart further."""


@dataclass(frozen=True)
class Condition:
    """Keys are excluded where `value` as a truth value equals `when`. Its dimensions are the last
    ones of [B,1,S1,S2] if `heads`, else of [B,S1,S2]."""

    value: ir.Value
    when: bool
    heads: bool


@dataclass(frozen=True)
class ConditionReader:
    """Reads the masks of one model."""

    facts: Facts

    def conditions(self, mask: Condition) -> Iterator[Condition]:
        """The conditions that together exclude what a mask excludes, each once.

        A part that cannot be taken apart is a condition.
        """
        pending, known = [mask], {mask}
        while pending:
            asked = pending.pop(0)
            parts = None
            if len(known) < MAX_PARTS:
                parts = self._united(asked)
            if parts is not None:
                pending.extend(part for part in parts if part not in known)
                known.update(parts)
            elif self.truth(asked.value) is not (not asked.when):  # 8
                yield asked  # 9

    def truth(self, value: ir.Value) -> bool | None:
        """True where all numbers of a tensor are true, False where all are false, else None."""
        number = number_of(value)
        if number is not None:
            return bool(number != 0)
        numbers = self.facts.sets.of(value) or ()
        return sole(list({number != 0 for number in numbers}))

    def is_between_bools(self, node: ir.Node | None) -> TypeGuard[ir.Node]:
        """Is this a Cast from or to bool? It keeps what is 0 and what is not 0."""
        return is_op(node, "Cast") and ir.DataType.BOOL in (
            int_attr(node, "to", 0),
            self.facts.info.dtype(operand_at(node, 0)),
        )

    def _united(self, whole: Condition) -> list[Condition] | None:
        """The conditions whose union a condition is; None where it is no union."""
        node, when = producer(whole.value), whole.when
        operands = inputs_of(node)
        if is_op(node, "Identity", "Expand") or self.is_between_bools(node):  # 6
            return [replace(whole, value=operands[0])]
        if is_op(node, "Not"):  # 1
            return [replace(whole, value=operands[0], when=not when)]
        if self._is_union(node, when):  # 2, 4
            return [replace(whole, value=operand) for operand in operands]
        if is_op(node, "Where"):  # 3
            return self._of_where(whole, operands)
        if (inner := self._moved(whole)) is not None:  # 7
            return [inner]
        if (parts := united(node, when, self.facts)) is None:  # 5
            return None
        return [replace(whole, value=operand, when=side) for operand, side in parts]

    def _is_union(self, node: ir.Node | None, when: bool) -> bool:
        """Is the result `when` exactly where one of the operands is?"""
        if when:
            return is_op(node, "Or") or self._adds_masks(node)
        return is_op(node, "And")

    def _adds_masks(self, node: ir.Node | None) -> bool:
        """Is this a sum of numbers none of which is positive?"""
        return is_op(node, "Add") and all(map(self._has_no_positive, inputs_of(node)))

    def _has_no_positive(self, value: ir.Value) -> bool:
        numbers = self.facts.sets.of(value)
        return numbers is not None and all(number <= 0 for number in numbers)

    def _of_where(self, whole: Condition, operands: Sequence[ir.Value]) -> list[Condition] | None:
        """The conditions of a Where one of whose branches is excluded everywhere; None where none
        is."""
        condition, chosen, other = operands
        for branch, rest, side in ((chosen, other, True), (other, chosen, False)):
            if self.truth(branch) is whole.when:
                return [replace(whole, value=condition, when=side), replace(whole, value=rest)]
        return None

    def _moved(self, whole: Condition) -> Condition | None:
        """The same condition of the input of an operator that adds or drops the axis of the heads;
        None for other nodes. All elements stay in order, so that only this axis, and first axes of
        size 1, can differ."""
        node, info = producer(whole.value), self.facts.info
        source = operand_at(node, 0)
        own, inner = info.shape(whole.value), info.shape(source)
        if own is None or inner is None or len(inner) > 4 or not _keeps_order(node, inner):
            return None
        heads = len(inner) == 4
        dims = _without_heads(own, whole.heads)
        if dims is None or dims != _without_heads(inner, heads):
            return None
        return Condition(source, whole.when, heads)


def _keeps_order(node: ir.Node | None, shape: Shape) -> bool:
    """Does an operator only regroup the dimensions of its input, of this shape? A Gather does where
    it reads the one place of an axis."""
    if is_op(node, "Gather"):
        axis = axis_in(int_attr(node, "axis", 0), len(shape))
        return axis is not None and shape[axis].const == 1
    return is_op(node, *RESHAPES)


def _without_heads(shape: Shape, heads: bool) -> Shape | None:
    """The dimensions without that of the heads, and without first ones of size 1; None with several
    heads."""
    if heads and len(shape) >= 3:
        if shape[-3].const != 1:
            return None
        shape = (*shape[:-3], *shape[-2:])
    return tuple(dropwhile(lambda size: size.const == 1, shape))


def conditions(mask: ir.Value, when: bool, facts: Facts) -> list[Condition]:
    """The conditions that together exclude where a mask of [B,S1,S2], or its last dimensions, is
    `when`."""
    return list(ConditionReader(facts).conditions(Condition(mask, when, heads=False)))
