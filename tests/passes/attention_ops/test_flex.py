"""ai.onnx.preview FlexAttention gives what its definition gives, or is left with a true reason."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx.reference import ReferenceEvaluator

from tests.passes.running import assert_same, fused, run

pytestmark = pytest.mark.usefixtures("declines_change_nothing")

SCORES = "s (float[B,N,L,T] scores) => (float[B,N,L,T] out)"
CAUSAL = """<int64 zero = {0}, int64 one = {1}, int64 two = {2}, int64[1] last = {1}, float low = {-inf}> {
    shape = Shape(scores) l = Gather<axis = 0>(shape, two) i0 = Range(zero, l, one) i = Unsqueeze(i0, last)
    kept = GreaterOrEqual(i, i0) out = Where(kept, scores, low) }"""
TAKEN = {
    "plain": ("", "none"),
    "scale": ("scale = 0.3", "none"),
    "wide softmax": ("softmax_precision = 1", "none"),
    "causal": (f"score_mod: graph = {SCORES} {CAUSAL}", "causal"),
    "distance": (
        f"score_mod: graph = {SCORES} "
        "<int64 zero = {0}, int64 one = {1}, int64 two = {2}, int64[1] last = {1}> {"
        "shape = Shape(scores) l = Gather<axis = 0>(shape, two) i0 = Range(zero, l, one) i = Unsqueeze(i0, last) "
        "d = Sub(i, i0) f = Cast<to = 1>(d) out = Add(scores, f) }",
        "real_shift",
    ),
    "softcap": (
        f"score_mod: graph = {SCORES} <float c = {{5}}> {{ a = Div(scores, c) b = Tanh(a) out = Mul(b, c) }}",
        "none",
    ),
    "twice": (f"score_mod: graph = {SCORES} <float c = {{0.5}}> {{ out = Mul(scores, c) }}", "none"),
}


def model(attributes: str, heads: int = 2, query_heads: int = 2) -> onnx.ModelProto:
    text = (
        '<ir_version: 13, opset_import: ["": 26, "ai.onnx.preview": 1]> '
        f"g (float[B,{query_heads},S,8] q, float[B,{heads},S,8] k, float[B,{heads},S,8] v, float[S,S] bias) "
        f"=> (float[B,{query_heads},S,8] y) "
        f"{{ y = ai.onnx.preview.FlexAttention{f'<{attributes}>' if attributes else ''}(q, k, v) }}"
    )
    return onnx.parser.parse_model(text)


@pytest.mark.parametrize("heads", [2, 1])
@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str, heads: int) -> None:
    """Also with one key head for both query heads."""
    attributes, mask = TAKEN[name]
    rng = np.random.default_rng(0)
    feeds = {each: rng.standard_normal((2, 2 if each == "q" else heads, 5, 8)).astype(np.float32) for each in "qkv"}
    feeds["bias"] = rng.standard_normal((5, 5)).astype(np.float32)
    original = model(attributes, heads)
    result, report = fused(original)
    assert report.blocks[0].status == "fused", report.blocks[0].reason
    assert report.blocks[0].mask == mask
    assert report.blocks[0].heads == (2, heads)
    assert all(node.op_type not in ("FlexAttention", "Softmax", "MatMul") for node in result.graph.node)
    assert_same(run(result, feeds)[0], np.asarray(ReferenceEvaluator(original).run(None, feeds)[0]), 1e-5)


def test_groups_of_heads() -> None:
    """Query head n attends to key head n // group."""
    rng = np.random.default_rng(0)
    feeds = {
        name: rng.standard_normal((2, heads, 5, 8)).astype(np.float32) for name, heads in (("q", 6), ("k", 2), ("v", 2))
    }
    feeds["bias"] = rng.standard_normal((5, 5)).astype(np.float32)
    original = model(f"score_mod: graph = {SCORES} {CAUSAL}", 2, 6)
    result, report = fused(original)
    assert report.blocks[0].heads == (6, 2)
    assert_same(run(result, feeds)[0], np.asarray(ReferenceEvaluator(original).run(None, feeds)[0]), 1e-5)


def test_value_from_outside() -> None:
    """A modifier's graph may read what lies around it, as every graph inside another may."""
    rng = np.random.default_rng(0)
    feeds = {each: rng.standard_normal((2, 2, 5, 8)).astype(np.float32) for each in "qkv"}
    feeds["bias"] = rng.standard_normal((5, 5)).astype(np.float32)
    result, report = fused(model(f"score_mod: graph = {SCORES} {{ out = Add(scores, bias) }}"))
    assert report.blocks[0].mask == "real_shift"
    scores = feeds["q"].astype(np.float64) @ feeds["k"].swapaxes(-1, -2) / np.sqrt(8) + feeds["bias"]
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    assert_same(run(result, feeds)[0], (weights / weights.sum(-1, keepdims=True)) @ feeds["v"], 1e-5)


REFUSED = {
    "cap behind a bias": (
        f"score_mod: graph = {SCORES} {{ a = Add(scores, bias) out = Tanh(a) }}",
        2,
        "softcap",
    ),
    "other function": (f"score_mod: graph = {SCORES} {{ out = Relu(scores) }}", 2, "score_term"),
    "random": (
        f"score_mod: graph = {SCORES} {{ r = RandomNormalLike(scores) out = Add(scores, r) }}",
        2,
        "score_term",
    ),
    "probabilities": (f"prob_mod: graph = {SCORES} {{ out = Exp(scores) }}", 2, "probability_term"),
    "rounded scores": ("softmax_precision = 10", 2, "cast"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """Nothing of the definition is left behind."""
    attributes, heads, code = REFUSED[name]
    result, report = fused(model(attributes, heads))
    assert report.blocks[0].status == "declined"
    assert report.blocks[0].code == code
    assert report.blocks[0].culprit == "y"
    assert [node.op_type for node in result.graph.node] == ["FlexAttention"]
    assert not result.graph.initializer
