"""`bench`: measures a model and its fused form beside each other in ONNX Runtime, on this machine.

Both run with all of ONNX Runtime's optimisations, in turns: first the one and then the other, then the other way round,
so that a machine that grows slower or faster does so for both. Memory is the peak of a process of its own for each
model, which holds the session and runs it twice.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import onnx
import onnxruntime as ort

from fa_compiler.comparison.compare import Runner
from fa_compiler.comparison.feeds import load_inputs, random_inputs, save_arrays
from fa_compiler.comparison.options import BenchKeywords, BenchOptions
from fa_compiler.comparison.verification import as_file
from fa_compiler.errors import InputError, one_line
from fa_compiler.model_files.reading import ModelLike, read_proto
from fa_compiler.passes import Report
from fa_compiler.passes.answer.option import read_options
from fa_compiler.passes.answer.report import Progress, printable
from fa_compiler.passes.answer.shown import Shown
from fa_compiler.pipeline.keywords import takes
from fa_compiler.pipeline.optimize import optimize

LEAST_RUNS, MOST_RUNS = 5, 1000
MIB = 1 << 20


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one model: the median, and between which two of ten runs lie, and its peak memory in bytes."""

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


Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""The shape of each input, by name."""


@dataclass(frozen=True)
class Measure:
    """One length: the shapes of the inputs, and what both models took. `fault` is the reason why they did not run."""

    length: int
    shapes: Shapes = ()
    runs: int = 0
    original: Timing | None = None
    fused: Timing | None = None
    fault: str | None = None

    @property
    def ratio(self) -> float | None:
        """How many times as fast the fused model is."""
        return None if self.original is None or self.fused is None else self.original.median / self.fused.median


@dataclass(frozen=True)
class Benchmark(Shown):
    """The measures, and the conditions they were made under. `report` tells what was fused."""

    report: Report
    measures: tuple[Measure, ...]
    batch: int
    threads: int
    runtime: str = ort.__version__

    def to_json(self) -> dict[str, Any]:
        """The benchmark in schema 1; times are in milliseconds, memory in bytes."""

        def timing(each: Timing | None) -> dict[str, float] | None:
            return None if each is None else {key: round(value, 4) for key, value in vars(each).items()}

        return {
            "schema": 1,
            "model": self.report.model,
            "onnxruntime": self.runtime,
            "batch": self.batch,
            "threads": self.threads,
            "fused": self.report.count("fused"),
            "attentions": self.report.softmaxes,
            "measures": [
                {
                    "length": each.length,
                    "inputs": {name: list(shape) for name, shape in each.shapes},
                    "runs": each.runs,
                    "original": timing(each.original),
                    "fused": timing(each.fused),
                    "ratio": None if each.ratio is None else round(each.ratio, 4),
                    "fault": each.fault,
                }
                for each in self.measures
            ],
        }

    @property
    def conditions(self) -> str:
        """What was measured with, and what the figures are."""
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return (
            f"onnxruntime {self.runtime} with all its optimisations, batch {self.batch}, {threads}; medians of runs in "
            "turns, in brackets where eight of ten runs lie; memory is the peak of a process that runs the model"
        )

    @property
    def _rows(self) -> list[list[str]]:
        rows = [["tokens", "original, ms", "fused, ms", "faster", "original, MiB", "fused, MiB"]]
        for each in self.measures:
            if each.original is not None and each.fused is not None:
                memory = [f"{timing.memory / MIB:,.0f}" for timing in (each.original, each.fused)]
                rows.append([str(each.length), str(each.original), str(each.fused), f"{each.ratio:.2f} x", *memory])
        return rows

    @property
    def _lines(self) -> list[str]:
        faults = [f"{each.length} tokens: the model does not run: {each.fault}" for each in self.measures if each.fault]
        report = self.report
        fused = f"{report.model}: {report.count('fused')} of {report.softmaxes} attentions fused"
        return [*map(printable, (*faults, fused)), *self._nothing_gained, self.conditions]

    @property
    def _nothing_gained(self) -> list[str]:
        """Why both models are the same, if they are."""
        if self.report.count("fused") or self.report.changed_otherwise:
            return []
        already = ", because the model is fused already" if self.report.count("already_fused") else ""
        return [f"nothing was fused{already}: both models are the same, and there is nothing to compare"]


@takes(BenchKeywords, BenchOptions)
def bench(
    model: ModelLike,
    lengths: Iterable[int] = BenchOptions.lengths,
    *,
    assume: Iterable[str] = (),
    progress: Progress | None = None,
    **options: Unpack[BenchKeywords],
) -> Benchmark:
    """Measure a model and its fused form beside each other.

    Args:
        model: a path, bytes, an `onnx.ModelProto`, an `onnx_ir.Model` or an `ONNXProgram` of torch.onnx.export.
        lengths: the sizes of dynamic dimensions but the batch. Lengths that give inputs of the same shapes are measured
            once.
        assume: assumptions that you vouch for.
        progress: is told how far it is.
        **options: the fields of `BenchOptions`.

    Raises:
        InputError: the model or an option is at fault, or ONNX Runtime cannot load the model.
    """
    wanted = list(dict.fromkeys(lengths))
    chosen = BenchOptions(wanted, **read_options(options, BenchOptions))
    batch, threads = chosen.batch, chosen.threads
    if not wanted or min(wanted) < 1 or batch < 1 or (threads is not None and threads < 1):
        raise InputError("lengths, batch and threads are numbers from 1 upwards")
    with tempfile.TemporaryDirectory(prefix="fa_compiler-") as folder:
        place = Path(folder)
        original, fused = as_file(model, place / "original.onnx"), place / "fused.onnx"
        result = optimize(model, fused, assume=assume)
        pair = _Pair(place, (original, fused), threads or 0)
        measures: list[Measure] = []
        for count, length in enumerate(wanted):
            if progress is not None:
                progress(f"{length} tokens", count, len(wanted))
            measure = pair.measure(length, batch, chosen.seconds, {each.shapes for each in measures})
            measures.extend([] if measure is None else [measure])
        return Benchmark(result.report, tuple(measures), batch, threads or os.cpu_count() or 1)


class _Pair:
    """The sessions of the original and of the fused model."""

    def __init__(self, folder: Path, paths: tuple[Path, Path], threads: int) -> None:
        self._folder, self._paths, self._threads = folder, paths, threads
        self._proto: onnx.ModelProto = read_proto(paths[0])
        try:
            self._runners = [Runner(path, read_proto(path), optimise=True, threads=threads) for path in paths]
        except Exception as error:  # ONNX Runtime's exceptions share no base class of their own
            raise InputError(f"ONNX Runtime cannot load {paths[0]}: {one_line(error)}") from None

    def measure(self, length: int, batch: int, seconds: float, known: Collection[Shapes]) -> Measure | None:
        """Run both at one length; None if its inputs have shapes that were measured already."""
        try:
            feeds = random_inputs(self._proto, str(self._paths[0]), batch=batch, length=length)
            shapes = tuple((name, array.shape) for name, array in feeds.items())
            if shapes in known:
                return None
            calls = [self._call(runner, feeds) for runner in self._runners]
            for call in calls:  # the first run allocates
                call()
        except Exception as error:  # of ONNX Runtime, or an InputError
            return Measure(length, fault=one_line(error))
        times: list[list[float]] = [[], []]
        end = time.perf_counter() + seconds
        while len(times[0]) < LEAST_RUNS or (time.perf_counter() < end and len(times[0]) < MOST_RUNS):
            order = (0, 1) if len(times[0]) % 2 == 0 else (1, 0)
            for side in order:
                start = time.perf_counter()
                calls[side]()
                times[side].append(time.perf_counter() - start)
        save_arrays(self._folder / "inputs.npz", feeds)
        memory = [self._memory(path) for path in self._paths]
        original, fused = (Timing.of(each, peak) for each, peak in zip(times, memory, strict=True))
        return Measure(length, shapes, len(times[0]), original, fused)

    def _call(self, runner: Runner, feeds: dict[str, np.ndarray]) -> Callable[[], object]:
        return lambda: runner.run(feeds, {})

    def _memory(self, path: Path) -> int:
        """The peak memory of a process that runs a model twice."""
        words = [str(path), str(self._folder / "inputs.npz"), str(self._threads)]
        command = [sys.executable, "-m", "fa_compiler.comparison.benchmark", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise InputError(
                f"a process that runs {path} ended with code {done.returncode}: {done.stderr.strip()[-300:]}"
            )
        return int(done.stdout)


def _run_twice(path: Path, inputs: Path, threads: int) -> None:
    """Run a model and print the peak memory of this process in bytes."""
    proto = read_proto(path)
    runner = Runner(path, proto, optimise=True, threads=threads)
    feeds = load_inputs(inputs, proto)
    for _ in range(2):
        runner.run(feeds, {})
    print(_peak())


def _peak() -> int:
    """The peak memory of this process in bytes.

    What Linux's getrusage calls the largest resident set includes the one of the process that started this one.
    """
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    _run_twice(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
