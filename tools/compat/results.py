"""Compares what a model gives in another program with what it gives in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def difference(
    got: Sequence[np.ndarray], wanted: Sequence[np.ndarray], tolerance: Callable[[np.dtype[np.generic]], float]
) -> str:
    """How results differ; empty if they agree.

    NaN has to be in the same places. Integers and infinities have to be equal, and other numbers as near as the
    tolerance of their type says, relative to the largest finite value of the output.
    """
    for place, (one, other) in enumerate(zip(got, wanted, strict=True)):
        if one.shape != other.shape:
            return f"output {place} has the shape {list(one.shape)} instead of {list(other.shape)}"
        if other.dtype.kind != "f":
            if not np.array_equal(one, other):
                return f"output {place} has other integers"
            continue
        left, right = one.astype(np.float64), other.astype(np.float64)
        if not np.array_equal(np.isnan(left), np.isnan(right)):
            return f"output {place} has NaN elsewhere"
        with np.errstate(invalid="ignore"):
            far = np.abs(left - right)[~(np.isnan(right) | (left == right))]
        largest = float(np.abs(right[np.isfinite(right)]).max(initial=0.0))
        if far.size and not far.max() <= tolerance(other.dtype) * max(largest, 1e-30):
            return f"output {place} differs by {far.max():.1e} of {largest:.1e}"
    return ""
