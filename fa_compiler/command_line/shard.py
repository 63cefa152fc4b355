"""The command shard."""

from __future__ import annotations

import argparse
import json

from fa_compiler.command_line.exit_codes import OK
from fa_compiler.command_line.models import assumed, progress_bar
from fa_compiler.command_line.render import print_table
from fa_compiler.errors import InputError
from fa_compiler.parallel.sharding import Sharded
from fa_compiler.parallel.sharding import shard as shard_model
from fa_compiler.passes.report import printable


def shard(args: argparse.Namespace) -> int:
    """Write the model of the ranks, and tell how they compute each attention."""
    with progress_bar(args.quiet or args.json) as progress:
        result = shard_model(
            args.model,
            args.output,
            args.sequence_parallel,
            method=args.method,
            axes=axes_of(args.sequence_axis),
            length=args.length,
            batch=args.batch,
            assume=assumed(args),
            progress=progress,
        )
    if args.json:
        print(json.dumps(result.to_json(), indent=2, ensure_ascii=False))
    elif not args.quiet:
        _print(result)
    return OK


def axes_of(words: list[str]) -> dict[str, int]:
    """The dimension of each input from words such as "input_ids:1". Raises InputError."""
    axes: dict[str, int] = {}
    for word in words:
        name, colon, number = word.rpartition(":")
        try:
            axes[name] = int(number)
        except ValueError:
            colon = ""
        if not colon or not name:
            raise InputError(f"--sequence-axis {word!r} is not of the form input_ids:1")
    return axes


def _print(result: Sharded) -> None:
    report = result.report
    rows = [
        (
            printable(choice.name),
            choice.method,
            *(
                _cost(choice.sent.get(method), choice.seconds.get(method))
                for method in ("gather", "all-to-all", "ring")
            ),
        )
        for choice in report.choices
    ]
    if rows:
        print_table(("attention", "method", "gather", "all-to-all", "ring"), rows)
        print(f"for {report.length:,} tokens: MiB that a rank sends, milliseconds of the cost model; - is not possible")
    for what, axes in (("input", report.inputs), ("output", report.outputs)):
        for name, axis in axes.items():
            where = "whole on every rank" if axis is None else f"in parts along dimension {axis}"
            print(printable(f"{what} {name}: {where}"))
    if report.gathered:
        print(printable(f"all ranks get all tokens of {', '.join(report.gathered)}"))
    print(f"{report.ranks} ranks, {report.order} order")
    print(printable(f"wrote {result.path}; run it with: mpirun -n {report.ranks} fa-compiler run {result.path} ..."))


def _cost(sent: int | None, seconds: float | None) -> str:
    return "-" if sent is None or seconds is None else f"{sent / (1 << 20):.2f}, {seconds * 1e3:.2f}"
