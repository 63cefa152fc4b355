"""ApplyRotaryPosEmb: rotates pairs of the last axis of a query and of a key by the angles of
positions.

Both become what RotaryPositionEmbedding makes of them, in the mode half, interleave or quarter.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fa_compiler.reference.call import OpCall, Output, operator
from fa_compiler.reference.ops.rotary_position_embedding import rotated

MODES: Mapping[str, int] = {"half": 0, "interleave": 1, "quarter": 2}
"""The same modes of RotaryPositionEmbedding."""


@operator("ApplyRotaryPosEmb")
def apply_rotary_pos_emb(call: OpCall) -> dict[str, Output]:
    """query and key in their shapes and types."""
    cos, sin = (call.tensor(name).astype(np.float64) for name in ("cos", "sin"))
    mode = MODES[call.attrs["rotary_mode"]]
    results = {}
    with np.errstate(invalid="ignore", over="ignore"):
        for name in ("query", "key"):
            given = call.tensor(name)
            x = given.astype(np.float64)
            results[name] = Output(x * cos + rotated(x, mode) * sin, given.dtype)
    return results
