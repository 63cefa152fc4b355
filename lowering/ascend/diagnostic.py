"""The diagnostics of a file for ATC (`.air`, ONNX or the JSON of one operator), and the error for
an `.air` file.

op_registry has a diagnostic of its own: it tells which numbered constraint a node breaks. A
diagnostic of a file tells which rule the file breaks and how ATC reacts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fa_compiler.op_registry.errors import FaCompilerError


class Severity(StrEnum):
    """How ATC reacts to a fault."""

    REJECTED = "rejected"
    """The loader rejects the file: ATC stops with E10041 (E1xxxx of its parsers for other
    files)."""

    LATER = "found later"
    """The file is loaded, but GE stops later: while it prepares, infers or compiles the graph."""

    WRONG = "wrong"
    """ATC may report nothing, but it compiles another graph than the one that was meant."""

    NOTE = "note"
    """ATC accepts it; the user should know about it."""


@dataclass(frozen=True)
class FileDiagnostic:
    """One rule that a file breaks: the rule's name, such as "edge-source", its severity, the
    operator ("" for the whole file), what was found, and what to do."""

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
    """The name, severity and hint of a rule. A call makes a diagnostic."""

    name: str
    severity: Severity
    hint: str

    def __call__(self, node: str, message: str, hint: str | None = None) -> FileDiagnostic:
        """The diagnostic for an operator. `hint` replaces the rule's own hint."""
        return FileDiagnostic(self.name, self.severity, node, message, hint or self.hint)


class AirError(FaCompilerError, ValueError):
    """A graph that an `.air` file cannot hold, or a file that GE's loader rejects. The text is one
    line, names the operator and says what to do."""

    def __init__(self, text: str) -> None:
        super().__init__(" ".join(text.split()))
