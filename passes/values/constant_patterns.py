"""Regular contents of constant arrays: positions, and bands of diagonals, prefixes and blocks in
matrices of two numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_LARGEST = 2**53
CHANGES_PER_ROW = 3
"""In a matrix with one band, the numbers change at most so often in a row: at both ends of the
band, and at the start of the row."""


def even_steps(array: np.ndarray) -> list[int] | None:
    """The step along each dimension of integers that are linear in their position; None for other
    integers. Integers beyond 2^53 are refused, because their differences may exceed 64 bits."""
    if max(-int(array.min()), int(array.max())) > _LARGEST:
        return None
    first = array.reshape(-1)[0]
    steps: list[int] = []
    expected = np.full(array.shape, int(first), dtype=np.int64)
    for axis, size in enumerate(array.shape):
        step = 0
        if size > 1:
            place: list[int] = [0] * array.ndim
            place[axis] = 1
            step = int(array[tuple(place)]) - int(first)
            along = np.arange(size, dtype=np.int64).reshape(-1, *[1] * (array.ndim - axis - 1))
            expected = expected + step * along
        steps.append(step)
    if not np.array_equal(expected, array.astype(np.int64)):
        return None
    return steps


def bits(array: np.ndarray) -> np.ndarray:
    """The elements as unsigned integers where their size allows: 0.0 and -0.0 are equal numbers,
    but x / 0.0 is not x / -0.0."""
    size = array.dtype.itemsize
    if size not in (1, 2, 4, 8):
        return array
    return np.ascontiguousarray(array).view(f"u{size}")


@dataclass(frozen=True)
class TwoNumbers:
    """A matrix that holds two numbers, row by row: it starts with `numbers[0]`, and goes from one
    number to the other at each of the flat positions `changes`, which ascend."""

    shape: tuple[int, int]
    numbers: tuple[float | int, float | int]
    changes: np.ndarray

    @staticmethod
    def of(plane: np.ndarray) -> TwoNumbers | None:
        """A matrix in memory; None where it does not hold two numbers, or where they change too
        often for a band."""
        flat = plane.reshape(-1)
        first = flat == flat[0]
        others = flat[~first]
        changes = np.flatnonzero(first[1:] != first[:-1]) + 1
        rows, columns = plane.shape
        if (
            not first[0]
            or not others.size
            or len(changes) > CHANGES_PER_ROW * rows
            or (others != others[0]).any()
        ):
            return None
        return TwoNumbers((rows, columns), (flat[0].item(), others[0].item()), changes)

    def intervals(self, number: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Where each row holds `numbers[number]`: from the first column up to the second one, which
        does not belong to it. Both are 0 for a row without the number. None where a row holds it in
        several pieces."""
        rows, columns = self.shape
        starts = np.union1d(self.changes, np.arange(rows, dtype=np.int64) * columns)
        own = (np.searchsorted(self.changes, starts, side="right") & 1) == number
        ends = np.append(starts[1:], rows * columns)[own]
        starts = starts[own]
        row = starts // columns
        if (row[1:] == row[:-1]).any():
            return None
        low, high = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        low[row], high[row] = starts % columns, ends - row * columns
        return low, high


@dataclass(frozen=True)
class Diagonals:
    """A matrix that holds `inside` where lower <= j - i <= upper or j < prefix, else `outside`.

    A bound of None does not limit; with a prefix there is no `lower`. With `ends` the matrix is
    square, and it holds `outside` also where i and j are not in the same block: `ends` are the ends
    of consecutive blocks of its diagonal.
    """

    lower: int | None
    upper: int | None
    prefix: int
    inside: float | int
    outside: float | int
    ends: tuple[int, ...] = ()


def diagonals(matrix: TwoNumbers) -> Diagonals | None:
    """The band of diagonals, with a prefix, in blocks or alone, that a matrix of two numbers holds;
    None for other matrices."""
    last = (
        int(np.searchsorted(matrix.changes, (matrix.shape[0] - 1) * matrix.shape[1], side="right"))
    ) & 1
    # the number in the lower left corner first: a band without a lower bound
    order = (last, 1 - last)
    numbers = {
        number: intervals for number in order if (intervals := matrix.intervals(number)) is not None
    }
    for number, intervals in numbers.items():
        for lower, upper, prefix in _bands(*intervals, matrix.shape[1]):
            return Diagonals(
                lower, upper, prefix, matrix.numbers[number], matrix.numbers[1 - number]
            )
    for number, intervals in numbers.items():
        for lower, upper, ends in _blocks(*intervals, matrix.shape[1]):
            return Diagonals(
                lower, upper, 0, matrix.numbers[number], matrix.numbers[1 - number], ends
            )
    return None


def _bands(
    low: np.ndarray, high: np.ndarray, columns: int
) -> Iterator[tuple[int | None, int | None, int]]:
    """The (lower, upper, prefix) that give every row these intervals."""
    rows = np.arange(len(low), dtype=np.int64)
    kept = low < high
    (begins,), (ends,) = np.nonzero(kept & (low > 0)), np.nonzero(kept & (high < columns))
    lower, upper = _distance(low, begins[:1]), _distance(high - 1, ends[-1:])
    first, last = _band(lower, upper, rows, columns)
    if (
        np.array_equal(kept, first < last)
        and (low == first)[kept].all()
        and (high == last)[kept].all()
    ):
        yield lower, upper, 0
    prefix = int(high[0])
    if (
        lower is None
        and upper is not None
        and high[-1] > prefix
        and np.array_equal(high, np.maximum(last, prefix))
    ):
        yield None, upper, prefix


def _blocks(
    low: np.ndarray, high: np.ndarray, columns: int
) -> Iterator[tuple[int | None, int | None, tuple[int, ...]]]:
    """The (lower, upper, ends) of several blocks that give every row these intervals. Every row
    holds its own column; a block ends where neither of two neighbours holds the other's."""
    rows = np.arange(len(low), dtype=np.int64)
    if len(low) != columns or (low > rows).any() or (high <= rows).any():
        return
    starts = np.flatnonzero((low[1:] > rows[:-1]) & (high[:-1] <= rows[1:])) + 1
    bounds = np.concatenate([[0], starts, [columns]])
    block = np.searchsorted(starts, rows, side="right")
    first, last = bounds[block], bounds[block + 1]
    (begins,), (stops,) = np.nonzero(low > first), np.nonzero(high < last)
    lower, upper = _distance(low, begins[:1]), _distance(high - 1, stops[:1])
    from_, to = _band(lower, upper, rows, columns)
    alike = np.array_equal(low, np.maximum(first, from_)) and np.array_equal(
        high, np.minimum(last, to)
    )
    if len(starts) and alike:
        yield lower, upper, tuple(bounds[1:].tolist())


def _distance(columns: np.ndarray, row: np.ndarray) -> int | None:
    """The distance j - i of the column j that belongs to a row i; None where there is no row."""
    if not len(row):
        return None
    return int(columns[row[0]] - row[0])


def _band(
    lower: int | None, upper: int | None, rows: np.ndarray, columns: int
) -> tuple[np.ndarray, np.ndarray]:
    """The first column of a band in each row, and the column behind the last one."""
    first, last = np.zeros_like(rows), np.full_like(rows, columns)
    if lower is not None:
        first = np.clip(rows + lower, 0, columns)
    if upper is not None:
        last = np.clip(rows + upper + 1, 0, columns)
    return first, last
