"""Regular contents of constant arrays: positions and bands of diagonals."""

from __future__ import annotations

import numpy as np

_LARGEST = 2**53


def even_steps(array: np.ndarray) -> list[int] | None:
    """The step along each dimension of integers that are linear in their position; None for other integers. Integers
    beyond 2^53 are refused, because their differences may exceed 64 bits."""
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
            along = np.arange(size, dtype=np.int64).reshape([-1 if k == axis else 1 for k in range(array.ndim)])
            expected = expected + step * along
        steps.append(step)
    return steps if np.array_equal(expected, array.astype(np.int64)) else None


def diagonals(plane: np.ndarray) -> tuple[int | None, int | None, np.generic, np.generic] | None:
    """(lower, upper, inside, outside) of a matrix that holds `inside` where lower <= j - i <= upper, else `outside`. A
    lower of None does not limit. The result is None for other matrices."""
    rows, columns = plane.shape
    edge = np.concatenate([plane[:0:-1, 0], plane[0, :]])
    distances = np.arange(-(rows - 1), columns)
    changes = np.flatnonzero(edge[1:] != edge[:-1])
    if not 1 <= len(changes) <= 2:
        return None
    if len(changes) == 1:
        upper = int(distances[changes[0]])
        lower, inside, outside = None, edge[0], edge[-1]
    else:
        lower, upper = int(distances[changes[0] + 1]), int(distances[changes[1]])
        inside, outside = edge[changes[0] + 1], edge[0]
    distance = np.arange(columns)[None, :] - np.arange(rows)[:, None]
    kept = distance <= upper
    if lower is not None:
        kept &= distance >= lower
    return (lower, upper, inside, outside) if np.array_equal(np.where(kept, inside, outside), plane) else None
