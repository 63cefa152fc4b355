"""The command run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fa_compiler.command_line.exit_codes import BAD_INPUT, INTERNAL, INTERRUPTED, OK
from fa_compiler.errors import InputError, one_line
from fa_compiler.measuring.options import check_threads
from fa_compiler.model_files.reading import LoadedModel, load
from fa_compiler.parallel.communicator import Alone, Communicator
from fa_compiler.parallel.mpi import communicator, launched_ranks
from fa_compiler.parallel.run import AgreedError, ShardedRun, agreed, run_sharded
from fa_compiler.parallel.segments import record_of
from fa_compiler.passes.answer.report import printable
from fa_compiler.running.one_process import run_model
from fa_compiler.running.runtime import Array


def run(args: argparse.Namespace) -> int:
    """Run a model on the inputs of a file, or on random ones, and write its outputs to another
    file."""
    if args.threads < 0:
        raise InputError(
            f"--threads {args.threads}: give a number of threads, or 0 for ONNX Runtime's default"
        )
    check_threads(args.threads)
    ranks = launched_ranks()
    own: Communicator = communicator(args.timeout) if ranks > 1 else Alone()
    with _ended_together(own):
        loaded, made_for = agreed(own, lambda: _loaded(args, ranks))
    place: Path | None = args.outputs
    if made_for == 0:
        feeds, arrays = run_model(loaded, args.inputs, place, args.threads)
        if args.inputs is None and not args.quiet:
            told = ", ".join(
                f"{name} {array.dtype} {list(array.shape)}" for name, array in feeds.items()
            )
            print(printable(f"random inputs: {told}"))
    else:
        if ranks == 1 and made_for > 1:  # started by a launcher that tells nothing, or without one
            own = communicator(args.timeout)
        task = ShardedRun(loaded, args.inputs, args.outputs, args.threads, args.parts, args.caches)
        with _ended_together(own):
            arrays, place = run_sharded(task, own), task.place(own.rank, own.size)
    if arrays and not args.quiet:
        _tell(arrays, place)
    return OK


def _loaded(args: argparse.Namespace, ranks: int) -> tuple[LoadedModel, int]:
    """The model, and the number of ranks that it is made for, 0 for a model that is not sharded."""
    loaded = load(args.model)
    record = record_of(loaded.proto, loaded.name)
    if record is not None:
        for option, given in (("--inputs", args.inputs), ("--outputs", args.outputs)):
            if given is None:
                raise InputError(f"{loaded.name} is sharded: give {option}")
        return loaded, record.ranks
    if ranks > 1:
        raise InputError(
            f"{loaded.name} is not made for {ranks} ranks; make it so with fa-compiler shard"
        )
    for option, given in (("--parts", args.parts), ("--caches", args.caches)):
        if given:
            raise InputError(f"{loaded.name} is not sharded: {option} does not go with it")
    return loaded, 0


@contextmanager
def _ended_together(own: Communicator) -> Iterator[None]:
    """End the other ranks if this one fails and they do not know it: they would wait for it."""
    try:
        yield
    except AgreedError:
        raise
    except BaseException as error:
        if own.size == 1:
            raise
        told, code = _told(error)
        print(f"fa-compiler: error: rank {own.rank}: {printable(told)}", file=sys.stderr)
        own.abort(told)
        raise SystemExit(code) from None


def _told(error: BaseException) -> tuple[str, int]:
    """What is said of an error, and the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; nothing was written", INTERRUPTED
    if isinstance(error, InputError | OSError | MemoryError):
        return one_line(error), BAD_INPUT
    return f"internal error: {type(error).__name__}: {one_line(error)}", INTERNAL


def _tell(arrays: Mapping[str, Array], place: Path | None) -> None:
    """Print what there is, and where it was written. It is one text, because other ranks print at
    the same time."""
    lines = [f"{name}: {array.dtype} {list(array.shape)}" for name, array in arrays.items()]
    if place is not None:
        lines.append(f"wrote {place}")
    print("".join(f"{printable(line)}\n" for line in lines), end="", flush=True)
