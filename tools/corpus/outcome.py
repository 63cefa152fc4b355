"""The outcome of one model of a corpus, and the shares of fused blocks over all models."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fa_compiler.passes.answer.report import INEXPRESSIBLE

LISTED = Path(__file__).parent / "inexpressible.json"
"""The blocks of the corpus with a code of `INEXPRESSIBLE`, checked by hand: model, anchor, code."""


@dataclass
class Outcome:
    """The outcome of one model."""

    id: str
    group: str
    expected: int
    ready_made: bool
    fused: int = 0
    heads: int = 0
    """Query heads of the first fused block."""
    fused_as: dict[str, int] = field(default_factory=dict)
    """The number of fused blocks by layout, mask and extensions."""
    declined: list[dict[str, Any]] = field(default_factory=list)
    not_attention: int = 0
    compared: str = "no"
    """"ort", "reference", "no" if neither runs the original, or "refused" if it is not a valid model."""
    runs: dict[str, str] = field(default_factory=dict)
    """onnxruntime version -> "same", "wrong" or "original does not run"."""
    varied: int = 0
    """The number of other inputs on which both models were compared, in the first onnxruntime."""
    error: float = 0.0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    """The defects: wrong outputs, crashes, messages of the checker."""
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Other tools by name: {"fused": blocks} or {"error": text}."""

    def counted(self, codes: Collection[str]) -> int:
        """The number of expected blocks that are declined with one of these codes."""
        return min(sum(block["code"] in codes for block in self.declined), self.expected)

    @property
    def inexpressible(self) -> int:
        """The number of expected blocks that are declined because the operator cannot express them."""
        return self.counted(INEXPRESSIBLE)


@dataclass(frozen=True)
class Share:
    """The number of fused blocks, and of expected ones."""

    fused: int
    expected: int

    @property
    def text(self) -> str:
        return f"{self.fused} of {self.expected} ({100 * self.fused / max(self.expected, 1):.2f} %)"


def shares(outcomes: Sequence[Outcome]) -> tuple[Share, Share]:
    """The shares of all expected blocks, and of those that the operator can express."""
    fused = sum(min(outcome.fused, outcome.expected) for outcome in outcomes)
    expected = sum(outcome.expected for outcome in outcomes)
    return Share(fused, expected), Share(fused, expected - sum(outcome.inexpressible for outcome in outcomes))


def unlisted(outcomes: Iterable[Outcome]) -> list[str]:
    """The differences from the list checked by hand, as sentences: blocks that cannot be expressed and are not on the
    list, and blocks on the list that have another code now."""
    listed: Mapping[str, Mapping[str, str]] = json.loads(LISTED.read_text())["blocks"]
    found = []
    for outcome in outcomes:
        wanted = listed.get(outcome.id, {})
        given = {block["anchor"]: block["code"] for block in outcome.declined if block["code"] in INEXPRESSIBLE}
        found += [
            f"{outcome.id}: {anchor} is {code}, not on the list"
            for anchor, code in given.items()
            if wanted.get(anchor) != code
        ]
        found += [
            f"{outcome.id}: {anchor} is on the list as {code}, but not declined so"
            for anchor, code in wanted.items()
            if anchor not in given
        ]
    return found
