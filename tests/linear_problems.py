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


# The operators of CANN, whose tokens are packed.

BF16 = ml_dtypes.bfloat16


def packed_rule(
    rng: np.random.Generator,
    lengths: Sequence[int],
    *,
    heads: tuple[int, int] = (2, 4),
    size: int = 16,
    width: int = 24,
    g: bool = True,
    decay: tuple[float, float] = (-0.4, 0.0),
) -> dict[str, Any]:
    """The tokens of a delta rule in which no state grows. `heads` are those of query and of value."""
    tokens, (key_heads, states) = sum(lengths), heads
    key = rng.standard_normal((tokens, key_heads, size))
    inputs = {
        "query": rng.standard_normal((tokens, key_heads, size)).astype(BF16),
        "key": (key / np.sqrt((key**2).sum(axis=-1, keepdims=True))).astype(BF16),
        "value": rng.standard_normal((tokens, states, width)).astype(BF16),
        "beta": rng.uniform(0, 1, (tokens, states)).astype(BF16),
        "actual_seq_lengths": np.array(lengths, np.int32),
    }
    if g:
        inputs["g"] = rng.uniform(*decay, (tokens, states)).astype(np.float32)
    return inputs


def chunks(
    rng: np.random.Generator, lengths: Sequence[int], state: Any = BF16, scale: float = 0.25, **more: Any
) -> Call:
    """A call of ChunkGatedDeltaRule."""
    inputs = packed_rule(rng, lengths, **more)
    shape = (len(lengths), *inputs["value"].shape[1:], inputs["key"].shape[2])
    return inputs | {"initial_state": rng.standard_normal(shape).astype(state)}, {"scale_value": scale}


def steps(
    rng: np.random.Generator,
    lengths: Sequence[int],
    state: Any = BF16,
    *,
    gk: bool = False,
    accepted: bool = False,
    shared: bool = False,
    **more: Any,
) -> Call:
    """A call of RecurrentGatedDeltaRule. With `shared`, tokens and sequences name the same few blocks. A sequence that
    reads what another one wrote reads the rounded state, which the reference does not round."""
    inputs = packed_rule(rng, lengths, **more)
    tokens, states, width = inputs["value"].shape
    size = inputs["key"].shape[2]
    blocks = tokens + 2
    inputs["state"] = rng.standard_normal((blocks, states, width, size)).astype(state)
    chosen = rng.integers(0, 3, tokens) if shared else rng.permutation(blocks)[:tokens]
    inputs["ssm_state_indices"] = chosen.astype(np.int32)
    if gk:
        inputs["gk"] = rng.uniform(*more.get("decay", (-0.4, 0.0)), (tokens, states, size)).astype(np.float32)
    if accepted:
        inputs["num_accepted_tokens"] = rng.integers(1, np.array(lengths) + 1).astype(np.int32)
    return inputs, {"scale_value": 0.25}


def lines(
    rng: np.random.Generator,
    lengths: Sequence[int],
    dtype: Any = np.float16,
    *,
    width: int = 4,
    length: int = 6,
    channels: int = 80,
    packed: bool = True,
    indices: bool = True,
) -> dict[str, Any]:
    """What both convolutions of CANN read: tokens of sequences, which have one length unless they are packed."""

    def made(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    batch, count = len(lengths), len(lengths) + 3
    inputs: dict[str, Any] = {
        "x": made(sum(lengths), channels) if packed else made(batch, lengths[0], channels),
        "weight": made(width, channels),
        "conv_states": made(count, length, channels),
    }
    if packed:
        inputs["query_start_loc"] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    if indices:
        inputs["cache_indices"] = rng.permutation(count)[:batch].astype(np.int32)
    return inputs


def _spoil(rng: np.random.Generator, inputs: dict[str, Any]) -> None:
    """One number of one of the inputs is no number, or infinite."""
    names = [name for name, array in inputs.items() if array.dtype.kind != "i"]
    array = inputs[names[int(rng.integers(len(names)))]]
    array.reshape(-1)[int(rng.integers(array.size))] = (np.nan, np.inf, -np.inf)[int(rng.integers(3))]


def _drawn_sizes(rng: np.random.Generator) -> dict[str, Any]:
    """The numbers of heads, and their sizes, of a delta rule."""
    return {
        "heads": ((1, 1), (2, 2), (2, 4), (1, 3))[int(rng.integers(4))],
        "size": int(rng.choice((1, 5, 16, 64, 128))),
        "width": int(rng.choice((1, 8, 24, 128))),
    }


def _drawn_decay(rng: np.random.Generator, spoiled: bool) -> tuple[float, float]:
    """The bounds of the decays."""
    return DECAYS[int(rng.integers(MODERATE if spoiled else len(DECAYS)))]


def drawn_chunks(seed: int) -> Call:
    """A call of ChunkGatedDeltaRule with any sizes."""
    rng = np.random.default_rng(seed)
    lengths = [int(rng.integers(1, 150 if rng.random() < 0.5 else 9)) for _ in range(int(rng.integers(1, 4)))]
    spoiled = rng.random() < 0.2
    inputs, attrs = chunks(
        rng,
        lengths,
        (BF16, np.float32)[int(rng.integers(2))],
        **_drawn_sizes(rng),
        g=bool(rng.integers(4)),
        decay=_drawn_decay(rng, spoiled),
    )
    if spoiled:
        _spoil(rng, inputs)
    return inputs, attrs


def drawn_steps(seed: int) -> Call:
    """A call of RecurrentGatedDeltaRule with any sizes."""
    rng = np.random.default_rng(seed)
    lengths = [int(rng.integers(1, 9 if rng.random() < 0.5 else 2)) for _ in range(int(rng.integers(1, 6)))]
    spoiled, shared = rng.random() < 0.2, bool(rng.random() < 0.2)
    inputs, attrs = steps(
        rng,
        lengths,
        np.float32 if shared else (BF16, np.float32)[int(rng.integers(2))],
        gk=bool(rng.integers(2)),
        accepted=bool(rng.integers(2)),
        shared=shared,
        **_drawn_sizes(rng),
        g=bool(rng.integers(2)),
        decay=_drawn_decay(rng, spoiled),
    )
    if spoiled:
        _spoil(rng, inputs)
    return inputs, attrs


def drawn_lines(seed: int) -> Call:
    """A call of CausalConv1d: a prompt, a step, or a step behind accepted tokens."""
    rng = np.random.default_rng(seed)
    kind, batch, packed = int(rng.integers(3)), int(rng.integers(1, 5)), bool(rng.integers(2))
    if kind == 0:
        lengths = [int(rng.integers(0 if packed else 2, 40)) for _ in range(batch)]
        lengths[0] = max(lengths[0], 2)
    else:
        lengths = [1 if kind == 1 else int(rng.integers(1, 5)) for _ in range(batch)]
    packed = packed and kind != 1
    if not packed:
        lengths = [lengths[0]] * batch
    width = 4 if kind == 2 else int(rng.integers(2, 5))
    length = width - 2 + max(lengths) if kind == 2 else int(rng.integers(width - 1, 9))
    inputs = lines(
        rng,
        lengths,
        (np.float16, BF16)[int(rng.integers(2))],
        width=width,
        length=length,
        channels=int(rng.choice((64, 80, 272))),
        packed=packed,
        indices=bool(rng.integers(2)),
    )
    if kind == 0 and rng.integers(2):
        inputs["initial_state_mode"] = rng.integers(0, 2, batch).astype(np.int32)
    if kind == 2:
        most = inputs["conv_states"].shape[1] - (width - 1)
        inputs["num_accepted_tokens"] = rng.integers(0, most + 1, batch).astype(np.int32)
    if rng.integers(2):
        inputs["bias"] = rng.standard_normal(inputs["x"].shape[-1]).astype(inputs["x"].dtype)
    if rng.random() < 0.2:
        _spoil(rng, inputs)
    return inputs, {"activation_mode": ("silu", "none", "")[int(rng.integers(3))]}


def drawn_added(seed: int) -> Call:
    """A call of FusedCausalConv1d, now and then with the states of whole blocks."""
    rng = np.random.default_rng(seed)
    batch, packed = int(rng.integers(1, 5)), bool(rng.integers(2))
    lengths = [int(rng.integers(1, 20 if packed else 9)) for _ in range(batch)]
    if not packed:
        lengths = [lengths[0]] * batch
    attrs: dict[str, Any] = {"residual_connection": int(rng.integers(2))}
    if packed:
        attrs["max_query_len"] = max(lengths)
    inputs = lines(
        rng,
        lengths,
        (np.float16, BF16)[int(rng.integers(2))],
        width=3,
        length=int(rng.integers(2 if packed else lengths[0] + 1, 22)),
        channels=int(rng.choice((64, 80, 272))),
        packed=packed,
        indices=bool(rng.integers(2)),
    )
    length = inputs["conv_states"].shape[1]
    if rng.integers(2):
        most = np.minimum(lengths, length - 1)
        inputs["num_accepted_tokens"] = rng.integers(1, most + 1).astype(np.int32)
    if rng.integers(2):
        inputs["num_computed_tokens"] = rng.integers(0, 4, batch).astype(np.int32)
        attrs["conv_mode"] = int(rng.integers(2))
    if rng.random() < 0.3:
        _keep_blocks(rng, inputs, attrs, lengths)
    if rng.random() < 0.2:
        _spoil(rng, inputs)
    return inputs, attrs


def _keep_blocks(
    rng: np.random.Generator, inputs: dict[str, Any], attrs: dict[str, Any], lengths: Sequence[int]
) -> None:
    """Adds prefix caching: each sequence goes on in a block, and fills those up to its last one."""
    size = attrs["block_size"] = int(rng.integers(2, 6))
    computed = rng.integers(0, 2 * size, len(lengths))
    first = computed // size
    last = np.maximum(computed + np.array(lengths) - 1, 0) // size
    blocks = int(last.max()) + 1
    count = len(lengths) * blocks + 1
    states = inputs["conv_states"]
    inputs |= {
        "conv_states": np.resize(states, (count, *states.shape[1:])),
        "cache_indices": rng.permutation(count)[: count - 1].reshape(-1, blocks).astype(np.int32),
        "num_computed_tokens": computed.astype(np.int32),
        "block_idx_first_scheduled_token": first.astype(np.int32),
        "block_idx_last_scheduled_token": last.astype(np.int32),
        "initial_state_idx": np.maximum(first - (computed % size == 0), 0).astype(np.int32),
    }
