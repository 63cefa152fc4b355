"""Names as ATC's ONNX parser needs them: every node and every output has one, and no two things of its graph share one.

The parser makes nodes of its own for graph inputs (named like the input) and for initializers
("<tensor>_initializer_<position among the sorted names>"); the model's nodes may not be named like those. It takes an
output without a name for the maker of every absent input.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from fa_compiler.passes.build import Names


def settle(model: ir.Model, graphs: list[ir.Graph]) -> None:
    """Give names to what has none, and other names to nodes whose name is taken."""
    names = Names.of(graphs)
    reserved = set(parser_nodes(model.graph))
    names.taken |= reserved
    for graph in graphs:
        for node in graph:
            _name_outputs(node, names)
            if not node.name or node.name in reserved:
                node.name = names.new(node.name or node.op_type)
            reserved.add(node.name)


def parser_nodes(graph: ir.Graph) -> Iterable[str]:
    """Names of the nodes the parser makes of a main graph's inputs and initializers."""
    yield from (value.name or "" for value in graph.inputs)
    yield from (f"{name}_initializer_{position}" for position, name in enumerate(sorted(graph.initializers)))


def _name_outputs(node: ir.Node, names: Names) -> None:
    count = len(node.outputs)
    while count > 1 and not node.outputs[count - 1].name and not node.outputs[count - 1].uses():
        count -= 1
    if count < len(node.outputs):
        node.resize_outputs(count)
    for output in node.outputs:
        if not output.name:
            output.name = names.new(f"{node.name or node.op_type}_unused")
