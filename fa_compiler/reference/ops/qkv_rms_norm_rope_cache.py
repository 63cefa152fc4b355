"""QkvRmsNormRopeCache: query and key, normalised and rotated, and the value; key and value go into
caches.

    y = x / sqrt(mean(x^2) + epsilon) gamma;  y cos + (-y2, y1) sin        y1 and y2 are the halves of a head

What goes into a cache of INT8 is divided by a scale, moved by an offset, rounded to even and
saturated.
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import Floats, OpCall, Output, operator
from fa_compiler.reference.ops.rms_norm import reciprocal


@operator("QkvRmsNormRopeCache")
def qkv_rms_norm_rope_cache(call: OpCall) -> dict[str, Output]:
    """q_out and both caches after the call, and the rows of query, key and value, which hold 0 if
    the call does not ask for them."""
    qkv, counts = call.tensor("qkv"), call.attrs["head_nums"]
    heads = qkv.astype(np.float64).reshape(len(qkv), sum(counts), -1)
    query, key, value = np.split(heads, np.cumsum(counts)[:2], axis=1)
    query, key = _turned(call, query, "q_gamma"), _turned(call, key, "k_gamma")
    rows = {"q": query, "k": key, "v": value}
    shown = {f"{name}_out_before_quant": each.reshape(len(qkv), -1) for name, each in rows.items()}
    blank = 1.0 if call.attrs["is_output_qkv"] else 0.0
    return {
        "q_out": Output(shown["q_out_before_quant"], qkv.dtype),
        "k_cache": _written(call, "k", key),
        "v_cache": _written(call, "v", value),
        **{name: Output(each * blank, qkv.dtype) for name, each in shown.items()},
    }


def _turned(call: OpCall, heads: Floats, weight: str) -> Floats:
    """Heads [rows,N,D], normalised and rotated."""
    cos, sin = (call.tensor(name).astype(np.float64)[:, None] for name in ("cos", "sin"))
    y = heads * reciprocal(heads, 1, call.attrs["epsilon"]) * call.tensor(weight).astype(np.float64)
    first, second = np.split(y, 2, axis=-1)
    return y * cos + np.concatenate([-second, first], axis=-1) * sin


def _written(call: OpCall, name: str, heads: Floats) -> Output:
    """A cache with the rows in their places."""
    given = call.tensor(f"{name}_cache")
    cache, size = given.astype(np.float64, order="C"), given.shape[2]
    scale, offset = (call.optional(f"{name}_{word}") for word in ("scale", "offset"))
    if scale is not None:
        moved = heads / scale.astype(np.float64) + (
            0.0 if offset is None else offset.astype(np.float64)
        )
        heads = np.clip(np.rint(moved), -128, 127)
    for row, place in zip(heads, call.tensor("index").tolist(), strict=True):
        if place >= 0:
            cache[place // size, :, place % size] = row.reshape(-1, given.shape[3])
    return Output(cache, given.dtype)
