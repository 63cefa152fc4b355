"""The outputs that ATC's parser drops.

The parser makes its graph of all nodes that are connected with an input of the graph, in any
direction, and of the nodes without inputs. In a branch of an If, the inputs are the tensors that
one of the branches reads from outside. An output of another node is dropped, nothing is reported,
and the outputs behind it move up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx

from fa_compiler.lowering.ascend.diagnostic import FileDiagnostic, Rule, Severity

LOST = Rule("output-lost", Severity.WRONG, "convert the model with `fa-compiler atc --route onnx`")


def check_outputs(graph: onnx.GraphProto) -> Iterator[FileDiagnostic]:
    """The outputs of the main graph, and of the branches in it, that the parser drops."""
    initial = {tensor.name for tensor in graph.initializer}
    yield from _lost(graph, {value.name for value in graph.input} - initial)
    yield from _branches(graph)


def all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph, and the branches in it."""
    yield graph
    for node in graph.node:
        for branch in _branches_of(node):
            yield from all_graphs(branch)


def _branches_of(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [attr.g for attr in node.attribute if attr.type == onnx.AttributeProto.GRAPH]


def _branches(graph: onnx.GraphProto) -> Iterator[FileDiagnostic]:
    for node in graph.node:
        branches = _branches_of(node)
        outside = {name for branch in branches for name in _outside(branch)}
        for branch in branches:
            if outside:  # without any, the parser begins at the constants
                yield from _lost(branch, outside)
            yield from _branches(branch)


def _outside(graph: onnx.GraphProto) -> set[str]:
    """The names that a graph, or a branch in it, reads from outside."""
    read = {name for node in graph.node for name in _read(node)} | {
        value.name for value in graph.output
    }
    made = {name for node in graph.node for name in node.output}
    return (
        read
        - made
        - {value.name for value in graph.input}
        - {tensor.name for tensor in graph.initializer}
        - {""}
    )


def _read(node: onnx.NodeProto) -> set[str]:
    return {*node.input, *(name for graph in _branches_of(node) for name in _outside(graph))} - {""}


def _lost(graph: onnx.GraphProto, starts: set[str]) -> Iterator[FileDiagnostic]:
    """The outputs that are not connected with the tensors of `starts`, which are inputs of the
    graph."""
    nodes = list(graph.node)
    connected = _connected(nodes, starts)
    makers = {name: place for place, node in enumerate(nodes) for name in node.output}
    for value in graph.output:
        at = makers.get(value.name)
        if at is not None and at not in connected and _read(nodes[at]):
            message = f"the output '{value.name}' depends on constants only: ATC drops it, and later outputs move up"
            yield LOST(nodes[at].name or value.name, message)


def _connected(nodes: Sequence[onnx.NodeProto], starts: set[str]) -> set[int]:
    """The places of the nodes that are connected with the tensors of `starts`, in any direction."""
    tensors = [{*_read(node), *node.output} - {""} for node in nodes]
    neighbours: dict[str, list[int]] = {}
    for place, names in enumerate(tensors):
        for name in names:
            neighbours.setdefault(name, []).append(place)
    connected: set[int] = set()
    ahead = list(starts)
    while ahead:
        for place in neighbours.pop(ahead.pop(), ()):
            if place not in connected:
                connected.add(place)
                ahead += tensors[place]
    return connected
