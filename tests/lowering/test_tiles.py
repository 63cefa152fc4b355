"""The kernels for tile registers (AMX), which few machines have: compiled to keep the tiles in memory."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.cpp_programs import built

SOURCES = Path(__file__).resolve().parents[2] / "lowering/ort/csrc"
CHECK = ("main.cc", "attention.cc", "forward.cc", "gradient.cc")
KERNELS = ("kernel/attention.cc", "kernel/gradient/gradient.cc", "reference.cc", "reference_gradient.cc")
NAMES = ("-DFA_ISA=tiles_in_memory", "-DFA_OTHERS=reference", "-DFA_CHECKED=tiles_in_memory", "-DFA_CHECKS_PAIRS")


def test_the_kernels_for_tiles_agree_with_the_reference(tmp_path: Path) -> None:
    """The program of lowering/ort/csrc/check: its listed problems, in bfloat16 with tiles."""
    sources = [*(SOURCES / "check" / name for name in CHECK), *(SOURCES / name for name in KERNELS)]
    program = built(tmp_path / "check_tiles", sources, "-std=gnu++20", "-Og", "-Wno-psabi", *NAMES)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "forward bfloat16" in done.stdout
    assert "gradient bfloat16" in done.stdout
