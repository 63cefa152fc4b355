"""AttentionUpdate: merges the attention results of sp ranks.

    lse_m = log(sum exp lse_i);  O = sum go_i exp(lse_i - lse_m)

A rank without keys for a row has lse = +inf there. It is read as -inf, so the rank's result has no
weight.
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import OpCall, Output, operator


@operator("AttentionUpdate")
def attention_update(call: OpCall) -> dict[str, Output]:
    """output [rows,D] in the type of go, and lse_m [rows] in float32. With update_type 0 lse_m is
    [0]."""
    lse, go = (call.tensors(name) for name in ("lse", "go"))
    levels = np.stack([tensor.astype(np.float64) for tensor in lse])
    levels[levels == np.inf] = -np.inf
    top = levels.max(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        merged = top + np.log(np.exp(levels - np.where(top == -np.inf, 0.0, top)).sum(axis=0))
        weights = np.exp(levels - np.where(merged == -np.inf, 0.0, merged))
    # A result without weight may hold anything, so it is not read.
    results = np.where(
        weights[..., None] == 0, 0.0, np.stack([tensor.astype(np.float64) for tensor in go])
    )
    output = (weights[..., None] * results).sum(axis=0)
    return {
        "output": Output(output, go[0].dtype),
        "lse_m": Output(
            merged if call.attrs["update_type"] == 1 else np.zeros(0), np.dtype(np.float32)
        ),
    }
