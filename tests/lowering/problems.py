"""Attention problems for the kernel tests: random inputs of a given form, and the comparison with the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from fa_compiler import ops, reference

OP = "FlashAttentionScore"
OUTPUTS = ("softmax_max", "softmax_sum", "attention_out")
Inputs = dict[str, np.ndarray]

DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

# Largest error, relative to the largest finite value of the output. float32: sums of up to 2048 terms and an exp
# good to 1e-7 of scores up to about 10, in another order than the reference. The narrow types add one unit in the
# last place of the result (2^-10, 2^-7), because both sides are rounded; inside, everything is float32.
TOLERANCE = {"float32": 1e-5, "float16": 2**-10 + 1e-5, "bfloat16": 2**-7 + 1e-5}

TRIANGLE = np.triu(np.ones((2048, 2048), np.bool_), 1)
"""The constant mask of sparse_mode 2, 3, 4, 7 and 8."""

PREFIX_MASK = np.zeros((3072, 2048), np.bool_)
"""The constant mask of sparse_mode 6: the triangle, and 1024 rows whose right half is not attended."""
PREFIX_MASK[:2048] = TRIANGLE
PREFIX_MASK[2048:, 1024:] = True


@dataclass(frozen=True)
class Form:
    """The form of a problem; for TND `queries` and `keys` are lists of lengths, one for each batch."""

    layout: str = "BNSD"
    dtype: str = "float32"
    batch: int = 2
    heads: int = 2
    kv_heads: int = 2
    queries: int | tuple[int, ...] = 33
    keys: int | tuple[int, ...] = 29
    size: int = 16
    value_size: int | None = None
    attrs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def all_attrs(self) -> dict[str, Any]:
        return {
            "head_num": self.heads,
            "input_layout": self.layout,
            "scale_value": 1.5 * self.size**-0.5,
            **self.attrs,
        }

    def inputs(self, rng: np.random.Generator) -> Inputs:
        """Standard normal query, key and value, and for TND the cumulative lengths."""
        value_size = self.size if self.value_size is None else self.value_size
        inputs = {
            "query": self._tensor(rng, self.queries, self.heads, self.size),
            "key": self._tensor(rng, self.keys, self.kv_heads, self.size),
            "value": self._tensor(rng, self.keys, self.kv_heads, value_size),
        }
        if self.layout == "TND":
            inputs["actual_seq_qlen"] = np.cumsum(self.queries, dtype=np.int64)
            inputs["actual_seq_kvlen"] = np.cumsum(self.keys, dtype=np.int64)
        return inputs

    def _tensor(
        self, rng: np.random.Generator, length: int | tuple[int, ...], heads: int, size: int
    ) -> np.ndarray:
        b, s, n, d = self.batch, int(np.sum(length)), heads, size
        shape = {
            "BSH": (b, s, n * d),
            "SBH": (s, b, n * d),
            "BSND": (b, s, n, d),
            "BNSD": (b, n, s, d),
            "TND": (s, n, d),
        }[self.layout]
        return rng.standard_normal(shape).astype(DTYPES[self.dtype])


def mask(rng: np.random.Generator, shape: Sequence[int], share: float = 0.4) -> np.ndarray:
    """Random booleans, True (not attended) with probability `share`; row 0 of each matrix sees key 0."""
    array = rng.random(tuple(shape)) < share
    array[..., 0] = False
    return array


def check(
    inputs: Mapping[str, Any], attrs: Mapping[str, Any], outputs: Sequence[str] = OUTPUTS
) -> dict[str, np.ndarray]:
    """Runs the kernel and the reference, asserts that they agree, and returns what the kernel gave."""
    got = ops.run(OP, inputs, attrs, outputs)
    want = reference.run(OP, inputs, attrs, outputs)
    for name in outputs:
        assert got[name].dtype == want[name].dtype, name
        assert got[name].shape == want[name].shape, name
        agree(got[name], want[name], name)
    return got


def agree(got: np.ndarray, want: np.ndarray, name: str) -> None:
    """NaN and infinity in the same places, finite values within the tolerance of their type."""
    tolerance = TOLERANCE[want.dtype.name]
    got, want = got.astype(np.float64), want.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want), f"{name}: NaN positions")
    infinite = np.isinf(want)
    np.testing.assert_array_equal(np.isinf(got), infinite, f"{name}: infinity positions")
    np.testing.assert_array_equal(got[infinite], want[infinite], f"{name}: signs of infinity")
    finite = np.isfinite(want)
    # The statistics of an empty row (-FLT_MAX, FLT_MAX) are exact and must not set the scale for the others.
    limits = np.abs(want) > 1e38
    np.testing.assert_array_equal(got[limits & finite], want[limits & finite], name)
    finite &= ~limits
    if finite.any():
        scale = np.abs(want[finite]).max()
        error = np.abs(got[finite] - want[finite]).max()
        assert error <= tolerance * scale, f"{name}: error {error:.3g} at values up to {scale:.3g}"
