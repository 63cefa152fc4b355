"""The command bench."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack

from fa_compiler.command_line.exit_codes import DIFFERENT, INTERRUPTED, OK
from fa_compiler.command_line.models import progress_bar, wrote
from fa_compiler.command_line.options import given
from fa_compiler.command_line.render import MeasuredRows
from fa_compiler.errors import InputError
from fa_compiler.measuring.benchmark import bench
from fa_compiler.measuring.figures import BenchInterrupted, Benchmark
from fa_compiler.measuring.options import BenchOptions
from fa_compiler.model_files.reading import load
from fa_compiler.model_files.writing import check_no_model, check_place, staging, write
from fa_compiler.page.provenance import Provenance
from fa_compiler.passes import Options
from fa_compiler.passes.answer.report import Progress


def run(args: argparse.Namespace) -> int:
    """Measure a model and its fused form, and print each row when it is measured. Ctrl-C ends with
    the lengths that are finished."""
    options = given(args, BenchOptions, Options)
    if args.html is not None:
        check_place(args.html, load(args.model))
        check_no_model(args.html, "page")
        # a place that cannot be written is an error now; the page is written at the end
        with staging() as stage:
            stage.reserve(args.html)
    interrupted = False
    screen = _Screen(args.quiet, None if args.json else MeasuredRows())
    try:
        with screen:
            measured = bench(args.model, progress=screen.progress, found=screen.found, **options)
    except BenchInterrupted as stop:
        measured, interrupted = stop.kept, True
        if not measured.measured:
            raise
    if not measured.measured:
        raise InputError(f"no length could be measured: {'; '.join(measured.faults)}")
    if args.html is not None:
        _write_page(args, measured)
    if screen.rows is None:
        print(json.dumps(measured.to_json(), indent=2, ensure_ascii=False))
    else:
        screen.rows.end(measured)
        if args.html is not None:
            print(wrote(args.html))
    return _exit_code(measured, interrupted)


class _Screen:
    """The rows that are measured, and below them a progress bar, which makes way for each row.
    Without `rows` there are neither."""

    def __init__(self, quiet: bool, rows: MeasuredRows | None) -> None:
        self._quiet = quiet or rows is None
        self.rows = rows
        self._bar = ExitStack()
        self._show: Progress | None = None

    def __enter__(self) -> None:
        """The bar begins with the first text."""

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        self._show = None

    def progress(self, what: str, done: int, total: int) -> None:
        """Tell how far it is."""
        if self._show is None:
            self._show = self._bar.enter_context(progress_bar(self._quiet))
        if self._show is not None:
            self._show(what, done, total)

    def found(self, measured: Benchmark) -> None:
        """Print the rows that are new."""
        if self.rows is not None:
            self.__exit__()
            self.rows.add(measured)


def _write_page(args: argparse.Namespace, measured: Benchmark) -> None:
    """Write the page of --html."""
    from fa_compiler.page.gain_page import gain_page

    text = gain_page(measured, Provenance.of(args.words), args.html)
    with staging() as stage:
        write(stage.reserve(args.html), [text.encode(errors="backslashreplace")], args.html)
        stage.commit()


def _exit_code(measured: Benchmark, interrupted: bool) -> int:
    """The exit code, after a line on standard error if it is not OK."""
    if interrupted:
        count = len(measured.measured)
        what = (
            "the length that was finished is"
            if count == 1
            else f"the {count} lengths that were finished are"
        )
        print(f"fa-compiler: error: interrupted; {what} above", file=sys.stderr)
        return INTERRUPTED
    for each in measured.measured:
        if each.decoded is not None and not each.decoded.agrees:
            print(f"fa-compiler: error: behind {each.keys} the outputs differ", file=sys.stderr)
            return DIFFERENT
    return OK
