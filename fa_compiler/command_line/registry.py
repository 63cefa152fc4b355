"""The commands that look into op_registry: list, show, diff."""

from __future__ import annotations

import argparse

from fa_compiler.command_line.render import print_table, printable
from fa_compiler.op_registry import commands, variants

OK, DIFFERENT = 0, 1


def show_list(_: argparse.Namespace) -> int:
    """One line for each operator: how many tensors and attributes it has, and its known variants."""
    rows = []
    for spec in commands.list_ops():
        counts = (str(len(entries)) for entries in (spec.inputs, spec.outputs, spec.attrs))
        rows.append((spec.name, *counts, ", ".join(variant.variant for variant in variants(spec.name))))
    print_table(("operator", "inputs", "outputs", "attributes", "variants, newest last"), rows)
    return OK


def show_op(args: argparse.Namespace) -> int:
    """An operator's prototype as REG_OP text, with what else is known of it as comments above."""
    text = commands.show(args.op, args.cann)
    for label, fact in commands.facts(args.op, args.cann):
        print(f"// {label}: {printable(fact)}")
    print(text)
    return OK


def diff(args: argparse.Namespace) -> int:
    """How installed headers differ from what would be emitted, the differences that matter first."""
    differences = commands.diff_paths(args.paths, args.cann)
    serious = [entry for entry in differences if entry.serious]
    for entry in serious:
        print(printable(f"differs: {entry}"))
    for entry in differences:
        if not entry.serious:
            print(printable(f"note: {entry}"))
    if serious:
        print(f"{len(serious)} differences: nodes written for this CANN may be refused or read wrongly")
        return DIFFERENT
    print("the headers take what would be emitted")
    return OK
