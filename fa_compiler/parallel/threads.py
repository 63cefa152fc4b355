"""Ranks that are threads of this process. They need no MPI: for tests, and to try a sharded
model."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from fa_compiler.errors import one_line
from fa_compiler.parallel.communicator import (
    TIMEOUT,
    Array,
    Communicator,
    Pending,
    RankError,
    Shape,
)

T = TypeVar("T")


class _Board:
    """What the threads share: the messages that were not received yet, and the first error."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.messages: defaultdict[tuple[int, int], deque[Array]] = defaultdict(deque)
        self.error: str | None = None


class ThreadCommunicator(Communicator):
    """One of several ranks in a process."""

    def __init__(self, rank: int, size: int, board: _Board, timeout: float) -> None:
        super().__init__(rank, size, timeout)
        self._board = board

    def start(
        self,
        sends: Sequence[tuple[int, Array]],
        receives: Sequence[tuple[int, Shape, np.dtype[Any]]],
    ) -> Pending:
        """Put copies of the arrays on the board. What is received is looked for when it is waited
        for."""
        with self._board.condition:
            for rank, array in sends:
                self._board.messages[self.rank, rank].append(array.copy())
            self._board.condition.notify_all()
        return _Received(self, self._board, receives)

    def abort(self, message: str) -> None:
        """Write the error on the board."""
        with self._board.condition:
            self._board.error = self._board.error or message
            self._board.condition.notify_all()


class _Received(Pending):
    def __init__(
        self,
        owner: ThreadCommunicator,
        board: _Board,
        receives: Sequence[tuple[int, Shape, np.dtype[Any]]],
    ) -> None:
        self._owner, self._board, self._receives = owner, board, receives

    def wait(self) -> list[Array]:
        end = time.monotonic() + self._owner.timeout
        return [self._next(source, shape, dtype, end) for source, shape, dtype in self._receives]

    def _next(self, source: int, shape: Shape, dtype: np.dtype[Any], end: float) -> Array:
        board, key = self._board, (source, self._owner.rank)
        with board.condition:
            ready = board.condition.wait_for(
                lambda: board.messages[key] or board.error is not None, end - time.monotonic()
            )
            if board.error is not None:
                raise RankError(f"another rank failed: {board.error}")
            if not ready:
                raise self._owner.too_late()
            array = board.messages[key].popleft()
        if array.shape != shape or array.dtype != dtype:
            raise RankError(
                f"rank {source} sent {array.dtype} {array.shape}, expected {dtype} {shape}"
            )
        return array


def run_threads(size: int, task: Callable[[Communicator], T], timeout: float = TIMEOUT) -> list[T]:
    """Run a task on each rank of a group of threads, and return the results by rank.

    Raises the first error of a rank that is not a RankError, else the first RankError.
    """
    board = _Board()
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        communicator = ThreadCommunicator(rank, size, board, timeout)
        try:
            results[rank] = task(communicator)
        except BaseException as error:
            errors[rank] = error
            communicator.abort(one_line(error))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own = [error for error in errors.values() if not isinstance(error, RankError)]
    for error in (*own, *errors.values()):
        raise error
    return [results[rank] for rank in range(size)]
