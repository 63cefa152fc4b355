"""LayerNormV4: subtracts the mean of rows, divides them by their deviation, and multiplies them by
a weight.

    rstd = 1 / sqrt(mean((x - mean(x))^2) + epsilon);  y = (x - mean(x)) rstd gamma + beta

The means are over the last axes of x, whose sizes `normalized_shape` holds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fa_compiler.reference.call import Floats, OpCall, Output, operator
from fa_compiler.reference.ops.rms_norm import reciprocal


@operator("LayerNormV4")
def layer_norm_v4(call: OpCall) -> dict[str, Output]:
    """y in the shape and type of x, and mean and rstd in float32, with size 1 along the normalised
    axes."""
    x = call.tensor("x")
    gamma, beta = (call.optional(name) for name in ("gamma", "beta"))
    rows = normalised(
        x.astype(np.float64), call.tensor("normalized_shape").size, call.attrs["epsilon"]
    )
    with np.errstate(invalid="ignore", over="ignore"):
        y = rows.values * (1 if gamma is None else gamma.astype(np.float64))
        y = y + (0 if beta is None else beta.astype(np.float64))
    float32 = np.dtype(np.float32)
    return {
        "y": Output(y, x.dtype),
        "mean": Output(rows.mean, float32),
        "rstd": Output(rows.rstd, float32),
    }


class Rows(NamedTuple):
    """Rows that are normalised, with their means and the reciprocals of their deviations."""

    values: Floats
    mean: Floats
    rstd: Floats


def normalised(x: Floats, count: int, epsilon: float) -> Rows:
    """x minus its mean over the last `count` axes, divided by the deviation there."""
    axes = tuple(range(x.ndim - count, x.ndim))
    with np.errstate(invalid="ignore", over="ignore"):
        mean: Floats = np.mean(x, axis=axes, keepdims=True)
        centred = x - mean
        rstd = reciprocal(centred, count, epsilon)
        return Rows(centred * rstd, mean, rstd)
