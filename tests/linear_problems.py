"""Calls of FlashLinearAttention and ShortConvolution with several hundred tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from fa_compiler.op_registry.ops.flash_linear_attention import DELTA, GATED, GENERAL

Call = tuple[dict[str, Any], dict[str, Any]]

HEADS = ((2, 2, 2), (4, 2, 2), (1, 4, 2), (2, 4, 1))
"""Numbers of query heads, of states and of key heads."""


def attention(
    rng: np.random.Generator,
    rule: str,
    tokens: int,
    *,
    gate: str = "head",
    heads: tuple[int, int, int] = (2, 2, 2),
    size: int = 16,
    width: int = 24,
    batch: int = 2,
    decay: tuple[float, float] = (-0.4, 0.0),
    past: bool = True,
    dtype: Any = np.float32,
) -> Call:
    """A call in which no state grows: keys have a length of 1, and beta and the correction are at most 1."""
    q_heads, states, key_heads = heads

    def rows(count: int, columns: int, unit: bool = False) -> np.ndarray:
        made = rng.standard_normal((batch, tokens, count, columns))
        if unit:
            made /= np.sqrt((made**2).sum(axis=-1, keepdims=True))
        return made.reshape(batch, tokens, count * columns).astype(dtype)

    inputs = {"query": rows(q_heads, size), "key": rows(key_heads, size, unit=True), "value": rows(states, width)}
    if rule in GATED or (rule == GENERAL and gate != "none"):
        drawn = rng.uniform(*decay, (batch, tokens, states * (size if gate == "key" else 1)))
        inputs["decay"] = drawn.astype(dtype)
    if rule in DELTA:
        inputs["beta"] = rng.uniform(0, 1, (batch, tokens, states)).astype(dtype)
    if rule == GENERAL:
        probe = rng.standard_normal((batch, tokens, states, size))
        probe /= np.sqrt((probe**2).sum(axis=-1, keepdims=True))
        share = rng.uniform(0, 1, (batch, tokens, states, 1))
        inputs["low_rank_read"] = probe.reshape(batch, tokens, -1).astype(dtype)
        inputs["low_rank_write"] = (-share * probe).reshape(batch, tokens, -1).astype(dtype)
    if past:
        inputs["past_state"] = rng.standard_normal((batch, states, size, width)).astype(dtype)
    return inputs, {"q_num_heads": q_heads, "kv_num_heads": states, "update_rule": rule}
