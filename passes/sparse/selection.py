"""Reads a boolean atten_mask as a list of selected keys and further conditions.

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

from collections.abc import Iterator
from dataclasses import dataclass, replace

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import AxisSpace
from fa_compiler.passes.ir.nodes import axes_of, constant, input_of, int_attr, is_op, producer, text_attr
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

    def conditions(self, value: ir.Value, when: bool, heads: bool) -> Iterator[Condition]:
        """The conditions that together exclude where the value is `when`, each once.

        A part that cannot be taken apart is a condition.
        """
        pending, known = [(value, when, heads)], {(value, when, heads)}
        while pending:
            asked = pending.pop(0)
            parts = self._parts(*asked) if len(known) < MAX_PARTS else None
            if parts is None:
                if self._truth(asked[0]) is not (not asked[1]):
                    yield Condition(*asked)
                continue
            pending.extend(part for part in parts if part not in known)
            known.update(parts)

    def _parts(self, value: ir.Value, when: bool, heads: bool) -> list[tuple[ir.Value, bool, bool]] | None:
        node = producer(value)
        operands = [operand for operand in node.inputs if operand is not None] if node is not None else []
        if is_op(node, "Identity") or self._between_bools(node):
            return [(operands[0], when, heads)]
        if is_op(node, "Not"):
            return [(operands[0], not when, heads)]
        if (is_op(node, "Or") and when) or (is_op(node, "And") and not when) or (when and self._adds_masks(node)):
            return [(operand, when, heads) for operand in operands]
        if is_op(node, "Where") and (parts := self._of_where(node, when)) is not None:
            return [(part, wanted, heads) for part, wanted in parts]
        if heads and (inner := self._without_heads(node)) is not None:
            return [(inner, when, False)]
        return None

    def _between_bools(self, node: ir.Node | None) -> bool:
        """Is this a Cast from or to bool? It keeps what is 0 and what is not 0."""
        if not is_op(node, "Cast"):
            return False
        assert node is not None and node.inputs[0] is not None
        return ir.DataType.BOOL in (int_attr(node, "to", 0), self.info.dtype(node.inputs[0]))

    def _adds_masks(self, node: ir.Node | None) -> bool:
        if not is_op(node, "Add"):
            return False
        assert node is not None
        sets = [None if value is None else self.facts.sets.of(value) for value in node.inputs]
        return all(found is not None and all(number <= 0 for number in found) for found in sets)

    def _of_where(self, node: ir.Node | None, when: bool) -> list[tuple[ir.Value, bool]] | None:
        assert node is not None
        condition, chosen, other = node.inputs
        if condition is None or chosen is None or other is None:
            return None
        if self._truth(chosen) is when:
            return [(condition, True), (other, when)]
        if self._truth(other) is when:
            return [(condition, False), (chosen, when)]
        return None

    def _truth(self, value: ir.Value) -> bool | None:
        """True where all numbers of a tensor are true, False where all are false, else None."""
        array = constant(value)
        numbers = self.facts.sets.of(value) if array is None or array.size != 1 else {float(array.reshape(-1)[0])}
        if not numbers:
            return None
        found = {number != 0 for number in numbers}
        return found.pop() if len(found) == 1 else None

    def _without_heads(self, node: ir.Node | None) -> ir.Value | None:
        """The input of an Unsqueeze from [B,S1,S2] to [B,1,S1,S2]; None for other nodes."""
        if not is_op(node, "Unsqueeze"):
            return None
        assert node is not None
        shape = None if node.inputs[0] is None else self.info.shape(node.inputs[0])
        if shape is None or len(shape) != 3 or axes_of(node) not in ([1], [-3]):
            return None
        return node.inputs[0]

    def selected(self, condition: Condition) -> Selection | None:
        """The selection that a condition is, without other conditions; None where it is no selection."""
        seen = self._seen(condition)
        node = None if seen is None else producer(seen[0])
        if seen is None or not is_op(node, "ScatterElements"):
            return None
        assert node is not None
        value, when, block = seen
        data, indices, updates = node.inputs[:3]
        shape = self.info.shape(value)
        if data is None or indices is None or updates is None or shape is None or len(shape) != 3:
            return None
        if int_attr(node, "axis", 0) not in (-1, 2) or text_attr(node, "reduction", "none") != "none":
            return None
        if self._truth(data) is not when or self._truth(updates) is not (not when):
            return None
        source = indices
        while is_op(maker := producer(source), "Cast", "Identity"):
            assert maker is not None and maker.inputs[0] is not None
            if self.info.dtype(source) not in INTEGERS:
                return None
            source = maker.inputs[0]
        if not is_op(maker, "TopK") or maker is None or source is not maker.outputs[1]:
            return None
        scores, listed = input_of(maker, 0), self.info.shape(indices)
        if scores is None or int_attr(maker, "axis", -1) not in (-1, 2):
            return None
        # Every row of the mask needs a list: ScatterElements leaves the rows beyond those of its indices as they are.
        if listed is None or len(listed) != 3 or listed[:2] != shape[:2] or self.info.shape(scores) != shape:
            return None
        return Selection(maker, indices, value, (), block)

    def _seen(self, condition: Condition) -> tuple[ir.Value, bool, int] | None:
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
        if len(own) != 3 or len(dims) != 3 or own[:2] != dims[:2]:
            return None
        rest = dims[2][len(own[2]) :]
        block = space.size(rest).const
        if dims[2][: len(own[2])] != own[2] or not own[2] or block is None or len(rest) > 1:
            return None
        base = view.base
        while (node := producer(base)) is not None and (is_op(node, "Not") or self._between_bools(node)):
            first = node.inputs[0]
            assert first is not None
            base, when = first, when is not is_op(node, "Not")
        return base, when, block


def selection(mask: ir.Value, facts: Facts) -> Selection | None:
    """The selection in a boolean mask of rank 4, True where a key is excluded; None without one or with several."""
    shape = facts.info.shape(mask)
    if shape is None or len(shape) != 4:
        return None
    reader = _SelectionReader(facts)
    conditions = list(reader.conditions(mask, True, heads=True))
    found = [(condition, of) for condition in conditions if (of := reader.selected(condition)) is not None]
    if len(found) != 1:
        return None
    condition, of = found[0]
    return replace(of, others=tuple(other for other in conditions if other is not condition))


def conditions(mask: ir.Value, when: bool, facts: Facts) -> list[Condition]:
    """The conditions that together exclude where a mask of [B,S1,S2], or its last dimensions, is `when`."""
    return list(_SelectionReader(facts).conditions(mask, when, heads=False))


def selection_of(condition: Condition, facts: Facts) -> Selection | None:
    """The selection that a condition is, without other conditions; None where it is no selection."""
    return _SelectionReader(facts).selected(condition)
