"""Products and softmaxes in their spellings: what is read from a node is what ONNX Runtime computes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from fa_compiler.passes.ir.nodes import remember_versions
from fa_compiler.passes.layout.contraction import Contraction, contraction
from fa_compiler.passes.matching.softmax import SoftmaxAnchor, anchors
from fa_compiler.passes.values.shapes import ShapeInfo, analyse
from tests.passes.running import random_feeds, run


def prepared(body: str, inputs: str, opset: int = 17) -> tuple[onnx.ModelProto, ir.Model, ShapeInfo]:
    """A model that gives z, whatever shape that has."""
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}, "com.microsoft": 1]> g ({inputs}) => (float z) {{ {body} }}'
    )
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    model = ir.from_proto(proto)
    remember_versions(model)
    return proto, model, analyse(model)


def product(body: str, x: str, y: str, more: str = "") -> tuple[onnx.ModelProto, Contraction | None]:
    """The product that makes z."""
    proto, model, info = prepared(body, f"float[{x}] x, float[{y}] y{more}")
    node = next(node for node in model.graph if node.outputs[0].name == "z")
    return proto, contraction(node, info)


@pytest.mark.parametrize(
    ("body", "x", "y"),
    [
        ("z = MatMul(x, y)", "3,4", "4,5"),
        ("z = MatMul(x, y)", "2,3,4", "4,5"),
        ("z = MatMul(x, y)", "3,4", "2,4,5"),
        ("z = MatMul(x, y)", "2,1,3,4", "6,4,5"),
        ("z = MatMul(x, y)", "6,3,4", "2,1,4,5"),
        ("z = MatMul(x, y)", "2,6,3,4", "2,6,4,5"),
        ("z = MatMul(x, y)", "4", "4,5"),
        ("z = MatMul(x, y)", "4", "2,6,4,5"),
        ("z = MatMul(x, y)", "3,4", "4"),
        ("z = MatMul(x, y)", "2,6,3,4", "4"),
        ("z = MatMul(x, y)", "4", "4"),
        ("z = Gemm(x, y)", "3,4", "4,5"),
        ("z = Gemm<transA=1>(x, y)", "4,3", "4,5"),
        ("z = Gemm<transB=1, alpha=0.5>(x, y)", "3,4", "5,4"),
        ("c = Constant<value=float[1] {7.0}>() z = Gemm<alpha=2.0, beta=0.0>(x, y, c)", "3,4", "4,5"),
        ("z = com.microsoft.FusedMatMul(x, y)", "2,3,4", "2,4,5"),
        ("z = com.microsoft.FusedMatMul<transB=1, alpha=0.25>(x, y)", "2,6,3,4", "2,6,5,4"),
        ("z = com.microsoft.FusedMatMul<transA=1>(x, y)", "2,4,3", "2,4,5"),
        ('z = Einsum<equation="mk,kn->mn">(x, y)', "3,4", "4,5"),
        ('z = Einsum<equation="mk,kn->nm">(x, y)', "3,4", "4,5"),
        ('z = Einsum<equation="zk,ka">(x, y)', "3,4", "4,5"),
        ('z = Einsum<equation="bqhd,bkhd->bhqk">(x, y)', "2,3,6,4", "2,5,6,4"),
        ('z = Einsum<equation=" b q h d , b k h d -> b h q k ">(x, y)', "2,3,6,4", "2,5,6,4"),
        ('z = Einsum<equation="bqhd,bkd->bhqk">(x, y)', "2,3,6,4", "2,5,4"),
        ('z = Einsum<equation="bhqk,bkhd->bqhd">(x, y)', "2,6,3,5", "2,5,6,4"),
        ('z = Einsum<equation="Bqd,Bkd->Bqk">(x, y)', "2,3,4", "2,5,4"),
        ('z = Einsum<equation="...qhd,...khd->...hqk">(x, y)', "2,7,3,6,4", "2,7,5,6,4"),
        ('z = Einsum<equation="...qd,...kd->...qk">(x, y)', "2,6,3,4", "2,6,5,4"),
        ('z = Einsum<equation="...qd,kd->...qk">(x, y)', "2,3,4", "5,4"),
        ('z = Einsum<equation="...zk,...ka">(x, y)', "2,3,4", "2,4,5"),
        ('z = Einsum<equation="q...d,k...d->...qk">(x, y)', "3,6,4", "5,6,4"),
        ('z = Einsum<equation="...qd,...kd->...qk">(x, y)', "3,4", "5,4"),
    ],
)
def test_a_product_is_what_it_is_read_as(body: str, x: str, y: str) -> None:
    proto, found = product(body, x, y)
    assert found is not None
    feeds = random_feeds(proto)
    names = {value.name: feeds[value.name or ""].astype(np.float64) for value in found.operands}
    letters = {label: chr(ord("a") + index) for index, label in enumerate(dict.fromkeys(sum(found.labels, ())))}
    sides = ["".join(letters[label] for label in labels) for labels in found.labels]
    equation = f"{sides[0]},{sides[1]}->{''.join(letters[label] for label in found.out)}"
    wanted = found.factor * np.einsum(equation, *names.values())
    (got,) = run(proto, feeds)
    # A sum of at most 6 products in float32.
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)
    assert len(found.summed) == 1


@pytest.mark.parametrize(
    ("body", "x", "y"),
    [
        ("z = com.microsoft.FusedMatMul(x, y)", "3,4", "4"),
        ("c = Constant<value=float[5] {1.0,1.0,1.0,1.0,1.0}>() z = Gemm(x, y, c)", "3,4", "4,5"),
        ("c = Constant<value=float[1] {1.0}>() z = Gemm<beta=2.0>(x, y, c)", "3,4", "4,5"),
        ('z = Einsum<equation="...mk,...kn->...mn">(x, y)', "2,6,3,4", "6,4,5"),
        ('z = Einsum<equation="...mk,...kn->mn">(x, y)', "2,3,4", "2,4,5"),
        ('z = Einsum<equation="mk,...kn->...mn">(x, y)', "2,3,4", "2,4,5"),
        ('z = Einsum<equation="mm,mn->mn">(x, y)', "4,4", "4,5"),
        ('z = Einsum<equation="mk,kn->m">(x, y)', "3,4", "4,5"),
        ('z = Einsum<equation="mkj,kjn->mn">(x, y)', "3,4,2", "4,2,5"),
        ('z = Einsum<equation="m,n->mn">(x, y)', "3", "5"),
        ('z = Einsum<equation="mk->km">(x)', "3,4", "4,5"),
        ("z = Mul(x, y)", "3,4", "3,4"),
    ],
)
def test_what_is_no_product(body: str, x: str, y: str) -> None:
    assert product(body, x, y)[1] is None


def test_a_product_of_unknown_rank() -> None:
    _, model, info = prepared(
        "u = own.Unknown(x) z = MatMul(u, y)".replace("own.", "com.microsoft."), "float[3,4] x, float[4,5] y"
    )
    assert contraction(list(model.graph)[-1], info) is None


# -- softmaxes --------------------------------------------------------------------------------------

DECOMPOSED = (
    "m = ReduceMax<axes=[{0}], keepdims=1>(x) d = Sub(x, m) e = Exp(d) a = Constant<value=int64[1] {{{1}}}>() "
    "t = ReduceSum<keepdims=1>(e, a) z = Div(e, t)"
)


def softmaxes(body: str, opset: int = 17, x: str = "B,4,S,T") -> list[SoftmaxAnchor]:
    """The anchors of a graph with one input."""
    _, model, info = prepared(body, f"float[{x}] x", opset)
    return list(anchors(model.graph, info))


@pytest.mark.parametrize(
    ("body", "opset", "axis"),
    [
        ("z = Softmax(x)", 13, 3),
        ("z = Softmax<axis=-1>(x)", 13, 3),
        ("z = Softmax<axis=3>(x)", 13, 3),
        ("z = Softmax<axis=-3>(x)", 13, 1),
        ("z = Softmax<axis=0>(x)", 13, 0),
        ("z = Softmax<axis=3>(x)", 12, 3),
        ("z = Softmax<axis=-1>(x)", 12, 3),
        # Opset 12 and older flatten everything from the axis on.
        ("z = Softmax(x)", 12, None),
        ("z = Softmax<axis=2>(x)", 12, None),
        (DECOMPOSED.format(-1, -1), 17, 3),
        (DECOMPOSED.format(3, -1), 17, 3),
        (DECOMPOSED.format(1, 1), 17, 1),
        (DECOMPOSED.format(-2, 2), 17, 2),
    ],
)
def test_the_axis_of_a_softmax(body: str, opset: int, axis: int | None) -> None:
    (anchor,) = softmaxes(body, opset)
    assert anchor.axis == axis
    assert anchor.scores.name == "x"
    assert anchor.output.name == "z"
    assert anchor.node.outputs[0] is anchor.output


@pytest.mark.parametrize(
    "body",
    [
        DECOMPOSED.format(-1, -2),
        DECOMPOSED.format("2, 3", -1),
        DECOMPOSED.format(-1, -1).replace("Sub(x, m)", "Sub(m, x)"),
        DECOMPOSED.format(-1, -1).replace("Sub(x, m)", "Identity(x)"),
        DECOMPOSED.format(-1, -1).replace("Div(e, t)", "Div(t, e)"),
        DECOMPOSED.format(-1, -1).replace("(e, a)", "(d, a)"),
        DECOMPOSED.format(-1, -1).replace("ReduceMax", "ReduceMin"),
        DECOMPOSED.format(-1, -1).replace("ReduceMax<axes=[-1], keepdims=1>(x)", "ReduceMax<keepdims=1>(x)"),
        "z = LogSoftmax(x)",
        "z = com.microsoft.QuickGelu(x)",
    ],
)
def test_what_is_no_softmax(body: str) -> None:
    """Exponentials over their sum alone are an anchor only to be declined: they overflow where Softmax does not."""
    assert not [anchor for anchor in softmaxes(body) if not getattr(anchor, "overflows", False)]


def test_several_softmaxes_in_order() -> None:
    found = softmaxes("p = Softmax(x) " + DECOMPOSED.format(-1, -1).replace("z =", "q =") + " z = Softmax(q)")
    assert [anchor.output.name for anchor in found] == ["p", "q", "z"]
