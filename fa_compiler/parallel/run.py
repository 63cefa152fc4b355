"""Runs a sharded model from a file of inputs to a file of outputs, as one of the ranks that mpirun started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from fa_compiler.errors import FaCompilerError, InputError, one_line
from fa_compiler.model_files.reading import LoadedModel
from fa_compiler.parallel.communicator import Array, Communicator
from fa_compiler.parallel.cores import threads_of_rank
from fa_compiler.parallel.input_file import load_part
from fa_compiler.parallel.parts import Parts
from fa_compiler.parallel.session import ShardedSession
from fa_compiler.running.one_process import check_outputs, save_outputs

T = TypeVar("T")


class AgreedError(InputError):
    """An error of which all ranks know, so that each of them ends by itself."""


@dataclass(frozen=True)
class ShardedRun:
    """The files and options of a run. `keep_parts` leaves the outputs in one file for each rank."""

    loaded: LoadedModel
    inputs: Path
    outputs: Path
    threads: int = 0
    keep_parts: bool = False

    def place(self, rank: int, ranks: int) -> Path:
        """The file that a rank writes."""
        if not self.keep_parts:
            return self.outputs
        return self.outputs.with_name(f"{self.outputs.stem}.{rank}-of-{ranks}{self.outputs.suffix}")


def run_sharded(task: ShardedRun, own: Communicator) -> dict[str, Array]:
    """Run this rank, and write the outputs: rank 0 all of them, or each rank its parts. Returns what was written.

    Every rank raises the same error if the model, the inputs or the place of the outputs is at fault for one of them:
    all agree before the run and when they have written.

    Raises:
        AgreedError: as above; nothing was written before the run.
        InputError: ONNX Runtime fails in the run. The other ranks do not know it.
        RankError: another rank failed in the run, or does not answer.
    """
    threads = task.threads or threads_of_rank(own)  # before a rank can fail: all ranks take part in it
    session, feeds, parts = agreed(own, lambda: _opened(replace(task, threads=threads), own))
    results = session.run_part(feeds, parts)
    if task.keep_parts:
        results = {**results, "positions": parts.positions(own.rank)}
    else:
        results = session.gather_parts(results, parts)
    agreed(own, lambda: save_outputs(task.place(own.rank, own.size), results) if results else None)
    return results


def agreed(communicator: Communicator, step: Callable[[], T]) -> T:
    """The result of a step that every rank takes, if it succeeds on all of them.

    Raises:
        AgreedError: it failed on a rank. All ranks raise it, with the error of the first one that failed.
        RankError: another rank does not answer.
    """
    result: T | None = None
    text = ""
    try:
        result = step()
    except (FaCompilerError, OSError) as error:
        text = one_line(error)
    texts = [message.decode() for message in communicator.share(text.encode(errors="backslashreplace"))]
    failed = [rank for rank, message in enumerate(texts) if message]
    if failed:
        everywhere = len(set(texts)) == 1
        raise AgreedError(texts[failed[0]] if everywhere else f"rank {failed[0]}: {texts[failed[0]]}")
    return result  # type: ignore[return-value]  # a step that returns None has this type


def _opened(task: ShardedRun, communicator: Communicator) -> tuple[ShardedSession, dict[str, Array], Parts]:
    """The session, this rank's part of the inputs, and how the sequence is divided."""
    assert task.loaded.path is not None
    check_outputs(task.place(communicator.rank, communicator.size), task.inputs, task.loaded)
    session = ShardedSession(task.loaded.path, communicator, task.threads)
    axes, rank = session.record.inputs, communicator.rank
    feeds, parts = load_part(task.inputs, task.loaded.proto, axes, rank, session.parts)
    return session, feeds, parts
