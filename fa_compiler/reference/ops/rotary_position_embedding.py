"""RotaryPositionEmbedding: rotates pairs of the last axis by the angles of positions.

    y = x cos + r(x) sin

With x in halves (x1, x2) along the last axis, r(x) is (-x2, x1) in mode 0 (half). In mode 1
(interleave) the pairs are neighbours: r(x) = (-x_1, x_0, -x_3, x_2, ...). In mode 2 (quarter) each
half is rotated as in mode 0. In mode 3 (interleave-half) x is first sorted into its even and its
odd elements, and then rotated as in mode 0. With `rotate`, r(x) is the product of x and this
matrix.
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import Floats, OpCall, Output, operator


@operator("RotaryPositionEmbedding")
def rotary_position_embedding(call: OpCall) -> dict[str, Output]:
    """y in the shape and type of x."""
    given = call.tensor("x")
    x, cos, sin = (call.tensor(name).astype(np.float64) for name in ("x", "cos", "sin"))
    mode, matrix = call.attrs["mode"], call.optional("rotate")
    if mode == 3:
        x = np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
    with np.errstate(invalid="ignore", over="ignore"):
        turned = rotated(x, mode) if matrix is None else x @ matrix.astype(np.float64)
        return {"y": Output(x * cos + turned * sin, given.dtype)}


def rotated(x: Floats, mode: int) -> Floats:
    """r(x) in one of the modes 0 to 3; for mode 3, x is sorted already."""
    if mode == 1:
        return np.stack([-x[..., 1::2], x[..., ::2]], axis=-1).reshape(x.shape)
    parts = np.split(x, 4 if mode == 2 else 2, axis=-1)
    pairs = [(-second, first) for first, second in zip(parts[::2], parts[1::2], strict=True)]
    return np.concatenate([part for pair in pairs for part in pair], axis=-1)
