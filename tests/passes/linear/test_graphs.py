"""Linear attention as exporters write it: loops, unrolled loops and chunks become FlashLinearAttention, and give the
same numbers at every length that the file takes. Near misses are left.

The graphs are exports of torch 2.13 and files made by onnx.helper, without weights.
"""

from __future__ import annotations

import lzma
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from fa_compiler.passes import Report
from fa_compiler.passes.linear import evaluation, operators
from tests.passes.running import Array, assert_same, fused, run

GRAPHS = Path(__file__).parent / "graphs"
TOLERANCE = 2e-5
"""float32 sums over up to 100 tokens, in another order, of decaying terms."""
FLOAT = onnx.TensorProto.FLOAT
SHAPES: dict[str, list[str | int | None]] = {"state": [4, 4], "k": [4, 4], "q": [4, "n"]}
GATED_DELTA, GATED = "rule: gated_delta, a decay for each", "rule: gated, a decay for each"
DPLR = "rule: dplr, a decay for each key dimension"
RULES = {
    "hand__loop_delta_matmul_vk_axis2_scatter": "rule: delta",
    "hand__loop_gated_delta_key_mulsum_vk_axis2_scatter": f"{GATED_DELTA} key dimension",
    "hand__loop_gated_delta_head_merged_rank3": f"{GATED_DELTA} head",
    "hand__loop_linear_mulsum_axis1_scatter": "rule: linear",
    "hand__scan_gated_delta_head_mulsum_axis2_s0False": f"{GATED_DELTA} head",
    "hand__scan_gated_delta_key_matmul_axis2": f"{GATED_DELTA} key dimension",
    "hand__scan_gated_head_matmul_axis0": f"{GATED} head",
    "hand__scan_linear_merged_rank3": "rule: linear",
    "hand__loop_linear_matmul_axis0": "rule: linear",
    "minimax__rule_block64_dyn_dynamo": f"{GATED} head",
    "script__gd_mul_index_put": f"{GATED_DELTA} head",
    "script__kda_mul_stack": f"{GATED_DELTA} key dimension",
    "hand__unrolled5_gated_delta_head_mulsum_vk": f"{GATED_DELTA} head",
    "minimax__rule_loop5_dynamo": f"{GATED} head",
    "mamba2__rule_step_torchscript": f"{GATED} head",
    "qwen3_next__rule_step_dynamo": f"{GATED_DELTA} head",
    "qwen3_next__rule_chunk16_dyn_dynamo": f"{GATED_DELTA} head",
    "mamba2__rule_chunk_dyn100_nostate_dynamo": f"{GATED} head",
    "mamba2__rule_chunk_dyn128_dynamo": f"{GATED} head",
    "rwkv7__rule_step_torchscript": DPLR,
    "rwkv7__rule_unrolled5_dynamo": DPLR,
    "rwkv7__script": DPLR,
    "rwkv7__reference_step_dynamo": DPLR,
    "rwkv7__reference_seq4_torchscript": DPLR,
    "rwkv7__layer_step_torchscript": DPLR,
    "rwkv7__layer4_dynamo": DPLR,
}
LENGTHS = {
    "qwen3_next__rule_chunk16_dyn_dynamo": (33, 40, 48),
    "minimax__rule_block64_dyn_dynamo": (65, 100, 128),
    "mamba2__rule_chunk_dyn100_nostate_dynamo": (1, 64, 70, 129),
    "mamba2__rule_chunk_dyn128_dynamo": (1, 65, 128),
}
"""The lengths that are compared, where the usual ones are others."""
NEAR = sorted(path.name.removesuffix(".onnx.xz") for path in GRAPHS.glob("nearmiss__*"))


def load(name: str) -> onnx.ModelProto:
    return onnx.load_model_from_string(lzma.decompress((GRAPHS / f"{name}.onnx.xz").read_bytes()))


@cache
def fused_file(name: str, assume: tuple[str, ...] = ()) -> tuple[onnx.ModelProto, Report]:
    """A file after the fusion, and the report. Both are shared, and not to be changed."""
    return fused(load(name), assume=assume)


def feeds_of(model: onnx.ModelProto, tokens: int) -> dict[str, Array]:
    """Inputs of a length: small keys, gates below 0, beta between 0 and 1."""
    rng = np.random.default_rng(tokens)
    feeds: dict[str, Array] = {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        numbers = rng.standard_normal([tokens if dim.dim_param else dim.dim_value for dim in dims])
        if value.name == "g":
            numbers = -np.abs(numbers) / 4
        elif value.name == "beta":
            numbers = 1 / (1 + np.exp(numbers))
        if value.type.tensor_type.elem_type == onnx.TensorProto.BOOL:
            feeds[value.name] = numbers > 0
            continue
        feeds[value.name] = (numbers if value.name in ("g", "beta") else numbers / 3).astype(np.float32)
    return feeds


def compared(name: str, lengths: tuple[int, ...]) -> Report:
    """The report of a model that was compared at these lengths."""
    model = load(name)
    result, report = fused_file(name)
    for length in lengths:
        feeds = feeds_of(model, length)
        for got, wanted in zip(run(result, feeds), run(model, feeds), strict=True):
            assert_same(got, wanted, TOLERANCE)
    return report


@pytest.mark.parametrize("name", RULES)
def test_a_spelling(name: str) -> None:
    report = compared(name, LENGTHS.get(name, (1, 2, 9)))
    assert [block.rule for block in report.blocks if block.status == "fused"] == [RULES[name]]


@pytest.mark.parametrize("name", NEAR)
def test_a_near_miss(name: str) -> None:
    report = compared(name, (7, 12))
    assert not report.count("fused")


def test_there_are_near_misses() -> None:
    assert len(NEAR) == 29


@pytest.mark.parametrize("length", [1, 32, 49, 64, 80])
def test_other_lengths_are_refused(length: int) -> None:
    """The file fails for fewer than 33 tokens, and gives wrong numbers for more than 48."""
    model = load("qwen3_next__rule_chunk16_dyn_dynamo")
    result, report = fused_file("qwen3_next__rule_chunk16_dyn_dynamo")
    assert any("33 to 48; other numbers are refused" in note for note in report.notes)
    with pytest.raises(Exception, match="out of bounds|out of data bounds|Reshape"):
        run(result, feeds_of(model, length))


@pytest.mark.parametrize("length", [1, 32, 49, 80])
def test_any_length_makes_the_file_right(length: int) -> None:
    """The first tokens of a longer sequence do not depend on those after them: they are those of the file at 48."""
    model = load("qwen3_next__rule_chunk16_dyn_dynamo")
    result, report = fused_file("qwen3_next__rule_chunk16_dyn_dynamo", ("any-length",))
    (block,) = report.blocks
    assert block.assumed == ("any-length",)
    longest = feeds_of(model, 80)
    cut = {name: array if name == "s0" else array[:, :length] for name, array in longest.items()}
    known = {name: array if name == "s0" else array[:, :48] for name, array in longest.items()}
    wanted, got = run(model, known)[0], run(result, cut)[0]
    shared = min(length, 48)
    assert got.shape[1] == length
    assert_same(got[:, :shared], wanted[:, :shared], TOLERANCE)


@pytest.mark.parametrize("reader", ["Identity", "Sigmoid"])
def test_values_that_are_the_same_keep_their_names(reader: str) -> None:
    """The output of the model is also transposed by nothing: that is another output, or something reads it."""
    model = load("hand__scan_linear_merged_rank3")
    nodes = [
        helper.make_node("Transpose", ["o"], ["twin"], perm=[0, 1, 2]),
        helper.make_node(reader, ["twin"], ["more"]),
    ]
    model.graph.node.extend(nodes)
    more = onnx.ValueInfoProto()
    more.CopyFrom(model.graph.output[0])
    more.name = "more"
    model.graph.output.append(more)
    result, report = fused(model)
    assert report.count("fused") == 1
    assert [value.name for value in result.graph.output] == ["o", "s", "more"]
    for got, wanted in zip(run(result, feeds_of(model, 5)), run(model, feeds_of(model, 5)), strict=True):
        assert_same(got, wanted, TOLERANCE)


def test_channels_are_heads_of_one_value() -> None:
    """Mamba-1: each of 16 channels has 8 decays of its own, and all share query and key."""
    (block,) = compared("mamba__rule_step_dynamo", (1,)).blocks
    assert block.status == "fused"
    assert block.heads == (1, 16)


def test_a_size_may_be_one_number_or_none() -> None:
    """The last token of a window of open width: one, or none where the window is empty. Its heads are what is left."""
    model = load("qwen3_next__rule_step_dynamo")
    for node in model.graph.node:
        node.input[:] = ["heads" if name == "q" else name for name in node.input]
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "n"
    numbers = {"first": [-1], "end": [2**62], "axis": [1], "shape": [1, 1, -1, 16]}
    model.graph.initializer.extend(numpy_helper.from_array(np.array(each), name) for name, each in numbers.items())
    model.graph.node.insert(0, helper.make_node("Reshape", ["last", "shape"], ["heads"]))
    model.graph.node.insert(0, helper.make_node("Slice", ["q", "first", "end", "axis"], ["last"]))
    result, report = fused(model)
    assert report.count("fused") == 1
    for got, wanted in zip(run(result, feeds_of(model, 3)), run(model, feeds_of(model, 3)), strict=True):
        assert_same(got, wanted, TOLERANCE)


def loop_of(nodes: list[onnx.NodeProto], name: str, result: str) -> onnx.GraphProto:
    """A body with one state of 4 rows and columns, `state_name`."""
    number = helper.make_tensor_value_info(f"number_{name}", onnx.TensorProto.INT64, [])
    flags = [helper.make_tensor_value_info(f"{flag}_{name}", onnx.TensorProto.BOOL, []) for flag in ("on", "still_on")]
    states = [helper.make_tensor_value_info(state, FLOAT, [4, 4]) for state in (f"state_{name}", result)]
    on = helper.make_node("Identity", [f"on_{name}"], [f"still_on_{name}"])
    return helper.make_graph([*nodes, on], name, [number, flags[0], states[0]], [flags[1], states[1]])


def test_loops_in_loops_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """3,600 runs of the inner body are more than a point is given, and no other point is looked at."""
    products = [helper.make_node("MatMul", [["state_inner", "x0", "x1", "x2"][i], "k"], [f"x{i}"]) for i in range(4)]
    inner = helper.make_node("Loop", ["trips", "", "state_outer"], ["done"], body=loop_of(products, "inner", "x3"))
    outer = helper.make_node("Loop", ["trips", "", "state"], ["last"], body=loop_of([inner], "outer", "done"))
    given = [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in SHAPES.items()]
    results = [
        helper.make_tensor_value_info("out", FLOAT, [4, "n"]),
        helper.make_tensor_value_info("last", FLOAT, [4, 4]),
    ]
    trips = numpy_helper.from_array(np.array(60), "trips")
    nodes = [outer, helper.make_node("MatMul", ["last", "q"], ["out"])]
    graph = helper.make_graph(nodes, "g", given, results, [trips])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    count = 0

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return operators.evaluated(*args)

    monkeypatch.setattr(evaluation, "evaluated", counted)
    _, report = fused(model)
    assert not report.blocks
    assert evaluation.MOST_STEPS / 2 < count <= evaluation.MOST_STEPS
