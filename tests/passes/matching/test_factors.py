"""Factors that are no single number, on the scores and on the probabilities."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from fa_compiler.passes import Block
from tests.passes.running import (
    PRODUCT_PV,
    PRODUCT_QK,
    QKV,
    SOFTMAX,
    Array,
    assert_same,
    fused,
    parse,
    random_feeds,
    run,
)

HEADS = "c = Constant<value=float[4,1,1] {1.0,2.0,-3.0,0.25}>() "
FIVE = "c = Constant<value=float[5,1] {1.0,2.0,-3.0,0.25,0.0}>() "
PADDING = np.array([[0, 0, 0, 0, 0, 0], [1, 1, 0, 1, 1, 0]], np.bool_).reshape(2, 1, 1, 6)
NUMBERS = (
    "low = Constant<value=float {-inf}>() most = Constant<value=float {4.6052}>() two = Constant<value=float {2.0}>() "
)
FIXED = "float[B,4,5,8] q, float[B,4,T,8] k, float[B,4,T,8] v"
MASK = "bool[B,1,1,T] m"


def on_scores(body: str, more: str = "", inputs: str = "", **types: str) -> onnx.ModelProto:
    """Attention in which `body` makes x of the product s."""
    return _model(PRODUCT_QK + NUMBERS + body + SOFTMAX.format("x") + PRODUCT_PV, more, inputs, **types)


def on_probabilities(body: str, more: str = "", inputs: str = "", **types: str) -> onnx.ModelProto:
    """Attention in which `body` makes x of the probabilities p."""
    return _model(PRODUCT_QK + NUMBERS + SOFTMAX.format("s") + body + " y = MatMul(x, v)", more, inputs, **types)


def _model(body: str, more: str, inputs: str, outputs: str = "float[B,4,S,8] y") -> onnx.ModelProto:
    given = {"inputs": inputs} if inputs else {}
    return parse(body, more, outputs=outputs.replace("S", "5") if "5" in inputs else outputs, **given)


def same(proto: onnx.ModelProto, tolerance: float = 1e-5, **given: Array) -> Block:
    feeds = random_feeds(proto, **given)
    result, report = fused(proto)
    for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
        assert_same(got, wanted, tolerance)
    return report.blocks[0]


SCORES = {
    "head": HEADS + "x = Mul(s, c) ",
    "head_divides": HEADS + "x = Div(s, c) ",
    "head_in_front": HEADS + "x = Mul(c, s) ",
    "one": "c = Constant<value=float[1,4,1,1] {2.0,2.0,2.0,2.0}>() x = Mul(s, c) ",
    "row": FIVE + "x = Mul(s, c) ",
    "learnt": "e0 = Min(l, most) e = Exp(e0) x = Mul(s, e) ",
    "clipped": "none = Constant<value=float {-1.0}>() e0 = Clip(l, none, most) e = Exp(e0) x = Div(s, e) ",
    "input_of_ones": "f = Cast<to=1>(b) x = Mul(s, f) ",
    "before_a_mask": HEADS + "w = Mul(s, c) x = Where(m, w, low) ",
    "before_a_scale": HEADS + "w = Mul(s, c) x = Mul(w, two) ",
}


@pytest.mark.parametrize("name", SCORES)
def test_on_the_scores(name: str) -> None:
    more = MASK + ", float[4,1,1] l, bool[B,4,1,1] b"
    block = same(on_scores(SCORES[name], more, FIXED if name == "row" else ""), m=PADDING)
    assert block.status == "fused", block


@pytest.mark.parametrize("batch", [1, 2])
def test_a_factor_that_is_expanded_to_a_batch(batch: int) -> None:
    """It enlarges a batch of 1."""
    body = "two_ = Constant<value=float[1] {2.0}>() whole = Constant<value=int64[4] {2,1,1,1}>() "
    proto = on_scores(body + "c = Expand(two_, whole) x = Mul(s, c) ")
    given = {name: np.random.default_rng(0).standard_normal((batch, 4, 5, 8)).astype(np.float32) for name in "qkv"}
    assert same(proto, **given).status == "fused"


def test_on_transposed_scores() -> None:
    body = "qt = Transpose<perm=[0,1,3,2]>(q) s0 = MatMul(k, qt) " + HEADS + "s1 = Mul(s0, c) "
    body += "s = Transpose<perm=[0,1,3,2]>(s1) " + SOFTMAX.format("s") + PRODUCT_PV
    assert same(parse(body)).status == "fused"


@pytest.mark.parametrize("layout", ["BSH", "SBH", "BSND"])
def test_in_every_layout(layout: str) -> None:
    apart = "a = Constant<value=int64[4] {0,0,4,8}>() "
    perm, back = ("0,2,1,3", "0,2,1,3") if layout != "SBH" else ("1,2,0,3", "2,0,1,3")
    body, inputs = apart, ", ".join(f"float[{'S,B' if layout == 'SBH' else 'B,S'},32] {name}0" for name in "qkv")
    if layout == "BSND":
        body, inputs = "", ", ".join(f"float[B,S,4,8] {name}1" for name in "qkv")
    for name in "qkv":
        body += "" if layout == "BSND" else f"{name}1 = Reshape({name}0, a) "
        body += f"{name} = Transpose<perm=[{perm}]>({name}1) "
    body += PRODUCT_QK + HEADS + "x = Mul(s, c) p0 = Softmax<axis=-1>(x) p = Mul(p0, c) o = MatMul(p, v) "
    body += f"y = Transpose<perm=[{back}]>(o)"
    outputs = f"float[{'S,B' if layout == 'SBH' else 'B,S'},4,8] y"
    assert same(parse(body, inputs=inputs, outputs=outputs)).layout in ("BSH", "SBH", "BSND", "BNSD")


def test_16_bits_are_computed_in_float32() -> None:
    inputs = "float16[B,4,S,8] q, float16[B,4,T,8] k, float16[B,4,T,8] v"
    body = PRODUCT_QK + HEADS + "h = Cast<to=10>(c) x = Mul(s, h) p0 = Softmax<axis=-1>(x) p = Mul(p0, h) "
    assert same(parse(body + PRODUCT_PV, inputs=inputs, outputs="float16[B,4,S,8] y"), 5e-3).status == "fused"


PROBABILITIES = {
    "number": "x = Mul(p, two) ",
    "divided": "x = Div(p, two) ",
    "head": HEADS + "x = Mul(p, c) ",
    "row": FIVE + "x = Mul(p, c) ",
    "rows_of_padding": "f = Cast<to=1>(r) x = Mul(f, p) ",
    "before_a_guard": HEADS + "w = Mul(p, c) zero = Constant<value=float {0.0}>() i = IsNaN(w) x = Where(i, zero, w) ",
    "behind_a_guard": HEADS + "zero = Constant<value=float {0.0}>() i = IsNaN(p) w = Where(i, zero, p) x = Mul(w, c) ",
}


@pytest.mark.parametrize("name", PROBABILITIES)
def test_on_the_probabilities(name: str) -> None:
    proto = on_probabilities(PROBABILITIES[name], "bool[B,1,5,1] r", FIXED)
    assert same(proto).status == "fused"


GUARD = "zero = Constant<value=float {0.0}>() i = IsNaN(w) x = Where(i, zero, w) "
MAY_BE_NAN = {
    "sigmoid": "c = Sigmoid(t) w = Mul(p, c) ",
    "tanh": "c = Tanh(t) w = Mul(c, p) ",
    "clip": "e = Min(t, most) c = Max(e, two) w = Div(p, c) ",
    "exponential": "e = Min(t, most) c = Exp(e) w = Mul(p, c) ",
    "sine of integers that may be infinite": "e = Cast<to=1>(n) f = Exp(e) c = Sin(f) w = Mul(p, c) ",
}
NEVER_NAN = {
    "sigmoid of integers": "e = Cast<to=1>(n) c = Sigmoid(e) w = Mul(p, c) ",
    "booleans": "e = Cast<to=1>(r) c = Exp(e) w = Mul(p, c) ",
}
NAN_FACTOR = "float[4,1,1] t, int64[4,1,1] n, bool[4,1,1] r"


@pytest.mark.parametrize("name", [*MAY_BE_NAN, *NEVER_NAN])
def test_a_factor_in_front_of_a_guard_is_proven_not_to_be_nan(name: str) -> None:
    """The guard makes 0 of it. Behind the guard, and without one, it is NaN in both orders."""
    factor = MAY_BE_NAN.get(name) or NEVER_NAN[name]
    with np.errstate(over="ignore"):
        given = {
            "t": np.array([np.nan, 0.5, -np.inf, 2.0], np.float32).reshape(4, 1, 1),
            "n": np.array([0, 5, 90, -3]).reshape(4, 1, 1),
        }
    block = same(on_probabilities(factor + GUARD, NAN_FACTOR), **given)
    if name in MAY_BE_NAN:
        assert (block.status, block.code, block.culprit) == ("declined", "probability_term", "w"), block
    else:
        assert block.status == "fused", block
    behind = "zero = Constant<value=float {0.0}>() i = IsNaN(p) g = Where(i, zero, p) "
    for body in (
        factor + "x = Identity(w) ",
        behind + factor.replace("p)", "g)").replace("(p", "(g") + "x = Identity(w) ",
    ):
        assert same(on_probabilities(body, NAN_FACTOR), **given).status == "fused"


@pytest.mark.parametrize("guard", ["score", "selection"])
def test_a_factor_that_may_be_nan_in_front_of_a_guard_of_masked_rows(guard: str) -> None:
    """A row that is masked everywhere is 0, and would be NaN with a guard in front of the factor."""
    body = LEAST + "m1 = Where(m, s, low) p = Softmax<axis=-1>(m1) c = Sigmoid(t) w = Mul(p, c) "
    tested = "i = Equal(m1, low) f = Cast<to=1>(i) o = ReduceMin<axes=[-1]>(f) g = Cast<to=9>(o) x = Where(g, zero, w) "
    body += tested if guard == "score" else "x = Where(m, w, zero) "
    proto = _model(PRODUCT_QK + NUMBERS + body + "y = MatMul(x, v)", f"{MASK}, float[4,1,1] t", "")
    block = same(proto, m=PADDING, t=np.array([np.nan, 0.5, 0.0, 2.0], np.float32).reshape(4, 1, 1))
    assert (block.code, block.culprit) == ("probability_term", "w"), block


@pytest.mark.parametrize("kind", ["float", "float16"])
def test_a_test_for_infinity_behind_a_factor(kind: str) -> None:
    """A probability divided by a small number is finite in float32, and may be infinite in float16."""
    code = 10 if kind == "float16" else 1
    limits = "".join(
        f"{name}0 = Constant<value=float {{{number}}}>() {name} = Cast<to={code}>({name}0) "
        for name, number in (("low", 1e-6), ("one", 1.0), ("three", 3.0))
    ).replace("e-06", "e-6")
    body = limits + "c0 = Max(t, low) c = Min(c0, one) w = Div(p, c) i = IsInf(w) x = Where(i, three, w) "
    proto = parse(
        PRODUCT_QK + SOFTMAX.format("s") + body + "y = MatMul(x, v)",
        f"{kind}[4,1,1] t",
        inputs=QKV.replace("float", kind),
        outputs=f"{kind}[B,4,S,8] y",
        opset=20,
    )
    (block,) = fused(proto)[1].blocks
    assert block.status == ("fused" if kind == "float" else "declined"), block
    tiny = np.array([0.0, 0.5, 1e-6, 1.0]).reshape(4, 1, 1)
    same(proto, 1e-2, t=tiny.astype(np.float16 if kind == "float16" else np.float32))


def test_in_the_product_with_the_values() -> None:
    body = PRODUCT_QK + SOFTMAX.format("s") + "y = com.microsoft.FusedMatMul<alpha=0.5>(p, v)"
    assert same(parse(body)).status == "fused"


ANY = "w = Mul(s, t) "
TIMES = "float t"
LEAST = "least = Constant<value=float {-3.4028234663852886e38}>() zero = Constant<value=float {0.0}>() "
ANY_SIZE = {
    "input": ("x = Mul(s, t) ", TIMES, "none"),
    "inverse": ("x = Div(s, t) ", "float[1] t", "none"),
    "exponential": ("e = Exp(t) x = Mul(e, s) ", "float[4,1,1] t", "none"),
    "row": ("x = Mul(s, t) ", "float[B,1,5,1] t", "none"),
    "made_larger": (ANY + "x = Mul(w, two) ", TIMES, "none"),
    "behind_a_factor": (HEADS + "w = Mul(s, c) x = Div(w, t) ", TIMES, "none"),
    "before_a_mask": (ANY + "x = Where(m, w, low) ", TIMES, "atten_mask"),
    "before_a_guard": (ANY + "x = Where(m, w, low) ", TIMES, "atten_mask"),
    "before_a_finite_mask": (ANY + LEAST + "n = Where(m, zero, least) x = Add(w, n) ", TIMES, "real_shift"),
    "before_a_bias": (ANY + "x = Add(w, b) ", TIMES + ", float[B,1,1,T] b", "real_shift"),
}
SIZES_OF_FACTORS = [0.0, -0.0, 0.3, -0.7, 1e37, -1e-38, 1e-45, np.nan, np.inf, -np.inf]
"""With 1e37 no score overflows, but the query times it would."""


@pytest.mark.parametrize("name", ANY_SIZE)
def test_a_factor_of_any_size(name: str) -> None:
    """NaN and infinite numbers, and those that overflow in the query, give what they give in the scores. One row of
    padding masks a whole row."""
    body, more, mask = ANY_SIZE[name]
    proto = on_scores(body, f"{MASK}, {more}", FIXED)
    if name == "before_a_guard":
        guard = (
            body + "p0 = Softmax<axis=-1>(x) zero = Constant<value=float {0.0}>() i = IsNaN(p0) p = Where(i, zero, p0) "
        )
        proto = _model(PRODUCT_QK + NUMBERS + guard + PRODUCT_PV, f"{MASK}, {more}", FIXED)
    result, report = fused(proto)
    (block,) = report.blocks
    assert (block.status, block.mask) == ("fused", mask), block
    assert fused(proto, "ascend")[1].blocks[0].code == "scale"
    feeds = random_feeds(proto, m=PADDING)
    feeds["q"] *= 16
    feeds["k"] /= 16
    for number in SIZES_OF_FACTORS:
        feeds["t"] = np.full_like(feeds["t"], number)
        feeds["t"].flat[1:] = 0.5
        assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


HUNDRED = "hundred = Constant<value=float {100.0}>() least = Constant<value=float {0.01}>() "
LOWEST = "lowest = Constant<value=float {-1e9}>() "
CLAMPED = {
    "the exponent": "e = Min(t, most) c = Exp(e) x = Mul(s, c) ",
    "the exponential": HUNDRED + "e = Exp(t) c = Clip(e, , hundred) x = Mul(s, c) ",
    "the exponential by Min": HUNDRED + "e = Exp(t) c = Min(e, hundred) x = Mul(c, s) ",
    "softplus": HUNDRED + "e = Softplus(t) c = Clip(e, , hundred) x = Mul(s, c) ",
    "a divisor": HUNDRED + "c = Clip(t, least) x = Div(s, c) ",
    "an inverse": HUNDRED + "e = Clip(t, least) c = Reciprocal(e) x = Mul(s, c) ",
}


@pytest.mark.parametrize("body", CLAMPED.values(), ids=CLAMPED)
def test_a_clamped_factor_before_a_finite_mask(body: str) -> None:
    """Its limits leave finite scores finite, for every t of the run."""
    proto = on_scores(LOWEST + body.replace("x = ", "w = ") + "x = Where(m, w, lowest) ", f"{MASK}, float[4,1,1] t")
    result, report = fused(proto)
    assert report.blocks[0].status == "fused", report.blocks[0].reason
    assert fused(on_scores(body, "float[4,1,1] t"), "ascend")[1].blocks[0].status == "fused"
    feeds = random_feeds(proto, m=PADDING)
    for number in SIZES_OF_FACTORS:
        feeds["t"] = np.array([number, 0.5, -3.0, 30.0], np.float32).reshape(4, 1, 1)
        assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


INFINITE = {
    "softcap": "y0 = Tanh(w) x = Mul(y0, two) ",
    "floor": LEAST + "x = Max(w, least) ",
    "finite_selection": LEAST + "x = Where(m, w, least) ",
    "moderate_selection": "x = Where(m, w, two) ",
}
BESIDE = {
    "score_guard": SOFTMAX.format("w").replace("p =", "p0 =")
    + LEAST
    + "i = Equal(w, low) j = Not(i) f = Cast<to=1>(j) "
    "o = ReduceMax<axes=[-1]>(f) g = Cast<to=9>(o) p = Where(g, p0, zero) ",
    "sink": "ends = Constant<value=int64[8] {0,0,0,0,0,0,0,1}>() c = Pad(w, ends) p0 = Softmax<axis=-1>(c) "
    "n0 = Constant<value=int64[1] {0}>() n1 = Constant<value=int64[1] {-1}>() n3 = Constant<value=int64[1] {3}>() "
    "p = Slice(p0, n0, n1, n3) ",
}


@pytest.mark.parametrize("name", [*INFINITE, *BESIDE])
def test_a_factor_of_any_size_beside_what_tells_infinity_from_nan(name: str) -> None:
    """Each is fused with a factor of moderate size. The culprit is the multiplication."""
    after = BESIDE[name] if name in BESIDE else INFINITE[name] + SOFTMAX.format("x")
    for scaling, code in ((ANY, "scale"), ("u = Tanh(t) w = Mul(s, u) ", None)):
        proto = _model(PRODUCT_QK + NUMBERS + scaling + after + PRODUCT_PV, f"{MASK}, {TIMES}", "")
        block = same(proto, m=PADDING)
        assert (block.code, block.culprit) == (code, "w" if code else None), block


@pytest.mark.parametrize("bias", ["b", "m"])
def test_a_factor_of_any_size_beside_a_guard_that_tests_the_bias(bias: str) -> None:
    """The operator tests the scores with the bias: -inf where t is, and NaN where the bias is -inf and t +inf. A bias
    that becomes a boolean mask needs no guard; it hides what an infinite score would be beside -inf."""
    numbers = (0.5, np.inf, -np.inf, 1e38) if bias == "b" else (0.5, -0.5)
    made = "n = Identity(b) " if bias == "b" else "n = Where(m, zero, low) "
    guard = "o = ReduceMax<axes=[-1]>(n) i = Equal(o, low) p = Where(i, zero, p0) "
    for scaling, code in ((ANY, "scale" if bias == "b" else None), ("u = Tanh(t) w = Mul(s, u) ", None)):
        body = PRODUCT_QK + NUMBERS + LEAST + scaling + made + "x = Add(w, n) p0 = Softmax<axis=-1>(x) " + guard
        proto = _model(body + PRODUCT_PV, f"{MASK}, {TIMES}, float[B,1,1,T] b", "")
        lowered = np.where(PADDING, np.float32(0.5), -np.float32(np.inf))
        for number in numbers:
            block = same(proto, m=PADDING, b=lowered, t=np.array(number, np.float32))
            assert (block.code, block.culprit) == (code, "w" if code else None), block


KEYS = "c = Constant<value=float[6] {1.0,2.0,3.0,4.0,5.0,6.0}>() "
SIX = "float[B,4,5,8] q, float[B,4,6,8] k, float[B,4,6,8] v"
REFUSED = {
    "keys": ("scale", on_scores(KEYS + "x = Mul(s, c) ", inputs=SIX)),
    "infinite": ("scale", on_scores("c = Constant<value=float {inf}>() x = Mul(s, c) ")),
    "any_size_behind_a_bias": ("scale", on_scores("w = Add(s, b) x = Mul(w, t) ", "float[B,1,1,T] b, float t")),
    "any_size_made_smaller": (
        "scale",
        on_scores(ANY + "half = Constant<value=float {0.5}>() x = Mul(w, half) ", TIMES),
    ),
    "two_of_any_size": ("scale", on_scores(ANY + "x = Div(w, t) ", TIMES)),
    "behind_a_bias": ("scale", on_scores(HEADS + "w = Add(s, b) x = Mul(w, c) ", "float[B,1,1,T] b")),
    "scores_divide": ("scale", on_scores(HEADS + "x = Div(c, s) ")),
    "probabilities_of_keys": ("probability_term", on_probabilities(KEYS + "x = Mul(p, c) ", inputs=SIX)),
    "probabilities_unbounded": ("probability_term", on_probabilities("x = Mul(p, h) ", "float[4,1,1] h")),
    "probabilities_infinite": (
        "probability_term",
        on_probabilities("c = Constant<value=float {inf}>() x = Mul(p, c) "),
    ),
    "probabilities_divide": ("probability_term", on_probabilities(HEADS + "x = Div(c, p) ")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    code, proto = REFUSED[name]
    (block,) = fused(proto)[1].blocks
    assert (block.code, block.culprit) == (code, "x"), block
