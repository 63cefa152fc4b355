"""In which order the axes of a linear attention lie in a tensor: b batch, t tokens, h heads, d or k
key dimensions, e or v value dimensions. Axes may be merged, the tokens may be divided into chunks,
and axes of 1 may stand anywhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

ORDERS = {
    "bthd": ("bthd", "bhtd", "tbhd", "bhdt"),
    "bthe": ("bthe", "bhte", "tbhe", "bhet"),
    "bth": ("bth", "bht", "tbh"),
    "bhkv": ("bhkv", "bhvk"),
}
"""The orders that are looked for, by the axes, the usual ones first."""


def orders(shape: Sequence[int], sizes: Mapping[str, int]) -> list[str]:
    """The orders of axes of these sizes that a tensor of this shape can have, the usual ones first.
    Orders in which only axes of 1 stand elsewhere are one."""
    if math.prod(shape) != math.prod(sizes.values()):
        return []
    return [*_orders(tuple(size for size in shape if size != 1), tuple(sizes.items()))]


def without_units(order: str, sizes: Mapping[str, int]) -> list[str]:
    """The axes that are not 1, in their order."""
    return [letter for letter in order if sizes[letter] != 1]


def has_order(shape: Sequence[int], order: str, sizes: Mapping[str, int]) -> bool:
    """Can a tensor of this shape have axes of these sizes in this order?"""
    axes = without_units(order, sizes)
    dims = [size for size in shape if size != 1]
    return math.prod(dims) == math.prod(sizes.values()) and _fits(
        dims, [sizes[letter] for letter in axes], axes
    )


@lru_cache(maxsize=4096)
def _orders(dims: tuple[int, ...], sizes: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    own, found = dict(sizes), dict[str, str]()
    for order in ORDERS["".join(own)]:
        axes = without_units(order, own)
        if _fits(dims, [own[letter] for letter in axes], axes):
            found.setdefault("".join(axes), order)
    return tuple(found.values())


def _ends(sizes: Sequence[int]) -> list[int]:
    """The products of the first sizes."""
    ends, total = [], 1
    for size in sizes:
        total *= size
        ends.append(total)
    return ends


def _fits(shape: Sequence[int], sizes: Sequence[int], order: Sequence[str]) -> bool:
    """Is each dimension a number of whole axes, or a part of the tokens?"""
    own, ends = set(_ends(shape)), _ends(sizes)
    starts = [1, *ends[:-1]]
    for end in own - set(ends):
        inside = [place for place, letter in enumerate(order) if starts[place] < end < ends[place]]
        if [order[place] for place in inside] != ["t"]:
            return False
        (place,) = inside
        if (
            ends[place] not in own
            or starts[place] not in {1, *own}
            or end % starts[place]
            or ends[place] % end
        ):
            return False
    return True


def arranged(array: np.ndarray, order: str, sizes: Mapping[str, int]) -> np.ndarray:
    """The array with one dimension for each axis, in the order of `sizes`."""
    split = array.reshape([sizes[letter] for letter in order])
    return np.transpose(split, [order.index(letter) for letter in sizes])


def axes_of_dims(shape: Sequence[int], order: str, sizes: Mapping[str, int]) -> list[str]:
    """The axes of each dimension of a tensor that has them in this order: none of a dimension of 1,
    several that are merged, and the tokens of each dimension that they are divided into."""
    letters = without_units(order, sizes)
    found, place, done = [], 0, 1
    for size in shape:
        own = ""
        left = size
        while left != 1:
            letter = letters[place]
            part = sizes[letter] // done
            own += letter
            if left >= part:
                left, place, done = left // part, place + 1, 1
            else:
                done, left = done * left, 1
        found.append(own)
    return found
