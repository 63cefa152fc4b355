"""GeluV2: multiplies each number by the share of a normal distribution below it.

y = x / 2 (1 + erf(x / sqrt(2))), or x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) with
approximate "tanh"
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import OpCall, Output, operator
from fa_compiler.reference.ops.ge_glu_v2 import gelu


@operator("GeluV2")
def gelu_v2(call: OpCall) -> dict[str, Output]:
    """y in the type and shape of x."""
    x = call.tensor("x")
    with np.errstate(invalid="ignore", over="ignore"):
        return {
            "y": Output(gelu(x.astype(np.float64), call.attrs["approximate"] == "none"), x.dtype)
        }
