"""Finds the list of selected keys in a boolean atten_mask, and the further conditions beside it.

    top = scores.topk(K, dim=-1).indices                            # a list of keys for each row
    selected = torch.full(shape, -inf).scatter(-1, top, 0.0)        # also blocks: .repeat_interleave(block, dim=-1)
    attention(query, key, value, mask=(selected + other_mask)[:, None])

    hidden = torch.ones(shape, dtype=torch.bool).scatter(-1, top, False)        # as transformers 5 exports it
    attention(query, key, value, mask=(causal & padding & ~hidden[:, None]))

The mask is taken apart into conditions (conditions.py). Exactly one of them has to be a selection:

    1   ScatterElements(numbers that are all excluded, indices, numbers that are all admitted) along the keys: a key
        that is not listed is excluded
    2   ScatterND of the same numbers, whose places are (batch entry, row, entry of indices)
    3   1 or 2 with an axis of size 1 for the heads
    4   1 to 3 for blocks of keys, whose elements are then repeated side by side for the keys of each block (Unsqueeze,
        Expand and Reshape, as repeat_interleave is exported)
    indices  := those that a TopK of the keys gives, in any integer type

Nothing is assumed about what the TopK ranks or how it breaks ties: the list is the model's own. It may list keys that
the other conditions exclude, because these are looked up at its entries. It lists no key twice, and as many as its own
length says, so that a K beyond the number of keys fails in both models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, AxisSpace
from fa_compiler.passes.algebra.formula import Affine
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.ir.nodes import inputs_of, int_attr, is_op, operand_at, producer, sole, text_attr
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.ops.context import Shape, axis_in
from fa_compiler.passes.sparse.conditions import Condition, ConditionReader
from fa_compiler.passes.values.facts import Facts
from fa_compiler.passes.values.positions import Positions
from fa_compiler.passes.values.shapes import ShapeInfo

INTEGERS = (ir.DataType.INT32, ir.DataType.INT64)
SCATTERS = ("ScatterElements", "ScatterND")


@dataclass(frozen=True)
class Selection:
    """Keys that a TopK selects.

    `indices` [B,S1,K] are the keys that `top` selects, and `scattered` [B,S1,S2] is made of them. If `heads`, both have
    one more axis, of size 1, behind the batch. The conditions `others` exclude some of these keys. With a `block` of
    more than 1 indices and columns are blocks of so many keys.
    """

    top: ir.Node
    indices: ir.Value
    scattered: ir.Value
    others: tuple[Condition, ...]
    block: int = 1
    heads: bool = False

    def shape(self, info: ShapeInfo) -> Shape | None:
        """B, S1, and the number of columns of the tensor that the list is scattered into."""
        return _without_heads(info.shape(self.scattered), self.heads)

    def count(self, info: ShapeInfo) -> Dim | None:
        """The number of entries of a list."""
        shape = info.shape(self.indices)
        if shape is None:
            return None
        return shape[-1]

    def entries(self, builder: Builder) -> ir.Value:
        """The indices as [B,S1,K]."""
        return builder.units("Squeeze", self.indices, [1] * self.heads)


def _without_heads(shape: Shape | None, heads: bool) -> Shape | None:
    """B, S1 and the last dimension of a tensor."""
    if shape is None or not heads:
        return shape
    return (shape[0], *shape[2:])


@dataclass(frozen=True)
class _SelectionReader:
    facts: Facts
    reader: ConditionReader

    @property
    def info(self) -> ShapeInfo:
        return self.facts.info

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
        # Every row of the mask needs a list: a Scatter leaves the rows beyond those of its indices as they are.
        if len(listed) != len(shape) or listed[:-1] != shape[:-1]:
            return None
        if self.info.shape(operand_at(top, 0)) != shape:
            return None
        return Selection(top, indices, value, (), block, heads=len(shape) == 4)

    def _scattered(self, value: ir.Value, when: bool) -> ir.Value | None:
        """The indices along the keys at which a Scatter writes the other truth value into a tensor that is `when`
        everywhere; None for other values."""
        node = producer(value)
        if not is_op(node, *SCATTERS) or text_attr(node, "reduction", "none") != "none":
            return None
        if self.reader.truth(operand_at(node, 0)) is not when:
            return None
        if self.reader.truth(operand_at(node, 2)) is not (not when):
            return None
        shape, indices = self.info.shape(value), operand_at(node, 1)
        if shape is None:
            return None
        if is_op(node, "ScatterND"):
            return self._last_coordinate(indices, shape)  # 2
        if axis_in(int_attr(node, "axis", 0), len(shape)) != len(shape) - 1:
            return None
        return indices  # 1

    def _last_coordinate(self, places: ir.Value, shape: Shape) -> ir.Value | None:
        """The last coordinate of places in a tensor of this shape, whose other coordinates are the places' own indices;
        None for other places."""
        node, listed = producer(places), self.info.shape(places)
        if listed is None or len(listed) != len(shape) + 1 or not is_op(node, "Concat"):
            return None
        if axis_in(int_attr(node, "axis", 0), len(listed)) != len(shape):
            return None
        *counted, last = inputs_of(node)
        whole = (*listed[:-1], Dim(1))
        if len(counted) != len(shape) - 1 or any(self.info.shape(part) != whole for part in (*counted, last)):
            return None
        positions = Positions(self.info, whole)
        for axis, part in enumerate(counted):
            number = positions.number(part, positions.identity_index)
            if listed[axis] != shape[axis] or (shape[axis].const != 1 and number != Affine.index(axis, len(whole))):
                return None
        return self._without_last_axis(last)

    def _without_last_axis(self, value: ir.Value) -> ir.Value | None:
        """The input of an Unsqueeze or Reshape that adds a last axis of size 1; None for other values."""
        source, shape = operand_at(producer(value), 0), self.info.shape(value) or ()
        if not is_op(producer(value), "Unsqueeze", "Reshape") or self.info.shape(source) != shape[:-1]:
            return None
        return source

    def _top(self, indices: ir.Value) -> ir.Node | None:
        """The TopK of the keys that lists these indices, in any integer type; None where none does."""
        source = indices
        while is_op(maker := producer(source), "Cast", "Identity"):
            if self.info.dtype(source) not in INTEGERS:
                return None
            source = operand_at(maker, 0)
        rank = len(self.info.shape(source) or ())
        if not is_op(maker, "TopK") or source is not maker.outputs[1]:
            return None
        return maker if axis_in(int_attr(maker, "axis", -1), rank) == rank - 1 else None

    def _excluding_tensor(self, condition: Condition) -> tuple[ir.Value, bool, int] | None:
        """The tensor [B,S1,S2] that layout operators make a condition of, the truth value of it that excludes, and 1.

        The tensor may have an axis of size 1 for the heads (3). For blocks it is [B,S1,blocks], and instead of 1 the
        number of keys in a block is returned (4).
        """
        space, when = AxisSpace(), condition.when
        view = Viewer(self.facts, space).view(condition.value, factors=False)
        if view is None:
            return None
        own, dims = space.resolve_all(view.base_dims), space.resolve_all(view.dims)
        if condition.heads and len(dims) == 4 and not dims[1]:
            dims = (dims[0], *dims[2:])
        if len(own) == 4 and not own[1]:
            own = (own[0], *own[2:])
        block = _repeated_block(own, dims, space)
        if block is None:
            return None
        base = view.base
        while is_op(node := producer(base), "Not") or self.reader.is_between_bools(node):
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
    reader = ConditionReader(facts)
    parts = list(reader.conditions(Condition(mask, when=True, heads=True)))
    selections = _SelectionReader(facts, reader)
    only = sole([(part, selected) for part in parts if (selected := selections.selected(part)) is not None])
    if only is None:
        return None
    condition, selected = only
    return replace(selected, others=tuple(other for other in parts if other is not condition))


def selection_of(condition: Condition, facts: Facts) -> Selection | None:
    """The selection that a condition is, without other conditions; None where it is no selection."""
    return _SelectionReader(facts, ConditionReader(facts)).selected(condition)
