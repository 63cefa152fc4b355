"""`bench`: measures a model and its fused form beside each other in ONNX Runtime, on this machine.

Both run with all of ONNX Runtime's optimisations, in turns: first the one and then the other, then
the other way round, so that a machine that grows slower or faster does so for both. Memory is the
peak of a process of its own for each model, which holds the session and runs it twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Unpack

from fa_compiler.comparison.verification import as_file
from fa_compiler.errors import InputError
from fa_compiler.measuring.figures import BenchInterrupted, Benchmark, Measure
from fa_compiler.measuring.limits import is_out_of_memory, largest_length
from fa_compiler.measuring.options import (
    CACHED,
    LENGTHS,
    BenchKeywords,
    BenchOptions,
    check_threads,
)
from fa_compiler.measuring.runs import Runs
from fa_compiler.measuring.steps import Steps
from fa_compiler.model_files.reading import ModelLike
from fa_compiler.model_files.temporary import TemporaryFolder
from fa_compiler.passes import Options, Report
from fa_compiler.passes.answer.option import read_options
from fa_compiler.passes.answer.options import DECODE
from fa_compiler.passes.answer.report import Code, Progress
from fa_compiler.pipeline.keywords import takes
from fa_compiler.pipeline.optimize import optimize
from fa_compiler.pipeline.options import python_options


@takes(BenchKeywords, BenchOptions)
def bench(
    model: ModelLike,
    lengths: Iterable[int] | None = None,
    *,
    assume: Iterable[str] = (),
    in_place_caches: bool = Options.in_place_caches,
    progress: Progress | None = None,
    found: Callable[[Benchmark], object] | None = None,
    **options: Unpack[BenchKeywords],
) -> Benchmark:
    """Measure a model and its fused form beside each other.

    Args:
        model: a path, bytes, an `onnx.ModelProto`, an `onnx_ir.Model` or an `ONNXProgram` of
            torch.onnx.export.
        lengths: the sizes of dynamic dimensions but the batch (128, 512, 2048), or of a decoder the
            numbers of cached keys (512, 2048, 8192). Lengths that give inputs of the same shapes
            are measured once. In the place of lengths that the model refuses, the largest one that
            it takes is measured.
        assume: assumptions that you vouch for.
        in_place_caches: whether the fused model has its caches in place. It goes with `decode`.
        progress: is told how far it is.
        found: is called after each length, with the benchmark so far.
        **options: the fields of `BenchOptions`.

    Raises:
        InputError: the model or an option is at fault, nothing of the model is fused, so that there
            is nothing to compare, or ONNX Runtime cannot load the model.
        KeyboardInterrupt: as a `BenchInterrupted`, whose `kept` has the lengths that were finished.
    """
    words = python_options(assume=assume).assume
    chosen = _checked(BenchOptions(_read_lengths(lengths), **read_options(options, BenchOptions)))
    decode, threads = chosen.decode or DECODE in words, chosen.threads or 0
    if in_place_caches and not decode:
        raise InputError(
            "caches in place are measured as a decoder uses them: give --decode, in Python decode=True"
        )
    wanted = list(dict.fromkeys(chosen.lengths or (CACHED if decode else LENGTHS)))
    with TemporaryFolder() as folder:
        place = folder.path
        paths = as_file(model, folder, "original.onnx"), place / "fused.onnx"
        report = optimize(model, paths[1], assume=words, in_place_caches=in_place_caches).report
        _check_fused(report)
        sessions = (
            partial(Steps, one_token=DECODE in words) if decode else partial(Runs, folder=place)
        )
        runs = sessions(paths=paths, threads=threads, batch=chosen.batch)
        fixed, signals = ((), ()) if isinstance(runs, Steps) else (runs.fixed(), runs.signals)
        begun = Benchmark(
            report,
            (),
            chosen.batch,
            threads or os.cpu_count() or 1,
            caches=runs.caches,
            decode=decode,
            fixed=fixed,
            signals=signals,
            has_steps=isinstance(runs, Steps) or runs.has_steps,
        )
        if "length" in begun.fixed:
            del wanted[1:]
        made = _Made(runs, begun, chosen.seconds, progress, found)
        try:
            made.measure(wanted)
        except KeyboardInterrupt:
            raise BenchInterrupted(made.benchmark) from None
        return made.benchmark


def _read_lengths(lengths: Iterable[int] | None) -> tuple[int, ...] | None:
    """The lengths of a caller. Raises InputError for what are none."""
    if lengths is None:
        return None
    if isinstance(lengths, str) or not isinstance(lengths, Iterable):
        raise InputError(f"lengths are a list of numbers, such as [128, 512], not {lengths!r}")
    return tuple(lengths)


def _checked(options: BenchOptions) -> BenchOptions:
    """The options. Raises InputError for numbers that cannot be."""
    lengths = options.lengths if options.lengths is not None else (1,)
    if not lengths:
        raise InputError("lengths are a list of numbers, such as [128, 512], and not an empty one")
    numbers = [("length", length) for length in lengths]
    numbers += [
        ("batch", options.batch),
        ("number of threads", 1 if options.threads is None else options.threads),
    ]
    for what, number in numbers:
        if not isinstance(number, Integral) or number < 1:
            raise InputError(f"a {what} is a whole number from 1 upwards, not {number}")
    check_threads(options.threads)
    if not options.seconds > 0:
        raise InputError("seconds is a number above 0")
    return options


def _check_fused(report: Report) -> None:
    """Raise InputError if the original and the result are the same."""
    if report.count("fused"):
        return
    hints = [block.hint for block in report.blocks if block.code == Code.READY_MADE and block.hint]
    if hints:
        why = f"has an attention operator that is not fused; try: {hints[0]}"
    elif any(
        block.status == "already_fused" or block.code == Code.READY_MADE for block in report.blocks
    ):
        why = "is already fused; give the model from which it was made"
    elif report.attentions:
        why = "has no attention that is fused; fa-compiler inspect --explain says why"
    else:
        why = "has no attention"
    raise InputError(f"there is nothing to compare: {report.model or 'the model'} {why}")


class _Made:
    """The benchmark so far, with the most tokens that the model takes once a length was too large
    for it."""

    def __init__(
        self,
        runs: Runs | Steps,
        begun: Benchmark,
        seconds: float,
        progress: Progress | None,
        found: Callable[[Benchmark], object] | None,
    ) -> None:
        self._runs, self._seconds, self._progress, self._found = runs, seconds, progress, found
        self.benchmark = begun

    def _add(self, measure: Measure | None) -> None:
        if measure is None:
            return
        self.benchmark = replace(self.benchmark, measures=(*self.benchmark.measures, measure))
        if self._found is not None:
            self._found(self.benchmark)

    def measure(self, wanted: Sequence[int]) -> None:
        """Measure these lengths, and the largest one that runs in the place of those that are too
        large."""
        for count, length in enumerate(wanted):
            self._tell(self.benchmark.at(length), count, len(wanted))
            most = self.benchmark.most
            if most is not None and length + self._runs.spare > most:
                self._add(Measure(length, fault=self._limit))
                continue
            measure = self._measured(length)
            if measure is not None and measure.fault is not None:
                self._tell(
                    f"{length} {self.benchmark.unit} are too many: looking for the most",
                    count,
                    len(wanted),
                )
                measure = self._judged(measure, wanted)
            self._add(measure)

    def _measured(self, length: int) -> Measure | None:
        return self._runs.measure(length, self._seconds, self.benchmark.measures)

    def _judged(self, measure: Measure, wanted: Sequence[int]) -> Measure:
        """A measure with a fault that says what is at fault: the length, or a model. If it is the
        length, the largest one that runs is measured, if it is not among the wanted ones."""
        error = self._runs.fault(measure.length)
        if error is None:
            return replace(measure, fault=f"only the fused model does not run: {measure.fault}")
        if is_out_of_memory(error) or "length" in self.benchmark.fixed:
            return replace(measure, fault=f"the model does not run: {measure.fault}")
        ran = [each.length for each in self.benchmark.measures if each.fault is None]
        largest = largest_length(
            lambda length: self._runs.fault(length) is None, ran, measure.length
        )
        if largest is None:
            return replace(measure, fault=f"the model does not run: {measure.fault}")
        self.benchmark = replace(self.benchmark, most=largest + self._runs.spare)
        if largest not in wanted:
            self._add(self._measured(largest))
        return replace(measure, fault=self._limit)

    @property
    def _limit(self) -> str:
        takes = replace(self.benchmark, decode=False).at(self.benchmark.most or 0)
        limit = f"the model takes at most {takes}"
        return (
            f"{limit}, and {self._runs.spare} steps follow the cached keys"
            if self._runs.spare
            else limit
        )

    def _tell(self, text: str, count: int, of: int) -> None:
        if self._progress is not None:
            self._progress(text, count, of)
