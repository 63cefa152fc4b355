"""Runs a sharded model from a file of inputs to a file of outputs, as one of the ranks that mpirun
started."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import onnx

from fa_compiler.comparison.feeds import load_inputs, opened
from fa_compiler.errors import FaCompilerError, InputError, one_line
from fa_compiler.model_files.destination import is_same
from fa_compiler.model_files.reading import LoadedModel
from fa_compiler.parallel.communicator import Array, Communicator, RankError
from fa_compiler.parallel.cores import threads_of_rank
from fa_compiler.parallel.input_file import POSITIONS, load_caches, load_part
from fa_compiler.parallel.parts import Parts
from fa_compiler.parallel.session import ShardedSession
from fa_compiler.protos.subgraphs import graph_inputs
from fa_compiler.running.one_process import check_outputs, save_outputs

T = TypeVar("T")


class AgreedError(InputError):
    """An error that all ranks know of: every rank ends by itself."""


@dataclass(frozen=True)
class ShardedRun:
    """The files and options of a run. `keep_parts` leaves the outputs in one file for each rank.
    `caches` are such outputs of an earlier run, with which this one continues; the inputs then are
    those that are no caches."""

    loaded: LoadedModel
    inputs: Path
    outputs: Path
    threads: int = 0
    keep_parts: bool = False
    caches: Path | None = None

    def place(self, rank: int, ranks: int) -> Path:
        """The file that a rank writes."""
        return of_rank(self.outputs, rank, ranks) if self.keep_parts else self.outputs


def of_rank(path: Path, rank: int, ranks: int) -> Path:
    """The file of a rank that belongs to a file of all."""
    return path.with_name(f"{path.stem}.{rank}-of-{ranks}{path.suffix}")


def run_sharded(task: ShardedRun, own: Communicator) -> dict[str, Array]:
    """Run this rank, and write the outputs: rank 0 all of them, or each rank its parts. Returns
    what was written.

    Every rank raises the same error if the model, the inputs or the place of the outputs is at
    fault for one of them: all agree before the run and when they have written.

    Raises:
        AgreedError: as above; nothing was written before the run.
        InputError: ONNX Runtime fails in the run. The other ranks do not know it.
        RankError: another rank failed in the run, or does not answer.
    """
    # before a rank can fail: all ranks take part in it
    threads = task.threads or threads_of_rank(own)
    ready = agreed(own, lambda: _opened(replace(task, threads=threads), own))
    session = ready.session
    feeds, parts = (ready.feeds, ready.parts) if ready.parts is not None else _continued(ready)
    results = session.run_part(feeds, parts)
    if task.keep_parts:
        results = {
            **results,
            POSITIONS: session.parts_of_outputs(results, parts).positions(own.rank),
        }
    else:
        results = session.gather_parts(results, parts)
    agreed(own, lambda: save_outputs(task.place(own.rank, own.size), results) if results else None)
    return results


def agreed(communicator: Communicator, step: Callable[[], T]) -> T:
    """The result of a step that every rank takes, if it succeeds on all of them.

    Raises:
        AgreedError: it failed on a rank. All ranks raise it, with the error of the first one that
            failed.
        RankError: another rank does not answer.
    """
    result: T | None = None
    text = ""
    try:
        result = step()
    except (FaCompilerError, OSError) as error:
        text = one_line(error)
    texts = [
        message.decode() for message in communicator.share(text.encode(errors="backslashreplace"))
    ]
    failed = [rank for rank, message in enumerate(texts) if message]
    if failed:
        everywhere = len(set(texts)) == 1
        raise AgreedError(
            texts[failed[0]] if everywhere else f"rank {failed[0]}: {texts[failed[0]]}"
        )
    return result  # type: ignore[return-value]  # a step that returns None has this type


@dataclass(frozen=True)
class _Opened:
    """A session with this rank's part of the inputs, and how the sequence is divided. Where
    `caches` are read from a file, with the positions of their tokens, only the ranks together know
    it: `parts` is None."""

    session: ShardedSession
    feeds: Mapping[str, Array]
    parts: Parts | None
    caches: tuple[Mapping[str, Array], Array] | None = None


def _opened(task: ShardedRun, communicator: Communicator) -> _Opened:
    """What this rank reads. Raises InputError."""
    assert task.loaded.path is not None
    rank, place = communicator.rank, task.place(communicator.rank, communicator.size)
    check_outputs(place, task.inputs, task.loaded)
    session = ShardedSession(task.loaded.path, communicator, task.threads)
    if task.caches is None:
        _check_caches(task.inputs, session.record.caches)
        feeds, parts = load_part(
            task.inputs, task.loaded.proto, session.record.inputs, rank, session.parts
        )
        return _Opened(session, feeds, parts)
    if not session.record.caches:
        raise InputError(f"{task.loaded.name} has no caches: --caches does not go with it")
    file = of_rank(task.caches, rank, communicator.size)
    if task.caches.exists() and not file.exists():
        raise InputError(
            f"{task.caches} is one file for all ranks, and --caches takes the files that `run --parts` wrote, here "
            f"{file.name}; give whole caches with --inputs"
        )
    if is_same(place, file):
        raise InputError(f"{place} holds the caches; choose another name for the outputs")
    infos = {info.name: info for info in graph_inputs(task.loaded.proto)}
    presents = {present: infos.pop(name) for name, present in session.record.caches.items()}
    others = onnx.ModelProto(graph=onnx.GraphProto(input=infos.values()))
    return _Opened(session, load_inputs(task.inputs, others), None, load_caches(file, presents))


def _check_caches(inputs: Path, caches: Iterable[str]) -> None:
    """Raise InputError for a file without the caches: the message says where they come from."""
    with opened(inputs) as archive:
        missing = [name for name in caches if name not in archive.files]
    if missing:
        raise InputError(
            f"{inputs} lacks the cache '{missing[0]}'; give --caches the outputs of an earlier run, which "
            "`run --parts` wrote, or give whole caches with --inputs, which may be empty"
        )


def _continued(ready: _Opened) -> tuple[dict[str, Array], Parts]:
    """This rank's part of all inputs, with the caches in the order of the model. Raises
    AgreedError, RankError."""
    assert ready.caches is not None
    try:
        caches = ready.session.take_caches(*ready.caches)
    except RankError:
        raise
    except InputError as error:
        raise AgreedError(one_line(error)) from None
    return {**ready.feeds, **caches.arrays}, ready.session.parts_of_caches(caches)
