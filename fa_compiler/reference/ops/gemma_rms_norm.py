"""GemmaRmsNorm: divides rows by their root mean square, and multiplies them by a weight plus one.

    rstd = 1 / sqrt(mean(x^2) + epsilon);  y = x rstd (1 + gamma)

The mean is over the axes of gamma, which are the last ones of x.
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import OpCall, Output, operator
from fa_compiler.reference.ops.rms_norm import scaled


@operator("GemmaRmsNorm")
def gemma_rms_norm(call: OpCall) -> dict[str, Output]:
    """y in the shape and type of x, and rstd in float32, with size 1 along the axes of gamma."""
    return scaled(call, 1 + call.tensor("gamma").astype(np.float64))
