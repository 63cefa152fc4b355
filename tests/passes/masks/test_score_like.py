"""Terms that are scores themselves, before a mask that is put into the scores and taken out of the probabilities."""

from __future__ import annotations

import numpy as np
import pytest

from fa_compiler.passes import Block
from tests.passes.running import PRODUCT_QK, SOFTMAX, assert_same, fused, parse, random_feeds, run

PADDING = np.array([[0, 0, 0, 0, 0, 0], [1, 1, 0, 1, 1, 0]], np.bool_).reshape(2, 1, 1, 6)
SIX = "float[B,4,6,8] q, float[B,4,6,8] k, float[B,4,6,8] v"
NUMBERS = "low = Constant<value=float {-3.4028234663852886e38}>() zero = Constant<value=float {0.0}>() "
MASKED = "a = Add(s, b) x = Where(m, a, low) " + SOFTMAX.format("x") + "g = Where(m, p, zero) y = MatMul(g, v)"
POSITIONS = "rt = Transpose<perm=[0,1,3,2]>(r) d = MatMul(q, rt) "
# The shift of Transformer-XL: one column of zeros in front, and everything one place on in each row.
SHIFT = (
    "n = Constant<value=int64[8] {0,0,0,1,0,0,0,0}>() d1 = Pad(d, n) h = Constant<value=int64[4] {0,0,-1,6}>() "
    "d2 = Reshape(d1, h) from = Constant<value=int64[1] {1}>() to = Constant<value=int64[1] {99}>() "
    "at = Constant<value=int64[1] {2}>() d3 = Slice(d2, from, to, at) w = Constant<value=int64[4] {0,0,6,6}>() "
    "b = Reshape(d3, w) "
)
BIASES = {
    "product": POSITIONS + "b = Identity(d) ",
    "shifted": POSITIONS + SHIFT,
    "two_of_them": POSITIONS + "d0 = MatMul(k, rt) dt = Transpose<perm=[0,1,3,2]>(d0) e = Add(d, dt) b = Add(zero, e) ",
    "scaled": POSITIONS + "c = Constant<value=float {0.5}>() b = Mul(d, c) ",
    "zeros_beside": POSITIONS
    + "f = Constant<value=int64[1] {1}>() l = Constant<value=int64[1] {6}>() i = Constant<value=int64[1] {3}>() "
    "z0 = Constant<value=int64[1] {0}>() sh = Shape(d) f3 = Slice(sh, z0, i) o = Concat<axis=0>(f3, f) "
    "e = Slice(d, f, l, i) z = ConstantOfShape(o) b = Concat<axis=3>(z, e) ",
}
OTHERS = {
    "input": "b = Identity(r4) ",
    "of_a_constant_as_low_as_the_mask": "c = Constant<value=float[8,6] {" + ",".join(["-3e38"] * 48) + "}>() "
    "b = MatMul(q, c) ",
    "one_of_them_and_an_input": POSITIONS + "b = Add(d, r4) ",
    "exponential": POSITIONS + "b = Exp(d) ",
    "times_a_large_number": POSITIONS + "c = Constant<value=float {1e20}>() b = Mul(d, c) ",
    "padded_with_a_low_number": POSITIONS + SHIFT.replace("Pad(d, n)", "Pad(d, n, low)"),
}


def same(body: str) -> Block:
    proto = parse(
        PRODUCT_QK + NUMBERS + body + MASKED,
        "bool[B,1,1,6] m, float[B,4,6,8] r, float[B,4,6,6] r4",
        inputs=SIX,
        outputs="float[B,4,6,8] y",
    )
    feeds = random_feeds(proto, m=PADDING)
    result, report = fused(proto)
    for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
        assert_same(got, wanted, 1e-5)
    return report.blocks[0]


@pytest.mark.parametrize("name", BIASES)
def test_products_are_outweighed_like_scores(name: str) -> None:
    block = same(BIASES[name])
    # A product alone is no bias, but a part of the scores.
    assert (block.status, block.mask) == (
        "fused",
        "atten_mask" if name in ("product", "scaled") else "atten_mask+real_shift",
    )


@pytest.mark.parametrize("name", OTHERS)
def test_what_may_be_as_low_as_the_mask(name: str) -> None:
    """Beside it masked keys keep their number as a score."""
    block = same(OTHERS[name])
    assert block.status == "fused"
    assert {"EXT-MASK-VALUE", "EXT-MASKED-VALUES"} <= set(block.extensions)
