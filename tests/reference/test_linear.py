"""CANN's linear attention and causal convolutions against the operators of ONNX, and against each other."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fa_compiler import reference

BF16 = ml_dtypes.bfloat16
Arrays = dict[str, Any]


def run(op_type: str, inputs: Arrays, **attrs: Any) -> dict[str, np.ndarray]:
    return reference.run(op_type, inputs, attrs, dtype="float64")


def tokens(rng: np.random.Generator, lengths: tuple[int, ...], by_key: bool = False) -> Arrays:
    """Packed tokens of a gated delta rule with two heads of query and key, and four of value."""
    count, size, width = sum(lengths), 4, 6
    inputs = {
        "query": rng.standard_normal((count, 2, size)).astype(BF16),
        "key": (0.4 * rng.standard_normal((count, 2, size))).astype(BF16),
        "value": rng.standard_normal((count, 4, width)).astype(BF16),
        "beta": rng.uniform(0, 1, (count, 4)).astype(BF16),
        "actual_seq_lengths": np.array(lengths, np.int32),
        "g": rng.uniform(-1, 0, (count, 4)).astype(np.float32),
    }
    if by_key:
        inputs["gk"] = rng.uniform(-1, 0, (count, 4, size)).astype(np.float32)
    return inputs


def of_onnx(inputs: Arrays, states: np.ndarray, scale: float) -> dict[str, np.ndarray]:
    """The same by FlashLinearAttention, whose states are [Dk,Dv], and which repeats no heads of query by itself."""
    count = len(inputs["query"])
    decay = inputs["g"]
    if "gk" in inputs:
        decay = (decay[..., None] + inputs["gk"]).reshape(count, -1)
    given = {
        "query": np.repeat(inputs["query"], 2, axis=1).reshape(1, count, -1).astype(np.float32),
        "key": np.repeat(inputs["key"], 2, axis=1).reshape(1, count, -1).astype(np.float32),
        "value": inputs["value"].reshape(1, count, -1).astype(np.float32),
        "beta": inputs["beta"][None].astype(np.float32),
        "decay": decay[None].astype(np.float32),
        "past_state": np.ascontiguousarray(states.swapaxes(2, 3)).astype(np.float32),
        "cu_seqlens": np.concatenate([[0], np.cumsum(inputs["actual_seq_lengths"])]).astype(np.int32),
    }
    attrs = {"q_num_heads": 4, "kv_num_heads": 4, "update_rule": "gated_delta", "scale": scale}
    return run("FlashLinearAttention", given, **attrs)


@pytest.mark.parametrize("lengths", [(5,), (1, 3), (2, 7, 1)])
def test_chunks_are_the_rule_of_onnx_with_transposed_states(lengths: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(lengths))
    inputs, states = tokens(rng, lengths), rng.standard_normal((len(lengths), 4, 6, 4)).astype(np.float32)
    found = run("ChunkGatedDeltaRule", inputs | {"initial_state": states}, scale_value=0.5)
    wanted = of_onnx(inputs, states, 0.5)
    np.testing.assert_allclose(found["out"].reshape(1, sum(lengths), -1), wanted["output"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(found["final_state"].swapaxes(2, 3), wanted["present_state"], rtol=0, atol=1e-5)


def test_the_recurrence_leaves_a_state_for_each_token() -> None:
    rng = np.random.default_rng(1)
    inputs, blocks = tokens(rng, (2, 3), by_key=True), rng.standard_normal((6, 4, 6, 4)).astype(np.float32)
    where = np.array([4, 0, 3, 5, 1], np.int32)
    found = run("RecurrentGatedDeltaRule", inputs | {"state": blocks, "ssm_state_indices": where}, scale_value=0.5)
    wanted = of_onnx(inputs, blocks[[4, 3]], 0.5)
    np.testing.assert_allclose(found["out"].reshape(1, 5, -1), wanted["output"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(found["state"][[0, 1]].swapaxes(2, 3), wanted["present_state"], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(found["state"][2], blocks[2])  # the block of no token
    first = {name: each[:1] for name, each in inputs.items()} | {"actual_seq_lengths": np.array([1], np.int32)}
    wanted = of_onnx(first, blocks[[4]], 0.5)
    np.testing.assert_allclose(found["state"][[4]].swapaxes(2, 3), wanted["present_state"], rtol=0, atol=1e-5)


def test_a_recurrence_goes_on_behind_the_accepted_token() -> None:
    """Of three tokens two were accepted: the next call begins with the state of the second."""
    rng = np.random.default_rng(2)
    drafts, blocks = tokens(rng, (3,)), rng.standard_normal((4, 4, 6, 4)).astype(np.float32)
    where = np.array([2, 0, 3], np.int32)
    left = run("RecurrentGatedDeltaRule", drafts | {"state": blocks, "ssm_state_indices": where})["state"]
    more = tokens(rng, (3,)) | {"state": left.astype(np.float32), "ssm_state_indices": where}
    found = run("RecurrentGatedDeltaRule", more | {"num_accepted_tokens": np.array([2], np.int32)})
    wanted = of_onnx(more, left[[0]], 1.0)
    np.testing.assert_allclose(found["out"].reshape(1, 3, -1), wanted["output"], rtol=0, atol=1e-5)


def convolution_of_onnx(x: np.ndarray, weight: np.ndarray, history: np.ndarray, **more: Any) -> np.ndarray:
    """x [L,dim] by ShortConvolution."""
    inputs = {
        "input": x.T[None].astype(np.float32),
        "weight": np.ascontiguousarray(weight.T[:, None]).astype(np.float32),
        "past_state": history.T[None].astype(np.float32),
    }
    activation = more.pop("activation", "none")
    inputs |= {name: each.astype(np.float32) for name, each in more.items()}
    return run("ShortConvolution", inputs, activation=activation)["output"][0].T


@pytest.mark.parametrize("activation", ["silu", "none"])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_a_prompt_and_the_steps_behind_it(k: int, activation: str) -> None:
    """Of two sequences the second begins behind its line, and the lines are read by the steps that follow."""
    rng = np.random.default_rng(k)
    dim, names = 64, {"bias": rng.standard_normal(64).astype(np.float16)}
    x, weight = (rng.standard_normal(shape).astype(np.float16) for shape in ((7, dim), (k, dim)))
    states = rng.standard_normal((4, k - 1, dim)).astype(np.float16)
    lines = {"cache_indices": np.array([3, 1], np.int32)}
    limits = {"query_start_loc": np.array([0, 5, 7], np.int32), "initial_state_mode": np.array([0, 1], np.int32)}
    shared = {"weight": weight, **names, **lines}
    found = run("CausalConv1d", {"x": x, "conv_states": states} | limits | shared, activation_mode=activation)
    begun = convolution_of_onnx(x[:5], weight, np.zeros((k - 1, dim)), activation=activation, **names)
    went_on = convolution_of_onnx(x[5:], weight, states[1], activation=activation, **names)
    np.testing.assert_allclose(found["y"], np.concatenate([begun, went_on]), rtol=0, atol=1e-6)
    np.testing.assert_array_equal(found["conv_states"][[0, 2]], states[[0, 2]])
    np.testing.assert_array_equal(found["conv_states"][3], x[:5][-(k - 1) :])
    np.testing.assert_array_equal(found["conv_states"][1], np.concatenate([states[1], x[5:]])[-(k - 1) :])
    step = rng.standard_normal((2, 1, dim)).astype(np.float16)
    left = found["conv_states"].astype(np.float16)
    after = run("CausalConv1d", {"x": step, "conv_states": left} | shared, activation_mode=activation)
    for sequence, line in enumerate((3, 1)):
        wanted = convolution_of_onnx(step[sequence], weight, left[line], activation=activation, **names)
        np.testing.assert_allclose(after["y"][sequence], wanted, rtol=0, atol=1e-6)
        np.testing.assert_array_equal(after["conv_states"][line], np.concatenate([left[line], step[sequence]])[1:])


def test_a_skipped_sequence_changes_nothing() -> None:
    """null_block_id is 0 by default, so that the line 0 is read by no sequence."""
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal(shape).astype(np.float16) for shape in ((2, 3, 64), (4, 64)))
    states = rng.standard_normal((3, 3, 64)).astype(np.float16)
    lines = np.array([0, 2], np.int32)
    found = run("CausalConv1d", {"x": x, "weight": weight, "conv_states": states, "cache_indices": lines})
    assert not found["y"][0].any()
    np.testing.assert_array_equal(found["conv_states"][0], states[0])
    np.testing.assert_array_equal(found["conv_states"][2], x[1])
    alone = run("CausalConv1d", {"x": x, "weight": weight, "conv_states": states})
    assert alone["y"][0].any()


@pytest.mark.parametrize("op_type", ["CausalConv1d", "FusedCausalConv1d"])
def test_steps_behind_accepted_tokens(op_type: str) -> None:
    """Three tokens are computed, two of them accepted, and the next three follow the second: the same as five tokens
    one after the other."""
    rng = np.random.default_rng(3)
    k = 4 if op_type == "CausalConv1d" else 3
    rows, weight = (rng.standard_normal(shape).astype(np.float16) for shape in ((9, 64), (k, 64)))
    attrs: Arrays = {"activation_mode": "none"} if k == 4 else {"residual_connection": 0}
    before, drafts, others = rows[: k - 1], rows[k - 1 : k + 2], rows[-3:]
    line = np.zeros((1, k + 1, 64), np.float16)  # K-1 and two drafts
    line[0, : k - 1] = before
    given = {"x": drafts[None], "weight": weight, "conv_states": line}
    first = run(op_type, given | {"num_accepted_tokens": np.array([1], np.int32)}, **attrs)
    given |= {"x": others[None], "conv_states": first["conv_states"].astype(np.float16)}
    found = run(op_type, given | {"num_accepted_tokens": np.array([2], np.int32)}, **attrs)
    whole = np.concatenate([drafts[:2], others])
    wanted = convolution_of_onnx(whole, weight, before)
    np.testing.assert_allclose(first["y"][0], convolution_of_onnx(drafts, weight, before), rtol=0, atol=1e-6)
    np.testing.assert_allclose(found["y"][0], wanted[2:], rtol=0, atol=1e-6)


def test_what_the_fused_convolution_adds_and_leaves_out() -> None:
    rng = np.random.default_rng(4)
    x, weight = (rng.standard_normal(shape).astype(np.float16) for shape in ((2, 4, 64), (3, 64)))
    states = rng.standard_normal((2, 5, 64)).astype(np.float16)
    given = {"x": x, "weight": weight, "conv_states": states}
    plain = run("FusedCausalConv1d", given, residual_connection=0)
    for entry in range(2):  # the last two tokens of a line are those before the first
        wanted = convolution_of_onnx(x[entry], weight, states[entry, -2:])
        np.testing.assert_allclose(plain["y"][entry], wanted, rtol=0, atol=1e-6)
        np.testing.assert_array_equal(plain["conv_states"][entry], np.concatenate([states[entry], x[entry]])[-5:])
    np.testing.assert_allclose(run("FusedCausalConv1d", given)["y"], plain["y"] + x, rtol=0, atol=1e-12)
    computed = {"num_computed_tokens": np.array([0, 1], np.int32)}
    begun = run("FusedCausalConv1d", given | computed, residual_connection=0)
    wanted = convolution_of_onnx(x[0], weight, np.zeros((2, 64)))
    np.testing.assert_allclose(begun["y"][0], wanted, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(begun["y"][1], plain["y"][1])
    reset = run("FusedCausalConv1d", given | computed, residual_connection=0, conv_mode=1)["y"]
    assert not reset[0, :2].any() and not reset[1, :1].any()
    np.testing.assert_array_equal(reset[0, 2:], begun["y"][0, 2:])
    np.testing.assert_array_equal(reset[1, 1:], begun["y"][1, 1:])


def test_lines_of_blocks() -> None:
    """Five tokens behind two, in blocks of two: the blocks 1 and 2 are filled, and 3 has begun."""
    rng = np.random.default_rng(5)
    rows, weight = (rng.standard_normal(shape).astype(np.float16) for shape in ((7, 64), (3, 64)))
    states = rng.standard_normal((6, 6, 64)).astype(np.float16)
    states[4, -2:] = rows[:2]
    given = {
        "x": rows[None, 2:],
        "weight": weight,
        "conv_states": states,
        "cache_indices": np.array([[4, 1, 5, 0]], np.int32),
        "num_computed_tokens": np.array([2], np.int32),
        "block_idx_first_scheduled_token": np.array([1], np.int32),
        "block_idx_last_scheduled_token": np.array([3], np.int32),
        "initial_state_idx": np.array([0], np.int32),
    }
    found = run("FusedCausalConv1d", given, block_size=2, residual_connection=0)
    np.testing.assert_allclose(found["y"][0], convolution_of_onnx(rows[2:], weight, rows[:2]), rtol=0, atol=1e-6)
    for line, end in ((4, 2), (1, 4), (5, 6), (0, 7)):
        np.testing.assert_array_equal(found["conv_states"][line, -2:], rows[end - 2 : end])
    np.testing.assert_array_equal(found["conv_states"][[2, 3]], states[[2, 3]])
