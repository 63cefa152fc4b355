"""Weights outside the model: referred to in the model's folder, copied elsewhere, never read, never
overwritten."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import fa_compiler
from fa_compiler.command_line.main import main
from fa_compiler.model_files import writing
from fa_compiler.model_files.reading import load
from fa_compiler.passes import Report
from fa_compiler.pipeline.fusing import copy_of
from tests.systems import COPIES_IN_THE_KERNEL, LINKS, PEAK_MEMORY

from .builders import SIZE, attention, external, ops, projected, saved

HEAD = bytes(64)


def weight_of(path: Path) -> np.ndarray:
    """The matrix `w` as a reader of the file finds it."""
    model = onnx.load(path)
    return numpy_helper.to_array(next(tensor for tensor in model.graph.initializer if tensor.name == "w"))


def entries_of(path: Path) -> dict[str, str]:
    model = onnx.load(path, load_external_data=False)
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == "w")
    return {entry.key: entry.value for entry in tensor.external_data}


def test_same_folder_refers(tmp_path: Path) -> None:
    path, weight = projected(tmp_path)
    before = (tmp_path / "weights.bin").read_bytes()
    result = fa_compiler.optimize(path, tmp_path / "out.onnx")
    assert result.report.count("fused") == 1
    assert "FlashAttention" in ops(tmp_path / "out.onnx")
    assert entries_of(tmp_path / "out.onnx") == {"location": "weights.bin", "offset": "64", "length": "1024"}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.onnx", "out.onnx", "weights.bin"]
    assert (tmp_path / "weights.bin").read_bytes() == before
    onnx.checker.check_model(tmp_path / "out.onnx", full_check=True)
    np.testing.assert_array_equal(weight_of(tmp_path / "out.onnx"), weight)


def test_other_folder_copies_with_the_same_offsets(tmp_path: Path) -> None:
    path, weight = projected(tmp_path / "in")
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / "m.onnx"
    result = fa_compiler.optimize(path, out)
    assert entries_of(out) == {"location": "m.onnx.data", "offset": "64", "length": "1024"}
    assert (tmp_path / "out" / "m.onnx.data").read_bytes() == (tmp_path / "in" / "weights.bin").read_bytes()
    assert any("m.onnx.data" in note for note in result.report.notes)
    onnx.checker.check_model(out, full_check=True)
    np.testing.assert_array_equal(weight_of(out), weight)


@COPIES_IN_THE_KERNEL
@pytest.mark.parametrize("code", [errno.EXDEV, errno.EOPNOTSUPP])
def test_copy_where_the_kernel_cannot(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems without copy_file_range get a plain copy; other errors are not swallowed."""

    def refuse(*args: int) -> int:
        raise OSError(code, os.strerror(code))

    path, weight = projected(tmp_path / "in")
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(writing.os, "copy_file_range", refuse)
    fa_compiler.optimize(path, tmp_path / "out" / "m.onnx")
    np.testing.assert_array_equal(weight_of(tmp_path / "out" / "m.onnx"), weight)
    (tmp_path / "more").mkdir()
    code = errno.EIO
    with pytest.raises(fa_compiler.InputError, match=r"m\.onnx\.data cannot be written: Input/output error"):
        fa_compiler.optimize(path, tmp_path / "more" / "m.onnx")
    assert list((tmp_path / "more").iterdir()) == []


def test_copy_where_there_is_no_copy_in_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python on macOS has no copy_file_range."""
    path, weight = projected(tmp_path / "in")
    (tmp_path / "out").mkdir()
    monkeypatch.delattr(writing.os, "copy_file_range", raising=False)
    fa_compiler.optimize(path, tmp_path / "out" / "m.onnx")
    np.testing.assert_array_equal(weight_of(tmp_path / "out" / "m.onnx"), weight)


def test_copying_tells_how_far_it_is(tmp_path: Path) -> None:
    path, _ = projected(tmp_path / "in")
    with (tmp_path / "in" / "weights.bin").open("r+b") as file:
        file.truncate(3 << 20)
        file.seek((3 << 20) - 1)
        file.write(b"x")
    (tmp_path / "out").mkdir()
    loaded, seen = load(path), []
    with writing.staging(lambda *call: seen.append(call)) as stage:
        writing.write_model(copy_of(loaded), loaded, tmp_path / "out" / "m.onnx", stage, Report([]))
        assert not (tmp_path / "out" / "m.onnx").exists()
    assert seen[-1] == ("copying weights (MiB)", 3, 3)
    assert list((tmp_path / "out").iterdir()) == []


def test_kept_weights_are_referred_to_from_above(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ONNX Runtime and onnx follow no reference to any other place, so it is refused, and nothing is written."""
    path, weight = projected(tmp_path / "models" / "llama")
    out = tmp_path / "models" / "fused.onnx"
    result = fa_compiler.optimize(path, out, weights="keep")
    assert entries_of(out) == {"location": "llama/weights.bin", "offset": "64", "length": "1024"}
    assert isinstance(result.model, onnx.ModelProto)
    assert sorted(file.name for file in out.parent.iterdir()) == ["fused.onnx", "llama"]
    onnx.checker.check_model(out, full_check=True)
    np.testing.assert_array_equal(weight_of(out), weight)
    assert main(["verify", str(path), str(out), "--quiet"]) == 0
    (tmp_path / "other").mkdir()
    capsys.readouterr()
    assert main(["optimize", str(path), "-o", str(tmp_path / "other" / "m.onnx"), "--weights", "keep", "--quiet"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.endswith(f"write it to {path.parent}, or let the weights be copied, as they are by default")
    assert list((tmp_path / "other").iterdir()) == []
    with pytest.raises(fa_compiler.InputError, match="unknown value 'move' for the weights: use 'copy' or 'keep'"):
        fa_compiler.optimize(path, out, weights="move")  # type: ignore[arg-type]


def test_again_reuses_the_copy_and_spares_a_stranger(tmp_path: Path) -> None:
    path, weight = projected(tmp_path / "in")
    (tmp_path / "out").mkdir()
    out, data = tmp_path / "out" / "m.onnx", tmp_path / "out" / "m.onnx.data"
    fa_compiler.optimize(path, out)
    fa_compiler.optimize(path, out)
    assert sorted(path.name for path in out.parent.iterdir()) == ["m.onnx", "m.onnx.data"]
    data.write_bytes(b"another model's weights")
    fa_compiler.optimize(path, out)
    assert data.read_bytes() == b"another model's weights"
    assert entries_of(out)["location"] == "m.onnx.1.data"
    np.testing.assert_array_equal(weight_of(out), weight)
    data.write_bytes(bytes(1088))  # the right size, other content
    fa_compiler.optimize(path, out)
    assert data.read_bytes() == bytes(1088)
    assert entries_of(out)["location"] == "m.onnx.1.data"


def test_several_files_become_one(tmp_path: Path) -> None:
    path, weight = projected(tmp_path / "in")
    model = onnx.load(path, load_external_data=False)
    bias = np.arange(SIZE, dtype=np.float32)
    (tmp_path / "in" / "more").mkdir()
    (tmp_path / "in" / "more" / "bias.bin").write_bytes(bias.tobytes())
    tensor = external("bias", bias.shape, "more/bias.bin", 0)
    del tensor.external_data[1:]  # offset and length may be absent
    model.graph.initializer.append(tensor)
    model.graph.node.insert(1, helper.make_node("Add", ["projected", "bias"], ["biased"], "add"))
    model.graph.node[3].input[0] = "biased"
    saved(model, path)
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / "m.onnx"
    fa_compiler.optimize(path, out)
    assert sorted(path.name for path in out.parent.iterdir()) == ["m.onnx", "m.onnx.data"]
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(out).graph.initializer}
    np.testing.assert_array_equal(arrays["w"], weight)
    np.testing.assert_array_equal(arrays["bias"], bias)
    fa_compiler.optimize(path, tmp_path / "in" / "out.onnx")
    assert weight_of(tmp_path / "in" / "out.onnx").tobytes() == weight.tobytes()


def test_nothing_fused_still_moves_the_weights(tmp_path: Path) -> None:
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("MatMul", ["x", "w"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", 1, ["n", SIZE])],
            [helper.make_tensor_value_info("y", 1, ["n", SIZE])],
            [external("w", (SIZE, SIZE), "w.bin", 0)],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    weight = np.random.default_rng(0).standard_normal((SIZE, SIZE)).astype(np.float32)
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "in" / "w.bin").write_bytes(weight.tobytes())
    path = saved(model, tmp_path / "in" / "m.onnx")
    fa_compiler.optimize(path, tmp_path / "out" / "m.onnx")
    np.testing.assert_array_equal(weight_of(tmp_path / "out" / "m.onnx"), weight)


@LINKS
def test_download_cache_of_links(tmp_path: Path) -> None:
    """Model and weights are links into one folder of blobs: allowed, and copied, since ONNX Runtime would not
    follow the weights' link from a model that is no link."""
    _, weight = projected(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.onnx").symlink_to("../blobs/model.onnx")
    (tmp_path / "snapshot" / "weights.bin").symlink_to("../blobs/weights.bin")
    out = tmp_path / "snapshot" / "out.onnx"
    fa_compiler.optimize(tmp_path / "snapshot" / "model.onnx", out)
    assert entries_of(out)["location"] == "out.onnx.data"
    assert not (tmp_path / "snapshot" / "out.onnx.data").is_symlink()
    np.testing.assert_array_equal(weight_of(out), weight)


def test_hard_linked_weights(tmp_path: Path) -> None:
    path, weight = projected(tmp_path / "in")
    os.link(tmp_path / "in" / "weights.bin", tmp_path / "twin.bin")
    (tmp_path / "out").mkdir()
    fa_compiler.optimize(path, tmp_path / "out" / "m.onnx")
    np.testing.assert_array_equal(weight_of(tmp_path / "out" / "m.onnx"), weight)


def test_model_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    projected(tmp_path)
    monkeypatch.chdir(tmp_path)
    fa_compiler.optimize("model.onnx", "out.onnx")
    assert entries_of(tmp_path / "out.onnx")["location"] == "weights.bin"
    result = fa_compiler.optimize(onnx.load("model.onnx", load_external_data=False))
    assert isinstance(result.model, onnx.ModelProto)
    assert [entry.value for entry in result.model.graph.initializer[-1].external_data] == [
        "weights.bin",
        "64",
        "1024",
    ]


def test_weights_of_a_model_without_a_path_are_sought_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = projected(tmp_path / "in")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(fa_compiler.InputError, match="tensor 'w' needs 1024 bytes.*or give the path of the model$"):
        fa_compiler.optimize(onnx.load(path, load_external_data=False))


def test_inline_weights_that_would_not_fit_go_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result over the limit of protobuf (here a small one) gets a data file."""
    model = attention(batch=2, length=8)
    weight = np.random.default_rng(0).standard_normal((SIZE, SIZE)).astype(np.float32) * 2
    big = np.concatenate([weight, weight])
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    model.graph.initializer.append(numpy_helper.from_array(big, "big"))
    model.graph.node.insert(0, helper.make_node("MatMul", ["query", "w"], ["projected"], "project"))
    model.graph.node[2].input[0] = "projected"
    model.graph.node.append(helper.make_node("Identity", ["big"], ["big_out"], "keep"))
    model.graph.output.append(helper.make_tensor_value_info("big_out", 1, big.shape))
    monkeypatch.setattr(writing, "INLINE_LIMIT", 2500)
    monkeypatch.setattr(writing, "INLINE_TENSOR", 64)
    out = tmp_path / "out.onnx"
    fa_compiler.optimize(model, out)
    assert out.stat().st_size < 2500
    np.testing.assert_array_equal(weight_of(out), weight)
    names = {tensor.name: tensor for tensor in onnx.load(out).graph.initializer}
    np.testing.assert_array_equal(numpy_helper.to_array(names["big"]), big)


_MEASURED = """
import resource, sys
import fa_compiler
from fa_compiler.pipeline.optimize import optimize
from fa_compiler.command_line import models
fa_compiler.optimize(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
report = fa_compiler.optimize(sys.argv[2], sys.argv[3]).report
assert report.count("fused") == 1
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@PEAK_MEMORY
def test_beyond_2_gib_nothing_is_read(tmp_path: Path) -> None:
    """3 GiB of weights (a hole in a sparse file, but for the matrix at its end) cost next to no memory."""
    gap = 3 << 30
    path, weight = projected(tmp_path / "in")
    data = tmp_path / "in" / "weights.bin"
    with data.open("r+b") as file:
        file.truncate(0)
        file.seek(gap)
        file.write(weight.tobytes())
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer.pop()
    model.graph.initializer.append(external("w", weight.shape, "weights.bin", gap))
    model.graph.initializer.append(external("table", (gap // 64, 16), "weights.bin", 0))
    model.graph.node.append(helper.make_node("Shape", ["table"], ["rows"], "rows"))
    model.graph.output.append(helper.make_tensor_value_info("rows", 7, [2]))
    saved(model, path)
    small, _ = projected(tmp_path / "small")
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / "m.onnx"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    grown = subprocess.run(
        [sys.executable, "-c", _MEASURED, str(small), str(path), str(out)],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert int(grown.stdout) < 64 << 10  # KiB
    copy = tmp_path / "out" / "m.onnx.data"
    assert copy.stat().st_size == gap + weight.nbytes
    assert copy.stat().st_blocks * 512 < 1 << 20  # the hole stayed a hole
    with copy.open("rb") as file:
        file.seek(gap)
        assert file.read() == weight.tobytes()
    import resource

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20  # KiB
