"""Changes of a whole model before its attention is looked for: every result stays what it is, bit
by bit.

identities.py lets readers read what is behind operators that only hand on their input; filled.py
joins the parts of tensors that are filled part by part; minima.py compares each of several integers
in place of the least of them; counted.py counts positions in integers; early_cuts.py cuts tensors
before they are transposed. A model in which nothing is fused gets its own nodes back.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.emit.build import Names
from fa_compiler.passes.ir.nodes import remember_versions
from fa_compiler.passes.prepare.counted import count_in_integers
from fa_compiler.passes.prepare.early_cuts import cut_early
from fa_compiler.passes.prepare.filled import join_parts
from fa_compiler.passes.prepare.functions import may_hold_attention
from fa_compiler.passes.prepare.identities import bypass_identities
from fa_compiler.passes.prepare.minima import compare_each
from fa_compiler.passes.values.shapes import ShapeInfo, analyse

CHANGES = (bypass_identities, join_parts, compare_each, count_in_integers, cut_early)


@dataclass(frozen=True)
class Preparation:
    """A model after these changes: its graphs, what is known of them, and the names of what was
    made."""

    graphs: list[ir.Graph]
    info: ShapeInfo
    before: tuple[_GraphBefore, ...] = ()
    made: frozenset[str] = frozenset()

    def undo(self) -> None:
        """Give the model its own nodes back."""
        for graph in self.before:
            graph.restore()


@dataclass(frozen=True)
class _GraphBefore:
    """The nodes of a graph before the changes, in order, with their inputs, and its
    initializers."""

    graph: ir.Graph
    nodes: tuple[tuple[ir.Node, tuple[ir.Value | None, ...]], ...]
    initializers: tuple[ir.Value, ...]

    @staticmethod
    def of(graph: ir.Graph) -> _GraphBefore:
        """What a graph is now."""
        nodes = tuple((node, tuple(node.inputs)) for node in graph)
        return _GraphBefore(graph, nodes, tuple(graph.initializers.values()))

    def restore(self) -> None:
        """Put everything in its place again. A node that lost inputs since, such as a CastLike that
        became a Cast, does without them."""
        own = {node for node, _ in self.nodes}
        for node in self.graph:
            if node not in own:
                for place in range(len(node.inputs)):
                    node.replace_input_with(place, None)
        self.graph.remove(list(self.graph))
        self.graph.extend(node for node, _ in self.nodes)
        for node, inputs in self.nodes:
            for place, value in enumerate(inputs[: len(node.inputs)]):
                node.replace_input_with(place, value)
        for name in tuple(self.graph.initializers):
            del self.graph.initializers[name]
        for value in self.initializers:
            self.graph.initializers.add(value)


def prepare(model: ir.Model, graphs: list[ir.Graph], info: ShapeInfo, names: Names) -> Preparation:
    """Make the changes in a model that may hold attention."""
    if not may_hold_attention(node for graph in graphs for node in graph):
        return Preparation(graphs, info)
    before, taken, changed = tuple(map(_GraphBefore.of, graphs)), set(names.taken), False
    for change in CHANGES:
        if change(graphs, info, names):
            graphs, info, changed = remember_versions(model), analyse(model), True
    return Preparation(graphs, info, before if changed else (), frozenset(names.taken - taken))
