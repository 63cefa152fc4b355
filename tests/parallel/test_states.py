"""Linear attention and its convolution by ranks: against one call of the kernel on all tokens, and in a whole model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

import fa_compiler
from fa_compiler.lowering.ort import eager
from fa_compiler.op_registry.collectives import CONTIGUOUS, ORDERS, STATE_OUTPUTS, ZIGZAG
from fa_compiler.op_registry.ops.flash_linear_attention import CORRECTED, DELTA, GATED, UPDATE_RULES
from fa_compiler.parallel.communicator import Array, Communicator
from fa_compiler.parallel.parts import Parts
from fa_compiler.parallel.states import sequence_states, sequence_tails
from fa_compiler.parallel.threads import run_threads
from fa_compiler.passes.parallel.methods import Handed
from tests.linear_problems import HEADS, attention
from tests.pairs import pairwise

from .running import by_ranks, check

ROUNDED = 2.0**-7
"""A rounding of the result to bfloat16, and of the operands of its products."""


def taken(
    op: str, attrs: Mapping[str, Any], inputs: Mapping[str, Array], ranks: int, order: str, axis: int = 1
) -> tuple[dict[str, Array], list[int]]:
    """The outputs of ranks, and the bytes that each one sent."""
    whole = {"past_state", "weight", "bias"}
    length = inputs["query" if op == "FlashLinearAttention" else "input"].shape[axis]
    parts = Parts(order, ranks, length)
    together = sequence_states if op == "FlashLinearAttention" else sequence_tails

    def task(communicator: Communicator) -> tuple[list[Array], int]:
        own = {
            name: array if name in whole else parts.own(array, axis, communicator.rank)
            for name, array in inputs.items()
        }
        return together(communicator, parts, attrs, own), communicator.sent

    made = run_threads(ranks, task, 60)
    for (_, state), _ in made[1:]:
        np.testing.assert_array_equal(state, made[0][0][1], "every rank has the same state")
    return dict(zip(STATE_OUTPUTS, (parts.joined([out for (out, _), _ in made], axis), made[0][0][1]), strict=True)), [
        sent for _, sent in made
    ]


@pytest.mark.parametrize(
    ("rule", "gate", "ranks", "order", "length", "heads", "past"),
    pairwise(UPDATE_RULES, ("head", "key"), (1, 2, 3), ORDERS, (6, 7, 61), HEADS, (True, False)),
)
def test_ranks_hand_on_states(
    rule: str, gate: str, ranks: int, order: str, length: int, heads: tuple[int, int, int], past: bool
) -> None:
    rng = np.random.default_rng(length)
    inputs, attrs = attention(rng, rule, length, gate=gate, heads=heads, past=past)
    attrs["scale"] = 0.5
    expected = eager.run("FlashLinearAttention", inputs, attrs, STATE_OUTPUTS)
    found, sent = taken("FlashLinearAttention", attrs, inputs, ranks, order)
    check(expected, found)
    states, size, width = heads[1], 16, 24
    factors = size * size if rule in CORRECTED else 1
    if rule in GATED and gate == "key" and rule not in DELTA:
        factors = size
    assert sent == [Handed("", 4 * states * (size * width + factors)).sent(order, ranks, batch=2)] * ranks


@pytest.mark.parametrize("decay", [(-80.0, -0.0), (-1e4, 0.0), (0.0, 0.1)])
@pytest.mark.parametrize("rule", ["gated", "gated_delta", "dplr"])
def test_decays_of_a_whole_part_may_vanish(rule: str, decay: tuple[float, float]) -> None:
    inputs, attrs = attention(np.random.default_rng(3), rule, 40, gate="key", decay=decay)
    expected = eager.run("FlashLinearAttention", inputs, attrs, STATE_OUTPUTS)
    check(expected, taken("FlashLinearAttention", attrs, inputs, 3, ZIGZAG)[0])


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["query", "key", "value", "decay", "beta", "past_state"])
def test_what_is_not_finite_is_where_one_process_has_it(name: str, number: float) -> None:
    inputs, attrs = attention(np.random.default_rng(4), "gated_delta", 40)
    inputs[name].reshape(-1)[inputs[name].size // 3] = number
    expected = eager.run("FlashLinearAttention", inputs, attrs, STATE_OUTPUTS)
    check(expected, taken("FlashLinearAttention", attrs, inputs, 3, CONTIGUOUS)[0])


@pytest.mark.parametrize("rule", ["gated", "gated_delta"])
def test_states_are_float32_between_ranks(rule: str) -> None:
    inputs, attrs = attention(np.random.default_rng(5), rule, 50, dtype=ml_dtypes.bfloat16)
    expected = eager.run("FlashLinearAttention", inputs, attrs, STATE_OUTPUTS)
    found, _ = taken("FlashLinearAttention", attrs, inputs, 2, ZIGZAG)
    assert {name: array.dtype for name, array in found.items()} == {name: each.dtype for name, each in expected.items()}
    check(*({name: np.asarray(a, np.float32) for name, a in each.items()} for each in (expected, found)), ROUNDED)


@pytest.mark.parametrize(
    ("last", "ranks", "order", "length", "width", "past"),
    pairwise((False, True), (1, 2, 3), ORDERS, (6, 7, 40), (1, 2, 4, 9), (True, False)),
)
def test_ranks_hand_on_tokens(last: bool, ranks: int, order: str, length: int, width: int, past: bool) -> None:
    """Chunks may be shorter than a window."""
    rng, channels = np.random.default_rng(width), 5
    shape = (2, length, channels) if last else (2, channels, length)
    inputs = {"input": rng.standard_normal(shape), "weight": rng.standard_normal((channels, 1, width))}
    inputs["bias"] = rng.standard_normal(channels)
    if past:
        inputs["past_state"] = rng.standard_normal((2, channels, width - 1))
    inputs = {name: array.astype(np.float32) for name, array in inputs.items()}
    attrs = {"activation": "silu", "channels_last": last}
    expected = eager.run("ShortConvolution", inputs, attrs, STATE_OUTPUTS)
    found, sent = taken("ShortConvolution", attrs, inputs, ranks, order, axis=1 if last else 2)
    check(expected, found)
    assert max(sent) <= Handed("", 4 * channels * (width - 1)).sent(order, ranks, batch=2)


def hybrid(rule: str) -> bytes:
    """A layer of a hybrid model: projections, a convolution, linear attention, and the states as outputs."""
    rng, heads, size, features = np.random.default_rng(0), 2, 8, 16
    weights = {name: rng.standard_normal((features, features), np.float32) / 4 for name in ("q", "k", "v", "out")}
    weights["decays"] = -np.abs(rng.standard_normal((features, heads), np.float32)) / 8
    weights["betas"] = rng.standard_normal((features, heads), np.float32)
    weights["window"] = rng.standard_normal((features, 1, 4), np.float32)
    nodes = [
        helper.make_node("Transpose", ["x"], ["turned"], perm=[0, 2, 1]),
        helper.make_node(
            "CausalConvWithState",
            ["turned", "window", "", "window_past"],
            ["convolved", "window_present"],
            domain="com.microsoft",
            activation="silu",
        ),
        helper.make_node("Transpose", ["convolved"], ["h"], perm=[0, 2, 1]),
        *(helper.make_node("MatMul", ["h", name], [f"{name}_rows"]) for name in ("q", "k", "v", "betas")),
        helper.make_node("Abs", ["h"], ["positive"]),
        helper.make_node("MatMul", ["positive", "decays"], ["decay"]),
        helper.make_node("Sigmoid", ["betas_rows"], ["beta"]),
        helper.make_node("LpNormalization", ["k_rows"], ["unit"], axis=-1),
        helper.make_node(
            "LinearAttention",
            ["q_rows", "unit", "v_rows", "past", "decay", *(["beta"] if rule in DELTA else [])],
            ["rows", "present"],
            domain="com.microsoft",
            q_num_heads=heads,
            kv_num_heads=heads,
            update_rule=rule,
        ),
        helper.make_node("MatMul", ["rows", "out"], ["projected"]),
        helper.make_node("Add", ["projected", "x"], ["y"]),
    ]
    shapes: dict[str, list[Any]] = {
        "x": ["B", "T", features],
        "past": ["B", heads, size, size],
        "window_past": ["B", features, 3],
        "y": ["B", "T", features],
        "present": ["B", heads, size, size],
        "window_present": ["B", features, 3],
    }
    infos = {name: helper.make_tensor_value_info(name, 1, shape) for name, shape in shapes.items()}
    graph = helper.make_graph(
        nodes,
        "hybrid",
        [infos[name] for name in ("x", "past", "window_past")],
        [infos[name] for name in ("y", "present", "window_present")],
        [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("rule", ["gated", "gated_delta"])
def test_a_model_with_linear_attention(tmp_path: Path, rule: str, ranks: int) -> None:
    model = hybrid(rule)
    rng = np.random.default_rng(1)
    feeds = {
        "x": rng.standard_normal((2, 29, 16), np.float32),
        "past": rng.standard_normal((2, 2, 8, 8), np.float32),
        "window_past": rng.standard_normal((2, 16, 3), np.float32),
    }
    session = ort.InferenceSession(model)
    expected = dict(zip((each.name for each in session.get_outputs()), session.run(None, feeds), strict=True))
    made = fa_compiler.shard(model, tmp_path / "out", ranks, batch=2)
    check(expected, by_ranks(made.path, ranks, feeds))
    factors = 64 if rule in DELTA else 1
    told = [each["bytes_sent_by_a_rank"] for each in made.to_json()["linear_layers"]]
    assert sorted(told) == sorted((ranks - 1) * 2 * 4 * each for each in (16 * 3, 2 * (64 + factors)))


def test_packed_sequences_are_refused(tmp_path: Path) -> None:
    """A node of FlashLinearAttention with cu_seqlens, as a fused model has it."""
    widths = {"query": 16, "key": 16, "value": 16, "decay": 2}
    infos = [helper.make_tensor_value_info(name, 1, [1, "T", width]) for name, width in widths.items()]
    infos.append(helper.make_tensor_value_info("ends", 6, ["E"]))
    node = helper.make_node(
        "FlashLinearAttention",
        ["query", "key", "value", "", "decay", "", "", "", "ends"],
        ["y"],
        domain="ascend",
        name="packed",
        q_num_heads=2,
        kv_num_heads=2,
        update_rule="gated",
    )
    graph = helper.make_graph([node], "g", infos, [helper.make_tensor_value_info("y", 1, [1, "T", 16])])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ascend", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    with pytest.raises(fa_compiler.InputError, match="'packed'.*cu_seqlens is not cut"):
        fa_compiler.shard(model, tmp_path / "out", 2)
    assert not (tmp_path / "out").exists()
