"""Calls of FlashLinearAttention and ShortConvolution with several hundred tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from fa_compiler.op_registry.ops.flash_linear_attention import DELTA, GATED, LOW_RANK, UPDATE_RULES

Call = tuple[dict[str, Any], dict[str, Any]]

HEADS = ((2, 2, 2), (4, 2, 2), (1, 4, 2), (2, 4, 1))
"""Numbers of query heads, of states and of key heads."""
CHANNELS = (1, 17, 64, 65, 130)


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
    if rule in GATED or (rule in LOW_RANK and gate != "none"):
        drawn = rng.uniform(*decay, (batch, tokens, states * (size if gate == "key" else 1)))
        inputs["decay"] = drawn.astype(dtype)
    if rule in DELTA:
        inputs["beta"] = rng.uniform(0, 1, (batch, tokens, states)).astype(dtype)
    if rule in LOW_RANK:
        probe = rng.standard_normal((batch, tokens, states, size))
        probe /= np.sqrt((probe**2).sum(axis=-1, keepdims=True))
        share = rng.uniform(0, 1, (batch, tokens, states, 1))
        inputs["low_rank_read"] = probe.reshape(batch, tokens, states * size).astype(dtype)
        inputs["low_rank_write"] = (-share * probe).reshape(batch, tokens, states * size).astype(dtype)
    if past:
        inputs["past_state"] = rng.standard_normal((batch, states, size, width)).astype(dtype)
    return inputs, {"q_num_heads": q_heads, "kv_num_heads": states, "update_rule": rule}


DECAYS = ((-0.4, 0.0), (-0.4, 0.0), (0.0, 0.0), (-5.0, 0.0), (-80.0, 0.0), (-1e4, -50.0))
MODERATE = 5
"""So many of them do not underflow in float32. A factor that does makes NaN of an infinite state in the operator, which
computes in float32, but not in float64."""


def drawn_attention(seed: int, dtype: Any = None) -> Call:
    """A call of any rule, gate, grouping and type, now and then without tokens, packed, or with NaN and infinities."""
    rng = np.random.default_rng(seed)
    spoiled = rng.random() < 0.25

    def pick(options: Sequence[Any]) -> Any:
        return options[int(rng.integers(len(options)))]

    tokens = int(rng.integers(0, 12)) if rng.random() < 0.4 else int(rng.integers(1, 300))
    are_channels = rng.random() < 0.1
    inputs, attrs = attention(
        rng,
        "gated" if are_channels else pick(UPDATE_RULES),
        tokens,
        gate="key" if are_channels else pick(("head", "key", "none")),
        heads=(1, pick(CHANNELS), 1) if are_channels else pick(HEADS),
        size=int(pick((1, 3, 16, 32, 64, 80))),
        width=1 if are_channels else int(pick((1, 5, 16, 24, 64))),
        batch=int(rng.integers(1, 4)),
        decay=pick(DECAYS[:MODERATE] if spoiled else DECAYS),
        past=bool(rng.random() < 0.6),
        dtype=dtype or pick((np.float32, np.float32, np.float16, ml_dtypes.bfloat16)),
    )
    if rng.random() < 0.3:
        attrs["scale"] = float(pick((0.5, 1.0, 2.0)))
    if rng.random() < 0.2 and "past_state" not in inputs:
        inputs = {name: array[:1] for name, array in inputs.items()}
        ends = np.sort(rng.integers(0, tokens + 1, int(rng.integers(0, 4))))
        inputs["cu_seqlens"] = np.array([0, *ends, tokens], np.int32)
    if spoiled:
        for _ in range(int(rng.integers(1, 3))):
            name = pick([name for name, array in inputs.items() if array.size and name != "cu_seqlens"] or ["query"])
            if inputs[name].size:
                inputs[name].reshape(-1)[int(rng.integers(inputs[name].size))] = pick((np.nan, np.inf, -np.inf))
    return inputs, attrs


def drawn_convolution(seed: int) -> Call:
    """A convolution of any layout, width and type."""
    rng = np.random.default_rng(seed)
    batch, channels, tokens, width = (int(rng.integers(low, high)) for low, high in ((1, 4), (1, 70), (0, 60), (1, 9)))
    dtype = (np.float32, np.float16, ml_dtypes.bfloat16)[int(rng.integers(3))]
    last = bool(rng.integers(2))

    def made(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    inputs = {"input": made(batch, *((tokens, channels) if last else (channels, tokens)))}
    inputs["weight"] = made(channels, 1, width)
    if rng.integers(2):
        inputs["bias"] = made(channels)
    if rng.integers(2):
        inputs["past_state"] = made(batch, channels, width - 1)
    if rng.random() < 0.2 and inputs["input"].size:
        inputs["input"].reshape(-1)[int(rng.integers(inputs["input"].size))] = (np.nan, np.inf)[int(rng.integers(2))]
    return inputs, {"activation": ("none", "silu")[int(rng.integers(2))], "channels_last": last}
