"""Changes of what is found at single nodes of graphs, all of them before the order of the nodes is
restored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import onnx_ir as ir

from fa_compiler.passes.emit.build import Builder, Names
from fa_compiler.passes.ir.nodes import without_none
from fa_compiler.passes.ir.surgery import restore_order, sweep
from fa_compiler.passes.values.shapes import ShapeInfo

T = TypeVar("T")


def change_found(
    graphs: Sequence[ir.Graph],
    info: ShapeInfo,
    names: Names,
    find: Callable[[ir.Node, ShapeInfo], T | None],
    change: Callable[[T, Builder], Sequence[ir.Node]],
) -> bool:
    """Change what is found in graphs. A change returns the nodes that nothing needs behind it.
    Returns whether anything changed; then `info` does not know all of the graphs."""
    by_graph = [(graph, without_none(find(node, info) for node in graph)) for graph in graphs]
    for graph, found in by_graph:
        builder = Builder(graph, names, info)
        left = [node for one in found for node in change(one, builder)]
        if found:
            restore_order(graph)
            sweep(graph, left)
    return any(found for _, found in by_graph)
