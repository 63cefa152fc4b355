"""The options of `bench`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from fa_compiler.errors import InputError
from fa_compiler.passes.answer.option import told

LENGTHS = (128, 512, 2048)
"""The sizes that are measured by default."""
CACHED = (512, 2048, 8192)
"""The numbers of cached keys of a decoder that are measured by default."""


def non_negative(text: str) -> float:
    """A number from 0 upwards. Raises ValueError."""
    value = _number(text)
    if not 0.0 <= value < float("inf"):
        raise ValueError(f"{text} is not a number from 0 upwards")
    return value


def positive(text: str) -> float:
    """A number above 0. Raises ValueError."""
    value = _number(text)
    if not 0.0 < value < float("inf"):
        raise ValueError(f"{text} is not a number above 0")
    return value


def check_threads(threads: int | None) -> None:
    """Raise InputError for more threads than this machine has cores: they would wait for each
    other."""
    cores = os.cpu_count()
    if threads is not None and cores is not None and threads > cores:
        raise InputError(
            f"{threads} threads are more than this machine's {cores} core{'s' if cores > 1 else ''}, and would only "
            "wait for each other"
        )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0


def _lengths(given: str | Sequence[int] | None) -> Sequence[int] | None:
    if not isinstance(given, str):
        return given
    try:
        return [int(part) for part in given.split(",")]
    except ValueError:
        raise ValueError(f"--lengths {given!r} is not of the form 128,512,2048") from None


@dataclass(frozen=True)
class BenchOptions:
    """What `bench` measures. The texts at the fields tell users what an option does."""

    lengths: Sequence[int] | None = field(
        default=None,
        metadata=told(
            "the sizes of the dynamic dimensions, apart from the batch (default 128,512,2048); with --decode the "
            "numbers of cached keys (default 512,2048,8192)",
            details="Lengths that give inputs of the same shapes are measured once.",
            metavar="128,512,2048",
            parse=_lengths,
        ),
    )
    batch: int = field(default=1, metadata=told("size of a dynamic batch (default 1)", metavar="N"))
    threads: int | None = field(
        default=None,
        metadata=told(
            "threads of ONNX Runtime, at most one for each core (default: its own number)",
            metavar="N",
            kind=int,
        ),
    )
    seconds: float = field(
        default=4.0,
        metadata=told(
            "how long both models run at each length (default 4)", metavar="S", kind=positive
        ),
    )
    decode: bool = field(
        default=False,
        metadata=told(
            "measure a decoder as it is used: a prompt of as many tokens as the length says, and then steps of one "
            "token",
            details='Also where `assume` has "decode", which leaves the prompt to the original.',
        ),
    )


class BenchKeywords(TypedDict, total=False):
    """The options of `BenchOptions` besides the lengths as keywords of a function."""

    batch: int
    threads: int | None
    seconds: float
    decode: bool
