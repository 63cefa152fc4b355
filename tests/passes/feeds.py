"""Random inputs: operands, biases, and masks with rows that keep nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tests.passes.patterns import PATTERNS
from tests.passes.spelling import CONSTANT, Mask
from tests.passes.writer import Array

Maker = Callable[[np.random.Generator], Array]


def normal(shape: Sequence[int], dtype: str) -> Maker:
    def make(rng: np.random.Generator) -> Array:
        # Now and then scores of some hundreds: one key wins, the others underflow.
        size = 1.0 if dtype == "float16" else float(rng.choice([1.0, 1.0, 5.0]))
        return (rng.standard_normal(shape) * size).astype(dtype)

    return make


def bias(shape: Sequence[int], dtype: str, infinite: bool) -> Maker:
    def make(rng: np.random.Generator) -> Array:
        bias = rng.standard_normal(shape)
        if infinite:
            bias = np.where(random_keep(shape, np.bool_)(rng), bias, -np.inf)
        return bias.astype(dtype)

    return make


def random_keep(shape: Sequence[int], dtype: npt.DTypeLike) -> Maker:
    def make(rng: np.random.Generator) -> Array:
        keep = rng.random(shape) < rng.choice([0.2, 0.6, 0.9])
        # Whole rows without any key: where most fusers go wrong.
        empty = rng.random((*shape[:-1], 1)) < 0.3
        return (keep & ~empty).astype(dtype)

    return make


def small_bound(rng: np.random.Generator) -> Array:
    """By how much a bound is moved."""
    return rng.integers(-1, 3, 1)


def triangle(shape: Sequence[int], empty: bool) -> Array:
    """A triangle, with one row masked everywhere if it is to have an empty row."""
    keep = np.tril(np.ones(shape, np.bool_)) if len(shape) > 1 else np.arange(shape[0]) % 3 != 1
    if empty:
        keep[(..., shape[-2] // 2, slice(None)) if len(shape) > 1 else ...] = False
    return keep


def kept(mask: Mask, name: str, feeds: Mapping[str, Array], sizes: Sequence[int]) -> Array:
    """The mask as a boolean array of its dimensions."""
    if mask.computed:
        keep = PATTERNS[mask.pattern].kept(*sizes[-2:], int(feeds[f"{name}_bound"][0]) if mask.bound else 0)
        if mask.padding:
            keep = keep & feeds[name].reshape(sizes[0], *[1] * (len(sizes) - 2), sizes[-1])
        return keep
    if mask.source in CONSTANT:
        return triangle(sizes, mask.source == "const_empty")
    return feeds[name].reshape(sizes) != 0
