"""The command bench."""

from __future__ import annotations

import argparse
import json
import sys

from fa_compiler.command_line.exit_codes import DIFFERENT, INTERRUPTED, OK
from fa_compiler.command_line.models import progress_bar, wrote
from fa_compiler.command_line.options import given
from fa_compiler.command_line.render import print_measures
from fa_compiler.errors import InputError
from fa_compiler.measuring.benchmark import bench
from fa_compiler.measuring.figures import BenchInterrupted, Benchmark
from fa_compiler.measuring.options import BenchOptions
from fa_compiler.model_files.reading import load
from fa_compiler.model_files.writing import check_place, staging, write
from fa_compiler.page.provenance import Provenance
from fa_compiler.passes import Options


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

            text = gain_page(measured, Provenance.of(args.words), args.html)
            write(page_file, [text.encode(errors="backslashreplace")], args.html)
        stage.commit()
    if args.json:
        print(json.dumps(measured.to_json(), indent=2, ensure_ascii=False))
    else:
        print_measures(measured)
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
