"""The workers of a run: one for each library and number of threads, in the interpreter that has the library."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.speed.cases import Case
from bench.speed.peer import FREE, SPIN
from bench.speed.worker import LIBRARIES
from tools.processes import HelperError, Server, module

HELD = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "DNNL_MAX_CPU_ISA": "AVX2"},
}
"""The settings that hold torch and OpenVINO to an instruction set. ONNX Runtime's own kernels have none."""

TIMEOUT = 900.0
"""The seconds for one answer. The slowest answers are first calls that compile."""

_FIND = "import importlib.util as u, sys; print(*(n for n in sys.argv[1:] if u.find_spec(n)))"


def interpreters(pythons: Sequence[str]) -> dict[str, str]:
    """For each library, the first interpreter with its package and NumPy; the current one comes before all others.

    Raises OSError or subprocess.CalledProcessError for a command that is not a Python interpreter.
    """
    found: dict[str, str] = {"ort": sys.executable}
    for python in (sys.executable, *pythons):
        command = [python, "-c", _FIND, "numpy", *LIBRARIES.values()]
        have = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        for library, package in LIBRARIES.items():
            if package in have and "numpy" in have:
                found.setdefault(library, python)
    return found


class Workers:
    """The workers. Each is started when it is first needed; all end together.

    `pinned`: whether each thread has a core of its own, as prepare of ort_peers.py says. `spin`: the microseconds for
    which the threads of ONNX Runtime spin when they wait for work; None is its default.
    """

    def __init__(
        self, pythons: Mapping[str, str], isa: str | None = None, pinned: bool = True, spin: int | None = None
    ) -> None:
        self.pythons = pythons
        self.isa = isa
        self.pinned = pinned
        self.spin = spin
        self.versions: dict[str, str] = {}
        self._servers: dict[tuple[str, int], Server] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers.values():
            server.__exit__(kind, value, trace)

    def get(self, library: str, threads: int) -> Server:
        """The worker. Raises HelperError if it cannot start."""
        key = (library, threads)
        if key not in self._servers:
            self._servers[key] = self.new(library, threads)
            self.versions[library] = self._servers[key].start()["version"]
        return self._servers[key]

    def new(self, library: str, threads: int) -> Server:
        """A worker that is not kept. Use it in a `with` block."""
        settings = {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
        if self.pinned:
            settings |= {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}  # for the reason see prepare of ort_peers.py
        else:
            settings[FREE] = 1
        if self.spin is not None:
            settings[SPIN] = self.spin
        if self.isa:
            settings |= {"FA_COMPILER_ISA": self.isa, **HELD.get(self.isa, {})}
        command = module(self.pythons[library], "bench.speed.worker", library, str(threads), **settings)
        return Server(command, TIMEOUT)

    def take(self, case: Case, folder: Path, threads: int) -> tuple[dict[str, Server], dict[str, str]]:
        """Sends the case to every worker; returns the worker of each peer, and the reasons for absent libraries."""
        peers: dict[str, Server] = {}
        absent: dict[str, str] = {}
        for library in self.pythons:
            try:
                server = self.get(library, threads)
                server.ask({"case": asdict(case), "folder": str(folder)})
                peers |= dict.fromkeys(server.greeting["peers"], server)
            except HelperError as error:
                absent[library] = str(error)
        return peers, absent

    def forget(self, threads: int) -> None:
        """Frees the case and its memory in all workers."""
        for library in self.pythons:
            if (library, threads) in self._servers:
                with contextlib.suppress(HelperError):
                    self._servers[library, threads].ask({"forget": True})


def processor_seconds(pids: Sequence[int]) -> float:
    """The processor time of the processes in seconds."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
