"""cpu_empty_rows against the exported spellings it stands for, each computed naively here."""

import numpy as np
import pytest

from .naive import EXACT, FLT_MAX, forward, out, random

F32_MIN = np.finfo(np.float32).min

# float32 softmax against float64: a few roundings of 6e-8 on weights below 1, and values around 1.
SINGLE = {"rtol": 2e-6, "atol": 2e-6}


def data(seed=0):
    """Two batches, two heads, S1 = 4, S2 = 5; row 1 of batch 0 and all rows of batch 1, head 0 are empty."""
    q, k, v = (random(seed + x, 2, 2, s, 3).astype(np.float32) for x, s in ((0, 4), (1, 5), (2, 5)))
    mask = np.random.default_rng(seed).integers(0, 2, (2, 2, 4, 5)).astype(bool)
    mask[..., 0] = False
    mask[0, :, 1] = True
    mask[1, 0] = True
    return {"query": q, "key": k, "value": v, "atten_mask": mask}, mask


def naive_softmax(scores):
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)


def scores_of(inputs):
    return np.float32(0.5) * (inputs["query"] @ inputs["key"].swapaxes(-1, -2))


def reference(inputs, value, dtype=None):
    attrs = {} if value is None else {"cpu_empty_rows": value}
    return forward(inputs, ["attention_out"], dtype, scale_value=0.5, **attrs)["attention_out"]


def test_mean_is_the_added_float32_minimum():
    """s + (-3.4e38) rounds to -3.4e38 for every key, so the row is uniform over all keys."""
    inputs, mask = data()
    added = scores_of(inputs) + np.where(mask, F32_MIN, np.float32(0))
    np.testing.assert_allclose(reference(inputs, "mean"), naive_softmax(added) @ inputs["value"], **SINGLE)


def test_mean_is_the_selected_float32_minimum():
    inputs, mask = data(5)
    selected = np.where(mask, F32_MIN, scores_of(inputs))
    np.testing.assert_allclose(reference(inputs, "mean"), naive_softmax(selected) @ inputs["value"], **SINGLE)


def test_nan_is_added_minus_infinity():
    inputs, mask = data()
    added = scores_of(inputs) + np.where(mask, np.float32(-np.inf), np.float32(0))
    want = naive_softmax(added) @ inputs["value"]
    assert np.isnan(want[0, :, 1]).all()
    np.testing.assert_allclose(reference(inputs, "nan"), want, **SINGLE)


def test_unmasked_is_a_small_negative_number():
    """-1e4 in float64 leaves the scores of an empty row as they are, and hides a masked key elsewhere."""
    inputs, mask = data()
    added = scores_of(inputs).astype(np.float64) + np.where(mask, -1e4, 0.0)
    np.testing.assert_allclose(reference(inputs, "unmasked"), naive_softmax(added) @ inputs["value"], **SINGLE)


@pytest.mark.parametrize("value", [None, "", "zero"])
def test_zero_is_the_guarded_minus_infinity(value):
    inputs, mask = data()
    p = naive_softmax(scores_of(inputs) + np.where(mask, np.float32(-np.inf), np.float32(0)))
    want = np.where(np.isnan(p), np.float32(0), p) @ inputs["value"]
    np.testing.assert_allclose(reference(inputs, value), want, **SINGLE)
    np.testing.assert_array_equal(reference(inputs, value)[0, :, 1], 0.0)


def poisoned():
    """Row 0: a NaN score; 1: a +inf score; 2: every attended score -inf; 3: ordinary; 4: empty."""
    pse = np.zeros((1, 1, 5, 3), np.float32)
    pse[0, 0, 0, 1] = np.nan
    pse[0, 0, 1, 1] = np.inf
    pse[0, 0, 2, :2] = -np.inf
    mask = np.array([[0, 0, 1]] * 4 + [[1, 1, 1]], np.uint8)
    q, k, v = (random(x, 1, 1, s, 2).astype(np.float32) for x, s in ((0, 5), (1, 3), (2, 3)))
    return {"query": q, "key": k, "value": v, "real_shift": pse, "atten_mask": mask}


@pytest.mark.parametrize(
    ("empty_rows", "nan_rows", "undefined"),
    [
        ("", "", [0, 1, 2]),
        ("zero", "", [0, 1, 2]),
        ("mean", "", [0, 1, 2]),
        ("unmasked", "", [0, 1, 2]),
        ("nan", "", [0, 1, 2, 4]),
        ("zero", "zero", []),
        ("mean", "zero", []),
        ("nan", "zero", [4]),
        ("", "infinite", [0, 1]),
        ("nan", "infinite", [0, 1, 4]),
    ],
)
def test_undefined_rows_are_nan_unless_guarded(empty_rows, nan_rows, undefined):
    attrs = {"cpu_empty_rows": empty_rows, "cpu_nan_rows": nan_rows}
    got = forward(poisoned(), dtype=None, pse_type=0, **attrs)["attention_out"][0, 0]
    assert [i for i in range(5) if np.isnan(got[i]).all()] == undefined
    assert [i for i in range(5) if np.isnan(got[i]).any()] == undefined
    guarded = [i for i in (0, 1, 2) if i not in undefined]
    np.testing.assert_array_equal(got[guarded], 0.0)


def test_guard_equals_the_torch_spelling():
    """where(isnan(p), 0, p) @ v with a NaN, an infinite and an all -inf row."""
    inputs = poisoned()
    scores = (inputs["query"] @ inputs["key"].swapaxes(-1, -2) + inputs["real_shift"]
              + np.where(inputs["atten_mask"] != 0, np.float32(-np.inf), np.float32(0)))  # fmt: skip
    p = naive_softmax(scores)
    want = np.where(np.isnan(p), 0, p) @ inputs["value"]
    got = forward(inputs, dtype=None, pse_type=0, cpu_nan_rows="zero")["attention_out"]
    np.testing.assert_allclose(got, want, **SINGLE)


@pytest.mark.parametrize("value", ["", "zero", "mean", "unmasked", "nan"])
def test_statistics_of_an_empty_row_are_the_operators(value):
    inputs, _ = data()
    got = forward(inputs, cpu_empty_rows=value)
    np.testing.assert_array_equal(got["softmax_max"][0, :, 1], -FLT_MAX)
    np.testing.assert_array_equal(got["softmax_sum"][0, :, 1], FLT_MAX)
    assert np.isfinite(got["softmax_max"]).all()


@pytest.mark.parametrize("value", ["mean", "unmasked"])
def test_structural_masks_too(value):
    """sparse_mode 3 with S1 > S2: the first rows see nothing; the mean and the softmax go over all keys."""
    q, k, v = random(0, 1, 1, 4, 2), random(1, 1, 1, 2, 2), random(2, 1, 1, 2, 3)
    mask = np.triu(np.ones((2048, 2048), np.uint8), 1)
    got = out({"query": q, "key": k, "value": v, "atten_mask": mask}, sparse_mode=3, cpu_empty_rows=value)[0, 0]
    scores = np.zeros((4, 2)) if value == "mean" else (q @ k.swapaxes(-1, -2))[0, 0]
    np.testing.assert_allclose(got[:2], (naive_softmax(scores) @ v[0, 0])[:2], **EXACT)
    np.testing.assert_allclose(got[2], v[0, 0, 0], **EXACT)


def test_dropout_applies_to_the_mean():
    """Equal weights 1/2, of which the first is kept and doubled."""
    inputs = {
        "query": np.ones((1, 1, 1, 1)),
        "key": np.ones((1, 1, 2, 1)),
        "value": np.array([3.0, 5.0]).reshape(1, 1, 2, 1),
        "atten_mask": np.ones((1, 2), np.uint8),
        "drop_mask": np.array([1], np.uint8),
    }
    assert out(inputs, cpu_empty_rows="mean", keep_prob=0.5).item() == 3.0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_masked_keys_are_never_read(bad):
    """A key and a value that are not finite do not matter where they are masked."""
    inputs, mask = data(3)
    mask[..., 2] = True
    clean = reference(inputs, "")
    for name in ("key", "value"):
        inputs[name][:, :, 2] = bad
    np.testing.assert_array_equal(reference(inputs, ""), clean)


def test_attended_infinite_value_shows():
    inputs = {
        "query": np.zeros((1, 1, 2, 1)),
        "key": np.zeros((1, 1, 2, 1)),
        "value": np.array([1.0, np.inf]).reshape(1, 1, 2, 1),
        "atten_mask": np.array([[0, 1], [0, 0]], np.uint8),
    }
    np.testing.assert_array_equal(out(inputs).reshape(-1), [1.0, np.inf])


@pytest.mark.parametrize("low", [-1e4, -1e9, -1e30, float(F32_MIN)])
def test_mask_like_bias_is_added_in_float32(low):
    """A row biased low everywhere gives what float32 gives; asked for float64, what real numbers give."""
    q, k, v = (random(x, 1, 1, s, 2).astype(np.float32) for x, s in ((0, 3), (1, 4), (2, 4)))
    inputs = {"query": q, "key": k, "value": v, "real_shift": np.full((1, 1, 3, 4), low, np.float32)}
    want = naive_softmax(q @ k.swapaxes(-1, -2) + inputs["real_shift"]) @ v
    np.testing.assert_allclose(forward(inputs, dtype=None, pse_type=0)["attention_out"], want, **SINGLE)
    exact = naive_softmax(q.astype(np.float64) @ k.swapaxes(-1, -2) + low) @ v
    np.testing.assert_allclose(out(inputs, pse_type=0), exact, **EXACT)


@pytest.mark.parametrize("fill", [-1e4, -2.0, 3.0])
def test_a_masked_key_with_a_score(fill):
    """cpu_mask_value: the softmax of the scores with that number in the masked places, rows without a key included."""
    q, k, v = (random(x, 1, 2, s, 4) for x, s in ((0, 3), (1, 5), (2, 5)))
    mask = np.array([[0, 1, 0, 0, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]], np.uint8)
    want = naive_softmax(np.where(mask != 0, fill, q @ k.swapaxes(-1, -2))) @ v
    got = out({"query": q, "key": k, "value": v, "atten_mask": mask}, cpu_mask_value=fill)
    np.testing.assert_allclose(got, want, **EXACT)
    weights = np.where(mask != 0, 0.0, naive_softmax(np.where(mask != 0, fill, q @ k.swapaxes(-1, -2))))
    inputs = {"query": q, "key": k, "value": v, "atten_mask": mask}
    got = out(inputs, cpu_mask_value=fill, cpu_masked_values="zero")
    np.testing.assert_allclose(got, weights @ v, **EXACT)


@pytest.mark.parametrize("fill", [-1e4, 3.0, None])
def test_a_masked_key_with_a_score_and_its_bias(fill):
    """cpu_masked_bias: the softmax of the scores with that number plus the bias in the masked places."""
    q, k, v = (random(x, 1, 2, s, 4) for x, s in ((0, 3), (1, 5), (2, 5)))
    bias = 2.0 * random(3, 1, 2, 3, 5)
    mask = np.array([[0, 1, 0, 0, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]], np.uint8)
    scores = q @ k.swapaxes(-1, -2) + bias
    want = naive_softmax(np.where(mask != 0, (-np.inf if fill is None else fill) + bias, scores)) @ v
    given = {} if fill is None else {"cpu_mask_value": fill}
    inputs = {"query": q, "key": k, "value": v, "atten_mask": mask, "real_shift": bias}
    with np.errstate(invalid="ignore"):
        got = out(inputs, pse_type=0, cpu_masked_bias="added", **given)
    np.testing.assert_allclose(got, want, **EXACT)


@pytest.mark.parametrize("number", [-3.004e38, 3.004e38])
@pytest.mark.parametrize("pse_type", [0, 1])
def test_a_number_that_swallows_masked_and_other_keys_alike(pse_type, number):
    """In float32 every key of a row has the score that the number is behind the scale, so the row is uniform."""
    inputs, _ = data()
    inputs["real_shift"] = np.full((2, 2, 4, 1), number, np.float32)
    attrs = {"scale_value": -0.2, "pse_type": pse_type, "cpu_masked_bias": "added", "cpu_mask_value": 2.0}
    got = forward(inputs, ["attention_out"], None, **attrs)["attention_out"]
    np.testing.assert_allclose(got, np.broadcast_to(inputs["value"].mean(-2, keepdims=True), got.shape), **SINGLE)
