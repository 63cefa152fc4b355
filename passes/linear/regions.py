"""Parts of a graph that may be attention by a state: products of products of tensors, without a
softmax in between.

The depth of a value is the number of products on the way to it: contractions, outer products and
running sums, each of tensors that are no weights. What is not followed (operators.py), and what an
unknown function gives, begins at 0 again.

    depth(product(x, y))      =  1 + max(depth(x), depth(y))
    depth(Loop), depth(Scan)  =  2 where they carry a tensor of floats
    depth(algebraic(x, y))    =  max(depth(x), depth(y))
    depth(other)              =  0

An exit is a value of depth 2 or more that something reads which is not followed, or that the graph
gives. All exits that need a common value of depth 1 or more are one region. A softmax attention has
no exit: its scores and its output are of depth 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import (
    FLOATS,
    STANDARD,
    constant,
    constant_tensor,
    inputs_of,
    is_op,
    is_weight,
    makers_of,
    operands,
    outputs_of,
    reached,
    readers_of,
    values_read,
)
from fa_compiler.passes.layout.contraction import is_outer_product
from fa_compiler.passes.linear.operators import RULES, holds, is_followed
from fa_compiler.passes.ops.elementwise import FOUR_OPERATIONS
from fa_compiler.passes.ops.linear import PRODUCTS
from fa_compiler.passes.ops.movers import LAYOUT_OPS, REPEATS
from fa_compiler.passes.ops.reduce import SUMMING
from fa_compiler.passes.values.shapes import ShapeInfo

LOOPS = ("Loop", "Scan")
CONTROL = (
    *LOOPS,
    "If",
    "SequenceEmpty",
    "SequenceConstruct",
    "SequenceInsert",
    "ConcatFromSequence",
    "Constant",
)
DEEP = 2
MATRIX = 2
STATE = 4
"""The dimensions of a state: batch, heads, and those of key and value."""
MOST_ZEROS = 1 << 24
MOST_NODES = 20_000
"""More nodes than this are no region."""


@dataclass(frozen=True)
class Region:
    """A part of a graph: its nodes in order, its exits, and the depth of each value in it."""

    nodes: Sequence[ir.Node]
    exits: Sequence[ir.Value]
    depths: Mapping[ir.Value, int]
    locals: Sequence[ir.Value]
    """The values of depth 0 that a node of depth 1 or more reads."""

    @cached_property
    def members(self) -> frozenset[ir.Node]:
        """The nodes as a set."""
        return frozenset(self.nodes)

    def depth(self, value: ir.Value) -> int:
        """The depth of a value."""
        return self.depths.get(value, 0)


def regions(graph: ir.Graph, info: ShapeInfo) -> Iterator[Region]:
    """The regions of a graph, those with the first exits first."""
    order = {node: place for place, node in enumerate(graph)}
    depths = dict[ir.Value, int]()
    for node in order:
        _enter_depths(node, info, depths)
    exits = [value for value, depth in depths.items() if depth >= DEEP and _is_exit(value, depths)]
    for needed in _groups(exits, depths):
        region = _region(needed, order, depths, graph, info)
        if region is not None:
            yield region


def _region(
    needed: Sequence[ir.Node],
    order: Mapping[ir.Node, int],
    depths: Mapping[ir.Value, int],
    graph: ir.Graph,
    info: ShapeInfo,
) -> Region | None:
    """The region of exits that need these nodes; None where it is too large."""
    made = outputs_of(reached(needed, lambda node: _deep_readers(node, depths)))
    group = [value for value in made if value in depths and _is_exit(value, depths)]
    nodes = _cone(group, depths, graph, info)
    if len(nodes) > MOST_NODES:
        return None
    ordered = sorted(nodes, key=order.__getitem__)
    on_the_way = set(needed)
    deep = (node for node in ordered if node in on_the_way)
    read = dict.fromkeys(chain.from_iterable(map(values_read, deep)))
    outer = [
        value
        for value in read
        if value not in depths and _is_float(value, info) and _is_outer(value, graph)
    ]
    return Region(ordered, group, depths, outer)


def _is_float(value: ir.Value, info: ShapeInfo) -> bool:
    return info.dtype(value) in FLOATS


def _may_be_float(value: ir.Value, info: ShapeInfo) -> bool:
    return info.dtype(value) in (*FLOATS, None)


def _is_outer(value: ir.Value, graph: ir.Graph) -> bool:
    """Is this a value of the graph itself, and not of a body in it?"""
    maker = value.producer()
    return (
        maker.graph is graph
        if maker is not None
        else value.graph in (graph, None) or value.is_initializer()
    )


def _enter_depths(node: ir.Node, info: ShapeInfo, depths: dict[ir.Value, int]) -> None:
    """Enter the depths of what a node gives, but for those of 0."""
    if node.domain not in STANDARD:
        return
    depth = _depth(node, info, depths)
    if depth:
        depths.update((output, depth) for output in node.outputs if _may_be_float(output, info))


def _depth(node: ir.Node, info: ShapeInfo, depths: Mapping[ir.Value, int]) -> int:
    """The depth of what a node gives, where these are floats."""
    if node.op_type in LOOPS:
        return DEEP
    if not _is_algebraic(node, info, depths):
        return 0
    depth = max((depths.get(value, 0) for value in inputs_of(node)), default=0)
    return depth + _multiplies(node, info)


def _is_algebraic(node: ir.Node, info: ShapeInfo, depths: Mapping[ir.Value, int]) -> bool:
    """Is the node followed by a rule that is no unknown function? A product with a matrix of
    weights is a layer."""
    if node.op_type not in (*RULES, "ConcatFromSequence", "SequenceInsert"):
        return False
    if is_op(node, *PRODUCTS):
        return not _is_layer(node, info, depths)
    if is_op(node, "Cast"):
        return holds(info.dtype(node.outputs[0]), info.dtype(node.inputs[0]))
    return True


def _is_layer(node: ir.Node, info: ShapeInfo, depths: Mapping[ir.Value, int]) -> bool:
    """Is a product one with weights? A larger constant beside a product may be a first state, and
    so may zeros."""
    weights = [value for value in operands(node) if _holds_weights(value) and not _is_zero(value)]
    has_matrix = any(len(info.sizes(value)) <= MATRIX for value in weights)
    return has_matrix or (bool(weights) and depths.keys().isdisjoint(node.inputs))


def _holds_weights(value: ir.Value) -> bool:
    """Is a value a tensor of weights, moved or not?"""
    return any(map(is_weight, reached([value], _moved_from, limit=8)))


def _is_zero(value: ir.Value) -> bool:
    """Is a value a first state of zeros? Weights, which have no batch and heads, are not read."""
    tensor = constant_tensor(value)
    if tensor is None or len(tensor.shape) < STATE:
        return False
    array = constant(value, limit=MOST_ZEROS)
    return array is not None and not array.any()


def _is_fixed(value: ir.Value) -> bool:
    """Are the numbers of a value the same in every run, as far as they are looked for?"""
    on_the_way = list(reached([value], _made_from, limit=16))
    ends = [each for each in on_the_way if not _made_from(each)]
    return len(on_the_way) < 16 and all(map(is_weight, ends))


def _made_from(value: ir.Value) -> Sequence[ir.Value]:
    node = None if is_weight(value) else value.producer()
    if is_op(node, *LAYOUT_OPS, *REPEATS, "Cast", "Exp", "Neg"):
        return operands(node)[:1]
    return operands(node) if is_op(node, *FOUR_OPERATIONS) else ()


def _moved_from(value: ir.Value) -> Sequence[ir.Value]:
    node = value.producer()
    return operands(node)[:1] if is_op(node, *LAYOUT_OPS, "Cast") else ()


def _multiplies(node: ir.Node, info: ShapeInfo) -> bool:
    """Is a node a sum of products, a running sum, or an outer product without a fixed operand?"""
    if is_op(node, *SUMMING):
        return _is_float(node.outputs[0], info)
    return is_outer_product(node, info) and not any(map(_is_fixed, operands(node)))


def _is_exit(value: ir.Value, depths: Mapping[ir.Value, int]) -> bool:
    return value.is_graph_output() or not all(
        _stays_deep(reader, depths) for reader, _ in value.uses()
    )


def _stays_deep(node: ir.Node, depths: Mapping[ir.Value, int]) -> bool:
    """Is a reader followed? One that reads only the shape is none that matters."""
    return is_op(node, "Shape") or _is_deep(node, depths)


def _is_deep(node: ir.Node, depths: Mapping[ir.Value, int]) -> bool:
    """Does a node give a value of depth 1 or more?"""
    return not depths.keys().isdisjoint(node.outputs)


def _groups(exits: Sequence[ir.Value], depths: Mapping[ir.Value, int]) -> list[list[ir.Node]]:
    """The nodes that give values of depth 1 or more, from which exits are made: those of exits that
    need a common node together."""
    group_of = dict[ir.Node, list[ir.Node]]()
    groups: list[list[ir.Node]] = []
    for value in exits:
        own: list[ir.Node] = []
        groups.append(own)
        for node in list(reached(makers_of([value]), lambda each: _deep_sources(each, depths))):
            if node not in group_of:
                group_of[node] = own
                own.append(node)
            elif (other := group_of[node]) is not own:
                groups.remove(other)
                own.extend(other)
                group_of.update(dict.fromkeys(other, own))
    return groups


def _deep_sources(node: ir.Node, depths: Mapping[ir.Value, int]) -> list[ir.Node]:
    return makers_of(value for value in values_read(node) if value in depths)


def _deep_readers(node: ir.Node, depths: Mapping[ir.Value, int]) -> list[ir.Node]:
    deep = (value for value in node.outputs if value in depths)
    return [reader for reader in readers_of(deep) if _is_deep(reader, depths)]


def _cone(
    exits: Iterable[ir.Value], depths: Mapping[ir.Value, int], graph: ir.Graph, info: ShapeInfo
) -> set[ir.Node]:
    """The nodes that are evaluated to know the exits: those that are followed, and the unknown
    functions. Of too many nodes it is a part that is too large."""

    def evaluated(values: Iterable[ir.Value]) -> list[ir.Node]:
        makers = (maker for maker in makers_of(values) if maker.graph is graph)
        return [maker for maker in makers if _is_evaluated(maker, info, depths)]

    def sources(node: ir.Node) -> list[ir.Node]:
        read = values_read(node)
        return evaluated(depths.keys() & read if is_op(node, "Shape") else read)

    return set(islice(reached(evaluated(exits), sources), MOST_NODES + 1))


def _is_evaluated(node: ir.Node, info: ShapeInfo, depths: Mapping[ir.Value, int]) -> bool:
    if node.domain not in STANDARD:
        return False
    if is_op(node, *PRODUCTS) and _is_layer(node, info, depths):
        return False
    return is_followed(node) or node.op_type in CONTROL
