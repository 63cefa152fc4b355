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
"""The compiler's options for an instruction set to which the run is held. Other names hold our kernels alone, so the
limits are those of the processor."""
WITHOUT_TILES = "-U__AMX_BF16__"
"""The option for an assembler that is older than the compiler and does not know tile registers."""
PRODUCTS = {
    "float32": ("fma_flops",),
    "float16": ("fma_flops",),
    "bfloat16": ("fma_flops", "bf16_flops", "tile_flops"),
}
"""The rates of products by the type of the tensors. The greatest one counts: a processor without products of bfloat16
multiplies them as float32, and all processors do so with float16."""
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
        target = folder / "limits.so"
        options = OPTIONS.get(isa or "", ("-march=native",))
        try:
            _compile(target, *options)
        except NoCompiler as failure:
            try:
                _compile(target, *options, WITHOUT_TILES)
            except NoCompiler:
                raise failure from None
        library = ctypes.CDLL(str(target))
        for name in ("fma_flops", "bf16_flops", "tile_flops", "exp_rate", "read_seconds"):
            getattr(library, name).restype = ctypes.c_double
        return cls(library)

    def rate(self, name: str, threads: int) -> float:
        """The rate per second: fma_flops, bf16_flops or tile_flops (0 without such products), or exp_rate."""
        return float(getattr(self.library, name)(threads, ctypes.c_double(PROBE)))

    def read(self, first: Array, second: Array, threads: int) -> float:
        """The seconds in which the threads read two arrays of the same size once."""
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (first, second)]
        return float(self.library.read_seconds(*pointers, ctypes.c_size_t(first.nbytes), threads))


def _compile(target: Path, *options: str) -> None:
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, "-std=c++20", "-O3", *options, "-shared", "-fPIC", "-pthread", str(SOURCE), "-o", str(target)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise NoCompiler(f"no C++ compiler {compiler}: install one or set CXX ({error.strerror})") from None
    if done.returncode:
        raise NoCompiler(f"{compiler} could not compile {SOURCE.name}: {done.stderr.strip()[:500]}")


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
    return (*PRODUCTS[case.dtype], "exp_rate")


def parts(case: Case, rates: dict[str, float]) -> dict[str, float]:
    """The seconds of each part of the limit, which is their sum: exponentials and products use the same pipes.

    Tiles are multiplied by a unit of their own, while the pipes compute exponentials. Where this is the fastest way,
    only the part that takes longer counts.
    """
    best = max(PRODUCTS[case.dtype], key=lambda name: rates.get(name, 0.0))
    seconds = {"products": case.flops / rates[best], "exponentials": case.exponentials / rates["exp_rate"]}
    if best != "tile_flops":
        return seconds
    longer = max(seconds, key=seconds.__getitem__)
    return {longer: seconds[longer]}
