"""The package as users get it: a wheel with the compiled library, importable from anywhere, in one import order."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests import kernel_variants
from tests.systems import SOURCES

pytestmark = SOURCES
ROOT = Path(__file__).resolve().parents[1]
MAKING = 1200
"""Seconds that making a wheel may take, far more than it does."""

# Runs one operator, so it needs the Python parts, the data and the library.
PROBE = """
import numpy as np
import fa_compiler
from fa_compiler import ops, passes, reference
from fa_compiler.lowering.ort import library_path
x = np.ones((1, 2, 3, 4), np.float32)
out = ops.run("FlashAttentionScore", {"query": x, "key": x, "value": x}, {"head_num": 2, "input_layout": "BNSD"})
assert (out["attention_out"] == 1).all()
print(fa_compiler.__file__)
print(library_path())
"""


# Asks for a variant that there is not, so that the library names those that it has.
VARIANTS = """
import os
os.environ["FA_COMPILER_ISA"] = "?"
import numpy as np
from fa_compiler import ops
x = np.ones((1, 1, 1, 1), np.float32)
try:
    ops.run("FlashAttentionScore", {"query": x, "key": x, "value": x}, {"head_num": 1, "input_layout": "BNSD"})
except ops.KernelError as error:
    print(*str(error).partition("; this library has ")[2].split(", "), sep="\\n")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout, built with the build tools of this environment or, without, in isolation.

    In the checkout itself: build/ has the objects of its editable installation, which take minutes to compile.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of the whole run: one worker makes it
    folder = folder / "wheel"
    try:
        folder.mkdir()
    except FileExistsError:
        return _made_elsewhere(folder)
    isolation = [] if importlib.util.find_spec("scikit_build_core") is None else ["--no-build-isolation"]
    # The build tools may lie beside the interpreter without being on the path.
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    made = folder / "made"
    try:
        subprocess.run(
            [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *isolation, "-w", str(made), str(ROOT)],
            check=True,
            env=environment,
        )
    finally:
        (folder / "ended").touch()
    return next(made.glob("*.whl"))


def _made_elsewhere(folder: Path) -> Path:
    """The wheel that another worker of this run makes."""
    deadline = time.monotonic() + MAKING
    while not (folder / "ended").exists():
        assert time.monotonic() < deadline, "another worker makes the wheel, and does not come to an end"
        time.sleep(0.5)
    found = [*(folder / "made").glob("*.whl")]
    assert found, "another worker could not make the wheel"
    return found[0]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the wheel's content, as site-packages would."""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), str(wheel)],
        check=True,
    )
    return folder


def run(code: str, cwd: Path, installed: Path | None = None) -> list[str]:
    """Runs code in a new interpreter, with `installed` before this environment's own packages."""
    options = []
    if installed is not None:
        # Without site, because an editable installation in this environment would answer every import of ours.
        options = ["-S"]
        packages = sysconfig.get_paths()
        code = f"import sys\nsys.path += {[str(installed), packages['purelib'], packages['platlib']]!r}\n{code}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, *options, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_the_wheel_fits_every_python_and_holds_what_it_should(wheel: Path) -> None:
    assert "-py3-none-linux" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "fa_compiler/lowering/ort/libfa_compiler_ort.so" in names
    assert "fa_compiler/py.typed" in names
    assert "fa_compiler/passes/__init__.py" in names
    assert "fa_compiler/op_registry/__init__.py" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    docs = {name.removeprefix("fa_compiler/docs/") for name in names if name.startswith("fa_compiler/docs/")}
    there = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.*")}
    assert docs == {name for name in there if name.endswith((".md", ".svg"))}
    strangers = [name for name in names if "csrc" in name or "__pycache__" in name or name.endswith("ruff.toml")]
    assert not strangers
    beside = {name for name in names if name.partition("/")[0].partition("-")[0] != "fa_compiler"}
    assert beside == {"fa_compiler.pth", "_fa_compiler_startup.py"}


def test_a_regular_installation_works_from_elsewhere(installed: Path, tmp_path: Path) -> None:
    package, library = run(PROBE, tmp_path, installed)
    assert Path(package).is_relative_to(installed)
    assert Path(library).is_relative_to(installed)


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_environment_variable_of_an_installation(
    value: str, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that Python reads in site-packages when it starts."""
    monkeypatch.setenv("FA_COMPILER_PROVIDER", value)
    code = f"import site\nsite.addsitedir({str(installed)!r})\nimport onnxruntime\n"
    (name,) = run(f"{code}print(onnxruntime.InferenceSession.__init__.__code__.co_name)", tmp_path, installed)
    assert name == ("make_with_provider" if value == "1" else "__init__")


def test_a_source_distribution_has_every_file_once(tmp_path: Path) -> None:
    """The links to the sub-packages stay links, and lead to their files where it is unpacked."""
    pytest.importorskip("scikit_build_core")
    code = f"from scikit_build_core.build import build_sdist; build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = [Path(*Path(member.name).parts[1:]) for member in archive.getmembers() if member.isfile()]
        archive.extractall(tmp_path, filter="data")
    assert not [name for name in names if name.parts[:2] in (("fa_compiler", "passes"), ("fa_compiler", "docs"))]
    assert not {name.parts[0] for name in names} & {"bench", "examples", "tests", "tools", ".ci"}
    (package,) = tmp_path.glob("*/fa_compiler")
    assert (package / "docs" / "install.md").is_file()
    assert all((package / name / "__init__.py").is_file() for name in ("passes", "lowering", "op_registry"))


def configured(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """CMake's answer to the sources of the library; a folder keeps what it was told before."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    cmake = shutil.which("cmake", path=path)
    if cmake is None:
        pytest.skip("cmake is missing")
    return subprocess.run(
        [cmake, "-S", str(ROOT / "lowering" / "ort" / "csrc"), "-B", str(folder), *options],
        env=os.environ | {"PATH": path} | environment,
        capture_output=True,
        text=True,
    )


def configured_variants(folder: Path, *options: str) -> list[str]:
    result = configured(folder, *options)
    assert result.returncode == 0, result.stderr
    return re.findall(r"^FA_VARIANT\((\w+),", (folder / "variants.inc").read_text(encoding="utf-8"), re.MULTILINE)


def test_native_is_the_best_that_this_machine_takes(tmp_path: Path) -> None:
    everything = configured_variants(tmp_path)
    assert everything[-1] == "baseline"
    (native,) = configured_variants(tmp_path, "-DFA_VARIANTS=native")
    assert kernel_variants.runs(native)
    better = everything[: everything.index(native)]
    # Intel's processors without tiles have bfloat16, but are faster without it.
    assert not [name for name in better if name != "avx512bf16" and kernel_variants.runs(name)]
    assert configured_variants(tmp_path, "-DFA_VARIANTS=all") == everything


def test_other_words_for_variants_are_refused(tmp_path: Path) -> None:
    result = configured(tmp_path, "-DFA_VARIANTS=avx2")
    assert result.returncode
    assert "FA_VARIANTS is avx2; it has to be all or native" in " ".join(result.stderr.split())


def test_every_installation_says_which_variants_it_has() -> None:
    """The folder of the objects remembers those of make demo, so that pip has to be told each time."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["scikit-build"]
    assert settings["cmake"]["define"] == {"FA_VARIANTS": "all"}


def test_without_a_compiler_the_build_says_what_to_install(tmp_path: Path) -> None:
    result = configured(tmp_path, CXX="/no/such/c++ -m64")
    assert result.returncode
    said = " ".join(result.stderr.split())
    assert "there is no C++ compiler (/no/such/c++). Install GCC or Clang with C++20" in said


def test_the_checkout_works_from_its_root() -> None:
    """Python started in the checkout imports ./fa_compiler, whose sub-packages are links in it."""
    package, library = run(PROBE, ROOT)
    assert Path(package).is_relative_to(ROOT)
    assert Path(library).is_file()


def test_an_installation_is_not_hidden_by_the_checkout(installed: Path) -> None:
    """Started in the checkout with a regular installation: the Python parts of one, the library of either."""
    _, library = run(PROBE, ROOT, installed)
    assert Path(library).is_file()


def test_imports_run_one_way() -> None:
    """Each layer imports what is on its left only: op_registry <- passes <- lowering <- the facade."""
    layers = ("op_registry", "passes", "lowering")
    for number, layer in enumerate(layers):
        code = f"""
import sys
import fa_compiler
before = set(sys.modules)
import fa_compiler.{layer}{".ort" if layer == "lowering" else ""}
new = {{name.split(".")[1] for name in set(sys.modules) - before if name.startswith("fa_compiler.")}}
print(*sorted(new))
"""
        (line,) = run(code, ROOT)
        assert set(line.split()) <= set(layers[: number + 1]), f"{layer} imports {line}"


def test_an_installation_has_the_pages(installed: Path, tmp_path: Path) -> None:
    code = "import sys\nfrom fa_compiler.command_line.main import main\nsys.exit(main(['docs', 'install']))"
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert run(code, tmp_path, installed) == page.rstrip().splitlines()


def test_a_wheel_has_all_variants(installed: Path, tmp_path: Path) -> None:
    """Also where make demo has built before."""
    known = run(VARIANTS, tmp_path, installed)
    assert {*known} >= {*configured_variants(tmp_path), "reference"}


def test_the_command_is_installed(installed: Path, tmp_path: Path) -> None:
    script = installed / "bin" / "fa-compiler"
    code = f"""
import runpy, sys
sys.argv = ["fa-compiler", "--help"]
runpy.run_path({str(script)!r}, run_name="__main__")
"""
    assert "optimize" in "\n".join(run(code, tmp_path, installed))
