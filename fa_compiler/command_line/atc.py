"""The commands for ATC: atc, air check, air show, single-op."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from fa_compiler.atc.request import Parallel, Request, request_of
from fa_compiler.command_line.exit_codes import DIFFERENT, OK
from fa_compiler.command_line.models import progress_bar
from fa_compiler.command_line.options import given
from fa_compiler.command_line.render import print_lines, print_report, print_table
from fa_compiler.errors import InputError
from fa_compiler.lowering.ascend.diagnostic import AirError, FileDiagnostic, Severity
from fa_compiler.model_files.destination import is_special
from fa_compiler.model_files.writing import staging, write
from fa_compiler.op_registry import DOMAIN
from fa_compiler.op_registry.soc import soc_version
from fa_compiler.passes import Options
from fa_compiler.passes.answer.report import printable


def atc(args: argparse.Namespace) -> int:
    """Write a folder that ATC can compile."""
    from fa_compiler.atc import run

    request = request_of(**given(args, Options, Request, Parallel))
    with progress_bar(args.quiet) as progress:
        report, built = run.run(args.model, args.output, request, progress)
    if not args.quiet:
        print_report(report, args.explain)
        print_lines(f"note: {note}" for note in built.notes)
        if (layer := built.details.get("layer")) is not None:
            kernels = (
                "each" if layer["kernels"] == layer["operators"] else f"{layer['kernels']} of them"
            )
            print_lines(
                [f"one layer has {layer['operators']} operators; GE starts a kernel for {kernels}"]
            )
        print(printable(f"wrote {args.output}"))
        for line in run.next_steps(args.output, built):
            print(printable(line))
    return OK


def air_check(args: argparse.Namespace) -> int:
    """Print the faults of an `.air` file, or of an ONNX model (a file named .onnx) the problems
    that ATC's parser has.

    The given domains are those for which ATC has plugins, besides our own domain.
    """
    from fa_compiler.lowering.ascend.air.check import check, verdict
    from fa_compiler.lowering.ascend.onnx_route import check as onnx_check

    path = _file(args.file)
    domains = (DOMAIN, *args.plugin_domain)
    diagnostics = onnx_check.check(path, domains) if path.suffix == ".onnx" else check(path)
    if _print(diagnostics, args.each):
        print_lines(
            ["the same was found at several operators; --each prints a row for each of them"]
        )
    return _conclude(path, verdict(diagnostics), diagnostics)


def air_show(args: argparse.Namespace) -> int:
    """List the operators of an `.air` file, or draw its graph."""
    from fa_compiler.lowering.ascend.air import read
    from fa_compiler.lowering.ascend.air.draw import draw
    from fa_compiler.lowering.ascend.air.show import lines, summary

    path: Path = args.file
    drawing: Path | None = args.graph
    if path.suffix == ".onnx":
        raise InputError(
            f"{path} is an ONNX model, and air show reads .air files; air check reads both"
        )
    try:
        model = read(_file(path))
        if drawing is None:
            print(printable(summary(model)))
            for graph in model.graphs:
                print()
                print(printable(graph.name))
                for line in lines(graph):
                    print(printable(f"  {line}"))
            return OK
        text = draw(model, drawing.suffix)
    except (AirError, ValueError) as error:
        raise InputError(str(error)) from None
    if drawing.exists() and drawing.samefile(path):
        raise InputError(f"{drawing} is the .air itself; choose another name")
    with staging() as stage:
        write(stage.reserve(drawing), [text.encode()], drawing)
        stage.commit()
    print(printable(f"wrote {drawing}"))
    return OK


def single_op(args: argparse.Namespace) -> int:
    """Write or check one operator's file for `atc --singleop`."""
    from fa_compiler.atc.single import by_hand, command
    from fa_compiler.lowering.ascend.air.check import verdict
    from fa_compiler.lowering.ascend.single_op import check

    if args.check is not None:
        of_an_operator = (args.op, args.input, args.output_desc, args.attr, args.const)
        if any((*of_an_operator, args.output, args.soc_version, args.cann)):
            raise InputError("--check takes a file and no other option")
        diagnostics = check(_file(args.check))
        _print(diagnostics)
        return _conclude(args.check, verdict(diagnostics), diagnostics)
    if args.op is None or args.output is None:
        raise InputError("single-op needs an operator and -o FILE.json, or --check FILE.json")
    if args.output.suffix.lower() not in ("", ".json"):
        raise InputError(
            f"single-op writes JSON: {args.output} has to end with .json, not {args.output.suffix}"
        )
    soc = None if args.soc_version is None else soc_version(args.soc_version).name
    text = by_hand(args.op, args.input, args.output_desc, args.attr, args.const, soc, args.cann)
    with staging() as stage:
        write(stage.reserve(args.output), [text.encode()], args.output)
        stage.commit()
    # a stream is no file to read again
    named = Path(f"{args.op}.json") if is_special(args.output) else args.output
    words = command(str(named), str(named.with_suffix("")), soc or "SOC_VERSION")
    print(printable(f"wrote {args.output}; compile it with: {shlex.join(words)}"))
    return OK


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _file(path: Path) -> Path:
    if path.is_dir():
        raise InputError(f"{path} is a folder; give the file in it")
    if not path.exists():
        raise InputError(f"{path}: no such file")
    return path


def _print(diagnostics: Sequence[FileDiagnostic], each: bool = False) -> bool:
    """Print what was found as a table: unless it is a row for `each`, one row for what was found
    alike at several operators. Return whether there are such rows."""
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for diagnostic in diagnostics:
        alike = (diagnostic.severity.value, diagnostic.rule, diagnostic.message, diagnostic.hint)
        found.setdefault(alike, []).append(diagnostic.node)
    shown = (
        (alike, [[node] for node in nodes] if each else [nodes]) for alike, nodes in found.items()
    )
    rows = [
        (severity, rule, _shortened(group), message, hint)
        for (severity, rule, message, hint), groups in shown
        for group in groups
    ]
    if rows:
        print_table(("severity", "rule", "node", "what", "what to do"), rows)
    return len(rows) < len(diagnostics)


def _shortened(nodes: Sequence[str]) -> str:
    first, *others = nodes
    return f"{first} and {len(others)} more" if others else first


def _conclude(path: Path, verdict: str, diagnostics: Sequence[FileDiagnostic]) -> int:
    notes = sum(diagnostic.severity is Severity.NOTE for diagnostic in diagnostics)
    faults = len(diagnostics) - notes
    print(printable(f"{path}: {verdict}; {_count(faults, 'fault')}, {_count(notes, 'note')}"))
    return DIFFERENT if faults else OK
