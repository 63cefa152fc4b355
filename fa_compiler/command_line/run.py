"""The command run."""

from __future__ import annotations

import argparse

from fa_compiler.command_line.exit_codes import OK
from fa_compiler.errors import InputError
from fa_compiler.model_files.reading import load
from fa_compiler.passes.report import printable
from fa_compiler.running.one_process import run_model


def run(args: argparse.Namespace) -> int:
    """Run a model on the inputs of a file, and write its outputs to another one."""
    if args.threads < 0:
        raise InputError(f"--threads {args.threads}: give a number of threads, or 0 for ONNX Runtime's default")
    arrays = run_model(load(args.model), args.inputs, args.outputs, args.threads)
    if not args.quiet:
        for name, array in arrays.items():
            print(printable(f"{name}: {array.dtype} {list(array.shape)}"))
        print(f"wrote {printable(str(args.outputs))}")
    return OK
