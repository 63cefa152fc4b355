"""Simulates how 8 to 128 threads share the forward part of the benchmark's cases, with the schedule of the kernels.

    python -m bench.threads                  the table: the share of the threads' time that is idle, in percent
    python -m bench.threads --threads 16,96
    python -m bench.threads --plot docs/plots/threads.svg

A machine with few processors cannot show this. The tasks, and who takes which, are those of the kernels: the
program lowering/ort/csrc/check/schedule.cc includes their schedule. Only the time of a task is computed, from its rows
and keys.
All threads are equally fast and begin together. Needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.speed import curves
from bench.speed.cases import CASES, Case

SOURCE = Path(__file__).resolve().parents[1] / "lowering/ort/csrc/check/schedule.cc"
THREADS = (2, 8, 16, 32, 64, 128)
BANDS = {"causal": -1, "window": 0}
"""How the program writes a mask; a window is its number of keys."""
SAME = ("pad", "bias")
"""Masks that do not change who does what."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.threads", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", default=",".join(map(str, THREADS)), metavar="N,N", help="default: %(default)s")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draws it, as SVG")
    given = parser.parse_args(arguments)
    threads = [int(part) for part in given.threads.split(",")]
    cases = [case for case in CASES if case.kind == "forward" and case.dtype == "float32" and case.mask not in SAME]
    numbers = iter(simulate([(case, count) for case in cases for count in threads]))
    idle = {case.name: [next(numbers) for _ in threads] for case in cases}
    print(f"| case | sizes | {' | '.join(map(str, threads))} |")
    print(f"| --- | --- |{' ---: |' * len(threads)}")
    for case in cases:
        print(f"| {case.name} | {case.shape} | {' | '.join(f'{share:.1f}' for share in idle[case.name])} |")
    if given.plot:
        given.plot.write_text(curves.sharing(idle, threads))
    return 0


def simulate(problems: Sequence[tuple[Case, int]]) -> list[float]:
    """The idle share in percent of each case with a number of threads. Raises SystemExit without a compiler."""
    lines = []
    for case, threads in problems:
        band = case.window if case.mask == "window" else BANDS.get(case.mask, 0)
        sizes = (case.batch, case.heads, case.kv_heads, case.rows, case.keys, band, threads)
        lines.append(" ".join(map(str, sizes)))
    with tempfile.TemporaryDirectory() as folder:
        program = _compile(Path(folder))
        done = subprocess.run([str(program)], input="\n".join(lines), capture_output=True, text=True, check=True)
    return [float(line.split()[1]) for line in done.stdout.splitlines()]


def _compile(folder: Path) -> Path:
    """The program, for the instruction set whose vectors are as long as most machines have."""
    wide = ["-DFA_ISA=avx2", "-mavx2", "-mfma", "-mf16c"] if platform.machine() in ("x86_64", "AMD64") else None
    compiler, target = os.environ.get("CXX", "c++"), folder / "simulate_schedule"
    options = ["-std=gnu++20", "-O2", "-Wno-psabi", *(wide or ["-DFA_ISA=baseline"])]
    try:
        done = subprocess.run([compiler, *options, str(SOURCE), "-o", str(target)], capture_output=True, text=True)
    except OSError as error:
        raise SystemExit(f"error: no C++ compiler {compiler}: install one or set CXX ({error.strerror})") from None
    if done.returncode:
        raise SystemExit(f"error: {compiler} could not compile {SOURCE.name}: {done.stderr.strip()[:500]}")
    return target


if __name__ == "__main__":
    sys.exit(main())
