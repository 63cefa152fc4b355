"""Programs in C++ that tests run."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest


def built(target: Path, sources: Sequence[Path], *options: str) -> Path:
    """Compile sources to `target`, a program, or with the option -shared a library. Skips the test where there is no
    compiler."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    subprocess.run([*compiler.split(), *map(str, sources), *options, "-o", str(target)], check=True)
    return target
