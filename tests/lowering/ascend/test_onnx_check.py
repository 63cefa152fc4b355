"""The ONNX check: the verdicts of ATC's parser, and one test for each rule."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from fa_compiler.lowering.ascend.air.check import verdict
from fa_compiler.lowering.ascend.onnx_route.check import check, check_model
from tests.examples import examples
from tests.lowering.ascend.onnx_models import lowered, parsed
from tests.lowering.ascend.vector_table import verdicts

TEST_DOMAIN = "fa_compiler"
"""The domain of the plugin with which the parser was run to make the verdicts."""

OTHERWISE = {
    "onnx_samples/ext_checksum.onnx": (
        "loads-but-invalid",
        "the parser takes it, with 0 bytes of the weight: nobody was asked whether they are the right ones",
    ),
}
"""Where this check says something else than the parser did, and why."""


@pytest.mark.parametrize(("file", "expected"), verdicts(".onnx"))
def test_verdict(vectors: Path, file: str, expected: str) -> None:
    findings = check(vectors / file, [TEST_DOMAIN])
    wanted, _ = OTHERWISE.get(file, (expected, ""))
    assert verdict(findings) == wanted, [str(finding) for finding in findings]


CODES = {
    "attention23": "no-plugin",
    "empty_out_in": "empty-output",
    "fa_bad_attr": "prototype",
    "garbage": "not-onnx",
    "ifa": "broken-plugin",
    "local_function": "no-plugin",
    "name_clash": "name-twice",
    "nfa_in3": "parser-plugin",
    "nfa_in9": "broken-plugin",
    "pfa_in4": "parser-plugin",
    "pfa_in5": "parser-plugin",
    "pfa_no_domain_opset": "no-opset",
    "sdpa19": "no-plugin",
    "ext_checksum": "weights-entry",
}


@pytest.mark.parametrize("name", sorted(CODES))
def test_reason(vectors: Path, name: str) -> None:
    assert check(vectors / f"onnx_samples/{name}.onnx", [TEST_DOMAIN])[0].rule == CODES[name]


@pytest.mark.parametrize("name", ["fa_fas", "fa_fia", "fa_pfa_mask_no_pse"])
def test_another_domain_has_no_plugin(vectors: Path, name: str) -> None:
    assert [finding.rule for finding in check(vectors / f"onnx_samples/{name}.onnx")] == ["no-plugin"]


def rules(model: onnx.ModelProto, folder: Path | None = None) -> list[str]:
    return [finding.rule for finding in check_model(model, folder)]


def model_of(
    nodes: list[onnx.NodeProto], *, weights: tuple[TensorProto, ...] = (), ends: str = "xy"
) -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in ends]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], list(weights))
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("ascend", 1), helper.make_opsetid("npu", 1)]
    return helper.make_model(graph, opset_imports=imports)


RELU = helper.make_node("Relu", ["x"], ["y"])
FUSED = {"head_num": 2, "input_layout": "BSH"}
PROMPT = {"num_heads": 2, "input_layout": "BSH", "pre_tokens": 1, "next_tokens": 0}


def fused(inputs: str, outputs: str = "m s p y", **attrs: object) -> onnx.NodeProto:
    names = [name.strip("-") for name in inputs.split()]
    return helper.make_node("FlashAttentionScore", names, outputs.split(), domain="ascend", **{**FUSED, **attrs})


def prompt(inputs: str, **attrs: object) -> onnx.NodeProto:
    names = [name.strip("-") for name in inputs.split()]
    return helper.make_node("NPUPromptFlashAttention", names, ["y"], domain="npu", **{**PROMPT, **attrs})


CASES: dict[str, tuple[list[onnx.NodeProto], list[str]]] = {
    "good": ([RELU], []),
    "good fused": ([fused("x x x")], []),
    "good with a gap": ([fused("x x x - - - x")], []),
    "nobody makes it": ([helper.make_node("Add", ["x", "z"], ["y"])], ["unlinked"]),
    "too many inputs": ([fused(" ".join(["x"] * 30))], ["too-many-tensors"]),
    "too many outputs": ([fused("x x x", "a b c y d")], ["too-many-tensors"]),
    "a required input": ([fused("x - x")], ["prototype"]),
    "an unknown attribute": ([fused("x x x", heads=2)], ["prototype"]),
    "an attribute of another type": ([fused("x x x", scale_value="1")], ["prototype"]),
    "prompt": ([prompt("x x x")], []),
    "prompt of another count": ([prompt("x x x x x x")], ["parser-plugin"]),
    "prompt without windows": (
        [helper.make_node("NPUPromptFlashAttention", ["x"] * 3, ["y"], domain="npu", num_heads=1, input_layout="BSH")],
        ["broken-plugin"],
    ),
    "prompt without heads": (
        [helper.make_node("NPUPromptFlashAttention", ["x"] * 3, ["y"], domain="npu", **{**PROMPT, "num_heads": None})],
        ["parser-params"],
    ),
    "the name of an unnamed one": (
        [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Relu", ["a"], ["y"], name="Relu_0")],
        ["name-twice"],
    ),
    "empty names of one node": (
        [helper.make_node("LayerNormalization", ["x", "x", ""], ["y", "", "i"])],
        ["plugin-form"],
    ),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_rule(case: str) -> None:
    nodes, expected = CASES[case]
    assert rules(model_of(nodes)) == expected


def test_ends() -> None:
    assert rules(model_of([RELU], ends="")) == ["no-ends", "no-ends"]
    weight = helper.make_tensor("x", TensorProto.FLOAT, [2, 4], [0.0] * 8)
    assert rules(model_of([RELU], weights=(weight,))) == ["no-ends"]


def test_weights(tmp_path: Path) -> None:
    outside = TensorProto(name="w", data_type=1, dims=[2, 4], data_location=TensorProto.EXTERNAL)
    outside.external_data.add(key="location", value="w.bin")
    model = model_of([helper.make_node("Add", ["x", "w"], ["y"])], weights=(outside,))
    assert rules(model) == []
    assert rules(model, tmp_path) == ["weights-file"]
    (tmp_path / "w.bin").write_bytes(bytes(31))
    assert rules(model, tmp_path) == ["weights-file"]
    (short,) = check_model(model, folder=tmp_path)
    assert short.message == "its file 'w.bin' has only 31 bytes" and short.hint.startswith("fetch the file again")
    (tmp_path / "w.bin").write_bytes(bytes(32))
    assert rules(model, tmp_path) == []
    outside.data_type = TensorProto.STRING
    assert rules(model_of([helper.make_node("Identity", ["w"], ["y"])], weights=(outside,)), tmp_path) == [
        "weights-entry",
        "output-lost",
    ]
    eight = TensorProto(name="w", data_type=TensorProto.FLOAT8E4M3FN, dims=[4], raw_data=bytes(4))
    cast = helper.make_node("Cast", ["w"], ["y"], to=1)
    assert rules(model_of([cast], weights=(eight,))) == ["constant-type", "output-lost"]


def test_branches() -> None:
    text = (
        "g(float[4] x, bool c) => (float[4] y) { y = If(c) <then_branch = t() => (float[4] a) { a = Relu(x) }, "
        "else_branch = e() => (float[4] b) { b = Gelu(x) }> }"
    )
    model = parsed(text, 20)
    assert rules(model) == ["no-plugin"] * 3
    result = lowered(model)
    assert rules(result) == []
    result.graph.node[0].attribute.add(name="more", type=onnx.AttributeProto.INT, i=1)
    assert rules(result) == ["branches"]


def test_texts_that_are_not_utf8() -> None:
    content = parsed("g(float[4] x) => (float[4] y) { y = Relu(x) }", 17).SerializeToString()
    for field, damaged in ((b"Relu", b"Re\xffu"), (b"\x0a\x01x", b"\x0a\x01\xff")):
        (finding,) = check_model(onnx.ModelProto.FromString(content.replace(field, damaged)), None)
        assert (finding.rule, "which is not UTF-8" in finding.message) == ("not-onnx", True)


def test_sequences() -> None:
    model = parsed("g(seq(float) x) => (int64 y) { y = SequenceLength(x) }", 17)
    assert rules(model) == ["element-type"]


@given(st.data())
@settings(max_examples=examples(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_files_are_answered(vectors: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Whatever was done to a file, the check says something and does not fail."""
    sources = sorted((vectors / "onnx_samples").glob("*.onnx"))
    content = bytearray(data.draw(st.sampled_from(sources)).read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(content)))
        cut, more = data.draw(st.integers(0, 4)), data.draw(st.binary(max_size=4))
        content[place : place + cut] = more
    (tmp_path / "damaged.onnx").write_bytes(bytes(content))
    for finding in check(tmp_path / "damaged.onnx", [TEST_DOMAIN]):
        assert str(finding)
