"""Softmaxes in spellings that are not proven to be one: none is passed over in silence, and nothing else is named."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from fa_compiler.passes import fuse
from tests.passes.running import PRODUCT_PV, PRODUCT_QK, fused, parse

NUMBERS = (
    "last = Constant<value=int64[1] {-1}>() two = Constant<value=float {2.0}>() half = Constant<value=float {0.5}>() "
    "minus = Constant<value=float {-1.0}>() rows = Constant<value=int64[1] {2}>() "
)
EXPONENTIALS = "n = ReduceMax<axes=[-1], keepdims=1>(s) d = Sub(s, n) e = Exp(d) "
TOTAL = EXPONENTIALS + "t = ReduceSum<keepdims=1>(e, last) "
LOGARITHM = "l = ReduceLogSumExp<axes=[-1], keepdims=1>(s) "

SPELLINGS = {
    "half of one": TOTAL + "r = Div(half, t) p = Mul(e, r)",
    "of another total": TOTAL + "u = Mul(t, two) p = Div(e, u)",
    "of a mean": EXPONENTIALS + "t = ReduceMean<axes=[-1], keepdims=1>(e) p = Div(e, t)",
    "of a sum by a product": EXPONENTIALS + "one = Constant<value=int64[1] {1}>() f = Constant<value_float=1.0>() "
    "sh = Shape<start=3>(s) w = Concat<axis=0>(sh, one) o = Expand(f, w) t = MatMul(e, o) p = Div(e, t)",
    "of a sum by Einsum": EXPONENTIALS + 'u = Einsum<equation="bhij->bhi">(e) t = Unsqueeze(u, last) p = Div(e, t)',
    "of exponentials computed twice": EXPONENTIALS + "f = Exp(d) t = ReduceSum<keepdims=1>(f, last) p = Div(e, t)",
    "of a running sum": EXPONENTIALS + "c = CumSum(e, axis) u = Gather<axis=-1>(c, axis) t = Unsqueeze(u, last) "
    "p = Div(e, t)",
    "transposed in between": EXPONENTIALS + "f = Transpose<perm=[0,1,3,2]>(e) t = ReduceSum<keepdims=1>(f, rows) "
    "g = Div(f, t) p = Transpose<perm=[0,1,3,2]>(g)",
    "by LpNormalization": EXPONENTIALS + "p = LpNormalization<p=1, axis=-1>(e)",
    "divided by the exponential of a logarithm": LOGARITHM + "e = Exp(s) t = Exp(l) p = Div(e, t)",
    "times the exponential of a logarithm": LOGARITHM + "e = Exp(s) m = Neg(l) t = Exp(m) p = Mul(e, t)",
    "less the logarithm of other scores": "s2 = Mul(s, two) "
    + LOGARITHM.replace("(s)", "(s2)")
    + "d = Sub(s, l) p = Exp(d)",
    "less half a logarithm": LOGARITHM + "m = Mul(l, half) d = Sub(s, m) p = Exp(d)",
    "with a sink among the exponentials": EXPONENTIALS + "m = Neg(n) f = Exp(m) g = Concat<axis=-1>(e, f) "
    "t = ReduceSum<keepdims=1>(g, last) p = Div(e, t)",
}


def model(body: str, outputs: str = "float[B,4,S,8] y") -> onnx.ModelProto:
    number = "axis = Constant<value=int64 {-1}>() "
    return parse(NUMBERS + number + PRODUCT_QK + body + " ", outputs=outputs)


@pytest.mark.parametrize("body", SPELLINGS.values(), ids=SPELLINGS)
def test_other_spellings_are_named(body: str) -> None:
    (block,) = fused(model(body + " " + PRODUCT_PV))[1].blocks
    assert (block.status, block.code, block.hint) == ("declined", "softmax_spelling", "write it as a Softmax")
    (block,) = fused(model(body, "float[B,4,S,T] p"))[1].blocks
    assert block.code == "not_attention"


def test_other_spellings_of_unknown_shape_are_named() -> None:
    """Whether a sum is that of a row can then not be told."""
    body = "r = Reshape(q, shape) kt = Transpose(k) s = MatMul(r, kt) " + TOTAL + "p = Div(e, t) "
    proto = parse(NUMBERS + body + PRODUCT_PV, "int64[R] shape", outputs="float y")
    (block,) = fused(proto)[1].blocks
    assert block.code == "softmax_spelling"


def test_a_sum_of_a_scalar_is_no_sum_of_a_row() -> None:
    """A scalar has no axes. ONNX Runtime refuses the model where it infers the shape."""
    proto = model(TOTAL + "p = Div(e, t) " + PRODUCT_PV)
    next(node for node in proto.graph.node if node.op_type == "Exp").input[0] = "minus"
    assert not fuse(ir.from_proto(proto)).count("fused")


STEP = (
    "m2 = ReduceMax<axes=[-1], keepdims=1>(s) m1 = Max(m0, m2) d = Sub(s, m1) e = Exp(d) c = Sub(m0, m1) a = Exp(c) "
    "t = ReduceSum<keepdims=1>(e, last) u = Mul(l0, a) l1 = Add(u, t) o = MatMul(e, v) w = Mul(o0, a) o1 = Add(w, o) "
)


@pytest.mark.parametrize("end", ["y = Div(o1, l1) ", "y = Identity(o1) z = Identity(l1) "], ids=["divided", "a part"])
def test_an_online_softmax_is_named(end: str) -> None:
    """One step of FlashAttention written out, as in the body of a Loop; its exponentials are one softmax."""
    parts = "float[B,4,S,1] m0, float[B,4,S,1] l0, float[B,4,S,8] o0"
    outputs = "float[B,4,S,8] y" + (", float[B,4,S,1] z" if "z =" in end else "")
    (block,) = fused(parse(NUMBERS + PRODUCT_QK + STEP + end, parts, outputs=outputs))[1].blocks
    assert block.code == "softmax_spelling"


OTHERS = {
    "a sigmoid": "n = Neg(s) e = Exp(n) t = Add(e, two) p = Div(two, t)",
    "a logarithm alone": LOGARITHM + "p = Sub(s, l)",
    "exponentials over another sum": TOTAL + "u = ReduceSum<keepdims=1>(s, last) p = Div(e, u)",
    "exponentials by their norm": EXPONENTIALS + "t = ReduceL2<axes=[-1], keepdims=1>(e) p = Div(e, t)",
    "standardised exponentials": "e = Exp(s) m = ReduceMean<axes=[-1]>(e) c = Sub(e, m) c2 = Pow(c, two) "
    "v2 = ReduceMean<axes=[-1]>(c2) sd = Sqrt(v2) p = Div(c, sd)",
    "a decay": "e = Exp(s) f = Mul(e, two) t = ReduceSum<keepdims=1>(f, last) p = Add(f, t)",
    "a gradient of powers": "e = Pow(s, two) t = ReduceSum<keepdims=1>(e, last) p = Div(e, t)",
}


@pytest.mark.parametrize("body", OTHERS.values(), ids=OTHERS)
def test_what_is_no_softmax_is_not_named(body: str) -> None:
    assert not fused(model(body + " " + PRODUCT_PV))[1].blocks


def test_probabilities_computed_again_are_named() -> None:
    """As a gradient written by hand does it: from scores computed once more, and the logarithm that was kept."""
    again = "s3 = Mul(s, half) r = Sub(s3, l) z = Exp(r) "
    proto = model(
        TOTAL + "g = Log(t) l = Add(g, n) c = Sub(s, l) p = Exp(c) " + PRODUCT_PV + again + "x = MatMul(z, v)",
        "float[B,4,S,8] y, float[B,4,S,8] x",
    )
    assert [block.code for block in fused(proto)[1].blocks] == ["scores_are_output", "softmax_spelling"]


def test_the_gradient_of_a_softmax_is_no_other_one() -> None:
    """It divides the same exponentials once more."""
    more = "r = Div(s, t) f = Mul(e, r) u = Mul(t, t) g = Div(f, u) z = ReduceSum<keepdims=1>(g, last) "
    proto = model(TOTAL + "p = Div(e, t) " + PRODUCT_PV + more, "float[B,4,S,8] y, float[B,4,S,1] z")
    assert len(fused(proto)[1].blocks) == 1
