"""Keys that are written part by part, as torch.onnx writes those of latent attention: the parts are joined."""

from __future__ import annotations

import onnx
import pytest

from tests.passes.running import fused_alike, parse

INPUTS = "float[B,4,S,12] q, float[B,4,T,8] a, float[B,1,T,4] b, float[B,4,T,8] v, float[B,4,T,12] below"
CONSTANTS = (
    "first = Constant<value=int64[8,1] {0,1,2,3,4,5,6,7}>() last = Constant<value=int64[4,1] {8,9,10,11}>() "
    "turned = Constant<value=int64[4,1] {9,8,10,11}>() "
    "heads = Constant<value=int64[4] {1,4,1,1}>() zero = Constant<value=int64 {0}>() one = Constant<value=int64 {1}>() "
    "n8 = Constant<value=int64[1] {8}>() n0 = Constant<value=int64[1] {0}>() n1 = Constant<value=int64[1] {1}>() "
    "far = Constant<value=int64[1] {99}>() "
    "be = Expand(b, heads) "
)
SWAP = "Transpose<perm=[3,1,2,0]>"
PARTS = f"bt = {SWAP}(below) at = {SWAP}(a) et = {SWAP}(be) "
WRITTEN = PARTS + "w0 = ScatterND(bt, first, at) w = ScatterND(w0, last, et) "
READ = f"k = {SWAP}(w) "
ATTENTION = "kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) p = Softmax<axis=-1>(s) y = MatMul(p, v) "
COUNTED = (
    "t = Shape<start=3, end=4>(below) u = Squeeze(t) c = Range(zero, u, one) d = Slice(c, n8, far, n0, n1) "
    "e = Slice(c, n0, n8, n0, n1) first2 = Unsqueeze(e, n1) last2 = Unsqueeze(d, n1) "
)

JOINED = {
    "in one order": WRITTEN + READ,
    "the last part first": PARTS + "w0 = ScatterND(bt, last, et) w = ScatterND(w0, first, at) " + READ,
    "an Identity between": PARTS + "w0 = ScatterND(bt, first, at) i = Identity(w0) w = ScatterND(i, last, et) " + READ,
    "transposed back between": PARTS
    + f"w0 = ScatterND(bt, first, at) i0 = {SWAP}(w0) i = {SWAP}(i0) w = ScatterND(i, last, et) "
    + READ,
    "counted": PARTS + COUNTED + "w0 = ScatterND(bt, first2, at) w = ScatterND(w0, last2, et) " + READ,
    "one part of all": "n12 = Constant<value=int64[12,1] {0,1,2,3,4,5,6,7,8,9,10,11}>() whole = Concat<axis=-1>(a, be) "
    + f"bt = {SWAP}(below) wt = {SWAP}(whole) w = ScatterND(bt, n12, wt) "
    + READ,
}


def operators(proto: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in proto.graph.node if node.op_type not in ("Constant", "Expand")]


def same(body: str, outputs: str = "float[B,4,S,8] y", inputs: str = INPUTS) -> list[str]:
    """The operators of the fused model, which gives what the model gives."""
    proto = parse(CONSTANTS + body, inputs=inputs, outputs=outputs)
    return operators(fused_alike(proto))


@pytest.mark.parametrize("spelling", JOINED)
def test_the_parts_are_joined(spelling: str) -> None:
    assert same(JOINED[spelling] + ATTENTION) == ["Concat", "FlashAttentionScore"]


def test_a_last_transpose_that_does_more_stays() -> None:
    """The key comes out transposed for the product."""
    turned = WRITTEN + "kt = Transpose<perm=[3,1,0,2]>(w) s = MatMul(q, kt) p = Softmax<axis=-1>(s) y = MatMul(p, v) "
    assert same(turned) == ["Concat", "FlashAttentionScore"]


def test_a_value_between_that_is_read_elsewhere_stays() -> None:
    kept = same(WRITTEN + READ + ATTENTION + "z = Neg(w0) ", "float[B,4,S,8] y, float[12,4,T,B] z")
    assert sorted(kept) == ["Concat", "FlashAttentionScore", "Neg", "ScatterND", "Transpose", "Transpose"]


LEFT = {
    "parts that meet": PARTS + "w0 = ScatterND(bt, first, at) w1 = ScatterND(w0, last, et) "
    "m = Constant<value=int64[4,1] {7,8,9,10}>() w = ScatterND(w1, m, et) ",
    "places in another order": PARTS + "w0 = ScatterND(bt, first, at) w = ScatterND(w0, turned, et) ",
    "what is below shows": PARTS + "w = ScatterND(bt, last, et) ",
    "parts that are added": PARTS + 'w0 = ScatterND(bt, first, at) w = ScatterND<reduction="add">(w0, last, et) ',
    "parts in different orders": PARTS.replace("et =", "en = ") + "et = Transpose<perm=[2,1,3,0]>(bq) "
    "w0 = ScatterND(bt, first, at) w = ScatterND(w0, last, et) ",
}


@pytest.mark.parametrize("spelling", LEFT)
def test_what_is_left_alone(spelling: str) -> None:
    inputs = INPUTS + ", float[B,4,4,T] bq"
    assert "ScatterND" in same(LEFT[spelling] + READ + ATTENTION, inputs=inputs)


def test_an_output_keeps_its_node() -> None:
    body = WRITTEN + READ + ATTENTION
    assert "ScatterND" in same(body, "float[B,4,S,8] y, float[B,4,T,12] k")
