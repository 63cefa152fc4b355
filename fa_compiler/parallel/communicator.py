"""How ranks talk: one primitive, the exchange of arrays between pairs, and what is made of it.

An implementation only has to start an exchange (`Communicator.start`). Ranks of one process
(threads.py) and those of MPI (mpi.py) have it. All ranks run the same operations in the same order,
so that the messages of a pair need no names.

Every wait ends: with what was waited for, with the error of another rank, or after `timeout`
seconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_compiler.errors import InputError

Array = npt.NDArray[Any]
Shape = tuple[int, ...]

TIMEOUT = 600.0
"""Seconds that a rank waits for another one, by default. A rank that computes for longer than this
looks dead."""


class RankError(InputError):
    """Another rank failed, ended or does not answer."""


class Pending(ABC):
    """An exchange that was started."""

    @abstractmethod
    def wait(self) -> list[Array]:
        """The arrays that were received, in the order asked for. Raises RankError."""


class Communicator(ABC):
    """One rank of a group.

    `rank` counts from 0 to `size` - 1. `sent` is the number of bytes that this rank sent to others.
    """

    def __init__(self, rank: int, size: int, timeout: float = TIMEOUT) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.sent = 0

    @abstractmethod
    def start(
        self,
        sends: Sequence[tuple[int, Array]],
        receives: Sequence[tuple[int, Shape, np.dtype[Any]]],
    ) -> Pending:
        """Start to send arrays to ranks, and to receive arrays of these shapes and types from
        ranks.

        The arrays that are sent may not change before the exchange ends. A rank sends nothing to
        itself.
        """

    @abstractmethod
    def abort(self, message: str) -> None:
        """Tell all other ranks that this one failed, so that they stop waiting."""

    def exchange(self, parts: Sequence[Array], shapes: Sequence[Shape]) -> list[Array]:
        """Send `parts[r]` to each rank r, and return what each rank sent here, of these shapes and
        the same type. The own part is returned as it is. Raises RankError."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        dtype = parts[self.rank].dtype
        pending = self._started(
            [(rank, parts[rank]) for rank in others],
            [(rank, shapes[rank], dtype) for rank in others],
        )
        received = dict(zip(others, pending.wait(), strict=True))
        return [parts[rank] if rank == self.rank else received[rank] for rank in range(self.size)]

    def gather_all(self, part: Array, shapes: Sequence[Shape]) -> list[Array]:
        """The arrays of all ranks; that of rank r has the shape `shapes[r]`. Raises RankError."""
        return self.exchange([part] * self.size, shapes)

    def collect(self, part: Array, shapes: Sequence[Shape], root: int = 0) -> list[Array]:
        """The arrays of all ranks at rank `root`, and an empty list elsewhere. Raises RankError."""
        if self.rank != root:
            self._started([(root, part)], []).wait()
            return []
        others = [rank for rank in range(self.size) if rank != root]
        received = self._started([], [(rank, shapes[rank], part.dtype) for rank in others]).wait()
        return [*received[:root], part, *received[root:]]

    def pass_on(self, arrays: Sequence[Array], shapes: Sequence[Shape]) -> Pending:
        """Start to send arrays to the next rank, and to receive as many of these shapes from the
        previous one."""
        following, previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        wanted = [
            (previous, shape, array.dtype) for array, shape in zip(arrays, shapes, strict=True)
        ]
        return self._started([(following, array) for array in arrays], wanted)

    def share(self, message: bytes) -> list[bytes]:
        """The short messages of all ranks. Raises RankError."""
        sizes = self.gather_all(np.array([len(message)], np.int64), [(1,)] * self.size)
        parts = self.gather_all(
            np.frombuffer(message, np.uint8), [(int(size[0]),) for size in sizes]
        )
        return [part.tobytes() for part in parts]

    def _started(
        self,
        sends: Sequence[tuple[int, Array]],
        receives: Sequence[tuple[int, Shape, np.dtype[Any]]],
    ) -> Pending:
        # ascontiguousarray makes a vector of a scalar
        contiguous = [
            (rank, np.ascontiguousarray(array).reshape(array.shape)) for rank, array in sends
        ]
        self.sent += sum(array.nbytes for _, array in contiguous)
        return self.start(contiguous, receives)

    def too_late(self) -> RankError:
        """The error after a wait that was too long."""
        return RankError(
            f"waited {self.timeout:g} s for another rank, which ended or is still computing; "
            "--timeout sets how long a rank waits"
        )


class Alone(Communicator):
    """The only rank of a group of one."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def start(
        self,
        sends: Sequence[tuple[int, Array]],
        receives: Sequence[tuple[int, Shape, np.dtype[Any]]],
    ) -> Pending:
        """Nothing is sent and nothing is received."""
        return _Nothing()

    def pass_on(self, arrays: Sequence[Array], shapes: Sequence[Shape]) -> Pending:
        """There is nobody to pass anything to."""
        raise RankError("a ring needs more than one rank")

    def abort(self, message: str) -> None:
        """There is nobody to tell."""


class _Nothing(Pending):
    def wait(self) -> list[Array]:
        return []


def as_bytes(array: Array) -> Array:
    """The memory of a contiguous array as bytes."""
    return array.reshape(-1).view(np.uint8)
