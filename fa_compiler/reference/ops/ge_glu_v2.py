"""GeGluV2: splits a tensor in two halves, and multiplies Gelu of one of them by the other.

    a, b = halves of x along dim;  y = a Gelu(b), or Gelu(a) b if activate_left

Gelu is exact with approximate 0, and computed by tanh with 1. It is rounded to the type of x before
it is multiplied.
"""

from __future__ import annotations

import math

import numpy as np

from fa_compiler.reference.call import Floats, OpCall, Output, operator

_erf = np.vectorize(math.erf, otypes=[np.float64])


@operator("GeGluV2")
def ge_glu_v2(call: OpCall) -> dict[str, Output]:
    """y and gelu in the type and shape of x, but with half its size along the axis dim."""
    x, attrs = call.tensor("x"), call.attrs
    first, second = np.split(x.astype(np.float64), 2, axis=attrs["dim"])
    gate, up = (first, second) if attrs["activate_left"] else (second, first)
    with np.errstate(invalid="ignore", over="ignore"):
        found = gelu(gate, attrs["approximate"] == 0)
        if not call.exact:
            found = found.astype(x.dtype).astype(np.float64)
        return {"y": Output(found * up, x.dtype), "gelu": Output(found, x.dtype)}


def gelu(x: Floats, is_exact: bool) -> Floats:
    """x times the share of a normal distribution below it, exactly or by tanh."""
    share = (
        _erf(x / np.sqrt(2)) if is_exact else np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    )
    result: Floats = 0.5 * x * (1 + share)
    return result
