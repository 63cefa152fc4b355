"""Reads keys or values that are gathered by a list as their source and the list.

    gathered := GatherElements(source, list) along the tokens      all other dimensions are walked together
              | Gather(source, list) along the tokens
              | GatherND(source, list [..., 1]), whose batch_dims are the dimensions in front of the tokens
              | GatherND(source, Concat(c, c, ...)), where one c is the list, and every other c is proven to be the
                position along a dimension of the result with the size of the indexed one, such as the batch or a head
              | Slice(gathered) | Split(gathered)                   a part of the head size; the source is cut likewise
    source   := any value, seen through layout and repetition (views.py); one of its dimensions is the tokens
              | the same with batch and tokens in one dimension. The list is then the indices of a TopK plus
                (index of the batch entry) * (tokens of a batch entry), so that no entry leaves its batch entry
    list     := any value, seen through layout, repetition and casts between integers. Where it is the indices of a TopK
                over as many keys as there are tokens, also through x mod tokens, Where(x < 0, x + tokens, x),
                Max(x, 0) and Clip(x, 0): such an x is at least 0 and less than tokens, so these do not change it

A dimension of the source or the list is walked together with one of the result only where both sizes are the same in
every run. Of a longer dimension GatherElements reads only a part, which is not such a gather.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes
from fa_compiler.passes.algebra.formula import Affine
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.ir.nodes import constant, input_of, int_attr, is_op, producer
from fa_compiler.passes.layout.views import View, Viewer
from fa_compiler.passes.ops.context import axis_in
from fa_compiler.passes.ops.cuts import cut_from
from fa_compiler.passes.values.positions import Positions

INTEGERS = (ir.DataType.INT32, ir.DataType.INT64)


@dataclass(frozen=True)
class GatheredOperand:
    """`value[a, k] = source[a, indices[a, k]]`, with the axes of all three in one space.

    `tokens` are the axes of the source that are indexed. `top` is the TopK that the indices come from, if it ranks as
    many keys as there are tokens. `node` is the node that gathers, None where `value` is only a part of its result.
    """

    source: View
    tokens: Axes
    indices: View
    top: ir.Node | None
    node: ir.Node | None = None


def gathered(value: ir.Value, dims: Arrangement, viewer: Viewer, builder: Builder) -> GatheredOperand | None:
    """How a value arranged as `dims` was gathered; None where it was not, or not provably."""
    if (cut := cut_from(value, viewer.info)) is not None:
        return _part(*cut, dims, viewer, builder)
    node = producer(value)
    reader = _GatherReader(viewer, dims)
    if node is None or any(each is None for each in node.inputs):
        return None
    found = None
    if is_op(node, "GatherElements"):
        found = reader.by_elements(node)
    elif is_op(node, "Gather"):
        found = reader.by_slices(node)
    elif is_op(node, "GatherND"):
        found = reader.by_places(node)
    return None if found is None else replace(found, node=node)


def _part(
    whole: ir.Value, axis: int, start: int, dims: Arrangement, viewer: Viewer, builder: Builder
) -> GatheredOperand | None:
    """A part of a gathered value, read as gathered from the same part of the source."""
    space, shape = viewer.space, viewer.info.shape(whole)
    if shape is None:
        return None
    uncut = space.new(shape[axis])
    view = viewer.view_along(whole, (*dims[:axis], uncut, *dims[axis + 1 :]))
    found = None if view is None else gathered(view.base, space.resolve_all(view.base_dims), viewer, builder)
    size = space.size(dims[axis]).const
    if found is None or size is None or builder.opset < 10:
        return None
    base, own = found.source.base, space.resolve_all(found.source.base_dims)
    place = next((index for index, dim in enumerate(own) if dim == space.resolve(uncut)), None)
    listed = {each for dim in found.indices.base_dims for each in space.resolve(dim)}
    if place is None or listed.intersection(own[place]) or own[place] == space.resolve(found.tokens):
        return None
    bounds = [builder.ints([number]) for number in (start, start + size, place)]
    part = builder.op("Slice", [base, *bounds], viewer.info.dtype(base))
    cut = (*own[:place], dims[axis], *own[place + 1 :])
    return replace(found, source=View(part, cut, cut, equivalent_values=((part, cut),)), node=None)


@dataclass(frozen=True)
class _GatherReader:
    viewer: Viewer
    dims: Arrangement

    def by_elements(self, node: ir.Node) -> GatheredOperand | None:
        source, indices = _operands(node)
        shape, listed = self._shape(source), self._shape(indices)
        if shape is None or listed is None or len(shape) != len(self.dims):
            return None
        axis = int_attr(node, "axis", 0) % len(shape)
        if any(own != size for place, (own, size) in enumerate(zip(shape, listed, strict=True)) if place != axis):
            return None
        whole = self.viewer.view_along(source, [*self.dims[:axis], None, *self.dims[axis + 1 :]])
        return None if whole is None else self._listed(whole, axis, indices, self.dims)

    def by_slices(self, node: ir.Node) -> GatheredOperand | None:
        source, indices = _operands(node)
        shape, listed = self._shape(source), self._shape(indices)
        if shape is None or listed is None or len(shape) - 1 + len(listed) != len(self.dims):
            return None
        axis = int_attr(node, "axis", 0) % len(shape)
        whole = self.viewer.view_along(source, [*self.dims[:axis], None, *self.dims[axis + len(listed) :]])
        return None if whole is None else self._listed(whole, axis, indices, self.dims[axis : axis + len(listed)])

    def by_places(self, node: ir.Node) -> GatheredOperand | None:
        """GatherND: one coordinate is the list, and every other one is the position along a dimension of the result."""
        source, indices = _operands(node)
        shape, listed = self._shape(source), self._shape(indices)
        batch = int_attr(node, "batch_dims", 0)
        if shape is None or not listed or listed[-1].const is None:
            return None
        count, front = listed[-1].const, len(listed) - 1
        if front + len(shape) - batch - count != len(self.dims):
            return None
        coordinates = [(indices, count)] if count == 1 else self._coordinates(indices)
        if len(coordinates) != count:
            return None
        rest: list[Axes | None] = [*self.dims[:batch]]
        axis: int | None = None
        for place, (coordinate, _) in enumerate(coordinates):
            along = self._along(coordinate, shape[batch + place])
            if along is None and axis is not None:
                return None
            axis = batch + place if along is None else axis
            rest.append(None if along is None else self.dims[along])
        whole = self.viewer.view_along(source, [*rest, *self.dims[front:]])
        if whole is None or axis is None:
            return None
        return self._listed(whole, axis, coordinates[axis - batch][0], (*self.dims[:front], ()))

    def _coordinates(self, indices: ir.Value) -> list[tuple[ir.Value, int]]:
        """The operands of a Concat along the last axis, if each is one coordinate; else none."""
        node, shape = producer(indices), self._shape(indices)
        if not is_op(node, "Concat") or node is None or shape is None:
            return []
        if int_attr(node, "axis", 0) not in (-1, len(shape) - 1):
            return []
        parts = [(value, 1) for value in node.inputs if value is not None]
        return parts if all((own := self._shape(value)) and own[-1].const == 1 for value, _ in parts) else []

    def _along(self, coordinate: ir.Value, size: Dim) -> int | None:
        """The dimension of the result along which a coordinate is the position, if it has this size."""
        shape = self._shape(coordinate)
        axis = None if shape is None else self._position(coordinate, 1)
        return axis if axis is not None and shape is not None and shape[axis] == size else None

    def _position(self, value: ir.Value, step: int) -> int | None:
        """The dimension along which a value is the position times `step`; None where there is none."""
        shape = self._shape(value)
        if shape is None:
            return None
        positions = Positions(self.viewer.info, shape)
        found = positions.number(value, positions.identity_index)
        for axis in range(len(shape)):
            if found == Affine.index(axis, len(shape)).times(step):
                return axis
        return None

    def _listed(self, source: View, axis: int, indices: ir.Value, dims: Arrangement) -> GatheredOperand | None:
        space = self.viewer.space
        tokens = space.resolve(source.dims[axis])
        owned = {axis for dim in source.base_dims for axis in space.resolve(dim)}
        view = self._index_view(indices, dims)
        if view is None or not tokens or not owned.issuperset(tokens):
            return None
        found = self._within(view, space.size(tokens))
        if found is None and len(tokens) == 2:
            apart = self._without_batch(view, tokens)
            inner = None if apart is None else self._within(apart, space.size(tokens[1:]))
            if inner is not None:
                return GatheredOperand(source, tokens[1:], *inner)
        return GatheredOperand(source, tokens, view, None) if found is None else GatheredOperand(source, tokens, *found)

    def _index_view(self, value: ir.Value, dims: Arrangement) -> View | None:
        """The view of a list arranged as `dims`, also through casts between integers."""
        view = self.viewer.view_along(value, dims)
        node = None if view is None else producer(view.base)
        if view is None or not is_op(node, "Cast") or node is None or node.inputs[0] is None:
            return view
        types = self.viewer.info.dtype(node.inputs[0]), self.viewer.info.dtype(view.base)
        inner = self._index_view(node.inputs[0], view.base_dims) if set(types) <= set(INTEGERS) else None
        return inner or view

    def _within(self, view: View, keys: Dim) -> tuple[View, ir.Node] | None:
        """The list as the indices of a TopK over this many keys, and the TopK; None where it is something else."""
        node = producer(view.base)
        while node is not None and not is_op(node, "TopK"):
            inner = self._unchanged(node, keys)
            deeper = None if inner is None else self._index_view(inner, view.base_dims)
            if deeper is None:
                return None
            view, node = deeper, producer(deeper.base)
        ranked = None if node is None else node.inputs[0]
        shape = None if ranked is None else self._shape(ranked)
        if node is None or shape is None or view.base is not node.outputs[1]:
            return None
        axis = axis_in(int_attr(node, "axis", -1), len(shape))
        return (view, node) if axis is not None and shape[axis] == keys else None

    def _unchanged(self, node: ir.Node, keys: Dim) -> ir.Value | None:
        """The operand that a node does not change if it is at least 0 and less than `keys`; None for other nodes."""
        first = input_of(node, 0)
        if first is None or self._shape(first) != self._shape(node.outputs[0]):
            # A Where has its condition first.
            first = input_of(node, 2) if is_op(node, "Where") else None
        if is_op(node, "Mod") and self._number(input_of(node, 1)) == keys:
            return first
        if is_op(node, "Where"):
            test, last = producer(node.inputs[0]), input_of(node, 2)
            negative = is_op(test, "Less") and test is not None and test.inputs[0] is last
            return last if negative and test is not None and self._number(test.inputs[1]) == Dim(0) else None
        if is_op(node, "Max") and len(node.inputs) == 2 and self._number(node.inputs[1]) == Dim(0):
            return first
        if is_op(node, "Clip") and not node.attributes and self._number(input_of(node, 1)) == Dim(0):
            most = input_of(node, 2)
            return first if most is None or self._number(most) == keys - 1 else None
        return None

    def _without_batch(self, view: View, tokens: Axes) -> View | None:
        """The list of tokens within a batch entry that a list over the tokens of all batch entries is made from."""
        node, shape = producer(view.base), self._shape(view.base)
        batch, length = tokens
        if not is_op(node, "Add") or node is None or shape is None:
            return None
        for indices, offset in (node.inputs, node.inputs[::-1]):
            own = None if offset is None else self._shape(offset)
            if indices is None or offset is None or own is None or self._shape(indices) != shape:
                continue
            axis = self._steps(offset, length.size)
            place = None if axis is None else axis + len(shape) - len(own)
            inner = None if place is None else self._index_view(indices, view.base_dims)
            if inner is None or place is None or shape[place] != batch.size:
                continue
            if self.viewer.space.unify((batch,), view.base_dims[place]):
                return inner
        return None

    def _steps(self, offset: ir.Value, length: Dim) -> int | None:
        """The dimension along which an offset is the position times `length`."""
        if length.const is not None and (axis := self._position(offset, length.const)) is not None:
            return axis
        node = producer(offset)
        if is_op(node, "Mul") and node is not None:
            for position, factor in (node.inputs, node.inputs[::-1]):
                if position is None or self._number(factor) != length or self._shape(position) != self._shape(offset):
                    continue
                if (axis := self._position(position, 1)) is not None:
                    return axis
        return None

    def _number(self, value: ir.Value | None) -> Dim | None:
        """The single integer that a tensor holds; None where it is not known."""
        if value is None:
            return None
        content = self.viewer.info.integer(value)
        if content is None and (array := constant(value, limit=1)) is not None and array.size == 1:
            content = Dim(int(array.reshape(-1)[0]))
        return content

    def _shape(self, value: ir.Value | None) -> tuple[Dim, ...] | None:
        shape = None if value is None else self.viewer.info.shape(value)
        return None if shape is None else tuple(shape)


def _operands(node: ir.Node) -> tuple[ir.Value, ir.Value]:
    source, indices = node.inputs[0], node.inputs[1]
    assert source is not None and indices is not None
    return source, indices
