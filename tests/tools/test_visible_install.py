"""What the installation of make demo and make test shows: each compiled file, and all of pip's output if it fails."""

from __future__ import annotations

import sys

import pytest

from tools import visible_install

SHOWN = {
    "  [3/58] Building CXX object CMakeFiles/kernel_avx2_decode.dir/kernel/decode/decode.cc.o": (
        "[3/58] kernel_avx2_decode/kernel/decode/decode.cc"
    ),
    "  [58/58] Linking CXX shared module libfa_compiler_ort.so": "[58/58] libfa_compiler_ort.so",
    "Building wheels for collected packages: fa_compiler": None,
    "  -- Detecting CXX compile features - done": None,
    "  kernel/attention.cc:9:5: warning: unused variable": None,
    "": None,
}


@pytest.mark.parametrize("line", SHOWN)
def test_what_is_shown_of_a_line(line: str) -> None:
    assert visible_install.step(line) == SHOWN[line]


def test_the_first_file_tells_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    first, second, only = (f"  [{step}] Building CXX object decode.cc.o" for step in ("1/58", "2/58", "1/1"))
    assert visible_install.estimate(first) == "compiling 58 files of the kernels on 2 cores, about 5 min"
    assert visible_install.estimate(only) == "compiling 1 file of the kernels on 2 cores, about 1 min"
    assert visible_install.estimate(second) is None


def test_what_an_extra_adds_to_the_requirements() -> None:
    required, tested = visible_install.requirements([]), visible_install.requirements(["test"])
    assert any(package.startswith("onnxruntime") for package in required)
    assert tested[: len(required)] == required
    assert any(package.startswith("pytest>") for package in tested[len(required) :])


@pytest.mark.parametrize("refuses", ["of what it requires", "of the package"])
def test_a_failure_shows_the_output_of_pip(
    refuses: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pip that fails does so at once; the other one has nothing to do."""
    nothing = ["--version"]
    fails = ["install", "--no-index", "no-such-package"]
    loading, compiling = (fails, nothing) if refuses == "of what it requires" else (nothing, fails)
    monkeypatch.setattr(sys, "argv", ["visible_install.py"])
    monkeypatch.setattr(visible_install, "loading", lambda *_: [sys.executable, "-m", "pip", *loading])
    monkeypatch.setattr(visible_install, "compiling", lambda *_: [sys.executable, "-m", "pip", *compiling])
    assert visible_install.main() == 1
    assert "no-such-package" in capsys.readouterr().out


def test_a_terminal_has_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    for number in (1, 2):
        visible_install.show(f"[{number}/2] a file with a long name")
    assert capsys.readouterr().out == "\r\x1b[K[1/2] a file with a\r\x1b[K[2/2] a file with a"
