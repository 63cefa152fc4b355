"""What keeps a graph from running is said, and hinders nothing else."""

from __future__ import annotations

import onnx
import pytest
from onnx import helper
from onnxruntime.capi import onnxruntime_pybind11_state as native

import fa_compiler
from fa_compiler.checks.runtime import RUNTIMES_OWN, TRAINING_ONLY, remarks

from .builders import attention


def _beside(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    """Attention with other nodes behind its output."""
    model = attention(batch=2, length=8)
    model.graph.node.extend(nodes)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


def test_ordinary_models_have_no_remarks() -> None:
    assert remarks(_beside()) == []
    assert fa_compiler.optimize(attention()).report.notes == []


def test_operators_of_onnxruntime_training_are_counted() -> None:
    """Those in branches, too; FusedMatMul, which the inference packages have, is none of them."""
    branch = helper.make_graph(
        [helper.make_node("TanhGrad", ["out", "out"], ["g"], domain="com.microsoft")],
        "branch",
        [],
        [helper.make_tensor_value_info("g", onnx.TensorProto.FLOAT, None)],
    )
    model = _beside(
        helper.make_node("InPlaceAccumulatorV2", ["out", "out"], ["", "sum"], domain="com.microsoft"),
        helper.make_node("FusedMatMul", ["out", "key"], ["again"], domain="com.microsoft", transB=1),
        helper.make_node("If", ["yes"], ["either"], then_branch=branch, else_branch=branch),
    )
    model.graph.input.append(helper.make_tensor_value_info("yes", onnx.TensorProto.BOOL, []))
    wanted = "runs with onnxruntime-training only: InPlaceAccumulatorV2, TanhGrad (2) of com.microsoft"
    assert remarks(model) == [wanted]
    report = fa_compiler.optimize(model).report
    assert report.count("fused") == 1 and wanted in report.notes


def test_what_a_converter_leaves_of_batch_normalization() -> None:
    """tf2onnx keeps TensorFlow's six outputs and its gradient: no runtime takes them, but attention is fused."""
    names = [f"bn{index}" for index in range(6)]
    model = _beside(
        helper.make_node("BatchNormalization", ["out", "s", "s", "s", "s"], names),
        helper.make_node("FusedBatchNormGradV3", [names[0], names[5]], ["gradient"]),
    )
    model.graph.input.append(helper.make_tensor_value_info("s", onnx.TensorProto.FLOAT, [4]))
    report = fa_compiler.optimize(model).report
    assert report.count("fused") == 1
    assert report.notes == [
        "runs nowhere: the converter left what is no operator of ONNX: BatchNormalization, FusedBatchNormGradV3"
    ]


def test_other_superfluous_outputs_are_refused() -> None:
    with pytest.raises(fa_compiler.InputError, match="BatchNormalization"):
        fa_compiler.optimize(_beside(helper.make_node("BatchNormalization", ["out"] * 5, list("abcd"))))


def test_the_installed_runtime_agrees() -> None:
    """It registers nothing that is said to be missing, and what is said to be its own."""
    schemas = {(schema.domain, schema.name) for schema in native.get_all_operator_schema()}
    assert not {name for domain, name in schemas if domain == "com.microsoft" and ("Grad" in name)}
    assert not {("com.microsoft", name) for name in TRAINING_ONLY} & schemas
    assert {("", name) for name in RUNTIMES_OWN} <= schemas


def test_a_model_of_other_domains_only() -> None:
    """It imports no opset of ONNX, whose operators are written beside the fused one."""
    sizes = ["batch", 4, 16]
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, sizes) for name in "qkvy"]
    node = helper.make_node("MultiHeadAttention", list("qkv"), ["y"], "mha", domain="com.microsoft", num_heads=2)
    graph = helper.make_graph([node], "g", values[:3], values[3:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("com.microsoft", 1)], ir_version=10)
    result = fa_compiler.optimize(model)
    assert result.report.count("fused") == 1
    assert isinstance(result.model, onnx.ModelProto)
    assert "" in {opset.domain for opset in result.model.opset_import}


def test_a_call_that_leaves_out_outputs() -> None:
    model = attention()
    nodes = [
        helper.make_node("Softmax", ["x"], ["y"], "inner", axis=-1),
        helper.make_node("Constant", [], ["more"], "unused", value_float=1.0),
    ]
    function = helper.make_function("own", "Soft", ["x"], ["y", "more"], nodes, [helper.make_opsetid("", 17)])
    model.functions.append(function)
    model.opset_import.add(domain="own", version=1)
    place = next(at for at, node in enumerate(model.graph.node) if node.op_type == "Softmax")
    softmax = model.graph.node[place]
    softmax.CopyFrom(helper.make_node("Soft", list(softmax.input), list(softmax.output), "call", domain="own"))
    assert fa_compiler.optimize(model).report.count("fused") == 1


def test_a_model_without_outputs_is_left_as_it_is() -> None:
    """ONNX Runtime loads it, as tools for training leave some behind."""
    model = attention()
    model.graph.ClearField("output")
    result = fa_compiler.optimize(model)
    assert result.model == model
    assert [(block.status, block.reason) for block in result.report.blocks] == [
        ("not_attention", "the graph has no outputs, so that nothing needs what this computes")
    ]
