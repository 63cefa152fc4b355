"""What is around attention by the routes onnx and npu: the nodes that are written, what ATC's parser makes of them, and
what is left in plain operators."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper

import fa_compiler
from fa_compiler.atc.layer import Layer, Step, layer
from fa_compiler.errors import InputError
from fa_compiler.lowering.ascend.onnx_route.check import check_model
from fa_compiler.lowering.onnx_file.around_bodies import bodies_of
from fa_compiler.op_registry import DOMAIN, VERSION, names
from fa_compiler.op_registry.parser_plugins import PARSER_PLUGINS, plugin_misfit
from fa_compiler.passes.answer.report import Code
from tests.lowering.ascend.test_around import LLAMA, MODELS
from tests.passes.around import test_gelu, test_rms_norm, test_rotary
from tests.passes.around.running import SIZES, assert_equal

PARSER: dict[str, tuple[str, dict[str, Any]]] = {
    "NPURmsNorm": ("RmsNorm", {"epsilon": 1e-6}),
    "NPUAddRmsNorm": ("AddRmsNorm", {"epsilon": 1e-6}),
    "NPUGeglu": ("GeGluV2", {"dim": -1, "approximate": 1, "activate_left": 0}),
    "NPUGeluV2": ("GeluV2", {}),
    "NPURotaryPositionEmbedding": ("RotaryPositionEmbedding", {}),
}
"""The GE operators that the plugins of ATC's parser make, with the attributes that the nodes do not say."""
SMALL = test_rms_norm.NORM.replace("Add(m, e)", "Add(m, tiny)")
TINY = "float tiny = {1e-6}"
BY_TANH, READY = test_gelu.BY_TANH["3 and 5"], test_gelu.BY_TANH["1 by tanh"]


def rms_norm(body: str, inputs: str = "float[B,S,8] x", outputs: str = "float[B,S,8] y") -> onnx.ModelProto:
    return test_rms_norm.model(body, inputs, outputs, more=TINY)


NPU: dict[str, tuple[onnx.ModelProto, str]] = {
    "a norm": (rms_norm(SMALL + "y = Mul(n, w)"), "NPURmsNorm"),
    "a sum": (
        rms_norm(f"x = Add(a, b) {SMALL} y = Mul(n, w)", test_rms_norm.TWO, test_rms_norm.BOTH),
        "NPUAddRmsNorm",
    ),
    "the gate behind": (
        test_gelu.model("b, a = Split<axis=-1, num_outputs=2>(x) " + BY_TANH + "y = Mul(b, g1)"),
        "NPUGeglu",
    ),
    "two products": (
        test_gelu.model("c0 = MatMul(x, gates) a = Add(c0, bias) b = MatMul(x, ups) " + BY_TANH + "y = Mul(g1, b)"),
        "NPUGeglu",
    ),
    "GELU by Erf": (MODELS["GeluV2"], "NPUGeluV2"),
    "GELU by tanh": (
        test_gelu.model(f"a = Neg(x) {BY_TANH}y = Neg(g1)", outputs="float[B,S,8] y"),
        "NPUGeluV2",
    ),
    "halves": (test_rotary.model(*test_rotary.SPELLINGS["12"][:3]), "NPURotaryPositionEmbedding"),
    "neighbours": (
        test_rotary.model(test_rotary.NEIGHBOURS + test_rotary.END),
        "NPURotaryPositionEmbedding",
    ),
}


def written(
    proto: onnx.ModelProto, folder: Path, route: str, **options: Any
) -> tuple[onnx.ModelProto, fa_compiler.Report]:
    shapes = {}
    for value in proto.graph.input:
        sizes = value.type.tensor_type.shape.dim
        shapes[value.name] = [SIZES.get(dim.dim_param, dim.dim_value) for dim in sizes]
    report = fa_compiler.compile_for_atc(proto, folder, "Ascend910B2", input_shape=shapes, route=route, **options)
    return onnx.load(folder / "model.onnx"), report


def runnable(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the operators that ATC's parser makes of it, and their functions."""
    for node in proto.graph.node:
        if node.domain == "npu":
            op_type, attrs = PARSER[node.op_type]
            node.domain, node.op_type = DOMAIN, op_type
            node.attribute.extend(helper.make_attribute(name, value) for name, value in attrs.items())
    made = {node.op_type for node in proto.graph.node if node.domain == DOMAIN}
    opset = next(entry.version for entry in proto.opset_import if not entry.domain)
    proto.functions.extend(bodies_of(made, opset))
    del proto.opset_import[:], proto.graph.value_info[:]
    proto.opset_import.extend((helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, VERSION)))
    return proto


@pytest.mark.parametrize("op_type", MODELS)
def test_route_onnx_writes_every_operator(op_type: str, tmp_path: Path) -> None:
    result, report = written(MODELS[op_type], tmp_path / "plug", "onnx")
    assert [node.op_type for node in result.graph.node if node.domain == DOMAIN] == [op_type]
    assert [line.op for line in report.around] == [op_type]
    source = (tmp_path / "plug" / "plugin" / "ascend_onnx_plugin.cc").read_text(encoding="utf-8")
    assert source.count("REGISTER_CUSTOM_OP") == 1
    assert f'REGISTER_CUSTOM_OP("{op_type}")' in source
    assert check_model(result, None) == []
    assert_equal(MODELS[op_type], runnable(result), odd=False)


@pytest.mark.parametrize("case", NPU)
def test_route_npu_writes_what_the_parser_reads(case: str, tmp_path: Path) -> None:
    proto, expected = NPU[case]
    result, report = written(proto, tmp_path / "npu", "npu")
    (node,) = [node for node in result.graph.node if node.domain == "npu"]
    assert node.op_type == expected
    assert {attr.name for attr in node.attribute} == set(PARSER_PLUGINS[PARSER[expected][0]].read)
    (line,) = (line for line in report.around if line.op == expected)
    assert (line.status, line.node) == ("fused", node.name)
    assert check_model(result, None) == []
    assert_equal(proto, runnable(result), odd=False)


LEFT: dict[str, tuple[onnx.ModelProto, str]] = {
    "another epsilon": (MODELS["RmsNorm"], "computes with epsilon 1e-06, and here it is 1e-05"),
    "another epsilon behind a sum": (MODELS["AddRmsNorm"], "NPUAddRmsNorm of ATC's own parser computes with epsilon"),
    "the exact GELU": (
        test_gelu.model("b, a = Split<axis=-1, num_outputs=2>(x) g1 = Gelu(a) y = Mul(b, g1)"),
        "computes with approximate 1, and here it is 0",
    ),
    "the gate in front": (
        test_gelu.model(test_gelu.SPLIT + READY + "y = Mul(g1, b)"),
        "computes with activate_left False, and here it is 1",
    ),
    "another axis": (
        test_gelu.model(
            "b, a = Split<axis=0, num_outputs=2>(x) " + READY + "y = Mul(b, g1)",
            inputs="float[2,S,8] x",
            outputs="float[1,S,8] y",
        ),
        "computes with dim -1, and here it is -3",
    ),
    "SwiGLU": (MODELS["SwiGlu"], "has no plugin for SwiGlu"),
    "a clipped gate": (MODELS["ClippedSwiglu"], "has no plugin for ClippedSwiglu"),
    "LayerNorm": (MODELS["LayerNormV4"], "has no plugin for LayerNormV4"),
    "LayerNorm of a sum": (MODELS["AddLayerNorm"], "has no plugin for AddLayerNorm"),
}


@pytest.mark.parametrize("case", LEFT)
def test_route_npu_leaves_what_the_parser_does_not_read(case: str, tmp_path: Path) -> None:
    proto, reason = LEFT[case]
    result, report = written(proto, tmp_path / "npu", "npu")
    line = report.around[0]
    assert line.code is Code.PARSER
    assert reason in (line.reason or "")
    assert line.hint is not None
    assert_equal(proto, runnable(result), odd=False)


def test_a_gelu_is_fused_alone_where_no_plugin_writes_its_product(tmp_path: Path) -> None:
    result, report = written(MODELS["GeGluV2"], tmp_path / "npu", "npu")
    assert [line.op for line in report.around] == ["NPUGeluV2"]
    assert_equal(MODELS["GeGluV2"], runnable(result), odd=False)


READY_MADE = {
    "RMSNormalization": "y = RMSNormalization<epsilon={0}>(x, w)",
    "SkipSimplifiedLayerNormalization": "y = com.microsoft.SkipSimplifiedLayerNormalization<epsilon={0}>(x, x, w)",
}


@pytest.mark.parametrize("name", READY_MADE)
@pytest.mark.parametrize(("route", "epsilon"), [("onnx", 1e-5), ("npu", 1e-6), ("npu", 1e-5)])
def test_operators_that_the_parser_does_not_know(name: str, route: str, epsilon: float, tmp_path: Path) -> None:
    """ONNX's own are written out where no plugin takes them; those of ONNX Runtime are refused."""
    opset = 23 if name == "RMSNormalization" else 17
    proto = test_rms_norm.model(READY_MADE[name].format(epsilon), opset=opset)
    if (route, epsilon, opset) == ("npu", 1e-5, 17):
        with pytest.raises(InputError, match="ATC's parser does not know the operator"):
            written(proto, tmp_path / "out", route)
        return
    result, _ = written(proto, tmp_path / "out", route)
    is_fused = route == "onnx" or epsilon == 1e-6
    assert bool({node.domain for node in result.graph.node} - {""}) == is_fused
    assert name not in {node.op_type for node in result.graph.node}
    assert_equal(proto, runnable(result), odd=False)


@pytest.mark.parametrize("route", ["onnx", "npu"])
def test_attention_alone(route: str, tmp_path: Path) -> None:
    proto = NPU["a norm"][0]
    result, report = written(proto, tmp_path / "plain", route, only="attention")
    assert not report.around
    assert {node.domain for node in result.graph.node} == {""}


def reported(folder: Path, route: str, **options: Any) -> dict[str, Any]:
    shapes = {"input_ids": (1, 16), "attention_mask": (1, 16)}
    fa_compiler.compile_for_atc(LLAMA, folder, "Ascend910B2", input_shape=shapes, route=route, **options)
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert isinstance(report, dict)
    return report


def counted(folder: Path, route: str, **options: Any) -> Counter[str]:
    return Counter(reported(folder, route, **options)["operators"])


def test_a_decoder_by_each_route(tmp_path: Path) -> None:
    plug = counted(tmp_path / "plug", "onnx")
    npu = counted(tmp_path / "npu", "npu", assume=["half-attention", "empty-bias"])
    layers = plug["FlashAttentionScore"]
    assert npu["NPUPromptFlashAttention"] == layers > 0
    assert plug["RmsNorm"] + plug["AddRmsNorm"] == npu["NPURmsNorm"] + npu["NPUAddRmsNorm"] == 2 * layers + 1
    assert plug["RotaryPositionEmbedding"] == npu["NPURotaryPositionEmbedding"] == 2 * layers
    assert (plug["SwiGlu"], plug["Sigmoid"]) == (layers, 0)
    assert npu["Sigmoid"] == layers
    alone = counted(tmp_path / "alone", "onnx", only="attention")
    assert plug.total() < alone.total() - 20 * layers


def test_the_report_says_how_large_a_layer_is(tmp_path: Path) -> None:
    """docs/ascend.md has these figures for a model of the same operators."""
    for route in ("air", "onnx"):
        assert reported(tmp_path / route, route)["layer"] == {"operators": 13, "kernels": 11}
    npu = reported(tmp_path / "npu", "npu", assume=["half-attention", "empty-bias"])
    assert npu["layer"] == {"operators": 20, "kernels": 18}
    alone = reported(tmp_path / "alone", "air", only="attention")
    assert alone["layer"] == {"operators": 49, "kernels": 45}


def test_the_layer_is_what_lies_between_two_attentions() -> None:
    steps = [
        Step("mask", "Add", []),
        Step("a", "FlashAttentionScore", ["mask"]),
        Step("shape", "Reshape", ["a"]),
        Step("product", "MatMulV2", ["shape"]),
        Step("unread", "Cast", ["product"]),
        Step("b", "FlashAttentionScore", ["product", "mask"]),
        Step("c", "FlashAttentionScore", ["mask"]),
    ]
    assert layer(steps, {"a", "b"}) == Layer(operators=3, kernels=2)
    assert layer(steps, {"b", "c"}) is None
    assert layer(steps, {"a"}) is None


def test_an_older_release_has_no_plugin() -> None:
    assert plugin_misfit("RmsNorm", {"epsilon": 1e-6}, "8.5.0-beta.1") is None
    assert "not known before CANN 8.5.0" in (plugin_misfit("RmsNorm", {"epsilon": 1e-6}, "8.3") or "")
    assert "epsilon" in (plugin_misfit("RmsNorm", {"epsilon": 1.00001e-6}) or "")
    assert set(PARSER_PLUGINS) <= set(names())


def rules(node: onnx.NodeProto) -> list[str]:
    tensor = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 4])
    result = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2, 4])
    graph = helper.make_graph([node], "g", [tensor], [result])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("npu", 1)]
    return [found.rule for found in check_model(helper.make_model(graph, opset_imports=opsets), None)]


@pytest.mark.parametrize(
    ("op_type", "count", "attrs", "expected"),
    [
        ("NPURmsNorm", 2, {}, []),
        ("NPURmsNorm", 2, {"epsilon": 1e-6}, []),
        ("NPURmsNorm", 2, {"epsilon": 1e-5}, ["plugin-misses"]),
        ("NPURmsNorm", 2, {"eps": 1e-5}, ["plugin-misses"]),
        ("NPURmsNorm", 3, {}, ["too-many-tensors"]),
        ("NPUAddRmsNorm", 3, {"epsilon": 1e-12}, ["plugin-misses"]),
        ("NPUGeglu", 1, {}, []),
        ("NPUGeglu", 1, {"approximate": 0}, ["plugin-misses"]),
        ("NPUGeluV2", 1, {"approximate": "tanh"}, []),
        ("NPURotaryPositionEmbedding", 3, {"mode": 1}, []),
        ("NPURotaryPositionEmbedding", 3, {}, ["parser-params"]),
    ],
)
@pytest.mark.parametrize("domain", ["npu", ""])
def test_the_check_of_a_file(op_type: str, count: int, attrs: dict[str, Any], expected: list[str], domain: str) -> None:
    if op_type == "NPUGeluV2" and not domain:
        expected = ["no-plugin"]
    assert rules(helper.make_node(op_type, ["x"] * count, ["y"], domain=domain, **attrs)) == expected
