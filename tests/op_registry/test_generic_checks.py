"""The rule of all operators: required inputs and attributes, known names, types, products."""

from __future__ import annotations

from typing import Any

import pytest

from fa_compiler.op_registry import Kind, NodeView, TensorInfo, UnknownOp, UnknownProduct, get, names, verify

from .nodes import forward, tensor


def minimal(name: str) -> NodeView:
    """A node with all required inputs and attributes and no known shapes."""
    spec = get(name)
    inputs: dict[str, Any] = {}
    for entry in spec.inputs:
        info = TensorInfo(entry.dtypes[0])
        if entry.kind is Kind.DYNAMIC:
            inputs[entry.name] = [info, info]
        elif entry.kind is Kind.REQUIRED:
            inputs[entry.name] = info
    samples: dict[str, Any] = {"Int": 8, "Float": 0.5, "String": "BNSD", "ListInt": [1, 2], "sp": 2, "update_type": 1}
    attrs = {attr.name: samples.get(attr.name, samples[attr.type]) for attr in spec.attrs if attr.required}
    return NodeView(name, "node", inputs, {}, attrs)


@pytest.mark.parametrize("name", names())
def test_a_missing_required_input_is_a_null_pointer(name: str) -> None:
    node = minimal(name)
    for missing in node.inputs:
        inputs = {key: value for key, value in node.inputs.items() if key != missing}
        found = verify(NodeView(name, "node", inputs, {}, node.attrs))
        assert ("G0", 161001, missing) in [(v.constraint, v.code, v.tensor) for v in found]
        refusals = [v.refusal("A2") for v in found if v.constraint == "G0"]
        assert f"is refused by A2: the required input {missing} is absent" in refusals


def test_a_missing_required_attribute_is_a_null_pointer() -> None:
    found = verify(forward(attrs={"head_num": None}))
    assert [(v.constraint, v.code, v.tensor) for v in found] == [("G0", 161001, "head_num")]


@pytest.mark.parametrize(
    ("inputs", "attrs", "culprit"),
    [
        ({"queri": tensor((1,))}, {}, "queri"),
        ({"prefix": tensor((2,), "DT_INT32")}, {}, "prefix"),
        ({"atten_mask": [tensor((1,)), tensor((2,))]}, {}, "atten_mask"),
        ({}, {"headnum": 8}, "headnum"),
        ({}, {"scale_value": "x"}, "scale_value"),
        ({}, {"sparse_mode": 1.5}, "sparse_mode"),
        *(({}, {"scale_value": value}, "scale_value") for value in (float("nan"), float("inf"), float("-inf"), 1e39)),
        ({}, {"keep_prob": float("nan")}, "keep_prob"),
        ({}, {"cpu_mask_value": float("-inf")}, "cpu_mask_value"),
    ],
)
def test_what_the_prototype_does_not_have(inputs: Any, attrs: Any, culprit: str) -> None:
    found = verify(forward(inputs, attrs))
    assert [(v.constraint, v.code, v.tensor) for v in found] == [("G0", 161002, culprit)]
    assert culprit in found[0].message


def test_an_unknown_output() -> None:
    found = verify(forward(outputs={"out": tensor((1,))}))
    assert [(v.constraint, v.tensor) for v in found] == [("G0", "out")]


@pytest.mark.parametrize("target", ["310P", "Ascend310B1", "Ascend910A"])
def test_a_product_without_the_operator(target: str) -> None:
    (violation,) = verify(forward(), target)
    assert (violation.constraint, violation.code) == ("G0", 161002)
    assert "is not available on" in violation.message


def test_an_operator_may_be_restricted_on_a_product() -> None:
    given = minimal("PromptFlashAttention")
    node = NodeView(given.op_type, "node", given.inputs, {}, {**given.attrs, "pre_tokens": 2147483647})
    assert verify(node, "310P") == []
    bf16 = NodeView(node.op_type, "node", {**node.inputs, "query": TensorInfo("DT_BF16")}, {}, node.attrs)
    assert ("PFA.1", "query") in [(v.constraint, v.tensor) for v in verify(bf16, "310P")]


def test_an_older_cann_lacks_newer_inputs() -> None:
    node = forward({"sink": tensor((8,), "DT_FLOAT")})
    assert verify(node, "A2", cann="8.5") == []
    (violation,) = verify(node, "A2", cann="8.0")
    assert violation.message == (
        "FlashAttentionScore (seed_v2_cann8) has no input 'sink'; known are actual_seq_kvlen, actual_seq_qlen, "
        "atten_mask, drop_mask, key, kv_start_idx, padding_mask, prefix, q_start_idx, query, real_shift, value"
    )
    attrs = forward(attrs={"softmax_out_layout": ""})
    assert [v.tensor for v in verify(attrs, "A2", cann="8.0")] == ["softmax_out_layout"]


def test_unknown_operators_and_targets() -> None:
    with pytest.raises(UnknownOp):
        verify(NodeView("Softmax", "n", {}, {}, {}))
    with pytest.raises(UnknownProduct):
        verify(forward(), "TPU")
