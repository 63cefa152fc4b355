"""Masks of moderate size beside others: fused only where it does not matter which sum is rounded first.

The first batch entry is masked everywhere, so that what is left of its scores shows.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from fa_compiler.passes import Block
from fa_compiler.passes.masks.sixteen_bits import is_rounded_on_the_way
from tests.passes.running import PRODUCT_PV, PRODUCT_QK, SOFTMAX, Array, assert_same, fused, parse, random_feeds, run

PADDING = np.array([[0, 0, 0, 0, 0, 0], [1, 1, 0, 1, 1, 0]], np.bool_).reshape(2, 1, 1, 6)
ROWS = np.array([[0, 0, 0, 1, 0], [0, 0, 1, 1, 0]], np.bool_).reshape(2, 1, 5, 1)
NUMBERS = "".join(
    f"{name} = Constant<value=float {{{number}}}>() "
    for name, number in {
        "zero": "0.0",
        "one": "1.0",
        "coarse": "-1e4",
        "coarser": "-1e9",
        "least": "-3.4028234663852886e38",
        "low": "-inf",
        "high": "1e31",
        "big": "1e9",
        "tiny": "1e-9",
        "three": "3.0",
    }.items()
)
TERMS = "t = Where(r, zero, coarse) u = Where(r, zero, coarser) f = Cast<to=1>(i) g = Sub(one, f) w = Mul(g, least) "
MORE = "bool[B,1,1,T] m, bool[B,1,S,1] r, int64[B,1,1,T] i, float[B,1,1,T] b, float[B,1,1,T] e"


def same(body: str) -> Block:
    proto = parse(PRODUCT_QK + NUMBERS + TERMS + body + SOFTMAX.format("x") + PRODUCT_PV, MORE)
    feeds = random_feeds(proto, m=PADDING, r=ROWS, i=PADDING.astype(np.int64), e=PADDING.astype(np.float32))
    result, report = fused(proto)
    for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
        assert_same(got, wanted, 1e-5)
    return report.blocks[0]


FUSED = {
    "moderate_then_huge": "a = Add(s, t) x = Add(a, w) ",
    "huge_then_moderate": "a = Add(s, w) x = Add(t, a) ",
    "coarser": "a = Add(s, u) x = Add(a, w) ",
    "infinite": "n = Where(m, zero, low) a = Add(s, u) x = Add(a, n) ",
    "two_huge_ones": "n = Where(m, zero, low) l = Where(m, zero, least) a = Add(s, t) c = Add(a, n) x = Add(c, l) ",
    "before_a_selection": "a = Add(s, u) x = Where(m, a, least) ",
    "behind_a_selection": "a = Where(m, s, least) x = Add(a, u) ",
    "before_a_floor": "a = Add(s, t) c = Add(a, w) x = Max(c, least) ",
    "whole_numbers_of_an_einsum": 'o = Einsum<equation="abcd->abcd">(g) c = Mul(o, least) a = Add(s, t) x = Add(a, c) ',
    "beside_one_number": "a = Add(s, u) x = Add(a, tiny) ",
}


@pytest.mark.parametrize("name", FUSED)
def test_what_is_fused(name: str) -> None:
    assert same(FUSED[name]).status == "fused"


DECLINED = {
    "two_moderate_ones": "a = Add(s, t) x = Add(a, u) ",
    "moderate_and_a_bias": "a = Add(s, u) x = Add(a, b) ",
    "moderate_and_a_float_mask": "d = Mul(b, least) a = Add(s, u) x = Add(a, d) ",
    "opposite_signs": "h = Where(m, zero, high) a = Add(s, t) c = Add(a, h) x = Add(c, w) ",
    "opposite_sign_behind_a_floor": "a = Add(s, t) c = Max(a, least) h = Where(m, zero, high) x = Add(c, h) ",
    "opposite_sign_behind_a_floor_and_an_endless_mask": "a = Where(m, s, low) c = Max(a, least) "
    "f1 = Constant<value=float {3.4028234663852886e38}>() x = Add(c, f1) ",
    "opposite_signs_of_an_if": "t1 = Cast<to=1>(i) t2 = ReduceMax<keepdims=0>(t1) c = Cast<to=9>(t2) d = If (c) <"
    "then_branch = y () => (float o) { o = Identity(zero) }, else_branch = n () => (float o) { o = Identity(high) }> "
    "h = Where(m, d, zero) a = Add(s, h) x = Add(a, w) ",
    "opposite_signs_beside_scores": "d = MatMul(kt, k) e1 = ReduceMean<axes=[-1,-2]>(d) "
    "h = Where(m, e1, high) a = Add(s, h) x = Add(a, w) ",
    "one_number": "h = Constant<value=float {0.04}>() a = Add(s, h) x = Add(a, u) ",
    "one_number_of_two": "h = Constant<value=float {0.04}>() a = Add(s, h) x = Add(a, coarse) ",
    "one_number_that_is_large": "a = Add(s, u) x = Add(a, three) ",
    "a_difference_and_a_bias": "d = Mul(e, big) c = Sub(d, big) a = Add(s, b) x = Add(a, c) ",
    "a_moved_difference_and_a_bias": "d = Mul(big, e) n = Add(d, coarser) c = Identity(n) a = Add(s, b) x = Add(c, a) ",
    "one_number_and_a_share_of_a_huge_one": "h = Constant<value=float[6] {3e-30,3e-30,3e-30,3e-30,3e-30,3e-30}>() "
    "n = Constant<value=float {0.04}>() d = Mul(f, h) c = Mul(d, least) a = Add(s, n) x = Add(a, c) ",
    "one_number_and_a_quotient_by_a_small_one": "n = Constant<value=float {31.0}>() g1 = Sigmoid(e) d = Div(g1, tiny) "
    "a = Add(s, n) x = Sub(a, d) ",
    "one_number_and_a_product_with_a_huge_mask": "n = Constant<value=float {31.0}>() l = Where(r, zero, least) "
    "g1 = Sigmoid(e) d = MatMul(l, g1) a = Add(s, n) x = Add(a, d) ",
    "one_number_and_a_product_of_several": "n = Constant<value=float {31.0}>() h = Constant<value=float {-200.0}>() "
    "g1 = Sigmoid(e) d = Mul(g1, h) d1 = Mul(d, n) d2 = Mul(n, d1) d3 = Mul(d2, h) d4 = Mul(d3, h) d5 = Mul(d4, n) "
    "a = Add(s, n) x = Sub(a, d5) ",
    "opposite_signs_of_one_mask": "h = Constant<value=float {-1e30}>() n = Where(r, zero, h) l = Where(m, n, least) "
    "d = MatMul(kt, k) e1 = ReduceMean<axes=[1,2,3]>(d) c = Sub(e1, l) h1 = Where(m, c, l) "
    "a = Add(s, h1) x = Add(a, l) ",
    "a_negative_factor_between": "a = Add(s, w) h = Neg(a) x = Add(h, w) ",
    "a_factor_behind": "a = Add(s, u) c = Add(a, w) x = Mul(c, three) ",
}


@pytest.mark.parametrize("name", DECLINED)
def test_what_is_declined(name: str) -> None:
    assert same(DECLINED[name]).code == "mask_value"


@pytest.mark.parametrize(("reduction", "code"), [("mul", "mask_value"), ("min", None)])
def test_a_scatter_that_may_turn_signs(reduction: str, code: str | None) -> None:
    """A score is lost in the sum with both masks one after the other, and stays beside their sum."""
    masks = (
        "l = Where(m, zero, least) o = Constant<value=int64[1,1,1,1] {2}>() n = Constant<value=float[1,1,1,1] {-1}>()"
    )
    masks += f'h = ScatterElements<axis=3, reduction="{reduction}">(l, o, n) a = Add(s, h) x = Add(a, l) '
    proto = parse(PRODUCT_QK + NUMBERS + masks + SOFTMAX.format("x") + PRODUCT_PV, MORE)
    feeds = random_feeds(proto, m=PADDING[::-1])
    result, report = fused(proto, target="contrib", assume=["no-empty-rows"])
    assert_same(run(result, feeds)[0][0], run(proto, feeds)[0][0], 1e-5)
    assert report.blocks[0].code == code


@pytest.mark.parametrize(
    ("assume", "taken"),
    [(("masks-dominate",), None), (("binary-masks",), None), (("binary-masks", "no-empty-rows"), ("no-empty-rows",))],
)
def test_what_lets_the_order_of_sums_be(assume: tuple[str, ...], taken: tuple[str, ...] | None) -> None:
    """It shows in rows that are masked everywhere, whatever a mask outweighs; what was assumed is named."""
    body = NUMBERS + TERMS + DECLINED["two_moderate_ones"] + SOFTMAX.format("x")
    proto = parse(PRODUCT_QK + body + PRODUCT_PV, MORE)
    (block,) = fused(proto, assume=assume)[1].blocks
    assert (block.status, block.assumed) == (("declined", ()) if taken is None else ("fused", taken))


SHORT_NUMBERS = "".join(
    f"{name} = Constant<value=float16 {{{int(np.float16(number).view(np.uint16))}}}>() "
    for name, number in {"zero": 0.0, "one": 1.0, "two": 2.0, "coarse": -1e4, "low": -65504.0, "hundred": 100.0}.items()
)
MOVED = "n = Shape(a) d = Constant<value=int64[3] {-1,5,6}>() c = Reshape(a, d) x = Reshape(c, n) "
ADDED = "f = Cast<to=10>(i) g = Sub(one, f) t = Mul(g, coarse) a = Add(s, t) "
SELECTED = "t = Where(r, zero, coarse) a = Add(s, t) "
FLOORED = "t = Where(r, zero, coarse) d = Add(t, b) e = {}(d, low) x = Add(s, e) "
BEYOND = "n = Constant<value=float {0.0}>() l = Constant<value=float {-5e8}>() t = Where(r, n, l) u = Cast<to=10>(t) "
BEYOND += "a = Add(s, u) "
SHORT = {
    "added": (ADDED + "x = Identity(a) ", "fused"),
    "added and moved": (ADDED + MOVED, "declined"),
    "added and moved once": (ADDED + "n = Shape(a) x = Reshape(a, n) ", "fused"),
    "added and cast to its own type": (ADDED + "x = Cast<to=10>(a) ", "fused"),
    "added, cast to its own type and moved": (ADDED + "c = Cast<to=10>(a) n = Shape(a) x = Reshape(c, n) ", "declined"),
    "selected": (SELECTED + "x = Identity(a) ", "fused"),
    "selected and moved": (SELECTED + MOVED, "declined"),
    "largest": (FLOORED.format("Max"), "fused"),
    "clipped": (FLOORED.format("Clip"), "fused"),
    "enlarged": ("three = Add(one, two) a = Add(s, b) x = Mul(a, three) ", "declined"),
    "doubled": ("a = Add(s, b) x = Mul(a, two) ", "fused"),
    "made smaller": ("third = Div(one, two) a = Add(s, b) x = Mul(a, third) ", "fused"),
    "beyond float16": (BEYOND + "x = Identity(a) ", "fused"),
    "beyond float16, and a bias": (BEYOND + "x = Add(a, b) ", "declined"),
    "a product beyond float16": ("t = Where(r, zero, hundred) u = Mul(t, low) a = Add(u, s) x = Add(a, b)", "declined"),
}


@pytest.mark.parametrize("name", SHORT)
def test_sums_of_16_bits(name: str) -> None:
    """ONNX Runtime adds in float32, and rounds before it moves the sum more than once: a row that is masked everywhere
    shows it."""
    body, status = SHORT[name]
    more = "bool[B,1,S,1] r, int64[B,1,1,T] i, float16[B,1,1,T] b"
    check_short(body + SOFTMAX.format("x"), more, status, r=ROWS, i=PADDING.astype(np.int64))


def check_short(body: str, more: str, status: str, **given: Array) -> None:
    """Steep float16 scores `s` go through the body to probabilities `p`, and that is fused or declined."""
    operands = ", ".join(f"float16[B,4,{rows},8] {name}" for name, rows in (("q", "S"), ("k", "T"), ("v", "T")))
    text = PRODUCT_QK + SHORT_NUMBERS + body + PRODUCT_PV
    proto = parse(text, more, inputs=operands, outputs="float16[B,4,S,8] y")
    feeds = random_feeds(proto, **given)
    feeds["q"] *= 8
    result, report = fused(proto)
    assert report.blocks[0].status == status
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 5e-3)


@pytest.mark.parametrize(
    ("order", "status", "later"),
    [
        ("x, e", "fused", "x = Mul(a, one) "),
        ("x, e", "fused", "x = Where(r, a, low) "),
        ("x, e", "declined", "x = Cast<to=10>(a) "),
        ("e, x", "declined", "x = Mul(a, one) "),
        ("e, x", "declined", "x = Where(r, a, low) "),
    ],
)
def test_sums_of_16_bits_beside_a_sink(order: str, status: str, later: str) -> None:
    """ONNX Runtime rounds them where a Concat comes behind a kernel of 16 bits that makes its first operand. A mask of
    2 makes numbers of 1e4 to which all scores of a row are added."""
    start, end = ("1", "9") if order == "e, x" else ("0", "-1")
    sink = (
        "b0 = Shape<end=1>(q) b1 = Constant<value=int64[1] {4}>() b2 = Shape<start=2, end=3>(q) "
        "b3 = Constant<value=int64[1] {1}>() bs = Concat<axis=0>(b0, b1, b2, b3) e = Expand(sink, bs) "
        f"y0 = Concat<axis=-1>({order}) p0 = Softmax<axis=-1>(y0) n0 = Constant<value=int64[1] {{{start}}}>() "
        f"n1 = Constant<value=int64[1] {{{end}}}>() n3 = Constant<value=int64[1] {{3}}>() p = Slice(p0, n0, n1, n3) "
    )
    more = "bool[B,1,S,1] r, int64[B,1,1,T] i, float16[1,4,1,1] sink"
    check_short(ADDED + later + sink, more, status, r=np.ones_like(ROWS), i=2 * PADDING.astype(np.int64))


def test_one_number_beside_a_sink() -> None:
    """It moves the scores and not their sink, so it stays."""
    sink = "ends = Constant<value=int64[8] {0,0,0,0,0,0,0,1}>() half = Constant<value=float {0.5}>() x = Add(s, half) "
    sink += "c = Pad(x, ends) p0 = Softmax<axis=-1>(c) n0 = Constant<value=int64[1] {0}>() "
    sink += "n1 = Constant<value=int64[1] {-1}>() n3 = Constant<value=int64[1] {3}>() p = Slice(p0, n0, n1, n3) "
    proto = parse(PRODUCT_QK + sink + PRODUCT_PV)
    result, report = fused(proto)
    feeds = random_feeds(proto)
    assert report.blocks[0].mask == "real_shift"
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


BRIEFLY = "h = Cast<to=16>({}) w = Cast<to=1>(h) "
LOWEST = "low = Constant<value=float {-3.4028234663852886e38}>() "
AFTER_ROUNDING = {
    "alone": BRIEFLY.format("s") + SOFTMAX.format("w"),
    "scaled": "c = Constant<value=float {0.35}>() z = Mul(s, c) " + BRIEFLY.format("z") + SOFTMAX.format("w"),
    "masked behind": LOWEST + BRIEFLY.format("s") + "x = Where(m, w, low) " + SOFTMAX.format("x"),
    "biased behind": BRIEFLY.format("s") + "x = Add(w, b) " + SOFTMAX.format("x"),
}
BEFORE_ROUNDING = {
    "masked": (LOWEST + "x = Where(m, s, low) " + BRIEFLY.format("x"), "cast"),
    "biased": ("x = Add(s, b) " + BRIEFLY.format("x"), "cast"),
    "times a number of the run": ("x = Mul(s, r) " + BRIEFLY.format("x"), "cast"),
    "to float16": (BRIEFLY.format("s").replace("16", "10"), "cast"),
}
ROUNDED_MORE = "bool[B,1,1,T] m, float[B,4,S,T] b, float r"


@pytest.mark.parametrize("body", AFTER_ROUNDING.values(), ids=AFTER_ROUNDING)
def test_scores_that_are_rounded_to_bfloat16(body: str) -> None:
    """Scores of up to 8 are rounded by 2^-6, and probabilities by this share. A row that is masked everywhere keeps its
    mean."""
    proto = parse(PRODUCT_QK + body + PRODUCT_PV, ROUNDED_MORE)
    result, report = fused(proto)
    (block,) = report.blocks
    assert block.status == "fused" and [note for note in report.notes if "bfloat16" in note and "h:" in note]
    feeds = random_feeds(proto, m=PADDING)
    (got,), (wanted,) = run(result, feeds), run(proto, feeds)
    assert_same(got, wanted, 2.0**-5)
    wide = parse(PRODUCT_QK + body.replace("to=16", "to=1") + PRODUCT_PV, ROUNDED_MORE)
    assert_same(got, run(wide, feeds)[0], 1e-5)


@pytest.mark.parametrize("body, code", BEFORE_ROUNDING.values(), ids=BEFORE_ROUNDING)
def test_what_is_rounded_with_the_scores(body: str, code: str) -> None:
    """-3.4e38 is -inf in bfloat16, and a product with an unknown number may be infinite there, not in float32."""
    _, report = fused(parse(PRODUCT_QK + body + SOFTMAX.format("w") + PRODUCT_PV, ROUNDED_MORE))
    assert [(block.code, block.culprit) for block in report.blocks] == [(code, "h")]


REPEATED = {
    "the kernel that repeats reads float32": ("u = Unsqueeze(b, ax) t = Tile(u, rep) ", "declined"),
    "and gives float32": ("t0 = Tile(b, two) u = Unsqueeze(t0, ax) t = Expand(u, sizes) ", "declined"),
    "two kernels of float16": ("u = Unsqueeze(b, ax) t = Expand(u, sizes) ", "fused"),
}


@pytest.mark.parametrize("name", REPEATED)
def test_sums_of_float16_that_are_repeated(name: str) -> None:
    """-60000 twice is infinite in float16. A Tile has a kernel of float32 alone, so that nothing in front of it is
    rounded."""
    moves, status = REPEATED[name]
    body = (
        "ax = Constant<value_ints=[1, 2]>() rep = Constant<value_ints=[1, 1, 6, 1]>()"
        "two = Constant<value_ints=[1, 1]>() sizes = Constant<value_ints=[2, 1, 6, 6]>() "
        "f1 = Constant<value=float {1.0}>() one = Cast<to=10>(f1) "
        "f60 = Constant<value=float {-60000.0}>() low = Cast<to=10>(f60) kt = Transpose<perm=[0,1,3,2]>(k) "
        f"s = MatMul(q, kt) x = Sub(one, m) a = Mul(x, low) b = Add(a, a) {moves} z = Add(s, t) "
        "p = Softmax<axis=-1>(z) y = MatMul(p, v) "
    )
    inputs = ", ".join(f"float16[2,4,6,8] {operand}" for operand in "qkv") + ", float16[2,6] m"
    proto = parse(body, inputs=inputs, outputs="float16[2,4,6,8] y")
    mask = np.array([[0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]], np.float16)
    feeds = {name: array.astype(np.float16) for name, array in random_feeds(proto, m=mask).items()}
    result, report = fused(proto)
    assert report.blocks[0].status == status
    for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
        assert_same(got, wanted, 2e-3)


@pytest.mark.parametrize(
    ("behind", "rounded"),
    [("Max(b, w)", True), ("Min(w, b)", True), ("Clip(b, n, n)", True), ("Where(m, b, w)", False)],
)
def test_operators_behind_a_sum_that_have_kernels_of_16_bits(behind: str, rounded: bool) -> None:
    """Such an operator rounds the sum, whatever step of the scores it is."""
    more = "float16[1,4,S,S] w, bool[1,1,1,S] m, float16 n"
    body = f"a = Identity(w) b = Add(a, w) x = {behind} y = Softmax<axis=-1>(x)"
    model = ir.from_proto(parse(body, more, outputs="float16[1,4,S,S] y"))
    (total,) = (node for node in model.graph if node.op_type == "Add")
    assert is_rounded_on_the_way(total.outputs[0]) is rounded
