"""Tests whether a probability is infinite. None is, so these tests are removed.

torch.nan_to_num is exported as a NaN guard and two of these tests.

    never     := IsInf(p) | Equal(p, +-inf) | And(never, x) | And(x, never) | Cast(never, bool)
    selection := Where(never, x, probabilities)            the probabilities, whatever x is, unless it enlarges them

p is any value on the way from the softmax, or a wider float of it. A probability is NaN or between 0 and 1, and stays
so behind a NaN guard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import onnx_ir as ir

from fa_compiler.passes.layout.views import WIDENING, Viewer
from fa_compiler.passes.nodes import is_op


@dataclass
class InfinityTests:
    """The questions met so far on the way of one softmax's probabilities."""

    viewer: Viewer
    nodes: list[ir.Node] = field(default_factory=list)
    never: set[ir.Value] = field(default_factory=set)

    def ask(self, value: ir.Value) -> None:
        """Find the questions about one value."""
        for node in _readers(value):
            if is_op(node, "IsInf") or (is_op(node, "Equal") and self._with_infinity(node, value)):
                self._add(node)
            elif is_op(node, "Cast") and self._widens(node):
                inner = [reader for reader in _readers(node.outputs[0]) if is_op(reader, "IsInf")]
                if inner and len(inner) == len(list(_readers(node.outputs[0]))):
                    self.nodes.append(node)
                    for reader in inner:
                        self._add(reader)
        for node in _readers(value):
            if is_op(node, "Greater", "Less") and self._only_beside_never(node):
                self._take(node)

    def selects(self, node: ir.Node, value: ir.Value) -> bool:
        """Is this a selection that always gives the value?"""
        if not is_op(node, "Where") or node.inputs[0] not in self.never or node.inputs[2] is not value:
            return False
        return self.viewer.info.shape(node.outputs[0]) == self.viewer.info.shape(value)

    def stray(self, matched: list[ir.Node]) -> ir.Node | None:
        """A question that somebody else asks, too."""
        known = {id(node) for node in (*self.nodes, *matched)}
        for node in self.nodes:
            for output in node.outputs:
                if output.is_graph_output() or any(id(reader) not in known for reader in _readers(output)):
                    return node
        return None

    def _add(self, node: ir.Node) -> None:
        """A node whose result is never true, and what follows from it."""
        pending = [node]
        while pending:
            current = pending.pop()
            if current in self.nodes:
                continue
            self.nodes.append(current)
            self.never.add(current.outputs[0])
            for reader in _readers(current.outputs[0]):
                to_bool = is_op(reader, "Cast") and self.viewer.info.dtype(reader.outputs[0]) == ir.DataType.BOOL
                if to_bool or is_op(reader, "And"):
                    pending.append(reader)

    def _take(self, node: ir.Node) -> None:
        """A comparison that is asked beside a question that is never true, with the casts behind it."""
        self.nodes.append(node)
        for reader in _readers(node.outputs[0]):
            if is_op(reader, "Cast"):
                self.nodes.append(reader)

    def _only_beside_never(self, node: ir.Node) -> bool:
        readers = list(_readers(node.outputs[0]))
        behind = [each for reader in readers if is_op(reader, "Cast") for each in _readers(reader.outputs[0])]
        direct = [reader for reader in readers if not is_op(reader, "Cast")]
        found = [*behind, *direct]
        return bool(found) and all(is_op(each, "And") and each.outputs[0] in self.never for each in found)

    def _with_infinity(self, node: ir.Node, value: ir.Value) -> bool:
        others = [each for each in node.inputs if each is not None and each is not value]
        return len(others) == 1 and abs(self.viewer.info.scalar(others[0]) or 0.0) == float("inf")

    def _widens(self, node: ir.Node) -> bool:
        source = node.inputs[0]
        kinds = None if source is None else self.viewer.info.dtype(source), self.viewer.info.dtype(node.outputs[0])
        return kinds in WIDENING


def _readers(value: ir.Value) -> Iterator[ir.Node]:
    seen: set[int] = set()
    for node, _ in value.uses():
        if id(node) not in seen:
            seen.add(id(node))
            yield node
