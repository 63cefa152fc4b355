"""Counts the instructions and cycles of the kernels' inner loops on ARM cores, by static analysis.

    python -m bench.neon --compiler "aarch64-linux-gnu-g++"
    python -m bench.neon --compiler "python -m ziglang c++ -target aarch64-linux-gnu" --analyser llvm-mca-22

The compiler makes assembly of lowering/ort/csrc/check/loops.cc, which holds the loops of the kernels. llvm-mca computes
how many cycles a core needs for a round of each, from its model of the core, and with all data in the first-level
cache. What only hardware can tell: the caches, the prefetches, and the cores for which LLVM has no model of their own.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "lowering/ort/csrc/check/loops.cc"
OPTIONS = ("-std=gnu++20", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions",
           "-fno-rtti", "-g0", "-DFA_ISA=baseline", "-S")  # fmt: skip
LOOPS = ("scores", "weighted_values", "exponentials")
CORES = {"neoverse-n1": 2, "neoverse-n2": 2, "neoverse-v1": 4, "neoverse-v2": 4, "apple-m1": 4}
"""The cores, and how many vector multiply-adds they start in a cycle. LLVM has no model of Apple's newer cores, and
takes that of an older one, which starts 3."""
ITERATIONS = 400
BRANCH = re.compile(r"(b|b\.?(eq|ne|lt|le|gt|ge|lo|ls|hi|hs|cc|cs|mi|pl|any|none)|cbn?z|tbn?z)\s")


class Unavailable(RuntimeError):
    """A program is missing or fails."""


@dataclass(frozen=True)
class Loop:
    """The instructions of the innermost loop of a function, without its branch back."""

    name: str
    instructions: tuple[str, ...]

    @property
    def multiply_adds(self) -> int:
        """The number of vector multiply-adds."""
        return sum(line.split()[0] in ("fmla", "fmls") for line in self.instructions)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.neon", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--compiler", default="aarch64-linux-gnu-g++", help="for aarch64, with options; %(default)s")
    parser.add_argument("--analyser", default="llvm-mca", help="llvm-mca, 16 or newer; %(default)s")
    args = parser.parse_args(arguments)
    try:
        text = _assembly(shlex.split(args.compiler))
        loops = [busiest_loop(text, name) for name in LOOPS]
        print("| loop | instructions | multiply-adds | " + " | ".join(CORES) + " |")
        print("| --- | ---: | ---: |" + " ---: |" * len(CORES))
        for loop in loops:
            cells = [_cell(loop, core, cycles(loop, core, args.analyser)) for core in CORES]
            print(f"| {loop.name} | {len(loop.instructions)} | {loop.multiply_adds} | {' | '.join(cells)} |")
    except Unavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def busiest_loop(assembly: str, function: str) -> Loop:
    """The loop of a function with the most multiply-adds among those that hold no other loop.

    Raises Unavailable if there is none.
    """
    start = re.search(rf"^\w*{len(function)}{function}\w*:", assembly, re.M)
    if start is None:
        raise Unavailable(f"the compiler's output has no function {function!r}")
    body = re.split(r"^\s*\.size\b", assembly[start.end() :], maxsplit=1, flags=re.M)[0]
    lines = [line.split("//")[0].strip() for line in body.splitlines()]
    labels = {line[:-1]: place for place, line in enumerate(lines) if line.endswith(":")}
    found = []
    for place, line in enumerate(lines):
        target = line.split()[-1].split(",")[-1] if BRANCH.match(line) else ""
        begin = labels.get(target, place)
        inner = [each for each in lines[begin:place] if each and not each.endswith(":") and not each.startswith(".")]
        if begin < place and not any(BRANCH.match(each) for each in inner):
            found.append(Loop(function, tuple(inner)))
    if not found:
        raise Unavailable(f"the function {function!r} has no loop")
    return max(found, key=lambda loop: loop.multiply_adds)


def cycles(loop: Loop, core: str, analyser: str) -> float:
    """The cycles of one round of the loop. Raises Unavailable."""
    command = [analyser, "-mtriple=aarch64-linux-gnu", f"-mcpu={core}", f"-iterations={ITERATIONS}"]
    text = _run(command, "\n".join(loop.instructions))
    found = re.search(r"^Total Cycles:\s+(\d+)", text, re.M)
    if found is None:
        raise Unavailable(f"{analyser} does not say how many cycles {core} needs")
    return int(found[1]) / ITERATIONS


def _assembly(compiler: Sequence[str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "loops.s"
        _run([*compiler, *OPTIONS, str(SOURCE), "-o", str(target)])
        return target.read_text()


def _cell(loop: Loop, core: str, needed: float) -> str:
    rate = loop.multiply_adds / needed
    return f"{needed:.1f} ({100 * rate / CORES[core]:.0f} %)"


def _run(command: Sequence[str], text: str | None = None) -> str:
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True)
    except OSError as error:
        raise Unavailable(f"{command[0]} cannot be run ({error.strerror}); name another one, see --help") from None
    if done.returncode:
        raise Unavailable(f"{command[0]} fails: {done.stderr.strip()[:500]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
