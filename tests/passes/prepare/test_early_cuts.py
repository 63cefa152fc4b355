"""Query, key and value cut from one transposed tensor: they are cut first, and no attention has to copy them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from fa_compiler.passes import fuse
from tests.passes.running import assert_same, fused, fused_alike, parse, random_feeds, run

INPUTS = "float[B,S,96] x"
CONSTANTS = (
    "packed = Constant<value=int64[5] {0,0,3,4,8}>() back = Constant<value=int64[3] {0,0,32}>() "
    "i0 = Constant<value=int64 {0}>() i1 = Constant<value=int64 {1}>() last = Constant<value=int64 {-1}>() "
    "n0 = Constant<value=int64[1] {0}>() n1 = Constant<value=int64[1] {1}>() n2 = Constant<value=int64[1] {2}>() "
    "n3 = Constant<value=int64[1] {3}>() ones = Constant<value=int64[3] {1,1,1}>() "
    "eighth = Constant<value=float {0.125}>() "
)
TURNED = "r = Reshape(x, packed) t = Transpose<perm=[2,0,3,1,4]>(r) "
GATHERED = "q = Gather<axis=0>(t, i0) k = Gather<axis=0>(t, i1) v = Gather<axis=0>(t, last) "
SQUEEZED = "q = Squeeze(a, n0) k = Squeeze(b, n0) v = Squeeze(c, n0) "
CUTS = {
    "Gather": GATHERED,
    "Gather of a vector": "a = Gather<axis=0>(t, n0) b = Gather<axis=-5>(t, n1) c = Gather<axis=0>(t, n2) " + SQUEEZED,
    "Split": "a, b, c = Split<axis=0>(t, ones) " + SQUEEZED,
    "Slice": "a = Slice(t, n0, n1, n0) b = Slice(t, n1, n2, n0) c = Slice(t, n2, n3, n0) " + SQUEEZED,
    "each in its own way": "q = Gather<axis=0>(t, i0) b = Slice(t, n1, n2, n0) k = Squeeze(b, n0) "
    "c = Gather<axis=0>(t, n2) v = Squeeze(c, n0) ",
}
ATTENTION = (
    "qs = Mul(q, eighth) kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(qs, kt) p = Softmax<axis=-1>(s) "
    "o = MatMul(p, v) u = Transpose<perm=[0,2,1,3]>(o) y = Reshape(u, back) "
)


def model(body: str, outputs: str = "float[B,S,32] y", inputs: str = INPUTS, more: str = "") -> onnx.ModelProto:
    return parse(CONSTANTS + body, more, inputs=inputs, outputs=outputs)


def operators(proto: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in proto.graph.node if node.op_type != "Constant"]


def same(proto: onnx.ModelProto) -> list[str]:
    """The operators of the fused model, which gives what the model gives."""
    return operators(fused_alike(proto))


@pytest.mark.parametrize("cuts", CUTS)
def test_cut_before_transposed(cuts: str) -> None:
    assert same(model(TURNED + CUTS[cuts] + ATTENTION)) == ["Split", "FlashAttentionScore"]


def test_another_order_of_dimensions() -> None:
    body = TURNED.replace("[2,0,3,1,4]", "[0,3,2,1,4]") + GATHERED.replace("axis=0", "axis=2")
    assert same(model(body + ATTENTION)) == ["Split", "FlashAttentionScore"]


def test_more_than_one_reader_of_a_part() -> None:
    """A key that is an output, too, is transposed by itself."""
    proto = model(TURNED + GATHERED + ATTENTION + "z = Relu(k) ", "float[B,S,32] y, float[B,4,S,8] z")
    assert sorted(same(proto)) == ["FlashAttentionScore", "Relu", "Reshape", "Split", "Squeeze", "Transpose"]


KEPT = {
    "another reader": (TURNED + GATHERED + "z = Relu(t) ", "float[3,B,4,S,8] z"),
    "an output": (
        TURNED.replace("t =", "z =").replace("(r) ", "(r) t = Identity(z) ") + GATHERED,
        "float[3,B,4,S,8] z",
    ),
    "a cut that is an output": (TURNED + GATHERED.replace("k =", "z =") + "k = Identity(z) ", "float[B,4,S,8] z"),
    "an index of the run": (TURNED + GATHERED.replace("i1", "i"), ""),
    "halves that are turned": (
        "quarters = Constant<value=int64[6] {0,0,3,4,4,2}>() whole = Constant<value=int64[4] {0,0,0,8}>() "
        "r0 = Reshape(x, quarters) t = Transpose<perm=[5,2,0,3,1,4]>(r0) u0 = Gather<axis=0>(t, i0) "
        "w0 = Gather<axis=0>(t, i1) n = Neg(w0) tt = Concat<axis=-1>(n, u0) "
        "q = Gather<axis=0>(tt, i0) k = Gather<axis=0>(tt, i1) v = Gather<axis=0>(tt, last) ",
        "",
    ),
    "not all parts": (
        "packed4 = Constant<value=int64[5] {0,0,6,2,8}>() pairs = Constant<value=int64[5] {0,0,0,1,-1}>() "
        "r = Reshape(x, packed4) t0 = Transpose<perm=[2,0,3,1,4]>(r) t = Slice(t0, n0, n3, n0) "
        + GATHERED.replace("(t,", "(t0,")
        + "z = Relu(t) ",
        "float[3,B,2,S,8] z",
    ),
}


@pytest.mark.parametrize(("body", "more"), KEPT.values(), ids=KEPT)
def test_what_stays_transposed(body: str, more: str) -> None:
    heads = 2 if "packed4" in body else 4
    back = f"final = Constant<value=int64[3] {{0,0,{8 * heads}}}>() " + ATTENTION.replace("back", "final")
    outputs = f"float[B,S,{8 * heads}] y" + (f", {more}" if more else "")
    proto = model(body + back, outputs, more="int64 i" if "(t, i)" in body else "")
    result, _ = fused(proto)
    kept = next(node for node in result.graph.node if node.op_type == "Transpose")
    assert len(kept.attribute[0].ints) >= 5
    feeds = random_feeds(proto, **({"i": np.array(1)} if "(t, i)" in body else {}))
    for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
        assert_same(got, wanted, 1e-5)


def test_a_declined_model_stays() -> None:
    proto = model(
        TURNED + GATHERED + ATTENTION.replace("p = Softmax<axis=-1>(s)", "n = Relu(s) p = Softmax<axis=-1>(n)")
    )
    graph = ir.from_proto(proto)
    assert fuse(graph).blocks[0].status == "declined"
    assert ir.to_proto(graph) == ir.to_proto(ir.from_proto(proto))


@pytest.mark.parametrize("cut", ["Gather<axis=0>(t2, i0)", "Split<axis=0>(t2, n1)", "Slice(t2, n0, n1, n0)"])
def test_a_cut_of_a_tensor_of_unknown_rank(cut: str) -> None:
    """Beside an attention, something else cuts a transposed tensor whose number of dimensions is unknown."""
    turned = "w = Reshape(x, to) t2 = Transpose(w) "
    other = turned + f"c2 = {cut} z = ReduceSum<keepdims=0>(c2) "
    proto = model(TURNED + GATHERED + ATTENTION + other, "float[B,S,32] y, float z", more="int64[R] to")
    result, report = fused(proto)
    assert report.blocks[0].status == "fused"
    feeds = random_feeds(proto, to=np.array([-1, 1], np.int64))
    for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
        assert_same(got, wanted, 1e-5)
