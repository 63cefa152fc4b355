"""The kernels of linear attention and of the causal convolution against the float64 recurrence, on every variant.

The bound: in these calls the states do not grow, so that an error made at one token is not amplified by later ones.
Each result is a sum of at most `tokens` decayed terms, each wrong by a few roundings to float32. Chunks solve a
triangular system whose entries are below 1, which adds a few more. A result of 16 bits is rounded once, and so is a
state.

A variant that multiplies bfloat16 two at a time rounds the state, the corrected values and the weights of the tokens to
bfloat16, where query, key and value are bfloat16. Each is wrong by 2^-9 of itself, and a result is a sum of such terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fa_compiler import ops, reference
from fa_compiler.op_registry.ops.flash_linear_attention import UPDATE_RULES
from tests.corrupted import BASES
from tests.linear_problems import HEADS, attention

from .variants import thinned

UNIT = {np.dtype(np.float32): 2.0**-24, np.dtype(np.float16): 2.0**-11, np.dtype(ml_dtypes.bfloat16): 2.0**-8}
"""Half of the last place of a number of 1."""
ROUNDINGS = 64
"""How many roundings of the largest term a result of float32 may be wrong by."""

IN_CHUNKS = ("FlashLinearAttention", "ChunkGatedDeltaRule")
PAIRS = "avx512bf16"
"""The variant that multiplies bfloat16 two at a time."""
ROUNDED = 8 * 2.0**-9
"""What the rounded operands may change a result by, as a part of the largest one: the three of them twice, and a
margin for sums of few terms."""

GATES = ("head", "key")
TOKENS = (1, 2, 7, 63, 64, 65, 130, 257)
"""Around the ends of chunks and sub-chunks."""


def check(op: str, inputs: Mapping[str, Any], attrs: Mapping[str, Any], isa: str = PAIRS) -> None:
    """Every output, NaN and infinities included. `isa` is the variant that computes, where it is known.

    An infinity times a corrected value has the sign of this value, which a rounding can change where it is nearly 0.
    """
    rounded = isa == PAIRS and op in IN_CHUNKS and inputs["query"].dtype == ml_dtypes.bfloat16
    expected = reference.run(op, inputs, attrs, dtype="float64")
    found = ops.run(op, inputs, attrs)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        wanted = expected[name]
        finite = np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0)
        unit = UNIT[value.dtype]
        share = ROUNDED if rounded else ROUNDINGS * 2.0**-24
        bound = share * finite + unit * np.abs(np.where(np.isfinite(wanted), wanted, 0.0))
        given = value.astype(np.float64)
        assert value.shape == wanted.shape, name
        np.testing.assert_array_equal(np.isnan(given), np.isnan(wanted), name)
        if rounded:
            given = np.where(np.isinf(given) & np.isinf(wanted), wanted, given)
        same = np.isnan(wanted) | (given == wanted) | (np.abs(given - np.where(np.isinf(wanted), 0, wanted)) <= bound)
        assert same.all(), (name, np.abs(given - wanted)[~same].max(), bound[~same].min())


@thinned(rule=UPDATE_RULES, gate=GATES, tokens=TOKENS)
def test_the_kernels_compute_the_recurrence(isa: str, rule: str, gate: str, tokens: int) -> None:
    check("FlashLinearAttention", *attention(np.random.default_rng(tokens), rule, tokens, gate=gate))


@thinned(rule=UPDATE_RULES, heads=HEADS, size=(1, 5, 32, 64), width=(1, 8, 40))
def test_heads_and_sizes(isa: str, rule: str, heads: tuple[int, int, int], size: int, width: int) -> None:
    made = attention(np.random.default_rng(size), rule, 70, heads=heads, size=size, width=width, past=width > 8)
    check("FlashLinearAttention", *made)


@thinned(
    states=(1, 63, 64, 65, 130),
    size=(1, 5, 16, 24),
    tokens=(1, 3, 70),
    dtype=(np.float32, np.float32, ml_dtypes.bfloat16),
)
def test_channels(isa: str, states: int, size: int, tokens: int, dtype: Any) -> None:
    """Heads of one value that share query and key, around the number of channels that are computed together."""
    rng = np.random.default_rng(states)
    made = attention(
        rng, "gated", tokens, gate="key", heads=(1, states, 1), size=size, width=1, past=tokens > 1, dtype=dtype
    )
    check("FlashLinearAttention", *made, isa)


@thinned(size=(1, 5, 16), name=("query", "key", "value", "decay", "past_state"), number=(np.nan, np.inf, -np.inf))
def test_undefined_numbers_in_channels(isa: str, size: int, name: str, number: float) -> None:
    inputs, attrs = attention(np.random.default_rng(1), "gated", 9, gate="key", heads=(1, 70, 1), size=size, width=1)
    for each in ("query", "key"):  # so that an infinite value gives infinities of one sign
        inputs[each] = np.abs(inputs[each])
    inputs[name].reshape(-1)[inputs[name].size // 3] = number
    check("FlashLinearAttention", inputs, attrs)


@thinned(
    rule=("gated", "gated_delta", "general", "dplr"),
    gate=GATES,
    decay=((-80.0, -0.0), (-80.0, -79.0), (-1e4, 0.0), (0.0, 0.0)),
)
def test_sums_of_decays_beyond_the_exponents_of_float32(
    isa: str, rule: str, gate: str, decay: tuple[float, float]
) -> None:
    check("FlashLinearAttention", *attention(np.random.default_rng(5), rule, 200, gate=gate, decay=decay))


@thinned(rule=UPDATE_RULES, dtype=(np.float16, ml_dtypes.bfloat16), tokens=(1, 3, 100))
def test_numbers_of_16_bits(isa: str, rule: str, dtype: Any, tokens: int) -> None:
    check("FlashLinearAttention", *attention(np.random.default_rng(tokens), rule, tokens, dtype=dtype), isa)


@thinned(rule=UPDATE_RULES, gate=GATES, tokens=(9, 10, 24, 25, 131), heads=HEADS, size=(1, 33, 48), width=(1, 40, 64))
def test_products_of_bfloat16(
    isa: str, rule: str, gate: str, tokens: int, heads: tuple[int, int, int], size: int, width: int
) -> None:
    """Around the ends of chunks, and of pairs. Keys and values of odd sizes leave half of a pair."""
    rng = np.random.default_rng(tokens)
    made = attention(
        rng, rule, tokens, gate=gate, heads=heads, size=size, width=width, past=size > 1, dtype=ml_dtypes.bfloat16
    )
    check("FlashLinearAttention", *made, isa)


@thinned(
    rule=("linear", "gated", "gated_delta"),
    name=("query", "key", "value", "decay", "past_state"),
    number=(np.nan, np.inf, -np.inf),
)
def test_undefined_numbers_of_bfloat16(isa: str, rule: str, name: str, number: float) -> None:
    inputs, attrs = attention(np.random.default_rng(1), rule, 90, dtype=ml_dtypes.bfloat16)
    if name not in inputs:
        return
    inputs[name].reshape(-1)[inputs[name].size // 3] = number
    check("FlashLinearAttention", inputs, attrs, isa)


@thinned(
    rule=("linear", "gated", "gated_delta", "general", "dplr"),
    name=("query", "key", "value", "decay", "past_state"),
    number=(np.nan, np.inf, -np.inf),
)
def test_undefined_numbers_reach_what_the_recurrence_gives_them_to(
    isa: str, rule: str, name: str, number: float
) -> None:
    inputs, attrs = attention(np.random.default_rng(1), rule, 90)
    if name not in inputs:
        return
    inputs[name].reshape(-1)[inputs[name].size // 3] = number
    check("FlashLinearAttention", inputs, attrs)


@thinned(rule=UPDATE_RULES, limits=((0, 0, 40, 41, 90), (0, 90), (0, 64, 90, 90)))
def test_packed_sequences(isa: str, rule: str, limits: tuple[int, ...]) -> None:
    inputs, attrs = attention(np.random.default_rng(2), rule, 90, batch=1, past=False)
    states, size, width = attrs["kv_num_heads"], 16, 24
    inputs["cu_seqlens"] = np.array(limits, np.int32)
    inputs["past_state"] = np.random.default_rng(3).standard_normal((len(limits) - 1, states, size, width), np.float32)
    check("FlashLinearAttention", inputs, attrs)


@thinned(seed=range(20))
def test_convolutions(isa: str, seed: int) -> None:
    check("ShortConvolution", *BASES["ShortConvolution"][0](np.random.default_rng(seed)))


@thinned(last=(False, True), tokens=(1, 3, 16, 100), width=(1, 2, 4, 7), dtype=(np.float32, np.float16))
def test_long_convolutions(isa: str, last: bool, tokens: int, width: int, dtype: Any) -> None:
    rng, channels = np.random.default_rng(tokens), 300 if width == 4 else 37  # 300: more than a task has
    shape = (2, tokens, channels) if last else (2, channels, tokens)
    inputs = {
        "input": rng.standard_normal(shape).astype(dtype),
        "weight": rng.standard_normal((channels, 1, width)).astype(dtype),
        "past_state": rng.standard_normal((2, channels, width - 1)).astype(dtype),
    }
    check("ShortConvolution", inputs, {"activation": "silu", "channels_last": last})


@pytest.mark.parametrize("name", ["key", "value", "decay", "beta", "past_state", "query"])
def test_a_wrong_shape_is_refused_by_name(name: str) -> None:
    inputs, attrs = attention(np.random.default_rng(0), "gated_delta", 3)
    inputs[name] = inputs[name][:, :-1]
    with pytest.raises(ops.KernelError, match=name):
        ops.run("FlashLinearAttention", inputs, attrs)


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("state", UNIT)
def test_a_state_has_a_type_of_its_own(dtype: Any, state: Any) -> None:
    inputs, attrs = attention(np.random.default_rng(0), "gated_delta", 5, dtype=dtype)
    inputs["past_state"] = inputs["past_state"].astype(state)
    check("FlashLinearAttention", inputs, attrs)
    assert ops.run("FlashLinearAttention", inputs, attrs)["present_state"].dtype == state
