"""The kernels for tile registers (AMX), which few machines have: compiled to keep the tiles in memory."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parents[2] / "lowering/ort/csrc"
CHECK = ("main", "attention", "forward", "gradient")
KERNELS = ("kernel/attention.cc", "kernel/gradient/gradient.cc", "reference.cc", "reference_gradient.cc")


def test_the_kernels_for_tiles_agree_with_the_reference(tmp_path: Path) -> None:
    """The program of lowering/ort/csrc/check: its listed problems, in bfloat16 with tiles."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    sources = [str(SOURCES / "check" / f"{name}.cc") for name in CHECK] + [str(SOURCES / name) for name in KERNELS]
    names = ["-DFA_ISA=tiles_in_memory", "-DFA_OTHERS=reference", "-DFA_CHECKED=tiles_in_memory", "-DFA_CHECKS_PAIRS"]
    program = tmp_path / "check_tiles"
    options = ["-std=gnu++20", "-O0", "-Wno-psabi", *names]
    subprocess.run([*compiler.split(), *options, *sources, "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "forward bfloat16" in done.stdout
    assert "gradient bfloat16" in done.stdout
