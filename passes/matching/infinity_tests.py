"""Tests whether a probability is infinite. None is, so these tests are removed.

torch.nan_to_num is exported as a NaN guard and two of these tests. Grammar; the code cites the numbers of the cases:

    never :=                                       a truth value that is never true
      1     IsInf(p)                               also of a p that is cast to a wider float
      2   | Equal(p, +-inf)
      3   | And(never, x) | And(x, never)          with x also Greater(p, y), Less(p, y), which then decide nothing
      4   | Cast(never, bool)
    selection :=
      5     Where(never, x, probabilities)         the probabilities, whatever x is, unless it enlarges them

p is any value on the path from the softmax. A probability is NaN or between 0 and 1, and stays so after a NaN guard. A
factor on it is of moderate size (factors.py), so that the product is finite in float32. In 16 bits it may be infinite:
tests behind such a factor are not removed.

The tests are found from p downwards, because every reader of p must be known; a pattern only reads upwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import is_op
from fa_compiler.passes.layout.views import WIDENING, Viewer


@dataclass
class InfinityTests:
    """The tests met so far on the path of a softmax's probabilities: `nodes` compute them, `never` are the values that
    are never true."""

    viewer: Viewer
    nodes: list[ir.Node] = field(default_factory=list)
    never: set[ir.Value] = field(default_factory=set)

    def ask(self, value: ir.Value) -> None:
        """Find the tests of one value."""
        for node in _readers(value):
            if is_op(node, "IsInf") or (is_op(node, "Equal") and self._with_infinity(node, value)):  # 1 and 2
                self._add(node)
            elif is_op(node, "Cast") and self._widens(node):  # 1
                following = _readers(node.outputs[0])
                inner = [reader for reader in following if is_op(reader, "IsInf")]
                if inner and len(inner) == len(following):
                    self.nodes.append(node)
                    for reader in inner:
                        self._add(reader)
        for node in _readers(value):
            if is_op(node, "Greater", "Less") and self._only_beside_never(node):
                self._take(node)

    def selects(self, node: ir.Node, value: ir.Value) -> bool:
        """Case 5: does a Where always give the value?"""
        if not is_op(node, "Where") or node.inputs[0] not in self.never or node.inputs[2] is not value:
            return False
        return self.viewer.info.shape(node.outputs[0]) == self.viewer.info.shape(value)

    def stray(self, matched: list[ir.Node]) -> ir.Node | None:
        """A test whose result is read by something else than the matched nodes."""
        known = {id(node) for node in (*self.nodes, *matched)}
        for node in self.nodes:
            for output in node.outputs:
                if output.is_graph_output() or any(id(reader) not in known for reader in _readers(output)):
                    return node
        return None

    def _add(self, node: ir.Node) -> None:
        """Cases 3 and 4: take a node whose result is never true, and what follows from it."""
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
        """Case 3: take a comparison whose result is read only beside one that is never true, and the casts after it."""
        self.nodes.extend([node, *(reader for reader in _readers(node.outputs[0]) if is_op(reader, "Cast"))])

    def _only_beside_never(self, node: ir.Node) -> bool:
        """Case 3: is every reader of a comparison, through casts, an And that is never true?"""
        readers = _readers(node.outputs[0])
        following = [
            combination for reader in readers if is_op(reader, "Cast") for combination in _readers(reader.outputs[0])
        ]
        direct = [reader for reader in readers if not is_op(reader, "Cast")]
        nodes = [*following, *direct]
        return bool(nodes) and all(
            is_op(combination, "And") and combination.outputs[0] in self.never for combination in nodes
        )

    def _with_infinity(self, node: ir.Node, value: ir.Value) -> bool:
        others = [other for other in node.inputs if other is not None and other is not value]
        return len(others) == 1 and abs(self.viewer.info.scalar(others[0]) or 0.0) == float("inf")

    def _widens(self, node: ir.Node) -> bool:
        source = node.inputs[0]
        kinds = None if source is None else self.viewer.info.dtype(source), self.viewer.info.dtype(node.outputs[0])
        return kinds in WIDENING


def _readers(value: ir.Value) -> list[ir.Node]:
    """The nodes that read a value, each once, dead ones among them."""
    return list(dict.fromkeys(node for node, _ in value.uses()))
