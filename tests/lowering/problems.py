"""Attention problems for the kernel tests: random inputs of a given form, and the comparison with the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from fa_compiler import ops, reference
from fa_compiler.op_registry.constraints.training import compressed_mask

OP = "FlashAttentionScore"
OUTPUTS = ("softmax_max", "softmax_sum", "attention_out")
Inputs = dict[str, np.ndarray]

DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

# One unit in the last place of each type, because both sides are rounded.
_ROUNDING = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

# Where nothing is known of the problem: twice what the bounds below give for the forms of these tests.
_PLAIN = 1e-5

TRIANGLE = compressed_mask(2)
"""The compressed mask of sparse_mode 2, 3, 4, 7 and 8: above the diagonal nothing is attended. The registry knows this
array, and does not compare it with what the mode wants; tests/op_registry/ has copies and wrong ones."""

PREFIX_MASK = compressed_mask(6)
"""The compressed mask of sparse_mode 6: the triangle, and 1024 rows whose right half is not attended."""


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

    def _tensor(self, rng: np.random.Generator, length: int | tuple[int, ...], heads: int, size: int) -> np.ndarray:
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


@dataclass(frozen=True)
class Bounds:
    """Largest errors: of a score, and of a probability or a sum of them relative to itself."""

    score: float
    relative: float
    probability: float  # rounding of a probability that shows in the output only, relative to itself
    value: float  # largest magnitude that probabilities are multiplied with

    def of(self, name: str) -> tuple[float, float]:
        """The absolute and the relative part of the bound of an output."""
        if name == "attention_out":
            return (self.relative + self.probability) * self.value, 0.0
        return (self.score, 0.0) if name == "softmax_max" else (0.0, self.relative)


def bounds(inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> Bounds:
    """What float32 arithmetic may do to a problem, whatever the order of the sums.

    Rounding errors of a sum of n products are independent enough that they grow as sqrt(n), not n; with the norms
    |q| |k| in place of the partial sums, which are smaller by sqrt(n) on average, this has never been close to
    failing. With u = 2^-24 a score is wrong by at most

        e = sqrt(D) u |scale| |q| |k|  +  4 u (|scale| |q| |k| + |bias|)

    (the product; scale, bias and what a generated bias is made of), and with a soft cap c by 8 u min(|scale| |q| |k|,
    c) more (tanh, its argument, and the factor c). A probability is wrong by 2 e of itself (its own score and the
    largest one) and by 4 u (exp and its argument's reduction). A sum of S2 of them is wrong by sqrt(S2) u more, once in
    P V and once in the softmax's sum. Equal terms may all be rounded one way: S2 u / 2 more. Beside bfloat16 inputs a
    probability may be rounded to bfloat16 before it meets the values: 2^-9 more, in the output only.
    """
    unit = 2.0**-24
    depth, norm = 0, {"query": 0.0, "key": 0.0}
    for part in ("", "_rope"):
        if f"query{part}" not in inputs:
            continue
        last = inputs[f"query{part}"].shape[-1]
        size = last // attrs["head_num"] if attrs["input_layout"] in ("BSH", "SBH") else last
        depth += size
        for name in norm:
            rows = _finite(inputs[name + part]).reshape(-1, size) if size else np.zeros((1, 1))
            norm[name] += float((rows**2).sum(axis=1).max(initial=0.0))
    product = abs(attrs["scale_value"]) * math.sqrt(norm["query"] * norm["key"])
    bias = 0.0
    if "real_shift" in inputs:
        bias = float(np.abs(_finite(inputs["real_shift"])).max(initial=0.0))
        if attrs["pse_type"] == 1:
            bias *= abs(attrs["scale_value"])
        elif attrs["pse_type"] >= 2:
            starts = [int(inputs[name][0]) if name in inputs else 0 for name in ("q_start_idx", "kv_start_idx")]
            bias *= max(inputs["query"].shape[:3]) + abs(starts[1] - starts[0])
    if attrs.get("cpu_masked_bias") == "added":
        bias += abs(float(_finite(np.asarray(attrs.get("cpu_mask_value", 0.0)))))  # a masked key's score is both
    keys = max(inputs["key"].shape[:3])
    score = math.sqrt(depth) * unit * product + 4 * unit * (product + bias)
    if "cpu_softcap" in attrs:
        score += 8 * unit * min(product, attrs["cpu_softcap"])
    equal = product + bias == 0.0 or "cpu_mask_value" in attrs
    relative = 2 * score + (4 + 2 * math.sqrt(keys) + (keys / 2 if equal else 0.0)) * unit
    value = float(np.abs(_finite(inputs["value"])).max(initial=0.0)) / attrs.get("keep_prob", 1.0)
    probability = 2.0**-9 if inputs["query"].dtype == DTYPES["bfloat16"] else 0.0
    return Bounds(score, relative, probability, value)


def _finite(array: np.ndarray) -> np.ndarray:
    """As float64; what is not finite, or so low that it swallows every score, is 0."""
    wide = array.astype(np.float64)
    return np.where(np.abs(wide) < 1e30, wide, 0.0)


def check(
    inputs: Mapping[str, Any], attrs: Mapping[str, Any], outputs: Sequence[str] = OUTPUTS
) -> dict[str, np.ndarray]:
    """Runs the kernel and the reference, asserts that they agree, and returns what the kernel gave."""
    got = ops.run(OP, inputs, attrs, outputs)
    want = reference.run(OP, inputs, attrs, outputs)
    allowed = bounds(inputs, {"pse_type": 1, "scale_value": 1.0, **attrs})
    for name in outputs:
        assert got[name].dtype == want[name].dtype, name
        assert got[name].shape == want[name].shape, name
        agree(got[name], want[name], name, *allowed.of(name))
    if len(outputs) > 1 and "attention_out" in outputs:
        # Where nobody reads the statistics, few rows are computed another way (see Problem::keeps_statistics).
        alone = ops.run(OP, inputs, attrs, ["attention_out"])["attention_out"]
        agree(alone, want["attention_out"], "attention_out alone", *allowed.of("attention_out"))
    return got


def agree(got: np.ndarray, want: np.ndarray, name: str, absolute: float | None = None, relative: float = 0.0) -> None:
    """NaN and infinity in the same places, finite values within the bounds and the rounding of their type. Without
    bounds: within 1e-5 of the largest value."""
    rounding = _ROUNDING[want.dtype.name]
    got, want = got.astype(np.float64), want.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want), f"{name}: NaN positions")
    infinite = np.isinf(want)
    np.testing.assert_array_equal(np.isinf(got), infinite, f"{name}: infinity positions")
    np.testing.assert_array_equal(got[infinite], want[infinite], f"{name}: signs of infinity")
    finite = np.isfinite(want)
    # The statistics of an empty row (-FLT_MAX, FLT_MAX) are exact.
    limits = np.abs(want) > 1e38
    np.testing.assert_array_equal(got[limits & finite], want[limits & finite], name)
    finite &= ~limits
    if not finite.any():
        return
    if absolute is None:
        absolute = _PLAIN * np.abs(want[finite]).max()
    # 2^-24: the smallest float16.
    allowed = absolute + (relative + rounding) * np.abs(want[finite]) + 2.0**-24
    error = np.abs(got[finite] - want[finite])
    worst = int(np.argmax(error / allowed))
    assert error[worst] <= allowed[worst], (
        f"{name}: {got[finite][worst]} is {error[worst]:.3g} off {want[finite][worst]}, allowed {allowed[worst]:.3g}"
    )
