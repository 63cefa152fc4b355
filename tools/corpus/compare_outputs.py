"""Compares two runs of one model, output by output. Needs only numpy.

This comparison is independent of `fa-compiler verify` on purpose: the same mistake cannot be in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2, "float64": 1e-9}
"""The largest allowed difference, relative to the largest finite value of the output.

On these models, ONNX Runtime with and without its optimisations differs by up to 5e-6 in float32 and 7.5e-4 in float16.
The rounding step of bfloat16 is eight times that of float16. No fused operator takes float64, so a float64 model may
only differ by the order of its operations.
"""


@dataclass(frozen=True)
class Difference:
    """The result for one output. `problem` is None if the outputs agree.

    `error` is the largest difference, relative to the largest finite value of the original.
    """

    name: str
    dtype: str
    error: float
    problem: str | None


def compare(
    names: Sequence[str],
    original: Sequence[np.ndarray],
    optimised: Sequence[np.ndarray],
    coarsest: str | None = None,
) -> list[Difference]:
    """Compare outputs pairwise.

    `coarsest` names the coarsest float type of the model. A float32 output that was cast from float16 has float16's
    rounding errors, so float16's tolerance applies to it.
    """
    if len(names) != len(original) or len(names) != len(optimised):
        text = f"{len(original)} outputs became {len(optimised)}"
        return [Difference("", "", np.inf, text)]
    return [_one(*item, coarsest) for item in zip(names, original, optimised, strict=True)]


def tolerance_of(dtype: str, coarsest: str | None) -> float:
    """The tolerance of an output of a float type, in a model whose coarsest type is `coarsest`."""
    return max(TOLERANCES[dtype], TOLERANCES.get(coarsest or "", 0.0))


def _one(name: str, a: np.ndarray, b: np.ndarray, coarsest: str | None) -> Difference:
    a, b = np.asarray(a), np.asarray(b)
    dtype = str(a.dtype)

    def verdict(error: float, problem: str | None) -> Difference:
        return Difference(name, dtype, error, problem)

    if a.dtype != b.dtype:
        return verdict(np.inf, f"dtype {a.dtype} became {b.dtype}")
    if a.shape != b.shape:
        return verdict(np.inf, f"shape {list(a.shape)} became {list(b.shape)}")
    if dtype not in TOLERANCES:
        same = bool(np.array_equal(a, b))
        return verdict(
            0.0 if same else np.inf,
            None if same else f"{int((a != b).sum())} values changed",
        )
    tolerance = tolerance_of(dtype, coarsest)
    x, y = a.astype(np.float64), b.astype(np.float64)
    for what, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        before, after = test(x), test(y)
        if (before != after).any():
            counts = f"{int(before.sum())} before, {int(after.sum())} after"
            return verdict(np.inf, f"{what} positions differ ({counts} of {x.size})")
    finite = np.isfinite(x)
    if not finite.any():
        return verdict(0.0, None)
    gap = float(np.abs(x[finite] - y[finite]).max())
    largest = float(np.abs(x[finite]).max())
    error = 0.0 if gap == 0 else gap / largest if largest else np.inf
    problem = None if error <= tolerance else f"differs by {error:.2e} of the largest value (allowed {tolerance:g})"
    return verdict(error, problem)
