"""The gradient of attention to the keys a TopK lists: SparseFlashAttentionGrad where the attention is a
SparseFlashAttention, in random spellings; and what is near it and is not."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from fa_compiler.passes import Code, Report
from tests.examples import examples
from tests.passes.gradients import assert_close, evaluate, fused_pair, named
from tests.passes.running import run
from tests.passes.strategies import training
from tests.passes.tape import FLOAT32_MIN, Composed, Training, compose

SPARSE = ["SparseFlashAttention", "SparseFlashAttentionGrad"]
DENSE = ["FlashAttentionScore", "FlashAttentionScoreGrad"]
SIZES = {"B": 2, "N": 4, "K": 4, "S": 5, "T": 6, "D": 8, "E": 8}
TOLERANCE = 1e-5
"""Of the largest gradient, or of 1; the original is float32 throughout, with sums over at most 9 keys."""


def checked(composed: Composed, model: onnx.ModelProto, report: Report, ops: list[str], seed: int = 0) -> None:
    """The pair became these two, and gives what the model gave, in ONNX Runtime and in the float64 reference."""
    assert [block.op for block in report.blocks] == ops, report.blocks[0]
    feeds = composed.feeds(seed)
    original = named(composed.model, run(composed.model, feeds))
    results = [evaluate(model, feeds), named(model, run(model, feeds))]
    for (name, wanted), result in itertools.product(original.items(), results):
        assert_close(result[name], wanted, TOLERANCE)


def consistent(case: dict[str, Any]) -> dict[str, Any]:
    """The nearest case whose fields go together."""
    sizes = dict(case["sizes"])
    sizes["K"] = {"broadcast": 1, "none": sizes["N"]}.get(case["gqa"], math.gcd(sizes["N"], sizes["K"]))
    if case["gqa"] == "broadcast" and case["product"] in ("folded", "einsum"):
        case["product"] = "matmul"
    if case["form"] in ("quotient", "power"):
        case["softmax"] = "decomposed"
    return {**case, "sizes": sizes}


MASKS = st.sampled_from(["listed", "listed_causal"])
CASES = training([4, 5, 7], [4, 6, 9], mask=MASKS, second=st.booleans()).map(consistent)


@settings(max_examples=examples(20))
@given(CASES, st.integers(0, 1 << 16))
def test_pairs_give_what_the_model_gave(fields: dict[str, Any], seed: int) -> None:
    composed = compose(Training(**fields))
    model, report = fused_pair(composed.model)
    checked(composed, model, report, SPARSE, seed)
    assert not {node.op_type for node in model.graph.node} & {"Softmax", "Exp", "MatMul", "Einsum", "FusedMatMul"}


@pytest.mark.parametrize("masked_gradient", [True, False])
@pytest.mark.parametrize("fill", [-math.inf, FLOAT32_MIN])
def test_a_row_that_may_be_without_a_key_leaves_the_pair_dense(masked_gradient: bool, fill: float) -> None:
    """Sizes of rows and keys that are open and their own: rows before the first key would have none. What they give to
    dv has no name in the sparse operator."""
    case = Training(mask="listed_causal", masked_gradient=masked_gradient, fill=fill)
    composed = compose(case)
    for value in composed.model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if value.name in ("k", "v") and dim.dim_param == "S":
                dim.dim_param = "T"
    (ranks,) = (value for value in composed.model.graph.input if value.name == "i")
    ranks.type.tensor_type.shape.dim[2].dim_param = "T"
    model, report = fused_pair(composed.model)
    checked(composed, model, report, DENSE)
    (line,) = (line for line in report.missed if "stays dense" in line)
    assert "a row without a key" in line and "--assume no-empty-rows" in line
    model, report = fused_pair(composed.model, assume=["no-empty-rows"])
    assert not any("stays dense" in line for line in report.missed)
    checked(composed, model, report, SPARSE)


def test_a_guard_against_nan_leaves_the_pair_dense() -> None:
    """The sparse gradient has no rows of zeros for undefined softmaxes."""
    composed = compose(Training(mask="listed", guard="safe"))
    model, report = fused_pair(composed.model)
    checked(composed, model, report, DENSE)
    assert any("stays dense" in line and "NaN" in line for line in report.missed)


def test_a_dense_mask_beside_a_guard_needs_no_excuse() -> None:
    """Where no keys are selected the dense pair is what was asked for."""
    _, report = fused_pair(compose(Training(mask="causal", guard="safe")).model)
    assert [block.op for block in report.blocks] == DENSE
    assert not report.missed


def test_gradients_of_repeated_heads_one_by_one() -> None:
    """Where nobody adds up the gradients of a group, key and value are repeated for the operator."""
    composed = compose(Training(sizes=SIZES | {"K": 1}, mask="listed", gqa="broadcast"))
    graph = composed.model.graph
    (total,) = (node for node in graph.node if node.op_type == "ReduceSum" and _feeds(graph, node, "dv"))
    for node in graph.node:
        if node.name == "last_dv":
            node.input[0] = total.input[0]
    model, report = fused_pair(composed.model)
    checked(composed, model, report, SPARSE)
    assert report.blocks[0].heads == (4, 4)


def _feeds(graph: onnx.GraphProto, node: onnx.NodeProto, output: str) -> bool:
    return any(
        each.op_type == "Identity" and [*each.input] == [*node.output] and each.output[0] == output
        for each in graph.node
    )


def _node(model: onnx.ModelProto, op_type: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.op_type == op_type)


def test_keys_listed_twice_are_no_list() -> None:
    """A mask takes a key once however often it is scattered, the operator as often as it is listed: only a TopK's
    indices, which are all different, are a list."""
    composed = compose(Training(mask="listed", symbolic=False))
    graph = composed.model.graph
    scatter = _node(composed.model, "ScatterElements")
    graph.input.append(helper.make_tensor_value_info("given", onnx.TensorProto.INT64, [2, 5, 2]))
    scatter.input[1] = "given"
    feeds = composed.feeds(0) | {"given": np.full((2, 5, 2), 1)}
    model, report = fused_pair(composed.model)
    assert [block.op for block in report.blocks] == DENSE
    for name, wanted in named(composed.model, run(composed.model, feeds)).items():
        assert_close(evaluate(model, feeds)[name], wanted, TOLERANCE)


def _another_mask(model: onnx.ModelProto) -> None:
    """The gradient is zero at the listed keys, not at the others."""
    back = [node for node in model.graph.node if node.op_type == "Where"][-1]
    back.input[1], back.input[2] = back.input[2], back.input[1]


def _another_scale(model: onnx.ModelProto) -> None:
    """The gradient of the first query is scaled by the number of keys too many; still fused, with that factor."""
    (last,) = (node for node in model.graph.node if node.name == "last_dq")
    model.graph.initializer.append(helper.make_tensor("seven", onnx.TensorProto.FLOAT, [], [7.0]))
    last.op_type = "Mul"
    last.input.append("seven")


def _probabilities_elsewhere(model: onnx.ModelProto) -> None:
    """Somebody wants the probabilities themselves."""
    name = _node(model, "Softmax").output[0]
    model.graph.output.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None] * 4))


def _another_row_sum(model: onnx.ModelProto) -> None:
    """The row sums are added, not subtracted."""
    _node(model, "Sub").op_type = "Add"


def _scores_of_another_key(model: onnx.ModelProto) -> None:
    """The second query's gradient is made with the first key."""
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    _relu_before(model, products[-1], 1)


def _relu_before(model: onnx.ModelProto, node: onnx.NodeProto, place: int) -> None:
    at = [*model.graph.node].index(node)
    model.graph.node.insert(at, helper.make_node("Relu", [node.input[place]], ["changed"]))
    model.graph.node[at + 1].input[place] = "changed"


DECLINED = {
    "another mask": (_another_mask, Code.TRAINING),
    "probabilities elsewhere": (_probabilities_elsewhere, Code.PROBABILITIES_ARE_OUTPUT),
    "another row sum": (_another_row_sum, Code.TRAINING),
    "another operand": (_scores_of_another_key, Code.TRAINING),
}


@pytest.mark.parametrize(("change", "code"), DECLINED.values(), ids=DECLINED)
@pytest.mark.parametrize("second", [False, True])
def test_a_look_alike_is_declined(change: Any, code: Code, second: bool) -> None:
    composed = compose(Training(mask="listed", scale="none", second=second))
    change(composed.model)
    before = composed.model.SerializeToString(deterministic=True)
    _, report = fused_pair(composed.model)
    assert {block.status for block in report.blocks} == {"declined"}
    assert code in {block.code for block in report.blocks}, report.blocks
    assert all(block.culprit and block.reason for block in report.blocks)
    assert composed.model.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("second", [False, True])
def test_a_factor_on_one_gradient_is_kept(second: bool) -> None:
    composed = compose(Training(mask="listed", second=second))
    _another_scale(composed.model)
    model, report = fused_pair(composed.model)
    checked(composed, model, report, SPARSE)
