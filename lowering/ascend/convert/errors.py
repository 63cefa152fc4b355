"""The errors of conversions: what cannot be converted, and what to do instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fa_compiler.passes.answer.report import first_of


class CannotMapError(Exception):
    """A node cannot be converted: the reason as a sentence, and an alternative if there is one."""

    def __init__(self, reason: str, alternative: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.alternative = alternative


@dataclass(frozen=True)
class UnmappedNode:
    """A node without a counterpart: its name, its type with the domain, the reason and the
    alternative."""

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

    def __init__(self, nodes: Sequence[UnmappedNode]) -> None:
        self.nodes = tuple(nodes)
        what = "1 node has" if len(nodes) == 1 else f"{len(nodes)} nodes have"
        alike: dict[tuple[str, str, str], list[UnmappedNode]] = {}
        for node in nodes:
            alike.setdefault((node.op_type, node.reason, node.alternative), []).append(node)
        super().__init__(
            f"{what} no counterpart among GE's operators: {'; '.join(map(_told, alike.values()))}"
        )


def _told(nodes: Sequence[UnmappedNode]) -> str:
    """The sentence about nodes that differ only in their names."""
    names = [f"'{node.name}'" for node in nodes]
    return nodes[0].told(first_of(names))


class UnreadableError(Exception):
    """A GE graph cannot be expressed in ONNX. The text names the operator."""
