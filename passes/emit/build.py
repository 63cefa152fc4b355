"""Making new nodes, with unique names. Equal nodes are made once, and symbolic sizes are computed
from values at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes, KnownAxes
from fa_compiler.passes.algebra.symbolic import Dim, consts
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.emit.dequantised import MOVING, Dequantised, dequantised
from fa_compiler.passes.emit.operators import AttrValue, Operators, content_key
from fa_compiler.passes.ir.nodes import (
    certain,
    inputs_of,
    int_attr,
    operand_at,
    takes_initializers,
    without_none,
)
from fa_compiler.passes.ir.surgery import replace_value
from fa_compiler.passes.layout.plan import Move, Reshape, SqueezeUnsqueeze, Transpose, plan_moves
from fa_compiler.passes.values.shapes import ShapeInfo

PREFIX = "fa"
TYPED_CONSTANTS = 9
"""From this opset on a Constant may hold any type."""
INT64 = ir.DataType.INT64


@dataclass
class Names:
    """The names in use in a model, for making new ones."""

    taken: set[str]
    _counts: dict[str, int] = field(default_factory=dict)
    """The last number that a stem was given."""
    _made: list[tuple[str, str, int]] = field(default_factory=list)
    """The new names in order, each with its stem and the last number of the stem before."""

    @staticmethod
    def of(graphs: Iterable[ir.Graph]) -> Names:
        """All names in use anywhere in the graphs of a model."""
        taken: set[str] = set()
        for graph in graphs:
            taken.update(name for value in graph.inputs if (name := value.name))
            taken.update(graph.initializers)
            for node in graph:
                taken.update(name for output in node.outputs if (name := output.name))
                if node.name:
                    taken.add(node.name)
        return Names(taken)

    def new(self, stem: str) -> str:
        """A fresh name that begins with the stem."""
        name, last = stem, self._counts.get(stem, 1)
        count = last
        while name in self.taken:
            count += 1
            name = f"{stem}_{count}"
        self._counts[stem] = count
        self._made.append((name, stem, last))
        self.taken.add(name)
        return name

    @property
    def mark(self) -> int:
        """A place in the order of new names, for `since` and `give_back`."""
        return len(self._made)

    def since(self, mark: int) -> frozenset[str]:
        """The new names since a place."""
        return frozenset(name for name, _, _ in self._made[mark:])

    def give_back(self, mark: int) -> None:
        """Forget the new names since a place, so that they may be given again."""
        while len(self._made) > mark:
            name, stem, last = self._made.pop()
            self.taken.discard(name)
            self._counts[stem] = last

    def release(self, mark: int) -> None:
        """Let somebody else take the new names since a place. They are not given again."""
        self.taken.difference_update(self.since(mark))


@dataclass(frozen=True)
class Place:
    """A place in the work of a builder, to which it can go back: how much of everything there
    was."""

    names: int
    requests: int
    lengths: int
    lone: int
    nodes: int


@dataclass
class Builder(Operators):
    """Adds nodes to one graph. The graph is left unsorted: its owner sorts it once at the end."""

    graph: ir.Graph
    names: Names
    info: ShapeInfo
    path: str = ""
    """The path in the names of the fused nodes that are made: where the model computes what they
    compute."""
    lengths: dict[Dim, ir.Value] = field(default_factory=dict)
    """Values, int64 [1], of sizes that are computed in the graph. An equal size is read from them
    again."""
    _made: dict[tuple[object, ...], ir.Value] = field(default_factory=dict)
    """What is made, by the request for it, in order."""
    _order: list[tuple[object, ...]] = field(default_factory=list)
    """The requests in order."""
    _known: set[ir.Value] = field(default_factory=set)
    """The values that are made."""
    _lone: list[ir.Node] = field(default_factory=list)
    """Nodes that were made outside of the graph, where most of them are put later."""

    @property
    def mark(self) -> int:
        """A place in the order of what is made, for `nodes_since`."""
        return len(self._order)

    @property
    def nodes(self) -> list[ir.Node]:
        """The nodes made so far."""
        return self.nodes_since(0)

    def nodes_since(self, mark: int) -> list[ir.Node]:
        """The nodes made since a place."""
        makers = (self._made[key].producer() for key in self._order[mark:])
        return without_none(makers)

    @property
    def place(self) -> Place:
        """Where the work is, for `go_back`."""
        return Place(
            self.names.mark, self.mark, len(self.lengths), len(self._lone), len(self.graph)
        )

    def go_back(self, place: Place) -> None:
        """Take back all nodes, constants and names that were made since a place. Nothing else reads
        them."""
        for node in self._lone[place.lone :]:
            if node.graph is None:
                for index in range(len(node.inputs)):
                    node.replace_input_with(index, None)
        del self._lone[place.lone :]
        while len(self.graph) > place.nodes:
            self.graph.remove(self.graph[-1], safe=True)
        while len(self._order) > place.requests:
            value = self._made.pop(self._order.pop())
            self._known.discard(value)
            if value.is_initializer() and value.name is not None:
                del self.graph.initializers[value.name]
        while len(self.lengths) > place.lengths:
            self.lengths.popitem()
        self.names.give_back(place.names)

    def lone(self, node: ir.Node) -> ir.Node:
        """A node that is made outside of the graph, because it may turn out to be wrong. If it is
        right, its maker puts it into the graph."""
        self._lone.append(node)
        return node

    def fused_name(self, operator: str) -> str:
        """A new name for a fused operator, in the path of what it computes if there is one."""
        stem = f"{self.path}/{operator}"
        if not self.path:
            stem = f"{PREFIX}_{operator}"
        return self.names.new(stem)

    def has_made(self, value: ir.Value) -> bool:
        """Is the value the first output of a node that was made here?"""
        return value.producer() is not None and value in self._known

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attrs: Mapping[str, AttrValue] | None = None,
        *,
        dtype: ir.DataType | None = None,
        outputs: int = 1,
        domain: str = "",
        stays: bool = False,
    ) -> ir.Value:
        """The first output of a new operator with this number of outputs; the same value for an
        equal request. `dtype` is its type where shape inference does not know the operator.

        An operator that moves what a DequantizeLinear gives is put in front of it (dequantised.py),
        unless it `stays`.
        """
        movable = op_type in MOVING and not domain and not stays
        if movable and (source := dequantised(inputs[0], self.info)) is not None:
            return self._in_front(source, op_type, inputs[1:], attrs)
        attributes = dict(attrs or {})
        key = (domain, op_type, tuple(map(id, inputs)), repr(sorted(attributes.items())))
        if key not in self._made:
            name = self.names.new(f"{PREFIX}_{op_type}")
            node = ir.node(
                op_type, list(inputs), attributes, domain=domain, num_outputs=outputs, name=name
            )
            output = node.outputs[0]
            for value in node.outputs:
                value.name = self.names.new(f"{PREFIX}_{op_type}_output")
            self.graph.append(node)
            if (known := dtype or self.info.dtype(output)) is not None:
                output.dtype = known
            shape = self.info.shape(output)
            if shape is not None:
                output.shape = ir.Shape(consts(shape))
            self._remember(key, output)
        return self._made[key]

    def _in_front(
        self,
        source: Dequantised,
        op_type: str,
        others: Sequence[ir.Value | None],
        attrs: Mapping[str, AttrValue] | None,
    ) -> ir.Value:
        """A DequantizeLinear of the integers of `source` behind its operators and a new one.
        `others` are the inputs of the new one after the first."""
        value = source.integers
        for move in source.moves:
            value = self.again(move, [value, *move.inputs[1:]])
        value = self.op(op_type, [value, *others], attrs)
        scales, real = source.node.inputs[1:], self.info.dtype(source.node.outputs[0])
        return self.op(
            "DequantizeLinear",
            [value, *scales],
            source.attributes,
            dtype=real,
            domain=source.node.domain,
        )

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Put a value in the place of another one, under its name if that is an output of the
        graph."""
        named = old.is_graph_output()
        if named:
            new = self.alias(new)
        replace_value(old, new, rename=named)

    def for_output(self, old: ir.Value, new: ir.Value) -> ir.Value:
        """What takes the place of an old value: the new one, or an alias of it where the old one is
        an output of the graph and the new one cannot take its name."""
        can_be_named = self.has_made(new) and not new.is_graph_output()
        return self.alias(new) if old.is_graph_output() and not can_be_named else new

    def squeeze(self, value: ir.Value, axes: Sequence[int]) -> ir.Value:
        """A value without some dimensions of 1; as it is where there are none."""
        return self._units("Squeeze", value, axes)

    def unsqueeze(self, value: ir.Value, axes: Sequence[int]) -> ir.Value:
        """A value with more dimensions of 1; as it is where there are none."""
        return self._units("Unsqueeze", value, axes)

    def _units(self, op_type: str, value: ir.Value, axes: Sequence[int]) -> ir.Value:
        if not axes:
            return value
        if self.opset >= 13:
            return self.op(op_type, [value, self.ints(axes)])
        return self.op(op_type, [value], {"axes": tuple(axes)})

    def split(self, value: ir.Value, axis: int, sizes: Sequence[int]) -> Sequence[ir.Value]:
        """A value cut along one axis into parts of these sizes."""
        inputs = [value]
        attributes: dict[str, int | tuple[int, ...]] = {"axis": axis}
        if self.opset >= 13:
            inputs.append(self.ints(sizes))
        else:
            attributes["split"] = tuple(sizes)
        node = certain(self.op("Split", inputs, attributes, outputs=len(sizes)).producer())
        return node.outputs

    def alias(self, value: ir.Value) -> ir.Value:
        """The same tensor as another value, which can be given a name of its own."""
        node = ir.node("Identity", [value], name=self.names.new(f"{PREFIX}_Identity"))
        node.outputs[0].name = self.names.new(f"{PREFIX}_Identity_output")
        self.graph.append(node)
        return node.outputs[0]

    def constant(self, array: np.ndarray, stem: str = "const") -> ir.Value:
        """A constant with this content; the same value for equal content. It is an initializer
        where the graph may have one."""
        key = ("constant", *content_key(array))
        if key not in self._made:
            tensor = ir.tensor(array, name=self.names.new(f"{PREFIX}_{stem}"))
            if takes_initializers(self.graph):
                value = ir.Value(name=tensor.name, const_value=tensor)
                value.dtype, value.shape = tensor.dtype, ir.Shape(array.shape)
                self.graph.register_initializer(value)
                self._remember(key, value)
            else:
                self._remember(key, self._constant_node(tensor))
        return self._made[key]

    def _constant_node(self, tensor: ir.TensorProtocol) -> ir.Value:
        """A Constant node. Where the opset has only Constants of floats, integers become float64
        and are cast back. Raises Decline where float64 does not hold the numbers."""
        array = tensor.numpy()
        if self.opset < TYPED_CONSTANTS and array.dtype.kind in "iub":
            wide = array.astype(np.float64)
            if not np.array_equal(wide.astype(array.dtype), array):
                raise Decline(
                    Code.OPSET, f"a Constant of opset {self.opset} holds no {array.dtype}", None
                )
            return self.cast(self._constant_node(ir.tensor(wide, name=tensor.name)), tensor.dtype)
        node = ir.node("Constant", [], {"value": tensor}, name=tensor.name)
        (value,) = node.outputs
        value.name, value.dtype, value.shape = tensor.name, tensor.dtype, ir.Shape(array.shape)
        self.graph.append(node)
        return value

    def _remember(self, key: tuple[object, ...], value: ir.Value) -> None:
        self._made[key] = value
        self._order.append(key)
        self._known.add(value)

    def drop_unused_constants(self) -> None:
        """Remove constants that were made for nodes that were not added in the end. Nothing may be
        built afterwards."""
        for key, value in self._made.items():
            if key[0] != "constant" or value.uses():
                continue
            if (node := value.producer()) is not None:
                if node.graph is not self.graph:
                    continue
                sources = inputs_of(node)
                self.graph.remove(node, safe=True)
                makers = [source.producer() for source in sources if not source.uses()]
                self.graph.remove(without_none(makers), safe=True)
            elif value.name is not None and value.name in self.graph.initializers:
                self.graph.initializers.pop(value.name)

    def ints(self, numbers: Sequence[int]) -> ir.Value:
        """A vector of int64."""
        try:
            return self.constant(np.array(numbers, dtype=np.int64), "shape")
        except OverflowError:
            raise Decline(
                Code.SHAPE, f"a size of {max(numbers)} is more than any tensor can have"
            ) from None

    def dimension(self, x: ir.Value, axis: int) -> ir.Value:
        """The size of one dimension of x, int64 [1]: a constant where it is known."""
        shape = self.info.shape(x)
        if shape is not None and (size := shape[axis].const) is not None:
            return self.ints([size])
        return super().dimension(x, axis)

    def length(self, value: ir.Value, axis: int) -> ir.Value:
        """The size of one dimension of an operand of an attention operator that the model holds,
        int64 [1].

        Raises Decline where the rank is unknown. An equal size that an earlier operator read is
        used again. It lies before this operator, because such operators are fused in the order of
        the graph.
        """
        shape = self.info.shape(value)
        if shape is None:
            raise Decline(Code.RANK, f"the rank of {value.name!r} is unknown")
        if axis >= len(shape):
            raise Decline(
                Code.RANK,
                f"the rank of {value.name!r} is {len(shape)}, too small for dimension {axis}",
            )
        size = shape[axis]
        if size.const is not None:
            return self.dimension(value, axis)
        if size not in self.lengths:
            self.lengths[size] = self.dimension(value, axis)
        return self.lengths[size]

    def range(self, count: ir.Value) -> ir.Value:
        """The numbers 0, 1, ... below a count, which is int64 [1]."""
        zero, one = (self.constant(np.array(number, dtype=np.int64), "number") for number in (0, 1))
        return self.op("Range", [zero, self.squeeze(count, (0,)), one])


@dataclass(frozen=True)
class LayoutEmitter:
    """Carries out layout plans. The dimensions of `size_sources`, values with their arrangements,
    give the sizes of axes at run time."""

    builder: Builder
    space: KnownAxes
    size_sources: list[tuple[ir.Value, Arrangement]]

    def apply(self, value: ir.Value, dims: Arrangement, plan: Sequence[Move]) -> ir.Value:
        """The value after the moves of the plan. Raises Decline where a size cannot be computed or
        is folded unproven."""
        short = self.space.short_dims(dims, self.builder.info.shape(value))
        if any(dim not in move.dims for move in plan if isinstance(move, Reshape) for dim in short):
            raise Decline(
                Code.SHAPE, f"{value.name!r} folds a size that may be 1 in some run with others"
            )
        if self._folds_unproven(value, dims, plan):
            value = self.builder.expand(value, self._full_target(dims, self.size_sources))
        for move in plan:
            if isinstance(move, Transpose):
                value = self.builder.transpose(value, move.perm)
            elif isinstance(move, SqueezeUnsqueeze):
                value = self.builder.squeeze(value, move.removed)
                value = self.builder.unsqueeze(value, move.inserted)
            elif isinstance(move, Reshape):
                value = self._reshape(value, dims, move.dims)
            else:
                sources = list(self.size_sources)
                if not any(map(self.space.may_broadcast, dims)):
                    sources.append((value, dims))
                target = self._full_target(move.dims, sources)
                value = self.builder.expand(value, target)
            dims = move.dims
        return value

    def arranged(
        self,
        value: ir.Value,
        dims: Arrangement,
        target: Arrangement,
        reason: str = "it could not be arranged",
        culprit: ir.Node | None = None,
    ) -> ir.Value:
        """The value, arranged as `target`. Raises Decline for this reason where no moves lead
        there."""
        plan = plan_moves(dims, target)
        if plan is None:
            raise Decline(Code.SHAPE, reason, culprit)
        return self.apply(value, dims, plan)

    def _folds_unproven(self, value: ir.Value, dims: Arrangement, plan: Sequence[Move]) -> bool:
        """Does the plan merge or split a dimension that may be 1 in a run in which its axis is
        longer? Whole, such a dimension is broadcast; merged or split, it is not."""
        shape = self.builder.info.sizes(value)
        unproven = [
            dim for dim, size in zip(dims, shape, strict=False) if self.space.size(dim) != size
        ]
        reshaped = [dim for move in plan if isinstance(move, Reshape) for dim in move.dims]
        changed = [dim for dim in unproven if dim not in reshaped]
        return not set(chain(*changed)).isdisjoint(chain(*reshaped))

    def repeated(self, value: ir.Value, dims: Arrangement) -> ir.Value:
        """The value, expanded to the sizes of these axes where it may be 1 along one of them in
        some run."""
        shape = self.builder.info.sizes(value)
        if None not in consts(shape) and list(shape) == [self.space.size(dim) for dim in dims]:
            return value
        return self.builder.expand(value, self._full_target(dims, self.size_sources))

    def cut(self, value: ir.Value, dims: Arrangement, dimension: int) -> ir.Value:
        """The first elements of a value in a dimension, as many as its axis has."""
        builder, size = (
            self.builder,
            self._full_target(dims[dimension : dimension + 1], self.size_sources),
        )
        return builder.slice(value, [0], size, [dimension])

    def shape_vector(
        self, dims: Arrangement, reader: ir.Node, terms: Sequence[ir.Value]
    ) -> ir.Value:
        """The result of the Shape node `reader`, for a value of this arrangement.

        The value may be smaller than an axis where only a later operand is larger. So its sizes are
        computed from what it is made of: the operands, and the `terms` that were added to them.
        """
        sizes = self.builder.info.shape(operand_at(reader, 0)) or [
            self.space.size(dim) for dim in dims
        ]
        start, end = int_attr(reader, "start", 0), int_attr(reader, "end", len(dims))
        pairs = list(zip(dims, sizes, strict=True))[start:end]
        made_of = [*(value for value, _ in self.size_sources), *terms]
        consts = [size.const for _, size in pairs]
        return self._vector(consts, lambda: [self._own_size(*pair, made_of) for pair in pairs])

    def _own_size(self, dim: Axes, size: Dim, made_of: Sequence[ir.Value]) -> ir.Value:
        """The size of a value along an axis, computed from what the value is made of. The size of
        the axis may be another one."""
        if size.const is not None:
            return self.builder.ints([size.const])
        broadcast = self._broadcast(size, made_of)
        if broadcast is not None:
            return broadcast
        if len(size.broadcast_parts) > 1:
            raise Decline(
                Code.SHAPE, f"the size {size} of a value cannot be computed from any operand"
            )
        return self._size(dim, self.size_sources)

    def _broadcast(self, size: Dim, values: Sequence[ir.Value]) -> ir.Value | None:
        """A size computed from values: one of them has it, or the sizes of several are broadcast to
        it. None where neither is so."""
        sizes = [
            (value, place, own)
            for value in values
            for place, own in enumerate(self.builder.info.sizes(value))
        ]
        whole = next(
            (self.builder.dimension(value, place) for value, place, own in sizes if own == size),
            None,
        )
        if whole is not None:
            return whole
        result: ir.Value | None = None
        missing = set(size.broadcast_parts)
        for value, place, own in sizes:
            if missing.intersection(own.broadcast_parts) and set(own.broadcast_parts) <= set(
                size.broadcast_parts
            ):
                missing.difference_update(own.broadcast_parts)
                other = self.builder.dimension(value, place)
                if result is not None:  # each size is 1 or that of the others
                    one = self.builder.equal(result, self.builder.ints([1]))
                    other = self.builder.where(one, other, result)
                result = other
        if missing:
            return None
        return result

    def _reshape(self, value: ir.Value, dims: Arrangement, target: Arrangement) -> ir.Value:
        """Reshape by a constant target, with copied dimensions (0) or one inferred dimension (-1),
        else by computed sizes.

        A dimension that stays whole keeps its own size, which may be 1 in a run in which its axis
        is longer.

        A size that is known to be 0 is copied, inferred or computed as well, because a 0 in the
        target copies a dimension.

        Copied and inferred dimensions are not used together, because that is refused in a run in
        which a copied size is 0. Before opset 14 a 0 in a computed target copies a dimension, too:
        such a run may end in an error of this Reshape.
        """
        sizes: list[int | None] = []
        own = dict(zip(dims, self.builder.info.sizes(value), strict=False))
        for index, dim in enumerate(target):
            size = own.get(dim, self.space.size(dim)).const or None
            if size is None and index < len(dims) and dims[index] == dim:
                size = 0
            sizes.append(size)
        if None not in sizes or (sizes.count(None) == 1 and 0 not in sizes):
            shape = self.builder.ints([-1 if size is None else size for size in sizes])
            return self.builder.reshape(value, shape)
        # The value's own dimensions come first: two axes that walk together may be 1 and n in some
        # run.
        sources = [(value, dims), *self.size_sources]
        parts = [
            self.builder.dimension(value, dims.index(dim))
            if dim in own
            else self._size(dim, sources)
            for dim in target
        ]
        shape = self.builder.concat(parts, 0)
        attrs = {}
        if self.builder.opset >= 14:
            attrs["allowzero"] = 1
        return self.builder.op("Reshape", [value, shape], attrs)

    def _full_target(
        self, target: Arrangement, size_sources: Sequence[tuple[ir.Value, Arrangement]]
    ) -> ir.Value:
        """The target's sizes as a vector computed at run time, constants where they are known."""
        consts = [self.space.size(dim).const for dim in target]
        return self._vector(consts, lambda: [self._size(dim, size_sources) for dim in target])

    def _vector(
        self, consts: Sequence[int | None], parts: Callable[[], list[ir.Value]]
    ) -> ir.Value:
        """Sizes as one vector: a constant where all of them are known, else made of its parts."""
        if None not in consts:
            return self.builder.ints(without_none(consts))
        return self.builder.concat(parts(), 0)

    def _size(self, dim: Axes, size_sources: Sequence[tuple[ir.Value, Arrangement]]) -> ir.Value:
        """The product of the axes' sizes as a vector of one element."""
        const = self.space.size(dim).const
        if const is not None:
            return self.builder.ints([const])
        for value, dims in size_sources:
            for index, merged in enumerate(dims):
                rest = tuple(axis for axis in merged if axis not in dim)
                others = self.space.size(rest).const
                if others and len(rest) + len(dim) == len(merged):
                    size = self.builder.dimension(value, index)
                    if others == 1:
                        return size
                    return self.builder.div(size, self.builder.ints([others]))
        if len(dim) > 1:
            total = self._size(dim[:1], size_sources)
            return self.builder.mul(total, self._size(dim[1:], size_sources))
        if (
            self.space.may_broadcast(dim)
            or (given := self._size_of_input(self.space.size(dim))) is None
        ):
            raise Decline(Code.SHAPE, "the size of an axis cannot be computed from any operand")
        return given

    def _size_of_input(self, size: Dim) -> ir.Value | None:
        """A size that an input of the graph has, such as a batch that is one dimension with windows
        everywhere else; None where none has it."""
        for value in self.builder.graph.inputs:
            for index, own in enumerate(self.builder.info.sizes(value)):
                if own == size:
                    return self.builder.dimension(value, index)
        return None
