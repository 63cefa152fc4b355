"""fa-compiler air check, air show and single-op."""

from __future__ import annotations

import errno
import json
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import onnx
import onnx.parser
import pytest

from fa_compiler.command_line.main import main
from fa_compiler.lowering.ascend.air import write
from fa_compiler.lowering.ascend.air.show import lines, tensor
from fa_compiler.lowering.ascend.graph import Attr, Model, TensorDesc
from fa_compiler.lowering.ascend.single_op import check
from tests.lowering.ascend.graphs import attention, branches


def saved(model: Model, folder: Path) -> Path:
    path = folder / "model.air"
    write(model, path)
    return path


def test_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(attention(), tmp_path)
    assert main(["air", "check", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: accepted; 0 faults, 0 notes\n"
    model = attention()
    model.root.ops[-2].attrs["scale_value"] = Attr("Int", 1)
    saved(model, tmp_path)
    assert main(["air", "check", str(path)]) == 1
    shown = capsys.readouterr().out
    assert "attr-kind" in shown
    assert "attribute scale_value is of type Int, FlashAttentionScore wants Float" in shown
    assert shown.endswith(f"{path}: loads-but-invalid; 1 fault, 0 notes\n")


def test_equal_faults_of_several_operators_have_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = " ".join(f"x{number + 1} = Relu(x{number})" for number in range(4))
    text = f'<ir_version: 9, opset_import: ["" : 20]> g (float[2] x0) => (float[2] x5) {{ {nodes} x5 = Gelu(x4) }}'
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    assert main(["air", "check", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    rows = [re.split("   +", line)[2:4] for line in lines if line.startswith(" rejected")]
    assert rows == [
        ["x1 and 3 more", "the model has opset 20, and the plugins of the parser are for 18 and older"],
        ["x5", "no plugin is registered for ai.onnx::20::Gelu"],
    ]
    assert lines[-2] == "the same was found at several operators; --each prints a row for each of them"
    assert lines[-1] == f"{path}: rejected; 5 faults, 0 notes"
    assert main(["air", "check", str(path), "--each"]) == 1
    lines = capsys.readouterr().out.splitlines()
    nodes = [re.split("   +", line)[2] for line in lines if line.startswith(" rejected")]
    assert nodes == ["x1", "x2", "x3", "x4", "x5"] and "--each" not in lines[-2]


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(attention(), tmp_path)
    assert main(["air", "show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("fas: 1 graph, 16384 bytes of constants; 3 Data, 1 Const, 1 FlashAttentionScore")
    for part in ("query=q", "atten_mask=mask", "head_num=12", "attention_out=float16[1, 12, 128, 64]"):
        assert part in shown
    assert "real_shift" not in shown


def test_ranges_are_shown_where_a_size_is_open() -> None:
    assert tensor(TensorDesc("x", "DT_INT64", (1, 8), "ND", ((1, 1), (8, 8)))) == "int64[1, 8]"
    assert tensor(TensorDesc("x", "DT_INT64", (1, -1), "ND", ((1, 1), (1, -1)))) == "int64[1, ?] in 1..1, 1.."


def test_attributes_are_shown_in_the_order_of_their_names() -> None:
    """In the file they have none: a run may read them in another order than the last one."""
    model = attention()
    before = list(lines(model.root))
    for op in model.root.ops:
        op.attrs = dict(sorted(op.attrs.items(), reverse=True))
    assert list(lines(model.root)) == before
    assert any("{head_num=12, input_layout=" in line for line in before)


@pytest.mark.parametrize("model", [attention(), branches()])
def test_drawings(tmp_path: Path, model: Model) -> None:
    path = saved(model, tmp_path)
    drawing = tmp_path / "model.svg"
    assert main(["air", "show", str(path), "--graph", str(drawing)]) == 0
    tree = ElementTree.parse(drawing)
    texts = {element.text for element in tree.iter("{http://www.w3.org/2000/svg}text")}
    ops = [op for graph in model.graphs for op in graph.ops if op.type != "Const"]
    assert {op.type for op in ops} <= texts
    edges = {
        (graph.name, source.op, op.name)
        for graph in model.graphs
        for op in graph.ops
        for source in op.inputs
        if source is not None and source.op != "mask"
    }
    paths = tree.iter("{http://www.w3.org/2000/svg}path")
    assert sum(path.get("class", "").startswith("arrow") for path in paths) == len(edges)
    assert main(["air", "show", str(path), "--graph", str(tmp_path / "model.dot")]) == 0
    assert (tmp_path / "model.dot").read_text(encoding="utf-8").count("->") == len(edges)


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    garbage = tmp_path / "g.air"
    garbage.write_bytes(b"\x07\x07")
    operators = tmp_path / "ops.json"
    operators.write_text("[]", encoding="utf-8")
    (tmp_path / "m.onnx").write_bytes(b"")
    for action, path, message, code in (
        ("show", garbage, f"{garbage} is not an .air file: it does not parse as a ge.proto.ModelDef", 2),
        ("check", garbage, "not-air", 1),
        ("check", operators, "`fa-compiler single-op --check` reads", 1),
        ("check", tmp_path / "none.air", "none.air: no such file", 2),
        ("show", tmp_path, "is a folder", 2),
        ("show", tmp_path / "m.onnx", "m.onnx is an ONNX model, and air show reads .air files", 2),
    ):
        assert main(["air", action, str(path)]) == code
        shown = capsys.readouterr()
        assert message in shown.out + shown.err
        assert "Traceback" not in shown.err
    path = saved(attention(), tmp_path)
    assert main(["air", "show", str(path), "--graph", str(tmp_path / "m.png")]) == 2
    assert "a drawing is a .svg or a .dot, not .png" in capsys.readouterr().err


def test_a_file_that_may_not_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(attention(), tmp_path)

    def refused(file: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr(Path, "read_bytes", refused)
    assert main(["air", "check", str(path)]) == 2
    assert capsys.readouterr().err == f"fa-compiler: error: {path}: Permission denied\n"


ONES = ["single-op", "Add", "--input", "x1=1:uint8", "-o", "x"]
FORWARD = [
    *("single-op", "FlashAttentionScore", "--attr", "head_num=12", "--attr", "input_layout=BNSD"),
    *("--input", "query=1,12,512,64:float16", "--input", "value=1,12,512,64:float16"),
    *("--input", "key=1,12,512,64:float16", "--input", "atten_mask=512,512:bool"),
]


def test_single_op_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "fas.json"
    assert main([*FORWARD, "--attr", "scale_value=0.125", "-o", str(out), "--soc-version", "Ascend910B2"]) == 0
    words = [f"--singleop={out}", f"--output={tmp_path / 'fas'}", "--soc_version="]
    command = f"compile it with: atc {shlex.join(words)}"
    assert f"{command}Ascend910B2 " in capsys.readouterr().out  # where the user is
    assert main([*FORWARD, "-o", str(out)]) == 0
    assert f"{command}SOC_VERSION " in capsys.readouterr().out  # the user's, who has not named it
    assert check(out) == []
    entry = json.loads(out.read_text(encoding="utf-8"))[0]
    names = ["query", "key", "value", "real_shift", "drop_mask", "padding_mask", "atten_mask"]
    assert [tensor["name"] for tensor in entry["input_desc"]] == names
    assert [tensor["shape"] for tensor in entry["output_desc"]][:1] == [[1, 12, 512, 8]]
    # Defaults differ between versions of CANN, so that they are written out.
    assert {"name": "keep_prob", "type": "float", "value": 1.0} in entry["attr"]
    assert main(["single-op", "--check", str(out)]) == 0


def test_single_op_of_any_ge_operator(tmp_path: Path) -> None:
    out = tmp_path / "op.json"
    words = ["single-op", "ConcatD", "--input", "x0=2,3:float", "--input", "x1=2,-1:float"]
    words += ["--attr", "concat_dim=1", "--attr", "N=2", "-o", str(out)]
    assert main(words) == 0
    assert check(out) == []
    entry = json.loads(out.read_text(encoding="utf-8"))[0]
    assert entry["input_desc"][1]["shape_range"] == [[1, -1]]
    assert entry["output_desc"] == [
        {"name": "y", "type": "float", "format": "ND", "shape": [2, -1], "shape_range": [[1, -1]]}
    ]
    words = ["single-op", "SplitV", "--input", "x=4,6:float16", "--input", "size_splits=2:int64"]
    words += ["--const", "size_splits=1,5", "--input", "split_dim=1:int64", "--const", "split_dim=1"]
    assert main([*words, "--attr", "num_split=2", "-o", str(out)]) == 0
    outputs = json.loads(out.read_text(encoding="utf-8"))[0]["output_desc"]
    assert [(tensor["name"], tensor["shape"]) for tensor in outputs] == [("y0", [4, 1]), ("y1", [4, 5])]


def test_single_op_with_values(tmp_path: Path) -> None:
    out = tmp_path / "op.json"
    words = ["single-op", "FusedInferAttentionScore", "--attr", "num_heads=8", "--attr", "input_layout=BSH"]
    words += ["--input", "query=2,128,512:float16", "--input", "key=2,256,512:float16"]
    words += ["--input", "value=2,256,512:float16", "--input", "actual_seq_lengths_kv=2:int64"]
    words += ["--const", "actual_seq_lengths_kv=100,256", "--output-desc", "attention_out=2,128,512:float16"]
    words += ["--output-desc", "softmax_lse=1:float", "-o", str(out)]
    assert main(words) == 0
    entry = json.loads(out.read_text(encoding="utf-8"))[0]
    tensors = {tensor["name"]: tensor for tensor in entry["input_desc"]}
    assert tensors["actual_seq_lengths_kv"]["const_value"] == [100, 256]
    assert {"key0", "value0"} <= set(tensors)
    assert check(out) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["single-op"], "single-op needs an operator and -o FILE.json, or --check FILE.json"),
        (["single-op", "FlashAttentionScor", "-o", "x"], "did you mean 'FlashAttentionScore'"),
        ([*FORWARD, "-o", "x", "--input", "maks=1:bool"], "has no input 'maks'"),
        ([*FORWARD, "-o", "x", "--attr", "head_nun=1"], "has no attribute 'head_nun', did you mean 'head_num'"),
        ([*FORWARD, "-o", "x", "--attr", "scale_value=x"], "attribute scale_value of FlashAttentionScore is 'x'"),
        ([*FORWARD, "-o", "x", "--attr", "head_num"], "--attr 'head_num' is not a name, '=' and a value"),
        ([*FORWARD, "-o", "x", "--input", "real_shift=1,2:floot"], "of the form real_shift=1,12,512,64:float16; "),
        ([*FORWARD, "-o", "x", "--input", "real_shift=1,2:bf16"], "no type 'bf16', did you mean 'bfloat16'?"),
        ([*FORWARD, "-o", "x", "--input", "real_shift=1,2:DT_FLOAT"], "no type 'DT_FLOAT', did you mean 'float'?"),
        ([*FORWARD[:6], "-o", "x"], "needs the input query; give --input query=..."),
        (
            ["single-op", "Spence", "--input", "x=1:float", "-o", "x"],
            "the output 'y' of Spence is not known; give -",
        ),
        (
            ["single-op", "MatMulV2", "--input", "x1=2,3:float", "--input", "x2=2,3:float", "-o", "x"],
            "MatMulV2 does not take these inputs: x1 [2, 3] and x2 [2, 3] share no axis",
        ),
        ([*FORWARD, "-o", "x", "--soc-version", "Ascend310P3"], "cannot run on Ascend310P3 in this form"),
        ([*FORWARD, "-o", "x", "--soc-version", "Ascend910B22"], "unknown SoC version"),
        ([*FORWARD, "-o", "x", "--const", "query=1,2"], "--const query=1,2 does not fit DT_FLOAT16"),
        ([*FORWARD, "-o", "x", "--const", "seed=1,2"], "--const seed: give its type and shape with --input"),
        (
            [*FORWARD, "-o", "x", "--attr", "scale_value=Infinity"],
            "scale_value of FlashAttentionScore is inf, expected a finite",
        ),
        ([*ONES, "--input", "x2=1:uint8", "--const", "x2=300"], "--const x2=300 does not fit DT_UINT8"),
        ([*ONES, "--input", "x2=1:int64", "--const", "x2=1.5"], "--const x2=1.5 does not fit DT_INT64"),
        (["single-op", "Relu", "--input", "x=1:float", "-o", "x.onnx"], "x.onnx has to end with .json, not .onnx"),
        (["single-op", "Relu", "--check", "x"], "--check takes a file and no other option"),
        (["single-op", "--check", "x", "--soc-version", "Ascend910B2"], "--check takes a file and no other option"),
        ([*FORWARD, "-o", "x", "--attr", f"seed={1 << 63}"], "attribute seed of FlashAttentionScore is 92233"),
        ([*FORWARD, "-o", "x", "--attr", "seed=1", "--attr", "seed=2"], "--attr seed is given twice"),
        ([*FORWARD, "-o", "x", "--input", "query=1:bool"], "--input query is given twice"),
        ([*FORWARD, "-o", "x", "--output-desc", "out=1:bool"], "FlashAttentionScore has no output 'out'"),
    ],
)
def test_single_op_that_cannot_be(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
