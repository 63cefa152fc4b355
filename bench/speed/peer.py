"""What a library has to offer for each of its ways to compute attention. Only the standard library and NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.speed.cases import Case
from bench.speed.truth import Array


class NotOffered(Exception):
    """The peer cannot compute this case; the text says why, in a few words."""


@dataclass(frozen=True)
class Peer:
    """A prepared computation: `call` does the work, `results` gives what it left, in the order of `truth.OUTPUTS`,
    as float32 in the shapes of the inputs. `keep` is what must not be freed as long as it is called."""

    call: Callable[[], object]
    results: Callable[[], list[Array]]
    keep: object = None


@dataclass(frozen=True)
class Problem:
    """A case with its inputs, which a peer may keep and, where it says so, change."""

    case: Case
    data: dict[str, Array]
    folder: Path
    threads: int


Factory = Callable[[Problem], Peer]
"""Prepares a peer for a problem; raises NotOffered, or whatever the library raises."""

MASKED = -1e4
"""What is added to the scores of padded keys; every type of number has it, and it outweighs these scores."""


def lower_precision(name: str) -> bool:
    """Whether a peer computes in fewer bits than its inputs have: it is shown, but never the one to beat."""
    return name.endswith("*")
