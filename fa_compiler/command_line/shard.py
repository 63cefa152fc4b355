"""The command shard."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from fa_compiler.command_line.exit_codes import OK
from fa_compiler.command_line.models import progress_bar
from fa_compiler.command_line.options import given
from fa_compiler.command_line.render import print_lines, print_table
from fa_compiler.op_registry.collectives import MERGE, METHODS
from fa_compiler.parallel.sharding import MIB, Sharded, parallel_options, write_sharded
from fa_compiler.passes import Options
from fa_compiler.passes.answer.report import printable
from fa_compiler.passes.parallel.methods import Choice, Machine
from fa_compiler.passes.parallel.options import ParallelOptions
from fa_compiler.passes.parallel.shard import ShardReport

_COSTS = "each pair is the MiB that a rank sends and the milliseconds that the cost model expects,"


def shard(args: argparse.Namespace) -> int:
    """Write the model of the ranks, and tell how they compute each attention."""
    machine = Machine(**given(args, Machine))
    with progress_bar(args.quiet or args.json) as progress:
        options = parallel_options(machine=machine, **given(args, ParallelOptions))
        result = write_sharded(
            args.model, args.output, options, progress=progress, **given(args, Options)
        )
    if args.json:
        print(json.dumps(result.to_json(), indent=2, ensure_ascii=False))
    elif not args.quiet:
        _print(result)
    return OK


def _print(result: Sharded) -> None:
    _print_methods(result.report)
    _print_handed(result.report)
    *lines, next_step = result._lines
    print_lines(lines)
    print(next_step)  # unbroken: it has a command to be copied


def _print_methods(report: ShardReport) -> None:
    rows = [_told(choice, METHODS) for choice in report.choices if choice.held is None]
    if rows:
        print_table(("attention", "method", *METHODS), rows)
        print_lines([f"{_COSTS} for {report.length:,} tokens; - is a method that is not possible"])
    rows = [
        (*_told(choice, (MERGE,)), f"{choice.held / MIB:.2f}")
        for choice in report.choices
        if choice.held is not None
    ]
    if rows:
        print_table(("attention", "method", MERGE, "caches of a rank"), rows)
        print_lines(
            [
                f"{_COSTS} for {report.length:,} keys in the caches; the last column is the MiB of its caches"
            ]
        )


def _print_handed(report: ShardReport) -> None:
    rows = [
        (printable(each.name), f"{each.sent(report.order, report.ranks, report.batch) / MIB:.2f}")
        for each in report.handed
    ]
    if rows:
        print_table(("linear attention or convolution", "sent"), rows)
        print_lines(
            [
                "the MiB of states, or of tokens in front of a window, that a rank sends, whatever the length is"
            ]
        )


def _told(choice: Choice, methods: Sequence[str]) -> tuple[str, ...]:
    costs = (_cost(choice.sent.get(method), choice.seconds.get(method)) for method in methods)
    return printable(choice.name), choice.method, *costs


def _cost(sent: int | None, seconds: float | None) -> str:
    return "-" if sent is None or seconds is None else f"{sent / MIB:.2f}, {seconds * 1e3:.2f}"
