"""What `bench` measures: times, memory, and the conditions they were measured under."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnxruntime as ort

from fa_compiler.passes import Report
from fa_compiler.passes.answer.report import first_of, printable
from fa_compiler.passes.answer.shown import Shown

LEAST_RUNS, MOST_RUNS = 5, 1000
MIB = 1 << 20


UNSTEADY = 2.0
"""How often the fast runs of a model may lie in its slow ones before the figures are called
unreliable."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one model: the median, and between which two of ten runs lie, and its peak
    memory in bytes."""

    median: float
    low: float
    high: float
    memory: int

    def __str__(self) -> str:
        """The median in milliseconds, and between which times eight of ten runs lie."""
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"

    @staticmethod
    def of(seconds: Sequence[float], memory: int) -> Timing:
        """From the seconds of each run."""
        low, high = np.quantile(seconds, [0.1, 0.9])
        return Timing(1e3 * statistics.median(seconds), 1e3 * float(low), 1e3 * float(high), memory)

    @property
    def is_steady(self) -> bool:
        """Do most runs take about the same time?"""
        return self.high <= UNSTEADY * self.low

    def to_json(self) -> dict[str, float]:
        """The figures by name."""
        return {key: round(value, 4) for key, value in vars(self).items()}


Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""The shape of each input, by name."""


@dataclass(frozen=True)
class Decoded:
    """What a decoder did beside the time of its steps.

    `prompt` holds the milliseconds of the prompt in the original and in the fused model; None where
    it was not timed. `parts` is the number of parts in which it was given, 0 without a prompt.
    `tokens` were chosen by both, and `same` of them are the same. `largest` is the largest
    difference of an output, relative to its largest value, and `tolerance` what is allowed.
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
            None
            if self.prompt is None
            else dict(zip(names, (round(each, 4) for each in self.prompt), strict=True))
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

    `fault` is the reason why they did not run. `decoded` is there for a decoder: the timings are
    then those of a step of one token, and `length` is the number of keys that were cached before.
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
        return (
            None
            if self.original is None or self.fused is None
            else self.original.median / self.fused.median
        )

    @property
    def is_steady(self) -> bool:
        """Whether the runs of each model agree so far that the figures of this length mean
        something."""
        return all(side.is_steady for side in self.sides)

    @property
    def sides(self) -> tuple[Timing, Timing]:
        """The original and the fused model, of a measure at which both ran."""
        assert self.original is not None and self.fused is not None
        return self.original, self.fused

    @property
    def keys(self) -> str:
        """The keys behind which a decoder steps, as words."""
        return f"{self.length} key{'' if self.length == 1 else 's'}"

    @property
    def agreement(self) -> tuple[str, ...]:
        """Sentences on whether a decoder and its fused form made the same; none for other
        models."""
        decoded = self.decoded
        if decoded is None:
            return ()
        tokens = (
            f"{decoded.same} of {decoded.tokens} tokens are the same"
            if decoded.tokens
            else "no tokens are chosen"
        )
        differ = f"outputs differ by {decoded.largest:.2g}, {decoded.tolerance:.2g} is allowed"
        lines = [f"behind {self.keys} {tokens}; {differ}"]
        if decoded.parts > 1:
            lines.append(
                f"behind {self.keys} the prompt was given in {decoded.parts} parts, for want of memory"
            )
        return tuple(lines)

    def to_json(self, batch: int) -> dict[str, Any]:
        """The measure by names; a decoder makes a token for each entry of the batch in a step."""
        sides = {"original": self.original, "fused": self.fused}
        told: dict[str, Any] = {
            "length": self.length,
            "inputs": {name: list(shape) for name, shape in self.shapes},
            "runs": self.runs,
            **{
                side: None if timing is None else timing.to_json() for side, timing in sides.items()
            },
            "ratio": self.ratio and round(self.ratio, 4),
            "fault": self.fault,
        }
        if self.decoded is not None:
            speeds = {
                side: round(1e3 * batch / timing.median, 2)
                for side, timing in sides.items()
                if timing
            }
            told["decoded"] = {"tokens_per_second": speeds, **self.decoded.to_json()}
        return told


@dataclass(frozen=True, repr=False)
class Benchmark(Shown):
    """The measures, and the conditions they were made under.

    `report` tells what was fused. `most` is the number of tokens that the model takes at most, if a
    length is larger. `caches` are those of a decoder, by the names of their inputs. `fixed` has
    "length" or "batch" where the model itself fixes these sizes, so that what was asked for has no
    effect. `signals` are inputs that are sounds or images. `has_steps` says that the model can be
    measured as a decoder is used: its caches do not have a fixed length.
    """

    report: Report
    measures: tuple[Measure, ...]
    batch: int
    threads: int
    runtime: str = ort.__version__
    most: int | None = None
    decode: bool = False
    caches: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    signals: tuple[str, ...] = ()
    has_steps: bool = False

    @property
    def measured(self) -> tuple[Measure, ...]:
        """The measures of lengths at which both models ran."""
        return tuple(
            each for each in self.measures if each.original is not None and each.fused is not None
        )

    @property
    def faults(self) -> tuple[str, ...]:
        """One sentence for each reason why lengths were not measured."""
        lengths: dict[str, list[str]] = {}
        for each in self.measures:
            if each.fault is not None:
                lengths.setdefault(each.fault, []).append(str(each.length))
        if "length" in self.fixed:
            return tuple(lengths)
        return tuple(f"{self._counted(each)}: {fault}" for fault, each in lengths.items())

    def _counted(self, lengths: list[str]) -> str:
        """Lengths in a sentence, such as "128 and 512 tokens"."""
        unit = re.sub(r"s\b", "", self.unit) if lengths == ["1"] else self.unit
        return f"{_joined(lengths)} {unit}"

    @property
    def unit(self) -> str:
        """What the lengths count."""
        if self.decode:
            return "cached keys"
        return "samples or pixels" if self.signals else "tokens"

    def at(self, length: int) -> str:
        """A length in words, such as "2,048 tokens"."""
        return (
            "the sizes of the model" if "length" in self.fixed else self._counted([f"{length:,}"])
        )

    @property
    def batch_in_words(self) -> str:
        """The batch of the runs."""
        return "the batch of the model" if "batch" in self.fixed else f"batch {self.batch}"

    def to_json(self) -> dict[str, Any]:
        """The benchmark in schema 1; times are in milliseconds, memory in bytes."""
        return {
            "schema": 1,
            "model": self.report.model,
            "onnxruntime": self.runtime,
            "batch": self.batch,
            "threads": self.threads,
            "fused": self.report.fused_attentions,
            "attentions": self.report.attentions,
            "decode": self.decode,
            "fixed": list(self.fixed),
            "caches": list(self.caches),
            "most_tokens": self.most,
            "measures": [each.to_json(self.batch) for each in self.measures],
        }

    @property
    def conditions(self) -> str:
        """What was measured with, and what the figures are."""
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        median, runs = "times are medians", "runs"
        if self.decode:
            median, runs = "the speed is that of the median step", "steps"
        return (
            f"onnxruntime {self.runtime} with all its optimisations, {self.batch_in_words}, {threads}; both models run "
            f"in turns; {median}; eight of ten {runs} lie between the numbers in brackets; memory is the peak of a "
            "process that runs the model"
        )

    @property
    def _short(self) -> str:
        ratios = (f"{each.ratio:.2f} x at {self.at(each.length)}" for each in self.measured)
        return printable(f"{self.report.model}: {', '.join(ratios) or 'no length was measured'}")

    @property
    def _rows(self) -> list[list[str]]:
        return self._decoder_rows if self.decode else self._run_rows

    @property
    def _run_rows(self) -> list[list[str]]:
        counted = "length" if self.signals else "tokens"
        rows = [[counted, "original, ms", "fused, ms", "faster", "original, MiB", "fused, MiB"]]
        for measure in self.measured:
            sides = measure.sides
            memory = [f"{timing.memory / MIB:,.0f}" for timing in sides]
            length = "fixed" if "length" in self.fixed else str(measure.length)
            rows.append([length, *map(str, sides), f"{measure.ratio:.2f} x", *memory])
        return rows

    @property
    def _decoder_rows(self) -> list[list[str]]:
        """Tokens a second, of all batch entries, and the time of the prompt."""
        prompts = any(measure.decoded and measure.decoded.prompt for measure in self.measured)
        prompt = ["original, prompt ms", "fused, prompt ms"] if prompts else []
        headings = ["cached keys", "original, tokens/s", "fused, tokens/s", "faster"]
        rows = [[*headings, *prompt, "original, MiB", "fused, MiB"]]
        for measure in self.measured:
            assert measure.decoded is not None
            sides = measure.sides
            speeds = [
                f"{1e3 * self.batch / side.median:,.0f} ({side.low:.2f}-{side.high:.2f} ms)"
                for side in sides
            ]
            times = [
                f"{time:,.{0 if time >= 100 else 2}f}" for time in measure.decoded.prompt or ()
            ] or ["", ""]
            memory = [f"{timing.memory / MIB:,.0f}" for timing in sides]
            shown = times if prompts else []
            rows.append([str(measure.length), *speeds, f"{measure.ratio:.2f} x", *shown, *memory])
        return rows

    @property
    def _lines(self) -> list[str]:
        report = self.report
        lines = [
            *self.faults,
            *self.sizes,
            *(line for measure in self.measured for line in measure.agreement),
        ]
        lines.append(
            f"{report.model}: {report.fused_attentions} of {report.attentions} attentions fused"
        )
        if self.caches:
            first, *others = self.caches
            lines.append(f"caches: {first}" + (f" and {len(others)} more" if others else ""))
        lines += self.advice
        unchanged = [cache for cache in report.caches if cache.reason is not None]
        lines += replace(report, caches=unchanged).cache_lines
        return [*map(printable, lines), *self.warnings, self.conditions]

    @property
    def advice(self) -> list[str]:
        """What else a user of a model with caches can measure."""
        if self.has_steps and not self.decode:
            return [
                "to measure steps of one token, as a decoder is used, give --decode, in Python decode=True"
            ]
        if self.decode and self.report.possible_buffers:
            return [
                "each step copies all caches; --in-place-caches, in Python in_place_caches=True, ends that"
            ]
        return []

    @property
    def sizes(self) -> list[str]:
        """The sentence about sizes that the model fixes, or about lengths that are no number of
        tokens; none where it leaves the number of its tokens open."""
        if "length" not in self.fixed and self.signals:
            names = ", ".join(self.signals)
            return [
                f"{names}: a length counts samples or pixels here; the model makes its tokens of them"
            ]
        if "length" not in self.fixed or not self.measured:
            return []
        shapes = [f"{name} {list(shape)}" for name, shape in self.measured[0].shapes]
        return [
            f"the model fixes its length, and was measured at its own sizes: {first_of(shapes)}"
        ]

    @property
    def warnings(self) -> list[str]:
        """The sentence about lengths whose runs differ so much that their figures say little."""
        lengths = [str(each.length) for each in self.measured if not each.is_steady]
        if not lengths:
            return []
        fewer = ", or with --threads 1, in Python threads=1" if self.threads > 1 else ""
        what = "the model" if "length" in self.fixed else self._counted(lengths)
        return [
            f"the machine did other work while it measured {what}: the runs of one model "
            f"differ by more than {UNSTEADY:g} times, so these figures say little; measure again{fewer}"
        ]


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
    """The order of the two models in each turn: one first and then the other, so that a machine
    that grows slower or faster does so for both."""
    while True:
        yield 0, 1
        yield 1, 0


def _joined(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
