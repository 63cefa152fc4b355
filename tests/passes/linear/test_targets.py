"""Linear attention in plain operators becomes the operator of each target, or a decline that says what to change."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from fa_compiler.op_registry.runtimes import Runtime
from fa_compiler.passes import Block, Options
from fa_compiler.reference import evaluator
from tests.passes import running
from tests.passes.linear.test_graphs import feeds_of, load
from tests.passes.linear.test_steps import step
from tests.passes.running import assert_same, bound_run, fused, random_feeds, run

pytestmark = pytest.mark.usefixtures("declines_change_nothing")

TOLERANCE = 1e-5
"""float32 sums over up to 130 tokens, in another order, of decaying terms."""
EPSILON = 2.0**-6
"""Two units of bfloat16, in which the operators of CANN take tokens."""
ALL = ("half-attention", "unit-inputs", "slow-decay")
SCAN, KEYS = "hand__scan_gated_delta_head_mulsum_axis2_s0False", "hand__scan_gated_delta_key_matmul_axis2"
CHUNKS, GROUPS = "qwen3_next__rule_chunk16_dyn_dynamo", "mamba2__rule_step_torchscript"
STEP, RWKV_7, MINIMAX = (
    "qwen3_next__rule_step_dynamo",
    "rwkv7__rule_unrolled5_dynamo",
    "minimax__rule_block64_dyn_dynamo",
)


def made(model: onnx.ModelProto, target: Any, **options: Any) -> tuple[onnx.ModelProto, Block]:
    """The model for a target, and its only block."""
    options["assume"] = frozenset(options.get("assume", ()))
    graph = ir.from_proto(model)
    (block,) = running.fuse(graph, Options(target, **options)).blocks
    result = ir.to_proto(graph)
    onnx.checker.check_model(result, full_check=True)
    return result, block


def assert_computes(model: onnx.ModelProto, result: onnx.ModelProto) -> None:
    for length in (1, 9):
        feeds = feeds_of(model, length)
        for got, wanted in zip(run(result, feeds), run(model, feeds), strict=True):
            assert_same(got, wanted, TOLERANCE)


CONTRIB = {
    SCAN: (2, 2),
    KEYS: (2, 2),
    "hand__loop_linear_mulsum_axis1_scatter": (2, 2),
    "hand__unrolled5_gated_delta_head_mulsum_vk": (2, 2),
    GROUPS: (2, 4),
}


@pytest.mark.parametrize("name", CONTRIB)
def test_contrib(name: str) -> None:
    """ONNX Runtime's kernel takes every number of heads that divides the others."""
    model = load(name)
    result, block = made(model, "contrib")
    assert (block.op, block.kind, block.heads) == ("LinearAttention", "no_softmax", CONTRIB[name])
    assert [node.domain for node in result.graph.node if node.op_type == "LinearAttention"] == ["com.microsoft"]
    assert_computes(model, result)


@pytest.mark.parametrize("name", [SCAN, KEYS, GROUPS])
def test_onnx(name: str) -> None:
    """ai.onnx has one key and one query or more for each state, so that those of groups are repeated."""
    model = load(name)
    result, block = made(model, "onnx", opset=27)
    assert block.op == "LinearAttention"
    assert block.heads is not None and block.heads[0] == block.heads[1]
    assert [node.domain for node in result.graph.node if node.op_type == "LinearAttention"] == [""]
    assert_computes(model, result)


@pytest.mark.parametrize("name, op", [(SCAN, "ChunkGatedDeltaRule"), (STEP, "RecurrentGatedDeltaRule")])
def test_ascend(name: str, op: str) -> None:
    model = load(name)
    result, block = made(model, "ascend", assume=ALL)
    assert (block.op, block.layout) == (op, "TND")
    assert block.assumed == (ALL if op == "ChunkGatedDeltaRule" else ALL[:2])
    feeds = feeds_of(model, 9)
    for got, wanted in zip(evaluator(result).run(None, feeds), run(model, feeds), strict=True):
        assert_same(got, wanted, EPSILON)


def test_a_correction_without_beta() -> None:
    """The operators need a beta, which is 1 here."""
    model = step("none", "{memory}c = Sub(v, m) ", "MatMul")
    feeds = random_feeds(model)
    for target in ("ort", "contrib"):
        result, block = made(model, target)
        assert block.rule == "rule: delta"
        for got, wanted in zip(run(result, feeds), run(model, feeds), strict=True):
            assert_same(got, wanted, TOLERANCE)


DECLINED: dict[str, tuple[str, str, dict[str, Any], str, str, str]] = {
    "the type": ("half", "contrib", {}, "runtime", "takes float32 only", "--target ort"),
    "another runtime": (SCAN, "contrib", {"runtime": Runtime.of("openvino")}, "runtime", "openvino is not", "--target"),
    "a runtime without a kernel": (
        SCAN,
        "onnx",
        {"opset": 27, "runtime": Runtime.of("ort-cpu")},
        "runtime",
        "ort-cpu is not known",
        "--target ort",
    ),
    "an older opset": (SCAN, "onnx", {}, "runtime", "from opset 27 on", "--opset 27"),
    "an operator that changes with the opset": (CHUNKS, "onnx", {"opset": 27}, "opset", "may mean", "opset 27"),
    "a rule": (GROUPS, "ascend", {"assume": ALL}, "illegal_for_target", "no operator for the rule gated", "--target"),
    "a decay for each key dimension": (
        KEYS,
        "ascend",
        {"assume": ALL},
        "illegal_for_target",
        "only for one token",
        "--assume decode",
    ),
    "the type of the device": (SCAN, "ascend", {}, "dtype", "in bfloat16", "--assume half-attention"),
    "what the numbers are": (
        SCAN,
        "ascend",
        {"assume": ALL[:1]},
        "illegal_for_target",
        "may overflow",
        "--assume unit-inputs,slow-decay",
    ),
    "a correction of rank one": (RWKV_7, "contrib", {}, "runtime", "no rule for its correction", "--target ort"),
    "a correction of rank one, in ONNX": (RWKV_7, "onnx", {"opset": 27}, "runtime", "no rule for", "--target ort"),
    "a correction of rank one, on Ascend": (
        RWKV_7,
        "ascend",
        {"assume": ALL},
        "illegal_for_target",
        "no operator for the rule dplr",
        "--target",
    ),
    "some lengths, where no assumption helps": (
        MINIMAX,
        "ascend",
        {},
        "illegal_for_target",
        "no operator for the rule gated",
        "--target ort",
    ),
    "some lengths": (CHUNKS, "ascend", {"assume": ALL}, "shape", "33 to 48", "--assume any-length"),
    "the product": (
        SCAN,
        "ascend",
        {"assume": ALL, "soc_version": "310P"},
        "illegal_for_target",
        "not available",
        "--target ort",
    ),
}


def half() -> onnx.ModelProto:
    """A step in float16."""
    model = step("head", "delta", "MatMul")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "value_float":
                tensor = onnx.numpy_helper.from_array(np.array(attribute.f, np.float16))
                attribute.CopyFrom(onnx.helper.make_attribute("value", tensor))
    return model


@pytest.mark.parametrize("case", DECLINED)
def test_what_a_target_cannot_express(case: str) -> None:
    name, target, options, code, words, hint = DECLINED[case]
    model = half() if name == "half" else load(name)
    result, block = made(model, target, **options)
    assert (block.kind, block.code) == ("no_softmax" if code != "opset" else block.kind, code)
    assert block.status == "declined"
    assert words in (block.reason or "")
    assert hint in (block.hint or "")
    named = {node.name for node in model.graph.node} | {name for node in model.graph.node for name in node.output}
    assert block.culprit in named
    assert not any("LinearAttention" in node.op_type or node.domain for node in result.graph.node)


def test_any_length_on_a_device() -> None:
    model = load(CHUNKS)
    result, block = made(model, "ascend", assume=(*ALL, "any-length"))
    assert set(block.assumed) == {*ALL, "any-length"}
    feeds = feeds_of(model, 40)
    for got, wanted in zip(evaluator(result).run(None, feeds), run(model, feeds), strict=True):
        assert_same(got, wanted, EPSILON)


@pytest.mark.parametrize("name", [STEP, KEYS])
def test_a_state_in_its_place(name: str) -> None:
    """The last state may be written over the first one, also where no cache grows."""
    model = load(name)
    result, report = fused(model, in_place_caches=True)
    assert report.count("fused") == 1
    feeds = feeds_of(model, 5)
    for got, wanted in zip(bound_run(result, feeds, {"s": "s0"}), run(model, feeds), strict=True):
        assert_same(got, wanted, TOLERANCE)
