"""Inputs, outputs and attributes by name, and by position as a node holds them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_compiler.op_registry import (
    EXTENSIONS,
    Kind,
    NodeError,
    RegistryError,
    UnknownProduct,
    bind_inputs,
    bind_outputs,
    count_attrs,
    dtypes,
    full_attrs,
    get,
    names,
    operator,
    place_inputs,
    place_outputs,
    product,
)

ATTENTION = get("FlashAttentionScore")
INCRE = get("IncreFlashAttention")


def test_absent_inputs_are_none_in_the_middle_and_cut_off_at_the_end() -> None:
    given_inputs = {"value": "v", "query": "q", "atten_mask": "m", "key": "k"}
    placed = place_inputs(ATTENTION, given_inputs)
    assert placed == ["q", "k", "v", None, None, None, "m"]
    bound = bind_inputs(ATTENTION, [name or "" for name in placed])
    assert {name: value for name, value in bound.items() if value} == given_inputs
    assert tuple(bound) == ATTENTION.input_names


def test_dynamic_inputs_stand_in_place_with_their_count() -> None:
    inputs = {"query": "q", "key": ["k0", "k1"], "value": ["v0", "v1"], "atten_mask": "m"}
    placed = place_inputs(INCRE, inputs)
    assert placed == ["q", "k0", "k1", "v0", "v1", None, "m"]
    counts = count_attrs(INCRE, inputs)
    assert counts == {"key_count": 2, "value_count": 2}
    bound = bind_inputs(INCRE, placed, counts)
    assert {name: value for name, value in bound.items() if value} == inputs
    assert full_attrs(INCRE, {"num_heads": 2, **counts})["key_count"] == 2


def test_a_single_dynamic_tensor_needs_no_count() -> None:
    for value in ("v", ["v"]):
        inputs = {"query": "q", "key": "k", "value": value}
        assert place_inputs(INCRE, inputs) == ["q", "k", "v"]
        assert count_attrs(INCRE, inputs) == {}
    assert bind_inputs(INCRE, ["q", "k", "v"])["key"] == ["k"]


@given(st.sampled_from(names()), st.data())
def test_placing_and_binding_are_inverse(name: str, data: st.DataObject) -> None:
    spec = get(name)
    inputs: dict[str, Any] = {}
    for entry in spec.inputs:
        if entry.kind is Kind.DYNAMIC:
            count = data.draw(st.integers(1, 3))
            inputs[entry.name] = [f"{entry.name}{i}" for i in range(count)]
        elif entry.kind is Kind.REQUIRED or data.draw(st.booleans()):
            inputs[entry.name] = entry.name
    placed = place_inputs(spec, inputs)
    assert not placed or placed[-1] is not None
    bound = bind_inputs(spec, placed, count_attrs(spec, inputs))
    assert {key: value for key, value in bound.items() if value is not None} == inputs


def test_wrong_inputs_are_refused() -> None:
    with pytest.raises(NodeError, match="FlashAttentionScore has no input 'queri', did you mean 'query'"):
        place_inputs(ATTENTION, {"queri": "q"})
    with pytest.raises(NodeError, match="needs the input key"):
        place_inputs(ATTENTION, {"query": "q", "value": "v"})
    with pytest.raises(NodeError, match="needs the input value"):
        place_inputs(INCRE, {"query": "q", "key": "k", "value": []})
    with pytest.raises(NodeError, match="needs the input value"):
        bind_inputs(ATTENTION, ["q", "k"])
    with pytest.raises(NodeError, match=r"needs 3 tensor\(s\) as value, found 1"):
        bind_inputs(INCRE, ["q", "k", "v"], {"value_count": 3})
    with pytest.raises(NodeError, match="takes 19 inputs, found 20"):
        bind_inputs(ATTENTION, ["x"] * 20)


def test_outputs() -> None:
    assert place_outputs(ATTENTION, {"attention_out": "o"}) == [None, None, None, "o"]
    assert place_outputs(ATTENTION, {"softmax_max": "m"}) == ["m"]
    assert bind_outputs(ATTENTION, ["", "", "", "o"]) == {
        "softmax_max": None,
        "softmax_sum": None,
        "softmax_out": None,
        "attention_out": "o",
    }
    with pytest.raises(NodeError, match="no output 'out'"):
        place_outputs(ATTENTION, {"out": "o"})
    with pytest.raises(NodeError, match="takes 4 outputs, found 5"):
        bind_outputs(ATTENTION, ["a"] * 5)


def test_every_attribute_is_written_in_order() -> None:
    attrs = full_attrs(ATTENTION, {"input_layout": "BSH", "head_num": 8, "cpu_empty_rows": "mean"})
    assert attrs == {
        "scale_value": 1.0,
        "keep_prob": 1.0,
        "pre_tockens": 2147483647,
        "next_tockens": 2147483647,
        "head_num": 8,
        "input_layout": "BSH",
        "inner_precise": 0,
        "sparse_mode": 0,
        "pse_type": 1,
        "seed": 0,
        "offset": 0,
        "out_dtype": 0,
        "softmax_out_layout": "",
        "cpu_empty_rows": "mean",
    }
    assert tuple(attrs)[:-1] == ATTENTION.attr_names
    assert full_attrs(INCRE, {"num_heads": 4})["num_key_value_heads"] == 0


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        ({"input_layout": "BSH"}, "needs the attribute head_num"),
        (
            {"head_num": 8.0, "input_layout": "BSH"},
            "head_num of FlashAttentionScore is 8.0, expected a value of type Int",
        ),
        ({"head_num": True, "input_layout": "BSH"}, "expected a value of type Int"),
        ({"head_num": 8, "input_layout": 3}, "expected a value of type String"),
        ({"head_num": 8, "input_layout": "BSH", "next_tokens": 1}, "did you mean 'next_tockens'?"),
        ({"head_num": 8, "input_layout": "BSH", "cpu_fast": 1}, "no attribute 'cpu_fast'"),
        ({"head_num": 8, "input_layout": "BSH", "key_count": 1}, "no attribute 'key_count'"),
    ],
)
def test_wrong_attributes_are_refused(attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(NodeError) as caught:
        full_attrs(ATTENTION, attrs)
    assert message in str(caught.value)


def test_attributes_of_numpy_and_onnx_are_taken() -> None:
    attrs = full_attrs(ATTENTION, {"head_num": np.int64(8), "input_layout": b"TND", "scale_value": 1})
    assert (attrs["head_num"], attrs["input_layout"], attrs["scale_value"]) == (8, "TND", 1.0)
    assert type(attrs["head_num"]) is int
    assert type(attrs["scale_value"]) is float
    assert full_attrs(get("LightningIndexer"), {"return_values": 1})["return_values"] is True


def test_the_extensions_have_ids_operators_and_sentences() -> None:
    ids = [entry.id for entry in EXTENSIONS]
    assert len(set(ids)) == len(ids)
    kernels = [kernel for name in names() if (kernel := operator(name).kernel) is not None]
    assert {id for kernel in kernels for id in kernel.extensions} == set(ids)
    for entry in EXTENSIONS:
        assert entry.id.startswith("EXT-")
        assert entry.sentence
        assert (entry.attr is None) == (not entry.values and entry.kind == "String")
        assert entry.attr is None or entry.attr.startswith("cpu_")


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("A2", "A2"),
        ("a3", "A3"),
        ("Ascend910B2", "A2"),
        ("Ascend910B4-1", "A2"),
        ("Ascend910B2C", "A2"),
        ("ascend910b", "A2"),
        ("Ascend910_9392", "A3"),
        ("ascend910_93", "A3"),
        ("Ascend950PR_9589", "950"),
        ("Ascend950DT_95A1", "950"),
        ("950", "950"),
        ("Ascend310P3", "310P"),
        ("Ascend310B1", "310B"),
        ("Ascend910A", "910"),
        ("Ascend910ProB", "910"),
        ("Ascend910B", "910"),
    ],
)
def test_soc_versions_belong_to_products(name: str, family: str) -> None:
    assert product(name).name == family


def test_an_unknown_product_is_refused() -> None:
    with pytest.raises(UnknownProduct, match="unknown product or SoC version 'Ascend910X'"):
        product("Ascend910X")


def test_types_have_three_names() -> None:
    for entry in dtypes.TABLE:
        assert dtypes.lookup(entry.ge) == entry
        if entry.onnx is not None:
            assert dtypes.from_onnx(entry.onnx) == entry.ge
            assert dtypes.to_onnx(entry.ge) == entry.onnx
    assert dtypes.to_numpy("DT_BF16") == ml_dtypes.bfloat16
    assert dtypes.to_numpy("DT_FLOAT32") == np.float32
    assert dtypes.from_numpy(ml_dtypes.bfloat16) == "DT_BF16"
    assert dtypes.from_numpy(np.bool_) == "DT_BOOL"
    assert dtypes.from_onnx(0) is None
    with pytest.raises(RegistryError, match="no NumPy type"):
        dtypes.to_numpy("DT_HIFLOAT8")
    with pytest.raises(RegistryError, match="unknown GE data type"):
        dtypes.lookup("DT_FLOAT7")


def test_the_onnx_numbers_are_those_of_onnx() -> None:
    import onnx

    for entry in dtypes.TABLE:
        if entry.onnx is not None and entry.onnx in onnx.TensorProto.DataType.values():
            name = onnx.TensorProto.DataType.Name(entry.onnx)
            assert name.lower() == entry.onnx_name
            assert onnx.helper.tensor_dtype_to_np_dtype(entry.onnx) == dtypes.to_numpy(entry.ge)
