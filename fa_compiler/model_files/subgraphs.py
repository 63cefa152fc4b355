"""Iterates over the nodes of a protobuf model and the graphs in their attributes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx

from fa_compiler.model_files.tensors import is_plain


def graphs_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs in a node's attributes, without the graphs inside these."""
    for attribute in node.attribute:
        if is_plain(attribute):
            continue
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def graphs_below(body: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.GraphProto]:
    """The graphs in the attributes of a body's nodes, with the graphs inside these."""
    for node in body.node:
        for inner in graphs_of(node):
            yield inner
            yield from graphs_below(inner)


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes and the nodes of all their subgraphs."""
    for node in nodes:
        yield node
        for graph in graphs_of(node):
            yield from all_nodes(graph.node)
