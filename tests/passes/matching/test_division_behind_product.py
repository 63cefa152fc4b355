"""Exponentials times the values, divided by their sum behind the product, and what only looks so."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from fa_compiler.passes import Block
from tests.passes.running import PRODUCT_QK, Array, assert_same, fused, parse, random_feeds, run

NUMBERS = (
    "last = Constant<value=int64[1] {-1}>() rows = Constant<value=int64[1] {-2}>() "
    "low = Constant<value=float {-inf}>() tiny = Constant<value=float {1e-9}>() "
    "zero = Constant<value=float {0.0}>() two = Constant<value=float {2.0}>() "
    "least = Constant<value=float {-3.4028234663852886e38}>() "
)
EXP = "n = ReduceMax<axes=[-1], keepdims=1>(x) d = Sub(x, n) e = Exp(d) "
TOTAL = "t = ReduceSum<keepdims=1>(e, last) "
PLAIN = EXP + TOTAL + "o = MatMul(e, v) y = Div(o, t)"
PADDING = np.array([[0, 0, 0, 0, 0, 0], [1, 1, 0, 1, 1, 0]], np.bool_).reshape(2, 1, 1, 6)
MORE = "bool[B,1,1,T] m, float[B,1,S,T] b"


def model(late: str = PLAIN, terms: str = "x = Identity(s) ", **options: str) -> onnx.ModelProto:
    return parse(NUMBERS + PRODUCT_QK + terms + late, MORE, **options)  # type: ignore[arg-type]  # strings, all of them


def same(proto: onnx.ModelProto, **given: Array) -> Block:
    """Compare before and after, with scores of some hundreds, too: float32 knows their exponentials to 1e-5."""
    result, report = fused(proto)
    for factor in (1, 30):
        feeds = random_feeds(proto, **{"m": PADDING, **given})
        feeds["q"] = (feeds["q"] * factor).astype(np.float32)
        for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
            assert_same(got, wanted, 2e-5 * factor)
    (block,) = report.blocks
    return block


@pytest.mark.parametrize(
    "terms",
    [
        "x = Identity(s) ",
        "x = Where(m, s, low) ",
        "x = Where(m, s, least) ",
        "x = Add(s, b) ",
        "a = Where(m, zero, least) z = Mul(s, two) x = Add(a, z) ",
    ],
)
@pytest.mark.parametrize(
    "late",
    [
        PLAIN,
        EXP + TOTAL + "r = Reciprocal(t) o = MatMul(e, v) y = Mul(r, o)",
        EXP + TOTAL + "u = Add(t, tiny) o = MatMul(e, v) y = Div(o, u)",
        EXP + "t3 = ReduceSum<keepdims=0>(e, last) t = Unsqueeze(t3, last) o = MatMul(e, v) y = Div(o, t)",
        EXP + TOTAL + 'o = Einsum<equation="bnst,bnte->bnse">(e, v) y = Div(o, t)',
        EXP + TOTAL + "h = Mul(e, two) o = MatMul(h, v) y = Div(o, t)",
    ],
    ids=["div", "reciprocal", "floor", "unsqueeze", "einsum", "factor"],
)
def test_divided_late(late: str, terms: str) -> None:
    assert same(model(late, terms)).status == "fused"


def test_the_mask_zeroes_the_exponentials_once_more() -> None:
    late = EXP + TOTAL + "f = Cast<to=1>(m) h = Mul(e, f) o = MatMul(h, v) y = Div(o, t)"
    for number in ("low", "least"):
        assert same(model(late, f"x = Where(m, s, {number}) ")).status == "fused"


@pytest.mark.parametrize(
    ("late", "code"),
    [
        (EXP + "t = ReduceSum<keepdims=1>(e, rows) o = MatMul(e, v) y = Div(o, t)", None),
        ("e = Exp(x) " + TOTAL + "o = MatMul(e, v) y = Div(o, t)", "softmax_overflows"),
        (EXP + TOTAL + "w = IsNaN(e) h = Where(w, zero, e) o = MatMul(h, v) y = Div(o, t)", None),
        (EXP + TOTAL + 'o = Einsum<equation="bnst,bnte->nbse">(e, v) y = Div(o, t)', "shape"),
        (
            EXP
            + TOTAL
            + "f = Cast<to=1>(m) h = Mul(e, f) w = ReduceSum<keepdims=1>(h, last) o = MatMul(h, v) y = Div(o, w)",
            None,
        ),
        (EXP + "e2 = Exp(d) t = ReduceSum<keepdims=1>(e2, last) o = MatMul(e, v) o1 = Neg(o) y = Div(o1, t)", None),
    ],
    ids=["other axis", "no maximum", "guard", "heads and batch change places", "masked total", "not at once"],
)
def test_what_is_not_divided_late(late: str, code: str | None) -> None:
    """Some sizes are the same, or the models would not run."""
    sizes = "float[4,4,6,8] q, float[4,4,6,8] k, float[4,4,6,6] v"
    padding = np.resize(PADDING, (4, 1, 1, 6))
    proto = parse(
        NUMBERS + PRODUCT_QK + "x = Where(m, s, least) " + late,
        "bool[4,1,1,6] m",
        inputs=sizes,
        outputs="float[4,4,6,6] y",
    )
    result, report = fused(proto)
    assert all(block.status == "declined" for block in report.blocks)
    assert code is None or [block.code for block in report.blocks] == [code]
    feeds = random_feeds(proto, m=padding)
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-6)


@pytest.mark.parametrize(
    "mask",
    [
        "f = Cast<to=1>(m) h = Mul(e, f) ",
        "h = Where(m, e, zero) ",
    ],
)
@pytest.mark.parametrize(
    "behind",
    [
        "p = Div(h, t) y = MatMul(p, v)",
        "u = Add(t, tiny) p = Div(h, u) y = MatMul(p, v)",
        "o = MatMul(h, v) y = Div(o, t)",
    ],
)
def test_exponentials_masked_before_they_are_summed_up(mask: str, behind: str) -> None:
    """A masked key may have the maximum: then the others' exponentials vanish, and 0 / 0 is left."""
    block = same(model(EXP + mask + "t = ReduceSum<keepdims=1>(h, last) " + behind))
    assert (block.status, block.code) == ("declined", "probability_term")


def test_a_total_that_is_read_elsewhere_stays() -> None:
    proto = model(PLAIN + " z = Log(t)", outputs="float[B,4,S,8] y, float[B,4,S,1] z")
    assert same(proto).code == "scores_are_output"


def test_half_precision_sums_may_overflow() -> None:
    kinds = "float16[B,4,S,8] q, float16[B,4,T,8] k, float16[B,4,T,8] v"
    proto = parse(NUMBERS + PRODUCT_QK + "x = Identity(s) " + PLAIN, inputs=kinds, outputs="float16[B,4,S,8] y")
    assert [block.code for block in fused(proto)[1].blocks] == ["dtype"]


BEHIND = "p = Softmax<axis=-1>(d) y = MatMul(p, v)"


@pytest.mark.parametrize("terms", ["x = Identity(s) ", "x = Where(m, s, low) ", "x = Where(m, s, least) "])
@pytest.mark.parametrize("factor", ["d = Sub(w, x) ", "h = Sub(x, w) d = Neg(h) "])
def test_scores_subtracted_from_their_maximum(factor: str, terms: str) -> None:
    """DANet's attention of channels is the softmax of the opposite scores, but for a score of +inf, which makes a row
    NaN; and a mask's number becomes the largest score."""
    proto = model("n = ReduceMax<axes=[-1], keepdims=1>(x) sh = Shape(x) w = Expand(n, sh) " + factor + BEHIND, terms)
    assert (block := same(proto)).status == "declined", block.code


def test_a_divisor_of_more_dimensions() -> None:
    eps = "u0 = Constant<value=float[1,1,1,1,1] {1e-9}>() u = Add(t, u0) "
    proto = model(EXP + TOTAL + eps + "o = MatMul(e, v) y = Div(o, u)", outputs="float[1,B,4,S,8] y")
    assert same(proto).reason == "the divisor enlarges what it divides"
