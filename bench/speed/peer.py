"""The interface of a peer: one way of a library to compute attention. Uses only the standard library and NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.speed.cases import Case
from bench.speed.truth import Array


class NotOffered(Exception):
    """The peer cannot compute this case. The text gives the reason in a few words."""


@dataclass(frozen=True)
class Peer:
    """A prepared computation. `call` computes; `results` returns the results in the order of `truth.OUTPUTS`, as
    float32 in the shapes of the inputs. `keep` refers to objects that must not be freed."""

    call: Callable[[], object]
    results: Callable[[], list[Array]]
    keep: object = None


@dataclass(frozen=True)
class Problem:
    """A case with its inputs. A peer may keep them; it changes them only if its docstring says so."""

    case: Case
    data: dict[str, Array]
    folder: Path
    threads: int


Factory = Callable[[Problem], Peer]
"""Prepares a peer for a problem. Raises NotOffered, or any exception of the library."""

FREE, SLEEPING = "FA_BENCH_FREE", "FA_BENCH_SLEEPING"
"""If one of these variables is set, the threads of ONNX Runtime are not pinned (ort_peers.py), or do not spin."""

MASKED = -1e4
"""The number that is added to the scores of padded keys. Every type can hold it, and it outweighs these scores."""


def lower_precision(name: str) -> bool:
    """Whether a peer computes in fewer bits than its inputs have. It is shown, but it is never the best peer."""
    return name.endswith("*")
