"""Masks that are put in place of scores before something else is added, with masks and keys that hold unusual numbers.

The original keeps what was added to a masked key: opposite numbers cancel, and a row may have nothing else.
"""

from __future__ import annotations

import numpy as np
import pytest

from fa_compiler.passes import Block
from tests.passes.masks.test_rounding import NUMBERS
from tests.passes.running import PRODUCT_PV, PRODUCT_QK, SOFTMAX, Array, assert_same, fused, parse, random_feeds, run

MORE = "bool[B,1,S,T] c, bool[B,1,1,T] m, int64[B,1,1,T] i, float[B,1,1,T] b, float[B,1,1,T] e"
PADDED = "f = Cast<to=1>(i) g = Sub(one, f) w = Mul(g, least) "
CAUSAL = np.tril(np.ones((2, 1, 5, 6), np.bool_))
KEYS = np.array([1, 1, 1, 1, 0, 1], np.bool_).reshape(1, 1, 1, 6).repeat(2, 0)
IDS = {
    "ones": [[1, 1, 1, 1, 1, 1]] * 2,
    "padded": [[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]],
    "nothing": [[0, 0, 0, 0, 0, 0]] * 2,
    "packed": [[1, 1, 1, 2, 2, 2], [1, 1, 2, 2, 3, 0]],
    "negative": [[1, -1, 1, 1, -1, 2], [2, 2, 2, 2, 2, 2]],
}
GUARD = "p0 = Softmax<axis=-1>(x) n = IsNaN(p0) p = Where(n, zero, p0) "


def compared(body: str, softmax: str = SOFTMAX.format("x"), **given: Array) -> Block:
    """The block of a model after its results were compared with the original's."""
    proto = parse(PRODUCT_QK + NUMBERS + body + softmax + PRODUCT_PV, MORE)
    feeds = random_feeds(proto, **{"c": CAUSAL, "m": KEYS, "i": np.array(IDS["padded"]).reshape(2, 1, 1, 6), **given})
    result, report = fused(proto)
    for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
        assert_same(got, wanted, 1e-5)
    return report.blocks[0]


OPPOSITE = "most = Constant<value=float {3.4028235e38}>() o = Where(m, zero, most) u = Where(m, zero, coarse) "
BIASED = {
    "selected_then_padded": PADDED + "a = Where(c, s, least) x = Add(a, w) ",
    "added_then_padded": PADDED + "t = Where(c, zero, least) a = Add(s, t) x = Add(a, w) ",
    "padded_then_added": PADDED + "t = Where(c, zero, least) a = Add(s, w) x = Add(a, t) ",
    "float_mask": "g = Sub(one, b) w = Mul(g, least) a = Where(c, s, least) x = Add(a, w) ",
    "any_float_behind": "a = Where(c, s, least) x = Add(a, b) ",
    "infinite_then_padded": PADDED + "a = Where(c, s, low) x = Add(a, w) ",
    "moderate_then_biased": "a = Where(c, s, coarse) x = Add(a, b) ",
    "two_numbers": "a = Where(c, s, coarse) d = Where(m, a, coarser) x = Add(d, b) ",
    "biased_between": "a = Where(c, s, coarse) d = Add(a, b) x = Where(m, d, least) ",
    # OpenAI's GPT and TensorFlow's GPT-2.
    "blended_then_padded": PADDED + "k1 = Cast<to=1>(c) h = Sub(one, k1) u = Mul(h, coarse) y0 = Mul(s, k1) "
    "a = Add(y0, u) x = Add(a, w) ",
    "blended_by_a_difference_then_masked": "k1 = Cast<to=1>(c) h = Sub(one, k1) l = Neg(coarse) u = Mul(l, h) "
    "y0 = Mul(s, k1) a = Sub(y0, u) g = Sub(one, b) w = Mul(g, coarse) x = Add(a, w) ",
    # Opposite numbers cancel at a masked key, and what comes behind them is all that it keeps.
    "selected_then_opposite": OPPOSITE + "a = Where(c, s, least) d = Add(a, o) x = Add(d, u) ",
    "added_then_opposite": OPPOSITE + "t = Where(c, zero, least) a = Add(s, t) d = Add(a, o) x = Add(d, u) ",
    "coarse_then_two": "l = Tanh(b) r = Tanh(e) a = Where(c, s, coarse) d = Add(a, l) x = Add(d, r) ",
    "scaled_behind": "four = Constant<value=float {4.0}>() a = Where(c, s, coarse) d = Add(a, b) x = Div(d, four) ",
}


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("name", BIASED)
def test_masked_keys_keep_what_is_added_to_them(name: str, ids: str) -> None:
    block = compared(BIASED[name], i=np.array(IDS[ids]).reshape(2, 1, 1, 6))
    assert block.status == "fused"
    assert "EXT-MASKED-BIAS" in block.extensions


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("fill", ["low", "least", "coarse"])
def test_a_masked_key_that_is_nan_is_not_read(fill: str, guarded: bool) -> None:
    """The selection replaces its score, whatever is added afterwards."""
    key = np.random.default_rng(1).standard_normal((2, 4, 6, 8)).astype(np.float32)
    key[:, :, 4] = np.nan
    softmax = GUARD if guarded else SOFTMAX.format("x")
    assert compared(f"a = Where(m, s, {fill}) x = Add(a, b) ", softmax, k=key).status == "fused"


def test_the_guard_of_a_row_that_has_nothing_but_infinite_scores() -> None:
    """Every key is masked by -inf or biased to it: the guard gives 0."""
    block = compared(
        "l = Where(c, zero, low) a = Where(m, s, low) d = Add(a, b) x = Add(d, l) ",
        GUARD,
        m=np.zeros_like(KEYS),
    )
    assert block.status == "fused"


BLENDED = {
    "behind_infinite_scores": "a = Where(c, s, low) k1 = Cast<to=1>(m) h = Sub(one, k1) u = Mul(h, least) "
    "y0 = Mul(a, k1) x = Add(y0, u) ",
    "behind_an_unknown_bias": "a = Add(s, b) k1 = Cast<to=1>(m) h = Sub(one, k1) u = Mul(h, least) "
    "y0 = Mul(a, k1) x = Add(y0, u) ",
    "behind_scores_that_a_factor_makes_infinite": "thrice = Constant<value=float {3.0}>() l = Where(c, s, least) "
    "a = Mul(l, thrice) k1 = Cast<to=1>(m) h = Sub(one, k1) u = Mul(h, coarse) y0 = Mul(a, k1) x = Add(y0, u) ",
    "behind_two_masks": "l = Where(c, zero, least) n1 = Where(m, zero, least) d = Add(s, l) a = Add(d, n1) "
    "k1 = Cast<to=1>(m) h = Sub(one, k1) u = Mul(h, coarse) y0 = Mul(a, k1) x = Add(y0, u) ",
}


@pytest.mark.parametrize("name", BLENDED)
def test_a_blend_of_scores_that_may_be_infinite(name: str) -> None:
    """0 * -inf is NaN, which no selection gives."""
    bias = np.where(KEYS, 0.5, -np.inf).astype(np.float32)
    block = compared(BLENDED[name], GUARD, b=bias)
    assert block.code == "score_term"
    assert block.culprit


WITH_INFINITY = {
    "added": "k1 = Cast<to=1>(m) h = Sub(one, k1) u = Mul(h, low) y0 = Mul(s, k1) x = Add(y0, u) ",
    "subtracted": "k1 = Cast<to=1>(m) h = Sub(k1, one) u = Mul(h, low) y0 = Mul(s, k1) x = Sub(y0, u) ",
}


@pytest.mark.parametrize("name", WITH_INFINITY)
def test_a_blend_with_infinity(name: str) -> None:
    """0 * -inf is NaN at each key that is kept."""
    block = compared(WITH_INFINITY[name], GUARD)
    assert block.status == "declined" and block.culprit


UNORDERED = {
    "two_inputs": "a = Add(s, b) x = Add(a, e) ",
    "two_inputs_then_a_selection": "a = Add(s, b) d = Add(a, e) x = Where(c, d, least) ",
    "two_inputs_then_a_moderate_selection": "a = Add(s, b) d = Add(a, e) x = Where(c, d, coarse) ",
    "an_input_among_masks": "t = Where(m, zero, coarse) n = Where(c, zero, least) a = Add(s, b) d = Add(a, t) "
    "x = Add(d, n) ",
    "relative_positions_before_a_mask": "f = Cast<to=1>(i) g = Sub(one, f) l = Constant<value=float {-1e6}>() "
    "w = Mul(g, l) a = Add(s, b) x = Add(a, w) ",  # Funnel's
    "scattered": "o = Constant<value=int64[1,1,1,1] {0}>() t = Constant<value=float[1,1,1,1] {-1e9}>() "
    'z = Constant<value=float[1,1,1,6] {0,0,0,0,0,0}>() r = ScatterElements<axis=3, reduction="add">(z, o, t) '
    "d = Constant<value=float[6] {0.1,0.2,0.3,0.4,0.5,0.6}>() a = Add(s, d) x = Add(a, r) ",
}


@pytest.mark.parametrize("name", UNORDERED)
def test_addends_whose_order_shows_are_declined(name: str) -> None:
    everywhere = np.full((2, 1, 1, 6), -1e9, np.float32)
    block = compared(UNORDERED[name], b=everywhere, e=everywhere / 1e5, m=np.zeros_like(KEYS))
    assert block.code == "mask_value"
    assert block.hint == "--assume no-empty-rows if no query row is masked everywhere"


INFINITE = "f = Cast<to=1>(i) g = Sub(one, f) w = Mul(g, least) t = Where(c, zero, low) "


@pytest.mark.parametrize(
    "order", ["a = Add(s, w) x = Add(a, t) ", "a = Add(s, t) x = Add(a, w) ", "a = Add(w, t) x = Add(s, a) "]
)
def test_a_mask_of_minus_infinity_beside_plus_infinity_is_nan(order: str) -> None:
    """(1 - 3) times the least number is +inf."""
    ids = np.array([[1, 1, 1, 0, 1, 3], [1, 1, 1, 1, 1, 1]]).reshape(2, 1, 1, 6)
    assert compared(INFINITE + order, i=ids).status == "fused"


def test_for_ascend_opposite_numbers_are_declined_unless_masks_are_binary() -> None:
    """Its operator has no score for masked keys."""
    proto = parse(PRODUCT_QK + NUMBERS + BIASED["selected_then_padded"] + SOFTMAX.format("x") + PRODUCT_PV, MORE)
    _, report = fused(proto, "ascend")
    assert report.blocks[0].code == "mask_value"
    assert "binary-masks" in str(report.blocks[0].hint)
    _, report = fused(proto, "ascend", ["binary-masks"])
    assert report.blocks[0].mask == "real_shift"


HALF = "float16[B,4,S,8] q, float16[B,4,T,8] k, float16[B,4,T,8] v"
SHORT = "zero_ = Constant<value=float {0.0}>() least_ = Constant<value=float {-65504.0}>() "
SHORT += "zero = Cast<to=10>(zero_) least = Cast<to=10>(least_) t = Where(m, zero, least) "
SUMMED = {
    "directly": "u = Add(t, b) x = Add(s, u) ",
    "then_moved": "h = Shape(s) w = Add(t, b) u = Expand(w, h) x = Add(s, u) ",
    "then_moved_twice": "h = Shape(s) w = Add(t, b) w2 = Identity(w) u = Expand(w2, h) x = Add(s, u) ",
    "then_cast": "c1 = Cast<to=1>(t) d1 = Cast<to=1>(b) w = Add(c1, d1) u = Cast<to=10>(w) x = Add(s, u) ",
    "in_float64": "c1 = Cast<to=11>(t) d1 = Cast<to=11>(b) w = Add(c1, d1) u = Cast<to=10>(w) x = Add(s, u) ",
    "then_cast_and_moved": "c1 = Cast<to=1>(t) d1 = Cast<to=1>(b) w = Add(c1, d1) w2 = Cast<to=10>(w) h = Shape(s) "
    "u = Expand(w2, h) x = Add(s, u) ",
    "of_two_masks": "n = Where(r, zero, least) u = Add(t, n) x = Add(s, u) ",
    "whose_exponential_is_read": "h = Shape(s) w = Add(t, b) u = Expand(w, h) x = Add(s, u) z = Exp(u) ",
    "whose_maximum_is_read": "h = Shape(s) w = Add(t, b) u = Expand(w, h) x = Add(s, u) z = Max(u, zero) ",
    "whose_type_is_read": "h = Shape(s) w = Add(t, b) u = Expand(w, h) x = Add(s, u) z = CastLike(one, u) ",
}


@pytest.mark.parametrize("size", ["T", "other"])
@pytest.mark.parametrize("name", SUMMED)
def test_sums_of_float16_masks_beyond_its_range(name: str, size: str) -> None:
    """ONNX Runtime keeps -65504 - 65504 in float32 until something moves it more than once."""
    more = f"bool[B,1,1,{size}] m, bool[B,1,S,1] r, float16[B,1,1,T] b"
    outputs = (
        ", float16[1] z" if "CastLike" in SUMMED[name] else ", float16[?,?,?,?] z" if "z = " in SUMMED[name] else ""
    )
    proto = parse(
        PRODUCT_QK + SHORT + SUMMED[name] + SOFTMAX.format("x") + PRODUCT_PV,
        f"{more}, float[1] one",
        inputs=HALF,
        outputs="float16[B,4,S,8] y" + outputs,
    )
    distances = (np.arange(6) * -8.0).astype(np.float16).reshape(1, 1, 1, 6).repeat(2, 0)
    nowhere = np.zeros_like(KEYS)
    feeds = random_feeds(proto, m=nowhere, b=distances, r=np.zeros((2, 1, 5, 1), np.bool_))
    result, report = fused(proto)
    assert report.blocks[0].status == "fused"
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 4e-3)  # float16 has 11 bits


@pytest.mark.parametrize("reader", ["Selu", "Sign", "Log", "Relu", "Tanh"])
def test_a_sum_of_float16_masks_that_another_operator_reads(reader: str) -> None:
    """Of which it is not known whether it has a 16-bit kernel, which would round the sum."""
    body = SUMMED["then_moved"] + f"z = {reader}(u) "
    outputs = "float16[B,4,S,8] y, float16[?,?,?,?] z"
    more = "bool[B,1,1,T] m, float16[B,1,1,T] b"
    text = PRODUCT_QK + SHORT + body + SOFTMAX.format("x") + PRODUCT_PV
    _, report = fused(parse(text, more, inputs=HALF, outputs=outputs))
    (block,) = report.blocks
    assert block.code == "mask_value" and f"as {reader} reads it" in str(block.reason)


def test_a_mask_that_a_later_factor_makes_smaller_is_not_taken_for_a_mask() -> None:
    """-1e30 times 0.35 is no number of a mask any more, and nobody vouched for it."""
    numbers = "low30 = Constant<value=float {-1e30}>() third = Constant<value=float {0.35}>() "
    block = compared(numbers + "t = Where(c, zero, low30) a = Add(s, t) x = Mul(a, third) ")
    assert block.assumed == ()
