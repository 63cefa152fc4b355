"""The errors of conversions: what cannot be converted, and what to do instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class CannotMapError(Exception):
    """A node cannot be converted: the reason as a sentence, and an alternative if there is one."""

    def __init__(self, reason: str, alternative: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.alternative = alternative


@dataclass(frozen=True)
class UnmappedNode:
    """A node without a counterpart: its name, its type with the domain, the reason and the alternative."""

    name: str
    op_type: str
    reason: str
    alternative: str = ""

    def __str__(self) -> str:
        advice = f"; {self.alternative}" if self.alternative else ""
        return f"{self.op_type} '{self.name}': {self.reason}{advice}"


class UnmappedError(Exception):
    """Nodes of a model have no counterpart in GE. `nodes` lists all of them. No graph was made."""

    def __init__(self, model: str, nodes: Sequence[UnmappedNode]) -> None:
        self.model = model
        self.nodes = tuple(nodes)
        what = "1 node has" if len(nodes) == 1 else f"{len(nodes)} nodes have"
        lines = "".join(f"\n  {node}" for node in nodes)
        super().__init__(f"{model}: {what} no counterpart among GE's operators:{lines}")


class UnreadableError(Exception):
    """A GE graph cannot be expressed in ONNX. The text names the operator."""
