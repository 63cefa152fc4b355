"""Finds the list of selected keys in a boolean atten_mask, and the further conditions beside it.

    top = scores.topk(K, dim=-1).indices                            # a list of keys for each row
    selected = torch.full(shape, -inf).scatter(-1, top, 0.0)        # also blocks: .repeat_interleave(block, dim=-1)
    attention(query, key, value, mask=(selected + other_mask)[:, None])

    hidden = torch.ones(shape, dtype=torch.bool).scatter(-1, top, False)        # as transformers 5 exports it
    attention(query, key, value, mask=(causal & padding & ~hidden[:, None]))

The mask is taken apart into conditions (conditions.py). Exactly one of them has to be a selection:

    1   ScatterElements(numbers that are all excluded, indices, numbers that are all admitted) along
        the keys: a key that is not listed is excluded
    2   ScatterND of the same numbers, whose places are (batch entry, row, entry of indices)
    3   1 or 2 with an axis of size 1 for the heads
    4   1 to 3 for blocks of keys, whose elements are then repeated side by side for the keys of
        each block (Unsqueeze, Expand and Reshape, as repeat_interleave is exported)
    indices  := those that a TopK of the keys gives, in any integer type

Nothing is assumed about what the TopK ranks or how it breaks ties: the list is the model's own. It
may list keys that the other conditions exclude, because these are looked up at its entries. It
lists no key twice, and as many as its own length says, so that a K beyond the number of keys fails
in both models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, AxisSpace
from fa_compiler.passes.algebra.formula import Affine
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.ir.nodes import (
    certain,
    int_attr,
    is_op,
    operand_at,
    producer,
    sole,
    text_attr,
)
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.ops.context import Shape, axis_in
from fa_compiler.passes.ops.parts import concat_of
from fa_compiler.passes.sparse.conditions import Condition, ConditionReader
from fa_compiler.passes.values.facts import Facts
from fa_compiler.passes.values.positions import Positions
from fa_compiler.passes.values.shapes import ShapeInfo

INTEGERS = (ir.DataType.INT32, ir.DataType.INT64)
SCATTERS = ("ScatterElements", "ScatterND")


@dataclass(frozen=True)
class Selection:
    """Keys that a TopK selects.

    `indices` [B,S1,K] are the keys that `top` selects, and `scattered` [B,S1,S2] is made of them.
    If `heads`, both have one more axis, of size 1, behind the batch. The conditions `others`
    exclude some of these keys. With a `block` of more than 1 indices and columns are blocks of so
    many keys.
    """

    top: ir.Node
    indices: ir.Value
    scattered: ir.Value
    others: tuple[Condition, ...]
    block: int = 1
    heads: bool = False

    @property
    def scatter(self) -> ir.Node:
        """The Scatter that makes the mask."""
        return certain(producer(self.scattered))

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
        return builder.squeeze(self.indices, [1] * self.heads)


def _without_heads(shape: Shape | None, heads: bool) -> Shape | None:
    """B, S1 and the last dimension of a tensor."""
    if shape is None or not heads:
        return shape
    return (shape[0], *shape[2:])


@dataclass(frozen=True)
class ScatteredList:
    """A mask that a Scatter makes of a list: a tensor of truths that exclude where they are
    `when`."""

    node: ir.Node
    when: bool
    block: int
    reader: ConditionReader

    @property
    def info(self) -> ShapeInfo:
        return self.reader.facts.info

    @property
    def shape(self) -> Shape:
        """The dimensions of the tensor, the last of which is the keys, or blocks of keys."""
        return self.info.sizes(self.node.outputs[0])

    @property
    def excludes_the_rest(self) -> bool:
        """Is every key excluded, but for those that are listed?"""
        if text_attr(self.node, "reduction", "none") != "none":
            return False
        background, written = (self.reader.truth(operand_at(self.node, place)) for place in (0, 2))
        return background is self.when and written is not self.when and written is not None

    @property
    def indices(self) -> ir.Value | None:
        """The listed keys of each row; None where other places are written."""
        if is_op(self.node, "ScatterND"):
            return self._last_coordinate(operand_at(self.node, 1))  # 2
        if axis_in(int_attr(self.node, "axis", 0), len(self.shape)) != len(self.shape) - 1:
            return None
        return operand_at(self.node, 1)  # 1

    @property
    def top(self) -> ir.Node | None:
        """The TopK of the keys that lists these indices, in any integer type; None where none
        does."""
        source = self.indices
        while is_op(maker := producer(source), "Cast", "Identity"):
            if self.info.dtype(source) not in INTEGERS:
                return None
            source = operand_at(maker, 0)
        rank = len(self.info.sizes(source))
        if not is_op(maker, "TopK") or source is not maker.outputs[1]:
            return None
        return maker if axis_in(int_attr(maker, "axis", -1), rank) == rank - 1 else None

    @property
    def lists_every_row(self) -> bool:
        """Has every row of the mask a list of its own keys? A Scatter leaves the rows beyond those
        of its indices as they are."""
        ranked, listed = (
            self.info.shape(value) for value in (operand_at(self.top, 0), self.indices)
        )
        return ranked == self.shape and listed is not None and listed[:-1] == self.shape[:-1]

    @property
    def fault(self) -> str:
        """Why this is no selection; empty where it is one."""
        if not self.excludes_the_rest:
            return "the Scatter does not write one truth value, which keeps a key, into a tensor that excludes all keys"
        if self.indices is None:
            return "the Scatter does not write at the keys of a list, each row at those of its own"
        if self.top is None:
            return "the list of the Scatter is not what a TopK over the keys gives, so that a key may be in it twice"
        if not self.lists_every_row:
            return "the Scatter is not proven to have a list for each row, of the keys that the mask has"
        return ""

    def _last_coordinate(self, places: ir.Value) -> ir.Value | None:
        """The last coordinate of places in the tensor, whose other coordinates are the places' own
        indices; None for other places."""
        joined, listed, shape = (
            concat_of(producer(places), self.info),
            self.info.shape(places),
            self.shape,
        )
        if joined is None or listed is None or len(listed) != len(shape) + 1 or not joined.is_last:
            return None
        *counted, last = joined.parts
        whole = (*listed[:-1], Dim(1))
        if len(counted) != len(shape) - 1 or any(
            self.info.shape(part) != whole for part in (*counted, last)
        ):
            return None
        positions = Positions(self.info, whole)
        for axis, part in enumerate(counted):
            number = positions.number(part, positions.identity_index)
            if listed[axis] != shape[axis] or (
                shape[axis].const != 1 and number != Affine.index(axis, len(whole))
            ):
                return None
        return self._without_last_axis(last)

    def _without_last_axis(self, value: ir.Value) -> ir.Value | None:
        """The input of an Unsqueeze or Reshape that adds a last axis of size 1; None for other
        values."""
        source, shape = operand_at(producer(value), 0), self.info.sizes(value)
        if (
            not is_op(producer(value), "Unsqueeze", "Reshape")
            or self.info.shape(source) != shape[:-1]
        ):
            return None
        return source


@dataclass(frozen=True)
class SelectionReader:
    """Finds selections among the conditions of a mask."""

    reader: ConditionReader

    def selected(self, condition: Condition) -> Selection | None:
        """The selection that a condition is, without other conditions; None where it is no
        selection."""
        scattered = self.scattered(condition)
        if scattered is None or scattered.fault:
            return None
        top, indices = certain(scattered.top), certain(scattered.indices)
        tensor, heads = scattered.node.outputs[0], len(scattered.shape) == 4
        return Selection(top, indices, tensor, (), scattered.block, heads)

    def scattered(self, condition: Condition) -> ScatteredList | None:
        """The Scatter that makes a condition, seen through layout operators; None where none does,
        and where other axes than those of batch, rows and keys are read.

        The tensor may have an axis of size 1 for the heads (3), and blocks in place of keys (4).
        """
        space, when = AxisSpace(), condition.when
        view = Viewer(self.reader.facts, space).view(condition.value, factors=False)
        if view is None:
            return None
        own, dims = space.resolve_all(view.base_dims), space.resolve_all(view.dims)
        if condition.heads and len(dims) == 4 and not dims[1]:
            dims = (dims[0], *dims[2:])
        if len(own) == 4 and not own[1]:
            own = (own[0], *own[2:])
        block = _repeated_block(own, dims, space)
        base = view.base
        while is_op(node := producer(base), "Not") or self.reader.is_between_bools(node):
            base, when = operand_at(node, 0), when is not is_op(node, "Not")
        if block is None or not is_op(node, *SCATTERS):
            return None
        return ScatteredList(node, when, block, self.reader)


def _repeated_block(own: Arrangement, dims: Arrangement, space: AxisSpace) -> int | None:
    """The number of keys in a block, where the arrangement `dims` repeats each block of a tensor
    [B,S1,blocks] side by side; None for other arrangements."""
    if len(own) != 3 or len(dims) != 3 or own[:2] != dims[:2]:
        return None
    blocks, keys = own[2], dims[2]
    repeats = keys[len(blocks) :]
    if not blocks or keys[: len(blocks)] != blocks or len(repeats) > 1:
        return None
    return space.size(repeats).const


def selection(mask: ir.Value, facts: Facts) -> Selection | None:
    """The selection in a boolean mask of rank 4, True where a key is excluded; None without one or
    with several."""
    return sole(selections(mask, facts))


def selections(mask: ir.Value, facts: Facts) -> list[Selection]:
    """The selections in a boolean mask of rank 4, each beside all other conditions."""
    shape = facts.info.sizes(mask)
    if len(shape) != 4:
        return []
    reader = ConditionReader(facts)
    parts = list(reader.conditions(Condition(mask, when=True, heads=True)))
    found = [
        (part, selected)
        for part in parts
        if (selected := SelectionReader(reader).selected(part)) is not None
    ]
    return [
        replace(selected, others=tuple(other for other in parts if other is not part))
        for part, selected in found
    ]


def selection_of(condition: Condition, facts: Facts) -> Selection | None:
    """The selection that a condition is, without other conditions; None where it is no
    selection."""
    return SelectionReader(ConditionReader(facts)).selected(condition)
