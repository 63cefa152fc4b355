"""The package calls nothing that Windows or macOS lacks, but where it has asked for it.

mypy's standard library says of each name on which systems Python has it, and mypy follows what asks for the system or
for the name: `if sys.platform == "win32":`, `if hasattr(os, "copy_file_range"):`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.systems import SOURCES

ROOT = Path(__file__).parent.parent
PACKAGES = ("fa_compiler", "lowering", "op_registry", "passes")
OF_THE_SYSTEM = re.compile(
    r"^\s*(?:from|import) (?:_?winapi|ctypes|errno|fcntl|locale|mmap|msvcrt|multiprocessing|os|platform|pwd|resource"
    r"|select|shutil|signal|socket|stat|subprocess|sys|tempfile|termios|threading|time|winreg)\b",
    re.MULTILINE,
)
"""What names a module whose content depends on the system."""

# Only the files themselves are read, so what they take of other files of ours is unknown ("Array?").
OPTIONS = ("--follow-imports=skip", "--ignore-missing-imports", "--cache-dir=/dev/null", "--config-file=")
MISSING = re.compile(
    r"^(?P<place>[^:]+:\d+): error: (?P<what>Module .*has no attribute .*|\"[^?]+\" has no attribute .*)"
)

pytestmark = [SOURCES, pytest.mark.skipif(find_spec("mypy") is None, reason="mypy is not installed")]


def missing(system: str, *files: Path) -> list[str]:
    """The uses of names that Python lacks on a system."""
    command = [sys.executable, "-m", "mypy", "--platform", system, *OPTIONS, *map(str, files)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert said.returncode in (0, 1), said.stderr
    found = (MISSING.match(line) for line in said.stdout.splitlines())
    return [f"{line['place']}: {line['what']}" for line in found if line is not None]


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_what_a_system_lacks_is_not_called(system: str) -> None:
    sources = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    files = [path for path in sources if OF_THE_SYSTEM.search(path.read_text(encoding="utf-8"))]
    assert len(files) > 40
    assert missing(system, *files) == []


@pytest.mark.parametrize(("system", "lacks"), [("win32", ["pread", "getrusage"]), ("darwin", ["sched_getaffinity"])])
def test_a_call_of_what_a_system_lacks_is_found(system: str, lacks: list[str], tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text(
        "import os\n"
        "import resource\n"
        "os.pread(0, 1, 0)\n"
        "resource.getrusage(0)\n"
        "os.sched_getaffinity(0)\n"
        "if hasattr(os, 'copy_file_range'):\n"
        "    os.copy_file_range(0, 1, 2)\n",
        encoding="utf-8",
    )
    found = " ".join(missing(system, source))
    assert all(f'"{name}"' in found for name in lacks)
    assert "copy_file_range" not in found
