"""AddLayerNorm: adds two tensors and a bias, and normalises the rows of the sum as LayerNorm does.

    x = x1 + x2 + bias;  y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon) gamma + beta

The means are over the axes of gamma, which are the last ones of x. The sum is not rounded before it
is normalised.
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import OpCall, Output, operator
from fa_compiler.reference.ops.layer_norm_v4 import normalised


@operator("AddLayerNorm")
def add_layer_norm(call: OpCall) -> dict[str, Output]:
    """y and the sum x in the shape of x1, of the type of x1 and x2 or of float32 where these
    differ; mean and rstd in float32, with size 1 along the axes of gamma."""
    first, second, bias = call.tensor("x1"), call.tensor("x2"), call.optional("bias")
    gamma, beta = (call.tensor(name).astype(np.float64) for name in ("gamma", "beta"))
    float32 = np.dtype(np.float32)
    dtype = first.dtype if first.dtype == second.dtype else float32
    with np.errstate(invalid="ignore", over="ignore"):
        x = first.astype(np.float64) + second.astype(np.float64)
        if bias is not None:
            x = x + bias.astype(np.float64)
        rows = normalised(x, gamma.ndim, call.attrs["epsilon"])
        y = rows.values * gamma + beta
    return {
        "y": Output(y, dtype),
        "mean": Output(rows.mean, float32),
        "rstd": Output(rows.rstd, float32),
        "x": Output(x, dtype),
    }
