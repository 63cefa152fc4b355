"""The interface of a peer: one way of a library to compute attention. Uses only the standard library and NumPy."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

FREE = "FA_BENCH_FREE"
"""If this variable is set, the threads of ONNX Runtime are not pinned (ort_peers.py)."""
SPIN = "FA_BENCH_SPIN"
"""The microseconds for which its threads spin when they wait for work, if this variable is set."""

MASKED = -1e4
"""The number that is added to the scores of padded keys. Every type can hold it, and it outweighs these scores."""


def set_spinning(options: Any) -> None:
    """Set how the threads of an ONNX Runtime session wait, as the variable `SPIN` says."""
    microseconds = os.environ.get(SPIN)
    if microseconds == "0":
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    elif microseconds:
        options.add_session_config_entry("session.intra_op.spin_duration_us", microseconds)


def lower_precision(name: str) -> bool:
    """Whether a peer computes in fewer bits than its inputs have. It is shown, but it is never the best peer."""
    return name.endswith("*")
