"""The largest length that a model takes, where it refuses a larger one; and what ONNX Runtime's
errors say in words."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from fa_compiler.errors import InputError, one_line

FIRST = (16, 1, 32, 64, 128, 224)
"""The lengths to begin with where none is known to run."""
PERIODS = (14, 16, 24, 32, 60)
"""A model that only takes multiples of one of these has no largest length that a search in halves
could find."""


def largest_length(runs: Callable[[int], bool], known: Iterable[int], refused: int) -> int | None:
    """The largest length below `refused` at which a model runs.

    None if it runs with none, or if it refuses some length and takes larger ones, so that the
    length is not its limit.

    Args:
        runs: whether the model runs at a length.
        known: lengths at which it runs.
        refused: a length at which it does not.
    """
    low = max((length for length in known if length < refused), default=0)
    if not low:
        low = next((length for length in FIRST if length < refused and runs(length)), 0)
    if not low:
        return None
    high = refused if low + 1 == refused or runs(low + 1) else low + 1
    low = _bisected(runs, low, high)
    above = {(low // period + 1) * period for period in PERIODS}
    return None if any(length < refused and runs(length) for length in above) else low


def _bisected(runs: Callable[[int], bool], low: int, high: int) -> int:
    """The largest length that runs, where `low` does and `high` does not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if runs(middle) else (low, middle)
    return low


def in_words(error: Exception) -> str:
    """Why a model does not run, without the places in ONNX Runtime's source."""
    if isinstance(error, InputError) and "ONNX Runtime" not in str(error):
        return one_line(error)
    text = one_line(error)
    if is_out_of_memory(error):
        return "there is not enough memory"
    node = re.search(r"running (\S+) node\. Name:'(.*?)'", text)
    if node is not None:
        return f"its node '{node[2]}' ({node[1]}) refuses these sizes"
    return "ONNX Runtime refuses these inputs"


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory was the reason."""
    text = str(error)
    return (
        isinstance(error, MemoryError)
        or "bad_alloc" in text
        or "allocate memory" in text
        or "BFCArena" in text
    )


def foreseen(known: Iterable[tuple[int, int]], length: int) -> int:
    """The bytes that a model will need at a length: those that it needs always, and those that grow
    with its square.

    `known` are lengths and bytes. With fewer than two of them nothing can be foreseen: 0.
    """
    points = sorted(known)
    if len(points) < 2:
        return 0
    (first, small), (second, large) = points[-2:]
    grows = max(0.0, (large - small) / (second**2 - first**2))
    return int(large + grows * (length**2 - second**2))


def free_memory() -> int | None:
    """The bytes that a process could have on this machine; None where the system does not tell."""
    if sys.platform == "win32":
        from fa_compiler.measuring import windows

        return windows.free_memory()
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None
