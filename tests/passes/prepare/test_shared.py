"""Attentions that share scores or probabilities: both are fused, or neither."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from fa_compiler.passes import Report
from tests.passes.running import PRODUCT_QK, Array, assert_same, fused, parse, random_feeds, run

INPUTS = "float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v, float[B,4,S,8] w"
OUTPUTS = "float[B,4,S,8] y, float[B,4,T,8] z"
BACK = "st = Transpose<perm=[0,1,3,2]>(X) pt = Softmax<axis=-1>(st) z = MatMul(pt, w) "
OVER_ROWS = "pr = Softmax<axis=2>(X) prt = Transpose<perm=[0,1,3,2]>(pr) z = MatMul(prt, w) "
THERE = "p = Softmax<axis=-1>(X) y = MatMul(p, v) "
BOTH = "float[B,4,T,8] v2"


def ops(proto: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in proto.graph.node]


def same(proto: onnx.ModelProto, **given: Array) -> tuple[onnx.ModelProto, Report]:
    result, report = fused(proto)
    feeds = random_feeds(proto, **given)
    for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
        assert_same(got, wanted, 1e-5)
    return result, report


@pytest.mark.parametrize("back", [BACK, OVER_ROWS], ids=["transposed", "over rows"])
def test_attention_in_both_directions(back: str) -> None:
    """As LightGlue and LookViT write it."""
    result, report = same(parse(PRODUCT_QK + (THERE + back).replace("X", "s"), inputs=INPUTS, outputs=OUTPUTS))
    assert [block.status for block in report.blocks] == ["fused", "fused"]
    assert ops(result).count("FlashAttentionScore") == 2 and not {"Softmax", "MatMul"} & set(ops(result))


def test_attention_in_both_directions_under_one_mask() -> None:
    body = PRODUCT_QK + "f = Constant<value=float {-inf}>() x = Where(m, s, f) " + (THERE + BACK).replace("X", "x")
    mask = np.random.default_rng(0).random((2, 1, 5, 5)) < 0.7
    mask[0, 0, :2] = mask[0, 0, :, :2] = False  # rows of either direction without keys
    proto = parse(body, inputs=INPUTS.replace("T", "S") + ", bool[B,1,S,S] m", outputs=OUTPUTS.replace("T", "S"))
    _, report = same(proto, m=mask)
    assert report.count("fused") == 2


@pytest.mark.parametrize("copies", [2, 3])
def test_one_distribution_over_several_values(copies: int) -> None:
    """Halves of the values. One product reads the distribution through a Cast alone, so the values are not joined."""
    body = PRODUCT_QK + "p = Softmax<axis=-1>(s) c = Cast<to=1>(p) y0 = MatMul(c, v) y1 = MatMul(p, v2) "
    body += "y = Concat<axis=-1>(y0, y1) " if copies == 2 else "y2 = MatMul(p, k) y = Concat<axis=-1>(y0, y1, y2) "
    proto = parse(body, BOTH, outputs=f"float[B,4,S,{8 * copies}] y")
    result, report = same(proto)
    (block,) = report.blocks
    assert block.status == "fused" and any("computed by itself" in note for note in report.notes)
    assert ops(result).count("FlashAttentionScore") == copies and "Softmax" not in ops(result)


def test_the_first_attention_feeds_the_second() -> None:
    body = PRODUCT_QK + "p = Softmax<axis=-1>(s) y0 = MatMul(p, v) w2 = Add(y0, w) "
    body += "st = Transpose<perm=[0,1,3,2]>(s) pt = Softmax<axis=-1>(st) z = MatMul(pt, w2) y = Neg(y0)"
    _, report = same(parse(body, inputs=INPUTS, outputs=OUTPUTS))
    assert report.count("fused") == 2


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ("z = ReduceSum<keepdims=0>(s, last) ", "scores_are_output"),
        (
            "t = Relu(s) pt = Softmax<axis=-1>(t) z0 = MatMul(pt, v) z = ReduceSum<keepdims=0>(z0, last) ",
            "scores_are_output",
        ),
        (BACK.replace("X", "s").replace("z =", "z0 =") + "z = ReduceSum<keepdims=0>(pt, last) ", "scores_are_output"),
        ("z0 = Relu(p) z = ReduceSum<keepdims=0>(z0, last) ", "probabilities_are_output"),
    ],
    ids=["scores", "rectified", "other probabilities", "probabilities"],
)
def test_one_that_cannot_be_fused_keeps_all(more: str, code: str) -> None:
    body = "last = Constant<value=int64[1] {-1}>() " + PRODUCT_QK + THERE.replace("X", "s") + more
    outputs = "float[B,4,S,8] y, float[a,b,c] z"
    result, report = same(parse(body, inputs=INPUTS, outputs=outputs))
    assert report.count("fused") == 0 and report.blocks[0].code == code
    assert "FlashAttentionScore" not in ops(result)


def test_a_product_that_sums_over_the_rows_is_a_gradient() -> None:
    """That of the values, whatever is multiplied."""
    body = PRODUCT_QK + THERE.replace("X", "s")
    body += "pt = Transpose<perm=[0,1,3,2]>(p) z = MatMul(pt, w) "
    _, report = same(parse(body, inputs=INPUTS, outputs=OUTPUTS))
    assert [(block.kind, block.status) for block in report.blocks] == [("forward", "fused"), ("backward", "fused")]


def test_scores_that_a_second_layer_adds_to_its_own() -> None:
    """RealFormer: when the second layer is fused, with two products, nothing reads the scores of the first any more.
    One run sees that. A third layer keeps them."""
    layer = "kt{0} = Transpose<perm=[0,1,3,2]>(k{0}) s{0} = MatMul({1}, kt{0}) {2} p{0} = Softmax<axis=-1>(x{0}) "
    layer += "{3} = MatMul(p{0}, v) "
    first = layer.format(1, "q", "x1 = Identity(s1)", "y1")
    last = layer.format(2, "y1", "x2 = Add(s2, x1)", "y")
    inputs = "float[B,4,S,8] q, float[B,4,T,8] k1, float[B,4,T,8] k2, float[B,4,T,8] v"
    result, report = same(parse(first + last, inputs=inputs))
    assert [block.status for block in report.blocks] == ["fused", "fused"] and "Softmax" not in ops(result)
    kept = parse(first + last, inputs=inputs, outputs="float[B,4,S,8] y, float[B,4,S,T] x1")
    assert [block.code for block in same(kept)[1].blocks] == ["scores_are_output", None]
    middle = layer.format(2, "y1", "x2 = Add(s2, x1)", "y2")
    three = first + middle + layer.format(3, "y2", "x3 = Add(s3, x2)", "y")
    _, report = same(parse(three, "float[B,4,T,8] k3", inputs=inputs))
    assert [block.code for block in report.blocks] == ["scores_are_output", "scores_are_output", None]
