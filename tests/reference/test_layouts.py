"""The same data in five layouts gives the same numbers; packed batches give what each batch gives alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .naive import EXACT, attention, causal_constant, cumulative, forward, random, to_layout

LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5),
    st.integers(1, 4), st.integers(1, 4), st.integers(0, 3), st.booleans(), st.integers(0, 9),
)  # fmt: skip
def test_layouts_agree_with_loops(b, n2, group, s1, s2, d, dv, rope, causal, seed):
    q, k, v = (
        random(seed, b, n2 * group, s1, d),
        random(seed + 1, b, n2, s2, d),
        random(seed + 2, b, n2, s2, dv),
    )
    qr, kr = random(seed + 3, b, n2 * group, s1, rope), random(seed + 4, b, n2, s2, rope)
    want, want_max, want_sum = attention(
        np.concatenate([q, qr], -1), np.concatenate([k, kr], -1), v, scale=0.7,
        allowed=lambda b, n, i, j: not causal or j <= i + s2 - s1,
    )  # fmt: skip
    for layout in LAYOUTS:
        inputs = {"query": to_layout(q, layout), "key": to_layout(k, layout), "value": to_layout(v, layout)}
        if rope:
            inputs |= {"query_rope": to_layout(qr, layout), "key_rope": to_layout(kr, layout)}
        if causal:
            inputs["atten_mask"] = causal_constant()
        if layout == "TND":
            inputs |= {"actual_seq_qlen": cumulative(*[s1] * b), "actual_seq_kvlen": cumulative(*[s2] * b)}
        got = forward(
            inputs,
            input_layout=layout,
            head_num=n2 * group,
            scale_value=0.7,
            sparse_mode=3,
            softmax_out_layout="same_as_input",
        )
        np.testing.assert_allclose(got["attention_out"], to_layout(want, layout), **EXACT)
        for name, statistic in (("softmax_max", want_max), ("softmax_sum", want_sum)):
            if layout == "TND":
                statistic = statistic.transpose(0, 2, 1).reshape(b * s1, -1)
            assert got[name].shape == (*statistic.shape, 8)
            np.testing.assert_allclose(got[name], np.repeat(statistic[..., None], 8, -1), **EXACT)


def test_packed_batches_of_any_length():
    """Lengths 2, 0, 3 and a trailing zero; two tokens beyond the last batch are zero rows."""
    q_lens, kv_lens = (2, 0, 3), (4, 0, 1)
    q, k, v = random(0, 7, 4, 3), random(1, 6, 2, 3), random(2, 6, 2, 5)
    got = forward(
        {"query": q, "key": k, "value": v, "actual_seq_qlen": np.array([2, 2, 5, 0]),
         "actual_seq_kvlen": np.array([4, 4, 5, 0])},
        input_layout="TND", softmax_out_layout="same_as_input",
    )  # fmt: skip
    row = column = 0
    for s1, s2 in zip(q_lens, kv_lens, strict=True):
        if s1:
            one = [
                x.transpose(1, 0, 2)[None]
                for x in (q[row : row + s1], k[column : column + s2], v[column : column + s2])
            ]
            want, want_max, _ = attention(*one)
            np.testing.assert_allclose(got["attention_out"][row : row + s1], want[0].transpose(1, 0, 2), **EXACT)
            np.testing.assert_allclose(got["softmax_max"][row : row + s1, :, 5], want_max[0].T, **EXACT)
        row, column = row + s1, column + s2
    assert row == 5
    for name in ("attention_out", "softmax_max", "softmax_sum"):
        assert got[name].shape[0] == 7
        np.testing.assert_array_equal(got[name][5:], 0.0)


def test_default_order_of_packed_statistics():
    """Element (token s of batch b, head n) lies at (cum[b-1]*N + n*S_b + s)*8 of the flat buffer."""
    cum, heads = [2, 2, 5], 3
    inputs = {
        "query": random(0, 6, heads, 2),
        "key": random(1, 5, heads, 2),
        "value": random(2, 5, heads, 2),
        "actual_seq_qlen": np.array(cum),
        "actual_seq_kvlen": np.array(cum),
    }
    blocks = forward(inputs, input_layout="TND")
    true = forward(inputs, input_layout="TND", softmax_out_layout="same_as_input")
    for name in ("softmax_max", "softmax_sum"):
        assert blocks[name].shape == true[name].shape == (6, heads, 8)
        flat = blocks[name].reshape(-1)
        for b, (start, end) in enumerate(zip([0, *cum], cum, strict=False)):
            for n in range(heads):
                for s in range(end - start):
                    position = ((cum[b - 1] if b else 0) * heads + n * (end - start) + s) * 8
                    np.testing.assert_array_equal(flat[position : position + 8], true[name][start + s, n])
        np.testing.assert_array_equal(flat[5 * heads * 8 :], 0.0)


def test_statistics_rebuild_the_probabilities():
    q, k, v = random(0, 2, 4, 5, 3), random(1, 2, 2, 6, 3), random(2, 2, 2, 6, 3)
    got = forward({"query": q, "key": k, "value": v}, scale_value=0.5)
    for n in range(4):
        p = np.exp(0.5 * q[:, n] @ k[:, n // 2].transpose(0, 2, 1) - got["softmax_max"][:, n, :, :1])
        p /= got["softmax_sum"][:, n, :, :1]
        np.testing.assert_allclose(p.sum(-1), 1.0, **EXACT)
        np.testing.assert_allclose(p @ v[:, n // 2], got["attention_out"][:, n], **EXACT)


@pytest.mark.parametrize(
    ("layout", "empty"),
    # head_num 0 is an error, so BSH and SBH cannot have no heads.
    [(layout, empty) for layout in LAYOUTS for empty in ("b", "s1", "s2", "d")]
    + [(layout, "n") for layout in ("BSND", "BNSD", "TND")],
)
def test_empty_tensors(layout, empty):
    """Nothing to compute gives empty outputs; nothing to attend gives zeros, in the statistics too."""
    size = {"b": 2, "s1": 3, "s2": 4, "d": 2, "n": 2} | {empty: 0}
    q = np.ones((size["b"], size["n"], size["s1"], size["d"]), np.float32)
    k = np.ones((size["b"], size["n"], size["s2"], size["d"]), np.float32)
    inputs = {"query": to_layout(q, layout), "key": to_layout(k, layout), "value": to_layout(k, layout)}
    if layout == "TND":
        inputs |= {
            "actual_seq_qlen": cumulative(*[size["s1"]] * size["b"]),
            "actual_seq_kvlen": cumulative(*[size["s2"]] * size["b"]),
        }
    got = forward(inputs, dtype=None, input_layout=layout, head_num=2)
    assert got["attention_out"].shape == to_layout(q, layout).shape
    for result in got.values():
        assert result.dtype == np.float32
        np.testing.assert_array_equal(result, 0.0)


def test_key_heads_empty():
    q, k = np.ones((1, 2, 3, 4)), np.ones((1, 0, 3, 4))
    np.testing.assert_array_equal(forward({"query": q, "key": k, "value": k})["attention_out"], np.zeros((1, 2, 3, 4)))


def test_packed_batch_without_keys_is_zero():
    inputs = {
        "query": np.ones((3, 1, 1)),
        "key": np.ones((1, 1, 1)),
        "value": np.ones((1, 1, 1)),
        "actual_seq_qlen": np.array([2, 3]),
        "actual_seq_kvlen": np.array([0, 1]),
    }
    got = forward(inputs, input_layout="TND")
    np.testing.assert_array_equal(got["attention_out"].reshape(-1), [0.0, 0.0, 1.0])
    np.testing.assert_array_equal(got["softmax_sum"][..., 0].reshape(-1), [0.0, 0.0, 1.0])


def test_long_sequence_runs_head_by_head():
    """S = 2048: the softmax of equal scores under a causal mask is the running mean."""
    v = random(0, 1, 2, 2048, 4)
    q = np.zeros((1, 2, 2048, 4))
    got = forward({"query": q, "key": q, "value": v, "atten_mask": causal_constant()}, sparse_mode=3)
    want = np.cumsum(v, axis=2) / np.arange(1, 2049)[:, None]
    # 2048 additions of numbers around 1 in two orders.
    np.testing.assert_allclose(got["attention_out"], want, rtol=0, atol=1e-12)
