"""GemmaRmsNorm: divides rows by their root mean square, and multiplies them by a weight plus one.

    rstd = 1 / sqrt(mean(x^2) + epsilon);  y = x rstd (1 + gamma)

The mean is over the axes of gamma, which are the last ones of x.
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import OpCall, Output, operator
from fa_compiler.reference.ops.rms_norm import reciprocal


@operator("GemmaRmsNorm")
def gemma_rms_norm(call: OpCall) -> dict[str, Output]:
    """y in the shape and type of x, and rstd in float32, with size 1 along the axes of gamma."""
    x, gamma = call.tensor("x"), call.tensor("gamma").astype(np.float64)
    rstd = reciprocal(x.astype(np.float64), gamma.ndim, call.attrs["epsilon"])
    with np.errstate(invalid="ignore", over="ignore"):
        y = x.astype(np.float64) * rstd * (1 + gamma)
    return {"y": Output(y, x.dtype), "rstd": Output(rstd, np.dtype(np.float32))}
