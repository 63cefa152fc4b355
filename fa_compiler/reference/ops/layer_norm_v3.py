"""LayerNormV3: subtracts the mean of rows, divides them by their deviation, and multiplies them by
a weight.

    rstd = 1 / sqrt(mean((x - mean(x))^2) + epsilon);  y = (x - mean(x)) rstd gamma + beta

The means are over the axes of x from begin_norm_axis on. gamma and beta have its axes from
begin_params_axis on.
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import OpCall, Output, operator
from fa_compiler.reference.ops.layer_norm_v4 import normalised


@operator("LayerNormV3")
def layer_norm_v3(call: OpCall) -> dict[str, Output]:
    """y in the shape and type of x, and mean and rstd in the type of gamma, with size 1 along the
    normalised axes."""
    x, gamma, beta = (call.tensor(name) for name in ("x", "gamma", "beta"))
    count = x.ndim - call.attrs["begin_norm_axis"] % x.ndim
    rows = normalised(x.astype(np.float64), count, call.attrs["epsilon"])
    with np.errstate(invalid="ignore", over="ignore"):
        y = rows.values * gamma.astype(np.float64) + beta.astype(np.float64)
    return {
        "y": Output(y, x.dtype),
        "mean": Output(rows.mean, gamma.dtype),
        "rstd": Output(rows.rstd, gamma.dtype),
    }
