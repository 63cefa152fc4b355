"""What `bench` measures: times, memory, and the conditions they were measured under."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort

from fa_compiler.passes import Report

LEAST_RUNS, MOST_RUNS = 5, 1000


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one model: the median, and between which two of ten runs lie, and its peak memory in bytes."""

    median: float
    low: float
    high: float
    memory: int

    @staticmethod
    def of(seconds: Sequence[float], memory: int) -> Timing:
        """From the seconds of each run."""
        low, high = np.quantile(seconds, [0.1, 0.9])
        return Timing(1e3 * statistics.median(seconds), 1e3 * float(low), 1e3 * float(high), memory)

    def to_json(self) -> dict[str, float]:
        """The figures by name."""
        return {key: round(value, 4) for key, value in vars(self).items()}


Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""The shape of each input, by name."""


@dataclass(frozen=True)
class Decoded:
    """What a decoder did beside the time of its steps.

    `prompt` holds the milliseconds of the prompt in the original and in the fused model; None where it was not timed.
    `parts` is the number of parts in which it was given, 0 without a prompt.
    `tokens` were chosen by both, and `same` of them are the same. `largest` is the largest difference of an output,
    relative to its largest value, and `tolerance` what is allowed.
    """

    prompt: tuple[float, float] | None
    tokens: int
    same: int
    largest: float
    tolerance: float
    parts: int = 0

    @property
    def agrees(self) -> bool:
        """Whether the outputs agree within the tolerance."""
        return self.largest <= self.tolerance

    def to_json(self) -> dict[str, Any]:
        """The figures by name; times are in milliseconds."""
        names = ("original", "fused")
        prompt = (
            None if self.prompt is None else dict(zip(names, (round(each, 4) for each in self.prompt), strict=True))
        )
        return {
            "prompt": prompt,
            "prompt_parts": self.parts,
            "tokens": self.tokens,
            "same_tokens": self.same,
            "largest_difference": self.largest,
            "tolerance": self.tolerance,
        }


@dataclass(frozen=True)
class Measure:
    """One length: the shapes of the inputs, and what both models took.

    `fault` is the reason why they did not run. `decoded` is there for a decoder: the timings are then those of a step
    of one token, and `length` is the number of keys that were cached before.
    """

    length: int
    shapes: Shapes = ()
    runs: int = 0
    original: Timing | None = None
    fused: Timing | None = None
    fault: str | None = None
    decoded: Decoded | None = None

    @property
    def ratio(self) -> float | None:
        """How many times as fast the fused model is."""
        return None if self.original is None or self.fused is None else self.original.median / self.fused.median

    def to_json(self, batch: int) -> dict[str, Any]:
        """The measure by names; a decoder makes a token for each entry of the batch in a step."""
        sides = {"original": self.original, "fused": self.fused}
        told: dict[str, Any] = {
            "length": self.length,
            "inputs": {name: list(shape) for name, shape in self.shapes},
            "runs": self.runs,
            **{side: None if timing is None else timing.to_json() for side, timing in sides.items()},
            "ratio": self.ratio and round(self.ratio, 4),
            "fault": self.fault,
        }
        if self.decoded is not None:
            speeds = {side: round(1e3 * batch / timing.median, 2) for side, timing in sides.items() if timing}
            told["decoded"] = {"tokens_per_second": speeds, **self.decoded.to_json()}
        return told


@dataclass(frozen=True)
class Benchmark:
    """The measures, and the conditions they were made under.

    `report` tells what was fused. `most` is the number of tokens that the model takes at most, if a length is larger.
    `caches` are those of a decoder, by the names of their inputs.
    """

    report: Report
    measures: tuple[Measure, ...]
    batch: int
    threads: int
    runtime: str = ort.__version__
    most: int | None = None
    decode: bool = False
    caches: tuple[str, ...] = ()

    @property
    def measured(self) -> tuple[Measure, ...]:
        """The measures of lengths at which both models ran."""
        return tuple(each for each in self.measures if each.original is not None and each.fused is not None)

    @property
    def faults(self) -> tuple[str, ...]:
        """One sentence for each reason why lengths were not measured."""
        lengths: dict[str, list[str]] = {}
        for each in self.measures:
            if each.fault is not None:
                lengths.setdefault(each.fault, []).append(str(each.length))
        return tuple(f"{_joined(each)} tokens: {fault}" for fault, each in lengths.items())

    def to_json(self) -> dict[str, Any]:
        """The benchmark in schema 1; times are in milliseconds, memory in bytes."""
        return {
            "schema": 1,
            "model": self.report.model,
            "onnxruntime": self.runtime,
            "batch": self.batch,
            "threads": self.threads,
            "fused": self.report.count("fused"),
            "attentions": self.report.softmaxes,
            "decode": self.decode,
            "caches": list(self.caches),
            "most_tokens": self.most,
            "measures": [each.to_json(self.batch) for each in self.measures],
        }


class BenchInterrupted(KeyboardInterrupt):
    """Ctrl-C in a benchmark. `kept` has the lengths that were finished."""

    def __init__(self, kept: Benchmark) -> None:
        super().__init__()
        self.kept = kept


def timed(call: Callable[[], object]) -> float:
    """The seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def turns() -> Iterator[tuple[int, int]]:
    """The order of the two models in each turn: one first and then the other, so that a machine that grows slower or
    faster does so for both."""
    while True:
        yield 0, 1
        yield 1, 0


def _joined(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
