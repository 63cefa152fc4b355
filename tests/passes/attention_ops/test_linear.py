"""LinearAttention and CausalConvWithState of ai.onnx and com.microsoft give what ONNX Runtime gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from fa_compiler.op_registry.ops.flash_linear_attention import UPDATE_RULES
from fa_compiler.passes import Report
from tests.linear_problems import attention
from tests.passes.running import LEVELS, Array, assert_same, fused, run

pytestmark = pytest.mark.usefixtures("declines_change_nothing")

CONTRIB = "com.microsoft"
DOMAINS = ("", CONTRIB)
NAMES = ("query", "key", "value", "past_state", "decay", "beta")
RULES = UPDATE_RULES[:4]
TOLERANCE = 1e-5
"""float32 sums of a few dozen numbers, in another order."""


def model_of(
    op_type: str,
    domain: str,
    inputs: Mapping[str, Array],
    places: tuple[str, ...],
    attrs: Mapping[str, Any],
    states: int = 4,
    opset: int = 27,
) -> onnx.ModelProto:
    """A model of one node with two outputs. The tokens are an open size."""
    node = helper.make_node(op_type, [n if n in inputs else "" for n in places], ["y", "state"], domain=domain, **attrs)
    while node.input and not node.input[-1]:
        del node.input[-1]
    declared = [
        helper.make_tensor_value_info(
            name, TensorProto.FLOAT, ["B", "T", array.shape[2]] if name in NAMES and array.ndim == 3 else array.shape
        )
        for name, array in inputs.items()
    ]
    results = [
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * 3),
        helper.make_tensor_value_info("state", TensorProto.FLOAT, [None] * states),
    ]
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(CONTRIB, 1)]
    graph = helper.make_graph([node], "linear", declared, results)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def compared(model: onnx.ModelProto, feeds: Mapping[str, Array], target: Any = "ort") -> tuple[onnx.ModelProto, Report]:
    """The fused model, which gives what the original gives at every level of optimisation, and its report."""
    result, report = fused(model, target)
    wanted = run(model, feeds)
    for level in LEVELS:
        for got, expected in zip(run(result, feeds, level), wanted, strict=True):
            assert_same(got, expected, TOLERANCE)
    return result, report


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gate", ["head", "key"])
@pytest.mark.parametrize("domain", DOMAINS)
def test_each_rule(domain: str, rule: str, gate: str) -> None:
    inputs, attrs = attention(np.random.default_rng(0), rule, 9, gate=gate, heads=(4, 2, 2), past=gate == "head")
    model = model_of("LinearAttention", domain, inputs, NAMES, attrs)
    result, report = compared(model, inputs)
    (node,) = result.graph.node
    (block,) = report.blocks
    assert (node.op_type, node.domain, block.op, block.heads) == (
        "FlashLinearAttention",
        "ascend",
        node.op_type,
        (4, 2),
    )
    assert rule in block.what


def test_fewer_query_heads_than_states() -> None:
    inputs, attrs = attention(np.random.default_rng(0), "gated_delta", 5, heads=(1, 4, 2))
    compared(model_of("LinearAttention", CONTRIB, inputs, NAMES, attrs), inputs)


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_scale_of_its_own(domain: str) -> None:
    inputs, attrs = attention(np.random.default_rng(0), "linear", 5)
    compared(model_of("LinearAttention", domain, inputs, NAMES, {**attrs, "scale": 0.75}), inputs)


def test_a_state_window_is_declined() -> None:
    inputs, attrs = attention(np.random.default_rng(0), "linear", 5)
    model = model_of("LinearAttention", CONTRIB, inputs, NAMES, {**attrs, "state_window": 2}, states=5)
    _, report = fused(model)
    (block,) = report.blocks
    assert (block.status, block.code) == ("declined", "ready_made")
    assert "state_window" in (block.reason or "")


def test_the_operator_of_the_other_target() -> None:
    inputs, attrs = attention(np.random.default_rng(0), "gated", 5)
    standard, contrib = (model_of("LinearAttention", domain, inputs, NAMES, attrs) for domain in DOMAINS)
    (made,) = compared(standard, inputs, "contrib")[0].graph.node
    assert (made.op_type, made.domain) == ("LinearAttention", CONTRIB)
    (made,) = compared(contrib, inputs, "onnx")[0].graph.node
    assert (made.op_type, made.domain) == ("LinearAttention", "")


@pytest.mark.parametrize(
    ("domain", "target", "status", "words"),
    [
        ("", "onnx", "already_fused", "operator of the target"),
        (CONTRIB, "contrib", "already_fused", "operator of the target"),
        ("", "ascend", "declined", "packed tokens"),
    ],
)
def test_what_stays(domain: str, target: Any, status: str, words: str) -> None:
    inputs, attrs = attention(np.random.default_rng(0), "gated", 5)
    _, report = fused(model_of("LinearAttention", domain, inputs, NAMES, attrs), target)
    (block,) = report.blocks
    assert block.status == status
    assert words in (block.reason or "")


def test_an_older_opset_has_no_operator() -> None:
    inputs, attrs = attention(np.random.default_rng(0), "gated", 5)
    _, report = fused(model_of("LinearAttention", CONTRIB, inputs, NAMES, attrs, opset=24), "onnx")
    (block,) = report.blocks
    assert (block.status, block.hint) == ("declined", "--opset 27")


CONVOLVED = ("input", "weight", "bias", "past_state")


def columns(tokens: int, last: bool = False, channels: int = 6, width: int = 4) -> dict[str, Array]:
    rng = np.random.default_rng(tokens)
    shape = (2, tokens, channels) if last else (2, channels, tokens)
    state = (2, width - 1, channels) if last else (2, channels, width - 1)
    made = {"input": shape, "weight": (channels, 1, width), "bias": (channels,), "past_state": state}
    return {name: rng.standard_normal(size).astype(np.float32) for name, size in made.items()}


@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("activation", ["none", "silu", "swish"])
@pytest.mark.parametrize("domain", DOMAINS)
def test_convolutions(domain: str, activation: str, tokens: int) -> None:
    feeds = columns(tokens)
    if tokens == 2:
        del feeds["past_state"]
    model = model_of("CausalConvWithState", domain, feeds, CONVOLVED, {"activation": activation}, states=3)
    result, report = compared(model, feeds)
    assert [node.op_type for node in result.graph.node] == ["ShortConvolution"]
    (block,) = report.blocks
    assert (block.kind, block.status, block.op) == ("convolution", "fused", "ShortConvolution")
    assert "causal convolution: 1 fused (of 1)" in report.outcome


def test_states_with_channels_last_are_transposed() -> None:
    feeds = columns(5, last=True)
    model = model_of("CausalConvWithState", CONTRIB, feeds, CONVOLVED, {"channels_last": 1}, states=3)
    result, _ = compared(model, feeds)
    assert [node.op_type for node in result.graph.node] == ["Transpose", "ShortConvolution", "Transpose"]


def test_another_convolution_is_left() -> None:
    feeds = columns(5) | {"past_state": np.zeros((2, 6, 6), np.float32)}
    model = model_of("CausalConvWithState", CONTRIB, feeds, CONVOLVED, {"dilation": 2}, states=3)
    result, report = fused(model)
    assert [node.op_type for node in result.graph.node] == ["CausalConvWithState"]
    (block,) = report.blocks
    assert "dilation is 2" in (block.reason or "")
