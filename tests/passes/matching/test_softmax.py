"""The softmax in all its spellings, with scores of some hundreds and rows that are masked everywhere."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from fa_compiler.passes import Block
from tests.passes.running import PRODUCT_PV, PRODUCT_QK, Array, assert_same, fused, parse, random_feeds, run

NUMBERS = (
    "last = Constant<value=int64[1] {-1}>() one = Constant<value=float {1.0}>() tiny = Constant<value=float {1e-9}>() "
)
EXPONENTIALS = "n = ReduceMax<axes=[-1], keepdims=1>(x) d = Sub(x, n) e = Exp(d) "
TOTAL = EXPONENTIALS + "t = ReduceSum<keepdims=1>(e, last) "
PADDING = np.array([[0, 0, 0, 0, 0, 0], [1, 1, 0, 1, 1, 0]], np.bool_).reshape(2, 1, 1, 6)
TERMS = {
    "none": "x = Identity(s) ",
    "infinite": "low = Constant<value=float {-inf}>() x = Where(m, s, low) ",
    "finite": "low = Constant<value=float {-3.4028234663852886e38}>() x = Where(m, s, low) ",
    "bias": "x = Add(s, b) ",
}


def model(softmax: str, terms: str = TERMS["none"], opset: int = 17) -> onnx.ModelProto:
    more = "bool[B,1,1,T] m, float[B,1,S,T] b"
    return parse(NUMBERS + PRODUCT_QK + terms + softmax + PRODUCT_PV, more, opset=opset)


def same(proto: onnx.ModelProto, **given: Array) -> Block:
    """Compare before and after; float32 knows scores of some hundreds, and so probabilities, to 1e-5."""
    result, report = fused(proto)
    (block,) = report.blocks
    for factor in (1, 30):
        feeds = random_feeds(proto, **given)
        feeds["q"] = (feeds["q"] * factor).astype(np.float32)
        for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
            assert_same(got, wanted, 2e-5 * factor)
    return block


SPELLINGS = {
    "reciprocal": TOTAL + "r = Reciprocal(t) p = Mul(e, r) ",
    "reciprocal_first": TOTAL + "r = Div(one, t) p = Mul(r, e) ",
    "against_zero": TOTAL + "u = Add(t, tiny) p = Div(e, u) ",
    "by_its_norm": EXPONENTIALS + "t = ReduceL1<axes=[-1], keepdims=1>(e) p = Div(e, t) ",
    "normalised": EXPONENTIALS + "t0 = ReduceL1<axes=[-1], keepdims=1>(e) t1 = Clip(t0, tiny) sh = Shape(e) "
    "t = Expand(t1, sh) p = Div(e, t) ",
    "against_zero_by_a_floor": TOTAL + "u = Max(tiny, t) p = Div(e, u) ",
    "logarithm": "l = LogSoftmax<axis=-1>(x) p = Exp(l) ",
    "axes_dropped": "n3 = ReduceMax<axes=[-1], keepdims=0>(x) n = Unsqueeze(n3, last) d = Sub(x, n) e = Exp(d) "
    "t3 = ReduceSum<keepdims=0>(e, last) r = Constant<value=int64[4] {0,0,-1,1}>() t = Reshape(t3, r) p = Div(e, t) ",
    "as_jax_does": "n3 = ReduceMax<axes=[-1], keepdims=0>(x) low0 = Constant<value=float {-inf}>() n2 = Max(n3, low0) "
    "n1 = Unsqueeze(n2, last) o = Constant<value=int64[4] {1,1,1,1}>() n0 = Expand(n1, o) n = Identity(n0) "
    "d = Sub(x, n) e = Exp(d) t = ReduceSum<keepdims=1>(e, last) p = Div(e, t) ",
    "target_of_its_own_shape": "n3 = ReduceMax<axes=[-1], keepdims=0>(x) n2 = Unsqueeze(n3, last) sh = Shape(n3) "
    "c1 = Constant<value=int64[1] {1}>() w = Concat<axis=0>(sh, c1) n = Expand(n2, w) d = Sub(x, n) e = Exp(d) "
    "t = ReduceSum<keepdims=1>(e, last) p = Div(e, t) ",
    "repeated": EXPONENTIALS + "t1 = ReduceSum<keepdims=1>(e, last) sh = Shape(x) t = Expand(t1, sh) p = Div(e, t) ",
}
SUM = "t = ReduceSum<keepdims=1>(e, last) "
SPELLINGS |= {
    "power_of_the_total": TOTAL + "minus = Constant<value=float {-1.0}>() r = Pow(t, minus) p = Mul(e, r) ",
    "summed_up_in_a_wider_type": EXPONENTIALS + "w = Cast<to=11>(e) t0 = ReduceSum<keepdims=1>(w, last) "
    "t = Cast<to=1>(t0) p = Div(e, t) ",
    "logarithm_written_out": TOTAL + "g = Log(t) l = Sub(d, g) p = Exp(l) ",
    "logarithm_of_another_difference": TOTAL + "g = Log(t) c = Sub(x, n) l = Sub(c, g) p = Exp(l) ",
    "logarithm_as_one_reduction": EXPONENTIALS + "g = ReduceLogSum<axes=[-1], keepdims=1>(e) h = Neg(g) l = Add(d, h) "
    "p = Exp(l) ",
}
LOGARITHM_OF_THE_SUM = "l = ReduceLogSumExp<axes=[-1], keepdims=1>(x) d = Sub(x, l) p = Exp(d) "


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling: str, terms: str) -> None:
    assert same(model(SPELLINGS[spelling], TERMS[terms]), m=PADDING).status == "fused"


WRITTEN = (
    "d = Sub(x, n) e = Exp(d) t = ReduceSum<keepdims=1>(e, last) g = Log(t) l = Add(g, n) r = Sub(x, l) p = Exp(r) "
)
PEAK = "n0 = ReduceMax<axes=[-1], keepdims=1>(x) "
TESTED = PEAK + "i = IsInf(n0) j = IsNaN(n0) u = Or(i, j) f = Not(u) "
ZERO = "zero = Constant<value=float {0.0}>() "
LOGARITHMS = {
    "as one operator": LOGARITHM_OF_THE_SUM,
    "written out": PEAK.replace("n0", "n") + WRITTEN,
    "of a finite maximum": ZERO + TESTED + "n = Where(f, n0, zero) " + WRITTEN,
    "with the axis put back behind it": PEAK.replace("n0", "n") + "d = Sub(x, n) e = Exp(d) "
    "t = ReduceSum<keepdims=0>(e, last) g = Log(t) n3 = Squeeze(n, last) l3 = Add(n3, g) l = Unsqueeze(l3, last) "
    "r = Sub(x, l) p = Exp(r) ",
    "as jax does": PEAK.replace("keepdims=1", "keepdims=0")
    + "low0 = Constant<value=float {-inf}>() n1 = Max(low0, n0) i = IsInf(n1) j = IsNaN(n1) u = Or(i, j) f = Not(u) "
    "zero = Constant<value=float {0.0}>() nf = Where(f, n1, zero) n2 = Unsqueeze(nf, last) "
    "ones = Constant<value=int64[4] {1,1,1,1}>() n = Expand(n2, ones) d = Sub(x, n) e = Exp(d) "
    "t0 = ReduceSum<keepdims=0>(e, last) a = Abs(t0) "
    "g = Log(a) l0 = Add(g, nf) l1 = Unsqueeze(l0, last) l = Expand(l1, ones) r = Sub(x, l) p = Exp(r) ",
    "of a maximum that is no infinity": ZERO + PEAK + "i = IsInf(n0) f = Not(i) n = Where(f, n0, zero) " + WRITTEN,
    "as tf2onnx does": ZERO + TESTED + "ff = Cast<to=1>(f) a = Mul(ff, n0) nf = Not(f) nn = Cast<to=1>(nf) "
    "b0 = Mul(zero, nn) n = Add(a, b0) " + WRITTEN,
}
NO_MAXIMUM = {
    "the least": PEAK.replace("n0", "n").replace("ReduceMax", "ReduceMin") + WRITTEN,
    "one where it is infinite": ZERO + TESTED + "n = Where(f, n0, one) " + WRITTEN,
    "nothing where it is finite": ZERO + TESTED + "n = Where(u, n0, zero) " + WRITTEN,
    "of the logarithm of the sum": PEAK.replace("n0", "n") + "d = Sub(x, n) e = Exp(d) "
    "t = ReduceLogSum<axes=[-1], keepdims=1>(e) g = Log(t) r = Sub(d, g) p = Exp(r) ",
    "another in the sum": PEAK.replace("n0", "n") + WRITTEN.replace("Add(g, n)", "Add(g, one)"),
    "tested for -inf only": ZERO
    + PEAK
    + "i = IsInf<detect_positive=0>(n0) f = Not(i) n = Where(f, n0, zero) "
    + WRITTEN,
}


@pytest.mark.parametrize("spelling", LOGARITHMS.values(), ids=LOGARITHMS)
@pytest.mark.parametrize("terms", TERMS)
def test_the_logarithm_of_the_sum_subtracted(terms: str, spelling: str) -> None:
    """It is rounded away beside a number such as -3.4e38: a row of nothing else gives ones, not their mean."""
    block = same(model(spelling, TERMS[terms]), m=PADDING)
    if terms in ("none", "infinite"):
        assert block.status == "fused"
    else:
        assert (block.code, block.culprit) == ("score_term", "x")


KEPT_KEY = "c = Constant<value=bool[5,6] {1,1,1,1,0,1, 0,0,1,1,0,0, 1,0,0,0,0,0, 0,0,0,0,0,1, 1,1,1,1,1,1}>() "
LOW = "low = Constant<value=float {-1e9}>() "
LOWERED = {
    "some mask": (TERMS["finite"], ["no-empty-rows"], "fused"),
    "added": ("low = Constant<value=float {-3e38}>() n0 = Not(m) f = Cast<to=1>(n0) a = Mul(f, low) x = Add(s, a) ",)
    + (["no-empty-rows"], "fused"),
    "a mask that keeps a key of each row": (KEPT_KEY + LOW + "x = Where(c, s, low) ", [], "fused"),
    "another mask beside it": (
        KEPT_KEY + LOW + "inf = Constant<value=float {-inf}>() w = Where(c, s, low) x = Where(m, w, inf) ",
        [],
        "declined",
    ),
    "turned round": (LOW + "w = Where(m, s, low) x = Neg(w) ", ["no-empty-rows"], "declined"),
    "raised": ("high = Constant<value=float {1e9}>() x = Where(m, s, high) ", ["no-empty-rows"], "declined"),
    "a bias": (TERMS["bias"], ["no-empty-rows"], "declined"),
}


@pytest.mark.parametrize("case", LOWERED)
def test_the_logarithm_of_the_sum_where_each_row_keeps_a_score(case: str) -> None:
    terms, assume, status = LOWERED[case]
    proto = model(LOGARITHM_OF_THE_SUM, terms)
    result, report = fused(proto, assume=assume)
    (block,) = report.blocks
    assert block.status == status and list(block.assumed) == (assume if status == "fused" else [])
    feeds = random_feeds(proto, m=PADDING | np.eye(1, 6, dtype=np.bool_))
    for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
        assert_same(got, wanted, 2e-5)


@pytest.mark.parametrize("spelling", NO_MAXIMUM.values(), ids=NO_MAXIMUM)
def test_the_logarithm_of_another_sum(spelling: str) -> None:
    _, report = fused(model(spelling))
    assert [block.code for block in report.blocks] in (["softmax_spelling"], ["softmax_overflows"])


def test_a_shape_inside_the_softmax_that_is_an_output() -> None:
    body = SPELLINGS["target_of_its_own_shape"]
    proto = parse(NUMBERS + PRODUCT_QK + TERMS["none"] + body + PRODUCT_PV, outputs="float[B,4,S,8] y, int64[4] w")
    _, report = fused(proto)
    assert [block.code for block in report.blocks] == ["scores_are_output"]


def test_flattened_over_dimensions_of_one() -> None:
    """The softmax of opset 11 over the last two dimensions, of which one is a single row."""
    inputs = "float[B,4,1,8] q, float[B,4,T,8] k, float[B,4,T,8] v"
    body = PRODUCT_QK + "p = Softmax<axis=2>(s) " + PRODUCT_PV
    proto = parse(body, inputs=inputs, outputs="float[B,4,1,8] y", opset=11)
    assert same(proto).status == "fused"


BASES = (
    "two = Constant<value=float {2.0}>() log2e = Constant<value=float {1.44269504}>() "
    "ln2 = Constant<value=float {0.6931472}>() ten = Constant<value=float {10.0}>() "
    "half = Constant<value=float {0.5}>() "
)
OF_TWO = TOTAL.replace("Exp(d)", "Pow(two, d)") + "p = Div(e, t) "
OF_TEN, OF_HALF = (OF_TWO.replace("two", base) for base in ("ten", "half"))
BEHIND = OF_TWO.replace("e = Pow(two, d)", "c = Mul(d, log2e) e = Pow(two, c)")
LESS_LOGARITHM = OF_TWO.replace("p = Div(e, t)", "g = Log(t) l = Mul(g, log2e) r = Sub(d, l) p = Pow(two, r)")
AT_HALF = TOTAL.replace("e = Exp(d)", "c = Div(d, two) e = Exp(c)") + "p = Div(e, t) "
POWERS = {
    "two": (OF_TWO, "none"),
    "two, masked by -inf": (OF_TWO, "infinite"),
    "two, masked by a number": (OF_TWO, "finite"),
    "two, of scores in units of it": (OF_TWO.replace("(x", "(z").replace("n = R", "z = Mul(x, log2e) n = R"), "none"),
    "two, with its unit behind the maximum": (BEHIND, "finite"),
    "two, with its unit behind the maximum of a bias": (BEHIND, "bias"),
    "e, with a factor behind the maximum": (AT_HALF, "finite"),
    "ten": (OF_TEN, "none"),
    "two, less the logarithm of the sum": (LESS_LOGARITHM, "finite"),
    "two, less the logarithm of the whole sum": (
        LESS_LOGARITHM.replace("r = Sub(d, l)", "l2 = Add(n, l) r = Sub(x, l2)"),
        "infinite",
    ),
    "two, less a ReduceLogSumExp": (
        "c = Mul(x, ln2) l0 = ReduceLogSumExp<axes=[-1], keepdims=1>(c) l = Div(l0, ln2) r = Sub(x, l) "
        "p = Pow(two, r) ",
        "infinite",
    ),
}
NO_POWERS = {
    "a mask that grows": (OF_TEN, "finite", "score_term"),
    "a mask that grows behind the maximum": (BEHIND.replace("two", "ten"), "infinite", "score_term"),
    "of less than 1": (OF_HALF, "none", "softmax_overflows"),
    "without the maximum": (OF_TWO.replace("(two, d)", "(two, x)"), "none", "softmax_overflows"),
    "turned round behind the maximum": (
        BEHIND.replace("c = M", "g = Neg(log2e) c = M").replace(", log2e) e", ", g) e"),
        "none",
        "softmax_overflows",
    ),
    "beside a sink of exponentials": (
        OF_TWO.replace("p = Div(e, t)", "o = Sub(one, n) f = Exp(o) u = Add(t, f) p = Div(e, u)"),
        "none",
        "probability_term",
    ),
    "less the logarithm of their sum": (
        OF_TWO.replace("p = Div(e, t)", "l = ReduceLogSumExp<axes=[-1], keepdims=1>(x) r = Sub(x, l) p = Pow(two, r)"),
        "none",
        "softmax_spelling",
    ),
    "less the natural logarithm of the sum": (
        LESS_LOGARITHM.replace("l = Mul(g, log2e)", "l = Identity(g)"),
        "none",
        "softmax_spelling",
    ),
    "less the logarithm of a sum to another base": (
        LESS_LOGARITHM.replace("e = Pow(two", "e = Pow(ten"),
        "none",
        "softmax_spelling",
    ),
    "less a logarithm, without the maximum": (
        LESS_LOGARITHM.replace("Pow(two, d)", "Pow(two, x)").replace("Sub(d", "Sub(x"),
        "none",
        "softmax_overflows",
    ),
}


@pytest.mark.parametrize("body, terms", POWERS.values(), ids=POWERS)
def test_powers(body: str, terms: str) -> None:
    """b^x is exp(log(b) x); a row that is masked everywhere by a number keeps the mean of its values."""
    proto = model(BASES + body, TERMS[terms])
    assert same(proto, m=PADDING).status == "fused"
    assert fused(proto, "ascend", ["no-empty-rows"])[1].count("fused") == 1


@pytest.mark.parametrize("body, terms, code", NO_POWERS.values(), ids=NO_POWERS)
def test_powers_that_are_no_softmax(body: str, terms: str, code: str) -> None:
    _, report = fused(model(BASES + body, TERMS[terms]))
    assert [block.code for block in report.blocks] == [code]


def test_powers_of_a_moderate_number_that_a_bias_is_added_to() -> None:
    """The factor of the exponent would round the sum of both once more, which a row without a key shows."""
    terms = "low = Constant<value=float {-10000.0}>() w = Where(m, s, low) b = MatMul(f, g) x = Add(w, b) "
    more = "bool[B,1,S,T] m, float[B,4,S,2] f, float[B,4,2,T] g"
    proto = parse(BASES + NUMBERS + PRODUCT_QK + terms + OF_TWO + PRODUCT_PV, more)
    assert [block.status for block in fused(proto)[1].blocks] == ["declined"]
    exact = parse(NUMBERS + PRODUCT_QK + terms + TOTAL + "p = Div(e, t) " + PRODUCT_PV, more)
    result, report = fused(exact)
    assert [block.status for block in report.blocks] == ["fused"]
    feeds = random_feeds(exact)
    feeds["m"][0] = False
    assert_same(run(result, feeds)[0], run(exact, feeds)[0], 1e-5)


def test_powers_beside_a_column_of_the_scores() -> None:
    """The column's score would have to be scaled, too."""
    body = (
        OF_TWO.replace("(x", "(w")
        .replace("p = Div", "w2 = Div")
        .replace("n = R", "g = Constant<value=int64[8] {0,0,0,0,0,0,0,1}>() w = Pad(x, g, one) n = R")
    )
    body += "i0 = Constant<value=int64[1] {0}>() p = Slice(w2, i0, last, last) "
    _, report = fused(model(BASES + body))
    assert [block.code for block in report.blocks] == ["score_term"]


BEHIND_TEN = {
    "a power": OF_TEN,
    "a factor": TOTAL.replace("e = Exp(d)", "c = Mul(d, ten) e = Exp(c)") + "p = Div(e, t) ",
    "a factor before a Softmax": EXPONENTIALS.replace("e = Exp(d)", "c = Mul(d, ten) p = Softmax(c)"),
}


@pytest.mark.parametrize("softmax", BEHIND_TEN.values(), ids=BEHIND_TEN)
def test_behind_the_maximum_of_scores_times_a_factor_of_unknown_size(softmax: str) -> None:
    """Scores of 1e38 less their maximum are 0 or far below it; ten times such scores are infinite."""
    proto = parse(NUMBERS + BASES + PRODUCT_QK + "x = Mul(s, g) " + softmax + PRODUCT_PV, "float g")
    feeds = random_feeds(proto, g=np.array(3e37, np.float32))
    (got,), (wanted,) = run(fused(proto)[0], feeds), run(proto, feeds)
    assert np.isfinite(wanted).all()
    assert_same(got, wanted, 1e-5)


NO_SOFTMAX = {
    "another_total": TOTAL.replace("e, last", "x, last") + "p = Div(e, t) ",
    "reciprocal_of_the_exponentials": TOTAL + "r = Reciprocal(e) p = Mul(t, r) ",
}


@pytest.mark.parametrize("name", NO_SOFTMAX)
def test_what_is_no_softmax(name: str) -> None:
    result, report = fused(model(NO_SOFTMAX[name]))
    assert not report.blocks
    assert "FlashAttentionScore" not in {node.op_type for node in result.graph.node}


def test_flattened_over_rows_and_keys() -> None:
    _, report = fused(parse(PRODUCT_QK + "p = Softmax<axis=2>(s) " + PRODUCT_PV, opset=11))
    assert [block.code for block in report.blocks] == ["softmax_axis"]


def test_maximum_of_other_rows() -> None:
    """The maxima are put back along the wrong axis."""
    square = "float[B,4,6,8] q, float[B,4,6,8] k, float[B,4,6,8] v"
    softmax = EXPONENTIALS.replace(
        "n = ReduceMax<axes=[-1], keepdims=1>(x)",
        "n3 = ReduceMax<axes=[-1], keepdims=0>(x) at = Constant<value=int64[1] {2}>() n = Unsqueeze(n3, at)",
    )
    softmax += "t = ReduceSum<keepdims=1>(e, last) p = Div(e, t) "
    proto = parse(
        NUMBERS + PRODUCT_QK + TERMS["none"] + softmax + PRODUCT_PV, inputs=square, outputs="float[B,4,6,8] y"
    )
    _, report = fused(proto)
    assert [block.status for block in report.blocks] == ["declined"]


FACTORS = "f = Constant<value=float {0.03125}>() c = Constant<value=float {32.0}>() "
RELAXED = "n = ReduceMax<axes=[-1], keepdims=1>(r) d = Sub(r, n) w = Mul(d, c) "
DROPPED = "n3 = ReduceMax<axes=[-1], keepdims=0>(r) n = Unsqueeze(n3, last) d = Sub(r, n) w = Mul(d, c) "


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("relaxed", [RELAXED, DROPPED], ids=["kept", "dropped"])
def test_the_maximum_subtracted_before_a_factor(relaxed: str, terms: str) -> None:
    """CogView's and LayoutLMv3's: a row less one number has the same softmax, whatever factor is behind it."""
    body = FACTORS + "r = Mul(x, f) " + relaxed + "p = Softmax<axis=-1>(w) "
    assert same(model(body, TERMS[terms]), m=PADDING).status == "fused"


def test_a_mask_less_its_maximum_grows() -> None:
    """-3.4e38 less itself is 0, and 32 times that; 32 * -3.4e38 is not."""
    block = same(model(FACTORS + "r = Identity(x) " + RELAXED + "p = Softmax<axis=-1>(w) ", TERMS["finite"]), m=PADDING)
    assert block.code == "score_term"


def test_a_mask_less_its_maximum_turned_round() -> None:
    """Divided by -32 the mask is the maximum, 1e37, beside which every score is rounded away."""
    factors = FACTORS.replace("0.03125", "-0.03125").replace("32.0", "-32.0")
    block = same(model(factors + "r = Mul(x, f) " + RELAXED + "p = Softmax<axis=-1>(w) ", TERMS["finite"]), m=PADDING)
    assert block.code == "score_term"


def test_the_maximum_subtracted_before_a_mask() -> None:
    """A number that is put in afterwards is not moved with the row."""
    body = FACTORS + "r = Identity(x) " + RELAXED + "low = Constant<value=float {-1e38}>() z = Where(m, w, low) "
    assert same(model(body + "p = Softmax<axis=-1>(z) "), m=PADDING).code == "scores_are_output"


def test_axes_before_the_batch() -> None:
    """ONNX Runtime's FusedMatMul takes [rows, heads, depth] as it is."""
    body = "s = com.microsoft.FusedMatMul<transBatchA=1, transBatchB=1, transB=1>(q, k) p = Softmax<axis=-1>(s) "
    body += "y = com.microsoft.FusedMatMul<transBatchB=1>(p, v)"
    inputs = "float[S,4,8] q, float[T,4,8] k, float[T,4,6] v"
    assert same(parse(body, inputs=inputs, outputs="float[4,S,6] y")).status == "fused"
