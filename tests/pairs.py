"""Fewer cases than a product of parameters has, with every two values together in one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import combinations, product
from typing import Any

_Pair = tuple[int, int, int, int]
"""Two axes, each with the place of one of its values behind it."""


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows with one value of each axis, such that any two values of two axes meet in at least one row.

    Always the same rows; about as many as the two longest axes have pairs.
    """
    missing = {
        (first, a, second, b)
        for first, second in combinations(range(len(axes)), 2)
        for a, b in product(range(len(axes[first])), range(len(axes[second])))
    }
    rows = []
    while missing:
        first, a, second, b = min(missing)
        row = {first: a, second: b}
        for axis in sorted(set(range(len(axes))) - set(row), key=lambda each: -len(axes[each])):
            row[axis] = _best(axis, len(axes[axis]), row, missing)
        missing -= {_pair(one, row[one], other, row[other]) for one, other in combinations(row, 2)}
        rows.append(tuple(values[row[axis]] for axis, values in enumerate(axes)))
    return rows


def _best(axis: int, size: int, row: Mapping[int, int], missing: AbstractSet[_Pair]) -> int:
    """The value of an axis that makes the most missing pairs with those of the row; the first of equals."""
    gains = [sum(_pair(axis, value, *taken) in missing for taken in row.items()) for value in range(size)]
    return gains.index(max(gains))


def _pair(one: int, a: int, other: int, b: int) -> _Pair:
    return (one, a, other, b) if one < other else (other, b, one, a)
