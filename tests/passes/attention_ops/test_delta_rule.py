"""LinearAttention on Ascend becomes ChunkGatedDeltaRule or RecurrentGatedDeltaRule, which compute the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from fa_compiler import reference
from fa_compiler.lowering.ascend.air import parse, serialise
from fa_compiler.lowering.ascend.air.check import check_message
from fa_compiler.lowering.ascend.air.schema import ModelDef
from fa_compiler.lowering.ascend.convert import to_ge
from fa_compiler.op_registry import DOMAIN, verify
from fa_compiler.passes import Block, Options, analyse, fuse
from fa_compiler.passes.rewrite.node_view import node_view
from fa_compiler.reference.op_runs import evaluator
from tests.linear_problems import attention
from tools.ge_to_onnx import from_ge

Array = np.ndarray[Any, Any]
NAMES = ("query", "key", "value", "past_state", "decay", "beta")
CHUNKS, STEPS = "ChunkGatedDeltaRule", "RecurrentGatedDeltaRule"
ALL = ("half-attention", "unit-inputs", "slow-decay")
EPSILON = 2.0**-8
"""Half the distance of two numbers in bfloat16, to which results are rounded once; the inputs are rounded before."""


def problem(tokens: int, rule: str = "gated_delta", **more: Any) -> tuple[dict[str, Array], dict[str, Any]]:
    """A call in float32 whose tensors bfloat16 holds exactly, but for the decay."""
    inputs, attrs = attention(np.random.default_rng(tokens), rule, tokens, **({"heads": (2, 4, 2)} | more))
    rounded = {
        name: each if name == "decay" else each.astype(ml_dtypes.bfloat16).astype(np.float32)
        for name, each in inputs.items()
    }
    return rounded, attrs


def model_of(
    inputs: Mapping[str, Array], attrs: Mapping[str, Any], is_open: bool = False, present: bool = True
) -> onnx.ModelProto:
    """A model of one node; with `is_open` its batch and tokens are open sizes."""
    node = helper.make_node(
        "LinearAttention",
        [name if name in inputs else "" for name in NAMES],
        ["y", "state"] if present else ["y"],
        domain="com.microsoft",
        **attrs,
    )
    declared = []
    for name, array in inputs.items():
        shape: list[Any] = list(array.shape)
        if is_open:
            shape[:2] = ["B", "T"] if array.ndim == 3 else ["B", shape[1]]
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        declared.append(helper.make_tensor_value_info(name, kind, shape))
    kinds = {value.name: value.type.tensor_type.elem_type for value in declared}
    results = [helper.make_tensor_value_info("y", kinds["query"], [None] * 3)]
    if present:
        kind = kinds.get("past_state", kinds["query"])
        results.append(helper.make_tensor_value_info("state", kind, [None] * 4))
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph([node], "g", declared, results), opset_imports=opsets, ir_version=10)


def fused(
    model: onnx.ModelProto, *assume: str, soc: str = "A2", cann: str | None = None
) -> tuple[onnx.ModelProto, Block]:
    """The fused model, whose node the product takes, and the report's block."""
    graph = ir.from_proto(model)
    (block,) = fuse(graph, Options("ascend", soc, cann, frozenset(assume))).blocks
    found = [node for node in graph.graph if node.domain == DOMAIN]
    assert [fault for node in found for fault in verify(node_view(node, analyse(graph)), soc, cann)] == []
    result = ir.to_proto(graph)
    onnx.checker.check_model(result, full_check=True)
    if block.status != "fused":
        assert [node.op_type for node in result.graph.node] == ["LinearAttention"]
    return result, block


def wanted(inputs: Mapping[str, Array], attrs: Mapping[str, Any]) -> list[Array]:
    found = reference.run("FlashLinearAttention", inputs, attrs, dtype="float64")
    return [found["output"], found["present_state"]]


def assert_computes(model: onnx.ModelProto, inputs: Mapping[str, Array], results: list[Array]) -> None:
    for got, right in zip(evaluator(model).run(None, dict(inputs)), results, strict=True):
        assert got.shape == right.shape
        assert np.abs(got.astype(np.float64) - right).max() <= EPSILON * np.abs(right).max()


@pytest.mark.parametrize("is_open", [False, True], ids=["fixed", "open"])
@pytest.mark.parametrize("past", [False, True], ids=["new", "past"])
@pytest.mark.parametrize("rule", ["delta", "gated_delta"])
def test_several_tokens(rule: str, past: bool, is_open: bool) -> None:
    inputs, attrs = problem(5, rule, past=past)
    result, block = fused(model_of(inputs, attrs, is_open), *ALL)
    assert (block.op, block.layout, block.heads) == (CHUNKS, "TND", (2, 4))
    assert block.assumed == (ALL if rule == "gated_delta" else ALL[:2])
    assert_computes(result, inputs, wanted(inputs, attrs))


@pytest.mark.parametrize("gate", ["head", "key"])
@pytest.mark.parametrize("is_open", [False, True], ids=["fixed", "open"])
@pytest.mark.parametrize("past", [False, True], ids=["new", "past"])
def test_one_token(past: bool, is_open: bool, gate: str) -> None:
    inputs, attrs = problem(1, gate=gate, past=past)
    given = (*ALL[:2], *(("decode",) if is_open else ()))
    result, block = fused(model_of(inputs, attrs, is_open), *given)
    assert (block.op, set(block.assumed)) == (STEPS, set(given))
    (node,) = [node for node in result.graph.node if node.domain == DOMAIN]
    assert not {*node.input} & {*node.output}
    assert_computes(result, inputs, wanted(inputs, attrs))


def test_one_beta_and_a_scale_of_its_own() -> None:
    inputs, attrs = problem(3)
    inputs["beta"] = inputs["beta"][..., :1]
    attrs["scale"] = 0.75
    result, _ = fused(model_of(inputs, attrs), *ALL)
    assert_computes(result, inputs, wanted(inputs, attrs))


def test_an_output_that_nothing_reads() -> None:
    inputs, attrs = problem(3)
    result, _ = fused(model_of(inputs, attrs, present=False), *ALL)
    assert "Transpose" not in [node.op_type for node in result.graph.node][-4:]
    assert_computes(result, inputs, wanted(inputs, attrs)[:1])


@pytest.mark.parametrize(
    ("tokens", "soc", "cann", "kind"),
    [
        (5, "A2", None, TensorProto.BFLOAT16),
        (5, "950", None, TensorProto.FLOAT),
        (1, "A2", None, TensorProto.FLOAT),
        (1, "A2", "9.0.0", TensorProto.BFLOAT16),
    ],
)
def test_the_type_of_the_states(tokens: int, soc: str, cann: str | None, kind: int) -> None:
    """float32 where the operator takes it on the product."""
    inputs, attrs = problem(tokens)
    result, _ = fused(model_of(inputs, attrs), *ALL, soc=soc, cann=cann)
    (node,) = [node for node in result.graph.node if node.domain == DOMAIN]
    types = {value.name: value.type.tensor_type.elem_type for value in result.graph.value_info}
    assert types[node.output[1]] == kind
    assert_computes(result, inputs, wanted(inputs, attrs))


def test_bfloat16_needs_no_cast() -> None:
    """With a state in bfloat16, too. A state in float32 is one of the operator only where the product takes it."""
    inputs, attrs = problem(5)
    halfs = {name: each.astype(ml_dtypes.bfloat16) for name, each in inputs.items()}
    result, block = fused(model_of(halfs, attrs), *ALL[1:])
    assert (block.op, block.assumed) == (CHUNKS, ALL[1:])
    casts = [node for node in result.graph.node if node.op_type == "Cast"]
    assert [node.input[0] for node in casts] == ["decay"]
    mixed = halfs | {"past_state": inputs["past_state"]}
    assert fused(model_of(mixed, attrs), *ALL[1:])[1].code == "dtype"
    assert fused(model_of(mixed, attrs), *ALL[1:], soc="950")[1].op == CHUNKS


def test_two_attentions_that_begin_with_one_state() -> None:
    inputs, attrs = problem(1)
    model = model_of(inputs, attrs)
    again = onnx.NodeProto()
    again.CopyFrom(model.graph.node[0])
    again.output[:] = ["y2", "state2"]
    again.attribute.append(helper.make_attribute("scale", 0.75))
    model.graph.node.append(again)
    for value in [*model.graph.output]:
        added = model.graph.output.add()
        added.CopyFrom(value)
        added.name += "2"
    graph = ir.from_proto(model)
    fuse(graph, Options("ascend", assume=frozenset(ALL)))
    assert [node.op_type for node in graph.graph if node.domain == DOMAIN] == [STEPS, STEPS]
    results = [*wanted(inputs, attrs), *wanted(inputs, attrs | {"scale": 0.75})]
    assert_computes(ir.to_proto(graph), inputs, results)


DECLINED: dict[str, tuple[int, dict[str, Any], tuple[str, ...], str, str, str | None]] = {
    "a rule": (5, {"rule": "gated"}, ALL, "A2", "no operator for the rule gated", "--target ort"),
    "heads of query": (5, {"heads": (4, 2, 2)}, ALL, "A2", "as many heads of key as of query", None),
    "heads of key": (5, {"heads": (4, 4, 2)}, ALL, "A2", "as many heads of key as of query", None),
    "a decay for each key dimension": (5, {"gate": "key"}, ALL, "A2", "only for one token", None),
    "the type": (5, {}, (), "A2", "computes in bfloat16, and this is float32", f"--assume {','.join(ALL)} if"),
    "the type alone": (5, {}, ALL[1:], "A2", "computes in bfloat16, and this is float32", "`--assume half-attention`"),
    "what the numbers are": (5, {}, ALL[:1], "A2", "may overflow", "--assume unit-inputs,slow-decay"),
    "what the numbers of a step are": (1, {}, ALL[:1], "A2", "log decay above 0", "--assume unit-inputs "),
    "the product": (5, {}, ALL, "310P", "not available on Atlas inference", "--target ort"),
    "the size of a head": (5, {"size": 256}, ALL, "A2", "Dk is 256", "--target ort"),
}


@pytest.mark.parametrize("case", DECLINED)
def test_what_stays(case: str) -> None:
    tokens, more, assume, soc, words, hint = DECLINED[case]
    rule = more.pop("rule", "gated_delta")
    inputs, attrs = problem(tokens, rule, **more)
    _, block = fused(model_of(inputs, attrs), *assume, soc=soc)
    assert block.status == "declined"
    assert words in (block.reason or "")
    assert block.hint is None if hint is None else hint in (block.hint or "")


def test_what_a_version_of_cann_does_not_have() -> None:
    inputs, attrs = problem(5)
    _, block = fused(model_of(inputs, attrs), *ALL, cann="9.0.0")
    assert "no variant of ChunkGatedDeltaRule is known for CANN 9.0.0" in (block.reason or "")
    inputs, attrs = problem(1, gate="key")
    assert fused(model_of(inputs, attrs), *ALL, cann="9.0.0")[1].op == STEPS
    _, block = fused(model_of(inputs, attrs), *ALL, cann="8.5.0")
    assert "RG.4" in (block.reason or "")


def test_an_open_number_of_tokens_with_a_decay_for_each_key_dimension() -> None:
    inputs, attrs = problem(1, gate="key")
    _, block = fused(model_of(inputs, attrs, is_open=True), *ALL)
    assert (block.status, block.hint) == ("declined", "--assume decode if every run decodes one token")


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("is_open", [False, True], ids=["fixed", "open"])
def test_through_an_air_file_and_back(tokens: int, is_open: bool) -> None:
    inputs, attrs = problem(tokens)
    assume = (*ALL, "decode") if tokens == 1 else ALL
    result, block = fused(model_of(inputs, attrs, is_open), *assume)
    written = serialise(to_ge(ir.from_proto(result)))[0]
    assert check_message(ModelDef.FromString(written)) == []
    again = from_ge(parse(written))
    assert [node.op_type for node in again.graph.node if node.domain == DOMAIN] == [block.op]
    feeds = {value.name: inputs[value.name] for value in again.graph.input}
    assert_computes(again, feeds, wanted(inputs, attrs))
