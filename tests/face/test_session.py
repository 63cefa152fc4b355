"""`InferenceSession` does what ONNX Runtime's own does, and fuses."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper, shape_inference

import fa_compiler
from fa_compiler import session as session_module
from fa_compiler.op_registry.schemas import CAN_INFER
from fa_compiler.passes import Options
from fa_compiler.passes.answer.option import options_of
from tests.systems import LINKS, said

from .builders import attention, feeds, plain, projected, saved

TOLERANCE = 1e-5  # float32, relative to the largest value: the order of the additions differs


def agree(ours: ort.InferenceSession, model: str | bytes | Path, length: int = 8) -> None:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    expected = ort.InferenceSession(model, options).run(None, feeds(length))
    for left, right in zip(expected, ours.run(None, feeds(length)), strict=True):
        assert np.max(np.abs(left - right)) <= TOLERANCE * np.max(np.abs(left))


def test_is_a_subclass_with_the_same_arguments() -> None:
    assert issubclass(fa_compiler.InferenceSession, ort.InferenceSession)
    ours = inspect.signature(fa_compiler.InferenceSession.__init__).parameters
    theirs = inspect.signature(ort.InferenceSession.__init__).parameters
    assert [name for name in ours if name not in options_of(Options)] == list(theirs)
    assert [ours[name].default for name in theirs] == [parameter.default for parameter in theirs.values()]


@pytest.mark.parametrize("kind", ["str", "path", "bytes"])
def test_fuses_while_loading(kind: str, tmp_path: Path) -> None:
    path = saved(attention(), tmp_path / "model.onnx")
    source = {"str": str(path), "path": path, "bytes": path.read_bytes()}[kind]
    session = fa_compiler.InferenceSession(source, None, ["CPUExecutionProvider"])
    assert session.fusion_report is not None
    assert session.fusion_report.count("fused") == 1
    agree(session, path)
    agree(session, path, length=5)


def test_external_weights_by_path(tmp_path: Path) -> None:
    path, _ = projected(tmp_path)
    session = fa_compiler.InferenceSession(path)
    assert session.fusion_report is not None
    assert session.fusion_report.count("fused") == 1
    agree(session, path)
    session.set_providers(["CPUExecutionProvider"])
    agree(session, path)


def test_external_weights_by_bytes_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = projected(tmp_path)
    monkeypatch.chdir(tmp_path)
    session = fa_compiler.InferenceSession(path.read_bytes())
    assert session.fusion_report is not None
    agree(session, path)


@pytest.mark.skipif(not session_module._HAS_FOLDER, reason="this ONNX Runtime has no such option")
def test_external_weights_by_bytes_from_a_named_folder(tmp_path: Path) -> None:
    path, _ = projected(tmp_path)
    options = ort.SessionOptions()
    options.add_session_config_entry(session_module.FOLDER, str(tmp_path))
    session = fa_compiler.InferenceSession(path.read_bytes(), options)
    assert session.fusion_report is not None
    agree(session, path)
    assert options.get_session_config_entry(session_module.FOLDER) == str(tmp_path)


@LINKS
def test_weights_behind_links_of_a_download_cache(tmp_path: Path) -> None:
    projected(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for name in ("model.onnx", "weights.bin"):
        (tmp_path / "snapshot" / name).symlink_to(f"../blobs/{name}")
    session = fa_compiler.InferenceSession(tmp_path / "snapshot" / "model.onnx")
    assert session.fusion_report is not None
    agree(session, tmp_path / "blobs" / "model.onnx")


@LINKS
def test_weights_linked_into_a_folder_of_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime 1.20 knows no folder for weights. (Newer ones do not follow such links; what is tested
    here is the folder, and with 1.20 the session.)"""
    path, _ = projected(tmp_path)
    monkeypatch.setattr(session_module, "_HAS_FOLDER", False)
    made: list[Path] = []
    linked = fa_compiler.InferenceSession._linked

    def watched(*args: object) -> str:
        made.append(Path(linked(*args)))  # type: ignore[arg-type]
        return str(made[-1]) if ort.__version__.startswith("1.20.") else str(path)

    monkeypatch.setattr(fa_compiler.InferenceSession, "_linked", watched)
    session = fa_compiler.InferenceSession(path)
    agree(session, path)
    folder = made[0].parent
    assert {file.name for file in folder.iterdir()} == {"model.onnx", "0.data"}
    assert (folder / "0.data").resolve() == (tmp_path / "weights.bin").resolve()
    del session
    assert not folder.exists()


def test_one_options_object_for_several_models(tmp_path: Path) -> None:
    """The custom ops are registered once, and the weights of one model are never taken for another's."""
    options = ort.SessionOptions()
    first, _ = projected(tmp_path / "first")
    second, _ = projected(tmp_path / "second")
    other = np.full((16, 16), 0.5, np.float32)
    (tmp_path / "second" / "weights.bin").write_bytes(bytes(64) + other.tobytes())
    sessions = [fa_compiler.InferenceSession(path, options) for path in (first, second)]
    agree(sessions[0], first)
    agree(sessions[1], second)
    sessions[0].set_providers(["CPUExecutionProvider"])
    agree(sessions[0], first)
    with pytest.raises(Exception, match=r"weights\.bin") as error:
        fa_compiler.InferenceSession(first.read_bytes(), options)
    assert "tensor 'w' needs 1024 bytes" in error.value.__notes__[0]


def test_nothing_to_fuse(tmp_path: Path) -> None:
    path = saved(plain(), tmp_path / "model.onnx")
    session = fa_compiler.InferenceSession(path)
    assert session.fusion_report is not None
    assert list(session.fusion_report.blocks) == []
    x = np.array([[-1, 2, -3, 4]], np.float32)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], np.maximum(x, 0))


def test_a_file_that_is_fused_already(tmp_path: Path) -> None:
    path = saved(attention(), tmp_path / "model.onnx")
    fa_compiler.optimize(path, tmp_path / "fused.onnx")
    agree(fa_compiler.InferenceSession(tmp_path / "fused.onnx"), path)
    options = ort.SessionOptions()
    fa_compiler.register_custom_ops(options)
    agree(ort.InferenceSession(tmp_path / "fused.onnx", options), path)
    options = ort.SessionOptions()
    options.register_custom_ops_library(fa_compiler.custom_ops_library())
    agree(ort.InferenceSession(tmp_path / "fused.onnx", options), path)


def test_errors_are_those_of_onnxruntime(tmp_path: Path) -> None:
    for name, content in (("missing.onnx", None), ("text.onnx", b"this is text\n")):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(Exception) as theirs:
            ort.InferenceSession(str(path))
        with pytest.raises(type(theirs.value)):
            fa_compiler.InferenceSession(str(path))
    with pytest.raises(TypeError):
        fa_compiler.InferenceSession(7)  # type: ignore[arg-type]


def test_providers_in_the_place_of_the_options(tmp_path: Path) -> None:
    path = saved(attention(), tmp_path / "model.onnx")
    with pytest.raises(TypeError, match=r"`sess_options` is an onnxruntime.SessionOptions or None, not \['CPU"):
        fa_compiler.InferenceSession(path, ["CPUExecutionProvider"])  # type: ignore[arg-type]


def test_options_that_have_the_library_already(tmp_path: Path) -> None:
    """ONNX Runtime refuses a domain that is registered twice, so a second registration does nothing."""
    path, options = saved(attention(), tmp_path / "model.onnx"), ort.SessionOptions()
    options.register_custom_ops_library(fa_compiler.custom_ops_library())
    session = fa_compiler.InferenceSession(path, options)
    assert session.fusion_report is not None and session.fusion_report.count("fused") == 1
    fa_compiler.optimize(path, tmp_path / "fused.onnx")
    fa_compiler.register_custom_ops(options)
    ort.InferenceSession(tmp_path / "fused.onnx", options)


def test_what_is_refused_is_loaded_as_it_is(tmp_path: Path) -> None:
    """onnx-ir would drop the sparse initializer, ONNX Runtime runs it."""
    model = plain()
    values = helper.make_tensor("s", 1, [1], [2.0])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, helper.make_tensor("i", 7, [1], [3]), [4]))
    model.graph.node[0].CopyFrom(helper.make_node("Add", ["x", "s"], ["y"], "add"))
    path = saved(model, tmp_path / "model.onnx")
    with pytest.warns(UserWarning, match="sparse initializers"):
        session = fa_compiler.InferenceSession(path)
    assert session.fusion_report is None
    np.testing.assert_array_equal(session.run(None, {"x": np.ones((1, 4), np.float32)})[0], [[1, 1, 1, 3]])


def test_ort_format_passes_through(tmp_path: Path) -> None:
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "model.ort")
    ort.InferenceSession(attention().SerializeToString(), options)
    for source in (tmp_path / "model.ort", (tmp_path / "model.ort").read_bytes()):
        session = fa_compiler.InferenceSession(source)
        assert session.fusion_report is None
        agree(session, attention().SerializeToString())


def test_a_fused_model_in_ort_format_is_loaded_with_the_library(tmp_path: Path) -> None:
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "fused.ort")
    fa_compiler.register_custom_ops(options)
    ort.InferenceSession(fa_compiler.optimize(attention()).model.SerializeToString(), options)
    for source in (tmp_path / "fused.ort", (tmp_path / "fused.ort").read_bytes()):
        agree(fa_compiler.InferenceSession(source), attention().SerializeToString())


def test_import_is_lazy_and_registers_the_schemas() -> None:
    """onnxruntime and rich are not imported before they are needed; the checker knows the
    domain."""
    code = """
import sys, fa_compiler
assert not {"onnxruntime", "rich"} & set(sys.modules), sorted(sys.modules)
import onnx.defs
assert onnx.defs.has("FlashAttentionScore", 1, "ascend")
assert isinstance(fa_compiler.InferenceSession, type)
assert set(fa_compiler.__all__) <= set(dir(fa_compiler))
for name in fa_compiler.__all__:
    getattr(fa_compiler, name)
fa_compiler.reference.run, fa_compiler.ops.run
try:
    fa_compiler.nothing
except AttributeError:
    print("good")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, said(done.stderr)) == ("good\n", "")


@pytest.mark.skipif(not CAN_INFER, reason="this onnx takes no shape inference written in Python")
def test_shape_inference_reaches_past_a_fused_node(tmp_path: Path) -> None:
    fused = fa_compiler.optimize(attention()).model
    del fused.graph.value_info[:]
    fused.graph.output[0].name = "end"
    fused.graph.node.append(helper.make_node("Identity", ["out"], ["end"]))
    inferred = shape_inference.infer_shapes(fused, strict_mode=True)
    found = {
        info.name: [d.dim_param or d.dim_value for d in info.type.tensor_type.shape.dim]
        for info in inferred.graph.value_info
    }
    assert found["out"] == ["batch", 4, "seq", 16]
