"""The command bench."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable

from fa_compiler.command_line.exit_codes import DIFFERENT, INTERRUPTED, OK
from fa_compiler.command_line.models import progress_bar, wrote
from fa_compiler.command_line.options import given
from fa_compiler.command_line.render import print_table
from fa_compiler.errors import InputError
from fa_compiler.measuring.benchmark import bench
from fa_compiler.measuring.figures import BenchInterrupted, Benchmark, Measure, Timing
from fa_compiler.measuring.options import BenchOptions
from fa_compiler.model_files.reading import load
from fa_compiler.model_files.writing import check_place, staging, write
from fa_compiler.passes import Options
from fa_compiler.passes.answer.report import printable

MIB = 1 << 20


def run(args: argparse.Namespace) -> int:
    """Measure a model and its fused form, and print the table. Ctrl-C ends with the lengths that are finished."""
    options = given(args, BenchOptions, Options)
    if args.html is not None:
        check_place(args.html, load(args.model))
    interrupted = False
    with staging() as stage:
        page_file = None if args.html is None else stage.reserve(args.html)
        try:
            with progress_bar(args.quiet or args.json) as progress:
                measured = bench(args.model, progress=progress, **options)
        except BenchInterrupted as stop:
            measured, interrupted = stop.kept, True
            if not measured.measured:
                raise
        if not measured.measured:
            raise InputError(f"no length could be measured: {'; '.join(measured.faults)}")
        if page_file is not None:
            from fa_compiler.page.gain_page import gain_page

            write(page_file, [gain_page(measured).encode(errors="backslashreplace")], args.html)
        stage.commit()
    if args.json:
        print(json.dumps(measured.to_json(), indent=2, ensure_ascii=False))
    else:
        _print(measured)
        if args.html is not None:
            print(wrote(args.html))
    return _exit_code(measured, interrupted)


def _exit_code(measured: Benchmark, interrupted: bool) -> int:
    """The exit code, after a line on standard error if it is not OK."""
    if interrupted:
        count = len(measured.measured)
        what = "the length that was finished is" if count == 1 else f"the {count} lengths that were finished are"
        print(f"fa-compiler: error: interrupted; {what} above", file=sys.stderr)
        return INTERRUPTED
    for each in measured.measured:
        if each.decoded is not None and not each.decoded.agrees:
            print(f"fa-compiler: error: behind {each.length} keys the outputs differ", file=sys.stderr)
            return DIFFERENT
    return OK


def _print(measured: Benchmark) -> None:
    print_table(*(_decoder_table if measured.decode else _table)(measured))
    for fault in measured.faults:
        print(printable(fault))
    if measured.decode:
        _print_agreement(measured.measured)
    report = measured.report
    print(printable(f"{report.model}: {report.count('fused')} of {report.softmaxes} attentions fused"))
    if measured.caches:
        first, *others = measured.caches
        print(printable(f"caches: {first}" + (f" and {len(others)} more" if others else "")))
    for cache in report.caches:
        if cache.reason is not None:
            print(printable(str(cache)))
    threads = f"{measured.threads} thread{'s' if measured.threads > 1 else ''}"
    how = "medians of runs in turns, in brackets where eight of ten runs lie"
    if measured.decode:
        how = "by the median step, in turns; in brackets where eight of ten steps lie"
    print(
        f"onnxruntime {measured.runtime} with all its optimisations, batch {measured.batch}, {threads}; {how}; memory "
        "is the peak of a process that runs the model"
    )


Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def _table(measured: Benchmark) -> Table:
    rows = []
    for each in measured.measured:
        assert each.original is not None and each.fused is not None
        memory = [f"{timing.memory / MIB:,.0f}" for timing in (each.original, each.fused)]
        rows.append((str(each.length), _time(each.original), _time(each.fused), f"{each.ratio:.2f} x", *memory))
    return ("tokens", "original, ms", "fused, ms", "faster", "original, MiB", "fused, MiB"), rows


def _decoder_table(measured: Benchmark) -> Table:
    """Tokens a second, of all batch entries, and the time of the prompt."""
    rows, batch, prompts = [], measured.batch, any(each.decoded and each.decoded.prompt for each in measured.measured)
    headings = ("cached keys", "original, tokens/s", "fused, tokens/s", "faster")
    for each in measured.measured:
        assert each.original is not None and each.fused is not None and each.decoded is not None
        sides = each.original, each.fused
        speeds = [f"{1e3 * batch / side.median:,.0f} ({side.low:.2f}-{side.high:.2f} ms)" for side in sides]
        times = [f"{time:,.0f}" for time in each.decoded.prompt or ()] or ["", ""]
        memory = [f"{timing.memory / MIB:,.0f}" for timing in sides]
        rows.append((str(each.length), *speeds, f"{each.ratio:.2f} x", *times[: 2 * prompts], *memory))
    prompt = ("original, prompt ms", "fused, prompt ms") if prompts else ()
    return (*headings, *prompt, "original, MiB", "fused, MiB"), rows


def _print_agreement(measures: Iterable[Measure]) -> None:
    for each in measures:
        assert each.decoded is not None
        decoded = each.decoded
        tokens = f"{decoded.same} of {decoded.tokens} tokens are the same" if decoded.tokens else "no tokens are chosen"
        sides = f"outputs differ by {decoded.largest:.2g}, {decoded.tolerance:.2g} is allowed"
        print(f"behind {each.length} keys {tokens}; {sides}")
        if decoded.parts > 1:
            print(f"behind {each.length} keys the prompt was given in {decoded.parts} parts, for want of memory")


def _time(timing: Timing) -> str:
    return f"{timing.median:.2f} ({timing.low:.2f}-{timing.high:.2f})"
