"""--assume binary-masks: an input that is inverted and added to a bias becomes a mask of one row beside the bias."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.passes.running import PRODUCT_PV, PRODUCT_QK, SOFTMAX, assert_same, fused, parse, random_feeds, run

NUMBERS = (
    "zero = Constant<value=int64 {0}>() one = Constant<value=float {1.0}>() "
    "low = Constant<value=float {-3.4028234663852886e38}>() high = Constant<value=float {3.4028234663852886e38}>() "
    "axes = Constant<value=int64[2] {1,2}>() bias = Tanh(b) "
)
INVERTED = "u = Unsqueeze(given, axes) f = Cast<to=1>(u) r = Sub(one, f) w = Mul(r, low) "
TURNED = "f = Cast<to=1>(given) r = Sub(f, one) t = Mul(r, high) w = Unsqueeze(t, axes) "
SUMS = {
    "one after the other": "a = Add(s, bias) x = Add(a, w) ",
    "added up first": "a = Add(bias, w) x = Add(s, a) ",
    "added up and cut first": (
        "a = Add(bias, w) n = Shape<start=3, end=4>(s) from = Constant<value=int64[1] {0}>() "
        "last = Constant<value=int64[1] {3}>() c = Slice(a, from, n, last) x = Add(s, c) "
    ),
}
PADDING = np.array([[1, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0]])
"""The second batch entry is masked everywhere."""


def model(body: str, more: str = "int64[B,T] given", bias: str = "float[1,4,S,T] b") -> onnx.ModelProto:
    return parse(PRODUCT_QK + NUMBERS + body + SOFTMAX.format("x") + PRODUCT_PV, f"{more}, {bias}")


@pytest.mark.parametrize("addend", [INVERTED, TURNED], ids=["1 - mask", "mask - 1"])
@pytest.mark.parametrize("use", SUMS.values(), ids=SUMS)
def test_an_inverted_mask_beside_a_bias(addend: str, use: str) -> None:
    """Without the word its numbers may be any, and it stays a part of the bias; the report says what the word gives."""
    proto = model(addend + use)
    feeds = random_feeds(proto, given=PADDING)
    for assume, mask in (((), "real_shift"), (("binary-masks",), "atten_mask+real_shift")):
        result, report = fused(proto, assume=assume)
        (block,) = report.blocks
        assert (block.mask, block.assumed, len(block.missed)) == (mask, assume, 1 - len(assume))
        assert all(each.hint == "--assume binary-masks if that holds in every run" for each in block.missed)
        assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)
    other = {**feeds, "given": PADDING * 2}
    assert_same(run(fused(proto)[0], other)[0], run(proto, other)[0], 1e-5)


def test_an_inverted_mask_alone_is_a_mask_if_the_word_is_given() -> None:
    """It is one row in either form, so nothing is missed without the word."""
    proto = model(INVERTED + "x = Add(s, w) ")
    plain, vouched = (fused(proto, assume=assume)[1].blocks[0] for assume in ((), ("binary-masks",)))
    assert (plain.mask, plain.missed, vouched.mask) == ("real_shift", (), "atten_mask")


@pytest.mark.parametrize(
    "more",
    [
        "e = Gather(table, given) z = Mul(e, nothing) ",
        "i = Identity(given) o = Cast<to=6>(i) e = Gather(table, o) z = Mul(e, nothing) ",
    ],
    ids=["read as they are", "moved"],
)
def test_token_ids_are_no_mask(more: str) -> None:
    """An input by which rows of a table are looked up may hold any number, whatever else is done to it."""
    body = "table = Constant<value=float[3] {0.5, 1.0, 1.5}>() nothing = Constant<value=float {0.0}>() "
    body += INVERTED + more + "a0 = Add(s, bias) a1 = Add(a0, w) z4 = Unsqueeze(z, axes) x = Add(a1, z4) "
    (block,) = fused(model(body), assume=["binary-masks"])[1].blocks
    assert (block.mask, block.assumed, block.missed) == ("real_shift", (), ())


def test_a_factor_of_unknown_size_keeps_the_mask_a_bias() -> None:
    """Scores times such a factor may outweigh the number of the mask."""
    body = INVERTED + "g = Mul(s, t) a = Add(g, bias) x = Add(a, w) "
    (block,) = fused(model(body, "int64[B,T] given, float t"), assume=["binary-masks"])[1].blocks
    assert (block.mask, block.assumed) == ("real_shift", ())


@pytest.mark.parametrize("number", ["-1e4", "-65504"])
def test_a_moderate_number_beside_a_bias(number: str) -> None:
    """Two words together. A row that is masked everywhere gives its softmax with the bias, as without the number; how
    that row was rounded would show if the number stayed in the bias."""
    few = f"few = Constant<value=float {{{number}}}>() "
    proto = model(few + INVERTED.replace("low", "few") + "a = Add(s, bias) x = Add(a, w) ")
    words = ("binary-masks", "masks-dominate")
    assert [fused(proto, assume=[word])[1].blocks[0].code for word in words] == ["mask_value"] * 2
    result, report = fused(proto, assume=words)
    (block,) = report.blocks
    assert (block.mask, block.assumed, block.missed) == ("atten_mask+real_shift", words, ())
    feeds = random_feeds(proto, given=PADDING)
    rounding = 2 * abs(float(number)) * 2.0**-24
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5 + 2 * rounding)


QUANTISED = {
    "one scale": "bias = DequantizeLinear(b, scale, point) ",
    "no zero point": "bias = DequantizeLinear(b, scale) ",
    "by axis": "bias = DequantizeLinear<axis=1>(b, scales, points) ",
    "of ONNX Runtime": "bias = com.microsoft.DequantizeLinear(b, scale, point) ",
}


@pytest.mark.parametrize("made", QUANTISED.values(), ids=QUANTISED)
def test_a_bias_of_integers(made: str) -> None:
    """The integers' type and the scale bound a bias that a DequantizeLinear gives."""
    constants = (
        "scale = Constant<value=float {0.05}>() point = Constant<value=int8 {3}>() "
        "scales = Constant<value=float[4] {0.05, 0.1, 0.2, 0.4}>() points = Constant<value=int8[4] {3, 2, 1, 0}>() "
    )
    body = (NUMBERS + INVERTED).replace("bias = Tanh(b) ", constants + made) + SUMS["added up first"]
    proto = parse(PRODUCT_QK + body + SOFTMAX.format("x") + PRODUCT_PV, "int64[B,T] given, int8[1,4,S,T] b")
    rows = np.random.default_rng(0).integers(-128, 127, (1, 4, 5, 6), endpoint=True).astype(np.int8)
    feeds = random_feeds(proto, given=PADDING, b=rows)
    (said,) = fused(proto)[1].blocks[0].missed
    assert said.hint == "--assume binary-masks if that holds in every run"
    result, report = fused(proto, assume=["binary-masks"])
    (block,) = report.blocks
    assert (block.mask, block.assumed) == ("atten_mask+real_shift", ("binary-masks",))
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_a_bias_of_integers_without_a_scale_that_is_a_number(number: str) -> None:
    """0 times infinity is NaN."""
    made = f"scale = Constant<value=float {{{number}}}>() bias = DequantizeLinear(b, scale) "
    body = (NUMBERS + INVERTED).replace("bias = Tanh(b) ", made) + SUMS["added up first"]
    proto = parse(PRODUCT_QK + body + SOFTMAX.format("x") + PRODUCT_PV, "int64[B,T] given, int8[1,4,S,T] b")
    (block,) = fused(proto, assume=["binary-masks"])[1].blocks
    assert (block.mask, block.assumed, block.missed) == ("real_shift", (), ())
