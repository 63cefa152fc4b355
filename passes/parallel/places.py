"""Where a tensor carries the sequence, and the exception of a tensor that cannot be cut there."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.decline import label
from fa_compiler.passes.rewrite.origin import stands_for

ONE = Dim(1)


@dataclass(frozen=True)
class Place:
    """The dimension `dim` of a tensor runs over the sequence.

    A Reshape may have merged it with others. In row-major order the dimension then is [before, S,
    after], where S is the length of the sequence.
    """

    dim: int
    before: Dim = ONE
    after: Dim = ONE

    @property
    def alone(self) -> bool:
        """Is the dimension the sequence and nothing else?"""
        return self.before == ONE and self.after == ONE

    def at(self, dim: int) -> Place:
        """The same in another dimension."""
        return Place(dim, self.before, self.after)


class Refusal(Exception):
    """Raised where the graph cannot be cut along the sequence. The text is a sentence without the
    node's name."""

    def __init__(self, reason: str, node: ir.Node | None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = node

    @property
    def sentence(self) -> str:
        """The reason with the name and the type of the node, and a name of the user's where this
        one is ours."""
        if self.node is None:
            return self.reason
        kind = self.node.op_type
        if (known := stands_for(self.node)) is not None:
            kind += f", in the place of {known!r}"
        return f"node {label(self.node)!r} ({kind}): {self.reason}"
