"""How a result is run: the lines are right, as they are printed."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import fa_compiler
from fa_compiler.command_line.main import parser
from fa_compiler.op_registry.runtimes import RUNTIMES
from fa_compiler.passes.answer.options import Target
from fa_compiler.pipeline.how_to_run import how_to_run

from .builders import attention, feeds, saved


def executed(lines: tuple[str, ...]) -> onnxruntime.InferenceSession:
    """The session that the lines of Python make."""
    names: dict[str, object] = {}
    exec("\n".join(lines), names)
    session = names["session"]
    assert isinstance(session, onnxruntime.InferenceSession)
    return session


@pytest.mark.parametrize(("target", "way"), [("ort", 0), ("ascend", 1), ("onnx", 0), ("contrib", 0)])
def test_the_lines_of_python_run_the_file(target: Target, way: int, tmp_path: Path) -> None:
    original = saved(attention(batch=2, length=8), tmp_path / "model.onnx")
    path = tmp_path / 'a "fused" model.onnx'
    result = fa_compiler.optimize(original, path, target=target)
    assert result.report.count("fused") == 1
    session = executed(how_to_run(path, target).ways[way].lines)
    inputs = feeds()
    (expected,) = onnxruntime.InferenceSession(original).run(None, inputs)
    (computed,) = session.run(None, inputs)
    np.testing.assert_allclose(computed, expected, rtol=1e-4, atol=1e-5)


def test_every_target_and_runtime() -> None:
    """A file needs the library, ATC or nothing; what it does not need is not named."""
    assert "RegisterCustomOpsLibrary" in str(how_to_run("out.onnx"))
    assert "FA_COMPILER_PROVIDER=1 python script.py" in str(how_to_run("out.onnx"))
    (atc,) = how_to_run("my model.onnx", "ascend").ways[0].lines
    assert parser().parse_args(shlex.split(atc)[1:]).model == Path("my model.onnx")
    for runtime in (None, *RUNTIMES):
        shown = str(how_to_run("out.onnx", "contrib", runtime))
        assert "fa_compiler" not in shown
        assert "needs no library" in shown
        assert '"out.onnx"' in shown or "any other ONNX file" in shown
    assert "CUDAExecutionProvider" in str(how_to_run("out.onnx", "onnx", "ort-cuda"))
    assert "openvino.Core()" in str(how_to_run("out.onnx", "onnx", "openvino"))
    assert "onnxruntime-web" in str(how_to_run("out.onnx", "contrib", "ort-webgpu"))
