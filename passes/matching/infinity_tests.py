"""Tests whether a probability is infinite. None is, so these tests are removed.

torch.nan_to_num(p) is exported as a NaN guard and two of these tests:

    p = torch.where(p.isinf() & (p > 0), 3.4e38, p)
    p = torch.where(p.isinf() & (p < 0), -3.4e38, p)

Grammar; the code cites the numbers of the cases:

    never :=                                       a truth value that is never true
      1     IsInf(p)                               also of a p that is cast to a wider float
      2   | Equal(p, +-inf)
      3   | And(never, x) | And(x, never)          with x also Greater(p, y), Less(p, y), which then
                                                   decide nothing
      4   | Cast(never, bool)
    selection :=
      5     Where(never, x, probabilities)         the probabilities, whatever x is, unless it
                                                   enlarges them

p is any value on the path from the softmax. A probability is NaN or between 0 and 1, and stays so
after a NaN guard. A factor on it is of moderate size (factors.py), so that the product is finite in
float32. In 16 bits it may be infinite: tests behind such a factor are not removed.

The tests are found from p downwards, because every reader of p must be known; a pattern only reads
upwards.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import chain

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import (
    all_ops,
    holds_output,
    is_op,
    nodes_of_type,
    operand_at,
    others_of,
    sole,
)
from fa_compiler.passes.layout.views import WIDENING, Viewer


@dataclass
class InfinityTests:
    """The tests met so far on the path of a softmax's probabilities: `nodes` compute them, `never`
    are the values that are never true."""

    viewer: Viewer
    nodes: list[ir.Node] = field(default_factory=list)
    never: set[ir.Value] = field(default_factory=set)

    def ask(self, value: ir.Value) -> None:
        """Find the tests of one value."""
        for node in _readers(value):
            if is_op(node, "IsInf") or self._is_infinity_beside(node, value):  # 1 and 2
                self._take_never(node)
            elif self._widens(node):  # 1
                self._take_widened(node)
        for node in _readers(value):
            if is_op(node, "Greater", "Less") and self._only_beside_never(node):
                self._take_comparison(node)

    def selects(self, node: ir.Node, value: ir.Value) -> bool:
        """Case 5: does a Where always give the value?"""
        if (
            not is_op(node, "Where")
            or node.inputs[0] not in self.never
            or node.inputs[2] is not value
        ):
            return False
        return self.viewer.info.shape(node.outputs[0]) == self.viewer.info.shape(value)

    def stray(self, matched: list[ir.Node]) -> ir.Node | None:
        """A test whose result is read by something else than the matched nodes."""
        known = {*self.nodes, *matched}
        return next((node for node in self.nodes if not _is_read_by(known, node)), None)

    def _take_widened(self, cast: ir.Node) -> None:
        """Case 1: take the tests of a value that is cast, and the cast, where nothing else reads
        it."""
        tests = _readers(cast.outputs[0])
        if tests and all_ops(tests, "IsInf"):
            self.nodes.append(cast)
            for test in tests:
                self._take_never(test)

    def _take_never(self, node: ir.Node) -> None:
        """Cases 3 and 4: take a node whose result is never true, and what follows from it."""
        pending = [node]
        while pending:
            current = pending.pop()
            if current in self.nodes:
                continue
            self.nodes.append(current)
            self.never.add(current.outputs[0])
            for reader in _readers(current.outputs[0]):
                to_bool = (
                    is_op(reader, "Cast")
                    and self.viewer.info.dtype(reader.outputs[0]) == ir.DataType.BOOL
                )
                if to_bool or is_op(reader, "And"):
                    pending.append(reader)

    def _take_comparison(self, node: ir.Node) -> None:
        """Case 3: take a comparison whose result is read only beside one that is never true, and
        the casts after it."""
        self.nodes.extend(
            [node, *(reader for reader in _readers(node.outputs[0]) if is_op(reader, "Cast"))]
        )

    def _only_beside_never(self, node: ir.Node) -> bool:
        """Case 3: is every reader of a comparison, through casts, an And that is never true?"""
        readers = _readers(node.outputs[0])
        casts = list(nodes_of_type(readers, "Cast"))
        behind = [reader for cast in casts for reader in _readers(cast.outputs[0])]
        combining = {*readers, *behind} - set(casts)
        return bool(combining) and all(
            is_op(node, "And") and node.outputs[0] in self.never for node in combining
        )

    def _is_infinity_beside(self, node: ir.Node, value: ir.Value) -> bool:
        """Case 2: does a node ask whether a value is infinity?"""
        other = sole(others_of(node, value)) if is_op(node, "Equal") else None
        return other is not None and abs(self.viewer.info.scalar(other) or 0.0) == math.inf

    def _widens(self, node: ir.Node) -> bool:
        kinds = self.viewer.info.dtype(operand_at(node, 0)), self.viewer.info.dtype(node.outputs[0])
        return is_op(node, "Cast") and kinds in WIDENING


def _readers(value: ir.Value) -> list[ir.Node]:
    """The nodes that read a value, each once, dead ones among them."""
    return list(dict.fromkeys(node for node, _ in value.uses()))


def _is_read_by(known: Collection[ir.Node], node: ir.Node) -> bool:
    """Do only these nodes read what a node gives?"""
    readers = chain.from_iterable(map(_readers, node.outputs))
    return not holds_output(node.outputs) and all(reader in known for reader in readers)
