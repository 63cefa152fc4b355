"""Iterates over the nodes of a protobuf model and the graphs in their attributes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import onnx

from fa_compiler.protos.tensors import is_plain


def graph_inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """The inputs that a caller has to feed: those without an initializer."""
    given = {tensor.name for tensor in model.graph.initializer}
    return [info for info in model.graph.input if info.name not in given]


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


@dataclass(frozen=True)
class Subgraphs:
    """The graphs in the attributes of a model's nodes, with the graphs inside these.

    One walk over all nodes finds them; who needs graphs or nodes of the whole model afterwards
    reads them here.
    """

    model: onnx.ModelProto
    of_graph: tuple[onnx.GraphProto, ...]
    of_functions: tuple[onnx.GraphProto, ...]

    @staticmethod
    def of(model: onnx.ModelProto) -> Subgraphs:
        """The subgraphs of the model's main graph and those of its functions."""
        in_functions = (graph for function in model.functions for graph in graphs_below(function))
        return Subgraphs(model, tuple(graphs_below(model.graph)), tuple(in_functions))

    @property
    def nodes(self) -> Iterator[onnx.NodeProto]:
        """Every node of the model."""
        for body in (self.model.graph, *self.of_graph, *self.model.functions, *self.of_functions):
            yield from body.node
