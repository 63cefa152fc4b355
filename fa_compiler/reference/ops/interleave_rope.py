"""InterleaveRope: sorts a head into its elements of even and of odd places, and rotates the halves.

y = q cos + (-q2, q1) sin        q is x, its even elements in front of its odd ones; q1 and q2 are
                                 its halves
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import OpCall, Output, operator
from fa_compiler.reference.ops.rotary_position_embedding import rotated


@operator("InterleaveRope")
def interleave_rope(call: OpCall) -> dict[str, Output]:
    """y in the shape and type of x."""
    given = call.tensor("x")
    x, cos, sin = (call.tensor(name).astype(np.float64) for name in ("x", "cos", "sin"))
    x = np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
    with np.errstate(invalid="ignore", over="ignore"):
        return {"y": Output(x * cos + rotated(x, 0) * sin, given.dtype)}
