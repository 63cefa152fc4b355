"""What a check says of a file."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """When somebody notices."""

    REJECTED = "rejected"
    """The loader does: ATC stops with E10041."""

    LATER = "found later"
    """GE does, after it has loaded the file: while it prepares, infers or compiles."""

    WRONG = "wrong"
    """Nobody need notice; what is compiled is not what was meant."""

    NOTE = "note"
    """ATC takes it; the reader should know."""


@dataclass(frozen=True)
class Finding:
    """One rule that a file breaks. `rule` is its name ("edge-source"), `node` the operator ("" for the file),
    `message` what was found, `hint` what to do."""

    rule: str
    severity: Severity
    node: str
    message: str
    hint: str

    def __str__(self) -> str:
        place = f"{self.node}: " if self.node else ""
        return f"{place}{self.message}; {self.hint}"


@dataclass(frozen=True)
class Rule:
    """A rule's name and severity; calling it makes a finding."""

    name: str
    severity: Severity
    hint: str

    def __call__(self, node: str, message: str, hint: str | None = None) -> Finding:
        """The finding at an operator; `hint` replaces the rule's own."""
        return Finding(self.name, self.severity, node, message, hint or self.hint)
