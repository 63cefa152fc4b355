"""AddRmsNorm: adds two tensors, and normalises the rows of the sum as RmsNorm does.

    x = x1 + x2;  rstd = 1 / sqrt(mean(x^2) + epsilon);  y = x rstd gamma

As on A2 and A3, x is rounded to the type of x1 before it is normalised, and so is x rstd before
gamma multiplies it.
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import Floats, OpCall, Output, operator
from fa_compiler.reference.ops.rms_norm import reciprocal


@operator("AddRmsNorm")
def add_rms_norm(call: OpCall) -> dict[str, Output]:
    """y and the sum x in the shape and type of x1, and rstd in float32, with size 1 along the axes
    of gamma."""
    first, second, gamma = (call.tensor(name) for name in ("x1", "x2", "gamma"))

    def rounded(values: Floats) -> Floats:
        return values if call.exact else values.astype(first.dtype).astype(np.float64)

    with np.errstate(invalid="ignore", over="ignore"):
        x = rounded(first.astype(np.float64) + second.astype(np.float64))
        rstd = reciprocal(x, gamma.ndim, call.attrs["epsilon"])
        y = rounded(x * rstd) * gamma.astype(np.float64)
    return {
        "y": Output(y, first.dtype),
        "rstd": Output(rstd, np.dtype(np.float32)),
        "x": Output(x, first.dtype),
    }
