"""Names for ATC's ONNX parser: every node and every output has a name, and names in a graph are
unique.

The parser makes nodes for graph inputs, with the input's name, and for initializers, with the name
"<tensor>_initializer_<position among the sorted names>". A node of the model must not have such a
name. The parser connects every absent input to an output without a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir

from fa_compiler.passes.emit.build import Names
from fa_compiler.passes.ir.nodes import name_of


def make_unique(model: ir.Model, graphs: list[ir.Graph]) -> None:
    """Name the nodes and outputs without a name, and rename nodes whose name is not unique."""
    names = Names.of(graphs)
    reserved = set(parser_nodes(map(name_of, model.graph.inputs), model.graph.initializers))
    names.taken |= reserved
    for graph in graphs:
        for node in graph:
            _name_outputs(node, names)
            if not node.name or node.name in reserved:
                node.name = names.new(node.name or node.op_type)
            reserved.add(node.name)


def parser_nodes(inputs: Iterable[str], initializers: Iterable[str]) -> Iterator[str]:
    """The names of the nodes that the parser makes for inputs and initializers of a graph, of which
    these are the names."""
    yield from inputs
    yield from (
        f"{name}_initializer_{position}" for position, name in enumerate(sorted(initializers))
    )


def _name_outputs(node: ir.Node, names: Names) -> None:
    count = len(node.outputs)
    while count > 1 and not node.outputs[count - 1].name and not node.outputs[count - 1].uses():
        count -= 1
    if count < len(node.outputs):
        node.resize_outputs(count)
    for output in node.outputs:
        if not output.name:
            output.name = names.new(f"{node.name or node.op_type}_unused")
