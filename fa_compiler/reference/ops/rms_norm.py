"""RmsNorm: divides rows by their root mean square, and multiplies them by a weight.

    rstd = 1 / sqrt(mean(x^2) + epsilon);  y = x rstd gamma

The mean is over the axes of gamma, which are the last ones of x.
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import Floats, OpCall, Output, operator


@operator("RmsNorm")
def rms_norm(call: OpCall) -> dict[str, Output]:
    """y in the shape and type of x, and rstd in float32, with size 1 along the axes of gamma."""
    return scaled(call, call.tensor("gamma").astype(np.float64))


def scaled(call: OpCall, weight: Floats) -> dict[str, Output]:
    """x divided by its root mean square along the axes of a weight and multiplied by it, and the
    reciprocal."""
    x = call.tensor("x")
    rstd = reciprocal(x.astype(np.float64), weight.ndim, call.attrs["epsilon"])
    with np.errstate(invalid="ignore", over="ignore"):
        y = x.astype(np.float64) * rstd * weight
    return {"y": Output(y, x.dtype), "rstd": Output(rstd, np.dtype(np.float32))}


def reciprocal(x: Floats, count: int, epsilon: float) -> Floats:
    """The reciprocal of the root mean square of x over its last `count` axes, with size 1 along
    them."""
    axes = tuple(range(x.ndim - count, x.ndim))
    with np.errstate(over="ignore", divide="ignore"):
        result: Floats = 1 / np.sqrt(
            np.mean(np.square(x), axis=axes, keepdims=True) + np.float64(np.float32(epsilon))
        )
    return result
