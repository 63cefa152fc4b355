"""Changes of a graph: replacing a value, removing nodes that became superfluous, sorting the
result."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import onnx_ir as ir

from fa_compiler.passes.answer.decline import label
from fa_compiler.passes.ir.nodes import (
    all_nodes,
    certain,
    holds_output,
    inputs_of,
    makers_of,
    reached,
    values_read,
)


def replace_value(old: ir.Value, new: ir.Value, rename: bool = True) -> None:
    """Replace `old` by `new` everywhere, model outputs included.

    With `rename`, `new` takes the old name, by which users of the model know the value, and the old
    declared type and shape.
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


@dataclass
class Swept:
    """What was removed: nodes with the inputs that they had, and initializers with their graphs."""

    nodes: list[tuple[ir.Node, tuple[ir.Value | None, ...]]] = field(default_factory=list)
    initializers: list[tuple[ir.Graph, ir.Value]] = field(default_factory=list)


def sweep(graph: ir.Graph, roots: list[ir.Node]) -> Swept:
    """Remove the given nodes if nothing needs them, and then every node and initializer that only
    they needed."""
    pending, swept = list(roots), Swept()
    while pending:
        node = pending.pop()
        if (
            node.graph is not graph
            or holds_output(node.outputs)
            or any(output.uses() for output in node.outputs)
        ):
            continue
        swept.nodes.append((node, tuple(node.inputs)))
        given = inputs_of(node)
        graph.remove(node, safe=True)
        pending.extend(makers_of(given))
        for value in filter(_is_unused_initializer, given):
            assert value.graph is not None and value.name is not None
            swept.initializers.append((value.graph, value))
            del value.graph.initializers[value.name]
    return swept


def _is_unused_initializer(value: ir.Value) -> bool:
    """Is a value an initializer that nothing reads, and neither an input nor an output?"""
    is_bound = value.is_graph_input() or value.is_graph_output() or not value.is_initializer()
    return value.producer() is None and not is_bound and not value.uses()


def superfluous(roots: Iterable[ir.Node], dead: Collection[ir.Node] = ()) -> dict[ir.Node, None]:
    """The nodes that a sweep from these roots would remove if there were no dead nodes, in an order
    that begins at the roots."""
    removed: dict[ir.Node, None] = {}
    pending = list(roots)
    while pending:
        node = pending.pop()
        readers = (reader for output in node.outputs for reader, _ in output.uses())
        if node in removed or holds_output(node.outputs):
            continue
        if all(reader in removed or reader in dead for reader in readers):
            removed[node] = None
            pending.extend(makers_of(node.inputs))
    return removed


def dead_readers(roots: Iterable[ir.Node], dead: Collection[ir.Node]) -> list[ir.Node]:
    """The dead nodes because of which a sweep from these roots would leave more nodes in the graph:
    those that read the outputs of such nodes, and the dead nodes after them. Other dead nodes are
    left alone."""
    removed = superfluous(roots, dead)
    return [
        node
        for node in reached(removed, lambda dead_node: _dead_behind(dead_node, dead))
        if node in dead
    ]


def _dead_behind(node: ir.Node, dead: Collection[ir.Node]) -> list[ir.Node]:
    return [reader for output in node.outputs for reader in output.consumers() if reader in dead]


ORDER = "fa_compiler.order"
"""Where a graph keeps the places of its sorted nodes, for `depends`. Nodes without a place may lie
anywhere."""


def depends(value: ir.Value, node: ir.Node) -> bool:
    """Is a value computed from an output of a node in the same graph? Values that a branch or loop
    body reads count, too.

    The original nodes of a graph are sorted, so those before this node are not searched. A trial
    (emit/trial.py) says what that means for the nodes that it replaces.
    """
    graph = certain(node.graph)
    places: dict[ir.Node, int] | None = graph.meta.get(ORDER)
    if places is None:
        places = graph.meta[ORDER] = {sorted_node: place for place, sorted_node in enumerate(graph)}
    first = places.get(node, 0)
    pending, seen = [value], {node}
    while pending:
        maker = pending.pop().producer()
        if maker is node:
            return True
        if (
            maker is None
            or maker in seen
            or maker.graph is not graph
            or places.get(maker, first) < first
        ):
            continue
        seen.add(maker)
        pending.extend(values_read(maker))
    return False


def restore_order(graph: ir.Graph) -> None:
    """Sort a graph. Raises RuntimeError if a node depends on its own output, which correct fusions
    cannot bring about."""
    graph.meta.pop(ORDER, None)
    try:
        graph.sort()
    except ValueError:
        raise RuntimeError(f"fusing made a cycle: {' -> '.join(_cycle(graph))}") from None


def _cycle(graph: ir.Graph) -> list[str]:
    import networkx as nx  # takes a tenth of a second, so only this error imports it

    made = ((value.producer(), node) for node in all_nodes(graph) for value in values_read(node))
    after = nx.DiGraph((maker, node) for maker, node in made if maker is not None)
    loop = [maker for maker, _ in nx.find_cycle(after)]
    return [str(label(node)) for node in (*loop, loop[0])]
