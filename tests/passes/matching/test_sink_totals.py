"""A softmax written out with one more score in its total: softmax-plus-one, and a sink."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from fa_compiler.passes import Block
from tests.passes.running import PRODUCT_QK, Array, assert_same, fused, parse, random_feeds, run

NUMBERS = (
    "last = Constant<value=int64[1] {-1}>() zero = Constant<value=float {0}>() one = Constant<value=float {1}>() "
    "heads = Constant<value=float[4,1,1] {-0.5,1.5,0.0,3.0}>() three = Constant<value=float {3}>() "
)
PEAK = "peak = ReduceMax<axes=[-1], keepdims=1>(x) "
EXPS = "d = Sub(x, peak) e = Exp(d) sum = ReduceSum<keepdims=1>(e, last) "
ONE = "n = Neg(peak) extra = Exp(n) "
HEADS = "n = Sub(heads, peak) extra = Exp(n) "
TOTAL = "total = Add(sum, extra) "
RESULT = "p = Div(e, total) y = MatMul(p, v)"
PADDING = np.array([[0, 0, 0, 0, 0, 0], [1, 1, 0, 1, 1, 0]], np.bool_).reshape(2, 1, 1, 6)


def block_of(body: str, terms: str = "x = Identity(s) ", more: str = "", **given: Array) -> Block:
    """The only block of a model, whose numbers were compared."""
    proto: onnx.ModelProto = parse(NUMBERS + PRODUCT_QK + terms + body, more)
    result, report = fused(proto)
    feeds = random_feeds(proto, **given)
    for scale in (1.0, 40.0):  # some rows lie far above the sink, others far below
        feeds["q"] = feeds["q"] * np.float32(scale)
        for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
            assert_same(got, wanted, 1e-5)
    (block,) = report.blocks
    return block


@pytest.mark.parametrize(
    "body",
    [
        PEAK + EXPS + ONE + TOTAL + RESULT,
        PEAK + EXPS + ONE + "total = Add(extra, sum) r = Reciprocal(total) p = Mul(e, r) y = MatMul(p, v)",
        PEAK + EXPS + ONE + TOTAL + "o = MatMul(e, v) y = Div(o, total)",
        PEAK + EXPS + HEADS + TOTAL + RESULT,
        PEAK + EXPS + "n = Sub(zero, peak) w = Exp(n) extra = Mul(three, w) " + TOTAL + RESULT,
        PEAK.replace("peak", "m") + "peak = Relu(m) " + EXPS + ONE + TOTAL + RESULT,
        PEAK.replace("peak", "m") + "peak = Max(m, zero) " + EXPS + ONE + TOTAL + RESULT,
        PEAK.replace("peak", "m") + "peak = Clip(m, zero) " + EXPS + ONE + TOTAL + RESULT,
        PEAK.replace("peak", "m") + "peak = Max(heads, m) " + EXPS + HEADS + TOTAL + RESULT,
    ],
    ids=["one", "reciprocal", "late", "heads", "three", "relu", "max", "clip", "max of heads"],
)
def test_one_more_score_in_the_total_is_a_sink(body: str) -> None:
    assert block_of(body).status == "fused"


HELD = PEAK.replace("peak", "m") + "peak = Relu(m) " + EXPS + ONE + TOTAL + RESULT
SELECTED = "f = Constant<value=float {-inf}>() x = Where(m0, s, f) "


def test_a_row_without_keys_is_zero_where_the_peak_is_at_least_the_sink() -> None:
    block = block_of(HELD, SELECTED, "bool[B,1,1,T] m0", m0=PADDING)
    assert block.status == "fused"


def test_a_row_without_keys_is_nan_elsewhere() -> None:
    block = block_of(PEAK + EXPS + ONE + TOTAL + RESULT, SELECTED, "bool[B,1,1,T] m0", m0=PADDING)
    assert block.code == "empty_rows"


def test_a_finite_mask_leaves_all_to_the_sink() -> None:
    terms = SELECTED.replace("-inf", "-3.4028235e38")
    block = block_of(PEAK + EXPS + ONE + TOTAL + RESULT, terms, "bool[B,1,1,T] m0", m0=PADDING)
    assert block.status == "fused"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (PEAK + EXPS + "total = Add(sum, one) " + RESULT, "probability_term"),
        (PEAK + EXPS + "extra = Exp(peak) " + TOTAL + RESULT, "probability_term"),
        (PEAK + EXPS + "n = Sub(peak, heads) extra = Exp(n) " + TOTAL + RESULT, "probability_term"),
        (PEAK + EXPS + ONE.replace("Neg(peak)", "Neg(peak2)") + TOTAL + RESULT, "probability_term"),
        (
            PEAK + EXPS + "n = Neg(peak) w = Exp(n) c = Neg(three) extra = Mul(c, w) " + TOTAL + RESULT,
            "probability_term",
        ),
        ("e = Exp(x) sum = ReduceSum<keepdims=1>(e, last) total = Add(sum, one) " + RESULT, "softmax_overflows"),
        (HELD.replace("Relu(m)", "Max(m, three)"), "softmax_overflows"),
        (PEAK + EXPS + HEADS.replace("heads", "rows") + TOTAL + RESULT, "shape"),
    ],
    ids=["one itself", "not subtracted", "turned", "other peak", "negative", "no peak", "held by more", "rows"],
)
def test_what_is_no_sink(body: str, code: str) -> None:
    body = "peak2 = ReduceMax<axes=[-1], keepdims=1>(s) " + body if "peak2" in body else body
    more = "float[1,1,S,1] rows" if "rows" in body else ""
    assert block_of(body, more=more).code == code
