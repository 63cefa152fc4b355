"""The options of `bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from fa_compiler.passes.answer.option import told


def non_negative(text: str) -> float:
    """A number from 0 upwards. Raises ValueError."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise ValueError(f"{text} is not a tolerance; give a number from 0 upwards")
    return value


def _lengths(given: str | Sequence[int]) -> Sequence[int]:
    if not isinstance(given, str):
        return given
    try:
        return [int(part) for part in given.split(",")]
    except ValueError:
        raise ValueError(f"--lengths {given!r} is not of the form 128,512,2048") from None


@dataclass(frozen=True)
class BenchOptions:
    """What `bench` measures. The texts at the fields tell users what an option does."""

    lengths: Sequence[int] = field(
        default=(128, 512, 2048),
        metadata=told(
            "sizes of the dynamic dimensions but the batch (default 128,512,2048)",
            details="Lengths that give inputs of the same shapes are measured once.",
            metavar="128,512,2048",
            parse=_lengths,
        ),
    )
    batch: int = field(default=1, metadata=told("size of a dynamic batch (default 1)", metavar="N"))
    threads: int | None = field(
        default=None, metadata=told("threads of ONNX Runtime (default: its own)", metavar="N", kind=int)
    )
    seconds: float = field(
        default=4.0, metadata=told("how long both run at one length (default 4)", metavar="S", kind=non_negative)
    )


class BenchKeywords(TypedDict, total=False):
    """The options of `BenchOptions` besides the lengths as keywords of a function."""

    batch: int
    threads: int | None
    seconds: float
