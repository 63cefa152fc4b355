"""Reads a boolean atten_mask as a list of selected keys and further conditions.

    top = scores.topk(K, dim=-1).indices                            # a list of keys for each row
    selected = torch.full(shape, -inf).scatter(-1, top, 0.0)        # also blocks: .repeat_interleave(block, dim=-1)
    attention(query, key, value, mask=(selected + other_mask)[:, None])

    excluded(X, w)   := where X as a truth value is w, read as a union of conditions
        Not(X)                  excluded(X, not w)
        Or(X, Y), w             excluded(X) or excluded(Y);         And(X, Y), not w: likewise, of the negations
        Where(C, n, Y)          C or excluded(Y), where the number n is itself excluded;    Where(C, Y, n): not C or ...
        Add(X, Y), w            excluded(X) or excluded(Y), where both are proven to hold no positive number (nor NaN):
                                such a sum is 0 only where both are
        Cast from or to bool, Identity, Unsqueeze of the heads' axis: the same
        numbers that are all admitted                           no condition
        anything else                                           a condition of its own
    selection        := ScatterElements(excluded numbers, indices, admitted numbers) along the keys, with the indices
                        of a TopK, in any integer type: a key that is not listed is excluded
                      | the same for blocks of keys, whose elements are then repeated side by side for the keys of each
                        block (Unsqueeze, Expand and Reshape, as repeat_interleave is exported)

There has to be exactly one selection. Nothing is assumed about what the TopK ranks or how it breaks ties: the list is
the model's own. It may list keys that the other conditions exclude, because these are looked up at its entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, AxisSpace
from fa_compiler.passes.ir.nodes import (
    axes_of,
    constant,
    input_of,
    inputs_of,
    int_attr,
    is_op,
    operand_at,
    producer,
    sole,
    text_attr,
)
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.values.facts import Facts
from fa_compiler.passes.values.shapes import ShapeInfo

INTEGERS = (ir.DataType.INT32, ir.DataType.INT64)
MAX_PARTS = 64
"""Masks of more parts than this are not taken apart further."""


@dataclass(frozen=True)
class Condition:
    """Keys are excluded where `value` as a truth value equals `when`. Its dimensions are the last ones of
    [B,1,S1,S2] if `heads`, else of [B,S1,S2]."""

    value: ir.Value
    when: bool
    heads: bool


@dataclass(frozen=True)
class Selection:
    """Keys that a TopK selects.

    `indices` [B,S1,K] are the keys that `top` selects, and `scattered` [B,S1,S2] is made of them. The conditions
    `others` exclude some of these keys. With a `block` of more than 1 indices and columns are blocks of so many keys.
    """

    top: ir.Node
    indices: ir.Value
    scattered: ir.Value
    others: tuple[Condition, ...]
    block: int = 1


@dataclass(frozen=True)
class _SelectionReader:
    facts: Facts

    @property
    def info(self) -> ShapeInfo:
        return self.facts.info

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
            elif self._truth(asked.value) is not (not asked.when):
                yield asked

    def _united(self, whole: Condition) -> list[Condition] | None:
        """The conditions whose union a condition is; None where it is no union."""
        node, when = producer(whole.value), whole.when
        operands = inputs_of(node)
        if is_op(node, "Identity") or self._between_bools(node):
            return [replace(whole, value=operands[0])]
        if is_op(node, "Not"):
            return [replace(whole, value=operands[0], when=not when)]
        if self._is_union(node, when):
            return [replace(whole, value=operand) for operand in operands]
        if is_op(node, "Where"):
            return self._of_where(whole, operands)
        if whole.heads and (inner := self._without_heads(node)) is not None:
            return [Condition(inner, when, heads=False)]
        return None

    def _is_union(self, node: ir.Node | None, when: bool) -> bool:
        """Is the result `when` exactly where one of the operands is?"""
        if when:
            return is_op(node, "Or") or self._adds_masks(node)
        return is_op(node, "And")

    def _between_bools(self, node: ir.Node | None) -> TypeGuard[ir.Node]:
        """Is this a Cast from or to bool? It keeps what is 0 and what is not 0."""
        return is_op(node, "Cast") and ir.DataType.BOOL in (
            int_attr(node, "to", 0),
            self.info.dtype(operand_at(node, 0)),
        )

    def _adds_masks(self, node: ir.Node | None) -> bool:
        """Is this a sum of numbers none of which is positive?"""
        return is_op(node, "Add") and all(map(self._has_no_positive, inputs_of(node)))

    def _has_no_positive(self, value: ir.Value) -> bool:
        numbers = self.facts.sets.of(value)
        return numbers is not None and all(number <= 0 for number in numbers)

    def _of_where(self, whole: Condition, operands: Sequence[ir.Value]) -> list[Condition] | None:
        """The conditions of a Where one of whose branches is excluded everywhere; None where none is."""
        condition, chosen, other = operands
        for branch, rest, side in ((chosen, other, True), (other, chosen, False)):
            if self._truth(branch) is whole.when:
                return [replace(whole, value=condition, when=side), replace(whole, value=rest)]
        return None

    def _truth(self, value: ir.Value) -> bool | None:
        """True where all numbers of a tensor are true, False where all are false, else None."""
        array = constant(value)
        if array is not None and array.size == 1:
            return bool(float(array.reshape(-1)[0]) != 0)
        numbers = self.facts.sets.of(value) or ()
        return sole(list({number != 0 for number in numbers}))

    def _without_heads(self, node: ir.Node | None) -> ir.Value | None:
        """The input of an Unsqueeze from [B,S1,S2] to [B,1,S1,S2]; None for other nodes."""
        if not is_op(node, "Unsqueeze") or axes_of(node) not in ([1], [-3]):
            return None
        shape = self.info.shape(operand_at(node, 0))
        if shape is None or len(shape) != 3:
            return None
        return node.inputs[0]

    def selected(self, condition: Condition) -> Selection | None:
        """The selection that a condition is, without other conditions; None where it is no selection."""
        tensor = self._excluding_tensor(condition)
        if tensor is None:
            return None
        value, when, block = tensor
        indices = self._scattered(value, when)
        if indices is None or (top := self._top(indices)) is None:
            return None
        shape, listed = self.info.shape(value) or (), self.info.shape(indices) or ()
        # Every row of the mask needs a list: ScatterElements leaves the rows beyond those of its indices as they are.
        if len(shape) != 3 or len(listed) != 3 or listed[:2] != shape[:2]:
            return None
        if self.info.shape(operand_at(top, 0)) != shape:
            return None
        return Selection(top, indices, value, (), block)

    def _scattered(self, value: ir.Value, when: bool) -> ir.Value | None:
        """The indices of a ScatterElements along the keys, which writes the other truth value into a tensor that is
        `when` everywhere; None for other values."""
        node = producer(value)
        if not is_op(node, "ScatterElements"):
            return None
        if int_attr(node, "axis", 0) not in (-1, 2) or text_attr(node, "reduction", "none") != "none":
            return None
        if self._truth(operand_at(node, 0)) is not when or self._truth(operand_at(node, 2)) is not (not when):
            return None
        return input_of(node, 1)

    def _top(self, indices: ir.Value) -> ir.Node | None:
        """The TopK of the keys that lists these indices, in any integer type; None where none does."""
        source = indices
        while is_op(maker := producer(source), "Cast", "Identity"):
            if self.info.dtype(source) not in INTEGERS:
                return None
            source = operand_at(maker, 0)
        if not is_op(maker, "TopK") or source is not maker.outputs[1] or int_attr(maker, "axis", -1) not in (-1, 2):
            return None
        return maker

    def _excluding_tensor(self, condition: Condition) -> tuple[ir.Value, bool, int] | None:
        """The tensor [B,S1,S2] that layout operators make a condition of, the truth value of it that excludes, and 1.

        For blocks the tensor is [B,S1,blocks], and instead of 1 the number of keys in a block is returned.
        """
        space, when = AxisSpace(), condition.when
        view = Viewer(self.facts, space).view(condition.value, factors=False)
        if view is None:
            return None
        own, dims = space.resolve_all(view.base_dims), space.resolve_all(view.dims)
        if condition.heads and len(dims) == 4 and not dims[1]:
            dims = (dims[0], *dims[2:])
        block = _repeated_block(own, dims, space)
        if block is None:
            return None
        base = view.base
        while is_op(node := producer(base), "Not") or self._between_bools(node):
            base, when = operand_at(node, 0), when is not is_op(node, "Not")
        return base, when, block


def _repeated_block(own: Arrangement, dims: Arrangement, space: AxisSpace) -> int | None:
    """The number of keys in a block, where the arrangement `dims` repeats each block of a tensor [B,S1,blocks] side
    by side; None for other arrangements."""
    if len(own) != 3 or len(dims) != 3 or own[:2] != dims[:2]:
        return None
    blocks, keys = own[2], dims[2]
    repeats = keys[len(blocks) :]
    if not blocks or keys[: len(blocks)] != blocks or len(repeats) > 1:
        return None
    return space.size(repeats).const


def selection(mask: ir.Value, facts: Facts) -> Selection | None:
    """The selection in a boolean mask of rank 4, True where a key is excluded; None without one or with several."""
    shape = facts.info.shape(mask)
    if shape is None or len(shape) != 4:
        return None
    reader = _SelectionReader(facts)
    parts = list(reader.conditions(Condition(mask, when=True, heads=True)))
    only = sole([(part, selected) for part in parts if (selected := reader.selected(part)) is not None])
    if only is None:
        return None
    condition, selected = only
    return replace(selected, others=tuple(other for other in parts if other is not condition))


def conditions(mask: ir.Value, when: bool, facts: Facts) -> list[Condition]:
    """The conditions that together exclude where a mask of [B,S1,S2], or its last dimensions, is `when`."""
    return list(_SelectionReader(facts).conditions(Condition(mask, when, heads=False)))


def selection_of(condition: Condition, facts: Facts) -> Selection | None:
    """The selection that a condition is, without other conditions; None where it is no selection."""
    return _SelectionReader(facts).selected(condition)
