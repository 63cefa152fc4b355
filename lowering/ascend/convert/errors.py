"""The errors of conversions: what cannot be converted, and what to do instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHOWN = 3
"""A sentence about several nodes names this many of them."""


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
        return self.told(f"'{self.name}'")

    def told(self, named: str) -> str:
        """The sentence about nodes of this type that are named so."""
        advice = f"; {self.alternative}" if self.alternative else ""
        return f"{self.op_type} {named}: {self.reason}{advice}"


class UnmappedError(Exception):
    """Nodes of a model have no counterpart in GE. `nodes` lists all of them. No graph was made."""

    def __init__(self, model: str, nodes: Sequence[UnmappedNode]) -> None:
        self.model = model
        self.nodes = tuple(nodes)
        what = "1 node has" if len(nodes) == 1 else f"{len(nodes)} nodes have"
        alike: dict[tuple[str, str, str], list[UnmappedNode]] = {}
        for node in nodes:
            alike.setdefault((node.op_type, node.reason, node.alternative), []).append(node)
        lines = "".join(f"\n  {group[0].told(_named(group))}" for group in alike.values())
        super().__init__(f"{model}: {what} no counterpart among GE's operators:{lines}")


def _named(nodes: Sequence[UnmappedNode]) -> str:
    """The names of nodes with one reason; of many the first ones."""
    names = ", ".join(f"'{node.name}'" for node in nodes[:SHOWN])
    return names if len(nodes) <= SHOWN else f"{names} and {len(nodes) - SHOWN} more"


class UnreadableError(Exception):
    """A GE graph cannot be expressed in ONNX. The text names the operator."""
