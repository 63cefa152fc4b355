"""RotaryMul: rotates halves of the last axis by the angles of positions.

y = x r1 + (-x2, x1) r2        x1 and x2 are the halves of x along its last axis
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import OpCall, Output, operator
from fa_compiler.reference.ops.rotary_position_embedding import rotated


@operator("RotaryMul")
def rotary_mul(call: OpCall) -> dict[str, Output]:
    """y in the shape and type of x."""
    given = call.tensor("x")
    x, cos, sin = (call.tensor(name).astype(np.float64) for name in ("x", "r1", "r2"))
    with np.errstate(invalid="ignore", over="ignore"):
        return {"y": Output(x * cos + rotated(x, 0) * sin, given.dtype)}
