"""Every gradient against central differences of the forward, over combinations of its features."""

import numpy as np
import pytest

from fa_compiler import reference

from .naive import EXACT, causal_constant, cumulative, prefix_constant, random, to_layout

# Central differences with step h of functions whose derivatives are around 1: an h^2 term of 1e-10 and
# rounding of 1e-16 / h = 1e-11, times a few tens of summed terms. The formulas themselves are exact.
STEP = 1e-5
DIFFERENCE = {"rtol": 1e-7, "atol": 1e-8}

GRADIENTS = {
    "query": "dq",
    "key": "dk",
    "value": "dv",
    "query_rope": "dq_rope",
    "key_rope": "dk_rope",
    "sink": "dsink",
}


def forward(inputs, attrs):
    return reference.run("FlashAttentionScore", inputs, attrs, dtype="float64")


def backward(inputs, attrs, dy, order="", **changes):
    """The gradient from what the forward gives; the bias is called pse_shift there."""
    result = forward(inputs, attrs)
    inputs = dict(inputs)
    if "real_shift" in inputs:
        inputs["pse_shift"] = inputs.pop("real_shift")
    inputs |= {"dy": dy, "attention_in": result["attention_out"]}
    inputs |= {name: result[name] for name in ("softmax_max", "softmax_sum")}
    attrs = {name: value for name, value in attrs.items() if name != "softmax_out_layout"}
    return reference.run(
        "FlashAttentionScoreGrad", inputs | changes, attrs | {"softmax_in_layout": order}, dtype="float64"
    )


def check(inputs, attrs, backward_inputs=None):
    """Compares all gradients with central differences of sum(dy * attention_out)."""
    dy = random(77, *forward(inputs, attrs)["attention_out"].shape)
    got = backward(inputs, attrs, dy, **(backward_inputs or {}))
    for name, gradient in GRADIENTS.items():
        if name not in inputs:
            assert gradient in ("dq_rope", "dk_rope", "dsink")
            assert got[gradient].shape == (0,)
            continue
        tensor = inputs[name]
        want = np.zeros_like(tensor)
        for index in np.ndindex(tensor.shape):
            moved = []
            for step in (STEP, -STEP):
                changed = tensor.copy()
                changed[index] += step
                moved.append(np.sum(dy * forward({**inputs, name: changed}, attrs)["attention_out"]))
            want[index] = (moved[0] - moved[1]) / (2 * STEP)
        np.testing.assert_allclose(got[gradient], want, err_msg=gradient, **DIFFERENCE)
    return got


def problem(layout="BNSD", b=1, n1=2, n2=1, s1=3, s2=4, d=2, dv=2, rope=0):
    """Random inputs in float64 and their attributes."""
    shapes = {"query": (n1, s1, d), "key": (n2, s2, d), "value": (n2, s2, dv)}
    if rope:
        shapes |= {"query_rope": (n1, s1, rope), "key_rope": (n2, s2, rope)}
    inputs = {name: to_layout(random(seed, b, *shape), layout) for seed, (name, shape) in enumerate(shapes.items())}
    if layout == "TND":
        inputs |= {"actual_seq_qlen": cumulative(*[s1] * b), "actual_seq_kvlen": cumulative(*[s2] * b)}
    return inputs, {"input_layout": layout, "head_num": n1, "scale_value": 0.8}


@pytest.mark.parametrize("layout", ["BSH", "SBH", "BSND", "BNSD", "TND"])
def test_layouts_with_groups_rope_sink_and_dropout(layout):
    """GQA (2 query heads a group), Dv != D, rope, sink, dropout and a causal mask, in every layout."""
    inputs, attrs = problem(layout, b=2, n1=2, n2=1, s1=2, s2=3, d=2, dv=1, rope=1)
    inputs["sink"] = random(20, 2)
    inputs["atten_mask"] = causal_constant()
    inputs["drop_mask"] = np.array([0b10110101, 0b01101101, 0b11011010], np.uint8)
    check(inputs, attrs | {"sparse_mode": 3, "keep_prob": 0.7})


@pytest.mark.parametrize("pse_type", [0, 1])
@pytest.mark.parametrize("shape", [(1, 2, 3, 4), (1, 2, 1, 4)])
def test_given_bias(pse_type, shape):
    """dQ and dK carry the scale whether the bias is added before or after it."""
    inputs, attrs = problem()
    inputs["real_shift"] = random(9, *shape)
    got = check(inputs, attrs | {"pse_type": pse_type})
    np.testing.assert_array_equal(got["dpse"], np.zeros(shape))


@pytest.mark.parametrize("softcap", [0.3, 5.0])
def test_soft_caps(softcap):
    """The gradient of a cap that saturates and of one that hardly matters, beside a bias, a mask and a sink."""
    inputs, attrs = problem(rope=1)
    inputs |= {"real_shift": random(9, 1, 2, 3, 4), "sink": random(3, 2), "atten_mask": np.eye(3, 4, dtype=np.uint8)}
    check(inputs, attrs | {"pse_type": 0, "cpu_softcap": softcap})


@pytest.mark.parametrize("pse_type", [0, 1])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_masked_keys_with_a_score(pse_type, softcap):
    """It is a number, and with cpu_masked_bias their bias is added, also in a row without any other key. Both count in
    the softmax, and neither depends on query or key."""
    inputs, attrs = problem()
    inputs["atten_mask"] = np.array([[0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1]], np.uint8)
    inputs["drop_mask"] = np.array([0b10110101, 0b01101101, 0b11011010], np.uint8)
    attrs |= {"cpu_mask_value": 0.4, "keep_prob": 0.7} | ({"cpu_softcap": softcap} if softcap else {})
    check(inputs, attrs)
    inputs["real_shift"] = random(9, 1, 2, 3, 4)
    biased = attrs | {"pse_type": pse_type if not softcap else 0, "cpu_masked_bias": "added"}
    got = check(inputs, biased)
    np.testing.assert_array_equal(got["dq"][0, :, 1], 0.0)


@pytest.mark.parametrize("pse_type", [2, 3])
def test_generated_bias(pse_type):
    inputs, attrs = problem(s1=3, s2=3)
    inputs["real_shift"] = np.array([0.3, 0.7])
    inputs["q_start_idx"] = np.array([2])
    check(inputs, attrs | {"pse_type": pse_type})


@pytest.mark.parametrize("mode", [0, 1, 5])
def test_full_masks(mode):
    """A user's mask, with an empty row (zero gradient) and, in mode 0, a band."""
    inputs, attrs = problem()
    mask = np.array([[0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1]], np.uint8)
    inputs["atten_mask"] = mask
    got = check(inputs, attrs | {"sparse_mode": mode, "pre_tockens": 1, "next_tockens": 2})
    np.testing.assert_array_equal(got["dq"][0, :, 1], 0.0)


@pytest.mark.parametrize("mode", [2, 3, 4])
def test_structural_masks(mode):
    """With more queries than keys, so that modes 3 and 4 have empty rows."""
    inputs, attrs = problem(s1=4, s2=3)
    inputs["atten_mask"] = causal_constant()
    check(inputs, attrs | {"sparse_mode": mode, "pre_tockens": 1, "next_tockens": 0})


def test_prefix():
    inputs, attrs = problem(b=2, n1=1)
    inputs["atten_mask"] = prefix_constant()
    inputs["prefix"] = np.array([1, 3])
    check(inputs, attrs | {"sparse_mode": 6})


@pytest.mark.parametrize("mode", [7, 8])
def test_packed_cut_sequences(mode):
    """Unequal lengths with an empty batch, and the band on the last or first batch."""
    inputs = {"query": random(0, 5, 2, 2), "key": random(1, 6, 1, 2), "value": random(2, 6, 1, 2)}
    inputs |= {"actual_seq_qlen": np.array([2, 2, 4]), "actual_seq_kvlen": np.array([3, 3, 6])}
    inputs["atten_mask"] = causal_constant()
    attrs = {"input_layout": "TND", "head_num": 2, "sparse_mode": mode, "pre_tockens": 3, "next_tockens": -1}
    got = check(inputs, attrs)
    # The fifth query belongs to no batch.
    np.testing.assert_array_equal(got["dq"][4], 0.0)


def test_packed_bias_has_rank_1_backward():
    inputs = {"query": random(0, 4, 1, 2), "key": random(1, 5, 1, 2), "value": random(2, 5, 1, 2)}
    inputs |= {"actual_seq_qlen": np.array([2, 4]), "actual_seq_kvlen": np.array([3, 5])}
    flat = random(3, 2 * 3 + 2 * 2)
    inputs["real_shift"] = flat[:, None]
    attrs = {"input_layout": "TND", "head_num": 1, "pse_type": 0}
    check(inputs, attrs, {"pse_shift": flat})


def test_sink_with_an_empty_row():
    """The empty row contributes nothing to dsink (section: sink and fully masked rows)."""
    inputs, attrs = problem()
    inputs["sink"] = random(3, 2)
    inputs["atten_mask"] = np.array([[0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1]], np.uint8)
    got = check(inputs, attrs)
    rows = [0, 2]
    fewer = {**inputs, "query": inputs["query"][:, :, rows], "atten_mask": inputs["atten_mask"][rows]}
    dy = random(77, 1, 2, 3, 2)[:, :, rows]
    np.testing.assert_allclose(got["dsink"], backward(fewer, attrs, dy)["dsink"], **EXACT)


def test_both_orders_of_packed_statistics():
    """ "" takes the forward's blocks as they are; "same_as_input" takes [N,T,8]."""
    inputs = {"query": random(0, 5, 3, 2), "key": random(1, 6, 3, 2), "value": random(2, 6, 3, 2)}
    inputs |= {"actual_seq_qlen": np.array([2, 5]), "actual_seq_kvlen": np.array([3, 6])}
    attrs = {"input_layout": "TND", "head_num": 3}
    dy = random(3, 5, 3, 2)
    blocks = backward(inputs, attrs, dy)
    true = forward(inputs, attrs | {"softmax_out_layout": "same_as_input"})
    turned = {name: true[name].transpose(1, 0, 2) for name in ("softmax_max", "softmax_sum")}
    for name, value in backward(inputs, attrs, dy, "same_as_input", **turned).items():
        np.testing.assert_array_equal(value, blocks[name])
    with pytest.raises(reference.ReferenceInputError, match="softmax_max"):
        backward(inputs, attrs, dy, "same_as_input")
    longer = {**inputs, "query": random(0, 6, 3, 2)}
    more = {name: np.zeros((3, 6, 8)) for name in turned}
    with pytest.raises(reference.ReferenceInputError, match="last value of actual_seq_qlen"):
        backward(longer, attrs, random(3, 6, 3, 2), "same_as_input", **more)


def test_masked_keys_are_never_read():
    """An infinite key and value under the mask leave every gradient finite, their own zero."""
    inputs, attrs = problem()
    inputs["atten_mask"] = np.array([[0, 0, 0, 1]] * 3, np.uint8)
    dy = random(9, 1, 2, 3, 2)
    clean = backward(inputs, attrs, dy)
    dirty = {name: inputs[name].copy() for name in ("key", "value")}
    for tensor in dirty.values():
        tensor[:, :, 3] = np.inf
    got = backward(inputs | dirty, attrs, dy)
    for name, value in got.items():
        np.testing.assert_array_equal(value, clean[name])
    np.testing.assert_array_equal(got["dv"][:, :, 3], 0.0)


@pytest.mark.parametrize("empty", ["b", "s1", "s2"])
def test_empty_tensors(empty):
    sizes = {"b": 1, "s1": 2, "s2": 3} | {empty: 0}
    inputs, attrs = problem(**sizes)
    got = backward(inputs, attrs, np.ones((sizes["b"], 2, sizes["s1"], 2)))
    for name, gradient in (("query", "dq"), ("key", "dk"), ("value", "dv")):
        np.testing.assert_array_equal(got[gradient], np.zeros_like(inputs[name]))


def test_keys_without_heads():
    """In BSH and SBH, a key without elements has no heads and no head size."""
    query = np.ones((3, 2, 32), np.float32)
    key = np.ones((5, 2, 0), np.float32)
    statistics = np.ones((2, 4, 3, 8), np.float32)
    inputs = {"query": query, "key": key, "value": key, "dy": query, "attention_in": query}
    inputs |= {"softmax_max": statistics, "softmax_sum": statistics}
    got = reference.run("FlashAttentionScoreGrad", inputs, {"head_num": 4, "input_layout": "SBH", "scale_value": 0.3})
    np.testing.assert_array_equal(got["dq"], np.zeros_like(query))
    assert got["dk"].shape == got["dv"].shape == key.shape


def test_dtypes():
    inputs, attrs = problem(rope=1)
    inputs = {name: value.astype(np.float16) for name, value in inputs.items()}
    inputs["sink"] = np.zeros(2, np.float32)
    result = reference.run("FlashAttentionScore", inputs, attrs)
    inputs |= {name: result[name] for name in ("softmax_max", "softmax_sum")}
    inputs |= {"attention_in": result["attention_out"], "dy": np.ones_like(result["attention_out"])}
    got = reference.run("FlashAttentionScoreGrad", inputs, attrs)
    assert {name: value.dtype.name for name, value in got.items()} == {
        **dict.fromkeys(("dq", "dk", "dv", "dpse", "dq_rope", "dk_rope"), "float16"),
        "dsink": "float32",
    }
    assert list(reference.run("FlashAttentionScoreGrad", inputs, attrs, ["dv"])) == ["dv"]


def test_a_poisoned_query_reaches_only_the_keys_it_attends():
    """Row 1 is NaN and attends key 0 only: the gradients of the other keys are those without row 1."""
    inputs, attrs = problem(n1=1)
    inputs["query"][:, :, 1] = np.nan
    inputs["atten_mask"] = np.array([[0, 0, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]], np.uint8)
    dy = random(9, 1, 1, 3, 2)
    got = backward(inputs, attrs, dy)
    rows = [0, 2]
    fewer = {**inputs, "query": inputs["query"][:, :, rows], "atten_mask": inputs["atten_mask"][rows]}
    want = backward(fewer, attrs, dy[:, :, rows])
    assert np.isnan(got["dk"][0, 0, 0]).all()
    for name in ("dk", "dv"):
        np.testing.assert_allclose(got[name][:, :, 1:], want[name][:, :, 1:], **EXACT)
