"""Weighted sums of probabilities, or with any tensor, also divided by the sums of their rows (ConViT)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_compiler.passes import Report
from fa_compiler.passes.answer.options import Target
from tests.examples import examples
from tests.passes.running import PRODUCT_QK, SOFTMAX, Array, assert_same, fused, parse, random_feeds, run

INPUTS = "float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v, float[1,4,1,1] w, float[B,4,S,T] r"
ONE = "one = Constant<value=float {1}>() keys = Constant<value=int64[1] {-1}>() "
CONTENT = ONE + PRODUCT_QK + SOFTMAX.format("s")
POSITIONS = CONTENT + "p2 = Softmax<axis=-1>(r) "
GATE = "g = Sigmoid(w) h = Sub(one, g) "
ADDED = POSITIONS + GATE + "a = Mul(h, p) b = Mul(g, p2) d = Add(a, b) "
ROW_SUM = "sum = ReduceSum<keepdims=1>(d, keys) n = Div(d, sum) "
DROPPED = "sum = ReduceSum<keepdims=0>(d, keys) total = Unsqueeze(sum, keys) n = Div(d, total) "
OF_SUM = "y = MatMul(n, v) "
FACTORS = (
    "g = Constant<value=float[1,4,1,1] {0.5,0.25,0.1,0.9}>() h = Constant<value=float[1,4,1,1] {0.5,0.75,0.9,0.1}>() "
)
REST = "lift = Constant<value=float {0.25}>() x = Sigmoid(r) c = Mul(lift, p) d = Add(x, c) "
SPELLINGS = {
    "a sum": ADDED + "y = MatMul(d, v) ",
    "a sum that is divided by 1": ADDED + ROW_SUM + OF_SUM,
    "the sum of a row by two nodes": ADDED + DROPPED + OF_SUM,
    "the gate is computed twice": ADDED.replace("Sub(one, g)", "Sub(one, g2)").replace("h = ", "g2 = Sigmoid(w) h = ")
    + ROW_SUM
    + OF_SUM,
    "the sum of the factors is not 1": ADDED.replace("h = Sub(one, g)", "h = Add(one, g)") + ROW_SUM + OF_SUM,
    "constant factors": ADDED.replace(GATE, FACTORS) + ROW_SUM + OF_SUM,
    "one factor": ADDED.replace("Add(a, b)", "Add(a, p2)") + ROW_SUM + OF_SUM,
    "a rest": CONTENT + "d = Add(p, r) y = MatMul(d, v) ",
    "less than a rest": CONTENT + "d = Sub(r, p) y = MatMul(d, v) ",
    "a rest that is divided": CONTENT + REST + ROW_SUM + OF_SUM,
    "a rest of one row": CONTENT + "x = ReduceMax<axes=[2]>(r) d = Add(p, x) y = MatMul(d, v) ",
}
DIVIDED = [
    SPELLINGS[name]
    for name in ("the sum of the factors is not 1", "constant factors", "one factor", "a rest that is divided")
]


def attention(body: str, kind: str = "float", opset: int = 17) -> onnx.ModelProto:
    inputs = INPUTS.replace("float[", f"{kind}[")
    return parse(body, inputs=inputs, outputs=f"{kind}[B,4,S,8] y", opset=opset)


def same(proto: onnx.ModelProto, feeds: Mapping[str, Array], *assume: str) -> tuple[set[str], Report]:
    """Compare before and after. Returns the operators after it, and the report."""
    result, report = fused(proto, assume=assume)
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 2e-5)
    return {node.op_type for node in result.graph.node}, report


@pytest.mark.parametrize("body", SPELLINGS.values(), ids=SPELLINGS)
def test_spellings(body: str) -> None:
    """The attention to the content is fused. That to positions, whose scores are no product, is none."""
    proto = attention(body)
    ops, report = same(proto, random_feeds(proto), "finite-scores")
    assert report.blocks[0].status == "fused", report.blocks[0].reason
    assert {block.status for block in report.blocks[1:]} <= {"not_attention", "declined"}
    assert report.blocks[0].assumed == ("finite-scores",)
    assert ("Div" in ops) == (body in DIVIDED)
    assert fused(proto, "ascend")[1].blocks[0].status == "fused"


@pytest.mark.parametrize("body", [SPELLINGS["a sum that is divided by 1"], SPELLINGS["a rest that is divided"]])
def test_infinite_values_need_an_assumption(body: str) -> None:
    """A probability of 0 and one above 0 give inf where they are added first, and NaN where the products are."""
    proto = attention(body)
    _, report = same(proto, random_feeds(proto, v=np.full((2, 4, 6, 8), np.inf, np.float32)))
    assert report.count("fused") == 0 and "a sum of probabilities" in (report.blocks[0].reason or "")
    assert "finite-scores" in (report.blocks[0].hint or "")


ROWS = "rows = Constant<value=int64[1] {2}>() " + ROW_SUM.replace("(d, keys)", "(d, rows)")
MAXIMUM = ROW_SUM.replace("ReduceSum<keepdims=1>(d, keys)", "ReduceMax<axes=[-1]>(d)")
DIVISOR = ADDED.replace("Mul(h, p)", "Div(p, h2)").replace("a = ", "h2 = Add(one, g) a = ")
KEPT = {
    "factors of any sign": (ADDED.replace("Sigmoid(w)", "Tanh(w)") + ROW_SUM + OF_SUM, "positive"),
    "a rest of any sign": (CONTENT + "d = Add(p, r) " + ROW_SUM + OF_SUM, "positive"),
    "a difference": (ADDED.replace("Add(a, b)", "Sub(a, b)") + ROW_SUM + OF_SUM, "positive"),
    "factors near 0": (ADDED.replace("Sub(one, g)", "Mul(g, g)") + ROW_SUM + OF_SUM, "positive"),
    "another softmax along the rows": (ADDED.replace("axis=-1>(r)", "axis=-2>(r)") + ROW_SUM + OF_SUM, "positive"),
    "a divisor": (DIVISOR + ROW_SUM + OF_SUM, ""),
    "the maximum of a row": (ADDED + MAXIMUM + OF_SUM, ""),
    "the sum of a column": (ADDED + ROWS + OF_SUM, ""),
    "the sum is read, too": (ADDED + ROW_SUM + "y0 = MatMul(n, v) y = Add(y0, sum) ", ""),
}


@pytest.mark.parametrize(("body", "reason"), KEPT.values(), ids=KEPT)
def test_what_stays_as_it_is(body: str, reason: str) -> None:
    proto = attention(body)
    _, report = same(proto, random_feeds(proto), "finite-scores")
    assert report.count("fused") == 0
    assert reason in (report.blocks[0].reason or "")


def test_the_culprit_is_a_node_of_the_model() -> None:
    """One softmax is an attention. The other one, along the rows, is declined at a product that is no more there."""
    body = SPELLINGS["a sum"].replace("p2 = Softmax<axis=-1>(r)", "s2 = MatMul(q, kt) p2 = Softmax<axis=-2>(s2)")
    proto = attention(body)
    _, report = same(proto, random_feeds(proto), "finite-scores")
    assert sorted(block.status for block in report.blocks) == ["declined", "fused"]
    names = {name for node in proto.graph.node for name in (node.name, *node.output)}
    assert {block.culprit for block in report.blocks if block.status == "declined"} <= names


@pytest.mark.parametrize(
    ("body", "fuses"),
    [
        (SPELLINGS["a sum that is divided by 1"], True),
        (SPELLINGS["the sum of the factors is not 1"], False),
        (SPELLINGS["one factor"], False),
        (SPELLINGS["a rest"], False),
    ],
)
def test_float16(body: str, fuses: bool) -> None:
    """Products that are added may overflow where their sum, or what it is divided by, does not."""
    body = body.replace(
        "one = Constant<value=float {1}>()", "of32 = Constant<value=float {1}>() one = Cast<to=10>(of32)"
    )
    (block, *_) = fused(attention(body, "float16"), assume=["finite-scores"])[1].blocks
    assert (block.status == "fused") == fuses, block.reason


@pytest.mark.parametrize("target", ["ort", "ascend"])
def test_zeros_need_no_product(target: Target) -> None:
    body = CONTENT + "whole = Shape(p) noughts = ConstantOfShape(whole) d = Add(p, noughts) y = MatMul(d, v) "
    result, report = fused(attention(body), target, ["finite-scores"])
    assert [(block.status, block.assumed) for block in report.blocks] == [("fused", ())]
    assert "MatMul" not in {node.op_type for node in result.graph.node}


def test_opset_12() -> None:
    """Reductions have their axes as attributes."""
    body = SPELLINGS["a rest that is divided"].replace("ReduceSum<keepdims=1>(d, keys)", "ReduceSum<axes=[-1]>(d)")
    proto = attention(body, opset=12)
    assert same(proto, random_feeds(proto), "finite-scores")[1].blocks[0].status == "fused"


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@settings(max_examples=examples(6))
@given(seed=st.integers(0, 2**32 - 1), steep=st.sampled_from([0.1, 1.0, 30.0]))
def test_the_sum_of_two_attentions_in_float64(seed: int, steep: float) -> None:
    """Both are fused, and the result is near to what float64 makes of the original."""
    body = ADDED.replace("Softmax<axis=-1>(r)", "Softmax<axis=-1>(s2)").replace("p2 =", "s2 = MatMul(q2, kt) p2 =")
    proto = parse(
        body + DROPPED + OF_SUM,
        inputs="float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v, float[1,4,1,1] w, float[B,4,S,8] q2",
    )
    result, report = fused(proto, assume=["finite-scores"])
    assert report.count("fused") == len(report.blocks) == 2
    feeds = random_feeds(proto, seed)
    feeds["w"] = feeds["w"] * np.float32(steep)
    q, k, v, w, q2 = (feeds[name].astype(np.float64) for name in ("q", "k", "v", "w", "q2"))
    gate = 1 / (1 + np.exp(-w))
    weights = (1 - gate) * softmax(q @ k.swapaxes(-1, -2)) + gate * softmax(q2 @ k.swapaxes(-1, -2))
    assert_same(run(result, feeds)[0], (weights / weights.sum(-1, keepdims=True)) @ v, 1e-5)
