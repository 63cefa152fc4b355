"""AttentionUpdate: the attention results of sp ranks as one.

    lse_m = log(sum exp lse_i);  O = sum go_i exp(lse_i - lse_m)

A rank without keys for a row gives lse = +inf there; that is read as -inf, so that its result has no weight.
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import Array, Call, Output, operator


@operator("AttentionUpdate")
def attention_update(call: Call) -> dict[str, Output]:
    """output [rows,D] as go, and lse_m [rows] in float32; with update_type 0 lse_m is [0]."""
    lse, go = (_list(call, name) for name in ("lse", "go"))
    update_type, sp = int(call.attrs["update_type"]), int(call.attrs["sp"])
    if update_type not in (0, 1):
        raise call.error("update_type", f"must be 0 or 1, got {update_type}")
    for name, tensors in (("lse", lse), ("go", go)):
        if len(tensors) != sp:
            raise call.error(name, f"a list of {len(tensors)}, sp is {sp}")
        if any(tensor.shape != tensors[0].shape or tensor.dtype != tensors[0].dtype for tensor in tensors):
            raise call.error(name, "its tensors differ in shape or type")
    if lse[0].ndim != 1 or go[0].ndim != 2 or lse[0].shape[0] != go[0].shape[0]:
        found = f"shape {list(go[0].shape)} beside lse of {list(lse[0].shape)}"
        raise call.error("go", f"{found}, expected [rows,D] and [rows]")
    levels = np.stack([tensor.astype(np.float64) for tensor in lse])
    levels[levels == np.inf] = -np.inf
    top = levels.max(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        merged = top + np.log(np.exp(levels - np.where(top == -np.inf, 0.0, top)).sum(axis=0))
        weights = np.exp(levels - np.where(merged == -np.inf, 0.0, merged))
    # A result without weight is not read: it may hold anything.
    results = np.where(weights[..., None] == 0, 0.0, np.stack([tensor.astype(np.float64) for tensor in go]))
    output = (weights[..., None] * results).sum(axis=0)
    return {
        "output": Output(output, go[0].dtype),
        "lse_m": Output(merged if update_type == 1 else np.zeros(0), np.dtype(np.float32)),
    }


def _list(call: Call, name: str) -> list[Array]:
    value = call.inputs.get(name)
    tensors = [value] if isinstance(value, np.ndarray) else list(value or [])
    if not tensors:
        raise call.error(name, "this input is needed and absent")
    return tensors
