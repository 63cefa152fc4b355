"""ONNX knows the nodes: the checker takes them, shape inference fills in their outputs."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from fa_compiler.op_registry import DOMAIN, FILE_DOMAIN, FILE_OP, VERSION, full_attrs, get, names, place_inputs
from fa_compiler.op_registry.schemas import CAN_INFER, build_schema, register

HALF = TensorProto.FLOAT16

infers = pytest.mark.skipif(not CAN_INFER, reason="this onnx cannot call inference written in Python")


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


def value(name: str, dtype: int, shape: list[Any]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def model(node: onnx.NodeProto, inputs: list[onnx.ValueInfoProto], output: onnx.ValueInfoProto) -> onnx.ModelProto:
    graph = helper.make_graph([node], "g", inputs, [output])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def attention(**attrs: Any) -> onnx.NodeProto:
    spec = get("FlashAttentionScore")
    placed = place_inputs(spec, {"query": "q", "key": "k", "value": "v", "atten_mask": "m"})
    node = helper.make_node("FlashAttentionScore", [name or "" for name in placed], ["", "", "", "out"], domain=DOMAIN)
    given = {"head_num": 8, "input_layout": "BNSD"} | attrs
    node.attribute.extend(helper.make_attribute(key, found) for key, found in full_attrs(spec, given).items())
    return node


INPUTS = [
    value("q", HALF, ["b", 8, "s", 64]),
    value("k", HALF, ["b", 2, "t", 64]),
    value("v", HALF, ["b", 2, "t", 32]),
    value("m", TensorProto.BOOL, ["b", 1, "s", "t"]),
]


def test_registering_again_does_nothing() -> None:
    before = len(onnx.defs.get_all_schemas_with_history())
    register()
    assert len(onnx.defs.get_all_schemas_with_history()) == before
    assert {s.name for s in onnx.defs.get_all_schemas_with_history() if s.domain == DOMAIN} == set(names())


def test_schemas_are_documented() -> None:
    """Each input, output and attribute of each operator has a text; the texts are those of the operator's file."""
    for name in names():
        schema = onnx.defs.get_schema(name, VERSION, DOMAIN)
        assert all(entry.description for entry in (*schema.inputs, *schema.outputs)), name
        assert all(entry.description for entry in schema.attributes.values()), name
    schema = onnx.defs.get_schema(FILE_OP, VERSION, FILE_DOMAIN)
    assert "FA.3: head_num is positive and equals the head count of query." in schema.doc
    assert "atten_mask has the type, shape and content that sparse_mode requires" in schema.inputs[6].description
    assert "whose every key is masked" in schema.attributes["cpu_empty_rows"].description
    assert "shape of query with Dv" in schema.outputs[0].description


@pytest.mark.parametrize("attrs", [{}, {"cpu_empty_rows": "mean"}, {"sparse_mode": 3, "scale_value": 0.125}])
def test_the_checker_takes_absent_inputs_and_outputs(attrs: dict[str, Any]) -> None:
    onnx.checker.check_model(model(attention(**attrs), INPUTS, value("out", HALF, ["b", 8, "s", 32])), full_check=True)


@infers
def test_shapes_are_inferred() -> None:
    bare = model(attention(), INPUTS, value("out", HALF, [None] * 4))
    inferred = onnx.shape_inference.infer_shapes(bare, check_type=True, strict_mode=True)
    dims = inferred.graph.output[0].type.tensor_type.shape.dim
    assert [dim.dim_param or dim.dim_value for dim in dims] == ["b", 8, "s", 32]


@infers
@pytest.mark.parametrize(("key_batch", "batch"), [(1, "b"), (3, 3), ("kv", None)])
def test_the_batch_is_inferred_from_query_key_and_value(key_batch: int | str, batch: int | str | None) -> None:
    key, values = (value(name, HALF, [key_batch, 2, "t", size]) for name, size in (("k", 64), ("v", 32)))
    inputs = [INPUTS[0], key, values, INPUTS[3]]
    bare = model(attention(), inputs, value("out", HALF, [None] * 4))
    inferred = onnx.shape_inference.infer_shapes(bare, check_type=True, strict_mode=True)
    dims = inferred.graph.output[0].type.tensor_type.shape.dim
    found, *others = [dim.dim_param or dim.dim_value for dim in dims]
    assert others == [8, "s", 32]
    # What is unknown gets a name of onnx's own.
    assert found == batch if batch is not None else str(found).startswith("unk_")


@infers
def test_a_wrong_stated_shape_is_found() -> None:
    wrong = model(attention(), INPUTS, value("out", HALF, ["b", 8, "s", 64]))
    with pytest.raises(onnx.shape_inference.InferenceError):
        onnx.checker.check_model(wrong, full_check=True)


@infers
def test_gradients_are_inferred() -> None:
    node = helper.make_node(
        "FlashAttentionScoreGrad",
        ["q", "k", "v", "dy", *[""] * 4, "max", "sum", "", "dy"],
        ["", "dk"],
        domain=DOMAIN,
        head_num=8,
        input_layout="BNSD",
    )
    statistics = [value(name, TensorProto.FLOAT, ["b", 8, "s", 8]) for name in ("max", "sum")]
    inputs = [*INPUTS[:3], value("dy", HALF, ["b", 8, "s", 32]), *statistics]
    bare = model(node, inputs, value("dk", HALF, [None] * 4))
    onnx.checker.check_model(bare, full_check=True)
    inferred = onnx.shape_inference.infer_shapes(bare, strict_mode=True)
    dims = inferred.graph.output[0].type.tensor_type.shape.dim
    assert [dim.dim_param or dim.dim_value for dim in dims] == ["b", 2, "t", 64]


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        ({"input_layout": "BNSD"}, "head_num"),
        ({"head_num": 8, "input_layout": "BNSD", "cpu_fast": 1}, "cpu_fast"),
        ({"head_num": "8", "input_layout": "BNSD"}, "head_num"),
    ],
)
def test_the_checker_refuses_wrong_attributes(attrs: dict[str, Any], message: str) -> None:
    node = helper.make_node("FlashAttentionScore", ["q", "k", "v"], ["", "", "", "out"], domain=DOMAIN, **attrs)
    with pytest.raises(onnx.checker.ValidationError, match=message):
        onnx.checker.check_model(model(node, INPUTS[:3], value("out", HALF, [None] * 4)))


def test_the_checker_refuses_a_wrong_type() -> None:
    inputs = [*INPUTS[:3], value("m", TensorProto.INT32, ["b", 1, "s", "t"])]
    with pytest.raises(onnx.shape_inference.InferenceError, match="atten_mask"):
        onnx.checker.check_model(model(attention(), inputs, value("out", HALF, [None] * 4)), full_check=True)


def test_dynamic_inputs_are_a_variadic_tail() -> None:
    node = helper.make_node(
        "IncreFlashAttention",
        ["q", "k0", "k1", "v0", "v1", "", "m"],
        ["out"],
        domain=DOMAIN,
        num_heads=8,
        key_count=2,
        value_count=2,
    )
    inputs = [
        value("q", HALF, [2, 1, 512]),
        *(value(name, HALF, [1, 9, 512]) for name in ("k0", "k1", "v0", "v1")),
        value("m", TensorProto.BOOL, [2, 9]),
    ]
    onnx.checker.check_model(model(node, inputs, value("out", HALF, [2, 1, 512])), full_check=True)


@pytest.mark.parametrize("name", names())
def test_a_schema_states_the_prototype(name: str) -> None:
    spec, schema = get(name), onnx.defs.get_schema(name, VERSION, DOMAIN)
    assert set(spec.attr_names) <= set(schema.attributes)
    assert [output.name for output in schema.outputs] == list(spec.output_names)
    given = [entry.name for entry in schema.inputs]
    assert given == list(spec.input_names) or given == [*spec.input_names[: len(given) - 1], "tail"]
    assert build_schema(spec).since_version == VERSION
