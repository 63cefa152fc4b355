"""Cases small enough to be worked by hand; the expected numbers are literals."""

import math

import ml_dtypes
import numpy as np
import pytest

from fa_compiler import reference

from .naive import EXACT, causal_constant, forward, out

LN2, LN3 = math.log(2.0), math.log(3.0)


def tensor(*rows):
    """Rows of numbers as float64 [1,1,S,D]."""
    return np.array(rows, dtype=np.float64).reshape(1, 1, len(rows), -1)


def test_softmax_weights_and_statistics():
    """exp(0) : exp(ln 3) = 1 : 3, so the weights are 1/4 and 3/4."""
    result = forward({"query": tensor(1), "key": tensor(0, LN3), "value": tensor(4, 8)})
    np.testing.assert_allclose(result["attention_out"], [[[[7.0]]]], **EXACT)
    np.testing.assert_allclose(result["softmax_max"], np.full((1, 1, 1, 8), 1.0986122886681098), **EXACT)
    np.testing.assert_allclose(result["softmax_sum"], np.full((1, 1, 1, 8), 4.0 / 3.0), **EXACT)
    assert result["softmax_out"].shape == (0, 0, 0, 0)


def test_scale_default_is_one_and_is_applied():
    inputs = {"query": tensor(1), "key": tensor(0, LN3), "value": tensor(0, 10)}
    np.testing.assert_allclose(out(inputs), [[[[7.5]]]], **EXACT)
    np.testing.assert_allclose(out(inputs, scale_value=2.0), [[[[9.0]]]], **EXACT)


def test_pse_before_and_after_the_scale():
    """Bias (0, ln 2) and scale 2: weights 1:2 after the scale, 1:4 before it."""
    inputs = {"query": tensor(1), "key": tensor(0, 0), "value": tensor(3, 6), "real_shift": tensor([0, LN2])}
    np.testing.assert_allclose(out(inputs, scale_value=2.0, pse_type=0), [[[[5.0]]]], **EXACT)
    np.testing.assert_allclose(out(inputs, scale_value=2.0, pse_type=1), [[[[5.4]]]], **EXACT)


def test_slopes():
    """Slope ln 2 halves the weight with every step of distance: rows (2/3, 1/3) and (1/3, 2/3)."""
    inputs = {
        "query": tensor(0, 0),
        "key": tensor(0, 0),
        "value": tensor(3, 6),
        "real_shift": np.array([LN2]),
    }
    np.testing.assert_allclose(out(inputs, pse_type=2)[0, 0, :, 0], [4.0, 5.0], **EXACT)
    # Keys start at 4: distances 4, 5 in row 0 and 3, 4 in row 1, both 2 : 1.
    inputs["kv_start_idx"] = np.array([4])
    np.testing.assert_allclose(out(inputs, pse_type=2)[0, 0, :, 0], [4.0, 4.0], **EXACT)
    # Queries too: back to the same distances as without.
    inputs["q_start_idx"] = np.array([4])
    np.testing.assert_allclose(out(inputs, pse_type=2)[0, 0, :, 0], [4.0, 5.0], **EXACT)


def test_slopes_with_square_root():
    """Distances 0 and 9 with type 3 count as 0 and 3: weights 8 : 1 in row 0, the first of as many rows as keys."""
    inputs = {
        "query": tensor(*[0] * 10),
        "key": tensor(0, *[0] * 9),
        "value": tensor(8, *[0] * 8, 80),
        "real_shift": np.array([[LN2]]),
        "atten_mask": np.array([[0] + [1] * 8 + [0]] * 10, dtype=np.uint8),
    }
    np.testing.assert_allclose(out(inputs, pse_type=3)[0, 0, 0], [16.0], **EXACT)


def test_mask_excludes_where_it_is_true():
    inputs = {
        "query": tensor(1),
        "key": tensor(1, 2),
        "value": tensor(3, 6),
        "atten_mask": np.array([[True, False]]),
    }
    np.testing.assert_allclose(out(inputs), [[[[6.0]]]], **EXACT)


def test_causal_rows():
    """Equal scores: row i is the mean of the values it sees."""
    inputs = {
        "query": tensor(0, 0, 0),
        "key": tensor(0, 0, 0),
        "value": tensor(2, 4, 12),
        "atten_mask": causal_constant(),
    }
    np.testing.assert_allclose(out(inputs, sparse_mode=2)[0, 0, :, 0], [2.0, 3.0, 6.0], **EXACT)
    inputs["query"] = tensor(0, 0)
    np.testing.assert_allclose(out(inputs, sparse_mode=2)[0, 0, :, 0], [2.0, 3.0], **EXACT)
    np.testing.assert_allclose(out(inputs, sparse_mode=3)[0, 0, :, 0], [3.0, 6.0], **EXACT)


def test_mode_is_ignored_without_a_mask():
    inputs = {"query": tensor(0, 0), "key": tensor(0, 0), "value": tensor(2, 4)}
    for mode in (0, 1, 2, 3, 4, 5, 6, 7, 8):
        result = out(inputs, sparse_mode=mode, pre_tockens=0, next_tockens=0)
        np.testing.assert_allclose(result[0, 0, :, 0], [3.0, 3.0], **EXACT)


def test_fully_masked_row_is_zero():
    inputs = {
        "query": tensor(1, 1),
        "key": tensor(1, 2),
        "value": tensor(5, 5),
        "atten_mask": np.array([[1, 1], [0, 1]], dtype=np.uint8),
    }
    result = forward(inputs, dtype=None)
    np.testing.assert_array_equal(result["attention_out"][0, 0, :, 0], [0.0, 5.0])
    np.testing.assert_array_equal(result["softmax_max"][0, 0, :, 3], np.array([-3.4028235e38, 1.0], np.float32))
    np.testing.assert_array_equal(result["softmax_sum"][0, 0, :, 3], np.array([3.4028235e38, 1.0], np.float32))
    assert result["softmax_max"].dtype == np.float32


def test_sink_takes_weight_and_has_no_value():
    """exp(0) against a sink of exp(ln 3): the only key has weight 1/4."""
    inputs = {"query": tensor(1), "key": tensor(0), "value": tensor(8), "sink": np.array([LN3], np.float64)}
    result = forward(inputs)
    np.testing.assert_allclose(result["attention_out"], [[[[2.0]]]], **EXACT)
    np.testing.assert_allclose(result["softmax_max"][..., 0], [[[LN3]]], **EXACT)
    np.testing.assert_allclose(result["softmax_sum"][..., 0], [[[4.0 / 3.0]]], **EXACT)


def test_sink_and_fully_masked_row():
    """The sink stays the only term: max = sink, sum = 1, and the row is 0."""
    inputs = {
        "query": tensor(1),
        "key": tensor(0),
        "value": tensor(8),
        "sink": np.array([LN3], np.float64),
        "atten_mask": np.array([[1]], dtype=np.uint8),
    }
    result = forward(inputs)
    assert result["attention_out"].item() == 0.0
    np.testing.assert_array_equal(result["softmax_max"], np.full((1, 1, 1, 8), LN3))
    np.testing.assert_array_equal(result["softmax_sum"], np.ones((1, 1, 1, 8)))


def test_dropout_bits_least_significant_first():
    """Byte 0b0101 keeps keys 0 and 2; the sum before dropout stays 4."""
    inputs = {
        "query": tensor(0),
        "key": tensor(0, 0, 0, 0),
        "value": tensor(1, 2, 4, 8),
        "drop_mask": np.array([0b0101], dtype=np.uint8),
    }
    result = forward(inputs, keep_prob=0.5)
    np.testing.assert_allclose(result["attention_out"], [[[[2.5]]]], **EXACT)
    np.testing.assert_allclose(result["softmax_sum"][..., 0], [[[4.0]]], **EXACT)
    # keep_prob 1: the bits are not looked at.
    np.testing.assert_allclose(out(inputs), [[[[3.75]]]], **EXACT)


def test_heads_of_a_group_are_consecutive():
    inputs = {
        "query": np.zeros((1, 4, 1, 1)),
        "key": np.zeros((1, 2, 1, 1)),
        "value": np.array([10.0, 20.0]).reshape(1, 2, 1, 1),
    }
    np.testing.assert_array_equal(out(inputs).reshape(-1), [10.0, 10.0, 20.0, 20.0])


def test_rope_adds_a_second_product_under_one_scale():
    """Q K^T gives (0, ln 3 / 2), the rope product the same again; scale 1."""
    half = LN3 / 2.0
    inputs = {
        "query": tensor(1),
        "key": tensor(0, half),
        "value": tensor(4, 8),
        "query_rope": tensor([half, 5.0]),
        "key_rope": tensor([0.0, 0.0], [1.0, 0.0]),
    }
    np.testing.assert_allclose(out(inputs), [[[[7.0]]]], **EXACT)


def gradient(inputs, **attrs):
    return reference.run(
        "FlashAttentionScoreGrad", inputs, {"head_num": 1, "input_layout": "BNSD", **attrs}, dtype="float64"
    )


def test_gradient():
    """P = (1/4, 3/4), dP = (4, 8), O = 7: dS = P (dP - 7) = (-3/4, 3/4)."""
    statistics = {"softmax_max": np.full((1, 1, 1, 8), LN3), "softmax_sum": np.full((1, 1, 1, 8), 4.0 / 3.0)}
    result = gradient(
        {
            "query": tensor(1),
            "key": tensor(0, LN3),
            "value": tensor(4, 8),
            "dy": tensor(1),
            "attention_in": tensor(7),
            **statistics,
        }
    )
    np.testing.assert_allclose(result["dv"].reshape(-1), [0.25, 0.75], **EXACT)
    np.testing.assert_allclose(result["dk"].reshape(-1), [-0.75, 0.75], **EXACT)
    np.testing.assert_allclose(result["dq"].reshape(-1), [0.75 * LN3], **EXACT)
    assert result["dpse"].shape == result["dq_rope"].shape == result["dk_rope"].shape == result["dsink"].shape == (0,)


def test_gradient_of_the_sink():
    """P = 1/4, dP = 8, p_sink = 3/4: dsink = -1/4 * 8 * 3/4."""
    statistics = {"softmax_max": np.full((1, 1, 1, 8), LN3), "softmax_sum": np.full((1, 1, 1, 8), 4.0 / 3.0)}
    result = gradient(
        {
            "query": tensor(1),
            "key": tensor(0),
            "value": tensor(8),
            "dy": tensor(1),
            "attention_in": tensor(2),
            "sink": np.array([LN3]),
            **statistics,
        }
    )
    np.testing.assert_allclose(result["dsink"], [-1.5], **EXACT)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_results_are_float64_results_rounded_once(dtype):
    rng = np.random.default_rng(0)
    inputs = {name: rng.standard_normal((1, 2, 3, 4)).astype(dtype) for name in ("query", "key", "value")}
    exact = forward(inputs)
    rounded = forward(inputs, dtype=None)
    assert rounded["attention_out"].dtype == np.dtype(dtype)
    np.testing.assert_array_equal(rounded["attention_out"], exact["attention_out"].astype(dtype))
    np.testing.assert_array_equal(rounded["softmax_sum"], exact["softmax_sum"].astype(np.float32))


def test_bfloat16():
    inputs = {
        "query": tensor(1).astype(ml_dtypes.bfloat16),
        "key": tensor(0, 1).astype(ml_dtypes.bfloat16),
        "value": tensor(4, 8).astype(ml_dtypes.bfloat16),
    }
    result = forward(inputs, dtype=None)
    assert result["attention_out"].dtype == ml_dtypes.bfloat16
    # 4 + 4 e/(1+e) = 6.924...; bfloat16 has steps of 1/32 there.
    assert float(result["attention_out"].item()) == 6.9375
