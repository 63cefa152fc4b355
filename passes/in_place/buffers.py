"""Caches as buffers. B is a buffer whose first L rows are the past, and N are the s new rows. Then

    past       = Slice(B, 0, L)
    W          = ScatterND(B, places L to L + s, N)
    present    = Concat(past, N) = Slice(W, 0, L + s)

B replaces the input past; its number of rows is open. W replaces the output present, and L is a new
input of the model. Where B and W are bound to the same memory, ONNX Runtime's ScatterND writes s
rows and copies nothing.

    reader of past or present               gets
    fused attention (readers.py)            W and the number L + s. It reads only these rows, so
                                            this equals the Slice
    Shape                                   the same sizes, with L or L + s among them
    anything else                           the Slice, which copies; the report names these readers

Slice(B, 0, L) may be read before or after W is written, because it has no row in common with the
new ones. The rows after L + s may hold anything, also NaN.

Where the Concat lies in a branch of an If, all this happens in that branch. The other branch gives
t rows, `first`:

    first      = Slice(ScatterND(B, places 0 to t, first), 0, t)

The ScatterND replaces this output of the branch. Nothing else reads B in a run of that branch, so
nobody misses the rows that it overwrites, and L is not read. If the leading sizes of B and `first`
differ, ScatterND refuses the run. ONNX Runtime lets a branch write where the output of the If is
bound, so that a step copies nothing there, either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.decline import label
from fa_compiler.passes.emit.build import INT64, Builder
from fa_compiler.passes.emit.scatter_row_indices import scatter_row_indices
from fa_compiler.passes.in_place.caches import GrowingCache
from fa_compiler.passes.in_place.plan import Plan
from fa_compiler.passes.in_place.readers import read_buffers
from fa_compiler.passes.ir.nodes import certain, int_attr, is_op
from fa_compiler.passes.ir.surgery import replace_value, restore_order, sweep

CAPACITY = "cache_room"


Reader = tuple[ir.Node, int, ir.Value]
"""A node, the index of one of its inputs, and the value there."""


@dataclass
class BufferRewrite:
    """Changes one graph according to a plan; `copied` names the nodes that read a copy of each
    cache.

    `main` is the main graph, which gets the inputs for lengths, and `capacity` the symbol for the
    rows of buffers.
    """

    builder: Builder
    plan: Plan
    main: ir.Graph
    capacity: str
    copied: dict[ir.Value, list[str]] = field(default_factory=dict)
    _inputs: dict[str, ir.Value] = field(default_factory=dict)
    _totals: dict[tuple[str, Dim], ir.Value] = field(default_factory=dict)
    _places: dict[tuple[str, tuple[Dim, ...], Dim], ir.Value] = field(default_factory=dict)

    def make(self) -> None:
        """Change the graph."""
        graph, caches = self.builder.graph, self.plan.caches
        readers = [
            (_readers(cache, cache.past_aliases), _readers(cache, cache.present_aliases))
            for cache in caches
        ]
        written: dict[ir.Value, ir.Value] = {}
        for cache in caches:
            self._open(cache.past, cache)
            written[cache.past] = self._scattered(cache)
        for attention in self.plan.attention:
            buffers = {name: written[cache.past] for name, cache in attention.inputs.items()}
            read_buffers(
                attention.node, buffers, self._total(next(iter(attention.inputs.values())))
            )
        served: list[ir.Node] = []
        for cache, (before, after) in zip(caches, readers, strict=True):
            buffer = written[cache.past]
            served += self._serve(cache, before, cache.past, self._length(cache))
            served += self._serve(cache, after, buffer, self._total(cache))
            replace_value(cache.present, buffer)
            self._open(buffer, cache)
        sweep(graph, [*served, *(node for cache in caches for node in cache.aliases)])
        self.builder.drop_unused_constants()
        restore_order(graph)
        self._write_first_rows()

    def _write_first_rows(self) -> None:
        """Change the other branches of Ifs."""
        builders: dict[ir.Graph, Builder] = {}
        for cache in self.plan.caches:
            if (choice := cache.choice) is None:
                continue
            if choice.other not in builders:
                builders[choice.other] = Builder(
                    choice.other, self.builder.names, self.builder.info
                )
            builder, first, axis = builders[choice.other], choice.first, cache.axis
            count = builder.dimension(first, axis)
            leading = [builder.dimension(cache.past, outer) for outer in range(axis)]
            rows = builder.unsqueeze(builder.range(count), (*range(axis), axis + 1))
            places = scatter_row_indices(builder, leading, rows, count)
            written = builder.scatter_nd(cache.past, places, first)
            choice.other.outputs[choice.index] = written
            self._open(written, cache)
            self._open(choice.output, cache)
        for graph in builders:
            restore_order(graph)

    def _open(self, value: ir.Value, cache: GrowingCache) -> None:
        """Declare the shape of a buffer, whose number of rows is open."""
        given = certain(value.shape or cache.past.shape)  # every candidate has one
        declared: list[int | ir.SymbolicDim | str] = list(given)
        known = list(cache.sizes)
        declared[cache.axis], known[cache.axis] = self.capacity, Dim.symbol(self.capacity)
        value.shape = ir.Shape(declared)
        self.builder.info.set(value, known, value.dtype)

    def _length(self, cache: GrowingCache) -> ir.Value:
        """The number of cached tokens, int64 [1]: an input of the model."""
        name = self.plan.lengths[cache.past]
        if name not in self._inputs:
            value = ir.Value(name=name, shape=ir.Shape([1]), type=ir.TensorType(INT64))
            self.main.inputs.append(value)
            self._inputs[name] = value
        return self._inputs[name]

    def _count(self, cache: GrowingCache) -> tuple[Dim, ir.Value]:
        """The number of new rows, as a size and as int64 [1]."""
        return cache.rows, self.builder.length(cache.new, cache.axis)

    def _total(self, cache: GrowingCache) -> ir.Value:
        """The number of cached and new tokens together, int64 [1]."""
        size, count = self._count(cache)
        key = self.plan.lengths[cache.past], size
        if key not in self._totals:
            self._totals[key] = self.builder.add(self._length(cache), count)
        return self._totals[key]

    def _scattered(self, cache: GrowingCache) -> ir.Value:
        """The buffer with the new rows. Caches of the same shape are written at the same places,
        computed once."""
        builder, (size, count) = self.builder, self._count(cache)
        key = self.plan.lengths[cache.past], cache.sizes[: cache.axis], size
        if key not in self._places:
            leading = [builder.dimension(cache.past, axis) for axis in range(cache.axis)]
            rows = builder.add(builder.range(count), self._length(cache))
            rows = builder.unsqueeze(rows, (*range(cache.axis), cache.axis + 1))
            self._places[key] = scatter_row_indices(builder, leading, rows, count)
        return builder.scatter_nd(cache.past, self._places[key], cache.new)

    def _serve(
        self, cache: GrowingCache, readers: Sequence[Reader], buffer: ir.Value, length: ir.Value
    ) -> Iterator[ir.Node]:
        """Give each reader of the first `length` rows their sizes, if it is a Shape, or a copy of
        them.

        Yields the nodes that are superfluous then.
        """
        builder = self.builder
        for node, index, value in readers:
            if is_op(node, "Shape") and node.graph is builder.graph:
                builder.replace(node.outputs[0], self._sizes(node, cache, length))
                yield node
            elif (
                node.inputs[index] is value
            ):  # false for an attention that already reads the buffer
                ends = [builder.ints([0]), length, builder.ints([cache.axis])]
                node.replace_input_with(index, builder.slice(buffer, *ends))
                self.copied.setdefault(cache.past, []).append(label(node))

    def _sizes(self, reader: ir.Node, cache: GrowingCache, length: ir.Value) -> ir.Value:
        """The result of a Shape on the first `length` rows of a buffer."""
        rank = len(cache.sizes)
        axes = range(rank)[int_attr(reader, "start", 0) : int_attr(reader, "end", rank)]
        parts = [
            self.builder.dimension(cache.past, axis) if axis != cache.axis else length
            for axis in axes
        ]
        return self.builder.concat(parts, 0)


def _readers(cache: GrowingCache, values: Sequence[ir.Value]) -> list[Reader]:
    """The readers of the values, without the nodes that the buffer makes superfluous."""
    gone = set(cache.aliases)
    return [
        (use.node, use.idx, value)
        for value in values
        for use in value.uses()
        if use.node not in gone
    ]
