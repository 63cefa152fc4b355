"""fa-compiler atc by the routes onnx and npu, and air check of ONNX models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import fa_compiler
from fa_compiler import InferenceSession
from fa_compiler.command_line.main import main
from fa_compiler.lowering.ascend.air.check import verdict
from fa_compiler.lowering.ascend.onnx_route.check import check
from fa_compiler.lowering.ascend.single_op import check as check_json

from .builders import HEADS, SIZE, attention, plain, positions, projected, saved

SHAPES = ";".join(f"{name}:2,{HEADS},32,{SIZE}" for name in ("query", "key", "value"))
SOC = ["--soc-version", "Ascend910B2", "--input-shape", SHAPES]


def written(out: Path) -> list[str]:
    return sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())


def newer(dtype: int = TensorProto.FLOAT16) -> onnx.ModelProto:
    """Attention of opset 20 with a Gelu behind it."""
    model = attention(dtype)
    model.graph.node[-1].output[0] = "context_out"
    model.graph.node.append(helper.make_node("Gelu", ["context_out"], ["out"], "gelu"))
    model.opset_import[0].version = 20
    return model


def test_route_onnx(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(newer(), tmp_path / "model.onnx")
    out = tmp_path / "out"
    assert main(["atc", str(source), "-o", str(out), *SOC, "--route", "onnx", "--single-op"]) == 0
    steps = (
        f"next, in {out}:\n"
        "  1. build and install ATC's plugin for FlashAttentionScore, as plugin/README.md says\n"
        "  2. where CANN is installed, run ./atc.sh\n"
        "  3. to compile each fused operator alone, run ./single_op.sh\n"
    )
    assert capsys.readouterr().out.endswith(steps)
    assert written(out) == [
        "atc.sh",
        "model.onnx",
        "plugin/CMakeLists.txt",
        "plugin/README.md",
        "plugin/ascend_onnx_plugin.cc",
        "report.json",
        "single_op.sh",
        "single_op/FlashAttentionScore_0.json",
    ]
    assert check_json(out / "single_op" / "FlashAttentionScore_0.json") == []
    assert verdict(check(out / "model.onnx")) == "accepted"
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert (report["route"], report["opset"], report["outputs"]) == ("onnx", 17, ["out"])
    assert report["operators"]["FlashAttentionScore"] == 1
    assert report["command"][:4] == ["atc", "--mode=0", "--framework=5", "--model=model.onnx"]
    assert f"--input_shape={SHAPES}" in report["command"]


def test_a_division_of_integers_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report and the output say once what is open, with the first nodes."""
    model = newer()
    model.graph.initializer.append(numpy_helper.from_array(np.array([2]), "two"))
    model.graph.node.append(helper.make_node("Shape", ["out"], ["sizes"], "sizes_of"))
    model.graph.node.extend(
        helper.make_node(
            "Div", ["sizes" if number == 0 else f"half_{number - 1}", "two"], [f"half_{number}"], f"d{number}"
        )
        for number in range(5)
    )
    model.graph.output.append(helper.make_tensor_value_info("half_4", TensorProto.INT64, [4]))
    out = tmp_path / "out"
    words = ["atc", str(saved(model, tmp_path / "model.onnx")), "-o", str(out), *SOC, "--route", "onnx"]
    assert main(words) == 0
    (note,) = (
        note for note in json.loads((out / "report.json").read_text(encoding="utf-8"))["notes"] if "RealDiv" in note
    )
    assert note.startswith("d0, d1, d2 and 2 more: ATC's plugin makes a RealDiv of a division of integers")
    assert "d0, d1, d2 and 2 more" in capsys.readouterr().out


def test_it_computes_the_same(tmp_path: Path) -> None:
    source = saved(newer(TensorProto.FLOAT), tmp_path / "model.onnx")
    out = tmp_path / "out"
    assert main(["atc", str(source), "-o", str(out), *SOC, "--route", "onnx", "--quiet"]) == 0
    random = np.random.default_rng(0)
    feeds = {name: random.normal(size=(2, HEADS, 32, SIZE)).astype(np.float32) for name in ("query", "key", "value")}
    (right,) = InferenceSession(source).run(None, feeds)
    (found,) = fa_compiler.reference.evaluator(onnx.load(out / "model.onnx")).run(None, feeds)
    np.testing.assert_allclose(found, right, atol=1e-5)


@pytest.mark.parametrize("route", ["onnx", "npu"])
def test_a_declared_shape_that_is_wrong_is_taken_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], route: str
) -> None:
    """Also where nothing was fused, as here, where the probabilities are an output."""
    model = attention(TensorProto.FLOAT16)
    softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
    model.graph.output.append(helper.make_tensor_value_info(softmax.output[0], TensorProto.FLOAT16, [1] * 8))
    out = tmp_path / "out"
    assert main(["atc", str(saved(model, tmp_path / "model.onnx")), "-o", str(out), *SOC, "--route", route]) == 0
    assert f"the declared shape of '{softmax.output[0]}' is not what the operators give" in capsys.readouterr().out
    shapes = {each.name: len(each.type.tensor_type.shape.dim) for each in onnx.load(out / "model.onnx").graph.output}
    assert shapes[softmax.output[0]] == 4


def test_route_npu(tmp_path: Path) -> None:
    source = saved(attention(TensorProto.FLOAT16), tmp_path / "model.onnx")
    out = tmp_path / "out"
    assert main(["atc", str(source), "-o", str(out), *SOC, "--route", "npu", "--single-op", "--quiet"]) == 0
    assert "single_op/PromptFlashAttention_0.json" in written(out)
    assert not (out / "plugin").exists()
    model = onnx.load(out / "model.onnx")
    assert [(node.domain, node.op_type) for node in model.graph.node] == [("npu", "NPUPromptFlashAttention")]
    (block,) = json.loads((out / "report.json").read_text(encoding="utf-8"))["fusion"]["blocks"]
    assert (block["op"], block["node"], block["assumed"]) == (
        "NPUPromptFlashAttention",
        model.graph.node[0].name,
        [],
    )
    assert check(out / "model.onnx", []) == []


def test_route_npu_takes_a_single_row_for_a_prompt(tmp_path: Path) -> None:
    """The parser's plugin for IncreFlashAttention does not work."""
    out = tmp_path / "out"
    out.mkdir()
    for route, op_type in (("npu", "NPUPromptFlashAttention"), ("onnx", "IncreFlashAttention")):
        row = attention(TensorProto.FLOAT16)
        for value in (row.graph.input[0], row.graph.output[0]):
            value.type.tensor_type.shape.dim[2].dim_value = 1
        source = saved(row, tmp_path / "model.onnx")
        soc = ["--soc-version", "Ascend910B2", "--input-shape", f"query:2,{HEADS},1,{SIZE};{SHAPES.partition(';')[2]}"]
        assert main(["atc", str(source), "-o", str(out / route), *soc, "--route", route, "--quiet"]) == 0
        model = onnx.load(out / route / "model.onnx")
        assert [node.op_type for node in model.graph.node] == [op_type]


def test_route_npu_refuses_by_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = saved(attention(), tmp_path / "model.onnx")
    out = tmp_path / "out"
    assert main(["atc", str(source), "-o", str(out), *SOC, "--route", "npu"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "attn/FlashAttentionScore" in error
    assert "and this is float32; try: --assume half-attention casts query" in error
    words = ["--route", "npu", "--assume", "half-attention", "--cann", "8.0"]
    assert main(["atc", str(source), "-o", str(out), *SOC, *words]) == 2
    assert "8.5.0-beta.1; try: --cann 8.5.0-beta.1 or newer, if your CANN is; try" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [source]
    assert main(["atc", str(source), "-o", str(out), *SOC, "--route", "npu", "--assume", "half-attention"]) == 0
    assert "NPUPromptFlashAttention" in (said := capsys.readouterr().out) and "assuming half-attention" in said
    (block,) = json.loads((out / "report.json").read_text(encoding="utf-8"))["fusion"]["blocks"]
    assert block["node"] in {node.name for node in onnx.load(out / "model.onnx").graph.node}


@pytest.mark.parametrize("route", ["onnx", "air"])
def test_310p_gets_its_own_operator(tmp_path: Path, route: str) -> None:
    source = saved(attention(TensorProto.FLOAT16), tmp_path / "model.onnx")
    out = tmp_path / "out"
    words = ["--soc-version", "Ascend310P3", "--input-shape", SHAPES, "--route", route, "--quiet"]
    assert main(["atc", str(source), "-o", str(out), *words]) == 0
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["operators"]["PromptFlashAttention"] == 1
    assert "FlashAttentionScore" not in report["operators"]


def test_without_attention_there_is_no_plugin(tmp_path: Path) -> None:
    source = saved(plain(), tmp_path / "model.onnx")
    out = tmp_path / "out"
    words = ["--soc-version", "Ascend910B2", "--input-shape", "x:3,4", "--route", "onnx", "--quiet"]
    assert main(["atc", str(source), "-o", str(out), *words]) == 0
    assert written(out) == ["atc.sh", "model.onnx", "report.json"]
    notes = json.loads((out / "report.json").read_text(encoding="utf-8"))["fusion"]["notes"]
    assert notes == ["nothing was fused: the output is the model as ATC's parser takes it"]


def test_weights_in_files(tmp_path: Path) -> None:
    source, weight = projected(tmp_path / "model")
    model = onnx.load(source, load_external_data=False)
    model.graph.initializer[-1].external_data.add(key="checksum", value="0123456789")
    source.write_bytes(model.SerializeToString())
    out = tmp_path / "out"
    words = ["--soc-version", "Ascend910B2", "--route", "onnx", "--quiet"]
    assert main(["atc", str(source), "-o", str(out), *words]) == 0
    assert "model.onnx.data" in written(out)
    (tensor,) = [
        entry
        for entry in onnx.load(out / "model.onnx", load_external_data=False).graph.initializer
        if entry.name == "w"
    ]
    assert {entry.key for entry in tensor.external_data} <= {"location", "offset", "length"}
    (tensor,) = [entry for entry in onnx.load(out / "model.onnx").graph.initializer if entry.name == "w"]
    np.testing.assert_array_equal(numpy_helper.to_array(tensor), weight)


def test_what_the_parser_does_not_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = plain()
    model.graph.node[0].op_type = "QuantizeLinear"
    model.graph.node[0].input.append("x")
    del model.graph.node[0].input[1:]
    model.graph.node[0].input.append("scale")
    model.graph.initializer.append(numpy_helper.from_array(np.array(0.5, np.float32), "scale"))
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.UINT8
    source = saved(model, tmp_path / "model.onnx")
    words = ["--soc-version", "Ascend910B2", "--input-shape", "x:3,4", "--route", "onnx"]
    assert main(["atc", str(source), "-o", str(tmp_path / "out"), *words]) == 2
    error = capsys.readouterr().err
    assert "relu (QuantizeLinear)" in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == [source]


def test_route_npu_says_the_same_of_several_nodes_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = attention()
    nodes, count = list(model.graph.node), 5
    outputs = [model.graph.output.pop().name]
    for number in range(1, count):
        for node in nodes:
            other = model.graph.node.add()
            other.CopyFrom(node)
            other.name = f"{node.name}_{number}"
            other.output[0] = f"{node.output[0]}_{number}"
            made = {name for each in nodes for name in each.output}
            for index, name in enumerate(node.input):
                other.input[index] = f"{name}_{number}" if name in made else name
        outputs.append(f"{outputs[0]}_{number}")
    for name in outputs:
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * 4))
    source = saved(model, tmp_path / "model.onnx")
    assert main(["atc", str(source), "-o", str(tmp_path / "out"), *SOC, "--route", "npu"]) == 2
    error = capsys.readouterr().err
    assert error.count("computes in float16 or bfloat16") == 1
    assert " and 2 more (ascend.FlashAttentionScore): " in error
    assert error.endswith("; try --route air or onnx\n")


def test_air_check_of_an_onnx_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = saved(attention(), tmp_path / "good.onnx")
    assert main(["air", "check", str(good)]) == 0
    assert "accepted" in capsys.readouterr().out
    bad = saved(newer(), tmp_path / "bad.onnx")
    assert main(["air", "check", str(bad)]) == 1
    assert "ai.onnx::20::Gelu" in capsys.readouterr().out
    other = attention()
    other.opset_import.add(domain="mine", version=1)
    other.graph.node[-1].domain, other.graph.node[-1].op_type = "mine", "AttentionUpdate"
    named = saved(other, tmp_path / "mine.onnx")
    assert main(["air", "check", str(named)]) == 1
    assert "mine::1::AttentionUpdate" in capsys.readouterr().out
    main(["air", "check", str(named), "--plugin-domain", "mine"])
    assert "no plugin is registered" not in capsys.readouterr().out
    other.graph.node[-1].op_type = "Unheard"  # an operator of the user's own
    saved(other, named)
    assert main(["air", "check", str(named)]) == 1
    assert "give --plugin-domain if you have its plugin" in capsys.readouterr().out
    assert main(["air", "check", str(named), "--plugin-domain", "mine"]) == 0
    assert "mine::Unheard is left to your plugin" in capsys.readouterr().out


@pytest.mark.parametrize("route", ["onnx", "npu"])
def test_sizes_that_do_not_fit(route: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = saved(positions(), tmp_path / "model.onnx"), tmp_path / "out"
    soc = ["--soc-version", "Ascend910B2", "--input-shape", "x:2,9,4"]
    assert main(["atc", str(source), "-o", str(out), *soc, "--route", route]) == 2
    assert "cannot run with these sizes: add: the shapes [2, 9, 4], [8, 4]" in capsys.readouterr().err
    assert not out.exists()


def test_an_input_whose_name_atc_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in ("in;put", "y"))
    graph = helper.make_graph([helper.make_node("Relu", ["in;put"], ["y"])], "g", [x], [y])
    place = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), place)
    words = ["atc", str(place), "-o", str(tmp_path / "out"), "--soc-version", "Ascend910B2", "--quiet"]
    assert main([*words, "--route", "onnx"]) == 2
    assert "the input 'in;put' holds ';'" in capsys.readouterr().err
    assert main([*words, "--route", "air"]) == 0
    assert "--input_shape=in_put:2,3" in (tmp_path / "out" / "atc.sh").read_text(encoding="utf-8")


def test_a_declared_type_that_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ONNX Runtime does not load such a model either: a declared shape can be wrong, a declared type cannot."""
    model = attention(batch=2, length=8)
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.UINT8
    words = ["atc", str(saved(model, tmp_path / "model.onnx")), "-o", str(tmp_path / "out"), "--quiet"]
    assert main([*words, "--soc-version", "Ascend910B2", "--route", "onnx"]) == 2
    assert "model.onnx declares other types or sizes than its nodes compute" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
