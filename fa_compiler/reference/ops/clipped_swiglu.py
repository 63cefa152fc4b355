"""ClippedSwiglu: SwiGLU between limits, as gpt-oss has it.

    a, b = parts of x;  y = min(a, limit) / (1 + exp(-alpha min(a, limit))) (clip(b, -limit, limit)
                        + bias)

The axes from dim on are one row. a and b are its elements of even and of odd places if
`interleaved`, and else its halves. With group_index, only as many rows are computed as its sum
says, and the others are 0.
"""

from __future__ import annotations

import math

import numpy as np

from fa_compiler.reference.call import OpCall, Output, operator


@operator("ClippedSwiglu")
def clipped_swiglu(call: OpCall) -> dict[str, Output]:
    """y in the type and shape of x, but with half its size along the axis dim."""
    x, attrs, groups = call.tensor("x"), call.attrs, call.optional("group_index")
    dim, limit = attrs["dim"] % x.ndim, attrs["limit"]
    rows = x.astype(np.float64).reshape(math.prod(x.shape[:dim]), -1)
    parts = (rows[:, ::2], rows[:, 1::2]) if attrs["interleaved"] else np.split(rows, 2, axis=1)
    gate, up = np.minimum(parts[0], limit), np.clip(parts[1], -limit, limit)
    with np.errstate(invalid="ignore", over="ignore"):
        y = gate / (1 + np.exp(-attrs["alpha"] * gate)) * (up + attrs["bias"])
    if groups is not None:
        y[int(groups.sum()) :] = 0
    shape = (*x.shape[:dim], x.shape[dim] // 2, *x.shape[dim + 1 :])
    return {"y": Output(y.reshape(shape), x.dtype)}
