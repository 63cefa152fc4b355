"""A process that holds one library's peers, in the interpreter that has the library.

    python -m bench.speed.worker LIBRARY THREADS

It is a server of tools/processes.py, with its `version` and the names of its `peers` as greeting. The questions are

    {"case": fields, "folder": path}             loads a case
    {"forget": true}                             frees the case
    {"prepare": name}                            -> {"error": e, "seconds": [first, second]}, or {"not": reason}
    {"time": name, "calls": n, "warm": m, "flush": bool} -> {"seconds": [...]}
    {"grow": name}                               prepares a peer, and calls it once in an idle process -> {"mib": m}
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from bench.speed import truth
from bench.speed.cases import Case
from bench.speed.peer import NotOffered, Peer, Problem
from tools.processes import serve

Result = TypeVar("Result")

LIBRARIES = {"ort": "onnxruntime", "torch": "torch", "openvino": "openvino"}
"""The library's short name, and the package that an interpreter must have."""

FLUSHED = 192 << 20
"""The bytes that are read to empty the processor's caches: several times the size of a core's caches."""


class Bench:
    """The current case and its prepared peers."""

    def __init__(self, library: str, threads: int) -> None:
        self.threads = threads
        self.module = importlib.import_module(f"bench.speed.{library}_peers")
        self.module.prepare(threads)
        self.peers: dict[str, Peer] = {}
        self.problem: Problem
        self._other = np.ones(0)

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """One question of the protocol."""
        if "forget" in question:
            self.peers.clear()
            del self.problem
            gc.collect()
            return {}
        if "case" in question:
            folder = Path(question["folder"])
            self.problem = Problem(Case(**question["case"]), truth.read(folder), folder, self.threads)
            return {}
        if "time" in question:
            return self.time(question)
        try:
            return self.prepare(question["prepare"]) if "prepare" in question else self.grow(question["grow"])
        except NotOffered as reason:
            return {"not": str(reason)}
        except Exception as failure:  # any exception of the library
            return {"not": f"failed: {' '.join((str(failure) or repr(failure)).split())[-200:]}"}

    def prepare(self, name: str) -> dict[str, Any]:
        """Prepares a peer, calls it twice, and compares its results with the truth."""
        peer = self.module.PEERS[name](self.problem)
        seconds = [self.once(peer)]
        error = truth.error(self.problem.case, self.problem.folder, peer.results())
        if seconds[0] < 1:
            seconds.append(self.once(peer))
        self.peers[name] = peer
        return {"error": error, "seconds": seconds}

    def time(self, question: dict[str, Any]) -> dict[str, Any]:
        """Seconds of each call."""
        peer = self.peers[question["time"]]
        for _ in range(question["warm"]):
            peer.call()
        seconds = []
        for _ in range(question["calls"]):
            if question["flush"]:
                self.flush()
            seconds.append(self.once(peer))
        return {"seconds": seconds}

    def grow(self, name: str) -> dict[str, Any]:
        """The growth of the process in the first call, in MiB."""
        return {"mib": grown(self.module.PEERS[name](self.problem).call)[1]}

    def flush(self) -> None:
        """Empties the processor's caches."""
        if not self._other.size:
            self._other = np.ones(FLUSHED // 8)
        self._other.sum()

    @staticmethod
    def once(peer: Peer) -> float:
        """Seconds of one call."""
        start = time.perf_counter()
        peer.call()
        return time.perf_counter() - start


def grown(call: Callable[[], Result]) -> tuple[Result, float]:
    """The result of a call, and the MiB by which this process grows in the call."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # otherwise freed memory of an earlier call would be used again
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    result = call()
    return result, memory("VmHWM") - before


def memory(entry: str) -> float:
    """A number of /proc/self/status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{entry}:")) / 1024


def main() -> None:
    """Serves until standard input ends."""
    bench = Bench(sys.argv[1], int(sys.argv[2]))
    serve(bench.answer, {"version": bench.module.VERSION, "peers": list(bench.module.PEERS), "pid": os.getpid()})


if __name__ == "__main__":
    main()
