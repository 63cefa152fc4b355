"""ai.onnx Attention becomes FlashAttentionScore and gives what ONNX Runtime gives, or is left with a true reason."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from onnx.reference import ReferenceEvaluator

import fa_compiler
from fa_compiler.passes import fuse
from fa_compiler.passes.answer.options import Target
from tests.examples import examples
from tests.passes.operators import Operator, check_same, declined
from tests.passes.running import Array, assert_same, fused, parse, random_feeds, run

pytestmark = pytest.mark.usefixtures("declines_change_nothing")

LOWEST, LOWEST_16 = (float(np.finfo(dtype).min) for dtype in (np.float32, np.float16))
CAUSAL = {"is_causal": 1}
HEADS = {"q_num_heads": 2, "kv_num_heads": 2}


def attention(opset: int = 23, dtype: str = "float32", fixed: bool = False, **given: Any) -> Operator:
    """Two heads of size 8: rank 4, no mask, no past."""
    attrs = {name: given.pop(name) for name in list(given) if name in ATTRS}
    sizes = {name: given.pop(name) for name in list(given) if len(name) == 1 and name.isupper()}
    outputs = given.pop("outputs", ("y", "present_key", "present_value") if "past_key" in given else ("y",))
    names = ["q", "k", "v", "mask", "past_key", "past_value", "lengths"]
    default: dict[str, Any] = {"q": "B 2 S 8", "k": "B 2 T 8", "v": "B 2 T 8"}
    inputs = {name: {**default, **given}.get(name) for name in names}
    while inputs[names[-1]] is None:
        del inputs[names.pop()]
    ranks = {"present_key": 4, "present_value": 4, "qk": 4}
    return Operator("Attention", inputs, outputs, attrs, "", opset, sizes, dtype, fixed=fixed, ranks=ranks)


ATTRS = (
    *("is_causal", "q_num_heads", "kv_num_heads", "scale", "softcap", "softmax_precision", "qk_matmul_output_mode"),
    *("left_window_size", "right_window_size"),
)
FLAT = {"q": "B S 16", "k": "B T 16", "v": "B T 16", **HEADS}
PAST = {"k": "B 2 L 8", "v": "B 2 L 8", "past_key": "B 2 P 8", "past_value": "B 2 P 8"}


def masks(*shape: int, empty: bool = True, seed: int = 3) -> Array:
    """Booleans, with one row that attends nothing."""
    kept = np.random.default_rng(seed).random(shape) < 0.6
    if empty:
        kept[..., 1, :] = False
    return kept


def floats(kept: Array, excluded: float) -> Array:
    """Numbers where a key is attended, else this one."""
    numbers = np.random.default_rng(4).standard_normal(kept.shape).astype(np.float32)
    return np.where(kept, numbers, np.float32(excluded)).astype(np.float32)


TAKEN: dict[str, tuple[dict[str, Any], str | None]] = {
    "rank 4": ({}, "none"),
    "rank 3": (FLAT, "none"),
    "grouped heads": ({"q": "B 6 S 8"}, "none"),
    "grouped heads, rank 3": ({**FLAT, "q": "B S 48", "q_num_heads": 6}, "none"),
    "one key head": ({"q": "B 6 S 8", "k": "B 1 T 8", "v": "B 1 T 8"}, "none"),
    "one head": ({"q": "B 1 S 8", "k": "B 1 T 8", "v": "B 1 T 8"}, "none"),
    "wider values": ({"v": "B 2 T 12"}, "none"),
    "rank 3, narrower values": ({**FLAT, "v": "B T 6"}, "none"),
    "scale": ({"scale": 0.3}, "none"),
    "16 bits": ({"dtype": "float16"}, "none"),
    "batch of one": ({"B": 1}, "none"),
    "sizes known": ({"fixed": True}, "none"),
    "one row": ({"S": 1, "fixed": True}, "none"),
    "softmax_precision": ({"softmax_precision": 1}, "none"),
    # A cap comes before the mask: masked keys stay masked.
    "softcap": ({"softcap": 0.7}, "none"),
    "softcap, causal": ({"softcap": 0.7, **CAUSAL}, "causal"),
    "softcap, boolean": ({"softcap": 2.0, "mask": ("S T", masks(4, 6))}, "atten_mask"),
    "softcap, float": (
        {"softcap": 2.0, "mask": ("S T", floats(masks(4, 6), -math.inf)), "scale": 0.9},
        "atten_mask+real_shift",
    ),
    "presents without past": ({"outputs": ("y", "present_key", "present_value")}, "none"),
    "presents, rank 3": ({**FLAT, "outputs": ("y", "present_key", "present_value")}, "none"),
    "one present": ({"outputs": ("y", "", "present_value")}, "none"),
    "past": (PAST, "none"),
    "past, rank 3": ({**PAST, **FLAT, "k": "B L 16", "v": "B L 16"}, "none"),
    "past, grouped": ({**PAST, "q": "B 6 S 8"}, "none"),
    "past of wider values": ({**PAST, "v": "B 2 L 12", "past_value": "B 2 P 12"}, "none"),
    "past of length 0": ({**PAST, "P": 0, **CAUSAL, "q": "B 2 L 8"}, "causal"),
    # Causality is sparse_mode 2 without a past, whatever the sizes, and 3 with one.
    "causal": (CAUSAL, "causal"),
    "causal, more rows than keys": ({**CAUSAL, "S": 7, "T": 3}, "causal"),
    "causal, fixed": ({**CAUSAL, "fixed": True}, "causal"),
    "causal, one row": ({**CAUSAL, "S": 1, "fixed": True}, "causal"),
    "causal, rank 3": ({**FLAT, **CAUSAL}, "causal"),
    "causal with past": ({**PAST, **CAUSAL, "q": "B 2 L 8"}, "causal"),
    "causal with past, one row": ({**PAST, **CAUSAL, "q": "B 2 1 8", "k": "B 2 1 8", "v": "B 2 1 8"}, "causal"),
    "causal with past, other length": ({**PAST, **CAUSAL, "S": 3, "fixed": True}, "band"),
    "causal with past, 16 bits": ({**PAST, **CAUSAL, "q": "B 2 L 8", "dtype": "float16"}, "causal"),
    # Boolean masks of every rank, a row of which attends nothing.
    "boolean [S, T]": ({"mask": ("S T", masks(4, 6))}, "atten_mask"),
    "boolean [N, S, T]": ({"mask": ("2 S T", masks(2, 4, 6))}, "atten_mask"),
    "boolean [1, S, T]": ({"mask": ("1 S T", masks(1, 4, 6))}, "atten_mask"),
    "boolean [B, N, S, T]": ({"mask": ("B 2 S T", masks(2, 2, 4, 6))}, "atten_mask"),
    "boolean [B, 1, S, T]": ({"mask": ("B 1 S T", masks(2, 1, 4, 6))}, "atten_mask"),
    "boolean, fixed": ({"mask": ("B 1 S T", masks(2, 1, 4, 6)), "fixed": True}, "atten_mask"),
    "boolean, grouped": ({"q": "B 6 S 8", "mask": ("6 S T", masks(6, 4, 6))}, "atten_mask"),
    "boolean, past": ({**PAST, "mask": ("S P+L", masks(4, 7))}, "atten_mask"),
    "boolean, causal": ({**CAUSAL, "mask": ("S T", masks(4, 6))}, "atten_mask"),
    "boolean, causal, past": ({**CAUSAL, **PAST, "q": "B 2 L 8", "mask": ("L P+L", masks(4, 7))}, "atten_mask"),
    "boolean, causal, rank 4": ({**CAUSAL, "mask": ("B 1 S T", masks(2, 1, 4, 6))}, "atten_mask"),
    "boolean, causal, one row": (
        {**CAUSAL, **PAST, "S": 1, "L": 1, "fixed": True, "mask": ("1 P+L", masks(1, 4, empty=False))},
        None,
    ),
    # Float masks: an element of -inf or of the lowest number excludes, in a row of nothing else as well.
    "float, -inf": ({"mask": ("S T", floats(masks(4, 6), -math.inf))}, "atten_mask+real_shift"),
    "float, lowest": ({"mask": ("S T", floats(masks(4, 6), LOWEST))}, "atten_mask+real_shift"),
    "float, -1e4": ({"mask": ("S T", floats(masks(4, 6), -1e4))}, "atten_mask+real_shift"),
    "float, -1e30": ({"mask": ("S T", floats(masks(4, 6), -1e30))}, "atten_mask+real_shift"),
    "float, 16 bits beside 32": ({"mask": ("S T", floats(masks(4, 6), LOWEST_16).astype(np.float16))}, None),
    "float, 32 bits beside 16": ({"mask": ("S T", floats(masks(4, 6), LOWEST)), "dtype": "float16"}, None),
    "float, -3.4e38": ({"mask": ("S T", floats(masks(4, 6), -3.4e38))}, "atten_mask+real_shift"),
    "float, heads": ({"mask": ("2 S T", floats(masks(2, 4, 6), -math.inf))}, "atten_mask+real_shift"),
    "float, batch": ({"mask": ("B 1 S T", floats(masks(2, 1, 4, 6), LOWEST))}, "atten_mask+real_shift"),
    "float, causal": ({**CAUSAL, "mask": ("S T", floats(masks(4, 6), -math.inf))}, "atten_mask+real_shift"),
    "float, causal, lowest": ({**CAUSAL, "mask": ("S T", floats(masks(4, 6), LOWEST))}, "atten_mask+real_shift"),
    "float, causal, past": ({**CAUSAL, **PAST, "q": "B 2 L 8", "mask": ("L P+L", floats(masks(4, 7), LOWEST))}, None),
    # Lengths of opset 24: from a length on keys are excluded; a causal frontier ends at the length.
    "lengths": ({"opset": 24, "lengths": ("B", np.array([3, 6]))}, "atten_mask"),
    "length 0": ({"opset": 24, "lengths": ("B", np.array([0, 5]))}, "atten_mask"),
    "lengths, fixed": ({"opset": 24, "lengths": ("B", np.array([3, 6])), "fixed": True}, "atten_mask"),
    "lengths, rank 3": ({**FLAT, "opset": 24, "lengths": ("B", np.array([3, 6]))}, "atten_mask"),
    "lengths, causal": ({**CAUSAL, "opset": 24, "lengths": ("B", np.array([5, 6]))}, "atten_mask"),
    "lengths below S, causal": ({**CAUSAL, "opset": 24, "lengths": ("B", np.array([2, 0]))}, "atten_mask"),
    "lengths, causal, one row": (
        {**CAUSAL, "opset": 24, "S": 1, "fixed": True, "lengths": ("B", np.array([2, 5]))},
        None,
    ),
    "lengths, mask": ({"opset": 24, "lengths": ("B", np.array([2, 5])), "mask": ("S T", masks(4, 6))}, "atten_mask"),
    "lengths, float mask": (
        {"opset": 24, "lengths": ("B", np.array([2, 5])), "mask": ("S T", floats(masks(4, 6), LOWEST))},
        "atten_mask+real_shift",
    ),
    "lengths, causal, mask": (
        {**CAUSAL, "opset": 24, "lengths": ("B", np.array([4, 5])), "mask": ("B 1 S T", masks(2, 1, 4, 6))},
        "atten_mask",
    ),
}


CASES = [(name, opset) for name in TAKEN for opset in (23, 24, 25) if TAKEN[name][0].get("opset", 23) <= opset]
CASES.remove(("one present", 25))  # ONNX Runtime insists on both there


@pytest.mark.parametrize(("name", "opset"), CASES)
def test_taken(name: str, opset: int) -> None:
    features, mask = TAKEN[name]
    check_same(attention(**{**features, "opset": opset}), mask)


CONSTANT: dict[str, tuple[Array, str]] = {
    "0 and -inf": (np.where(masks(4, 6), 0, -np.inf).astype(np.float32), "atten_mask"),
    "0 and the lowest": (np.where(masks(4, 6), 0, LOWEST).astype(np.float32), "atten_mask"),
    "0 and -1e4": (np.where(masks(4, 6), 0, -1e4).astype(np.float32), "real_shift"),
    "0 and -1e30": (np.where(masks(4, 6), 0, -1e30).astype(np.float32), "real_shift"),
    "any number": (floats(masks(4, 6), 1.0), "real_shift"),
    "any number and -inf": (floats(masks(4, 6), -math.inf), "atten_mask+real_shift"),
}


@pytest.mark.parametrize("opset", [23, 25])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("name", CONSTANT)
def test_constant_masks(name: str, causal: int, opset: int) -> None:
    """A float mask of known content becomes boolean when it only excludes, and only a bias when it does not exclude."""
    content, mask = CONSTANT[name]
    operator = attention(mask=("S T", content), is_causal=causal, fixed=True, opset=opset)
    outweighs = opset == 25 and name == "0 and -1e30"  # for the function body -1e30 is as good as any such number
    check_same(dataclasses.replace(operator, constants=("mask",)), None if causal or outweighs else mask)


HALVES = {
    "any number": floats(masks(4, 6), 1.0),
    "-1e4": floats(masks(4, 6), -1e4),
    "-inf": floats(masks(4, 6), -math.inf),
    "0 and the lowest": np.where(masks(4, 6), 0, LOWEST_16),
    "0 and -1e4": np.where(masks(4, 6), 0, -1e4),
    "0, -2 and -inf": np.where(masks(4, 6), np.where(masks(4, 6, seed=5), 0, -2), -math.inf),
}


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("name", HALVES)
def test_masks_of_16_bits(name: str, constant: bool) -> None:
    """ONNX Runtime's kernel adds them in float16, which decides rows without another number; its function body does
    not."""
    mask = ("S T", HALVES[name].astype(np.float16))
    for opset in (23, 24, 25):
        operator = attention(mask=mask, opset=opset, dtype="float16", fixed=True)
        operator = dataclasses.replace(operator, constants=("mask",) if constant else ())
        if opset < 25 and ("-1e4" in name or not constant):
            code, reason = declined(operator)
            assert code == "mask_value"
            assert "in 16 bits" in reason
        else:
            check_same(operator)


@pytest.mark.parametrize(
    ("limit", "opset", "status"),
    [
        ("b = Min(m, one)", 23, "declined"),
        ("b = Tanh(m)", 23, "fused"),
        # The function body of opset 25 gets the sum rounded, to -inf at times, or as it is.
        ("b = Add(m, m)", 25, "declined"),
        ("c = Mul(m, one) b = Max(m, c)", 25, "declined"),
        ("b = Max(m, one)", 25, "fused"),
        ("c = Tanh(m) b = Add(c, one)", 25, "fused"),
    ],
)
def test_masks_of_16_bits_by_their_bounds(limit: str, opset: int, status: str) -> None:
    model = parse(
        f"{limit} y = Attention(q, k, v, b)",
        "float16[S,T] m",
        inputs="float16[B,4,S,8] q, float16[B,4,T,8] k, float16[B,4,T,8] v",
        outputs="float16[B,4,S,8] y",
        opset=opset,
        ir_version=11,
        initializers="<float16 one = {15360}>",
    )
    assert fused(model)[1].blocks[0].status == status


@pytest.mark.parametrize(
    ("opset", "numbers", "attrs", "lengths", "assume", "status"),
    [
        (24, "Mul(rest, low)", "", ", , , n", (), "fused"),
        (25, "Mul(rest, low)", "", ", , , n", (), "declined"),
        (25, "Mul(rest, low)", "<is_causal=1>", "", (), "declined"),
        (25, "Mul(rest, low)", "", "", (), "fused"),
        (25, "Mul(rest, low)", "", ", , , n", ("binary-masks",), "fused"),
        (25, "Mul(rest, one)", "", ", , , n", (), "fused"),
    ],
)
def test_a_mask_that_may_be_infinite_beside_other_exclusions(
    opset: int, numbers: str, attrs: str, lengths: str, assume: tuple[str, ...], status: str
) -> None:
    """The function body, which ONNX Runtime runs from opset 25 on, adds both: +inf and -inf are NaN."""
    model = parse(
        f"kept = Cast<to=1>(m) rest = Sub(one, kept) b = {numbers} y = Attention{attrs}(q, k, v, b{lengths})",
        "int64[B,1,S,T] m, int64[B] n",
        inputs="float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v",
        outputs="float[B,4,S,8] y",
        opset=opset,
        ir_version=11,
        initializers="<float one = {1}, float low = {-3.4028234663852886e38}>",
    )
    result, report = fused(model, assume=assume)
    (block,) = report.blocks
    assert (block.status, block.code) == (status, None if status == "fused" else "mask_value")
    rows = random_feeds(model)["q"].shape[2]
    mask = np.array([[[[1, 1, 1, 5, 6, 3]]], [[[1, 0, 1, 1, 0, 1]]]], np.int64).repeat(rows, axis=2)
    feeds = random_feeds(model, m=mask, n=np.array([3, 5], np.int64))
    if not assume:
        assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)


def test_masks_of_16_bits_with_a_key_in_every_row() -> None:
    """Such a mask is taken at one's word."""
    kept = masks(4, 6, empty=False)
    kept[:, 2] = True
    operator = attention(mask=("S T", floats(kept, -1e4).astype(np.float16)), dtype="float16")
    feeds = operator.feeds()
    result, report = fused(operator.model(feeds), assume=["no-empty-rows"])
    assert (report.blocks[0].status, report.blocks[0].assumed) == ("fused", ("no-empty-rows",))
    assert_same(run(result, feeds)[0], run(operator.model(feeds), feeds)[0], 4e-3)


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a negative softcap": ({"softcap": -2.0}, "softcap", "negative"),
    "a softcap that is no number": ({"softcap": math.nan}, "softcap", "not a number"),
    "an infinite softcap": ({"softcap": math.inf}, "softcap", "overflows"),
    "scores": ({"outputs": ("y", "", "", "qk")}, "scores_are_output", "scores"),
    "capped scores": ({"outputs": ("y", "", "", "qk"), "qk_matmul_output_mode": 1}, "scores_are_output", "scores"),
    "masked scores": ({"outputs": ("y", "", "", "qk"), "qk_matmul_output_mode": 2}, "scores_are_output", "scores"),
    "probabilities": (
        {"outputs": ("y", "", "", "qk"), "qk_matmul_output_mode": 3},
        "probabilities_are_output",
        "probabilities",
    ),
    "rounded scores": ({"softmax_precision": 10}, "cast", "16 bits"),
    "scores of integers": ({"softmax_precision": 3}, "ready_made", "no type of floating point"),
    "scores of an unknown type": ({"softmax_precision": 99}, "ready_made", "no type of floating point"),
    "float64": ({"dtype": "float64"}, "dtype", "float32"),
    "large heads": ({"q": "B 2 S 776", "k": "B 2 T 776", "v": "B 2 T 776"}, "head_size_over_768", "776"),
    "head size not known": ({"q": "B 2 S D", "k": "B 2 T D", "v": "B 2 T D", "D": 8}, "shape", "head size"),
    "heads not known": ({"q": "B N S 8", "k": "B N T 8", "v": "B N T 8", "N": 2}, "shape", "number of heads"),
    "batch of one, rank 3": ({**FLAT, "v": "1 T 16"}, "shape", "batch size"),
    "batch of one query, rank 3": ({**FLAT, "q": "1 S 16"}, "shape", "batch size"),
    "one of several new keys": ({**PAST, **CAUSAL, "S": 1}, "ready_made", "one causal row"),
    "scale": ({"scale": -0.5}, "scale", "positive"),
    "a mask that is a number": ({"mask": ("", np.array(-1e9, np.float32))}, "rank", "'mask' has 0 dimensions"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    features, code, words = REFUSED[name]
    got, reason = declined(attention(**features))
    assert got == code
    assert words in reason


def test_unread_scores() -> None:
    """A score matrix that nobody reads needs not be computed."""
    operator = attention(outputs=("y", "", "", "qk"))
    model = operator.model(operator.feeds())
    del model.graph.output[1]
    assert fused(model)[1].blocks[0].status == "fused"


WINDOWS: dict[str, tuple[dict[str, Any], str | None]] = {
    "left": ({"left_window_size": 2}, "atten_mask"),
    "right": ({"right_window_size": 1}, "atten_mask"),
    "both, square": ({"left_window_size": 2, "right_window_size": 1, "k": "B 2 S 8", "v": "B 2 S 8"}, "band"),
    "causal": ({"left_window_size": 1, "is_causal": 1, "k": "B 2 S 8", "v": "B 2 S 8"}, "band"),
    "causal, past": ({**PAST, "left_window_size": 1, "is_causal": 1, "q": "B 2 L 8"}, "band"),
    "one row": ({**PAST, "left_window_size": 1, "is_causal": 1, "S": 1, "L": 1, "fixed": True}, "band"),
    "lengths": ({"left_window_size": 1, "right_window_size": 0, "lengths": ("B", np.array([4, 6]))}, "atten_mask"),
    "lengths, later keys": ({"right_window_size": 2, "lengths": ("B", np.array([2, 6]))}, "atten_mask"),
    "mask": ({"left_window_size": 2, "is_causal": 1, "mask": ("T", np.arange(6) % 3 > 0)}, "atten_mask"),
    "unlimited": ({"left_window_size": -1, "right_window_size": -1}, "none"),
    "short mask": ({"mask": ("S 4", masks(4, 4)), "fixed": True}, "atten_mask"),
    "short float mask": ({"mask": ("S 4", floats(masks(4, 4), -math.inf)), "fixed": True}, "atten_mask+real_shift"),
    "mask of one key": ({"mask": ("S 1", masks(4, 1))}, "atten_mask"),
    "mask of open length": ({"mask": ("S M", masks(4, 4)), "M": 4}, "atten_mask"),
    "mask of open length, one key": ({"mask": ("S M", masks(4, 1)), "M": 1}, "atten_mask"),
    "float mask of open length": ({"mask": ("S M", floats(masks(4, 1), -math.inf)), "M": 1}, "atten_mask+real_shift"),
    "mask of one row": ({"mask": ("1 T", masks(1, 6, empty=False))}, "atten_mask"),
    "one causal row of several keys": ({**PAST, "left_window_size": 9, "is_causal": 1, "S": 1, "fixed": True}, None),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_by_reference(name: str) -> None:
    """What ONNX Runtime does not run is what the specification's own evaluator gives."""
    features, mask = WINDOWS[name]
    operator = attention(opset=25, **features)
    feeds = operator.feeds()
    model = operator.model(feeds)
    result, report = fused(model)
    assert report.blocks[0].status == "fused", report.blocks[0].reason
    assert mask in (None, report.blocks[0].mask)
    for got, wanted in zip(run(result, feeds), ReferenceEvaluator(model).run(None, dict(feeds)), strict=True):
        assert_same(got, wanted, 1e-5)


@pytest.mark.parametrize("name", ["boolean [S, T]", "causal", "causal with past", "rank 3", "lengths"])
def test_ascend(name: str) -> None:
    """The products take what they have words for."""
    features, _ = TAKEN[name]
    operator = attention(**{"opset": 24, "fixed": True, **features, "dtype": "float16"})
    report = fused(operator.model(operator.feeds()), "ascend")[1]
    assert report.blocks[0].status == "fused", report.blocks[0].reason


@pytest.mark.parametrize("dtype", [0, 7, 8])
def test_a_mask_of_another_type(dtype: int) -> None:
    """None, integers, or text."""
    model = parse(
        "y = Attention(q, k, v, m)",
        "bool[S,M] m",
        inputs="float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v",
        opset=24,
        ir_version=11,
    )
    model.graph.input[3].type.tensor_type.elem_type = dtype
    graph = ir.from_proto(model)
    assert fuse(graph).blocks[0].code == "dtype"


def test_a_size_that_no_memory_holds() -> None:
    """Positions of known numbers of rows are a constant, but not of so many."""
    rows = "float[1,2,4294967295,8]"
    model = parse(
        "y = Attention<left_window_size=2>(q, k, v)",
        inputs=f"{rows} q, float[1,2,6,8] k, float[1,2,6,8] v",
        outputs=f"{rows} y",
        opset=25,
        ir_version=11,
    )
    assert fused(model)[0].ByteSize() < 100_000


SIZES = "sh = Shape(q) s = Gather<axis=0>(sh, two) kh = Shape(k) t = Gather<axis=0>(kh, two) "
POSITIONS = "i0 = Range(zero, s, one) i = Unsqueeze(i0, last) j = Range(zero, t, one) "
STRUCTURES = {
    "causal": ("m = LessOrEqual(j, i) ", "causal"),
    "to the end": ("off = Sub(t, s) e = Add(i, off) m = LessOrEqual(j, e) ", "causal"),
    "as floats": ("b = LessOrEqual(j, i) m = Where(b, nought, low) ", "causal"),
    "with padding": ("b = LessOrEqual(j, i) p = Unsqueeze(pad, inner) m = And(b, p) ", "causal+atten_mask"),
    "padding": ("p = Unsqueeze(pad, inner) f = ConstantOfShape<value = bool[1] {1}>(st) m = And(f, p) ", "atten_mask"),
}


@pytest.mark.parametrize("opset", [23, 25])
@pytest.mark.parametrize("name", STRUCTURES)
def test_structural_masks(name: str, opset: int) -> None:
    """A mask that is computed from positions becomes a sparse_mode; one of keys alone does not grow with the rows."""
    body, mask = STRUCTURES[name]
    model = parse(
        SIZES + POSITIONS + "s1 = Unsqueeze(s, zero1) t1 = Unsqueeze(t, zero1) "
        "st = Concat<axis=0>(s1, t1) " + body + "y = Attention(q, k, v, m)",
        "bool[B,T] pad",
        opset=opset,
        ir_version=10,
        initializers="<int64 zero = {0}, int64 one = {1}, int64 two = {2}, int64[1] last = {1}, int64[1] zero1 = {0}, "
        "int64[2] inner = {1, 2}, float nought = {0}, float low = {-3.4028234663852886e38}>",
    )
    feeds = random_feeds(model, pad=np.array([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 1]], np.bool_))
    result, report = fused(model)
    assert report.blocks[0].mask == mask
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)


@pytest.mark.parametrize(("target", "mask"), [("ort", "causal+atten_mask"), ("ascend", "atten_mask")])
def test_a_band_beside_lengths(target: Target, mask: str) -> None:
    """On Ascend the mask of a sparse_mode is a triangle of a fixed size, so that no other mask stands beside it."""
    model = parse(
        SIZES + POSITIONS + STRUCTURES["to the end"][0] + "y = Attention(q, k, v, m, , , lengths)",
        "int64[B] lengths",
        opset=24,
        ir_version=11,
        initializers="<int64 zero = {0}, int64 one = {1}, int64 two = {2}, int64[1] last = {1}>",
    )
    feeds = random_feeds(model, lengths=np.array([4, 6]))
    result, report = fused(model, target)
    assert report.blocks[0].mask == mask
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)


SEQUENCES = st.integers(1, 6)


@settings(max_examples=examples(50))
@given(data=st.data())
def test_random(data: st.DataObject) -> None:
    """All features together."""
    draw = data.draw
    groups, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    heads, past, flat = groups * kv_heads, draw(st.booleans()), draw(st.booleans())
    lengths = not past and draw(st.booleans())
    causal, rows, new = draw(st.booleans()), draw(SEQUENCES), draw(SEQUENCES)
    if past and causal:
        rows = new
    total = new + (3 if past else 0)
    shape = draw(st.sampled_from(["S T", "1 S T", "N S T", "1 1 S T", "B 1 S T", "1 N S T", "B N S T"]))
    sizes = {"B": 2, "N": heads, "K": kv_heads, "S": rows, "L": new, "T": total}
    features: dict[str, Any] = {
        "q": f"B S {heads * 4}" if flat else f"B {heads} S 4",
        "k": f"B L {kv_heads * 4}" if flat else f"B {kv_heads} L 4",
        "v": f"B L {kv_heads * 6}" if flat else f"B {kv_heads} L 6",
        "is_causal": int(causal),
        **({"q_num_heads": heads, "kv_num_heads": kv_heads} if flat else {}),
        **({"past_key": f"B {kv_heads} P 4", "past_value": f"B {kv_heads} P 6"} if past else {}),
        **({"lengths": ("B", np.array([draw(st.integers(0, new)), new]))} if lengths else {}),
        **({"scale": 0.7} if draw(st.booleans()) else {}),
        **({"outputs": ("y", "present_key", "present_value")} if not lengths and draw(st.booleans()) else {}),
    }
    kind = draw(st.sampled_from(["none", "boolean", "float"]))
    if kind != "none":
        dims = [sizes[word] if word.isalpha() else int(word) for word in shape.split()]
        kept = masks(*dims, empty=rows > 1, seed=draw(st.integers(0, 99)))
        excluded = draw(st.sampled_from([-math.inf, LOWEST, -1e30, -1e4, -3.0]))
        words = shape.replace("N", str(heads)).replace("T", "P+L" if past else "L")
        features["mask"] = (words, kept if kind == "boolean" else floats(kept, excluded))
    fixed = draw(st.booleans()) or (past and causal)
    sizes = {name: sizes[name] for name in ("B", "S", "L")}
    operator = attention(opset=draw(st.sampled_from([24, 25])), fixed=fixed, **features, **sizes)
    check_same(operator, seed=draw(st.integers(0, 9)), tolerance=1e-4)


def test_opset_before_the_operator() -> None:
    """ONNX Runtime knows no such operator; what it would be made of may not be there either."""
    operator = attention()
    model = operator.model(operator.feeds())
    model.opset_import[0].version = 22
    (block,) = fa_compiler.optimize(model).report.blocks
    assert (block.status, "from opset 23 on" in (block.reason or "")) == ("declined", True)


@pytest.mark.parametrize("damaged", ["v", "past_key"])
def test_past_of_another_batch(damaged: str) -> None:
    """The checker takes it; ONNX Runtime refuses it in a run."""
    check_past(attention(**PAST, fixed=True), damaged, 0, 26, "do not go together")


@pytest.mark.parametrize(("more", "reason"), [(5, "is no multiple of 2 heads"), (8, "do not go together")])
def test_past_of_another_width(more: int, reason: str) -> None:
    flat = {**PAST, **FLAT, "k": "B L 16", "v": "B L 16"}
    check_past(attention(**flat, fixed=True), "k", 2, more, reason)


def check_past(operator: Operator, damaged: str, axis: int, more: int, reason: str) -> None:
    """An input of another size: the operator is left as it is."""
    model = operator.model(operator.feeds())
    info = next(info for info in model.graph.input if info.name == damaged)
    info.type.tensor_type.shape.dim[axis].dim_value += more
    (block,) = fa_compiler.optimize(model).report.blocks
    assert (block.status, reason in (block.reason or "")) == ("declined", True), block.reason
