"""A sharded model as a list of steps: segments that ONNX Runtime runs, and collectives between
them.

A node belongs to the first segment behind all collectives that it depends on. So collectives that
do not depend on each other follow the same segment, and there are about as many segments as
attentions in a row.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx

from fa_compiler.errors import InputError
from fa_compiler.op_registry import get
from fa_compiler.op_registry.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    CACHE_ATTENTION,
    CYCLIC,
    DOMAIN,
    GATHER,
    METADATA_KEY,
    METHODS,
    ORDERS,
    RING,
    SELECT_TOKENS,
    SEQUENCE_ATTENTION,
    SEQUENCE_GRADIENT,
    SEQUENCE_PART,
    SEQUENCE_STATES,
    SEQUENCE_TAILS,
    SPECS,
    TOKEN_EXTREMES,
)
from fa_compiler.protos.metadata import metadata_of
from fa_compiler.protos.subgraphs import all_nodes, graphs_of

_KNOWN = (
    *(ALL_GATHER, TOKEN_EXTREMES, SELECT_TOKENS, SEQUENCE_PART),
    *(CACHE_ATTENTION, SEQUENCE_STATES, SEQUENCE_TAILS),
)
"""The collectives that are known with any attributes."""


@dataclass(frozen=True)
class Record:
    """What the metadata of a sharded model say (op_registry/collectives.py). `length` is that of
    the sequence, if the model fixes it."""

    ranks: int
    order: str
    inputs: Mapping[str, int | None]
    outputs: Mapping[str, int | None]
    caches: Mapping[str, str] = field(default_factory=dict)
    length: int | None = None


@dataclass(frozen=True)
class Segment:
    """A part of the graph that needs no other rank."""

    model: onnx.ModelProto
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Collective:
    """A node that talks to the other ranks, or needs to know which rank runs it."""

    name: str
    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any]

    @property
    def named_inputs(self) -> dict[str, str]:
        """The inputs by their names in the prototype of the operator that all ranks compute
        together."""
        spec = get(SPECS[self.op_type])
        return {
            entry: name for entry, name in zip(spec.input_names, self.inputs, strict=False) if name
        }


Step = Segment | Collective


@dataclass(frozen=True)
class Plan:
    """The steps of a sharded model in the order in which they run.

    `constants` are the weights that collectives read and the defaults of inputs, by name. `part`
    names the outputs of the SequencePart without an input, which are known before the first step
    ("" for one that nobody reads), and `last_use` the last step that reads a value. The outputs of
    the model are read after all steps.
    """

    constants: Mapping[str, onnx.TensorProto]
    part: tuple[str, ...]
    steps: tuple[Step, ...]
    last_use: Mapping[str, int]


def record_of(proto: onnx.ModelProto, name: str) -> Record | None:
    """The record of a sharded model; None for any other model.

    Raises:
        InputError: the record is damaged.
    """
    text = metadata_of(proto, METADATA_KEY)
    if text is None:
        return None
    try:
        read = json.loads(text)
        axes = [dict(read[name]) for name in ("inputs", "outputs")]
        ranks, order, length = int(read["ranks"]), str(read["order"]), read.get("length")
        record = Record(ranks, order, axes[0], axes[1], dict(read.get("caches", {})), length)
    except (ValueError, KeyError, TypeError):
        raise _damaged(name) from None
    if not _is_possible(record):
        raise _damaged(name)
    return record


def _is_possible(record: Record) -> bool:
    """Whether a record says what it may say: ranks, an order, and whole numbers as axes and length.
    The caches have axes, past among the inputs and present among the outputs."""
    if record.ranks < 1 or record.order not in ((CYCLIC,) if record.caches else ORDERS):
        return False
    stated = [
        axis for axis in (*record.inputs.values(), *record.outputs.values()) if axis is not None
    ]
    pasts = [record.inputs.get(past) for past in record.caches]
    presents = [record.outputs.get(present) for present in record.caches.values()]
    lengths = [] if record.length is None else [record.length]
    return all(type(number) is int for number in (*stated, *pasts, *presents, *lengths))


def _damaged(name: str) -> InputError:
    return InputError(
        f"{name} holds a damaged record of its ranks; make it again with fa-compiler shard"
    )


def plan_of(proto: onnx.ModelProto, name: str) -> Plan:
    """The plan of a sharded model.

    Raises:
        InputError: the model holds a collective that this version does not know.
    """
    levels = _levels(proto.graph.node, name)
    steps: list[Step] = []
    maker = _SegmentMaker.of(proto)
    for depth in range(levels.count):
        if levels.segments[depth]:
            others = (
                node for other, nodes in levels.segments.items() if other != depth for node in nodes
            )
            read_by_segments = {value for node in others for value in _read(node)}
            steps.append(maker.segment(levels.segments[depth], read_by_segments.union(levels.read)))
        steps.extend(levels.collectives[depth])
    last_use = {value: index for index, step in enumerate(steps) for value in step.inputs}
    constants = {value: maker.weights[value] for value in levels.read if value in maker.weights}
    return Plan(constants | dict(maker.defaults), levels.part, tuple(steps), last_use)


@dataclass
class _Levels:
    """The nodes of a sharded model by the number of collectives before them, as many as lie on one
    path.

    `part` names the outputs of the SequencePart without an input.
    """

    segments: defaultdict[int, list[onnx.NodeProto]]
    collectives: defaultdict[int, list[Collective]]
    part: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """How many levels there are."""
        return max((*self.segments, *self.collectives), default=-1) + 1

    @property
    def read(self) -> list[str]:
        """The values that the collectives read, in the order of their levels."""
        collectives = (
            step for depth in sorted(self.collectives) for step in self.collectives[depth]
        )
        return [value for step in collectives for value in step.inputs if value]


def _levels(nodes: Iterable[onnx.NodeProto], name: str) -> _Levels:
    levels = _Levels(defaultdict(list), defaultdict(list))
    depth_of: dict[str, int] = {}
    for node in nodes:
        depth = max((depth_of.get(value, 0) for value in _read(node)), default=0)
        if node.domain != DOMAIN:
            levels.segments[depth].append(node)
        elif node.op_type == SEQUENCE_PART and not node.input:
            levels.part = tuple(node.output)
        else:
            levels.collectives[depth].append(_collective(node, name))
            depth += 1
        depth_of.update(dict.fromkeys(node.output, depth))
    return levels


def _collective(node: onnx.NodeProto, name: str) -> Collective:
    attrs = {attr.name: onnx.helper.get_attribute_value(attr) for attr in node.attribute}
    attrs = {
        key: value.decode() if isinstance(value, bytes) else value for key, value in attrs.items()
    }
    known = (
        node.op_type in _KNOWN
        or (node.op_type == ALL_REDUCE and "reduction" not in attrs)
        or (node.op_type == SEQUENCE_ATTENTION and attrs.get("method") in METHODS)
        or (node.op_type == SEQUENCE_GRADIENT and attrs.get("method") in (GATHER, RING))
    )
    if not known:
        raise InputError(
            f"{name}: node '{node.name}' ({node.op_type}) is not known to this version of fa_compiler"
        )
    return Collective(node.name, node.op_type, tuple(node.input), tuple(node.output), attrs)


def _read(node: onnx.NodeProto) -> Iterable[str]:
    """The names that a node and its subgraphs read."""
    for current in all_nodes([node]):
        yield from filter(None, current.input)
        for graph in graphs_of(current):
            yield from (output.name for output in graph.output)


def _names_read(nodes: Iterable[onnx.NodeProto], made: Iterable[str]) -> list[str]:
    """The names that nodes read, once, without those that they make themselves."""
    read = dict.fromkeys(name for node in nodes for name in _read(node))
    for name in made:
        read.pop(name, None)
    return list(read)


@dataclass(frozen=True)
class _SegmentMaker:
    """Makes segments of one model."""

    proto: onnx.ModelProto
    weights: Mapping[str, onnx.TensorProto]
    defaults: Mapping[str, onnx.TensorProto]
    types: Mapping[str, onnx.ValueInfoProto]
    outer: frozenset[str]
    """The values of the main graph; a subgraph has others of its own."""

    @staticmethod
    def of(proto: onnx.ModelProto) -> _SegmentMaker:
        graph = proto.graph
        infos = (*graph.value_info, *graph.input, *graph.output)
        given = {info.name for info in graph.input}
        weights = {tensor.name: tensor for tensor in graph.initializer if tensor.name not in given}
        defaults = {tensor.name: tensor for tensor in graph.initializer if tensor.name in given}
        outer = {name for node in graph.node for name in node.output} | given
        return _SegmentMaker(
            proto, weights, defaults, {info.name: info for info in infos}, frozenset(outer)
        )

    def segment(self, nodes: list[onnx.NodeProto], outside: set[str]) -> Segment:
        """The segment of these nodes. `outside` are the values that the rest of the graph reads."""
        made = [name for node in nodes for name in node.output if name]
        read = _names_read(nodes, made)
        ends = outside.union(output.name for output in self.proto.graph.output)
        inputs = [name for name in read if name in self.outer]
        outputs = [name for name in made if name in ends]
        model = onnx.ModelProto(ir_version=self.proto.ir_version)
        model.opset_import.extend(
            entry for entry in self.proto.opset_import if entry.domain != DOMAIN
        )
        model.functions.extend(self.proto.functions)
        graph = model.graph
        graph.name = "segment"
        graph.node.extend(nodes)
        graph.initializer.extend(self.weights[name] for name in read if name in self.weights)
        graph.input.extend(map(self._info, inputs))
        graph.output.extend(map(self._info, outputs))
        return Segment(model, tuple(inputs), tuple(outputs))

    def _info(self, name: str) -> onnx.ValueInfoProto:
        """The value with its type and without sizes: those in the file may be of the whole
        sequence."""
        info = onnx.ValueInfoProto(name=name)
        if name in self.types:
            info.type.tensor_type.elem_type = self.types[name].type.tensor_type.elem_type
        return info
