"""Pads: one of no width is nothing, and the numbers that another one puts beside a mask are known."""

from __future__ import annotations

import pytest

from tests.passes.running import assert_same, fused, parse, random_feeds, run

NONE = "pads = Constant<value=int64[8] {0,0,0,0,0,0,0,0}>() "
"""As TorchScript writes a Pad whose widths are computed."""
INPUTS = "float[B,4,S,8] q, float[B,4,7,8] k, float[B,4,7,8] v"
BODY = (
    "vp = Pad(v, pads) kt = Transpose<perm=[0,1,3,2]>(k) kp = Pad(kt, pads) s = MatMul(q, kp) sp = Pad(s, pads) "
    "p0 = Softmax<axis=-1>(sp) p = Pad(p0, pads) y = MatMul(p, vp)"
)
MASKED = (
    "kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) zero = Constant<value=float {0.0}>() "
    "low = Constant<value=float {-inf}>() a = Where(m, zero, low) "
)
SOFTMAX = "x = Add(s, wide) p = Softmax<axis=-1>(x) y = MatMul(p, v)"


@pytest.mark.parametrize(
    ("opset", "body"),
    [
        (18, NONE + BODY),
        (10, BODY.replace("Pad(", "Pad<pads=[0,0,0,0,0,0,0,0]>(").replace(", pads)", ")")),
    ],
)
def test_no_width(opset: int, body: str) -> None:
    model = parse(body, inputs=INPUTS, opset=opset)
    result, report = fused(model)
    assert [node.op_type for node in result.graph.node] == ["FlashAttentionScore"], report.blocks[0].reason
    feeds = random_feeds(model)
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)


SHIFT = "pads = Constant<value=int64[8] {0,0,-1,0,0,0,1,0}>() "
"""One place is cut off in front, and one is added behind."""
SHIFTED = {
    "key": "t = Pad(k, pads) kt = Transpose<perm=[0,1,3,2]>(t) s = MatMul(q, kt) p = Softmax<axis=-1>(s) "
    "y = MatMul(p, v)",
    "value": "t = Pad(v, pads) kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) p = Softmax<axis=-1>(s) "
    "y = MatMul(p, t)",
    "scores": "kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) t = Pad(s, pads) p = Softmax<axis=-1>(t) "
    "y = MatMul(p, v)",
    "probabilities": "kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) p = Softmax<axis=-1>(s) t = Pad(p, pads) "
    "y = MatMul(t, v)",
}


@pytest.mark.parametrize("operand", SHIFTED)
def test_a_shift_keeps_the_size_and_is_something(operand: str) -> None:
    model = parse(SHIFT + SHIFTED[operand], inputs=INPUTS.replace("S", "7"), outputs="float[B,4,7,8] y", opset=18)
    result, report = fused(model)
    assert any(node.op_type == "Pad" for node in result.graph.node)
    assert (report.blocks[0].status == "fused") == (operand in ("key", "value"))
    feeds = random_feeds(model)
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)


@pytest.mark.parametrize(
    ("pad", "opset", "mask"),
    [
        ("wide = Pad(a, pads)", 18, "atten_mask"),
        ("wide = Pad(a, pads, low)", 18, "atten_mask"),
        ("wide = Pad<mode='edge'>(a, pads)", 18, "atten_mask"),
        ("wide = Pad<pads=[0,0,0,0,0,0,0,1], value=-inf>(a)", 10, "atten_mask"),
        ("some = Constant<value=float {1.5}>() wide = Pad(a, pads, some)", 18, "real_shift"),
    ],
)
def test_a_padded_mask(pad: str, opset: int, mask: str) -> None:
    """As torch.nn.MultiheadAttention writes its masks with add_zero_attn."""
    pads = "pads = Constant<value=int64[8] {0,0,0,0,0,0,0,1}>() " if opset == 18 else ""
    model = parse(MASKED + pads + pad.replace("'", '"') + " " + SOFTMAX, "bool[B,1,1,6] m", inputs=INPUTS, opset=opset)
    result, report = fused(model)
    assert report.blocks[0].mask == mask
    feeds = random_feeds(model)
    feeds["m"][..., 0] = True
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)
