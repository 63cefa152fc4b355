"""The limits of this machine, measured by limits.cc. The machine's compiler compiles that file for each run."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from bench.speed.cases import Case
from bench.speed.truth import Array

SOURCE = Path(__file__).with_name("limits.cc")
OPTIONS = {"avx2": ("-mavx2", "-mfma", "-mf16c")}
"""The compiler's options for an instruction set to which the run is held."""
PROBE = 0.004
"""The seconds of one measurement of a rate: much longer than the start of threads, much shorter than a round."""


class NoCompiler(RuntimeError):
    """limits.cc could not be compiled."""


@dataclass
class Machine:
    """The compiled functions."""

    library: ctypes.CDLL

    @classmethod
    def compile(cls, folder: Path, isa: str | None = None) -> Machine:
        """Compiles into the folder with $CXX, or c++: for this processor, or for an instruction set of `OPTIONS`.

        Raises NoCompiler.
        """
        compiler, target = os.environ.get("CXX", "c++"), folder / "limits.so"
        options = OPTIONS.get(isa or "", ("-march=native",))
        command = [compiler, "-std=c++20", "-O3", *options, "-shared", "-fPIC", "-pthread"]
        try:
            done = subprocess.run([*command, str(SOURCE), "-o", str(target)], capture_output=True, text=True)
        except OSError as error:
            raise NoCompiler(f"no C++ compiler {compiler}: install one or set CXX ({error.strerror})") from None
        if done.returncode:
            raise NoCompiler(f"{compiler} could not compile {SOURCE.name}: {done.stderr.strip()[:500]}")
        library = ctypes.CDLL(str(target))
        for name in ("fma_flops", "bf16_flops", "exp_rate", "read_seconds"):
            getattr(library, name).restype = ctypes.c_double
        return cls(library)

    def rate(self, name: str, threads: int) -> float:
        """The rate per second: fma_flops and bf16_flops (0 without such products), or exp_rate."""
        return float(getattr(self.library, name)(threads, ctypes.c_double(PROBE)))

    def read(self, first: Array, second: Array, threads: int) -> float:
        """The seconds in which the threads read two arrays of the same size once."""
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (first, second)]
        return float(self.library.read_seconds(*pointers, ctypes.c_size_t(first.nbytes), threads))


@dataclass
class Rates:
    """The best rates in the rounds of one case."""

    machine: Machine
    threads: int
    best: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def probe(self, names: tuple[str, ...]) -> None:
        """Measures each of these rates once more."""
        for name in names:
            self.best[name] = max(self.best[name], self.machine.rate(name, self.threads))


def needed(case: Case) -> tuple[str, ...]:
    """The rates that determine the limit of a case; none for a decode step, whose limit is a read of the cache."""
    if case.kind == "decode":
        return ()
    return ("fma_flops", "exp_rate", *(("bf16_flops",) if case.dtype == "bfloat16" else ()))


def parts(case: Case, rates: dict[str, float]) -> dict[str, float]:
    """The seconds of each part of the limit. The limit is their sum, because exponentials and products use the same
    pipes.

    The products of float16 count as float32. So do those of bfloat16 on a processor without bfloat16 products.
    """
    products = max(rates["fma_flops"], rates.get("bf16_flops", 0) if case.dtype == "bfloat16" else 0)
    return {"products": case.flops / products, "exponentials": case.exponentials / rates["exp_rate"]}
