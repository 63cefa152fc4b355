"""What Windows has and other systems have not: files that a program holds for itself, paths that are too long, and
another shell."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import fa_compiler
from fa_compiler import shell
from fa_compiler.command_line.main import main
from fa_compiler.model_files import refusals
from tests.systems import IS_WINDOWS

from .builders import attention, contents, external, ops, projected, saved
from .test_inline_weights import wide

WINDOWS = pytest.mark.skipif(not IS_WINDOWS, reason="only Windows gives a file to one program alone")
READ_ONLY = Path("Z:/sys")
"""A folder in which nobody may write, where Wine shows the files of Linux."""


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a file open as another program does that shares it with nobody."""
    assert sys.platform == "win32"
    import ctypes

    kernel = ctypes.WinDLL("kernel32", use_last_error=True)
    kernel.CreateFileW.restype = ctypes.c_void_p
    read, existing = 0x80000000, 3
    handle = kernel.CreateFileW(str(path), read, 0, None, existing, 0, None)
    assert handle != ctypes.c_void_p(-1).value, ctypes.get_last_error()
    try:
        yield
    finally:
        kernel.CloseHandle(ctypes.c_void_p(handle))


@WINDOWS
@pytest.mark.parametrize("command", ["inspect", "optimize", "plan", "run", "bench"])
def test_a_model_that_another_program_holds(command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = saved(attention(), tmp_path / "model.onnx")
    words = ["-o", str(tmp_path / "out")] if command in ("optimize", "plan") else []
    with held(path):
        assert main([command, str(path), *words]) == 2
    error = f"fa-compiler: error: {path} cannot be read: another program holds it open; close it there\n"
    assert capfd.readouterr().err == error
    assert contents(tmp_path).keys() == {"model.onnx"}


@WINDOWS
@pytest.mark.parametrize("over", ["an output", "the input"])
def test_an_output_that_another_program_holds(over: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither the old file nor the new one is lost or left half-written, and there are no temporary files."""
    path = saved(wide(), tmp_path / "model.onnx")
    out = path if over == "the input" else saved(attention(), tmp_path / "out.onnx")
    before = contents(tmp_path)
    if over == "the input":
        # A program that reads lets others read, but not replace.
        with path.open("rb"):
            assert main(["optimize", str(path), "-o", str(out), "--force", "--quiet"]) == 2
    else:
        with held(out):
            assert main(["optimize", str(path), "-o", str(out), "--quiet"]) == 2
    assert f"{out} cannot be written: another program holds it open; close it there" in capfd.readouterr().err
    assert contents(tmp_path) == before


@WINDOWS
def test_weights_that_another_program_holds(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, _ = projected(tmp_path)
    (tmp_path / "out").mkdir()
    with held(tmp_path / "weights.bin"):
        assert main(["optimize", str(path), "-o", str(tmp_path / "out" / "model.onnx"), "--quiet"]) == 2
    error = capfd.readouterr().err
    assert "weights.bin" in error
    assert error.count("\n") == 1
    assert contents(tmp_path / "out") == {}


@WINDOWS
def test_an_output_that_a_session_of_ours_reads(tmp_path: Path) -> None:
    """ONNX Runtime reads a file whole, so that a session of it does not stand in the way."""
    path, out = saved(wide(), tmp_path / "model.onnx"), tmp_path / "out.onnx"
    fa_compiler.optimize(path, out)
    session = fa_compiler.InferenceSession(out)
    fa_compiler.optimize(path, out)
    assert ops(out)
    del session


def test_weights_are_not_held_when_the_model_is_fused(tmp_path: Path) -> None:
    """Small tensors of other files are mapped while the passes read them."""
    model, weights = attention(), tmp_path / "weights.bin"
    weights.write_bytes(np.float32(0.25).tobytes())
    model.graph.initializer[0].CopyFrom(external("scale", (), "weights.bin", 0))
    result = fa_compiler.optimize(saved(model, tmp_path / "model.onnx"), tmp_path / "out.onnx")
    assert result.report.count("fused") == 1
    weights.unlink()
    weights.write_bytes(b"another file")


@pytest.mark.skipif(not READ_ONLY.is_dir(), reason="there is no folder Z:/sys, which Wine has, to fail in")
def test_a_folder_in_which_nobody_may_write(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = saved(attention(), tmp_path / "model.onnx")
    assert main(["optimize", str(path), "-o", str(READ_ONLY / "out.onnx"), "--quiet"]) == 2
    assert "out.onnx cannot be written: Permission denied; choose another place" in capfd.readouterr().err


def test_a_path_of_300_characters(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It works, or the error says what is wrong with it; nothing is left behind."""
    folder = tmp_path
    while len(str(folder)) < 300:
        folder /= "d" * 40
    try:
        folder.mkdir(parents=True)
        path = saved(attention(), folder / "model.onnx")
    except OSError:
        pytest.skip("this system makes no such path")
    code = main(["optimize", str(path), "-o", str(folder / "out.onnx"), "--quiet"])
    if code == 0:
        assert "FlashAttention" in ops(folder / "out.onnx")
        return
    error = capfd.readouterr().err
    assert (code, error.count("\n")) == (2, 1)
    assert f"(the path has {len(str(path))} characters; above 245 Windows has to allow long paths)" in error
    assert contents(folder).keys() == {"model.onnx"}


def test_a_path_that_may_be_too_long_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Windows says of such a path only that there is no such file or folder."""
    monkeypatch.setattr(refusals, "LONGEST", 20)
    remark = "(the path has {} characters; above 6 Windows has to allow long paths)"
    missing, model = tmp_path / "missing.onnx", saved(attention(), tmp_path / "model.onnx")
    assert main(["inspect", str(missing)]) == 2
    assert f"missing.onnx: no such file {remark.format(len(str(missing)))}\n" in capsys.readouterr().err
    out = tmp_path / "no folder" / "out.onnx"
    assert main(["optimize", str(model), "-o", str(out)]) == 2
    assert f" {remark.format(len(str(out)))}; choose another place\n" in capsys.readouterr().err


def test_a_file_that_another_program_holds_is_named() -> None:
    error = PermissionError(13, "The process cannot access the file because it is being used by another process")
    error.winerror = 32  # type: ignore[attr-defined,unused-ignore]
    assert refusals.reason(error, Path("model.onnx")) == "another program holds it open; close it there"


@pytest.mark.parametrize(
    ("windows", "command", "lines"),
    [
        (False, "run 'a b' c", ["FA='a b' run"]),
        (True, 'run "a b" c', ["set FA=a b    (in PowerShell: $env:FA = 'a b')", "run"]),
    ],
)
def test_commands_for_the_shell(windows: bool, command: str, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "IS_WINDOWS", windows)
    assert shell.command(["run", "a b", "c"]) == command
    assert list(shell.with_variable("FA", "a b", "run")) == lines


@pytest.mark.parametrize(("encoding", "rule"), [("cp1252", "-"), ("utf-8", "─")])
def test_tables_in_a_pipe(encoding: str, rule: str, tmp_path: Path) -> None:
    """A pipe of Windows has a code page, which lacks Rich's lines."""
    path = saved(attention(), tmp_path / "model.onnx")
    command = [sys.executable, "-m", "fa_compiler", "inspect", str(path)]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    lines = done.stdout.decode(encoding).splitlines()
    assert lines[1].startswith(" block")
    assert set(lines[2]) == {" ", rule}
    assert lines[3].split()[:2] == ["0", "fused"]


def test_the_limit_is_that_of_windows() -> None:
    assert (refusals.LONGEST is None) == (os.name != "nt")
