"""Chains of views become one Reshape, and equal nodes are computed once, where something was fused."""

from __future__ import annotations

import onnx
import pytest

from tests.passes.around.running import assert_equal, fused, others, parse

NORM = "p = Mul(x, x) m = ReduceMean<keepdims=1>(p, last) g1 = Add(m, e) h = Sqrt(g1) n0 = Div(x, h) n = Mul(n0, w) "
NUMBERS = "int64[1] last = {-1}, int64[1] one = {1}, int64[1] two = {2}, int64[1] zero = {0}, int64[3] heads = {0,-1,4}"
NUMBERS += ", int64[1] four = {4}, int64[4] four_heads = {0,0,2,4}"
FIXED = "float[2,1,8] x"
TOKEN = "b = Reshape(a, four_heads) "


def model(body: str, outputs: str, inputs: str = "float[B,S,8] x") -> onnx.ModelProto:
    return parse(NORM + "a = Neg(n) " + body, inputs, outputs, 20, NUMBERS)


CHAINS = {
    "1 and 3": ("b = Unsqueeze(a, one) c = Reshape(b, flat) y = Neg(c)", "float[B,S,2,4] y", 1),
    "a token": (TOKEN + "c = Squeeze(b, one) d = Unsqueeze(c, two) y = Neg(d)", "float[2,2,1,4] y", 1),
    "2 and 4": (TOKEN + "t = Abs(b) c = Transpose<perm=[0,2,1,3]>(t) y = Neg(c)", "float[2,2,1,4] y", 2),
    "back to where it was": ("b = Unsqueeze(a, one) c = Squeeze(b, one) y = Neg(c)", "float[2,1,8] y", 0),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_a_chain(chain: str) -> None:
    body, outputs, left = CHAINS[chain]
    inputs = "float[B,S,8] x" if "[B" in outputs else FIXED
    proto = parse(NORM + "a = Neg(n) " + body, inputs, outputs, 20, NUMBERS + ", int64[4] flat = {-1,3,2,4}")
    result, _ = fused(proto)
    made = [op for op in others(result) if op not in ("Neg", "Abs")]
    assert made == ["Reshape"] * left
    assert_equal(proto, result)


KEPT = {
    "tokens are moved": ("b = Reshape(a, four_heads) c = Transpose<perm=[0,2,1,3]>(b) y = Neg(c)", "float[B,2,S,4] y"),
    "an inner result is read": ("b = Unsqueeze(a, one) c = Squeeze(b, one) y = Neg(c) z = Neg(b)", "float[B,S,8] y"),
    "the result is an output": ("b = Unsqueeze(a, one) y = Squeeze(b, one)", "float[B,S,8] y"),
    "two sizes that are not copied": (
        "b = Unsqueeze(a, zero) y0 = Unsqueeze(b, zero) y = Neg(y0)",
        "float[1,1,B,S,8] y",
    ),
}


@pytest.mark.parametrize("chain", KEPT)
def test_a_chain_that_stays(chain: str) -> None:
    body, outputs = KEPT[chain]
    proto = model(body, outputs + (", float[B,1,S,8] z" if "z =" in body else ""))
    result, _ = fused(proto)
    views = ("Unsqueeze", "Squeeze", "Reshape", "Transpose")
    assert [op for op in others(result) if op in views] == [op for op in others(proto) if op in views]
    assert_equal(proto, result)


CUT = "{0} = Shape({1}) {0}1 = Gather<axis=0>({0}, {2}) {0}2 = Slice(k, zero, {0}1, last) {0}3 = Add({1}, {0}2) "


def test_layers_read_one_mask() -> None:
    """The sizes are computed from other values, but they are the same formulas."""
    body = CUT.format("i", "a", "two") + "b = Neg(i3) " + CUT.format("j", "b", "two") + "y = Neg(j3)"
    proto = model(body, "float[B,S,8] y", "float[B,S,8] x, float[9] k")
    result, _ = fused(proto)
    assert others(result).count("Slice") == 1
    assert_equal(proto, result)


def test_what_only_an_equal_node_needs_may_be_equal_to_a_later_one() -> None:
    """Nothing needs the second Shape, but the third one is equal to it."""
    sizes = "i = Shape(a) i1 = Gather<axis=0>(i, two) j = Shape(n) j1 = Gather<axis=0>(j, two) k = Shape(n) "
    body = (
        "r = Expand(a, i) " + sizes + "k1 = Gather<axis=0>(k, zero) s = Concat<axis=0>(i1, j1, k1) t = Cast<to=1>(s) "
    )
    proto = model(body + "u = ReduceSum<keepdims=0>(t) y = Mul(r, u)", "float[B,S,8] y")
    result, _ = fused(proto)
    assert others(result).count("Shape") == 1
    assert_equal(proto, result)


APART = {
    "another attribute": "b = Elu<alpha=1.0>(a) c = Elu<alpha=2.0>(a) y = Add(b, c)",
    "another constant": "b = Unsqueeze(a, one) c = Unsqueeze(a, two) d = Neg(b) f = Neg(c) y = Add(d, f)",
    "a random number": "b = RandomNormalLike<seed=1.0>(a) c = RandomNormalLike<seed=1.0>(a) y = Sub(b, c)",
    "an output": "b = Neg(a) y = Neg(a)",
}


@pytest.mark.parametrize("miss", APART)
def test_nodes_that_are_not_equal(miss: str) -> None:
    outputs = "float[B,S,S,8] y" if "constant" in miss else "float[B,S,8] y"
    if miss == "an output":
        outputs += ", float[B,S,8] b"
    proto = model(APART[miss], outputs, "float[B,S,8] x" if "constant" not in miss else "float[2,2,8] x")
    result, _ = fused(proto)
    written = {"Mul", "ReduceMean", "Add", "Sqrt", "Div"}
    assert sum(op not in written for op in others(result)) == sum(op not in written for op in others(proto))


def test_constants_of_equal_bits_and_other_types_are_not_equal() -> None:
    """-1 in four bits with a sign has the bits of 15 without one."""
    body = "d = DequantizeLinear(i, scale) e1 = DequantizeLinear(j, scale) y0 = Add(n, d) y = Sub(y0, e1)"
    proto = parse(NORM + body, "float[B,S,8] x", "float[B,S,8] y", 21, NUMBERS + ", float scale = {0.5}")
    for name, kind in (("i", onnx.TensorProto.INT4), ("j", onnx.TensorProto.UINT4)):
        proto.graph.initializer.append(onnx.TensorProto(name=name, data_type=kind, dims=[8], raw_data=b"\xff" * 4))
    result, _ = fused(proto)
    assert others(result).count("DequantizeLinear") == 2
    assert_equal(proto, result)


def test_nodes_that_give_other_results_are_not_equal() -> None:
    """The later one gives the mean, which the first one leaves out."""
    body = "t, r1 = LayerNormalization(a, w, w) u, v, r2 = LayerNormalization(a, w, w) y0 = Add(t, u) "
    proto = model(body + "y1 = Add(y0, v) y2 = Add(y1, r1) y = Add(y2, r2)", "float[B,S,8] y")
    first = next(node for node in proto.graph.node if node.op_type == "LayerNormalization")
    first.output.insert(1, "")
    result, _ = fused(proto)
    assert others(result).count("LayerNormalization") == 2
    assert_equal(proto, result)
