"""Selections spelt in other ways: of 0 and 1 by arithmetic, with a number repeated, and those that change nothing."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from fa_compiler.passes import Block
from tests.passes.running import PRODUCT_PV, PRODUCT_QK, SOFTMAX, Array, assert_same, fused, parse, random_feeds, run

LEAST = "-3.4028234663852886e38"
PADDING = np.array([[0, 0, 0, 0, 0, 0], [1, 1, 0, 1, 1, 0]], np.bool_).reshape(2, 1, 1, 6)
NUMBERS = (
    "one = Constant<value=float {1.0}>() zero = Constant<value=float {0.0}>() low = Constant<value=float {-inf}>() "
    "two = Constant<value=float {2.0}>() "
)
MORE = "bool[B,1,1,T] m, float[B,1,1,T] w, bool[B,1,1,T] n"


def on_scores(body: str, fill: str = LEAST) -> onnx.ModelProto:
    f = f"f = Constant<value=float {{{fill}}}>() h = Constant<value=float {{{fill.removeprefix('-')}}}>() "
    return parse(PRODUCT_QK + NUMBERS + f + body + SOFTMAX.format("x") + PRODUCT_PV, MORE)


def on_probabilities(body: str, more: str = "", outputs: str = "float[B,4,S,8] y") -> onnx.ModelProto:
    scores = PRODUCT_QK + NUMBERS + "x0 = Where(m, s, low) p0 = Softmax<axis=-1>(x0) "
    return parse(scores + body + PRODUCT_PV, MORE + more, outputs=outputs)


def same(proto: onnx.ModelProto, assume: tuple[str, ...] = (), **given: Array) -> Block:
    feeds = random_feeds(proto, m=PADDING, **given)
    result, report = fused(proto, assume=assume)
    for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
        assert_same(got, wanted, 1e-5)
    return report.blocks[0]


ENDS = (
    "end = Constant<value=int64[1] {-1}>() start = Constant<value=int64[1] {-9}>() "
    "axis = Constant<value=int64[1] {3}>() "
)
BLENDS = {
    "added": "b = Cast<to=1>(m) g = Mul(s, b) r = Sub(one, b) t = Mul(r, f) x = Add(g, t) ",
    "added_in_front": "b = Cast<to=1>(m) g = Mul(b, s) r = Sub(one, b) t = Mul(f, r) x = Add(t, g) ",
    "subtracted": "b = Cast<to=1>(m) g = Mul(s, b) r = Sub(one, b) t = Mul(r, h) x = Sub(g, t) ",
    "of_the_opposite": "b = Cast<to=1>(m) g = Mul(b, s) d = Not(m) r = Cast<to=1>(d) t = Mul(f, r) x = Add(g, t) ",
    "turned_round": f"{ENDS} b = Cast<to=1>(m) bm = Slice(b, end, start, axis, end) g = Mul(s, bm) r = Sub(one, b) "
    "t = Mul(r, f) tm = Slice(t, end, start, axis, end) x = Add(g, tm) ",
    "less_one": "b = Cast<to=1>(m) g = Mul(s, b) r = Sub(b, one) t = Mul(r, h) x = Add(g, t) ",
    "less_one_subtracted": "b = Cast<to=1>(m) g = Mul(s, b) r = Sub(b, one) t = Mul(r, f) x = Sub(g, t) ",
    "of_a_number_for_each_score": "b = Cast<to=1>(m) g = Mul(s, b) d = Not(m) r = Cast<to=1>(d) all = Shape(s) "
    "wide = Expand(f, all) t = Mul(r, wide) x = Add(t, g) ",
    "where": "b = Cast<to=1>(m) g = Mul(s, b) t = Where(m, zero, f) x = Add(g, t) ",
    "of_the_opposite_of_a_cast": "b = Cast<to=1>(m) g = Mul(b, s) m9 = Cast<to=9>(m) d = Not(m9) r = Cast<to=1>(d) "
    "t = Mul(f, r) x = Add(g, t) ",
    "where_not": "b = Cast<to=1>(m) g = Mul(s, b) d = Not(m) t = Where(d, h, zero) x = Sub(g, t) ",
    "kept_where_not": "d = Not(m) e = Not(d) b = Cast<to=1>(e) g = Mul(s, b) r = Cast<to=1>(d) t = Mul(f, r) "
    "x = Add(g, t) ",
}


@pytest.mark.parametrize("name", BLENDS)
def test_a_selection_by_arithmetic(name: str) -> None:
    """GPT-1: w * b - 1e4 * (1 - b). TensorFlow's SelectV2 by way of tf2onnx: w * b - 1e4 * (not b)."""
    assert same(on_scores(BLENDS[name])).mask == "atten_mask"
    assert same(on_scores(BLENDS[name], "-1e4")).code in (None, "mask_value")
    assert same(on_scores(BLENDS[name], "-1e4"), ("masks-dominate",)).mask == "atten_mask"


NO_BLENDS = {
    "of_a_half": "b = Constant<value=float[1,1,1,6] {0.5,0.5,0,0.5,0.5,0}>() g = Mul(s, b) r = Sub(one, b) "
    "t = Mul(r, f) x = Add(g, t) ",
    "of_floats": "g = Mul(s, w) r = Sub(one, w) t = Mul(r, f) x = Add(g, t) ",
    "of_another_mask": "b = Cast<to=1>(m) c = Cast<to=1>(n) g = Mul(s, b) r = Sub(one, c) t = Mul(r, f) x = Add(g, t) ",
    "of_twice_the_rest": "b = Cast<to=1>(m) g = Mul(s, b) r = Sub(two, b) t = Mul(r, f) x = Add(g, t) ",
    "subtracted_the_other_way": "b = Cast<to=1>(m) g = Mul(s, b) r = Sub(one, b) t = Mul(r, f) x = Sub(t, g) ",
    "of_another_opposite": "b = Cast<to=1>(m) g = Mul(s, b) d = Not(n) r = Cast<to=1>(d) t = Mul(r, f) x = Add(g, t) ",
    "turned_round_alone": f"{ENDS} b = Cast<to=1>(m) bm = Slice(b, end, start, axis, end) g = Mul(s, bm) "
    "r = Sub(one, b) t0 = Mul(r, f) t1 = Slice(t0, end, start, axis, end) t = Slice(t1, end, start, axis, end) "
    "x = Add(g, t) ",
    "of_itself": "b = Cast<to=1>(m) g = Mul(s, b) r = Cast<to=1>(m) t = Mul(r, f) x = Add(g, t) ",
    "added_from_one": "b = Cast<to=1>(m) g = Mul(s, b) r = Sub(b, two) t = Mul(r, h) x = Add(g, t) ",
    "of_numbers_for_each_score": "b = Cast<to=1>(m) g = Mul(s, b) d = Not(m) r = Cast<to=1>(d) t = Mul(r, w) "
    "x = Add(g, t) ",
    "where_of_another_mask": "b = Cast<to=1>(m) g = Mul(s, b) t = Where(n, zero, f) x = Add(g, t) ",
    "where_turned_round": "b = Cast<to=1>(m) g = Mul(s, b) t = Where(m, f, zero) x = Add(g, t) ",
    "where_of_two_numbers": "b = Cast<to=1>(m) g = Mul(s, b) t = Where(m, one, f) x = Add(g, t) ",
}


@pytest.mark.parametrize("name", NO_BLENDS)
def test_what_is_no_selection(name: str) -> None:
    assert same(on_scores(NO_BLENDS[name])).code == "scale"


FOLDED = {
    "a constant": ("0,0,-1e4,0,0,-1e4", "1,1,0,1,1,0", "mask_value"),
    "-inf": ("0,0,-inf,0,0,-inf", "1,1,0,1,1,0", None),
    "two numbers": ("0,0,-1e4,0,0,-2e4", "1,1,0,1,1,0", "scale"),
    "a number at a key that is kept": ("0,3,-1e4,0,0,-1e4", "1,1,0,1,1,0", "scale"),
    "a scale besides": ("0,0,-1e4,0,0,-1e4", "0.5,0.5,0,0.5,0.5,0", "mask_value"),
    "two scales": ("0,0,-1e4,0,0,-1e4", "1,2,0,1,1,0", "scale"),
    "no scale that is a number": ("0,0,-1e4,0,0,-1e4", "inf,inf,0,inf,inf,0", "scale"),
    "nothing masked": ("0,0,0,0,0,0", "1,1,1,1,1,1", "scale"),
}


@pytest.mark.parametrize("name", FOLDED)
def test_a_selection_by_constants(name: str) -> None:
    """1 - b times a number is folded, as grappler does with TensorFlow's causal masks."""
    rest, keep, code = FOLDED[name]
    constants = f"b = Constant<value=float[1,1,1,6] {{{keep}}}>() t = Constant<value=float[1,1,1,6] {{{rest}}}>() "
    proto = on_scores(constants + "g = Mul(s, b) x = Add(g, t) ")
    block = same(proto)
    assert block.code in (None, code) and (block.status == "fused") == (code != "scale")


@pytest.mark.parametrize("opposite", [True, False])
def test_a_selection_by_a_constant_and_a_constant_boolean(opposite: bool) -> None:
    """tf2onnx folds the term of a causal mask, and not the Not and the Cast of the factor."""
    truths = "0,0,1,0,0,1" if opposite else "1,1,0,1,1,0"
    constants = f"d = Constant<value=bool[1,1,1,6] {{{truths}}}>() "
    constants += "t = Constant<value=float[1,1,1,6] {0,0,-inf,0,0,-inf}>() "
    block = same(on_scores(constants + "e = Not(d) b = Cast<to=1>(e) g = Mul(s, b) x = Add(t, g) "))
    assert block.status == ("fused" if opposite else "declined")


SPARED = {
    "cast": "b = Cast<to=1>(m) g = Mul(s, b) x = Where(m, g, f) ",
    "cast_in_front": "b = Cast<to=1>(m) g = Mul(b, s) d = Not(m) x = Where(d, f, g) ",
    "cast_of_the_opposite": "d = Not(m) e = Not(d) b = Cast<to=1>(e) g = Mul(s, b) x = Where(m, g, f) ",
    "compared_with_0": "b = Cast<to=1>(m) g = Mul(s, b) e = Equal(b, zero) x = Where(e, f, g) ",
    "compared_with_1": "g = Mul(s, w) e = Equal(w, one) x = Where(e, g, f) ",
    "a_scale_between": "b = Cast<to=1>(m) g0 = Mul(s, b) g = Mul(g0, two) x = Where(m, g, f) ",
    "behind_a_bias": "s1 = Add(s, w) b = Cast<to=1>(m) g = Mul(s1, b) x = Where(m, g, f) ",
}


@pytest.mark.parametrize("fill", ["-inf", LEAST, "-1e9"])
@pytest.mark.parametrize("name", SPARED)
def test_a_product_that_a_selection_makes_nothing_of(name: str, fill: str) -> None:
    """Where the selection keeps scores, they were multiplied by 1. Infinities and NaN elsewhere do not show."""
    weights = np.random.default_rng(1).integers(0, 2, (2, 1, 1, 6)).astype(np.float32)
    weights[:, :, :, 0] = np.array([np.inf, 2.0]).reshape(2, 1, 1)
    given = {"w": weights} if "Mul(s, w)" in SPARED[name] else {}
    assert same(on_scores(SPARED[name], fill), **given).status == "fused"


NOT_SPARED = {
    "kept_where_0": "b = Cast<to=1>(m) g = Mul(s, b) x = Where(m, f, g) ",
    "another_mask": "b = Cast<to=1>(m) g = Mul(s, b) x = Where(n, g, f) ",
    "any_other_number": "g = Mul(s, w) e = Equal(w, zero) x = Where(e, f, g) ",
    "the_scores_compared": "b = Cast<to=1>(m) g = Mul(s, b) e = Equal(g, zero) x = Where(e, f, g) ",
    "a_bias_between": "b = Cast<to=1>(m) g0 = Mul(s, b) g = Add(g0, w) x = Where(n, g, f) ",
    "alone": "b = Cast<to=1>(m) x = Mul(s, b) ",
}


@pytest.mark.parametrize("name", NOT_SPARED)
def test_a_product_that_shows(name: str) -> None:
    block = same(on_scores(NOT_SPARED[name]))
    assert block.status == "declined" and block.code in ("scale", "scores_are_output")


def test_why_scores_times_a_mask_stay() -> None:
    """The mask runs along rows and keys, so that it is a factor of neither query nor key."""
    proto = parse(PRODUCT_QK + "b = Cast<to=1>(m) x = Mul(s, b) " + SOFTMAX.format("x") + PRODUCT_PV, "bool[B,1,S,T] m")
    (block,) = fused(proto)[1].blocks
    assert "'b' multiplies the scores: a masked key has the score 0" in (block.reason or "")
    assert "where(mask, scores, -inf)" in (block.hint or "")


FILLERS = {
    "like_the_scores": "sh = Shape(s) e = ConstantOfShape<value=float[1] {-1e38}>(sh) x = Where(m, s, e) ",
    "expanded": "sh = Shape(s) e = Expand(f, sh) x = Where(m, s, e) ",
    "with_zeros": "sh = Shape(s) e0 = Expand(f, sh) z = Expand(zero, sh) e = Add(e0, z) x = Where(m, s, e) ",
    "reshaped": "k4 = Constant<value=int64[3] {1,1,1}>() e = Reshape(f, k4) x = Where(m, s, e) ",
}


@pytest.mark.parametrize("name", FILLERS)
def test_a_number_repeated(name: str) -> None:
    assert same(on_scores(FILLERS[name])).mask == "atten_mask"


def test_a_number_repeated_more_often_than_the_scores() -> None:
    """The selection enlarges the batch."""
    inputs = "float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v"
    body = PRODUCT_QK + "e = Constant<value=float[3,1,1,1] {-1e38,-1e38,-1e38}>() x = Where(m, s, e) "
    proto = parse(body + SOFTMAX.format("x") + PRODUCT_PV, "bool[1,1,1,T] m", inputs=inputs)
    assert fused(proto)[1].blocks[0].status == "declined"


HIGH = "high = Neg(low) sh = Shape(s) "
LEAST_OF = {
    "kept": "l = Where(m, high, low) x = Min(s, l) ",
    "in_front": "l = Where(m, high, low) x = Min(l, s) ",
    "dropped": "d = Not(m) l = Where(d, low, high) x = Min(s, l) ",
    "repeated": "w0 = Expand(high, sh) l = Where(m, w0, low) x = Min(s, l) ",
    "behind_a_bias": "s1 = Add(s, w) l = Where(m, high, low) x = Min(s1, l) ",
    "behind_a_mask": "s1 = Where(n, s, f) l = Where(m, high, low) x = Min(s1, l) ",
}


@pytest.mark.parametrize("name", LEAST_OF)
def test_a_selection_by_a_minimum(name: str) -> None:
    block = same(on_scores(HIGH + LEAST_OF[name]), n=np.array([1, 1, 1, 0, 1, 0] * 2, np.bool_).reshape(2, 1, 1, 6))
    assert block.status == "fused" and "atten_mask" in block.mask


NO_LEAST = {
    "of_a_finite_number": "l = Where(m, high, f) x = Min(s, l) ",
    "of_a_finite_limit": "l = Where(m, h, low) x = Min(s, l) ",
    "of_zero": "l = Where(m, zero, low) x = Min(s, l) ",
    "of_two_limits_alike": "l = Where(m, low, low) x = Min(s, l) ",
    "of_three": "l = Where(m, high, low) x = Min(s, l, w) ",
    "a_maximum": "l = Where(m, high, low) x = Max(s, l) ",
    "behind_what_may_be_infinite": "w1 = Mul(w, f) s0 = Where(n, s, low) s1 = Sub(s0, w1) l = Where(m, high, low) "
    "x = Min(s1, l) ",
    "behind_zero_times_infinity": "b = Cast<to=1>(n) w1 = Mul(b, low) s1 = Add(s, w1) l = Where(m, high, low) "
    "x = Min(s1, l) ",
}


@pytest.mark.parametrize("name", NO_LEAST)
def test_a_minimum_that_is_no_selection(name: str) -> None:
    """A score may be above a finite limit, and below a finite number: -inf of a mask in front is. NaN stays NaN."""
    assert same(on_scores(HIGH + NO_LEAST[name])).code == "score_term"


GUARD = "i = IsNaN(p0) p1 = Where(i, zero, p0) "
TEST = "i{0} = IsInf({1}) g{0} = {2}({1}, zero) a{0} = And(i{0}, g{0}) "
NAN_TO_NUM = {
    "torchscript": GUARD
    + TEST.format(2, "p1", "Greater")
    + "p2 = Where(a2, one, p1) "
    + TEST.format(3, "p2", "Less")
    + "p = Where(a3, low, p2) ",
    "decomposed": "i = IsNaN(p0) p1 = Where(i, zero, p0) high = Neg(low) e1 = Equal(p0, low) e2 = Equal(p0, high) "
    "p2 = Where(e1, one, p1) p = Where(e2, one, p2) ",
    "in_float64": GUARD + "d = Cast<to=11>(p1) i2 = IsInf(d) c2 = Cast<to=9>(i2) p = Where(c2, one, p1) ",
}


@pytest.mark.parametrize("name", NAN_TO_NUM)
def test_nan_to_num(name: str) -> None:
    assert same(on_probabilities(NAN_TO_NUM[name])).status == "fused"


OTHER_TESTS = {
    "of_something_else": ("i = IsInf(w) p = Where(i, one, p0) ", "float[B,4,S,8] y"),
    "the_other_way": ("i = IsInf(p0) p = Where(i, p0, one) ", "float[B,4,S,8] y"),
    "of_another_number": ("e = Equal(p0, one) p = Where(e, zero, p0) ", "float[B,4,S,8] y"),
    "either": ("i = IsInf(p0) g = Greater(p0, zero) a = Or(i, g) p = Where(a, one, p0) ", "float[B,4,S,8] y"),
    "read_elsewhere": (
        "i = IsInf(p0) p = Where(i, one, p0) z = Not(i) ",
        "float[B,4,S,8] y, bool[B,4,S,T] z",
    ),
    "compared_elsewhere": (
        "i = IsInf(p0) g = Greater(p0, zero) a = And(i, g) p = Where(a, one, p0) z = Not(g) ",
        "float[B,4,S,8] y, bool[B,4,S,T] z",
    ),
}


@pytest.mark.parametrize("name", OTHER_TESTS)
def test_questions_that_matter(name: str) -> None:
    body, outputs = OTHER_TESTS[name]
    block = same(on_probabilities(body, outputs=outputs))
    assert block.code in ("probability_term", "probabilities_are_output"), block


HEADS = "float[B,4,S,8] q, float[B,2,T,8] k0, float[B,2,T,8] v0"
REPEATED = "kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) " + SOFTMAX.format("s") + PRODUCT_PV
GATHER = "i = Constant<value=int64[4] {{{0}}}>() k = Gather<axis=1>(k0, i) v = Gather<axis=1>(v0, i) "


@pytest.mark.parametrize(
    ("body", "heads"),
    [
        (GATHER.format("0,0,1,1"), (4, 2)),
        (GATHER.format("0,1,0,1"), (4, 2)),
        (GATHER.format("0,1,1,0"), (4, 4)),
        (GATHER.format("1,1,0,0"), (4, 4)),
        (GATHER.format("0,0,0,0"), (4, 4)),
        ("k = Concat<axis=1>(k0, k0) v = Concat<axis=1>(v0, v0) ", (4, 2)),
        ("k1 = Neg(k0) k = Concat<axis=1>(k0, k1) v = Concat<axis=1>(v0, v0) ", (4, 4)),
    ],
)
def test_repeated_heads(body: str, heads: tuple[int, int]) -> None:
    """Heads that are repeated one by one are the operator's own groups. Of heads that are repeated as a whole, those
    of the query are brought into this order."""
    proto = parse(body + REPEATED, inputs=HEADS)
    feeds = random_feeds(proto)
    result, report = fused(proto)
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)
    assert report.blocks[0].heads == heads


@pytest.mark.parametrize(
    "body", ["x = Sub(w, s) ", "x = Sum(w, s) ", "x0 = Where(m, s, low) x1 = Neg(x0) x = Sub(w, x1) "]
)
def test_scores_subtracted(body: str) -> None:
    """A term less the scores is their negative and the term."""
    assert same(on_scores(body)).status == "fused"


def test_scores_subtracted_behind_a_mask() -> None:
    """The mask's number turns into the largest one."""
    assert same(on_scores("x0 = Where(m, s, low) x = Sub(w, x0) ")).code == "mask_value"


GUARD = "b = Cast<to=1>(m) g = Mul(p0, b) d = Not(m) r = Cast<to=1>(d) t = Mul(zero, r) p = Add(g, t) "


@pytest.mark.parametrize("fill", ["-inf", LEAST])
def test_a_guard_by_arithmetic(fill: str) -> None:
    """Keras' Softmax with a mask, where(mask, p, 0), by way of tf2onnx. Of -inf a row without a key stays NaN."""
    scores = PRODUCT_QK + NUMBERS.replace("{-inf}", f"{{{fill}}}") + "x0 = Where(m, s, low) p0 = Softmax<axis=-1>(x0) "
    block = same(parse(scores + GUARD + PRODUCT_PV, MORE))
    assert (block.status, block.mask) == ("fused", "atten_mask")


@pytest.mark.parametrize("added", ["t = Mul(one, r) ", "t = Mul(zero, w) "])
def test_a_guard_that_adds_something(added: str) -> None:
    block = same(on_probabilities(GUARD.replace("t = Mul(zero, r) ", added)))
    assert block.code == "probability_term"
