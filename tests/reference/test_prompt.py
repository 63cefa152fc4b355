"""PromptFlashAttention and FusedInferAttentionScore: equal to FlashAttentionScore where they say the same, and to plain
NumPy in every form; lengths, one row, statistics, empty rows, refusals."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fa_compiler.op_registry import verify
from fa_compiler.reference import ReferenceInputError, run
from tests.prompt_problems import FIA, PFA, Form, Problem, drawn

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
    out, lse = infer({**problem(), "learnable_sink": sink.astype(ml_dtypes.bfloat16)})
    np.testing.assert_allclose(out, expected["attention_out"], atol=1e-14)
    statistics = (expected["softmax_max"] + np.log(expected["softmax_sum"]))[..., :1]
    np.testing.assert_allclose(lse, statistics, rtol=1e-13)


def same(form: Form) -> bool:
    """Whether the reference gives what the problem expects; False where it and the registry refuse the call, for the
    only reason that the forms here can have: rows without a key beside INT8 results."""
    problem = Problem(form)
    refused = [found for found in verify(problem.node()) if found.extension is None]
    try:
        found = run(form.op, problem.inputs, problem.attrs, dtype="float64")
    except ReferenceInputError as error:
        assert error.name == refused[0].tensor == "sparse_mode", (error, refused)
        return False
    assert not refused
    np.testing.assert_allclose(found["attention_out"], problem.out, rtol=1e-10, atol=1e-10)
    if form.lse:
        np.testing.assert_allclose(found["softmax_lse"], problem.lse, rtol=1e-10, atol=1e-10)
    return True


@pytest.mark.parametrize("op", [PFA, FIA])
def test_every_form_is_what_plain_numpy_gives(op: str) -> None:
    """Forms of layouts, masks, lengths, padding, pages, prefixes, rope parts and scales, all at random."""
    assert sum(same(drawn(seed, op, most=8)) for seed in range(150)) > 130


FORMS = {
    "one row hears no mode": Form(rows=(1, 1), s1=1, mask="row", mask_rank=2, mode=3, pre=-5, next=-5),
    "one row and a narrower value": Form(rows=(1, 1), s1=1, dv=8, mask="full", mode=1),
    "one packed row": Form(layout="TND", rows=(1, 1), mask="constant", mode=3),
    "pages in units": Form(storage="pages5", d=32, dv=64, keys=(7, 40), lengths=True),
    "pages of a packed query": Form(layout="TND", storage="pages4", keys=(7, 40), rows=(5, 2), mask="constant", mode=3),
    "a prefix moves the band": Form(prefix=3, prefix_room=5, mask="constant", mode=3, keys=(2, 1), s2=2, lengths=True),
    "padding on the left": Form(
        s1=9, s2=12, query_behind=2, key_behind=1, lengths=True, mask="full", pre=0, next=0, bias="full"
    ),
    "a latent cache": Form(
        layout="TND_NTD", heads=8, key_heads=1, d=32, dv=32, rope=16, storage="pages3", keys=(20, 40), rows=(1, 3)
    ),
    "scales by token": Form(antiquant="token", joined=True, key_behind=2, s2=12, lengths=True),
    "keys by channel, INT8 results": Form(antiquant="channel", quant="channel", offset=True),
    "INT8 throughout": Form(op=PFA, integers=True, quant="tensor", offset=True, mask="full", mode=1, bias="full"),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_form(form: Form) -> None:
    assert same(form)


def test_key_and_value_may_be_scaled_by_channel_and_by_token() -> None:
    """Modes 0 and 1, which the operator also calls 3 and 3."""
    problem = Problem(Form(antiquant="token"))
    by_channel = np.full((2, 16), 0.02, np.float32)
    inputs = {**problem.inputs, "key_antiquant_scale": by_channel}
    inputs["key_antiquant_offset"] = np.zeros_like(by_channel)
    results = [
        run(FIA, inputs, {**problem.attrs, "key_antiquant_mode": key, "value_antiquant_mode": value})["attention_out"]
        for key, value in ((0, 1), (3, 3))
    ]
    np.testing.assert_array_equal(*results)
    alone = {name: array for name, array in inputs.items() if "antiquant" not in name}
    alone["key"] = (inputs["key"] * 0.02).astype(np.float32)
    shift, scale = (inputs[f"value_antiquant_{word}"][:, None, :, None] for word in ("offset", "scale"))
    alone["value"] = (inputs["value"] + shift) * scale
    np.testing.assert_allclose(results[0], run(FIA, alone, problem.attrs)["attention_out"], atol=1e-5)


def test_rows_without_keys_beside_a_sink_are_zero() -> None:
    form = Form(mask="full", mode=1, empty=True, sink=True, lse=True, zero_rows=False)
    problem = Problem(form)
    found = run(FIA, problem.inputs, problem.attrs)
    assert np.isposinf(found["softmax_lse"][:, :, 2]).all()
    assert not found["attention_out"][:, :, 2].any()


def test_one_row_without_keys() -> None:
    """Bit 1 of inner_precise is heard for a few head sizes only."""
    for size, zero in ((16, False), (64, True)):
        problem = Problem(Form(rows=(1, 1), s1=1, d=size, dv=size))
        masked = {**problem.inputs, "atten_mask": np.ones((2, 7), np.bool_)}
        assert run(FIA, masked, problem.attrs)["attention_out"].any() != zero


REFUSED: list[tuple[str, Arrays, dict[str, Any], str]] = [
    ("quant_scale2", {"quant_offset2": np.ones(1, np.float32)}, {}, "absent"),
    ("quant_scale2", {"quant_scale2": np.ones(3, np.float32)}, {}, "expected 1 or 64"),
    (
        "sparse_mode",
        {"quant_scale2": np.ones(1, np.float32), "atten_mask": np.zeros((5, 7), np.bool_)},
        {"pre_tokens": 9, "next_tokens": -1},
        "rows without a key",
    ),
    ("deq_scale1", {"deq_scale1": np.ones(1, np.float32)}, {}, "beside a query of floats"),
    ("input_layout", {}, {"input_layout": "TND"}, "is 'TND'"),
    ("num_key_value_heads", {}, {"num_key_value_heads": 3}, "is 3"),
    ("key", {"key": np.ones((B, 3, 7, D))}, {}, "has 3 heads"),
    ("atten_mask", {"atten_mask": np.ones((5, 7), np.float16)}, {}, "is DT_FLOAT16"),
    ("atten_mask", {"atten_mask": np.ones((4, 7), np.bool_)}, {}, r"has the shape \[4,7\]"),
    ("atten_mask", {"atten_mask": ~TRIANGLE}, {"sparse_mode": 2}, "above the diagonal"),
    ("sparse_mode", {"atten_mask": TRIANGLE}, {"sparse_mode": 6}, "is 6"),
    ("pse_shift", {"pse_shift": np.ones((1, 1, 5, 7))}, {}, r"has the shape \[1,1,5,7\]"),
    ("pse_shift", {"pse_shift": np.ones((1, N1, 5, 6))}, {}, r"has the shape \[1,4,5,6\]"),
    ("actual_seq_lengths", {"actual_seq_lengths": np.array([6, 1])}, {}, "lengths from 0 to 5"),
    ("actual_seq_lengths", {"actual_seq_lengths": np.array([5, 1], np.int32)}, {}, "is DT_INT32"),
    ("actual_seq_lengths", {"actual_seq_lengths": np.array([[5, 1]])}, {}, r"has the shape \[1,2\]"),
    ("quant_scale2", {"quant_scale2": np.ones(1, np.int32)}, {}, "is DT_INT32"),
    ("key", {"query": np.ones((B, N1, 5, D), np.int8)}, {}, "is DT_FLOAT"),
    ("key", {name: np.ones((B, N2, 7, D), np.int8) for name in ("key", "value")}, {}, "is DT_INT8"),
    ("query", {"query": np.ones((B, N1, 5, D), np.int32)}, {}, "is DT_INT32"),
]


@pytest.mark.parametrize(("name", "inputs", "attrs", "phrase"), REFUSED, ids=[f"{row[0]} {row[3]}" for row in REFUSED])
def test_what_is_not_computed(name: str, inputs: Arrays, attrs: dict[str, Any], phrase: str) -> None:
    with pytest.raises(ReferenceInputError, match=phrase) as error:
        prompt({**problem(), **inputs}, **attrs)
    assert error.value.name == name


KV = {"actual_seq_lengths_kv": np.array([7, 7])}
INT8_KEYS = {name: np.ones((B, N2, 7, D), np.int8) for name in ("key", "value")}
SCALES = {f"{name}_antiquant_scale": np.ones(1, np.float32) for name in ("key", "value")}
PREFIX = {f"{name}_shared_prefix": np.ones((1, N2, 3, D)) for name in ("key", "value")}
ROPE = {"query_rope": np.ones((B, N1, 5, 8)), "key_rope": np.ones((B, N2, 7, 8))}
TABLE = {"block_table": np.zeros((B, 1), np.int32)}
LISTS = {name: [np.ones((1, N2, 7, D))] * B for name in ("key", "value")}
PACKED = {"query": np.ones((5, N1, D)), "key": np.ones((7, N2, D)), "value": np.ones((7, N2, D))}
ENDS = {"actual_seq_lengths": np.array([2, 5]), "actual_seq_lengths_kv": np.array([3, 7])}
TND = {"input_layout": "TND"}
FUSED_REFUSED: list[tuple[str, Arrays, dict[str, Any], str]] = [
    ("query_quant_mode", {"dequant_scale_query": np.ones(1, np.float32)}, {}, "is 0"),
    ("key_rope_antiquant_scale", {"key_rope_antiquant_scale": np.ones(1, np.float32)}, {}, "not computed"),
    ("pse_type", {}, {"pse_type": 1}, "is 1"),
    ("pse_shift", {}, {"pse_type": 2}, "slopes"),
    (
        "key",
        {"key": np.ones((B, N2, 7, 2), np.int32), "value": np.ones((B, N2, 7, 2), np.int32)},
        {},
        "has the head size 2",
    ),
    ("value", {"key": LISTS["key"]}, {}, "expected 2 as key"),
    ("key", {name: [*each, each[0]] for name, each in LISTS.items()}, {}, "has 3 tensors"),
    ("quant_scale2", {**LISTS, "quant_scale2": np.ones(1, np.float32)}, {}, "list"),
    ("actual_seq_lengths_kv", TABLE, {"block_size": 7}, "expected|absent|is not"),
    ("block_size", {**TABLE, **KV}, {"block_size": 0}, "is 0"),
    (
        "block_table",
        {"block_table": np.ones((B, 1), np.int32), **KV, **{n: np.ones((1, N2, 7, D)) for n in ("key", "value")}},
        {"block_size": 7},
        "not there",
    ),
    ("kv_padding_size", {**PACKED, **ENDS, "kv_padding_size": np.array([1])}, TND, "packed layout"),
    ("query_padding_size", {**PACKED, **ENDS, "query_padding_size": np.array([1])}, TND, "packed layout"),
    ("actual_seq_lengths_kv", {"kv_padding_size": np.array([1])}, {}, "is absent"),
    ("query_padding_size", {"query_padding_size": np.array([3]), "actual_seq_lengths": np.array([3])}, {}, "more than"),
    ("actual_seq_lengths", PACKED, TND, "is absent"),
    ("actual_seq_lengths", {**PACKED, **ENDS, "actual_seq_lengths": np.array([5, 2])}, TND, "cumulative"),
    ("actual_seq_lengths_kv", {**PACKED, **ENDS, "actual_seq_lengths_kv": np.array([7])}, TND, "expected 2"),
    ("pse_shift", {**PACKED, **ENDS, "pse_shift": np.ones((1, N1, 5, 7))}, TND, "is given"),
    ("value_shared_prefix", {"key_shared_prefix": PREFIX["key_shared_prefix"]}, {}, "absent"),
    ("actual_shared_prefix_len", {**PREFIX, "actual_shared_prefix_len": np.array([4])}, {}, "is 4"),
    ("key_rope", {"query_rope": ROPE["query_rope"]}, {}, "is absent"),
    ("pse_shift", {**ROPE, "pse_shift": np.ones((1, N1, 5, 7))}, {}, "is given"),
    ("key_antiquant_scale", {**ROPE, **INT8_KEYS, **SCALES}, {}, "is given"),
    ("antiquant_scale", {**INT8_KEYS, "antiquant_scale": np.float32(0.5)}, {}, "two scales"),
    ("antiquant_scale", INT8_KEYS, {}, "two scales"),
    ("key_antiquant_scale", SCALES, {}, "not INT8"),
    ("value_antiquant_scale", {**INT8_KEYS, "key_antiquant_scale": np.ones(1)}, {}, "absent"),
    ("key_antiquant_scale", {**INT8_KEYS, **SCALES}, {"key_antiquant_mode": 4, "value_antiquant_mode": 4}, "mode 4"),
    ("value_antiquant_mode", {**INT8_KEYS, **SCALES}, {"key_antiquant_mode": 1}, "beside a key_antiquant_mode of 1"),
    ("key_antiquant_scale", {**INT8_KEYS, **SCALES}, {"key_antiquant_mode": 2, "value_antiquant_mode": 2}, "not fit"),
    (
        "kv_start_idx",
        {"pse_shift": np.ones(N1, np.float32), "kv_start_idx": np.array([2**40])},
        {"pse_type": 2},
        "more than 32 bits",
    ),
    ("pse_shift", {"pse_shift": np.ones(N1, np.float16)}, {"pse_type": 3}, "is DT_FLOAT16"),
    ("block_table", {"block_table": np.zeros((B, 1)), **KV}, {"block_size": 7}, "is DT_FLOAT"),
    ("learnable_sink", {"learnable_sink": np.ones(3)}, {}, "is DT_FLOAT"),
    (
        "atten_mask",
        {"query": np.ones((B, N1, 1, D)), "atten_mask": TRIANGLE},
        {"sparse_mode": 3},
        "every sparse_mode takes a mask of keys",
    ),
    ("dequant_scale1", {"query": np.ones((B, N1, 1, D), np.int8), **INT8_KEYS}, {}, "is absent"),
]


@pytest.mark.parametrize(
    ("name", "inputs", "attrs", "phrase"), FUSED_REFUSED, ids=[f"{row[0]} {row[3]}" for row in FUSED_REFUSED]
)
def test_what_the_fused_operator_does_not_compute(
    name: str, inputs: Arrays, attrs: dict[str, Any], phrase: str
) -> None:
    with pytest.raises(ReferenceInputError, match=phrase) as error:
        infer({**problem(), **inputs}, **attrs)
    assert error.value.name == name
