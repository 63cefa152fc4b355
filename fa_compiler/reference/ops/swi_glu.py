"""SwiGlu: splits a tensor in two halves, and multiplies Swish of the first by the second.

a, b = halves of x along dim;  y = a / (1 + exp(-a)) b
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import OpCall, Output, operator


@operator("SwiGlu")
def swi_glu(call: OpCall) -> dict[str, Output]:
    """y in the type and shape of x, but with half its size along the axis dim."""
    x = call.tensor("x")
    gate, up = np.split(x.astype(np.float64), 2, axis=call.attrs["dim"])
    with np.errstate(invalid="ignore", over="ignore"):
        return {"y": Output(gate / (1 + np.exp(-gate)) * up, x.dtype)}
