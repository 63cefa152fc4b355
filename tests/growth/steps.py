"""How much work a call is, counted and not timed: the calls of functions that Python makes.

A count is the same on a busy machine and a quiet one. What Python does inside of one call, such as the search of a
list, is not counted.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import onnx

from fa_compiler import FaCompilerError
from tests.growth.entries import ENTRIES
from tests.growth.graphs import model

MOST = 40_000_000
"""The calls after which a measurement ends, about 10 seconds."""
SLACK = 1.5
"""How much more than linear growth is let pass: the logarithm of sorting, and what has not settled at the smaller
size."""
FEW = 100_000
"""Fewer calls than this are no growth to judge."""


class TooManySteps(BaseException):
    """Raised inside of a call that takes more than `MOST`. No handler of exceptions in the program catches it."""


def steps(action: Callable[[], object]) -> int:
    """The calls that an action makes. Raises TooManySteps."""
    count = 0

    def counted(_: FrameType, event: str, __: Any) -> None:
        nonlocal count
        if event in ("call", "c_call"):
            count += 1
            if count > MOST:
                sys.setprofile(None)
                raise TooManySteps

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        action()
    except FaCompilerError:
        pass  # a refusal is an answer
    finally:
        sys.setprofile(before)
    return count


@dataclass(frozen=True)
class Growth:
    """The steps of one entry for one kind of model, at several sizes; math.inf where they were too many."""

    entry: str
    name: str
    sizes: tuple[int, ...]
    counts: tuple[float, ...]

    @property
    def fault(self) -> str | None:
        """What is wrong; None where the work grows about as the size."""
        if math.inf in self.counts:
            return "takes more steps than can be counted"
        grown, times = self.counts[-1] / max(self.counts[-2], FEW), self.sizes[-1] / self.sizes[-2]
        # What is drawn may be more work at the smallest size than at the next one.
        overall, most = self.counts[-1] / self.counts[0], self.sizes[-1] / self.sizes[0]
        if grown <= times * SLACK or overall <= most * SLACK:
            return None
        return f"{times:g} times the size is {grown:.1f} times the work"


def measured(
    entry: str, name: str, sizes: Sequence[int], make: Callable[[str, int], onnx.ModelProto] = model
) -> Growth:
    """The steps of an entry for the models of a name. Measuring ends after the first size that takes too many."""
    counts: list[float] = []
    for size in sizes:
        made = make(name, size)
        with TemporaryDirectory() as folder:
            try:
                counts.append(steps(lambda: ENTRIES[entry](made, Path(folder))))  # noqa: B023
            except TooManySteps:
                counts.append(math.inf)
                break
    return Growth(entry, name, tuple(sizes), tuple(counts))
