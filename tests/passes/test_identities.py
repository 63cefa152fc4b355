"""Operators that change nothing, wherever they stand: the result is one fused operator, and nothing else remains."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.passes.running import PRODUCT_PV, PRODUCT_QK, SOFTMAX, assert_same, fused, parse, random_feeds, run


def computed(model: onnx.ModelProto) -> list[str]:
    """The operators of a model, without constants."""
    return [node.op_type for node in model.graph.node if node.op_type != "Constant"]


NO_RATIO = "ratio = Constant<value=float {0.0}>() training = Constant<value=bool {1}>() "
"""As TorchScript writes `torch.dropout(p, 0.0, train=True)`."""
PROBABILITIES = {
    "dropout of ratio 0": (NO_RATIO + "x, kept = Dropout(p, ratio, training) ", ""),
    "dropout of ratio 0 that may train": (NO_RATIO + "x = Dropout(p, ratio, t) ", "bool t"),
}


@pytest.mark.parametrize("name", PROBABILITIES)
def test_on_the_probabilities(name: str) -> None:
    step, more = PROBABILITIES[name]
    model = parse(PRODUCT_QK + SOFTMAX.format("s") + step + "y = MatMul(x, v) ", more)
    result, report = fused(model)
    assert computed(result) == ["FlashAttentionScore"], report.blocks[0].reason
    feeds = random_feeds(model, **({"t": np.array(True)} if more else {}))
    feeds["v"][0, 0, 0, 0] = float("nan")
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)


@pytest.mark.parametrize("operand", ["q", "k", "s"])
def test_dropout_of_ratio_0_before_the_softmax(operand: str) -> None:
    body = PRODUCT_QK + SOFTMAX.format("s") + PRODUCT_PV
    step = f"d = Dropout({operand}, ratio, training) "
    if operand == "s":
        body = body.replace("Softmax<axis=-1>(s)", "Softmax<axis=-1>(d)").replace("p = ", step + "p = ")
    else:
        body = step + body.replace(f"({operand}", "(d")
    model = parse(NO_RATIO + body)
    result, report = fused(model)
    assert computed(result) == ["FlashAttentionScore"], report.blocks[0].reason
    feeds = random_feeds(model)
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)


@pytest.mark.parametrize(
    ("ratio", "more"),
    [
        ("ratio = Constant<value=float {1e-30}>() ", ""),
        ("ratio = Constant<value=float {nan}>() ", ""),
        ("", "float ratio"),
    ],
    ids=["tiny", "nan", "an input"],
)
def test_another_ratio_drops(ratio: str, more: str) -> None:
    training = "training = Constant<value=bool {1}>() "
    body = PRODUCT_QK + SOFTMAX.format("s") + "x = Dropout(p, ratio, training) y = MatMul(x, v) "
    (block,) = fused(parse(ratio + training + body, more))[1].blocks
    assert (block.status, block.code) == ("declined", "probability_term")


ZERO = "eighth = Constant<value=float {0.125}>() zero = Constant<value=float[1] {0.0}>() "
OPERANDS = "kt = Transpose<perm=[0,1,3,2]>({}) s = MatMul({}, kt) p = Softmax<axis=-1>(s) y = MatMul(p, {})"
ADDED = {
    "a scale of Paddle": "f = Mul(q, eighth) a = Add(f, zero) " + OPERANDS.format("k", "a", "v"),
    "0 in front": "f = Mul(q, eighth) a = Add(zero, f) " + OPERANDS.format("k", "a", "v"),
    "before the factor": "f = Add(q, zero) a = Mul(f, eighth) " + OPERANDS.format("k", "a", "v"),
    "subtracted from the key": "a = Sub(k, zero) " + OPERANDS.format("a", "q", "v"),
    "on the values": "a = Add(v, zero) " + OPERANDS.format("k", "q", "a"),
}


@pytest.mark.parametrize("name", ADDED)
def test_0_is_added(name: str) -> None:
    model = parse(ZERO + ADDED[name])
    result, report = fused(model)
    assert computed(result) == ["FlashAttentionScore"], report.blocks[0].reason
    feeds = random_feeds(model)
    feeds["k"][0, 0, 0, 0] = float("inf")
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)


def test_the_sign_of_a_zero_shows_nowhere() -> None:
    """Values that are all -0: a sum that begins at 0 is 0, as if they were 0."""
    model = parse(ZERO + ADDED["on the values"])
    feeds = random_feeds(model)
    feeds["v"][:] = -0.0
    assert not any(np.signbit(run(each, feeds)[0]).any() for each in (model, fused(model)[0]))


@pytest.mark.parametrize("step", ["a = Sub(zero, q)", "a = Add(q, least)", "a = Add(q, wide)"])
def test_what_changes_the_operand_stays(step: str) -> None:
    more = "least = Constant<value=float {1e-45}>() wide = Constant<value=float[1,4,1,1] {0.0,0.0,0.0,0.0}>() "
    model = parse(ZERO + more + step + " " + OPERANDS.format("k", "a", "v"))
    if "wide" in step:  # it makes four heads of one
        model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 1
    result, report = fused(model)
    assert report.blocks[0].status == "fused"
    assert computed(result) != ["FlashAttentionScore"]
    feeds = random_feeds(model)
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)
