"""The provider in all sessions of a process: by one import, and by the environment variable FA_COMPILER_PROVIDER."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.startup import as_installed, beside_the_package

from .builders import attention, saved

MAKE = """
session = ort.InferenceSession("attention.onnx")
print(session.get_providers()[0])
"""
FUSED, PLAIN = "FaCompilerExecutionProvider", "CPUExecutionProvider"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved(attention(), tmp_path / "attention.onnx")
    return tmp_path


def run(program: str, folder: Path, **variables: str) -> tuple[list[str], str]:
    """The lines that a program prints, and what it writes to stderr. It starts as if the package were installed."""
    path = folder / "program.py"
    path.write_text(program)
    environment = as_installed(folder, **variables)
    done = subprocess.run(
        [sys.executable, str(path)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize(
    ("imports", "value"),
    [
        ("import onnxruntime as ort; import fa_compiler.everywhere", ""),
        ("import fa_compiler.everywhere; import onnxruntime as ort", ""),
        ("import fa_compiler.everywhere; import onnxruntime as ort", "1"),
    ],
)
def test_one_import(imports: str, value: str, folder: Path) -> None:
    """With the variable, too, a session has the provider once."""
    counted = "print(fa_compiler.everywhere.sessions.with_provider)"
    assert run(imports + MAKE + counted, folder, FA_COMPILER_PROVIDER=value) == ([FUSED, "1"], "")


@pytest.mark.parametrize(("value", "provider"), [("report", FUSED), ("0", PLAIN)])
def test_the_variable(value: str, provider: str, folder: Path) -> None:
    """Programs may ask first whether onnxruntime is there, and import this package before it."""
    first = "import importlib.util\nassert importlib.util.find_spec('onnxruntime')\nimport fa_compiler.ops"
    told = "fa_compiler: 1 session, 1 of 1 attention fused\n" if value == "report" else ""
    assert run(f"{first}\nimport onnxruntime as ort{MAKE}", folder, FA_COMPILER_PROVIDER=value) == ([provider], told)


@pytest.mark.parametrize(
    ("value", "provider", "told"),
    [
        ("off", PLAIN, ""),
        ("False", PLAIN, ""),
        ("on", FUSED, ""),
        ("repotr", FUSED, "fa_compiler: FA_COMPILER_PROVIDER is 'repotr', which is taken for 1; use 1 or report\n"),
    ],
)
def test_values_of_the_variable(value: str, provider: str, told: str, folder: Path) -> None:
    assert run(f"import onnxruntime as ort{MAKE}", folder, FA_COMPILER_PROVIDER=value) == ([provider], told)


def test_a_list_with_a_provider_that_is_not_there(folder: Path) -> None:
    """Libraries pass such lists; ONNX Runtime leaves out what it does not have."""
    named = 'ort.InferenceSession("attention.onnx", providers=["CUDAExecutionProvider", "CPUExecutionProvider"])'
    lines, _ = run(f"import onnxruntime as ort\nprint({named}.get_providers()[0])", folder, FA_COMPILER_PROVIDER="1")
    assert lines == [FUSED]


def test_without_the_variable_nothing_is_imported(folder: Path) -> None:
    """With it, one module and a flag of its syntax, until the program imports onnxruntime. Other packages, such as an
    editable one, have files that Python reads when it starts, too, so only those of this package are read here."""
    site = folder / "site"
    site.mkdir()
    beside_the_package(site)
    program = f"import site, sys; site.addsitedir({str(site)!r}); print(len(sys.meta_path), *sorted(sys.modules))"

    def started(**variables: str) -> tuple[int, set[str]]:
        command = [sys.executable, "-S", "-c", program]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
        finders, *modules = done.stdout.split()
        return int(finders), {*modules}

    finders, modules = started()
    assert "fa_compiler" not in modules
    assert started(FA_COMPILER_PROVIDER="0") == (finders, modules)
    assert started(FA_COMPILER_PROVIDER="1") == (finders + 1, modules | {"_fa_compiler_startup", "__future__"})


def test_child_processes_have_the_variable(folder: Path) -> None:
    program = """
import multiprocessing
def first(_):
    import onnxruntime as ort
    return ort.InferenceSession("attention.onnx").get_providers()[0]
if __name__ == "__main__":
    for method in ("spawn", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(*pool.map(first, [0]))
"""
    assert run(program, folder, FA_COMPILER_PROVIDER="1") == ([FUSED, FUSED], "")


def test_sessions_of_this_package_are_left_alone(folder: Path) -> None:
    """What verify compares is the model itself."""
    program = """
import fa_compiler
import fa_compiler.everywhere
fa_compiler.optimize("attention.onnx", "fused.onnx")
print(fa_compiler.verify("attention.onnx", "fused.onnx").same)
fa_compiler.InferenceSession("attention.onnx", enable_fallback=False)
print(fa_compiler.everywhere.sessions.with_provider, dict(fa_compiler.everywhere.sessions.others))
"""
    assert run(program, folder, FA_COMPILER_PROVIDER="1") == (["True", "0 {}"], "")


def test_a_session_that_names_another_provider(folder: Path) -> None:
    program = """
import onnxruntime as ort
import fa_compiler.everywhere
options = ort.SessionOptions()
options.optimized_model_filepath = "written.onnx"
print(ort.InferenceSession("attention.onnx", options).get_providers()[0])
"""
    lines, told = run(program, folder, FA_COMPILER_PROVIDER="report")
    assert lines == [PLAIN]
    assert told.endswith("0 sessions, 0 of 0 attentions fused; without the provider: it writes its optimised model\n")


@pytest.mark.parametrize(
    ("value", "spoilt", "reason"),
    [
        ("", "ort.__version__ = '1.22.0'", "the provider needs ONNX Runtime 1.23 or newer; this is 1.22.0"),
        ("1", "import fa_compiler.provider as p; p.custom_ops_library = lambda: open('none.so').name", "none.so"),
    ],
)
def test_what_fails_does_not_end_the_program(value: str, spoilt: str, reason: str, folder: Path) -> None:
    """ONNX Runtime is too old, or the library is missing. The reason is told once."""
    how = "" if value else "import fa_compiler.everywhere"
    lines, told = run(f"import onnxruntime as ort\n{how}\n{spoilt}\n{MAKE}{MAKE}", folder, FA_COMPILER_PROVIDER=value)
    assert lines == [PLAIN, PLAIN]
    assert told.count("sessions run without fused attention: ") == 1
    assert reason in told
    assert "Traceback" not in told


def test_a_package_that_cannot_be_imported(folder: Path) -> None:
    """As in a damaged installation."""
    damaged = """
import sys
class Damaged:
    def find_spec(self, name, path=None, target=None):
        if name == "fa_compiler":
            raise RuntimeError("two\\nlines")
sys.meta_path.insert(0, Damaged())
import onnxruntime as ort
"""
    lines, told = run(damaged + MAKE + MAKE, folder, FA_COMPILER_PROVIDER="1")
    assert lines == [PLAIN, PLAIN]
    assert told == "fa_compiler: sessions run without fused attention: RuntimeError: two lines\n"


def test_another_package_of_the_name(folder: Path) -> None:
    (folder / "onnxruntime.py").write_text("NAME = 'another'")
    assert run("import onnxruntime\nprint(onnxruntime.NAME)", folder, FA_COMPILER_PROVIDER="1") == (["another"], "")
