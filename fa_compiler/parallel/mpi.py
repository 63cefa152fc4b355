"""Ranks of MPI, by mpi4py. It is imported only when a model of several ranks runs."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fa_compiler.errors import InputError, one_line
from fa_compiler.parallel.communicator import (
    TIMEOUT,
    Array,
    Communicator,
    Pending,
    RankError,
    Shape,
    as_bytes,
)

if TYPE_CHECKING:
    from mpi4py import MPI

LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Environment variables in which launchers of MPI tell how many ranks they started."""

_POLL = 50e-6
"""Seconds between two looks at an exchange that takes long."""


def launched_ranks() -> int:
    """The number of ranks that a launcher of MPI started, 1 without one."""
    for name in LAUNCHED:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 1


def communicator(timeout: float = TIMEOUT) -> MpiCommunicator:
    """This process's rank of all ranks that mpirun started.

    Raises:
        InputError: mpi4py is missing, or finds no library of MPI.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = one_line(error)
        # there is mpi4py, but no library of MPI: the error lists all places
        if isinstance(error, RuntimeError):
            reason = str(error).partition("\n")[0]
        raise InputError(
            f"a model of several ranks needs MPI, and mpi4py cannot be used ({reason}); "
            "install both by pip install 'fa_compiler[mpi]'"
        ) from None
    return MpiCommunicator(MPI.COMM_WORLD, timeout)


class MpiCommunicator(Communicator):
    """One rank of a communicator of mpi4py."""

    def __init__(self, comm: MPI.Comm, timeout: float) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size(), timeout)
        self._comm = comm

    def start(
        self,
        sends: Sequence[tuple[int, Array]],
        receives: Sequence[tuple[int, Shape, np.dtype[Any]]],
    ) -> Pending:
        """Start the messages. A thread completes them, while this one computes."""
        arrays = [np.empty(shape, dtype) for _, shape, dtype in receives]
        requests = [
            self._comm.Irecv(as_bytes(array), source)
            for array, (source, _, _) in zip(arrays, receives, strict=True)
        ]
        requests += [self._comm.Isend(as_bytes(array), rank) for rank, array in sends]
        kept = [array for _, array in sends]
        return _Exchange(requests, arrays, kept, self.timeout, self.too_late)

    def abort(self, message: str) -> None:
        """End all ranks. The launcher ends those that wait."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._comm.Abort(2)


class _Exchange(Pending):
    """Messages under way. MPI moves them only while someone asks for them, so a thread asks."""

    def __init__(
        self,
        requests: list[MPI.Request],
        arrays: list[Array],
        kept: list[Array],
        timeout: float,
        too_late: Callable[[], RankError],
    ) -> None:
        from mpi4py import MPI

        self._requests, self._arrays, self._kept = requests, arrays, kept
        self._timeout, self._too_late = timeout, too_late
        self._test = MPI.Request.Testall
        self._done = self._test(self._requests)
        self._failure: Exception | None = None
        self._stop = False
        self._thread: threading.Thread | None = None
        if not self._done:
            self._thread = threading.Thread(target=self._complete, daemon=True)
            self._thread.start()

    def wait(self) -> list[Array]:
        if self._thread is not None:
            self._thread.join(self._timeout)
            self._stop = True
        if self._failure is not None:
            raise RankError(f"MPI failed: {one_line(self._failure)}")
        if not self._done:
            raise self._too_late()
        return self._arrays

    def _complete(self) -> None:
        try:
            while not self._stop:
                if self._test(self._requests):
                    self._done = True
                    return
                time.sleep(_POLL)
        except Exception as error:  # of MPI: it ends the exchange, and `wait` reports it
            self._failure = error
