"""Measures runs of a model and of its fused form, on the same random inputs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from fa_compiler.comparison.compare import Runner
from fa_compiler.comparison.decoder import caches_of, takes_steps
from fa_compiler.comparison.feeds import load_inputs, random_inputs, save_arrays
from fa_compiler.comparison.signals import signal_inputs
from fa_compiler.errors import InputError, one_line
from fa_compiler.measuring.figures import LEAST_RUNS, MOST_RUNS, Measure, Timing, timed, turns
from fa_compiler.measuring.limits import in_words
from fa_compiler.measuring.memory import own_peak, peak_of
from fa_compiler.model_files.reading import read_proto
from fa_compiler.protos.subgraphs import graph_inputs


class Runs:
    """The sessions of the original and of the fused model. Raises InputError if ONNX Runtime cannot
    load them.

    `spare` is the number of tokens that a measurement needs beside its length. `caches` are those
    of the original, by the names of their inputs, and `has_steps` says whether a step can follow
    another one. `signals` are its inputs that are sounds or images.
    """

    spare = 0

    def __init__(self, folder: Path, paths: tuple[Path, Path], threads: int, batch: int) -> None:
        self._folder, self._paths, self._threads, self._batch = folder, paths, threads, batch
        self._proto = read_proto(paths[0])
        caches = caches_of(self._proto)
        self.caches = tuple(cache.past for cache in caches)
        self.has_steps = takes_steps(self._proto, caches)
        self.signals = tuple(signal_inputs(graph_inputs(self._proto)))
        self._runners: list[Runner] = []
        for path, what in zip(paths, (str(paths[0]), f"the fused form of {paths[0]}"), strict=True):
            try:
                self._runners.append(Runner(path, read_proto(path), optimise=True, threads=threads))
            except Exception as error:  # ONNX Runtime's exceptions share no base class of their own
                raise InputError(f"ONNX Runtime cannot load {what}: {one_line(error)}") from None

    def fixed(self) -> tuple[str, ...]:
        """Which of "length" and "batch" the model fixes: inputs for other ones have the same
        shapes."""
        try:
            shapes, longer, more = (
                self._shapes(length, batch) for length, batch in ((128, 1), (512, 1), (128, 2))
            )
        except InputError:  # it is told of the lengths that are wanted
            return ()
        return tuple(
            size for size, other in (("length", longer), ("batch", more)) if other == shapes
        )

    def _shapes(self, length: int, batch: int) -> list[tuple[int, ...]]:
        feeds = random_inputs(self._proto, str(self._paths[0]), batch=batch, length=length)
        return [array.shape for array in feeds.values()]

    def fault(self, length: int) -> Exception | None:
        """Why the original does not run at a length; None if it does."""
        try:
            self._runners[0].run(self._inputs(length), {})
        except Exception as error:  # of ONNX Runtime, or an InputError
            return error
        return None

    def measure(self, length: int, seconds: float, known: Sequence[Measure]) -> Measure | None:
        """Run both at one length; None if its inputs have shapes that are among the known
        measures."""
        try:
            feeds = self._inputs(length)
            shapes = tuple((name, array.shape) for name, array in feeds.items())
            if any(each.shapes == shapes for each in known):
                return None
            calls = [self._call(runner, feeds) for runner in self._runners]
            for call in calls:  # the first run allocates
                call()
        except Exception as error:
            return Measure(length, fault=in_words(error))
        times: list[list[float]] = [[], []]
        end = time.perf_counter() + seconds
        for order in turns():
            if len(times[0]) >= LEAST_RUNS and (
                time.perf_counter() >= end or len(times[0]) >= MOST_RUNS
            ):
                break
            for side in order:
                times[side].append(timed(calls[side]))
        save_arrays(self._folder / "inputs.npz", feeds)
        memory = [self._memory(path) for path in self._paths]
        original, fused = (Timing.of(each, peak) for each, peak in zip(times, memory, strict=True))
        return Measure(length, shapes, len(times[0]), original, fused)

    def _inputs(self, length: int) -> dict[str, np.ndarray]:
        return random_inputs(self._proto, str(self._paths[0]), batch=self._batch, length=length)

    def _call(self, runner: Runner, feeds: dict[str, np.ndarray]) -> Callable[[], object]:
        return partial(runner.run, feeds, {})

    def _memory(self, path: Path) -> int:
        """The peak memory of a process that runs a model twice."""
        return peak_of("runs", str(path), str(self._folder / "inputs.npz"), str(self._threads))


def _run_twice(path: Path, inputs: Path, threads: int) -> None:
    """Run a model and print the peak memory of this process in bytes."""
    proto = read_proto(path)
    runner = Runner(path, proto, optimise=True, threads=threads)
    feeds = load_inputs(inputs, proto)
    for _ in range(2):
        runner.run(feeds, {})
    print(own_peak())


if __name__ == "__main__":
    _run_twice(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
