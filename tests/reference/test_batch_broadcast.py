"""Query, key and value of batch 1 beside a larger batch give what their repeated copies give."""

import numpy as np
import pytest

from fa_compiler import reference

from .naive import EXACT, attention, forward, random, to_layout

FOUR_LAYOUTS = ("BSH", "SBH", "BSND", "BNSD")
B, N1, N2, S1, S2, D, DV = 3, 4, 2, 5, 6, 3, 2


def operands(batches):
    q, k, v = batches
    return random(0, q, N1, S1, D), random(1, k, N2, S2, D), random(2, v, N2, S2, DV)


def repeated(array):
    return np.repeat(array, B // array.shape[0], axis=0)


@pytest.mark.parametrize("layout", FOUR_LAYOUTS)
@pytest.mark.parametrize("batches", [(1, B, B), (B, 1, B), (B, B, 1), (B, 1, 1), (1, B, 1), (1, 1, B)])
@pytest.mark.parametrize("mask_batch", [None, 1, B])
def test_a_batch_of_one_is_repeated(layout, batches, mask_batch):
    qkv = operands(batches)
    inputs = dict(zip(("query", "key", "value"), (to_layout(x, layout) for x in qkv), strict=True))
    excluded = np.zeros((B, 1, S1, S2), np.bool_)
    if mask_batch is not None:
        mask = np.random.default_rng(3).random((mask_batch, 1, S1, S2)) < 0.4
        mask[0, 0, 1] = True  # a row that attends nothing
        inputs["atten_mask"] = mask
        excluded = np.broadcast_to(mask, excluded.shape)
    want, want_max, want_sum = attention(
        *map(repeated, qkv), scale=0.7, allowed=lambda b, n, i, j: not excluded[b, 0, i, j]
    )
    got = forward(inputs, input_layout=layout, head_num=N1, scale_value=0.7)
    np.testing.assert_allclose(got["attention_out"], to_layout(want, layout), **EXACT)
    for name, statistic in (("softmax_max", want_max), ("softmax_sum", want_sum)):
        np.testing.assert_allclose(got[name], np.repeat(statistic[..., None], 8, -1), **EXACT)


def test_bias_slopes_rope_and_dropout_are_those_of_the_common_batch():
    query, key, value = operands((1, B, 1))
    bits = np.random.default_rng(4).integers(0, 256, B * N1 * S1 * S2 // 8, np.uint8)
    for extra, attrs in (
        ({"real_shift": random(5, B, 1, S1, S2)}, {"pse_type": 0}),
        ({"real_shift": random(5, B, N1), "key": key[:, :, :S1], "value": value[:, :, :S1]}, {"pse_type": 2}),
        ({"query_rope": random(5, 1, N1, S1, 2), "key_rope": random(6, B, N2, S2, 2)}, {}),
        ({"drop_mask": bits}, {"keep_prob": 0.5}),
    ):
        got = forward({"query": query, "key": key, "value": value, **extra}, **attrs)
        if "query_rope" in extra:
            extra = extra | {"query_rope": repeated(extra["query_rope"])}
        if "value" in extra:
            extra = extra | {"value": repeated(extra["value"])}
        want = forward({"query": repeated(query), "key": key, "value": repeated(value), **extra}, **attrs)
        for name, array in want.items():
            np.testing.assert_array_equal(got[name], array)


def test_a_batch_of_one_beside_an_empty_one_is_empty():
    got = forward({"query": np.ones((0, 2, 3, 4)), "key": np.ones((1, 2, 5, 4)), "value": np.ones((1, 2, 5, 4))})
    assert got["attention_out"].shape == (0, 2, 3, 4)
    assert got["softmax_max"].shape == (0, 2, 3, 8)


def test_packed_heads_of_one_are_no_batch():
    """In TND dimension 0 is tokens and dimension 1 heads: nothing is repeated."""
    lengths = {"actual_seq_qlen": np.array([2, 4]), "actual_seq_kvlen": np.array([3, 5])}
    inputs = {"query": random(0, 4, 1, 3), "key": random(1, 5, 1, 3), "value": random(2, 1, 1, 3)}
    with pytest.raises(reference.ReferenceInputError, match="value: has 1 as T, expected 5 as key"):
        forward(inputs | lengths, input_layout="TND")


@pytest.mark.parametrize("layout", FOUR_LAYOUTS)
@pytest.mark.parametrize("windows", [1, 2, 3, 6])
def test_masks_of_a_part_of_the_batch_are_repeated(layout, windows):
    """With cpu_mask_batch, also beside operands of batch 1."""
    q, k, v = random(0, 6, N1, S1, D), random(1, 6, N2, S2, D), random(2, 1, N2, S2, DV)
    inputs = dict(zip(("query", "key", "value"), (to_layout(x, layout) for x in (q, k, v)), strict=True))
    masks = {
        "atten_mask": np.random.default_rng(3).random((windows, 1, S1, S2)) < 0.4,
        "real_shift": random(4, windows, N1, S1, S2),
    }
    attrs = {"input_layout": layout, "head_num": N1, "pse_type": 0}
    got = forward(inputs | masks, cpu_mask_batch="repeated", **attrs)
    whole = {name: np.tile(mask, (6 // windows, 1, 1, 1)) for name, mask in masks.items()}
    for name, array in forward(inputs | whole, **attrs).items():
        np.testing.assert_array_equal(got[name], array)


@pytest.mark.parametrize(("windows", "attr"), [(3, ""), (4, "repeated"), (0, "repeated")])
def test_masks_of_another_batch_are_refused(windows, attr):
    q, k, v = random(0, 6, N1, S1, D), random(1, 6, N2, S2, D), random(2, 6, N2, S2, DV)
    for name, mask in (
        ("atten_mask", np.ones((windows, 1, S1, S2), np.bool_)),
        ("real_shift", np.ones((windows, N1, S1, S2))),
    ):
        with pytest.raises(reference.ReferenceInputError, match=name):
            forward({"query": q, "key": k, "value": v, name: mask}, cpu_mask_batch=attr)
