"""Attention and its gradient in random spellings are fused at once, and give what the model gave."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_compiler.passes import Code, Report
from tests.examples import examples
from tests.passes.gradients import assert_close, evaluate, fused_pair, named
from tests.passes.running import Array, Feeds, assert_same, run
from tests.passes.strategies import training
from tests.passes.tape import FLOAT32_MIN, Composed, Training, compose

LEFT = {"Softmax", "Exp", "MatMul", "Einsum", "FusedMatMul", "ReduceSum", "IsNaN"}
"""What a fused pair leaves nothing of."""
SOFTCAPS = ("none", "none", "1 - t*t", "1 - t^2", "(1 + t)*(1 - t)")
TOLERANCE = 1e-5
"""Of the largest gradient, or of 1; the original is float32 throughout, with sums over at most 9 keys."""


def consistent(case: dict[str, Any]) -> dict[str, Any]:
    """The nearest case whose fields go together."""
    sizes = dict(case["sizes"])
    if case["gqa"] == "broadcast":
        sizes["K"] = 1
        case["product"] = "matmul" if case["product"] in ("folded", "einsum") else case["product"]
    elif case["gqa"] == "expand":
        sizes["K"] = math.gcd(sizes["N"], sizes["K"])
    else:
        sizes["K"] = sizes["N"]
    if case["form"] in ("quotient", "power"):
        case["softmax"] = "decomposed"
    if case["mask"] not in ("select", "select_const", "select_twice", "select_bias", "packed", "packed_causal"):
        case["masked_gradient"] = True
    if case["mask"] == "select_const":
        # A constant has sizes, so the scores have them, too.
        case["symbolic"] = False
    return {**case, "sizes": sizes}


CASES = training(
    [1, 3, 5],
    [2, 6, 9],
    mask=st.sampled_from(["none", "select", "select_const", "select_twice", "add", "bias", "packed", "packed_causal"]),
    guard=st.sampled_from(["none", "none", "safe", "nan"]),
    second=st.sampled_from([False, False, True]),
    blended=st.sampled_from([False, False, True]),
    softcap=st.sampled_from(SOFTCAPS),
).map(consistent)


def checked(case: Training, model: onnx.ModelProto, report: Report, composed: Composed, seeds: range) -> None:
    """The fused model is nothing but the two operators, and gives what the original gives."""
    forward, backward = report.blocks
    assert (forward.status, backward.status) == ("fused", "fused"), (forward.code, forward.reason)
    packed = case.mask.startswith("packed") and (case.symbolic or case.sizes["S"] > 1) and not case.second
    assert (forward.layout == "TND") == packed
    assert not {node.op_type for node in model.graph.node} & (LEFT - {"ReduceSum"})
    for seed in seeds:
        feeds = composed.feeds(seed)
        original = named(composed.model, run(composed.model, feeds))
        results = [evaluate(model, feeds)]
        if report.target == "ort":
            results.append(named(model, run(model, feeds)))
        for (name, wanted), result in itertools.product(original.items(), results):
            assert_close(result[name], wanted, TOLERANCE)


@settings(max_examples=examples(30))
@given(CASES, st.integers(0, 1 << 16))
def test_pairs_give_what_the_model_gave(fields: dict[str, Any], seed: int) -> None:
    case = Training(**fields)
    composed = compose(case)
    model, report = fused_pair(composed.model)
    if report.blocks[0].status != "fused":
        # Probabilities from before the guard: NaN rows keep their NaN in the gradient, zeros would be wrong.
        raw = case.guard == "nan" or (case.guard == "safe" and case.form in ("quotient", "power"))
        assert raw and report.blocks[0].code == Code.EMPTY_ROWS, report.blocks[0]
        assert model == ir.to_proto(ir.from_proto(composed.model)), "a declined model was changed"
        return
    checked(case, model, report, composed, range(seed, seed + 2))


@pytest.mark.parametrize("mask", ["none", "select"])
@pytest.mark.parametrize("form", ["through logsumexp", "t - p*sum(t)"])
def test_probabilities_by_the_logarithm_of_their_sum(mask: str, form: str) -> None:
    """As jax differentiates exp(x - logsumexp(x)), and as a hand-written gradient takes it from the probabilities."""
    case = Training(mask=mask, softmax="logsumexp", form=form)
    composed = compose(case)
    model, report = fused_pair(composed.model)
    checked(case, model, report, composed, range(1))


MASKS = list(itertools.product(("select", "select_twice", "add"), (-math.inf, FLOAT32_MIN), (True, False)))


@pytest.mark.parametrize(("mask", "fill", "masked_gradient"), MASKS)
@pytest.mark.parametrize("guard", ["none", "safe"])
def test_rows_without_a_key_keep_their_gradient(mask: str, fill: float, masked_gradient: bool, guard: str) -> None:
    """Zeros, the mean's share or NaN, in dv and in dq and dk, whichever the model gives."""
    case = Training(mask=mask, fill=fill, masked_gradient=masked_gradient, guard=guard)
    composed = compose(case)
    model, report = fused_pair(composed.model)
    checked(case, model, report, composed, range(2))


@pytest.mark.parametrize(
    ("mask", "blended"), [("select", False), ("select", True), ("select_twice", False), ("select_bias", False)]
)
@pytest.mark.parametrize("softcap", ["none", "1 - t*t", "(1 + t)*(1 - t)"])
def test_masked_keys_with_a_share_keep_it_in_the_gradient(mask: str, blended: bool, softcap: str) -> None:
    """Their score of -2 is none that outweighs the others. Behind a soft cap their zeros are multiplied by its
    derivative."""
    case = Training(mask=mask, fill=-2.0, softcap=softcap, blended=blended)
    composed = compose(case)
    model, report = fused_pair(composed.model)
    assert all("EXT-MASK-VALUE" in block.extensions for block in report.blocks)
    checked(case, model, report, composed, range(2))


def test_the_same_model_gives_the_same_result() -> None:
    """Down to the order and the names of nodes, wherever the values lie in memory."""
    sizes = {"B": 3, "N": 4, "K": 4, "S": 5, "T": 6, "D": 8, "E": 3}
    case = Training(sizes, False, "BSND", scale="both", mask="packed_causal", softmax="decomposed", form="power")
    composed = compose(replace(case, masked_gradient=False))
    results, kept = set(), []
    for count in range(30):
        kept.append([object() for _ in range(37 * count)])
        results.add(fused_pair(composed.model)[0].SerializeToString(deterministic=True))
    assert len(results) == 1


def numeric(feeds: Feeds, name: str, capped: bool, step: float = 1e-5) -> Array:
    """Central differences of sum(y * dy) in float64."""

    def loss(changed: Array) -> float:
        values = {key: np.asarray(value, np.float64) for key, value in feeds.items()} | {name: changed}
        repeat = values["q"].shape[1] // values["k"].shape[1]
        key, value = (np.repeat(values[each], repeat, 1) for each in "kv")
        scores = 0.4 * values["q"] @ key.swapaxes(-1, -2)
        scores = 1.5 * np.tanh(scores / 1.5) if capped else scores
        if "bias" in values:
            scores = scores + values["bias"]
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return float((weights / weights.sum(-1, keepdims=True) @ value * values["dy"]).sum())

    origin = np.asarray(feeds[name], np.float64)
    result = np.zeros_like(origin)
    for index in np.ndindex(origin.shape):
        moved = [origin.copy(), origin.copy()]
        moved[0][index] += step
        moved[1][index] -= step
        result[index] = (loss(moved[0]) - loss(moved[1])) / (2 * step)
    return result


@pytest.mark.parametrize("gqa", ["none", "expand", "broadcast"])
@pytest.mark.parametrize("mask", ["none", "bias"])
@pytest.mark.parametrize("softcap", ["none", "1 - t*t"])
def test_gradients_are_those_of_finite_differences(gqa: str, mask: str, softcap: str) -> None:
    sizes = {"B": 1, "N": 4, "K": {"none": 4, "expand": 2, "broadcast": 1}[gqa], "S": 3, "T": 4, "D": 4, "E": 3}
    composed = compose(Training(sizes=sizes, gqa=gqa, mask=mask, softcap=softcap))
    model, report = fused_pair(composed.model)
    assert [block.status for block in report.blocks] == ["fused", "fused"]
    feeds = composed.feeds(0)
    result = evaluate(model, feeds)
    for name in "qkv":
        assert_same(result[f"d{name}"], numeric(feeds, name, softcap != "none"), 1e-4)


@pytest.mark.parametrize("target_case", [Training(), Training(mask="select_const"), Training(mask="bias")])
def test_pairs_for_ascend_break_no_constraint(target_case: Training) -> None:
    composed = compose(target_case)
    model, report = fused_pair(composed.model, "ascend")
    assert [block.status for block in report.blocks] == ["fused", "fused"]
    assert not any(block.extensions for block in report.blocks)
    assert all(all(node.output) for node in model.graph.node if node.domain == "ascend")
    checked(target_case, model, report, composed, range(2))


def test_the_report_names_pairs() -> None:
    model, report = fused_pair(compose(Training(gqa="expand", sizes=Training().sizes | {"K": 2})).model)
    forward, backward = report.blocks
    assert (forward.id, forward.pair, forward.kind, forward.op) == (0, 1, "forward", "FlashAttentionScore")
    assert (backward.id, backward.pair, backward.kind, backward.op) == (1, 0, "backward", "FlashAttentionScoreGrad")
    names = {node.name: node.op_type for node in model.graph.node}
    assert names[forward.node or ""] == forward.op and names[backward.node or ""] == backward.op
    assert forward.heads == backward.heads == (4, 2)
    assert (report.softmaxes, report.count("fused"), report.gradients) == (1, 1, 1)
    assert report.to_json()["summary"]["softmaxes"] == 1
