"""Heads along several dimensions: products that sum over more than one, and values with more than one of their own."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from fa_compiler.passes import Block
from tests.passes.running import assert_same, fused, parse, random_feeds, run

TIED = "float[3,S,B,4,8] q, float[3,T,B,4,8] k, float[3,T,B,4,8] v"
SOFTMAX = "c = Constant<value=float {0.2}>() x = Mul(s, c) p = Softmax<axis=-1>(x) "
PLAIN = "float[B,4,S,8] q, float[B,4,T,8] k"


def block_of(proto: onnx.ModelProto) -> tuple[Block, list[str]]:
    """The only block and what is left, after the outputs were compared."""
    result, report = fused(proto)
    feeds = random_feeds(proto)
    for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
        assert np.isfinite(wanted).all()
        assert_same(got, wanted, 1e-5)
    (block,) = report.blocks
    return block, [node.op_type for node in result.graph.node]


@pytest.mark.parametrize(
    ("inputs", "products", "output"),
    [
        (TIED, ("rinhd,rjnhd->hnij", "hnij,rjnhd->rinhd"), "float[3,S,B,4,8] y"),
        (
            "float[B,4,S,3,2] q, float[B,4,T,2,3] k, float[B,4,T,8] v",
            ("bhixy,bhjyx->bhij", "bhij,bhjd->bhid"),
            "float[B,4,S,8] y",
        ),
        (
            "float[3,B,4,S,2] q, float[B,4,2,T,3] k, float[B,4,T,8] v",
            ("xbhiy,bhyjx->bhij", "bhij,bhjd->bhid"),
            "float[B,4,S,8] y",
        ),
        (f"{PLAIN}, float[3,B,4,T,2] v", ("bhid,bhjd->bhij", "bhij,xbhjy->yibxh"), "float[2,S,B,3,4] y"),
    ],
    ids=["tied rows", "crossed", "apart", "values"],
)
def test_a_head_of_several_dimensions(inputs: str, products: tuple[str, str], output: str) -> None:
    """The first is row attention of an MSA transformer: one distribution for all rows of an alignment."""
    scores, values = (f'Einsum<equation="{each}">' for each in products)
    body = f"s = {scores}(q, k) {SOFTMAX} y = {values}(p, v)"
    block, left = block_of(parse(body, inputs=inputs, outputs=output))
    assert block.status == "fused" and "Einsum" not in left


def test_a_head_of_open_size() -> None:
    inputs = TIED.replace("[3,", "[R,")
    body = f's = Einsum<equation="rinhd,rjnhd->hnij">(q, k) {SOFTMAX} y = Einsum<equation="hnij,rjnhd->rinhd">(p, v)'
    _, report = fused(parse(body, inputs=inputs, outputs="float[R,S,B,4,8] y"))
    assert [block.code for block in report.blocks] == ["shape"]


def test_values_of_each_row_are_no_attentions() -> None:
    """As the pair representation in invariant point attention: the product runs along the rows of both."""
    inputs = "float[B,4,S,8] q, float[B,4,S,8] k, float[B,S,S,2] v"
    body = f's = Einsum<equation="bhid,bhjd->bhij">(q, k) {SOFTMAX} y = Einsum<equation="bhij,bijd->bihd">(p, v)'
    block, _ = block_of(parse(body, inputs=inputs, outputs="float[B,S,4,2] y"))
    assert block.code == "shape"


@pytest.mark.parametrize("opset", [13, 17])
def test_a_value_of_no_size(opset: int) -> None:
    """Sizes of the result that are known to be 0 copy no dimension of it."""
    body = "kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) p = Softmax<axis=-1>(s) o = MatMul(p, v) "
    body += "t = Transpose<perm=[2,0,1,3]>(o) to = Constant<value=int64[3] {0,0,-1}>() y = Reshape(t, to) "
    inputs = "float[2,6,3,4] q, float[2,6,9,4] k, float[2,6,9,0] v"
    proto = parse(body, inputs=inputs, outputs="float[3,2,0] y", opset=opset)
    block, _ = block_of(proto)
    assert block.status == "fused"
