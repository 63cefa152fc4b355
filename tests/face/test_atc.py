"""fa-compiler atc: what it writes, and what it refuses with one line and nothing written."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import fa_compiler
from fa_compiler.atc import route_air, run, single, sizes
from fa_compiler.atc.job import RouteResult
from fa_compiler.atc.request import Request
from fa_compiler.atc.script import script
from fa_compiler.command_line.main import main
from fa_compiler.errors import InputError
from fa_compiler.lowering.ascend.air import read, write
from fa_compiler.lowering.ascend.air.check import check as check_air
from fa_compiler.lowering.ascend.graph import Attr, Op, Output, TensorDesc, absent
from fa_compiler.lowering.ascend.single_op import check as check_json
from fa_compiler.model_files.folder import check_target, new_folder
from fa_compiler.op_registry import get
from fa_compiler.op_registry.registry import newest
from fa_compiler.op_registry.soc import soc_version
from tests.lowering.ascend.graphs import weight
from tests.systems import SCRIPTS
from tools.ge_to_onnx import from_ge as onnx_of

from .builders import EXAMPLES, HEADS, SIZE, attention, plain, positions, saved

SHAPES = ";".join(f"{name}:2,{HEADS},32,{SIZE}" for name in ("query", "key", "value"))
SOC = ["--soc-version", "Ascend910B2"]


def test_a_folder_that_atc_compiles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = saved(attention(TensorProto.FLOAT16), tmp_path / "model.onnx")
    out = tmp_path / "out"
    assert main(["atc", str(model), "-o", str(out), *SOC, "--input-shape", SHAPES, "--single-op"]) == 0
    assert "1 fused (of 1)" in capsys.readouterr().out
    assert sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()) == [
        "atc.sh",
        "model.air",
        "report.json",
        "single_op.sh",
        "single_op/FlashAttentionScore_0.json",
    ]
    assert check_air(out / "model.air") == []
    assert check_json(out / "single_op" / "FlashAttentionScore_0.json") == []
    assert [op.output_descs[0].shape for op in read(out / "model.air").root.of_type("Data")] == [
        (2, HEADS, 32, SIZE)
    ] * 3
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["soc_version"] == "Ascend910B2"
    assert report["operators"]["FlashAttentionScore"] == 1
    assert report["fusion"]["blocks"][0]["status"] == "fused"
    assert report["command"] == [
        "atc",
        "--mode=0",
        "--framework=1",
        "--model=model.air",
        "--output=model",
        "--soc_version=Ascend910B2",
        "--input_format=ND",
        "--precision_mode_v2=origin",
        f"--input_shape={SHAPES}",
        "--log=error",
    ]


@SCRIPTS
def test_the_script_runs_that_command(tmp_path: Path) -> None:
    """With an atc of our own on the PATH, which writes down what it is given and where."""
    model = saved(attention(), tmp_path / "model.onnx")
    out = tmp_path / "my folder"
    assert main(["atc", str(model), "-o", str(out), *SOC, "--input-shape", SHAPES, "--quiet"]) == 0
    tool = tmp_path / "bin" / "atc"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\npwd\nprintf "%s\\n" "$@"\n')
    tool.chmod(0o755)
    environment = {"PATH": f"{tool.parent}:/usr/bin:/bin"}
    done = subprocess.run(
        [out / "atc.sh", "--log=info"], env=environment, capture_output=True, text=True, check=True, cwd="/"
    )
    words = json.loads((out / "report.json").read_text(encoding="utf-8"))["command"]
    assert done.stdout.splitlines() == [str(out), *words[1:], "--log=info"]
    tool.unlink()
    failed = subprocess.run([out / "atc.sh"], env=environment, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: there is no atc on the PATH: source the set_env.sh")


@SCRIPTS
def test_options_for_atc_reach_every_command_of_a_script(tmp_path: Path) -> None:
    tool = tmp_path / "atc"
    tool.write_text('#!/bin/sh\necho "$@"\n')
    tool.chmod(0o755)
    path = tmp_path / "single_op.sh"
    path.write_text(script("Compiles two operators.", [["atc", "--singleop=a"], ["atc", "--singleop=b"]]))
    path.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run([path, "--debug_dir=d"], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["--singleop=a --debug_dir=d", "--singleop=b --debug_dir=d"]


def test_open_sizes_and_gears(tmp_path: Path) -> None:
    model = saved(attention(), tmp_path / "model.onnx")
    wanted = ";".join(f"{name}:1~4,{HEADS},-1,{SIZE}" for name in ("query", "key", "value"))
    out = tmp_path / "out"
    assert main(["atc", str(model), "-o", str(out), *SOC, "--input-shape", wanted, "--quiet"]) == 0
    assert f"--input_shape={wanted}" in (out / "atc.sh").read_text(encoding="utf-8")
    query = next(read(out / "model.air").root.of_type("Data")).output_descs[0]
    assert (query.shape, query.ranges) == ((-1, HEADS, -1, SIZE), ((1, 4), (HEADS, HEADS), (1, -1), (SIZE, SIZE)))

    wanted = wanted.replace("1~4", "2")
    gears = ["--dynamic-dims", "16,16,16;32,32,32"]
    assert main(["atc", str(model), "-o", str(out), *SOC, "--input-shape", wanted, *gears, "--quiet"]) == 0
    line = (out / "atc.sh").read_text(encoding="utf-8").splitlines()[-1]
    assert f"--input_shape={wanted}" in shlex.split(line)
    assert "--dynamic_dims=16,16,16;32,32,32" in shlex.split(line)
    assert next(read(out / "model.air").root.of_type("Data")).output_descs[0].ranges[2] == (16, 32)  # type: ignore[index]


def two_rows(second: str = "m") -> onnx.ModelProto:
    names = {"a": "n", "b": second, "o": "k"}
    a, b, o = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [size, 4]) for name, size in names.items())
    nodes = [helper.make_node("Relu", ["a"], ["x"]), helper.make_node("Concat", ["x", "b"], ["o"], axis=0)]
    graph = helper.make_graph(nodes, "rows", [a, b], [o])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("route", ["air", "onnx"])
def test_gears_follow_the_inputs_of_the_model(tmp_path: Path, route: str) -> None:
    """The user names b first, ATC gets a first: gears are not to change hands."""
    model, out = saved(two_rows(), tmp_path / "model.onnx"), tmp_path / "out"
    words = ["--route", route, "--input-shape", "b:-1,4;a:-1,4", "--dynamic-dims", "8,1;16,2", "--quiet"]
    assert main(["atc", str(model), "-o", str(out), *SOC, *words]) == 0
    line = shlex.split((out / "atc.sh").read_text(encoding="utf-8").splitlines()[-1])
    assert {"--input_shape=a:-1,4;b:-1,4", "--dynamic_dims=1,8;2,16"} <= {*line}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["a:3,4;b:-1,4", "--dynamic-dims", "1;2"], "--input-shape gives 'n' two sizes: 3 and -1; it is one size"),
        (["a:1~4,4;b:1~8,4"], "--input-shape gives 'n' two sizes: 1~4 and 1~8; it is one size in the model"),
        (["a:-1,4;b:-1,4", "--dynamic-dims", "1,1;2,3"], "gives 'n' two sizes in the group 2,3: 2 and 3; it is one"),
        (
            ["a:-1,-1;b:-1,4", "--dynamic-dims", "1,4,1;2,4,2"],
            "has the size 4 where --input-shape has -1 (axis 1): the",
        ),
        (["a:1~2,1~8;b:1~2,4"], "input 'a' has the size 4 where --input-shape has 1~8 (axis 1): the model fixes this"),
        (["a\uff1a2\uff0c4"], "--input-shape has a full-width colon, '\uff1a': use the sign of ASCII"),
    ],
)
def test_sizes_that_the_model_does_not_leave_open_are_refused(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = saved(two_rows("n"), tmp_path / "model.onnx")
    assert main(["atc", str(model), "-o", str(tmp_path / "out"), *SOC, "--input-shape", *words]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("route", ["air", "onnx"])
def test_gears_with_which_the_model_cannot_run(route: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table of positions ends at 3, which a group in the middle of the list exceeds."""
    model = two_rows("n")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((3, 4), np.float32), "table"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([0], np.int64), "zero"))
    del model.graph.node[:]
    model.graph.node.extend(
        [
            helper.make_node("Shape", ["a"], ["n"], end=1),
            helper.make_node("Slice", ["table", "zero", "n", "zero"], ["positions"]),
            helper.make_node("Add", ["a", "positions"], ["placed"], "place"),
            helper.make_node("Add", ["placed", "b"], [model.graph.output[0].name]),
        ]
    )
    words = ["--route", route, "--input-shape", "a:-1,4;b:-1,4", "--quiet"]
    path = str(saved(model, tmp_path / "model.onnx"))
    gears = ["--dynamic-dims", "1,1;5,5;2,2"]
    assert main(["atc", path, "-o", str(tmp_path / "out"), *SOC, *words, *gears]) == 2
    assert "cannot run with these sizes: place: the shapes [5, 4], [3, 4] do not broadcast" in capsys.readouterr().err
    gears = ["--dynamic-dims", "1,1;3,3;2,2"]
    assert main(["atc", path, "-o", str(tmp_path / "out"), *SOC, *words, *gears]) == 0


def test_inputs_that_atc_cannot_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ATC ends a name at a colon or semicolon, so the file has others, and a note says so. A default is no input."""
    model = plain()
    model.graph.input[0].name = model.graph.node[0].input[0] = "x:0"
    model.graph.input.append(helper.make_tensor_value_info("ready", TensorProto.FLOAT, [4]))
    model.graph.initializer.append(numpy_helper.from_array(np.ones(4, np.float32), "ready"))
    path, out = saved(model, tmp_path / "model.onnx"), tmp_path / "out"
    assert main(["atc", str(path), "-o", str(out), *SOC, "--input-shape", "x:0:3,4;ready:4"]) == 2
    assert "'ready' has a value in the model, so it is no input for ATC; leave it out" in capsys.readouterr().err
    assert main(["atc", str(path), "-o", str(out), *SOC, "--input-shape", "x:0:3,4"]) == 0
    assert "note: inputs whose names ATC cannot read have other ones: 'x:0' is x_0\n" in capsys.readouterr().out
    assert "--input_shape=x_0:3,4" in json.loads((out / "report.json").read_text(encoding="utf-8"))["command"]
    assert main(["run", str(out / "model.air")]) == 2
    assert "model.air is no ONNX model; air check and air show read .air files" in capsys.readouterr().err


def test_a_size_counts_wherever_its_name_stands(tmp_path: Path) -> None:
    """batch and seq are fixed by the query alone."""
    model = saved(attention(), tmp_path / "model.onnx")
    out = tmp_path / "out"
    assert main(["atc", str(model), "-o", str(out), *SOC, "--input-shape", SHAPES.partition(";")[0], "--quiet"]) == 0
    assert all(-1 not in (op.output_descs[0].shape or (-1,)) for op in read(out / "model.air").root.of_type("Data"))


def model_with_bfloat16() -> onnx.ModelProto:
    return attention(TensorProto.BFLOAT16, batch=1, length=32)


def unmapped() -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 4])
    node = helper.make_node("TfIdfVectorizer", ["x"], ["y"], "strange", domain="com.microsoft")
    graph = helper.make_graph([node], "unmapped", [x], [y])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            attention(),
            ["--soc-version", "Ascend910B22"],
            "unknown SoC version 'Ascend910B22'; those of A2 are Ascend910B1, Ascend910B2, ",
        ),
        (attention(), ["--soc-version", "A2"], "A2 is a family; ATC wants one SoC version of it: Ascend910B1"),
        (attention(), ["--soc-version", "Ascend031"], "no attention operators are known for Ascend031"),
        (attention(), [*SOC, "--cann", "1.0"], "no variant of FlashAttentionScore is known for CANN 1.0"),
        (attention(), [*SOC, "--route", "Onnx"], "unknown route 'Onnx', did you mean 'onnx'?"),
        (attention(), [*SOC, "--route", "teleport"], "unknown route 'teleport'; known are air"),
        (attention(), [*SOC, "--precision", "fp8"], "unknown precision 'fp8'; ATC's --precision_mode_v2 takes origin"),
        (attention(), [*SOC, "--precision", "mixed_hif8"], "Ascend910B2 has no HiFloat8"),
        (
            attention(),
            ["--soc-version", "Ascend310P3", "--precision", "mixed_bfloat16"],
            "Ascend310P3 has no bfloat16, which --precision mixed_bfloat16 needs",
        ),
        (model_with_bfloat16(), ["--soc-version", "Ascend310P3"], "holds bfloat16, which Ascend310P3 does not have"),
        (unmapped(), SOC, "com.microsoft::TfIdfVectorizer 'strange': no GE operator computes this; leave it out, or "),
        (
            attention(),
            SOC,
            f"has inputs with dynamic sizes; give them with --input-shape 'query:batch,{HEADS},seq,{SIZE};key:batch",
        ),
        (attention(), SOC, "and replace each name by a number, a range such as 1~512, or -1 for any size"),
        (
            positions(),
            [*SOC, "--input-shape", "x:2,9,4"],
            "cannot run with these sizes: add: the shapes [2, 9, 4], [8, 4]",
        ),
        (plain(), SOC, "give them with --input-shape 'x:n,4'"),
        (
            attention(),
            [*SOC, "--input-shape", f"query:-1,{HEADS},1~8,{SIZE}"],
            f"with --input-shape 'query:-1,{HEADS},1~8,{SIZE};key:batch,{HEADS},seq,{SIZE};value:batch,{HEADS},seq,",
        ),
        (
            attention(),
            [*SOC, "--input-shape", f"query:-1,{HEADS},-1,{SIZE}", "--dynamic-dims", "1,8;2,16"],
            "and replace each name by a number, or -1 for a size that each group of --dynamic-dims has",
        ),
        (plain(), [*SOC, "--input-shape", "x:3,5"], "input 'x' has the size 4 where --input-shape has 5"),
        (plain(), [*SOC, "--input-shape", "x:3"], "input 'x' has 2 dimensions, --input-shape 1"),
        (plain(), [*SOC, "--input-shape", "z:3,4"], "has no input 'z'; its inputs are x"),
        (plain(), [*SOC, "--input-shape", "x:3,4,y:3,4"], "--input-shape 'x:3,4,y': between two inputs stands ';'"),
        (plain(), [*SOC, "--input-shape", "x"], "--input-shape 'x' is not of the form name:1,128"),
        (plain(), [*SOC, "--input-shape", "x:3,4;x:3,4"], "--input-shape names x twice"),
        (plain(), [*SOC, "--input-shape", "x:3.5,4"], "'3.5' is not a size"),
        (plain(), [*SOC, "--input-shape", "x:0,4"], "ATC takes no size 0"),
        (plain(), [*SOC, "--input-shape", "x:9~2,4"], "the range 9~2 is empty"),
        (attention(), [*SOC, "--input-shape", f"query:1,{HEADS},8,{SIZE};key:2,{HEADS},8,{SIZE}"], "'batch' two sizes"),
        (plain(), [*SOC, "--input-shape", "x:-1,4", "--dynamic-dims", "1"], "all of them different; found 1"),
        (plain(), [*SOC, "--input-shape", "x:-1,4", "--dynamic-dims", "1,2;3,4"], "needs 1 size in each group"),
        (plain(), [*SOC, "--input-shape", "x:2,4", "--dynamic-dims", "1;2"], "no size there is -1"),
        (plain(), [*SOC, "--input-shape", "x:1~8,4", "--dynamic-dims", "1;2"], "goes with -1 in --input-shape"),
        (plain(), [*SOC, "--input-shape", "x:-1,4", "--dynamic-dims", "a"], "is not of the form 1,128;4,256"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: onnx.ModelProto, options: list[str], message: str
) -> None:
    path = saved(model, tmp_path / "model.onnx")
    assert main(["atc", str(path), "-o", str(tmp_path / "out"), *options]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.onnx"]


def test_an_option_of_atc_is_no_keyword_of_ours(tmp_path: Path) -> None:
    """Errors in Python speak of keywords in the place of our flags, and leave those of ATC as they are."""
    with pytest.raises(InputError, match="ATC's --precision_mode_v2 takes origin"):
        fa_compiler.compile_for_atc(plain(), tmp_path / "out", "Ascend910B2", precision="fp8")


def test_an_older_cann_gets_the_attributes_that_it_has(tmp_path: Path) -> None:
    path = saved(attention(batch=1, length=32), tmp_path / "model.onnx")
    for cann in ("8.0", "8.5.0-beta.1", None):
        out = tmp_path / f"out_{cann}"
        fa_compiler.compile_for_atc(path, out, "Ascend910B2", cann=cann)
        (op,) = read(out / "model.air").root.of_type("FlashAttentionScore")
        assert set(op.attrs) == set(get("FlashAttentionScore", cann).attr_names)
        assert check_air(out / "model.air") == []
    missing = set(get("FlashAttentionScore").attr_names) - set(get("FlashAttentionScore", "8.0").attr_names)
    assert missing == {"seed", "offset", "out_dtype", "softmax_out_layout"}


@pytest.mark.parametrize(("cann", "newer"), [("99.0", True), ("8.5.0", False), (newest(), False), (None, False)])
def test_a_cann_newer_than_all_that_is_known_is_told(tmp_path: Path, cann: str | None, newer: bool) -> None:
    report = fa_compiler.compile_for_atc(attention(batch=1, length=32), tmp_path / "out", "Ascend910B2", cann=cann)
    told = f"CANN {cann} is newer than all that are known here; written are the operators of {newest()}"
    assert [note for note in report.notes if "newer than" in note] == [told] * newer


def test_a_graph_too_large_for_the_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a limit of 500 bytes in place of 2 GiB."""
    monkeypatch.setattr(route_air, "write", functools.partial(write, message_limit=500))
    path = saved(attention(batch=1, length=32), tmp_path / "model.onnx")
    assert main(["atc", str(path), "-o", str(tmp_path / "out"), *SOC]) == 2
    assert (
        "even without its weights, more than the 2 GiB of a protobuf message; split the model"
        in capsys.readouterr().err
    )
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.onnx"]


def test_a_fault_found_in_the_written_file_is_an_internal_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = check_air(saved_garbage(tmp_path))[0]
    monkeypatch.setattr(route_air, "check", lambda path: [finding])
    path = saved(attention(batch=1, length=32), tmp_path / "model.onnx")
    assert main(["atc", str(path), "-o", str(tmp_path / "out"), *SOC]) == 3
    assert "the .air is not well formed (not-air)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def saved_garbage(folder: Path) -> Path:
    path = folder / "garbage.air"
    path.write_bytes(b"\x07")
    return path


def test_only_what_an_earlier_run_wrote_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(attention(batch=1, length=32), tmp_path / "model.onnx")
    out = tmp_path / "out"
    out.mkdir()
    command = ["atc", str(path), "-o", str(out), *SOC, "--quiet"]
    assert main([*command, "--single-op"]) == 0
    assert main(command) == 0
    assert not (out / "single_op").exists()
    (out / "notes.txt").write_text("mine")
    assert main(command) == 2
    assert "holds notes.txt, which fa-compiler did not write" in capsys.readouterr().err
    assert (out / "notes.txt").read_text(encoding="utf-8") == "mine"
    assert main(["atc", str(path), "-o", str(path), *SOC]) == 2
    assert "is not a folder" in capsys.readouterr().err
    (tmp_path / "link").symlink_to(out, target_is_directory=True)
    assert main(["atc", str(path), "-o", str(tmp_path / "link"), *SOC]) == 2
    assert "is a link; name the folder that it leads to" in capsys.readouterr().err
    (tmp_path / "link").unlink()
    assert main(["atc", str(path), "-o", str(tmp_path / "no" / "where"), *SOC]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model.onnx", "out"]


def test_a_folder_with_an_edited_file_is_not_replaced(tmp_path: Path) -> None:
    """cluster_config.json has to be edited, and only its owner knows the addresses. A folder of an older release, which
    has no digests, is replaced as it was then; so is one that is read-only, and nothing of it stays."""

    def write() -> None:
        with new_folder(tmp_path / "out") as folder:
            (folder / "report.json").write_text("{}", encoding="utf-8")
            for name in ("cluster_config.json", "model.onnx"):
                (folder / name).write_text("written", encoding="utf-8")

    write()
    config, report = tmp_path / "out" / "cluster_config.json", tmp_path / "out" / "report.json"
    config.write_text("my addresses", encoding="utf-8")
    with pytest.raises(InputError, match=r"holds cluster_config\.json, which was edited since fa-compiler wrote"):
        write()
    assert config.read_text(encoding="utf-8") == "my addresses"
    told = json.loads(report.read_text(encoding="utf-8"))
    assert list(told.pop("sha256")) == ["cluster_config.json"]
    report.write_text(json.dumps(told), encoding="utf-8")
    config.parent.chmod(0o555)
    write()
    assert config.read_text(encoding="utf-8") == "written"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


@SCRIPTS
def test_a_script_runs_in_its_own_folder_whatever_cdpath_is(tmp_path: Path) -> None:
    other = tmp_path / "other" / "out"
    other.mkdir(parents=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "atc.sh").write_text(script("Prints its folder.", [["pwd", "-P"]]), encoding="utf-8")
    environment = {**os.environ, "CDPATH": str(other.parent), "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    (tmp_path / "atc").touch(0o755)
    done = subprocess.run(
        ["sh", "out/atc.sh"], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout == f"{tmp_path.resolve() / 'out'}\n"


def test_a_failed_block_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="stop"), new_folder(tmp_path / "out") as folder:
        (folder / "half").write_text("x")
        raise InputError("stop")
    assert list(tmp_path.iterdir()) == []


def test_the_first_foreign_file_ends_the_look_into_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home folder has millions of files, and /proc some that come and go."""
    below = tmp_path / "below"
    below.mkdir()
    (tmp_path / "mine").touch()
    _refuse(below, monkeypatch)
    with pytest.raises(InputError, match="holds mine, which fa-compiler did not write"):
        check_target(tmp_path)


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = tmp_path / "below"
    below.mkdir()
    _refuse(below, monkeypatch)
    with pytest.raises(InputError, match=f"the folder {re.escape(str(below))} cannot be read: Permission denied"):
        check_target(tmp_path)


def _refuse(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a folder be unreadable, also where root runs the tests."""
    scandir = os.scandir

    def scanned(place: str) -> object:
        if Path(place) == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), place)
        return scandir(place)

    monkeypatch.setattr(os, "scandir", scanned)


def test_errors_name_the_folder_that_was_asked_for(tmp_path: Path) -> None:
    """Not the hidden one that is filled first."""
    for error in (InputError, OSError):
        with pytest.raises(InputError, match="full") as caught, new_folder(tmp_path / "out") as folder:
            place = folder / "model.onnx"
            raise InputError(f"{place}: full") if error is InputError else OSError(28, "full", str(place))
        assert str(tmp_path / "out") in str(caught.value)
        assert ".tmp" not in str(caught.value)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG])
def test_a_full_disk_names_the_folder(code: int, tmp_path: Path) -> None:
    """A write that fails does not say of which file."""
    with pytest.raises(InputError, match="out cannot be written.*free some space"), new_folder(tmp_path / "out"):
        raise OSError(code, os.strerror(code))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("bert", "one layer has 15 operators; GE starts a kernel for each"),
        ("llama", "one layer has 12 operators; GE starts a kernel for 10 of them"),
    ],
)
def test_the_operators_of_a_layer(name: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(EXAMPLES / f"{name}.onnx")
    shapes = ["--input-shape", "input_ids:1,128;attention_mask:1,128"]
    assert main(["atc", model, "-o", str(tmp_path / "out"), "--soc-version", "Ascend950PR_9599", *shapes]) == 0
    assert f"\n{told}\n" in capsys.readouterr().out


def test_routes() -> None:
    assert next(iter(run.ROUTES)) == "air"
    assert run.SCRIPT == "atc.sh"
    assert sizes.parse_shapes("a:0:1,2~3;s:") == {"a:0": (1, (2, 3)), "s": ()}


@pytest.mark.parametrize(("cann", "written"), [("8.0.0", []), (None, ["LayerNormV3_0.json"])])
def test_single_ops_are_those_of_the_version(cann: str | None, written: list[str], tmp_path: Path) -> None:
    """A LayerNormalization whose mean is read is LayerNormV3, which the registry knows from a later version on."""
    given = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[4,64] x, float[64] w) => (float[4,64] y, float[4,1] m) '
        "{ y, m = LayerNormalization(x, w, w) }"
    )
    fa_compiler.compile_for_atc(given, tmp_path / "out", "Ascend910B2", single_op=True, cann=cann)
    assert [path.name for path in sorted((tmp_path / "out" / "single_op").glob("*"))] == written


def test_values_that_are_read_on_the_host_are_in_the_single_op(tmp_path: Path) -> None:
    lengths = np.array([128, 256])
    op = Op("fas", "FlashAttentionScore", [Output(name) for name in "qkv"] + [None] * 5 + [Output("l"), Output("l")])
    op.input_descs = [TensorDesc(name, "DT_FLOAT16", (256, 4, 64)) for name in ("query", "key", "value")]
    missing = ("real_shift", "drop_mask", "padding_mask", "atten_mask", "prefix")
    op.input_descs += [absent(name) for name in missing]
    op.input_descs += [TensorDesc(name, "DT_INT64", (2,)) for name in ("actual_seq_qlen", "actual_seq_kvlen")]
    statistics = TensorDesc("softmax_max", "DT_FLOAT", (256, 4, 8))
    op.output_descs = [statistics, TensorDesc("softmax_sum", "DT_FLOAT", (256, 4, 8))]
    op.output_descs += [
        TensorDesc("softmax_out", "DT_FLOAT16", (0,) * 4),
        TensorDesc("attention_out", "DT_FLOAT16", (256, 4, 64)),
    ]
    op.attrs = {"head_num": Attr("Int", 4), "input_layout": Attr("String", "TND")}
    values = {name: weight(lengths, "DT_INT64") for name in ("query", "actual_seq_qlen", "actual_seq_kvlen")}
    built = RouteResult("model.air", 1, [], [op, op], constants={"fas": values})
    (file,) = single.write_all(built, tmp_path, Request(soc_version("Ascend910B2")))
    tensors = {tensor["name"]: tensor for tensor in json.loads(file.read_text(encoding="utf-8"))[0]["input_desc"]}
    assert tensors["actual_seq_qlen"]["const_value"] == [128, 256]
    assert "const_value" not in tensors["query"]
    assert check_json(file) == []


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_the_model_of_the_folder_computes_what_the_original_does(name: str, tmp_path: Path) -> None:
    """Sizes fixed, fused, converted, written; read again, as ONNX operators, in ONNX Runtime."""
    model = EXAMPLES / f"{name}.onnx"
    out = tmp_path / "out"
    sizes = "input_ids:2,16;attention_mask:2,16"
    assert main(["atc", str(model), "-o", str(out), *SOC, "--input-shape", sizes, "--quiet"]) == 0
    back = onnx_of(read(out / "model.air"))
    mask = np.arange(16)[None, :] < np.array([[16], [11]])
    feed = {"input_ids": np.arange(32).reshape(2, 16) % 29, "attention_mask": mask.astype(np.int64)}
    options = onnxruntime.SessionOptions()
    fa_compiler.register_custom_ops(options)
    session = onnxruntime.InferenceSession(back.SerializeToString(), options)
    seen = session.run(None, feed)
    wanted = onnxruntime.InferenceSession(model).run(None, feed)
    assert len(seen) == len(wanted)
    for left, right in zip(seen, wanted, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5 * np.abs(right).max(), rtol=0)  # float32, a few layers


@pytest.mark.parametrize("limit", [0, 1 << 29])
def test_joined_weights_of_files(limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are joined are read from the file where their parts are, be they written inline or to files."""
    monkeypatch.setattr(route_air, "write", functools.partial(write, inline_limit=limit))
    inside, beside = EXAMPLES / "bert.onnx", tmp_path / "model.onnx"
    onnx.save(onnx.load(inside), beside, save_as_external_data=True, location="weights", size_threshold=1024)
    consts = []
    for name, path in (("inside", inside), ("beside", beside)):
        shapes = {"input_ids": (1, 16), "attention_mask": (1, 16)}
        report = fa_compiler.compile_for_atc(path, tmp_path / name, "Ascend910B2", input_shape=shapes)
        assert any(line.op == "MatMul" for line in report.around)
        assert check_air(tmp_path / name / "model.air") == []
        graph = read(tmp_path / name / "model.air").root
        consts.append({op.name: op.attrs["value"].value.load() for op in graph.of_type("Const")})
    assert consts[0] == consts[1]


def test_large_weights_are_files_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of no bytes in place of 512 MiB; the model's own weights lie beside it."""
    table = np.arange(4096 * 4, dtype=np.float32).reshape(4096, 4)
    model = positions()
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(table, "table"))
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=0)
    monkeypatch.setattr(route_air, "write", functools.partial(write, inline_limit=0))
    out = tmp_path / "out"
    command = ["atc", str(path), "-o", str(out), *SOC, "--input-shape", "x:1,4096,4", "--quiet"]
    for _ in range(2):  # the second run replaces what the first wrote
        assert main(command) == 0
    (file,) = [
        name
        for name in json.loads((out / "report.json").read_text(encoding="utf-8"))["files"]
        if name.startswith("air_weight")
    ]
    assert (out / file).read_bytes() == table.tobytes()
    assert (out / "model.air").stat().st_size < 4096
    assert check_air(out / "model.air") == []
