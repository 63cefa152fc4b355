"""Masks as KerasHub writes them: the least of padding and a causal mask is above 0, and positions are counted in
floats."""

from __future__ import annotations

import numpy as np
import pytest

from tests.passes.running import PRODUCT_PV, PRODUCT_QK, SOFTMAX, assert_same, fused, parse, random_feeds, run

pytestmark = pytest.mark.usefixtures("declines_change_nothing")

NUMBERS = (
    "zero = Constant<value=int64 {0}>() one = Constant<value=int64 {1}>() first = Constant<value=int64[1] {0}>() "
    "second = Constant<value=int64[1] {1}>() f0 = Constant<value=float {0}>() f1 = Constant<value=float {1}>() "
    "i0 = Constant<value=int32 {0}>() low = Constant<value=float {-inf}>() n = Shape(pad) t = Gather(n, one) "
)
INTEGERS = "r = Range(zero, t, one) "
FLOATS = "tf = Cast<to=1>(t) r = Range(f0, tf, f1) "
CAUSAL = "i = Unsqueeze(r, second) ge = GreaterOrEqual(i, r) g3 = Unsqueeze(ge, first) c = Cast<to=6>(g3) "
LEAST = "p3 = Unsqueeze(pad, second) m = Min(p3, c) "
ABOVE = "m4 = Unsqueeze(m, second) mf = Cast<to=1>(m4) keep = Greater(mf, f0) "
REST = PRODUCT_QK + "x = Where(keep, s, low) " + SOFTMAX.format("x") + PRODUCT_PV
INPUTS = "float[B,4,S,8] q, float[B,4,S,8] k, float[B,4,S,8] v, int32[B,S] pad"
KERAS = NUMBERS + FLOATS + CAUSAL + LEAST + ABOVE
SPELLINGS = {
    "KerasHub": KERAS,
    "in integers": NUMBERS + INTEGERS + CAUSAL + LEAST + ABOVE,
    "compared as integers": NUMBERS + FLOATS + CAUSAL + LEAST + "m4 = Unsqueeze(m, second) keep = Greater(m4, i0) ",
    "moved behind the comparison": NUMBERS
    + FLOATS
    + CAUSAL
    + LEAST
    + "g = Greater(m, i0) keep = Unsqueeze(g, second) ",
    "at least 1": KERAS.replace("Greater(mf, f0)", "GreaterOrEqual(mf, f1)"),
    "three of them": KERAS.replace("Min(p3, c)", "Min(p3, c, p3)"),
    "the other way round": KERAS.replace("GreaterOrEqual(i, r)", "LessOrEqual(r, i)"),
}
PADDING = np.array([[1, 1, 1, 1, 0], [-1, 2, 3, 0, 1]], np.int32)


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_causal_mask_and_padding(name: str) -> None:
    """The padding holds any integers, and masks rows everywhere."""
    model = parse(SPELLINGS[name] + REST, inputs=INPUTS)
    result, report = fused(model)
    assert [(block.status, block.mask) for block in report.blocks] == [("fused", "causal+atten_mask")]
    given = random_feeds(model, pad=PADDING)
    assert_same(run(result, given)[0], run(model, given)[0], 1e-5)


OTHERS = {
    "compared along one dimension": NUMBERS + FLOATS + "ge = GreaterOrEqual(r, r) keep = Unsqueeze(ge, first) ",
    "the largest": KERAS.replace("Min(p3, c)", "Max(p3, c)"),
    "is not 0": KERAS.replace("keep = Greater(mf, f0)", "keep = Cast<to=9>(mf)"),
    "of fewer dimensions than the number": NUMBERS
    + "m = Min(one, t) u = Unsqueeze(m, first) keep = Greater(u, first) ",
    "counted up to a vector of one number": KERAS.replace("Cast<to=1>(t)", "Cast<to=1>(t1)").replace(
        "t = Gather(n, one)", "t1 = Gather(n, second)"
    ),
    "below a number": KERAS.replace("Greater(mf, f0)", "Less(mf, f1)"),
    "rounded to 8 bits": KERAS.replace("mf = Cast<to=1>(m4)", "m8 = Cast<to=3>(m4) mf = Cast<to=1>(m8)"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_says_nothing_of_each(name: str) -> None:
    """The mask stays one of all rows and keys, or the attention as it is."""
    model = parse(OTHERS[name] + REST, inputs=INPUTS)
    result, report = fused(model)
    assert report.blocks[0].mask != "causal+atten_mask"
    if report.blocks[0].status == "fused":
        given = random_feeds(model, pad=PADDING)
        assert_same(run(result, given)[0], run(model, given)[0], 1e-5)
