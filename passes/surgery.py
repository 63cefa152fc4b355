"""Changing a graph: replacing a value, removing what became superfluous, checking the result."""

from __future__ import annotations

import networkx as nx
import onnx_ir as ir

from fa_compiler.passes.decline import label


def replace_value(old: ir.Value, new: ir.Value, rename: bool = True) -> None:
    """Let `new` take the place of `old` everywhere, model outputs included, with `rename` under the old name.

    Whoever knows the model knows the value by that name; its declared type and shape stay too.
    """
    name, shape, dtype = old.name, old.shape, old.dtype
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    if not rename:
        return
    old.name = None
    new.name = name
    if shape is not None:
        new.shape = shape
    if dtype is not None:
        new.dtype = dtype


def sweep(graph: ir.Graph, roots: list[ir.Node]) -> None:
    """Remove the given nodes if nothing needs them, and all that only they needed."""
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node.graph is not graph or any(output.uses() or output.is_graph_output() for output in node.outputs):
            continue
        inputs = [value for value in node.inputs if value is not None]
        graph.remove(node, safe=True)
        for value in inputs:
            maker = value.producer()
            if maker is not None:
                pending.append(maker)
            elif (
                not value.uses() and value.is_initializer() and not (value.is_graph_input() or value.is_graph_output())
            ):
                assert value.graph is not None and value.name is not None
                del value.graph.initializers[value.name]


def check_acyclic(graph: ir.Graph) -> None:
    """Raise if some node depends on its own output, which no sequence of correct fusions can bring about."""
    dependencies: nx.DiGraph[int] = nx.DiGraph()
    for node in graph:
        dependencies.add_node(id(node))
        for value in node.inputs:
            maker = value.producer() if value is not None else None
            if maker is not None and maker.graph is graph:
                dependencies.add_edge(id(maker), id(node))
    if not nx.is_directed_acyclic_graph(dependencies):
        names = {id(node): label(node) for node in graph}
        cycle = [str(names[edge[0]]) for edge in nx.find_cycle(dependencies)]
        raise RuntimeError(f"fusing made a cycle: {' -> '.join(cycle)}")
