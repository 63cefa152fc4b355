"""Graphs that are a linear attention modulo a prime, and something else in the types of a run: they are not fused as
one. Beside them, fused ones of several types, whose results keep their bits."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.passes.running import assert_same, feeds_of, fused, parse, random_feeds, run

INPUTS = "float[2,3,4] q, float[2,3,4] k, float[2,3,6] v, float[2,3,4,6] s0"
OUTPUTS = "float[2,3,6] y, float[2,3,4,6] s1"
SIXTEEN = INPUTS.replace("float[", "float16[")
WIDE = "qx = Cast<to=1>(q) kx = Cast<to=1>(k) vx = Cast<to=1>(v) sx = Cast<to=1>(s0) "
SIMILAR = {
    "a limit from below and one from above": "c = Constant<value_float=0.5>() k1 = Clip(k, c) k2 = Clip(k, , c) ",
    "a rounded value": "c = Constant<value_float=12582912.0>() a = Add(k, c) k1 = Sub(a, c) k2 = Identity(k) ",
    "a small value that is rounded": "c = Constant<value_float=1.0>() f = Constant<value_float=9.5367431640625e-07>() "
    "g = Constant<value_float=1048576.0>() a = Mul(k, f) b = Add(a, c) d = Sub(b, c) k1 = Mul(d, g) k2 = Identity(k) ",
    "a small quotient that is rounded": "c = Constant<value_float=1.0>() g = Constant<value_float=1048576.0>() "
    "a0 = Div(k, g) a = Transpose<perm=[0,1,2]>(a0) b = Add(a, c) d = Sub(b, c) k1 = Mul(d, g) k2 = Identity(k) ",
    "a rounded sum": "c = Constant<value_float=12582912.0>() a = Sum(k, c) k1 = Sub(a, c) k2 = Sum(k) ",
}


def step(before: str = "", names: str = "q k k v s0", after: str = "") -> str:
    """One token of the delta rule; `names` are those of the query, both keys, the value and the state."""
    query, one, other, value, state = names.split()
    return before + (
        "ax2 = Constant<value_ints=[2]>() ax3 = Constant<value_ints=[3]>() "
        f"column = Unsqueeze({one}, ax3) row = Unsqueeze({other}, ax2) qr = Unsqueeze({query}, ax2) "
        f"mr = MatMul(row, {state}) m = Squeeze(mr, ax2) w = Sub({value}, m) wr = Unsqueeze(w, ax2) "
        f"u = MatMul(column, wr) s1 = Add({state}, u) yr = MatMul(qr, s1) y = Squeeze(yr, ax2) {after}"
    )


def model(body: str, inputs: str = INPUTS, outputs: str = OUTPUTS) -> onnx.ModelProto:
    return parse(body, inputs=inputs, outputs=outputs, opset=18)


def same(proto: onnx.ModelProto) -> None:
    """The fused model gives the numbers of the model: it is left, or has an operator of two keys."""
    feeds = feeds_of(proto, {}) | random_feeds(proto)
    for got, wanted in zip(run(fused(proto)[0], feeds), run(proto, feeds), strict=True):
        assert_same(got, wanted, 1e-5)


@pytest.mark.parametrize("name", SIMILAR)
def test_keys_that_are_not_the_same(name: str) -> None:
    same(model(step(SIMILAR[name], "q k1 k2 v s0")))


def test_a_quotient_of_integers() -> None:
    """Twice the half of an odd number is less."""
    halves = "two = Constant<value_int=2>() h = Div(n, two) d = Mul(h, two) k1 = Cast<to=1>(n) k2 = Cast<to=1>(d) "
    inputs = INPUTS.replace("float[2,3,4] k", "int64[2,3,4] n")
    same(model(step(halves, "q k1 k2 v s0"), inputs))


def test_the_types_of_16_bits_round_each_other() -> None:
    narrow = WIDE + "kb = Cast<to=16>(k) k1 = Cast<to=1>(kb) "
    same(model(step(narrow, "qx k1 kx vx sx"), SIXTEEN))


def token(place: int) -> str:
    """One of two tokens, whose result is multiplied twice with a table of 1e-30."""
    return (
        f"c{place} = Constant<value_int={place}>() q{place} = Gather(q, c{place}) k{place} = Gather(k, c{place}) "
        f"v{place} = Gather(v, c{place}) kc{place} = Unsqueeze(k{place}, ax2) vr{place} = Unsqueeze(v{place}, ax1) "
        f"u{place} = Mul(kc{place}, vr{place}) s{place + 1} = Add(s{place}, u{place}) "
        f"qr{place} = Unsqueeze(q{place}, ax1) y{place} = MatMul(qr{place}, s{place + 1}) "
        f"a{place} = Mul(y{place}, e) b{place} = Mul(a{place}, e) z{place} = Transpose<perm=[1,0,2]>(b{place}) "
    )


TINY = (
    "ax1 = Constant<value_ints=[1]>() ax2 = Constant<value_ints=[2]>() c = Constant<value_float=1e-30>() "
    f"six = Constant<value_ints=[6]>() e = Expand(c, six) {token(0)} {token(1)} y = Concat<axis=0>(z0, z1) "
)


def test_a_scale_that_vanishes_is_no_default() -> None:
    """A scale of 0 stands for that of the operator."""
    (block,) = fused(model(TINY, "float[2,3,4] q, float[2,3,4] k, float[2,3,6] v, float[3,4,6] s0", "float[2,3,6] y"))[
        1
    ].blocks
    assert block.status == "declined" and "scale" in (block.reason or "")


CONSTANTS = {
    "an infinite product": "c = Constant<value_float=1e38>() a = Mul({0}, c) b = Mul(a, c) d = Div(b, c) "
    "{1} = Div(d, c) ",
    "a product that vanishes": "c = Constant<value_float=1e-30>() a = Mul({0}, c) b = Mul(a, c) d = Div(b, c) "
    "{1} = Div(d, c) ",
    "a small product that is rounded beside 1": "c = Constant<value_float=5.9604644775390625e-08>() "
    "e = Constant<value_float=1.0>() a = Mul({0}, c) b = Add(a, e) d = Sub(b, e) {1} = Div(d, c) ",
}
NARROW = "c = Constant<value_float=100.0>() e = Cast<to=10>(c) a = Add({0}, e) {1} = Sub(a, e) "


@pytest.mark.parametrize("name", CONSTANTS)
def test_products_with_large_and_small_constants(name: str) -> None:
    same(model(step().replace("y = Squeeze", "y0 = Squeeze") + CONSTANTS[name].format("y0", "y")))


def test_a_sum_that_float16_rounds() -> None:
    """A constant that float32 has room for."""
    halves = [text.replace("float[", "float16[") for text in (INPUTS, OUTPUTS)]
    proto = model(step(NARROW.format("k", "k1"), "q k1 k v s0"), *halves)
    feeds = {name: array.astype(np.float16) for name, array in random_feeds(proto).items()}
    for got, wanted in zip(run(fused(proto)[0], feeds), run(proto, feeds), strict=True):
        assert_same(got, wanted, 5e-3)


def test_a_rounded_state_that_a_layer_reads() -> None:
    """The layer reads the last state in float32, though the next token gets it in float16."""
    layer = "lw = Constant<value_floats=[1.0,-2.0,3.0,-1.0,2.0,-3.0]>() z = MatMul(s1, lw) sh = Cast<to=10>(s1) "
    outputs = "float[2,3,6] y, float[2,3,4] z, float16[2,3,4,6] sh"
    proto = model(step(WIDE, "qx kx kx vx sx", layer), SIXTEEN, outputs)
    result, report = fused(proto)
    assert report.count("fused") == 1
    feeds = {name: array.astype(np.float16) for name, array in random_feeds(proto).items()}
    for got, wanted in list(zip(run(result, feeds), run(proto, feeds), strict=True))[:2]:
        assert_same(got, wanted, 1e-5)


@pytest.mark.parametrize(
    ("body", "inputs", "outputs", "tolerance"),
    [
        (step(WIDE, "qx kx kx vx sx"), SIXTEEN, OUTPUTS, 1e-5),
        (
            step("", "q k k v s0", "y32 = Cast<to=1>(y) s32 = Cast<to=1>(s1) "),
            SIXTEEN,
            f"{OUTPUTS.replace('float[', 'float16[')}, float[2,3,6] y32, float[2,3,4,6] s32",
            1e-2,
        ),
        (step(WIDE, "qx kx kx vx sx", "sh = Cast<to=10>(s1) "), SIXTEEN, "float[2,3,6] y, float16[2,3,4,6] sh", 1e-2),
        (step(WIDE, "qx kx kx vx sx", "yh = Cast<to=10>(y) "), SIXTEEN, "float16[2,3,6] yh, float[2,3,4,6] s1", 1e-2),
    ],
)
def test_results_keep_their_bits(body: str, inputs: str, outputs: str, tolerance: float) -> None:
    """A last state in float32 is not rounded to the float16 of the first one."""
    proto = model(body, inputs, outputs)
    result, report = fused(proto)
    assert report.count("fused") == 1
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(array.shape).astype(np.float16) for name, array in feeds_of(proto, {}).items()}
    for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
        assert_same(got, wanted, tolerance)


@pytest.mark.parametrize(("gate", "fusions"), [("Identity(p1)", 1), ("Sub(one, p0)", 0), ("Sub(one, p1)", 0)])
def test_a_decay_that_rounding_makes_negative(gate: str, fusions: int) -> None:
    """The Tanh and Sigmoid of ONNX Runtime give a little more than 1, and a negative number has no logarithm."""
    body = (
        f"one = Constant<value_float=1.0>() p0 = Tanh(g) p1 = Sigmoid(g) p = {gate} s1, y = Scan<num_scan_inputs=4, "
        "body = token (float[3,4,6] s, float[3,4] qi, float[3,4] ki, float[3,6] vi, float[3] pi) => "
        "(float[3,4,6] sn, float[3,6] o) { ax1 = Constant<value_ints=[1]>() ax2 = Constant<value_ints=[2]>() "
        "both = Constant<value_ints=[1,2]>() pu = Unsqueeze(pi, both) sd = Mul(s, pu) column = Unsqueeze(ki, ax2) "
        "row = Unsqueeze(vi, ax1) u = MatMul(column, row) sn = Add(sd, u) qr = Unsqueeze(qi, ax1) "
        "yr = MatMul(qr, sn) o = Squeeze(yr, ax1) }>(s0, q, k, v, p)"
    )
    inputs = "float[2,3,4] q, float[2,3,4] k, float[2,3,6] v, float[3,4,6] s0, float[2,3] g"
    proto = model(body, inputs, "float[2,3,6] y, float[3,4,6] s1")
    result, report = fused(proto)
    assert report.count("fused") == fusions
    feeds = random_feeds(proto, g=np.full((2, 3), 8.191037, np.float32))
    for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
        assert_same(got, wanted, 1e-5)
