"""The commands that work on models: optimize, inspect, verify, plan; and library.

ONNX Runtime and rich are imported where they are used: an `optimize --quiet` needs neither.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from fa_compiler import shell
from fa_compiler.command_line.exit_codes import DIFFERENT, OK
from fa_compiler.command_line.options import given, words_given
from fa_compiler.errors import InputError
from fa_compiler.model_files.destination import is_special
from fa_compiler.model_files.reading import LoadedModel, load
from fa_compiler.model_files.writing import (
    Staging,
    check_no_model,
    check_place,
    file_sizes,
    staging,
    write,
    write_model,
)
from fa_compiler.op_registry.runtimes import ALL, Runtime, newest_version
from fa_compiler.page.gain import gain_line
from fa_compiler.page.provenance import Provenance, Written, gain_beside
from fa_compiler.passes import Options, Report
from fa_compiler.passes.answer.option import options_of
from fa_compiler.passes.answer.options import SHARED_CACHES
from fa_compiler.passes.answer.report import Code, Progress, printable
from fa_compiler.pipeline.fusing import copy_of, file_form, run
from fa_compiler.pipeline.how_to_run import how_to_run_result
from fa_compiler.pipeline.options import FileOptions, make_options
from fa_compiler.pipeline.runtime_choices import runtime_choices

if TYPE_CHECKING:
    from fa_compiler.comparison.compare import Comparison
    from fa_compiler.page.drawn import Drawn

ORT_CPU = "ort-cpu"
"""The runtime that runs what `--verify` compares."""


def optimize(args: argparse.Namespace) -> int:
    """Fuse, check, optionally verify, and write. The files appear only if everything succeeded."""
    options = make_options(**given(args, FileOptions))
    for path in (args.model, args.output):
        if args.verify and is_special(path):
            raise InputError(
                f"{path} is not a regular file, and --verify has to read it again; leave out --verify"
            )
    loaded = load(args.model)
    check_place(args.output, loaded, args.force)
    _check_places(args, loaded)
    with staging() as stage:
        report_file = None if args.report is None else stage.reserve(args.report)
        pictures = _Pictures(args, stage)
        compared = None
        with progress_bar(args.quiet) as stage.progress:
            proto, report = run(loaded, options, stage.progress, file_form(options))
            pictures.draw(report, loaded, proto)
            proto = copy_of(loaded) if proto is None else proto
            staged = write_model(proto, loaded, args.output, stage, report, options.keeps_weights)
        if report_file is not None:
            write(report_file, [_json(report).encode(errors="backslashreplace")], args.report)
        if args.verify:
            compared = _compared(args, staged, report, options)
            if compared is None or not compared.same:
                return DIFFERENT
        # a stream is no model to load
        named = Path("fused.onnx") if is_special(args.output) else args.output
        how = how_to_run_result(named, report, options, proto, loaded.proto)
        pictures.write(
            Written(args.output, how, file_sizes(loaded, proto, staged, args.output), compared)
        )
        stage.commit()
    if not args.quiet:
        from fa_compiler.command_line.render import print_how_to_run, print_lines, print_report

        print_report(report, args.explain)
        if (gain := gain_line(report, loaded.proto, proto)) is not None:
            print_lines([gain])
        print(wrote(args.output, args.html, args.graph, args.report))
        if how is not None:
            print_how_to_run(how)
    return _strict_exit_code(report) if args.strict else OK


def _strict_exit_code(report: Report) -> int:
    """The exit code with --strict. It is OK if something was fused, now or before, and no attention
    was declined.

    An operator that is left as it is, a convolution and a softmax that is no attention do not
    count.
    """
    left = [
        block
        for block in report.blocks
        if block.status == "declined" and block.kind != "convolution"
    ]
    declined = [block for block in left if block.code != Code.READY_MADE]
    if (report.count("fused") or report.count("already_fused")) and not declined:
        return OK
    what = "no attention was fused"
    if declined:
        named = ", ".join(
            f"{block.id} ({block.code.value})" if block.code else str(block.id)
            for block in declined
        )
        what = f"{'blocks' if len(declined) > 1 else 'block'} {named} declined"
    print(f"fa-compiler: error: --strict: {what}", file=sys.stderr)
    return DIFFERENT


def plan(args: argparse.Namespace) -> int:
    """Write a plan for the execution provider."""
    from fa_compiler.provider.plan import plan as write_plan

    report = write_plan(args.model, args.output, args.level, **given(args, Options))
    if not args.quiet:
        from fa_compiler.command_line.render import print_report

        print_report(report, args.explain)
        print(wrote(args.output))
        if report.count("fused"):
            # a stream is no file to read again
            named = Path("model.plan") if is_special(args.output) else args.output
            print(
                f"next: start the program with FA_COMPILER_PLAN={printable(shell.command([str(named)]))}"
            )
            print(
                "The program has to load the library as execution provider; `fa-compiler docs provider` shows how."
            )
        else:
            print(
                "The plan says that nothing is fused: sessions that use it run the model as it is."
            )
    return _strict_exit_code(report) if args.strict else OK


def library(args: argparse.Namespace) -> int:
    """Print the path of the custom-op library."""
    from fa_compiler.lowering.ort import LibraryUnusable, custom_ops_library

    try:
        print(custom_ops_library())
    except LibraryUnusable as error:
        raise InputError(str(error)) from None
    return OK


def inspect(args: argparse.Namespace) -> int:
    """Print what `optimize` would do."""
    if args.runtime == ALL:
        return _inspect_runtimes(args)
    options = make_options(**given(args, Options))
    loaded = load(args.model)
    _check_places(args, loaded)
    with staging() as stage:
        pictures = _Pictures(args, stage)
        with progress_bar(args.quiet or args.json) as progress:
            proto, report = run(loaded, options, progress)
        pictures.draw(report, loaded, proto)
        pictures.write()
        stage.commit()
    if args.json:
        print(_json(report), end="")
    else:
        from fa_compiler.command_line.render import print_report

        print_report(report, args.explain)
        if args.html is not None or args.graph is not None:
            print(wrote(args.html, args.graph))
    return OK


def wrote(*paths: Path | None) -> str:
    """The line that names the files that a command wrote."""
    return f"wrote {', '.join(printable(str(path)) for path in paths if path is not None)}"


def _inspect_runtimes(args: argparse.Namespace) -> int:
    """Print what each attention becomes for each runtime."""
    from fa_compiler.command_line.render import print_choices

    others = [
        option
        for name, option in options_of(Options).items()
        if name not in ("target", "runtime", "assume")
    ]
    flags = [f"--{name}" for name in ("html", "graph") if getattr(args, name) is not None]
    flags += [option.flag for option in others if getattr(args, option.name) != option.default]
    if flags:
        raise InputError(f"{flags[0]} does not go with --runtime {ALL}")
    choices = runtime_choices(load(args.model), given(args, Options)["assume"])
    if args.json:
        print(json.dumps(choices.to_json(), indent=2, ensure_ascii=False))
    else:
        print_choices(choices)
    return OK


def _check_places(args: argparse.Namespace, loaded: LoadedModel) -> None:
    """Refuse a report, a page or a drawing that would overwrite the model, its weights or another
    file of the run."""
    output = getattr(args, "output", None)
    named = {
        "model": output,
        "report": getattr(args, "report", None),
        "page": args.html,
        "graph": args.graph,
    }
    places: dict[str, str] = {}
    for what, path in named.items():
        if path is None:
            continue
        if path is not output:
            check_place(path, loaded)
        other = places.setdefault(os.path.realpath(path), what)
        if other != what:
            raise InputError(f"{path} cannot be both the {other} and the {what}")
        if what in ("report", "page"):
            check_no_model(path, what)
    if args.graph is not None and args.graph.suffix.lower() not in ("", ".svg"):
        raise InputError(
            f"--graph writes SVG: {args.graph} has to end with .svg, not {args.graph.suffix}"
        )


class _Pictures:
    """The page and the drawings that a command writes besides. Their places are reserved before the
    work begins."""

    def __init__(self, args: argparse.Namespace, stage: Staging) -> None:
        self._args = args
        self._places = {
            kind: place for kind in ("html", "graph") if (place := getattr(args, kind)) is not None
        }
        self._files = {kind: stage.reserve(place) for kind, place in self._places.items()}
        self._drawn: Drawn | None = None

    def draw(self, report: Report, loaded: LoadedModel, result: onnx.ModelProto | None) -> None:
        """Draw the run, if it is to be drawn, before the result is written and changed for that."""
        if self._files:
            from fa_compiler.page.drawn import Drawn

            self._drawn = Drawn.of(report, loaded, result)

    def write(self, written: Written | None = None) -> None:
        """Write what was drawn, and what is known of the written model, into the reserved files."""
        if self._drawn is None:
            return
        from fa_compiler.page.page import Run, drawings, page

        for kind, file in self._files.items():
            place = self._places[kind]
            if kind == "graph":
                text = drawings(self._drawn)
            else:
                made, options = Provenance.of(self._args.words), words_given(self._args, Options)
                run = Run(made, self._args.model, gain_beside(place), written, tuple(options))
                text = page(self._drawn, run)
            write(file, [text.encode(errors="backslashreplace")], place)


def verify(args: argparse.Namespace) -> int:
    """Compare two model files."""
    from fa_compiler.command_line.render import print_comparison
    from fa_compiler.comparison.compare import CannotRunError, compare_models

    assume = make_options(**given(args, Options)).assume
    try:
        comparison = compare_models(
            args.original,
            args.other,
            args.inputs,
            args.rtol,
            shared=args.shared_caches,
            assume=assume,
        )
    except CannotRunError as error:
        return _cannot_compare(str(error))
    if not args.quiet:
        print_comparison(comparison)
    if comparison.same:
        return OK
    return _cannot_compare(_difference(args.other, comparison)) if args.quiet else DIFFERENT


def _difference(other: Path, comparison: Comparison) -> str:
    """The first output that differs, in one line, and how many others do."""
    first, *others = (output for output in comparison.outputs if output.fault is not None)
    told = f"{other}: output '{first.name}': {first.verdict}"
    if not others:
        return told
    return (
        f"{told}; {len(others)} more {'output differs' if len(others) == 1 else 'outputs differ'}"
    )


def _compared(
    args: argparse.Namespace, staged: Path, report: Report, options: Options
) -> Comparison | None:
    """Compare the staged result with the model, and print what was found; None if the result does
    not run."""
    from fa_compiler.command_line.render import print_comparison
    from fa_compiler.comparison.compare import CannotRunError, compare_models

    shared = any(SHARED_CACHES in block.assumed for block in report.blocks)
    try:
        comparison = compare_models(
            args.model, staged, name="the optimised model", shared=shared, assume=options.assume
        )
    except CannotRunError as error:
        _cannot_compare(f"{error}{_for_a_newer_release(options.runtime)}")
        return None
    if not args.quiet or not comparison.same:
        print_comparison(comparison)
    if not comparison.same:
        _cannot_compare(
            f"{args.output} was not written: it differs{_for_a_newer_release(options.runtime)}"
        )
    return comparison


def _for_a_newer_release(runtime: Runtime | None) -> str:
    """The end of the message of a result that fails here, if it was made for a newer ONNX Runtime
    than this one."""
    if runtime is None or runtime.name != ORT_CPU:
        return ""
    import onnxruntime as ort

    from fa_compiler.provider import release

    version = runtime.version or newest_version(ORT_CPU)
    if version[:2] <= release():
        return ""
    made_for, here = (".".join(map(str, number)) for number in (version, release()))
    option = f"--runtime {ORT_CPU}={here}"
    return (
        f"; it is for ONNX Runtime {made_for} or newer, and this is {ort.__version__}: try {option}"
    )


def _cannot_compare(message: str) -> int:
    print(f"fa-compiler: error: {printable(message)}", file=sys.stderr)
    return DIFFERENT


def _json(report: Report) -> str:
    return json.dumps(report.to_json(), indent=2, ensure_ascii=False) + "\n"


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Progress | None]:
    """A progress bar on standard error, if that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    from fa_compiler.command_line.render import console

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bar(*columns, console=console(sys.stderr), transient=True) as bar:
        task = bar.add_task("", visible=False)  # until it is known what is done

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=printable(what), completed=done, total=total, visible=True)

        yield show
