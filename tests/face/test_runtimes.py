"""The targets "onnx" and "contrib" as a user meets them: files, tables and errors."""

from __future__ import annotations

import json
from pathlib import Path

import onnxruntime
import pytest

import fa_compiler
from fa_compiler.command_line.main import main
from fa_compiler.comparison import compare
from fa_compiler.op_registry.runtimes import RUNTIMES

from .builders import attention, ops, plain, saved


@pytest.mark.parametrize(
    ("target", "runtime", "op"), [("onnx", "openvino", "Attention"), ("contrib", "ort-webgpu", "MultiHeadAttention")]
)
def test_a_file_for_a_runtime(target: str, runtime: str, op: str, tmp_path: Path) -> None:
    """It is verified in ONNX Runtime, and holds nothing of ours."""
    path, out = saved(attention(), tmp_path / "model.onnx"), tmp_path / "out.onnx"
    given = ["optimize", str(path), "-o", str(out), "--target", target, "--runtime", runtime, "--verify"]
    assert main(given) == 0
    assert op in ops(out)
    assert not {"FlashAttention", "Softmax"} & set(ops(out))
    result = fa_compiler.optimize(path, target=target, runtime=f"{runtime}=9999.0")  # type: ignore[arg-type]
    assert result.report.blocks[0].op == op
    assert fa_compiler.inspect(path, target=target, runtime="ort-coreml").blocks[0].hint  # type: ignore[arg-type]


def test_all_runtimes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(attention(), tmp_path / "model.onnx")
    assert main(["inspect", str(path), "--runtime", "all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {words[0]: words for line in lines if (words := line.split()) and words[0] in RUNTIMES}
    assert list(rows) == list(RUNTIMES)
    assert rows["openvino"][1:] == ["0", "onnx", "Attention"]
    assert rows["ort-webgpu"][1:] == ["0", "contrib", "MultiHeadAttention"]
    assert rows["ort-coreml"][2:6] == ["-", "ort-coreml", "has", "no"]
    assert " ".join(rows["qnn"]).endswith("Attention of qnn does not take sizes that are open before the run")
    assert main(["inspect", str(path), "--runtime", "all", "--json"]) == 0
    (block,) = json.loads(capsys.readouterr().out)["blocks"]
    assert block["runtimes"]["mlx"] == {"op": "Attention", "target": "onnx", "code": None, "reason": None}
    assert block["runtimes"]["qnn"]["code"] == "runtime"


def test_all_runtimes_of_a_model_without_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(saved(plain(), tmp_path / "model.onnx")), "--runtime", "all"]) == 0
    assert "no attention found" in capsys.readouterr().out


WRONG = {
    "a runtime by its processor": (["--target", "onnx", "--runtime", "gpu"], "did you mean 'ort-cuda'?"),
    "a runtime without its prefix": (["--target", "contrib", "--runtime", "dml"], "did you mean 'ort-dml'?"),
    "a target in capitals": (["--target", "ORT"], "unknown target 'ORT', did you mean 'ort'?"),
    "a runtime of many kernels": (["--target", "onnx", "--runtime", "onnxruntime"], "did you mean one of ort-c"),
    "a part of a runtime by another name": (["--target", "onnx", "--runtime", "ort-gpu"], "did you mean 'ort-cuda'?"),
    "the name of a package": (["--target", "onnx", "--runtime", "onnxruntime-gpu"], "did you mean 'ort-cuda'?"),
    "both parts by other names": (["--target", "contrib", "--runtime", "ONNXRuntime-DirectML"], "mean 'ort-dml'?"),
    "a word for several": (
        ["--target", "onnx", "--runtime", "ort"],
        "unknown runtime 'ort', did you mean one of ort-c",
    ),
    "no version": (["--target", "onnx", "--runtime", "openvino=new"], "the version 'new' of openvino is not made of"),
    "another target": (["--runtime", "openvino"], "a runtime needs --target onnx or --target contrib"),
    "an unknown target": (["--target", "cuda"], "it is a runtime, so use --target onnx --runtime ort-cuda"),
    "a target without Attention": (["--target", "webgpu"], "so use --target contrib --runtime ort-webgpu"),
    "a target by another name": (["--target", "DirectML"], "so use --target contrib --runtime ort-dml"),
    "a target without kernels": (["--target", "coreml"], "ort-coreml, which has kernels of no operator"),
    "the target of a processor": (["--target", "cpu"], "did you mean 'ort'?"),
    "buffers": (["--target", "contrib", "--in-place-caches"], "caches in place need --target ort"),
    "a product": (["--target", "onnx", "--soc-version", "A2"], "need --target ascend"),
    "an unknown assumption for all": (["--runtime", "all", "--assume", "luck"], "unknown assumption 'luck'"),
    "an opset of another target": (["--opset", "25"], "an opset needs --target onnx"),
    "an opset without Attention": (
        ["--target", "onnx", "--opset", "22"],
        "22; ONNX has Attention from opset 23 on",
    ),
    "an opset that is no number": (["--target", "onnx", "--opset", "new"], "'new' is not a whole number"),
    "an opset for all": (["--runtime", "all", "--opset", "25"], "--opset does not go with --runtime all"),
    "a slip in all": (["--runtime", "al"], "unknown runtime 'al'; the word 'all', which asks about each of them"),
    "a page of all": (["--runtime", "all", "--html", "page.html"], "--html does not go with --runtime all"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_words(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, expected = WRONG[name]
    assert main(["inspect", str(saved(attention(), tmp_path / "model.onnx")), *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fa-compiler: error: ")
    assert error.count("\n") == 1
    assert expected in error
    assert {each.name for each in tmp_path.iterdir()} == {"model.onnx"}


@pytest.mark.parametrize(
    ("runtime", "told"),
    [
        ("ort-cpu", "it is for ONNX Runtime 1.30 or newer, and this is 1.24.4: try --runtime ort-cpu=1.24"),
        ("ort-cpu=1.28.1", "it is for ONNX Runtime 1.28.1 or newer, and this is 1.24.4: try --runtime ort-cpu=1.24"),
        ("ort-cpu=1.24", None),
        ("ort-cuda", None),
    ],
)
def test_a_result_for_a_newer_release_than_this_one(
    runtime: str, told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What fails in --verify may run in the release that the result is for."""

    def fails(*paths: Path, **words: object) -> None:
        raise compare.CannotRunError("it does not run")

    monkeypatch.setattr(compare, "compare_models", fails)
    monkeypatch.setattr(onnxruntime, "__version__", "1.24.4")
    path = saved(attention(), tmp_path / "model.onnx")
    words = ["--target", "contrib", "--runtime", runtime, "--verify"]
    assert main(["optimize", str(path), "-o", str(tmp_path / "out.onnx"), *words]) == 1
    error = capsys.readouterr().err
    assert error.endswith(f"it does not run; {told}\n" if told else "it does not run\n")
