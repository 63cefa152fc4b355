"""The command bench."""

from __future__ import annotations

import argparse
import json

from fa_compiler.command_line.exit_codes import OK
from fa_compiler.command_line.models import progress_bar, wrote
from fa_compiler.command_line.options import given
from fa_compiler.command_line.render import print_table
from fa_compiler.comparison.benchmark import Benchmark, Timing, bench
from fa_compiler.comparison.options import BenchOptions
from fa_compiler.model_files.reading import load
from fa_compiler.model_files.writing import check_place, staging, write
from fa_compiler.passes import Options
from fa_compiler.passes.answer.report import printable

MIB = 1 << 20


def run(args: argparse.Namespace) -> int:
    """Measure a model and its fused form, and print the table."""
    options = given(args, BenchOptions, Options)
    if args.html is not None:
        check_place(args.html, load(args.model))
    with staging() as stage:
        page_file = None if args.html is None else stage.reserve(args.html)
        with progress_bar(args.quiet or args.json) as progress:
            measured = bench(args.model, progress=progress, **options)
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
    return OK


def _print(measured: Benchmark) -> None:
    rows: list[tuple[str, ...]] = []
    for each in measured.measures:
        if each.original is None or each.fused is None:
            continue
        memory = [f"{timing.memory / MIB:,.0f}" for timing in (each.original, each.fused)]
        rows.append(
            (str(each.length), _time(each.original), _time(each.fused), f"{each.ratio:.2f} x", *memory),
        )
    print_table(("tokens", "original, ms", "fused, ms", "faster", "original, MiB", "fused, MiB"), rows)
    for each in measured.measures:
        if each.fault is not None:
            print(printable(f"{each.length} tokens: the model does not run: {each.fault}"))
    report = measured.report
    print(printable(f"{report.model}: {report.count('fused')} of {report.softmaxes} attentions fused"))
    threads = f"{measured.threads} thread{'s' if measured.threads > 1 else ''}"
    print(
        f"onnxruntime {measured.runtime} with all its optimisations, batch {measured.batch}, {threads}; medians of "
        "runs in turns, in brackets where eight of ten runs lie; memory is the peak of a process that runs the model"
    )


def _time(timing: Timing) -> str:
    return f"{timing.median:.2f} ({timing.low:.2f}-{timing.high:.2f})"
