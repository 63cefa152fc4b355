"""The part of a model that a block is about: its nodes before and after the fusion.

    block      before                                          after
    --------   ---------------------------------------------   ------------------------------------------------
    fused      the nodes that are gone, backwards from the     the fused node, and the new nodes between it and
               values that its results replace                 the nodes that stayed
    already    the operator                                    nothing
    fused
    declined   the nodes around the softmax, up to the         nothing
               matrix products on both sides; what these
               read is called query, key and value

What computes sizes is left out: the shapes that Reshape, Expand and others take, and Constants.

A node stayed if the result has a node of the same type with one of its outputs. All others are gone
or new.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import onnx
import onnx_ir as ir

from fa_compiler.op_registry import DOMAIN, OpSpec, get
from fa_compiler.op_registry.collectives import DOMAIN as PARALLEL
from fa_compiler.op_registry.collectives import SPECS
from fa_compiler.passes.answer.report import Block
from fa_compiler.passes.ops.movers import MOVES, PICKS
from fa_compiler.passes.values.shapes import analyse
from fa_compiler.protos.subgraphs import all_nodes

MOST_NODES = 60
"""Of one drawing. More would be no help to anybody."""
PRODUCTS = ("MatMul", "Einsum", "Gemm", "FusedMatMul", "MatMulInteger", "QLinearMatMul")
REACH = 12
"""How far from a declined softmax its matrix products may be."""

SIZES = {
    **dict.fromkeys({*MOVES, "Split", "Pad"}.difference(PICKS), 1),
    **dict.fromkeys(("ConstantOfShape", "Range"), 0),
}
"""The first input that holds sizes or places, by operator; so do all behind it. The indices of
PICKS are drawn."""

INPUT_ROLES = {
    "query": "query",
    "query_rope": "query",
    "key": "key",
    "key_rope": "key",
    "value": "value",
    "atten_mask": "mask",
    "real_shift": "bias",
    "pse_shift": "bias",
    "drop_mask": "mask",
    "past_key": "key",
    "past_value": "value",
    "key_padding_mask": "mask",
    "attention_bias": "bias",
}
"""The role of an input of a fused operator; an input that is not named here has the role
"other"."""

STANDARD_INPUTS = {
    "Attention": ("query", "key", "value", "atten_mask", "past_key", "past_value"),
    "MultiHeadAttention": (
        *(
            "query",
            "key",
            "value",
            "",
            "key_padding_mask",
            "attention_bias",
            "past_key",
            "past_value",
        ),
    ),
    "GroupQueryAttention": ("query", "key", "value", "past_key", "past_value"),
}
"""The inputs of the operators of other targets, as `INPUT_ROLES` calls them."""


def is_fused(node: onnx.NodeProto) -> bool:
    """Is a node an attention in one operator?"""
    return spec_of(node) is not None or node.op_type in STANDARD_INPUTS


def spec_of(node: onnx.NodeProto) -> OpSpec | None:
    """The registry's operator that a node is, or that all ranks of a sharded model compute
    together."""
    if node.domain == DOMAIN:
        return get(node.op_type)
    return get(SPECS[node.op_type]) if node.domain == PARALLEL and node.op_type in SPECS else None


def _input_names(node: onnx.NodeProto) -> tuple[str, ...]:
    """The names of a fused node's inputs."""
    spec = spec_of(node)
    return STANDARD_INPUTS[node.op_type] if spec is None else tuple(spec.input_names)


def _inputs(node: onnx.NodeProto) -> Iterator[tuple[str, str]]:
    """The inputs of a fused node, each with its role."""
    for name, known in zip_longest(node.input, _input_names(node)[: len(node.input)], fillvalue=""):
        yield name, INPUT_ROLES.get(known, "other")


def _joined(found: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The role of each value. A value with several roles has all of them, unless one is "other"."""
    roles: dict[str, dict[str, None]] = {}
    for value, role in found:
        roles.setdefault(value, {})[role] = None
    return {
        value: "other" if "other" in several else ", ".join(several)
        for value, several in roles.items()
    }


@dataclass(frozen=True)
class Region:
    """Nodes in the order of computation. `roles` are those of values: query, key, value, mask,
    bias, other, or several of them such as "query, key, value". `cut` says that nodes were left
    out."""

    nodes: tuple[onnx.NodeProto, ...] = ()
    roles: Mapping[str, str] = field(default_factory=dict)
    cut: bool = False


@dataclass
class Side:
    """The nodes of one model, of all its graphs, by what they compute and read, and the names of
    its constants."""

    nodes: tuple[onnx.NodeProto, ...]
    constants: frozenset[str] = frozenset()
    maker: dict[str, onnx.NodeProto] = field(init=False, default_factory=dict)
    readers: dict[str, list[onnx.NodeProto]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.nodes:
            for name in filter(None, node.output):
                self.maker.setdefault(name, node)
            for name in dict.fromkeys(filter(None, node.input)):
                self.readers.setdefault(name, []).append(node)

    @staticmethod
    def of(model: onnx.ModelProto) -> Side:
        """The nodes of the main graph and of its subgraphs."""
        return Side(
            tuple(all_nodes(model.graph.node)),
            frozenset(each.name for each in model.graph.initializer),
        )

    def ordered(self, chosen: Iterable[onnx.NodeProto]) -> tuple[onnx.NodeProto, ...]:
        """These nodes in the order of the model."""
        wanted = {id(node) for node in chosen}
        return tuple(node for node in self.nodes if id(node) in wanted)


def data_inputs(node: onnx.NodeProto) -> list[str]:
    """The inputs of a node that do not hold sizes."""
    first = SIZES.get(node.op_type, len(node.input)) if not node.domain else len(node.input)
    return [name for name in node.input[:first] if name]


@dataclass(frozen=True)
class Regions:
    """The regions of a model's blocks, of at most `most` nodes each. `result` is None if nothing
    was changed."""

    original: Side
    result: Side | None
    most: int = MOST_NODES

    @staticmethod
    def of(
        original: onnx.ModelProto, result: onnx.ModelProto | None, most: int = MOST_NODES
    ) -> Regions:
        """Those of a model and of what became of it."""
        return Regions(Side.of(original), None if result is None else Side.of(result), most)

    def around(self, block: Block) -> tuple[Region, Region]:
        """The regions of a block before and after."""
        if block.status == "fused" and self.result is not None:
            node = next(
                (node for node in self.result.nodes if node.name == block.node and is_fused(node)),
                None,
            )
            if node is not None:
                return self._replaced(node, self.result)
        if block.status == "already_fused":
            node = next(
                (
                    node
                    for node in self.original.nodes
                    if node.name == block.anchor and is_fused(node)
                ),
                None,
            )
            if node is not None:
                return Region(
                    (node,), _joined((name, role) for name, role in _inputs(node) if name)
                ), Region()
        near = self._near(block.anchor)
        return (near if block.status != "not_attention" else replace(near, roles={})), Region()

    # -- fused ------------------------------------------------------------------------------------

    def _replaced(self, node: onnx.NodeProto, result: Side) -> tuple[Region, Region]:
        new: dict[int, onnx.NodeProto] = {id(node): node}
        roles = _joined(self._operands(node, result, new))
        before: list[onnx.NodeProto] = []
        seen: set[int] = set()
        queue = deque(self._replaced_values(node, result, new))
        cut = False
        while queue:
            maker = self.original.maker.get(queue.popleft())
            if (
                maker is None
                or maker.op_type == "Constant"
                or id(maker) in seen
                or self._stayed(maker)
            ):
                continue
            if len(before) == self.most:
                cut = True
                break
            seen.add(id(maker))
            before.append(maker)
            queue.extend(name for name in data_inputs(maker) if name not in roles)
        return Region(self.original.ordered(before), roles, cut), Region(
            result.ordered(new.values()), roles
        )

    def _operands(
        self, node: onnx.NodeProto, result: Side, new: dict[int, onnx.NodeProto]
    ) -> Iterator[tuple[str, str]]:
        """The values of the original that the fused node reads, each with its role, and the new
        values between. A value such as a packed projection has several roles. Constants that the
        new nodes read are left out."""
        for name, role in _inputs(node):
            queue, seen = deque([name] if name else []), set[str]()
            while queue:
                value = queue.popleft()
                yield value, role
                maker = result.maker.get(value)
                if maker is None or is_fused(maker) or not self._is_new(maker):
                    continue
                new[id(maker)] = maker
                for each in data_inputs(maker) if maker.op_type != "Shape" else ():
                    if each not in result.constants and each not in seen:
                        seen.add(each)
                        queue.append(each)

    def _replaced_values(
        self, node: onnx.NodeProto, result: Side, new: dict[int, onnx.NodeProto]
    ) -> Iterator[str]:
        """The values of the original in whose place the results of the fused node stand."""
        queue = deque(filter(None, node.output))
        while queue:
            value = queue.popleft()
            if value in self.original.maker:
                yield value
                continue
            for reader in result.readers.get(value, ()):
                if reader.op_type == "Shape":
                    continue
                if self._is_new(reader):
                    if not is_fused(reader) and id(reader) not in new:
                        new[id(reader)] = reader
                        queue.extend(filter(None, reader.output))
                    continue
                counterpart = next(
                    self.original.maker[name]
                    for name in reader.output
                    if name in self.original.maker
                )
                pairs = zip(reader.input, counterpart.input, strict=False)
                yield from (old for now, old in pairs if now == value and old != value)

    def _is_new(self, node: onnx.NodeProto) -> bool:
        """Is a node of the result none of the original?"""
        makers = (self.original.maker.get(name) for name in node.output if name)
        return not any(maker is not None and maker.op_type == node.op_type for maker in makers)

    def _stayed(self, node: onnx.NodeProto) -> bool:
        """Does the result have a node of the original?"""
        assert self.result is not None
        makers = (self.result.maker.get(name) for name in node.output if name)
        return any(maker is not None and maker.op_type == node.op_type for maker in makers)

    # -- declined ---------------------------------------------------------------------------------

    def _near(self, anchor: str) -> Region:
        start = next(
            (node for node in self.original.nodes if node.name == anchor or anchor in node.output),
            None,
        )
        if start is None:
            return Region()
        found = {id(start): start}
        for forwards in (False, True):
            queue = deque([(start, 0)])
            while queue and len(found) < self.most:
                node, distance = queue.popleft()
                if distance == REACH or (node is not start and node.op_type in PRODUCTS):
                    continue
                for other in self._beside(node, forwards):
                    if id(other) not in found and len(found) < self.most:
                        found[id(other)] = other
                        queue.append((other, distance + 1))
        nodes = self.original.ordered(found.values())
        return Region(nodes, dict(_operands_near(start, nodes)), len(found) == self.most)

    def _beside(self, node: onnx.NodeProto, forwards: bool) -> Iterator[onnx.NodeProto]:
        if forwards:
            for name in node.output:
                yield from self.original.readers.get(name, ())
        else:
            makers = (self.original.maker.get(name) for name in data_inputs(node))
            yield from (
                maker for maker in makers if maker is not None and maker.op_type != "Constant"
            )


def _operands_near(
    softmax: onnx.NodeProto, nodes: tuple[onnx.NodeProto, ...]
) -> Iterator[tuple[str, str]]:
    """The operands of the products around a softmax that was not fused, each with its role: query
    and key of the product above it, the value of the one below it."""
    place = next(number for number, node in enumerate(nodes) if node is softmax)
    reached = set(softmax.output)
    scores = _product(nodes[:place][::-1], set(data_inputs(softmax)), forwards=False)
    result = _product(nodes[place + 1 :], reached, forwards=True)
    if scores is not None:
        yield from zip(scores.input, ("query", "key"), strict=False)
    if result is not None:
        yield from ((name, "value") for name in result.input[:2] if name not in reached)


def _product(
    nodes: Iterable[onnx.NodeProto], reached: set[str], forwards: bool
) -> onnx.NodeProto | None:
    """The product that the values lead to; None if there are several or none. The values on the way
    are added."""
    found: list[onnx.NodeProto] = []
    for node in nodes:
        near, far = (node.input, node.output) if forwards else (node.output, data_inputs(node))
        if reached.isdisjoint(near):
            continue
        if node.op_type in PRODUCTS:
            found.append(node)
        else:
            reached.update(far)
    return found[0] if len(found) == 1 else None


def shape_texts(model: ir.Model) -> dict[str, str]:
    """The shape of each value of the main graph, as text. A size that has no name is "?"."""
    info = analyse(model)
    texts: dict[str, str] = {}
    for node in model.graph:
        for value in (*node.inputs, *node.outputs):
            if value is not None and value.name and value.name not in texts:
                shape = info.shape(value)
                sizes = (re.sub(r"\?\d+", "?", str(size)) for size in shape or ())
                texts[value.name] = "" if shape is None else f"[{', '.join(sizes)}]"
    return texts
