"""GatedDeltaNet gives what ONNX Runtime's CPU kernel gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.passes.running import LEVELS, Array, assert_same, fused, run

pytestmark = pytest.mark.usefixtures("declines_change_nothing")

CONTRIB = "com.microsoft"
NAMES = ("query", "key", "value", "cu_seqlens", "decay", "beta", "initial_state", "a_log", "dt_bias", "capture_count")
Q_HEADS, HEADS, SIZE, WIDTH = 2, 4, 8, 6
TOLERANCE = {"float32": 1e-5, "float16": 4e-3}
"""Rounding of float32 sums, and of results of 16 bits."""


def drawn(lead: tuple[int, ...], gate: str = "head", dtype: str = "float32", sequences: int = 2) -> dict[str, Array]:
    rng = np.random.default_rng(0)

    def rows(*last: int, scale: float = 1.0) -> Array:
        return (scale * rng.standard_normal((*lead, *last))).astype(dtype)

    last = (HEADS,) if gate == "head" else (HEADS, SIZE)
    return {
        "query": rows(Q_HEADS, SIZE),
        "key": rows(Q_HEADS, SIZE, scale=0.3),
        "value": rows(HEADS, WIDTH),
        "decay": -np.abs(rows(*last, scale=0.3)),
        "beta": np.abs(rows(HEADS, scale=0.3)),
        "initial_state": rng.standard_normal((sequences, HEADS, WIDTH, SIZE)).astype(np.float32),
    }


def model_of(feeds: Mapping[str, Array], attrs: Mapping[str, Any]) -> onnx.ModelProto:
    """A model of one node."""
    inputs = [name if name in feeds else "" for name in NAMES]
    while not inputs[-1]:
        inputs.pop()
    node = helper.make_node("GatedDeltaNet", inputs, ["y", "state"], domain=CONTRIB, **attrs)
    declared = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    kind = helper.np_dtype_to_tensor_dtype(feeds["query"].dtype)
    results = [
        helper.make_tensor_value_info("y", kind, [None] * (feeds["query"].ndim + ("key" not in feeds))),
        helper.make_tensor_value_info("state", onnx.TensorProto.FLOAT, [None] * 4),
    ]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(CONTRIB, 1)]
    return helper.make_model(helper.make_graph([node], "net", declared, results), opset_imports=opsets, ir_version=10)


def check(feeds: Mapping[str, Array], attrs: Mapping[str, Any], dtype: str = "float32") -> None:
    model = model_of(feeds, attrs)
    result, report = fused(model)
    (block,) = report.blocks
    assert (block.status, block.op, block.kind) == ("fused", "FlashLinearAttention", "no_softmax"), block.reason
    wanted = run(model, feeds)
    for level in LEVELS:
        for got, expected in zip(run(result, feeds, level), wanted, strict=True):
            assert got.dtype == expected.dtype
            assert_same(got, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("gate", ["head", "key"])
@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
def test_each_rule(rule: str, gate: str) -> None:
    feeds = drawn((2, 5), gate)
    if not rule.startswith("gated"):
        del feeds["decay"]
    if not rule.endswith("delta"):
        del feeds["beta"]
    check(feeds, {"update_rule": rule})


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_tokens_of_equal_sequences(dtype: str) -> None:
    check(drawn((10,), dtype=dtype), {}, dtype)


def test_sequences_of_their_own_lengths() -> None:
    check({**drawn((9,), sequences=3), "cu_seqlens": np.array([0, 4, 8, 9], np.int32)}, {"scale": 0.5})


@pytest.mark.parametrize("gate", ["head", "key"])
@pytest.mark.parametrize("activation", ["softplus", "qwen", "sigmoid", "kda"])
def test_gates_inside(activation: str, gate: str) -> None:
    rng, feeds = np.random.default_rng(3), drawn((2, 5), gate)
    feeds["a_log"] = rng.standard_normal(HEADS).astype(np.float32)
    feeds["dt_bias"] = rng.standard_normal(HEADS if gate == "head" else HEADS * SIZE).astype(np.float32)
    check(feeds, {"gate_activation": activation, "beta_activation": "sigmoid", "gate_lower_bound": -3.0})


@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_norms_inside(size: float) -> None:
    feeds = drawn((2, 5))
    feeds["query"] *= np.float32(size)
    feeds["key"] *= np.float32(size)
    check(feeds, {"qk_l2_norm": 1})


def packed(feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Query, key and value in one tensor."""
    parts = [feeds[name].reshape(*feeds[name].shape[:-2], -1) for name in ("query", "key", "value")]
    rest = {name: array for name, array in feeds.items() if name not in ("key", "value")}
    return {**rest, "query": np.concatenate(parts, axis=-1)}


@pytest.mark.parametrize("gate", ["head", "key"])
@pytest.mark.parametrize("lead", [(2, 5), (10,)])
def test_one_tensor(lead: tuple[int, ...], gate: str) -> None:
    check(packed(drawn(lead, gate)), {"qk_l2_norm": 1})


def test_one_tensor_with_sequences_of_their_own_lengths() -> None:
    feeds = packed(drawn((9,), sequences=3, dtype="float16"))
    check({**feeds, "cu_seqlens": np.array([0, 4, 8, 9], np.int32)}, {}, "float16")


def test_one_tensor_of_open_sizes() -> None:
    model = model_of(packed(drawn((2, 5))), {})
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "C"
    (block,) = fused(model)[1].blocks
    assert (block.status, block.code) == ("declined", "ready_made")
    assert "not known before the model runs" in (block.reason or "")


@pytest.mark.parametrize(
    ("attrs", "words"),
    [
        ({"qk_l2_norm": 1}, "float32"),
        ({"beta_activation": "sigmoid"}, "float32"),
        ({"state_update_capacity": 2}, "state_update_capacity"),
    ],
)
def test_what_is_declined(attrs: dict[str, int | str], words: str) -> None:
    feeds = drawn((2, 5), dtype="float16")
    if "state_update_capacity" in attrs:
        feeds["capture_count"] = np.zeros(2, np.int32)
    (block,) = fused(model_of(feeds, attrs))[1].blocks
    assert (block.status, block.code) == ("declined", "ready_made")
    assert words in (block.reason or "")


def test_other_targets() -> None:
    (block,) = fused(model_of(drawn((2, 5)), {}), "contrib")[1].blocks
    assert block.status == "declined"
