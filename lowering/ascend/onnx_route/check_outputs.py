"""The outputs that ATC's parser drops.

The parser makes its graph of all nodes that are connected with an input of the graph, in any direction, and of the
nodes without inputs. In a branch of an If, the inputs are the tensors that one of the branches reads from outside. An
output of another node is dropped, nothing is reported, and the outputs behind it move up.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from fa_compiler.lowering.ascend.diagnostic import FileDiagnostic, Rule, Severity

LOST = Rule("output-lost", Severity.WRONG, "convert the model with `fa-compiler atc --route onnx`")


def check_outputs(graph: onnx.GraphProto) -> Iterator[FileDiagnostic]:
    """The outputs of the main graph, and of the branches in it, that the parser drops."""
    initial = {tensor.name for tensor in graph.initializer}
    yield from _lost(graph, {value.name for value in graph.input} - initial)
    yield from _branches(graph)


def _branches(graph: onnx.GraphProto) -> Iterator[FileDiagnostic]:
    for node in graph.node:
        branches = [attr.g for attr in node.attribute if attr.type == onnx.AttributeProto.GRAPH]
        outside = {name for branch in branches for name in _outside(branch)}
        for branch in branches:
            if outside:  # without any, the parser begins at the constants
                yield from _lost(branch, outside)
            yield from _branches(branch)


def _outside(graph: onnx.GraphProto) -> set[str]:
    """The names that a graph, or a branch in it, reads from outside."""
    read = {name for node in graph.node for name in _read(node)} | {value.name for value in graph.output}
    made = {name for node in graph.node for name in node.output}
    return read - made - {value.name for value in graph.input} - {tensor.name for tensor in graph.initializer} - {""}


def _read(node: onnx.NodeProto) -> set[str]:
    inner = (attr.g for attr in node.attribute if attr.type == onnx.AttributeProto.GRAPH)
    return {*node.input, *(name for graph in inner for name in _outside(graph))} - {""}


def _lost(graph: onnx.GraphProto, starts: set[str]) -> Iterator[FileDiagnostic]:
    """The outputs that are not connected with the tensors of `starts`, which are inputs of the graph."""
    nodes = list(graph.node)
    ends: dict[str, list[int]] = {}
    for place, node in enumerate(nodes):
        for name in {*_read(node), *node.output} - {""}:
            ends.setdefault(name, []).append(place)
    reached: set[int] = set()
    ahead = [place for name in starts for place in ends.get(name, ())]
    while ahead:
        place = ahead.pop()
        if place not in reached:
            reached.add(place)
            ahead += [
                other for name in {*_read(nodes[place]), *nodes[place].output} - {""} for other in ends.pop(name, ())
            ]
    makers = {name: place for place, node in enumerate(nodes) for name in node.output}
    for value in graph.output:
        at = makers.get(value.name)
        if at is not None and at not in reached and _read(nodes[at]):
            label = nodes[at].name or value.name
            yield LOST(
                label, f"the output '{value.name}' depends on constants only: ATC drops it, and later outputs move up"
            )
