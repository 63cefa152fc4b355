"""Reads keys or values that are gathered by a list as their source and the list.

    key = source.gather(1, top[..., None].expand(-1, -1, D))        # the same tokens for all heads
    key = source[torch.arange(B)[:, None, None], top]               # [B, S, K, D]: one list for each row
    key = source.flatten(0, 1)[top + torch.arange(B)[:, None, None] * T]

    gathered := GatherElements(source, list) along the tokens      all other dimensions are walked
                                                                   together
              | Gather(source, list) along the tokens
              | GatherND(source, list [..., 1]), whose batch_dims are the dimensions in front of the tokens
              | GatherND(source, Concat(c, c, ...)), where one c is the list, and every other c is proven to be the
                position along a dimension of the result with the size of the indexed one, such as the batch or a head
              | Slice(gathered) | Split(gathered)                   a part of the head size; the
                                                                    source is cut likewise
    source   := any value, seen through layout and repetition (views.py); one of its dimensions is
             the tokens
              | the same with batch and tokens in one dimension. The list is then the indices of a TopK plus
                (index of the batch entry) * (tokens of a batch entry), so that no entry leaves its batch entry
    list     := any value, seen through layout, repetition and casts between integers. Where it is
                the indices of a TopK over as many keys as there are tokens, also through x mod
                tokens, Where(x < 0, x + tokens, x), Max(x, 0) and Clip(x, 0): such an x is at least
                0 and less than tokens, so these do not change it

A dimension of the source or the list is walked together with one of the result only where both
sizes are the same in every run. Of a longer dimension GatherElements reads only a part, which is
not such a gather.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes
from fa_compiler.passes.algebra.formula import Affine
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.ir.nodes import (
    ABSENT,
    first,
    int_attr,
    is_op,
    number_of,
    operand_at,
    operand_orders,
    operands,
    producer,
    sole,
)
from fa_compiler.passes.layout.views import View, Viewer
from fa_compiler.passes.ops.context import Shape, axis_in
from fa_compiler.passes.ops.parts import concat_of, cut_from
from fa_compiler.passes.values.positions import Positions

INTEGERS = (ir.DataType.INT32, ir.DataType.INT64)


@dataclass(frozen=True)
class GatheredOperand:
    """`value[a, k] = source[a, indices[a, k]]`, with the axes of all three in one space.

    `tokens` are the axes of the source that are indexed. `top` is the TopK that the indices come
    from, if it ranks as many keys as there are tokens. `node` is the node that gathers, None where
    `value` is only a part of its result.
    """

    source: View
    tokens: Axes
    indices: View
    top: ir.Node | None
    node: ir.Node | None = None


def gathered(
    value: ir.Value, dims: Arrangement, viewer: Viewer, builder: Builder
) -> GatheredOperand | None:
    """How a value arranged as `dims` was gathered; None where it was not, or not provably."""
    if (cut := cut_from(value, viewer.info)) is not None:
        return _cut_operand(*cut, dims, viewer, builder)
    node, reader = producer(value), _GatherReader(viewer, dims)
    readers = {
        "GatherElements": reader.by_elements,
        "Gather": reader.by_slices,
        "GatherND": reader.by_places,
    }
    if not is_op(node, *readers) or None in node.inputs:
        return None
    operand = readers[node.op_type](node)
    return operand and replace(operand, node=node)


def _cut_operand(
    whole: ir.Value, axis: int, start: int, dims: Arrangement, viewer: Viewer, builder: Builder
) -> GatheredOperand | None:
    """A part of a gathered value, arranged as `dims`, read as gathered from the same part of the
    source."""
    space, shape = viewer.space, viewer.info.shape(whole)
    if shape is None:
        return None
    uncut = space.new(shape[axis])
    view = viewer.view_along(whole, (*dims[:axis], uncut, *dims[axis + 1 :]))
    if view is None:
        return None
    operand = gathered(view.base, space.resolve_all(view.base_dims), viewer, builder)
    size = space.size(dims[axis]).const
    if operand is None or size is None or builder.opset < 10:
        return None
    base, own = operand.source.base, space.resolve_all(operand.source.base_dims)
    whole_axes = space.resolve(uncut)
    listed = space.resolve(chain(*operand.indices.base_dims))
    if (
        whole_axes not in own
        or not set(listed).isdisjoint(whole_axes)
        or whole_axes == space.resolve(operand.tokens)
    ):
        return None
    place = own.index(whole_axes)
    part = builder.slice(base, [start], [start + size], [place])
    cut = (*own[:place], dims[axis], *own[place + 1 :])
    return replace(
        operand, source=View(part, cut, cut, equivalent_values=((part, cut),)), node=None
    )


@dataclass(frozen=True)
class _GatherReader:
    viewer: Viewer
    dims: Arrangement

    def by_elements(self, node: ir.Node) -> GatheredOperand | None:
        """GatherElements: all dimensions but that of the tokens are walked together."""
        source, indices = operands(node)[:2]
        shape, listed = self._shape(source), self._shape(indices)
        if shape is None or listed is None or len(shape) != len(self.dims):
            return None
        axis = int_attr(node, "axis", 0) % len(shape)
        if (*shape[:axis], *shape[axis + 1 :]) != (*listed[:axis], *listed[axis + 1 :]):
            return None
        whole = self.viewer.view_along(source, [*self.dims[:axis], None, *self.dims[axis + 1 :]])
        return self._operand(whole, axis, indices, self.dims)

    def by_slices(self, node: ir.Node) -> GatheredOperand | None:
        """Gather: the dimensions of the list stand where that of the tokens was."""
        source, indices = operands(node)[:2]
        shape, listed = self._shape(source), self._shape(indices)
        if shape is None or listed is None or len(shape) - 1 + len(listed) != len(self.dims):
            return None
        axis = int_attr(node, "axis", 0) % len(shape)
        end = axis + len(listed)
        whole = self.viewer.view_along(source, [*self.dims[:axis], None, *self.dims[end:]])
        return self._operand(whole, axis, indices, self.dims[axis:end])

    def by_places(self, node: ir.Node) -> GatheredOperand | None:
        """GatherND: one coordinate is the list, and every other one is the position along a
        dimension of the result."""
        source, indices = operands(node)[:2]
        shape, listed = self._shape(source), self._shape(indices)
        batch = int_attr(node, "batch_dims", 0)
        if shape is None or not listed:
            return None
        count, front = listed[-1].const, len(listed) - 1
        coordinates = self._coordinates(indices)
        if len(coordinates) != count or front + len(shape) - batch - count != len(self.dims):
            return None
        known: list[Axes | None] = [*self.dims[:batch]]
        for coordinate, size in zip(coordinates, shape[batch:], strict=False):
            along = self._along(coordinate, size)
            known.append(None if along is None else self.dims[along])
        axis = sole([place for place, axes in enumerate(known) if axes is None])
        if axis is None:
            return None
        whole = self.viewer.view_along(source, [*known, *self.dims[front:]])
        return self._operand(whole, axis, coordinates[axis - batch], (*self.dims[:front], ()))

    def _coordinates(self, indices: ir.Value) -> list[ir.Value]:
        """The coordinates of a list of places: the list itself where it has one, or the operands of
        a Concat along the last axis; none where these are not single coordinates."""
        joined = concat_of(producer(indices), self.viewer.info)
        if (self._shape(indices) or ())[-1:] == (Dim(1),):
            return [indices]
        if joined is None or not joined.is_last:
            return []
        is_single = all(joined.size(part, self.viewer.info) == Dim(1) for part in joined.parts)
        return list(joined.parts) if is_single else []

    def _along(self, coordinate: ir.Value, size: Dim) -> int | None:
        """The dimension of the result along which a coordinate is the position, if it has this
        size."""
        shape, axis = self._shape(coordinate), self._position(coordinate, 1)
        if shape is None or axis is None or shape[axis] != size:
            return None
        return axis

    def _position(self, value: ir.Value, step: int) -> int | None:
        """The dimension along which a value is the position times `step`; None where there is
        none."""
        shape = self._shape(value)
        if shape is None:
            return None
        positions = Positions(self.viewer.info, shape)
        number = positions.number(value, positions.identity_index)
        for axis in range(len(shape)):
            if number == Affine.index(axis, len(shape)).times(step):
                return axis
        return None

    def _operand(
        self, source: View | None, axis: int, indices: ir.Value, dims: Arrangement
    ) -> GatheredOperand | None:
        """What a list arranged as `dims` gathers from a source along the dimension `axis`; None
        where the source has no view, and where the tokens are no axes of its base."""
        if source is None:
            return None
        space = self.viewer.space
        tokens = space.resolve(source.dims[axis])
        view = self._index_view(indices, dims)
        if (
            view is None
            or not tokens
            or not set(space.resolve(chain(*source.base_dims))).issuperset(tokens)
        ):
            return None
        if (ranked := self._ranked(view, space.size(tokens))) is not None:
            return GatheredOperand(source, tokens, *ranked)
        if len(tokens) == 2 and (inner := self._ranked_in_entry(view, tokens)) is not None:
            return GatheredOperand(source, tokens[1:], *inner)
        return GatheredOperand(source, tokens, view, None)

    def _index_view(self, value: ir.Value, dims: Arrangement) -> View | None:
        """The view of a list arranged as `dims`, also through casts between integers."""
        view = self.viewer.view_along(value, dims)
        if view is None or not is_op(cast := producer(view.base), "Cast"):
            return view
        source = operand_at(cast, 0)
        if not {self.viewer.info.dtype(source), self.viewer.info.dtype(view.base)} <= set(INTEGERS):
            return view
        return self._index_view(source, view.base_dims) or view

    def _ranked_in_entry(self, view: View, tokens: Axes) -> tuple[View, ir.Node] | None:
        """`_ranked` of a list over the tokens of all batch entries, whose two axes are `tokens`."""
        of_entry = self._without_batch(view, tokens)
        if of_entry is None:
            return None
        return self._ranked(of_entry, self.viewer.space.size(tokens[1:]))

    def _ranked(self, view: View, keys: Dim) -> tuple[View, ir.Node] | None:
        """The list as the indices of a TopK over this many keys, and the TopK; None where it is
        something else."""
        node = producer(view.base)
        while node is not None and not is_op(node, "TopK"):
            inner = self._unchanged(node, keys)
            deeper = None if inner is None else self._index_view(inner, view.base_dims)
            if deeper is None:
                return None
            view, node = deeper, producer(deeper.base)
        shape = self._shape(operand_at(node, 0))
        if node is None or shape is None or view.base is not node.outputs[1]:
            return None
        axis = axis_in(int_attr(node, "axis", -1), len(shape))
        if axis is None or shape[axis] != keys:
            return None
        return view, node

    def _unchanged(self, node: ir.Node, keys: Dim) -> ir.Value | None:
        """The operand that a node does not change if it is at least 0 and less than `keys`; None
        for other nodes."""
        value, number, most = (operand_at(node, place) for place in range(3))
        if is_op(node, "Where"):
            test, kept = producer(value), most
            negative = is_op(test, "Less") and operand_at(test, 0) is kept
            return kept if negative and self._number(operand_at(test, 1)) == Dim(0) else None
        least = self._number(number)
        unchanged = {
            "Mod": least == keys,
            "Max": least == Dim(0) and len(node.inputs) == 2,
            "Clip": least == Dim(0)
            and not node.attributes
            and (most is ABSENT or self._number(most) == keys - 1),
        }
        if not is_op(node, *unchanged) or not unchanged[node.op_type]:
            return None
        return value if self._shape(value) == self._shape(node.outputs[0]) else None

    def _without_batch(self, view: View, tokens: Axes) -> View | None:
        """The list of tokens within a batch entry that a list over the tokens of all batch entries
        is made from."""
        shape = self._shape(view.base)
        orders = operand_orders(producer(view.base), "Add")
        like_list = [
            (indices, offset)
            for indices, offset in orders
            if shape and self._shape(indices) == shape
        ]
        return first(
            self._of_entry(indices, offset, view.base_dims, tokens) for indices, offset in like_list
        )

    def _of_entry(
        self, indices: ir.Value, offset: ir.Value, dims: Arrangement, tokens: Axes
    ) -> View | None:
        """The view of indices, arranged as `dims`, where the offset that is added to them is the
        index of the batch entry times its tokens; None for another offset."""
        batch, length = tokens
        axis = self._steps(offset, length.size)
        if axis is None:
            return None
        place = axis + len(dims) - len(self._shape(offset) or ())
        inner = self._index_view(indices, dims)
        if inner is None or (self._shape(indices) or ())[place] != batch.size:
            return None
        return inner if self.viewer.space.unify((batch,), dims[place]) else None

    def _steps(self, offset: ir.Value, length: Dim) -> int | None:
        """The dimension along which an offset is the position times `length`; None where there is
        none."""
        if length.const is not None and (axis := self._position(offset, length.const)) is not None:
            return axis
        products = operand_orders(producer(offset), "Mul")
        positions = [position for position, factor in products if self._number(factor) == length]
        whole = [position for position in positions if self._shape(position) == self._shape(offset)]
        return first(self._position(position, 1) for position in whole)

    def _number(self, value: ir.Value) -> Dim | None:
        """The single integer that a tensor holds; None where it is not known."""
        content = self.viewer.info.integer(value)
        if content is None and (number := number_of(value)) is not None:
            return Dim(int(number))
        return content

    def _shape(self, value: ir.Value) -> Shape | None:
        return self.viewer.info.shape(value)
