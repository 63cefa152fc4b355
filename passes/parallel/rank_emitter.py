"""Adds nodes to the graph of one rank, which has a part of known size and known positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fa_compiler.op_registry import DOMAIN, collectives, hcom
from fa_compiler.op_registry.collectives import Chunk
from fa_compiler.passes.algebra.symbolic import consts
from fa_compiler.passes.emit.build import Names
from fa_compiler.passes.emit.operators import AttrValue, Ints, Operators, content_key
from fa_compiler.passes.ir.nodes import without_none
from fa_compiler.passes.parallel.places import Refusal
from fa_compiler.passes.values.shapes import ShapeInfo

INT64 = ir.DataType.INT64
CARRIED_AS = {ir.DataType.BFLOAT16: ir.DataType.FLOAT, ir.DataType.BOOL: ir.DataType.INT8}
"""For types that HCCL's operators do not take: a type that holds each of their numbers."""
ADDED = (
    ir.DataType.FLOAT,
    ir.DataType.FLOAT16,
    ir.DataType.INT8,
    ir.DataType.INT16,
    ir.DataType.INT32,
)
"""The types that HcomAllReduce takes."""


@dataclass(frozen=True)
class Rank:
    """Rank `number` of `ranks`, for a sequence of `length` tokens that is cut into equal chunks."""

    number: int
    ranks: int
    order: str
    length: int

    @property
    def count(self) -> int:
        """The number of tokens of a rank."""
        return self.length // self.ranks

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks of this rank."""
        return self.chunks_of(self.number)

    def chunks_of(self, number: int) -> tuple[Chunk, ...]:
        """The chunks of a rank."""
        return collectives.chunks(self.order, self.ranks, number, self.length)

    def positions(self, number: int) -> np.ndarray:
        """The positions of a rank's tokens, int64."""
        return collectives.positions(self.chunks_of(number))

    @property
    def chunks_by_rank(self) -> list[int]:
        """The numbers of all chunks, in the order of the ranks that have them."""
        numbers = (
            collectives.chunk_numbers(self.order, self.ranks, rank) for rank in range(self.ranks)
        )
        return [number for own in numbers for number in own]


class RankEmitter(Operators):
    """Makes nodes in front of `place`, the node that they replace. Sizes must be known: a method
    raises Refusal, with the name of this node, for a tensor of which they are not."""

    def __init__(
        self, graph: ir.Graph, names: Names, info: ShapeInfo, rank: Rank, cann: str | None
    ) -> None:
        self.graph, self.names, self.info, self.rank, self.cann = graph, names, info, rank, cann
        self.place: ir.Node | None = None
        self._constants: dict[tuple[object, ...], ir.Value] = {}
        self._tags = 0

    # -- what is known ------------------------------------------------------------------------

    def shape(self, value: ir.Value) -> tuple[int, ...]:
        """The sizes of a value."""
        sizes = consts(self.info.sizes(value))
        if self.info.shape(value) is None or None in sizes:
            raise Refusal(f"the sizes of {value.name!r} are not known before the run", self.place)
        return tuple(without_none(sizes))

    def dtype(self, value: ir.Value) -> ir.DataType:
        """The type of a value."""
        dtype = self.info.dtype(value)
        if dtype is None:
            raise Refusal(f"the type of {value.name!r} is unknown", self.place)
        return dtype

    # -- nodes --------------------------------------------------------------------------------

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attrs: Mapping[str, AttrValue] | None = None,
        domain: str = "",
        outputs: int = 1,
    ) -> ir.Node:
        """A new node."""
        assert self.place is not None
        name = self.names.new(f"{self.place.name or self.place.op_type}/{op_type}")
        made = ir.node(
            op_type, list(inputs), dict(attrs or {}), domain=domain, num_outputs=outputs, name=name
        )
        for output in made.outputs:
            output.name = self.names.new(f"{name}_output")
        self.graph.insert_before(self.place, made)
        for output in made.outputs:
            if (dtype := self.info.dtype(output)) is not None:
                output.dtype = dtype
        return made

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attrs: Mapping[str, AttrValue] | None = None,
    ) -> ir.Value:
        """The only output of a new standard node."""
        return self.node(op_type, inputs, attrs).outputs[0]

    def constant(self, array: np.ndarray, stem: str = "const") -> ir.Value:
        """An initializer with this content; the same one for equal content. Its name tells the
        rank, because graphs of other ranks have other contents."""
        key = content_key(array)
        if key not in self._constants:
            tensor = ir.tensor(array, name=self.names.new(f"rank_{self.rank.number}_{stem}"))
            value = ir.Value(name=tensor.name, const_value=tensor)
            value.dtype, value.shape = tensor.dtype, ir.Shape(array.shape)
            self.graph.register_initializer(value)
            self._constants[key] = value
        return self._constants[key]

    def ints(self, numbers: Sequence[int]) -> ir.Value:
        """An int64 vector."""
        return self.constant(np.array(numbers, np.int64))

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        """A tensor in another type."""
        if self.dtype(x) == dtype:
            return x
        return self.op("Cast", [x], {"to": int(dtype)})

    def reshape(self, x: ir.Value, shape: Ints) -> ir.Value:
        """A tensor in another shape; as it is where it has this one."""
        if not isinstance(shape, ir.Value) and self.shape(x) == tuple(shape):
            return x
        return super().reshape(x, shape)

    def cut(self, x: ir.Value, axis: int, start: int, stop: int) -> ir.Value:
        """A range along an axis."""
        if (start, stop) == (0, self.shape(x)[axis]):
            return x
        if self.opset < 10:
            return self.op("Slice", [x], {"starts": (start,), "ends": (stop,), "axes": (axis,)})
        return self.slice(x, [start], [stop], [axis])

    def first(self, x: ir.Value, axis: int) -> ir.Value:
        """A tensor with this axis as its first one."""
        rank = len(self.shape(x))
        return self.transpose(x, [axis, *range(axis), *range(axis + 1, rank)])

    def back(self, x: ir.Value, axis: int) -> ir.Value:
        """The inverse of `first`."""
        rank = len(self.shape(x))
        return self.transpose(x, [*range(1, axis + 1), 0, *range(axis + 1, rank)])

    # -- the order of tokens ------------------------------------------------------------------

    def in_sequence(self, x: ir.Value) -> ir.Value:
        """A tensor whose first axis has the tokens of all ranks by rank, with them in the order of
        the sequence."""
        return self._chunks_moved(x, [int(place) for place in np.argsort(self.rank.chunks_by_rank)])

    def by_rank(self, x: ir.Value) -> ir.Value:
        """The inverse of `in_sequence`."""
        return self._chunks_moved(x, self.rank.chunks_by_rank)

    def _chunks_moved(self, x: ir.Value, chunks: Sequence[int]) -> ir.Value:
        if list(chunks) == sorted(chunks):
            return x
        shape = self.shape(x)
        split = self.reshape(x, (len(chunks), shape[0] // len(chunks), *shape[1:]))
        return self.reshape(self.gather(split, chunks, 0), shape)

    # -- messages -----------------------------------------------------------------------------

    def gathered(self, x: ir.Value) -> ir.Value:
        """The tensors of all ranks along axis 0, by rank."""
        attrs: dict[str, AttrValue] = {
            "rank_size": self.rank.ranks,
            "group": hcom.WORLD,
            "fusion": 0,
        }
        return self._carried(x, lambda own: self._message(hcom.ALL_GATHER, [own], attrs))

    def exchanged(self, x: ir.Value) -> ir.Value:
        """The blocks along axis 0 that the ranks send here, by rank. Block r goes to rank r."""
        return self._carried(
            x, lambda own: self._message(hcom.ALL_TO_ALL, [own], {"group": hcom.WORLD})
        )

    def reduced(self, x: ir.Value, reduction: str) -> ir.Value:
        """The sum, max or min over the ranks, each element by itself."""
        shape = self.shape(x)
        if self.dtype(x) in ADDED:
            vector = self.reshape(x, shape or (1,))
            attrs: dict[str, AttrValue] = {"reduction": reduction, "group": hcom.WORLD, "fusion": 0}
            return self.reshape(self._message(hcom.ALL_REDUCE, [vector], attrs), shape)
        return self.over(reduction, self.gathered(self.reshape(x, (1, *shape))), 0)

    def over(self, reduction: str, x: ir.Value, axis: int) -> ir.Value:
        """The sum, max or min along an axis, which goes away."""
        return self.reduce(f"Reduce{reduction.capitalize()}", x, [axis], keepdims=0)

    def passed_on(self, x: ir.Value) -> ir.Value:
        """The tensor of the previous rank, of the same type and shape, while the next rank gets
        this one.

        Ranks of even number send first, and the others receive first. An HcomSend waits for its
        HcomReceive, so ranks that all send first would wait for each other forever. Here a rank of
        odd number receives from its neighbour of even number, which sends to it, and neither waits
        for a third rank. Then they turn: the odd ranks send, and the even ones receive. If the
        number of ranks is odd, the last one and rank 0 are both even: rank 0 receives from the last
        one when it has sent to rank 1, and rank 1 waits for nothing else.
        """
        rank, ranks = self.rank.number, self.rank.ranks
        common: dict[str, AttrValue] = {"group": hcom.WORLD, "sr_tag": self._tags}
        self._tags += 1
        dtype = self.dtype(x)
        own = self.cast(x, CARRIED_AS.get(dtype, dtype))
        towards = {**common, "dest_rank": (rank + 1) % ranks}
        source = {
            **common,
            "src_rank": (rank - 1) % ranks,
            "shape": self.shape(own),
            "dtype": int(self.dtype(own)),
        }
        if rank % 2 == 0:
            self.node(hcom.SEND, [own], towards, DOMAIN, outputs=0)
            received = self._message(hcom.RECEIVE, [], source)
        else:
            received = self._message(hcom.RECEIVE, [], source)
            self.node(hcom.SEND, [own], towards, DOMAIN, outputs=0)
        return self.cast(received, dtype)

    def _message(
        self, op_type: str, inputs: Sequence[ir.Value], attrs: Mapping[str, AttrValue]
    ) -> ir.Value:
        return self.node(op_type, inputs, attrs, DOMAIN).outputs[0]

    def _carried(self, x: ir.Value, send: Callable[[ir.Value], ir.Value]) -> ir.Value:
        """What is received for a tensor, which travels in a type that HCCL takes."""
        dtype = self.dtype(x)
        return self.cast(send(self.cast(x, CARRIED_AS.get(dtype, dtype))), dtype)
