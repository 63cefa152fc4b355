"""CANN's linear attention as GE operators: through .air files and back, and as single operators. The states that they
change in place are an input and an output of one name."""

from __future__ import annotations

import json

import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from fa_compiler.atc.single import by_hand
from fa_compiler.errors import InputError
from fa_compiler.lowering.ascend.air import parse, serialise
from fa_compiler.lowering.ascend.air.check import check_message
from fa_compiler.lowering.ascend.air.schema import ModelDef
from fa_compiler.lowering.ascend.convert import to_ge
from fa_compiler.lowering.ascend.graph import Model, Op
from fa_compiler.lowering.ascend.single_op import check_text, from_json, to_json
from fa_compiler.op_registry import DOMAIN, NodeView, dtypes, full_attrs, get, infer, place_inputs
from tests.op_registry import linear_nodes
from tools.ge_to_onnx import from_ge

NODES = {
    "ChunkGatedDeltaRule": linear_nodes.chunk(),
    "RecurrentGatedDeltaRule": linear_nodes.recurrent(),
    "CausalConv1d": linear_nodes.convolution(linear_nodes.PACKED),
    "FusedCausalConv1d": linear_nodes.cached(),
}
STATES = {"RecurrentGatedDeltaRule": "state", "CausalConv1d": "conv_states", "FusedCausalConv1d": "conv_states"}


def model_of(view: NodeView) -> onnx.ModelProto:
    """The node alone, its tensors the model's inputs, and its outputs, with another name, those of the model."""
    spec = get(view.op_type)
    inputs = [
        helper.make_tensor_value_info(name, dtypes.to_onnx(info.dtype), info.shape)
        for name, info in view.inputs.items()
    ]
    found = infer(view.op_type, view.inputs, view.attrs)
    outputs = [
        helper.make_tensor_value_info(f"new_{name}", dtypes.to_onnx(found[name].dtype), found[name].shape)
        for name in spec.output_names
    ]
    placed = place_inputs(spec, {name: name for name in view.inputs})
    node = helper.make_node(
        view.op_type,
        ["" if name is None else name for name in placed],
        [value.name for value in outputs],
        name="node",
        domain=DOMAIN,
        **full_attrs(spec, view.attrs),
    )
    graph = helper.make_graph([node], "g", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)])


def in_ge(name: str) -> tuple[onnx.ModelProto, Model]:
    """A model of one node, and the same as a GE model that went through a file's bytes, after the loader's rules."""
    proto = model_of(NODES[name])
    written = serialise(to_ge(ir.from_proto(proto)))[0]
    assert check_message(ModelDef.FromString(written)) == []
    return proto, parse(written)


def the(model: Model, op_type: str) -> Op:
    (op,) = [op for op in model.root.ops if op.type == op_type]
    return op


@pytest.mark.parametrize("name", NODES)
def test_through_the_file_and_back(name: str) -> None:
    proto, model = in_ge(name)
    again = from_ge(model)
    (node,) = [node for node in again.graph.node if node.domain == DOMAIN]
    (original,) = proto.graph.node
    assert list(node.input) == list(original.input)
    assert not {*node.input} & {*node.output}
    wanted = {attr.name: helper.get_attribute_value(attr) for attr in original.attribute}
    assert {attr.name: pytest.approx(helper.get_attribute_value(attr)) for attr in node.attribute} == wanted
    assert [value.type for value in again.graph.output] == [value.type for value in proto.graph.output]
    onnx.checker.check_model(again)


@pytest.mark.parametrize("name", STATES)
def test_the_state_is_an_input_and_an_output(name: str) -> None:
    op = the(in_ge(name)[1], name)
    assert STATES[name] in [desc.name for desc in op.input_descs]
    assert STATES[name] in [desc.name for desc in op.output_descs]


@pytest.mark.parametrize("name", NODES)
def test_as_a_single_operator(name: str) -> None:
    op = the(in_ge(name)[1], name)
    entry = to_json(op, op.name)
    assert check_text(json.dumps([entry]).encode()) == []
    again, _ = from_json(entry)
    assert to_json(again, op.name) == entry
    given = [desc.name for desc in again.input_descs]
    assert given == list(get(name).input_names)[: len(given)]


def test_a_file_from_the_command_line() -> None:
    inputs = [
        "query=12,4,32:bfloat16",
        "key=12,4,32:bfloat16",
        "value=12,8,64:bfloat16",
        "beta=12,8:bfloat16",
        "state=13,8,64,32:float32",
        "actual_seq_lengths=2:int32",
        "ssm_state_indices=12:int32",
    ]
    (entry,) = json.loads(by_hand("RecurrentGatedDeltaRule", inputs, [], ["scale_value=0.125"], [], "A2", None))
    assert [(desc["name"], desc["shape"], desc["type"]) for desc in entry["output_desc"]] == [
        ("out", [12, 8, 64], "bfloat16"),
        ("state", [13, 8, 64, 32], "float"),
    ]
    with pytest.raises(InputError, match=r"RG\.1"):
        by_hand("RecurrentGatedDeltaRule", inputs, [], [], [], "A2", "9.1.0")
    with pytest.raises(InputError, match=r"RG\.5.*sum 11"):
        by_hand("RecurrentGatedDeltaRule", inputs, [], [], ["actual_seq_lengths=4,7"], "A2", None)
