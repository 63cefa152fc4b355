"""PromptFlashAttention and FusedInferAttentionScore: equal to FlashAttentionScore where they say the same; lengths, one
row, statistics, empty rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fa_compiler.reference import ReferenceInputError, run

B, N1, N2, D = 2, 4, 2, 16
TRIANGLE = np.triu(np.ones((2048, 2048), np.bool_), 1)
Arrays = dict[str, Any]


def problem(layout: str = "BNSD", s1: int = 5, s2: int = 7, seed: int = 0) -> Arrays:
    random = np.random.default_rng(seed)
    shapes = {"query": (B, N1, s1, D), "key": (B, N2, s2, D), "value": (B, N2, s2, D)}
    return {name: laid_out(random.normal(size=shape), layout) for name, shape in shapes.items()}


def laid_out(array: np.ndarray, layout: str) -> np.ndarray:
    """[B,N,S,D] in a layout."""
    if layout == "BNSD":
        return array
    if layout == "NBSD":
        return array.transpose(1, 0, 2, 3)
    turned = array.transpose(0, 2, 1, 3)
    return turned if layout == "BSND" else turned.reshape(*turned.shape[:2], -1)


def prompt(inputs: Arrays, **attrs: Any) -> np.ndarray:
    heads = {
        "num_heads": N1,
        "num_key_value_heads": N2,
        "input_layout": "BNSD",
        "scale_value": 0.25,
        "inner_precise": 2,
    }
    result = run("PromptFlashAttention", inputs, {**heads, **attrs}, dtype="float64")
    return np.asarray(result["attention_out"])


def infer(inputs: Arrays, **attrs: Any) -> tuple[np.ndarray, np.ndarray]:
    heads = {"num_heads": N1, "num_key_value_heads": N2, "input_layout": "BNSD", "scale": 0.25, "inner_precise": 2}
    result = run("FusedInferAttentionScore", inputs, {**heads, "softmax_lse_flag": True, **attrs}, dtype="float64")
    return np.asarray(result["attention_out"]), np.asarray(result["softmax_lse"])


def training(inputs: Arrays, **attrs: Any) -> dict[str, np.ndarray]:
    heads = {
        "head_num": N1,
        "input_layout": "BNSD",
        "scale_value": 0.25,
        "pse_type": 0 if "real_shift" in inputs else 1,
    }
    return run("FlashAttentionScore", inputs, {**heads, **attrs}, dtype="float64")


def masks(s1: int, s2: int) -> Arrays:
    random = np.random.default_rng(9)
    whole = random.random((B, 1, s1, s2)) < 0.4
    whole[0, 0, 1] = True
    return {"[S1,S2]": whole[0, 0], "[B,1,S1,S2]": whole, "[1,1,S1,S2]": whole[:1]}


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH"])
@pytest.mark.parametrize("shape", ["[S1,S2]", "[B,1,S1,S2]", "[1,1,S1,S2]"])
@pytest.mark.parametrize("biased", [False, True])
def test_with_a_whole_mask(layout: str, shape: str, biased: bool) -> None:
    inputs = problem(layout)
    mask = masks(5, 7)[shape]
    shift = np.random.default_rng(3).normal(size=(1, N1, 5, 7))
    expected = training(
        {**inputs, "atten_mask": mask, **({"real_shift": shift} if biased else {})}, sparse_mode=1, input_layout=layout
    )
    given = {**inputs, "atten_mask": mask, **({"pse_shift": shift} if biased else {})}
    attrs = {"sparse_mode": 1, "input_layout": layout}
    np.testing.assert_allclose(prompt(given, **attrs), expected["attention_out"], atol=1e-14)
    out, lse = infer(given, **attrs)
    np.testing.assert_allclose(out, expected["attention_out"], atol=1e-14)
    statistics = (expected["softmax_max"] + np.log(expected["softmax_sum"]))[..., :1]
    empty = expected["softmax_max"][..., :1] < -1e38
    assert empty.any()
    np.testing.assert_allclose(lse, np.where(empty, np.inf, statistics), rtol=1e-13)


MODES: list[dict[str, int]] = [
    {"sparse_mode": 2},
    {"sparse_mode": 3},
    {"sparse_mode": 4, "pre_tokens": 2, "next_tokens": 1},
    {"sparse_mode": 4, "pre_tokens": 3, "next_tokens": -1},
]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("sizes", [(5, 7), (7, 5), (6, 6)])
def test_modes(mode: dict[str, int], sizes: tuple[int, int]) -> None:
    inputs = {**problem("BNSD", *sizes), "atten_mask": TRIANGLE}
    tokens = {name.replace("tokens", "tockens"): value for name, value in mode.items()}
    expected = training(inputs, **tokens)["attention_out"]
    np.testing.assert_allclose(prompt(inputs, **mode), expected, atol=1e-14)
    np.testing.assert_allclose(prompt(inputs, **mode, inner_precise=0), expected, atol=1e-14)
    np.testing.assert_allclose(infer(inputs, **mode)[0], expected, atol=1e-14)


def test_a_window_and_a_mask() -> None:
    inputs = {**problem(), "atten_mask": masks(5, 7)["[S1,S2]"]}
    expected = training(inputs, sparse_mode=0, pre_tockens=2, next_tockens=3)["attention_out"]
    np.testing.assert_allclose(prompt(inputs, pre_tokens=2, next_tokens=3), expected, atol=1e-14)


def test_without_a_mask_the_mode_means_nothing() -> None:
    expected = training(problem())["attention_out"]
    np.testing.assert_allclose(prompt(problem(), sparse_mode=3, pre_tokens=0), expected, atol=1e-14)


@pytest.mark.parametrize("name", ["BNSD_BSND", "BSH_BNSD", "BSND_NBSD"])
def test_results_in_another_layout(name: str) -> None:
    given, _, wanted = name.partition("_")
    expected = laid_out(training(problem())["attention_out"], wanted)
    np.testing.assert_allclose(infer(problem(given), input_layout=name)[0], expected, atol=1e-14)


def test_lengths_cut_each_batch() -> None:
    inputs = {**problem(), "atten_mask": TRIANGLE}
    lengths = {"actual_seq_lengths": np.array([3, 5]), "actual_seq_lengths_kv": np.array([6, 2])}
    out = prompt({**inputs, **lengths}, sparse_mode=3)
    for b, (rows, keys) in enumerate(((3, 6), (5, 2))):
        cut = {
            "query": inputs["query"][b : b + 1, :, :rows],
            **{name: inputs[name][b : b + 1, :, :keys] for name in ("key", "value")},
        }
        expected = training({**cut, "atten_mask": TRIANGLE}, sparse_mode=3)["attention_out"]
        np.testing.assert_allclose(out[b, :, :rows], expected[0], atol=1e-14)
        assert not out[b, :, rows:].any()
    same = prompt({**problem(), "actual_seq_lengths_kv": np.array([4])})
    cut = {name: array[:, :, :4] if name != "query" else array for name, array in problem().items()}
    np.testing.assert_allclose(same, training(cut)["attention_out"], atol=1e-14)


def test_rows_without_keys() -> None:
    mask = np.zeros((5, 7), np.bool_)
    mask[2] = True
    inputs = {**problem(), "atten_mask": mask}
    mean = np.repeat(inputs["value"].mean(axis=2), N1 // N2, axis=1)
    np.testing.assert_allclose(prompt(inputs, sparse_mode=1, inner_precise=0)[:, :, 2], mean, atol=1e-14)
    assert not prompt(inputs, sparse_mode=1, inner_precise=3)[:, :, 2].any()
    nothing = {**problem(), "actual_seq_lengths_kv": np.array([0, 7])}
    out, lse = infer(nothing)
    assert not out[0].any()
    assert np.isposinf(lse[0]).all()
    assert np.isfinite(lse[1]).all()


def test_one_row_of_the_fused_operator() -> None:
    """It takes the path of decoding: the mask is by key, the mode means nothing."""
    inputs = problem(s1=1)
    mask = np.random.default_rng(5).random((B, 7)) < 0.5
    expected = training({**inputs, "atten_mask": mask[:, None, None]}, sparse_mode=1)["attention_out"]
    out, _ = infer({**inputs, "atten_mask": mask}, sparse_mode=0, pre_tokens=0, next_tokens=0)
    np.testing.assert_allclose(out, expected, atol=1e-14)


def test_sink() -> None:
    sink = np.array([0.5, -1.0, 2.0, 0.0])
    expected = training({**problem(), "sink": sink.astype(np.float32)})
    out, lse = infer({**problem(), "learnable_sink": sink})
    np.testing.assert_allclose(out, expected["attention_out"], atol=1e-14)
    statistics = (expected["softmax_max"] + np.log(expected["softmax_sum"]))[..., :1]
    np.testing.assert_allclose(lse, statistics, rtol=1e-13)


REFUSED: list[tuple[str, Arrays, dict[str, Any], str]] = [
    ("quant_scale2", {"quant_scale2": np.ones(1, np.float32)}, {}, "computes no call with it"),
    ("input_layout", {}, {"input_layout": "TND"}, "this reference knows"),
    ("num_key_value_heads", {}, {"num_key_value_heads": 3}, "does not divide"),
    ("key", {"key": np.ones((B, 3, 7, D))}, {}, "has 3 heads"),
    ("atten_mask", {"atten_mask": np.ones((5, 7), np.float16)}, {}, "dtype"),
    ("atten_mask", {"atten_mask": np.ones((4, 7), np.bool_)}, {}, "does not cover"),
    ("atten_mask", {"atten_mask": ~TRIANGLE}, {"sparse_mode": 2}, "above the diagonal"),
    ("sparse_mode", {"atten_mask": TRIANGLE}, {"sparse_mode": 6}, "not one of 0 to 4"),
    ("pse_shift", {"pse_shift": np.ones((1, 1, 5, 7))}, {}, "is not"),
    ("pse_shift", {"pse_shift": np.ones((1, N1, 5, 6))}, {}, "does not cover"),
    ("actual_seq_lengths", {"actual_seq_lengths": np.array([6, 1])}, {}, "lengths from 0 to 5"),
    ("query", {"query": np.ones((B, N1, 5, D), np.int8)}, {}, "computes floats"),
]


@pytest.mark.parametrize(("name", "inputs", "attrs", "phrase"), REFUSED, ids=[f"{row[0]} {row[3]}" for row in REFUSED])
def test_what_is_not_computed(name: str, inputs: Arrays, attrs: dict[str, Any], phrase: str) -> None:
    with pytest.raises(ReferenceInputError, match=phrase) as error:
        prompt({**problem(), **inputs}, **attrs)
    assert error.value.name == name


def test_what_the_fused_operator_does_not_compute() -> None:
    for name in ("block_table", "query_rope", "key_shared_prefix"):
        with pytest.raises(ReferenceInputError, match=name):
            infer({**problem(), name: np.ones((1, 1), np.int32)})
    with pytest.raises(ReferenceInputError, match="slopes"):
        infer(problem(), pse_type=2)
    with pytest.raises(ReferenceInputError, match="lists"):
        infer({**problem(), "key": [np.ones((1, N2, 7, D))] * 2})
