"""The commands `registry list`, `registry show`, `registry diff` and `registry runtimes`."""

from __future__ import annotations

import argparse

from fa_compiler.command_line.exit_codes import DIFFERENT, OK
from fa_compiler.command_line.render import print_lines, print_markdown, print_table
from fa_compiler.op_registry import commands, runtimes, variants
from fa_compiler.op_registry.around_kernels import around_matrix
from fa_compiler.op_registry.diff import Change
from fa_compiler.op_registry.documentation import constraints
from fa_compiler.passes.answer.report import printable


def show_list(_: argparse.Namespace) -> int:
    """Print one line for each operator: the numbers of its tensors and attributes, and its known
    variants."""
    rows = []
    for spec in commands.list_ops():
        counts = (str(len(entries)) for entries in (spec.inputs, spec.outputs, spec.attrs))
        rows.append(
            (spec.name, *counts, ", ".join(variant.variant for variant in variants(spec.name)))
        )
    print_table(("operator", "in", "out", "attrs", "variants, newest last"), rows)
    return OK


def show_op(args: argparse.Namespace) -> int:
    """Print an operator's prototype as REG_OP text. Comments above it tell what else the registry
    knows, and comments below it list the constraints that messages name."""
    text = commands.show(args.op, args.cann)
    for label, fact in commands.facts(args.op, args.cann):
        print(f"// {label}: {printable(fact)}")
    print(text)
    print(
        "// constraints, as messages number them; 161001 and 161002 are the statuses that aclnn returns"
    )
    for number, sentence in constraints(args.op):
        print(f"// {number}: {printable(sentence)}")
    return OK


def show_runtimes(_: argparse.Namespace) -> int:
    """Print what runtimes take of the operators of ONNX and ONNX Runtime for attention and around
    it."""
    print_markdown(f"{runtimes.matrix()}\n\n{around_matrix()}")
    return OK


def diff(args: argparse.Namespace) -> int:
    """Print how the installed headers differ from the registry. The differences that matter come
    first."""
    differences = commands.diff_paths(args.paths, args.cann)
    serious = [entry for entry in differences if entry.serious]
    for entry in serious:
        print(printable(f"differs: {entry}"))
    undeclared = [
        entry.op for entry in differences if not entry.serious and entry.change is Change.MISSING_OP
    ]
    for entry in differences:
        if not entry.serious and entry.change is not Change.MISSING_OP:
            print(printable(f"note: {entry}"))
    if undeclared:
        print_lines(
            [
                f"note: not compared, because no header that was given declares them: {', '.join(undeclared)}"
            ]
        )
    if serious:
        what = "1 difference" if len(serious) == 1 else f"{len(serious)} differences"
        advice = "; name its version by --cann, here and to atc" if args.cann is None else ""
        print(f"{what}: this CANN may refuse or misread the nodes that are written for it{advice}")
        return DIFFERENT
    print("the headers accept the nodes that are written")
    return OK
