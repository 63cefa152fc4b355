"""Measures attention beside another program that takes one core of the machine.

    python -m bench.load [--threads N] [--cases REGEX] [--peers REGEX] [--peer-python PYTHON] [--rounds 5] [--pinned]
                         [--out build/bench/load.md]

In each round every peer is called for a fifth of a second while the machine does nothing else, and again beside a
program that only computes, with the same priority and on any core. Sessions of ONNX Runtime are measured three times.
Their threads spin while they wait for work, which is the default, or spin for 50 microseconds before they sleep
(session.intra_op.spin_duration_us, which only newer releases know), or sleep (session.intra_op.allow_spinning = 0).

The cases are single operators, and `layers-N`: three layers of BERT-large with N tokens, fused (`ours`) and unfused.
Results are compared with float64 before they are timed, those of the layers with one another.

The times are medians and 90th percentiles of all calls. `slower` is the ratio of the medians. `cores` are those that
the peer's process got beside the program, spinning included. `ratio` is the peer's time beside the program divided by
that of ours. The operating system chooses the cores of threads. With --pinned each thread of an operator has its own,
as in `python -m bench`. OpenVINO pins its threads itself.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from bench.model_tables import TOLERANCE
from bench.real_models import FILLED_ROWS, MODELS, build
from bench.real_sizes import compiled
from bench.speed import rounds, truth
from bench.speed.cases import CASES, Case
from bench.speed.peer import SPIN
from bench.speed.tables import number
from bench.speed.workers import TIMEOUT, Workers, interpreters, processor_seconds
from bench.table import print_table, table_parser
from tools.processes import Server, module

OPERATORS = ("bert", "gpt2", "decode-gqa-b1", "long-causal")
LAYERS = {"layers-16": 16, "layers-128": 128}
"""The numbers of tokens."""
PEERS = "^(ort-unfused|ort-mha|ort-gqa|ov-sdpa|ov-cache|torch-sdpa)$"
SPINS = "spins"
WAITING = {SPINS: None, "spins 50 us": 50, "sleeps": 0}
"""How threads wait: the microseconds for which they spin."""
VISIT = 0.2
"""The seconds of a measurement: many slices of the scheduler."""
WARM = 0.05
"""The seconds of calls before it, in which the scheduler moves threads."""
FLUSH = 0.02
"""About the seconds in which the caches are emptied before a decode step."""


@dataclass
class State:
    """The seconds of the calls of a peer, alone or beside the program, and elapsed and processor time of its visits."""

    seconds: list[float] = field(default_factory=list)
    elapsed: float = 0.0
    busy: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def late(self) -> float:
        """The 90th percentile."""
        return sorted(self.seconds)[math.ceil(0.9 * len(self.seconds)) - 1]

    @property
    def cores(self) -> float:
        return self.busy / self.elapsed


@dataclass
class Visited:
    """A prepared peer: how its threads wait, or "" if it has no choice, the seconds that a call takes about, whether
    the caches are emptied before each call, and its two states."""

    name: str
    waiting: str
    server: Server
    guess: float
    cold: bool = False
    alone: State = field(default_factory=State)
    beside: State = field(default_factory=State)

    def visit(self, state: State) -> None:
        """Call the peer for about `VISIT` seconds. Raises HelperError."""
        each = self.guess + (FLUSH if self.cold else 0.0)
        time.sleep(rounds.PAUSE)
        self.server.ask({"time": self.name, "calls": 0, "warm": round(WARM / each), "flush": False})
        pid = self.server.greeting["pid"]
        start, busy = time.perf_counter(), processor_seconds([pid])
        question = {"time": self.name, "calls": max(1, round(VISIT / each)), "warm": 0, "flush": self.cold}
        state.seconds += self.server.ask(question)["seconds"]
        state.elapsed += time.perf_counter() - start
        state.busy += processor_seconds([pid]) - busy


@contextlib.contextmanager
def one_core_taken() -> Iterator[subprocess.Popen[bytes]]:
    """A program that computes all the time, with the priority of this one."""
    program = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    assert program.stdout is not None
    try:
        program.stdout.readline()  # it computes now
        yield program
    finally:
        program.kill()
        program.wait()
        program.stdout.close()


@contextlib.contextmanager
def operators(case: Case, threads: int, by_waiting: Mapping[str, Workers], peers: str) -> Iterator[list[Visited]]:
    """The peers of a case that are right. A library whose threads have no choice is in the first of the workers."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        rounds.write_case(case, Path(folder))
        for waiting, workers in by_waiting.items():
            servers, absent = workers.take(case, Path(folder), threads)
            wanted = {name: server for name, server in servers.items() if name == "ours" or re.search(peers, name)}
            for name, peer in rounds.prepared(case, wanted, absent).items():
                if peer.error <= truth.TOLERANCE[case.dtype]:
                    own = waiting if name == "ours" or name.startswith("ort-") else ""
                    found.append(Visited(name, own, peer.server, peer.seconds, case.kind == "decode"))
        yield found
        for workers in by_waiting.values():
            workers.forget(threads)


@contextlib.contextmanager
def layers(tokens: int, threads: int, peers: str) -> Iterator[list[Visited]]:
    """The fused and, if a peer, the unfused layers. Raises ValueError if their results differ."""
    bert = MODELS["bert-large"]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path = build(replace(bert.cut(3, tokens), inner=bert.inner), Path(folder), numbers=0)
        compiled(path)
        feeds = path.with_name("feeds")
        feeds.mkdir()
        np.save(feeds / "input_ids.npy", np.random.default_rng(1).integers(0, FILLED_ROWS, (1, tokens)))
        variants = {"ours": path.with_name("fused.onnx"), "ort-unfused": path}
        found, results = [], []
        for waiting, spin in WAITING.items():
            settings = {} if spin is None else {SPIN: spin}
            for peer, model in variants.items():
                if peer == "ours" or re.search(peers, peer):
                    words = ("ort", str(threads), model)
                    command = module(sys.executable, "bench.model_worker", *words, **settings)
                    server = stack.enter_context(Server(command, TIMEOUT))
                    for _ in range(2):  # the second run is as long as later ones
                        answer = server.ask({"feeds": str(feeds), "save": f"{model}.npy"})
                    results.append(np.load(f"{model}.npy"))
                    found.append(Visited(peer, waiting, server, answer["seconds"]))
        if not all(np.abs(result - results[0]).max() <= TOLERANCE * np.abs(results[0]).max() for result in results):
            raise ValueError("the results of the layers differ")
        yield found


def measure(visited: Sequence[Visited], count: int) -> None:
    """Fill the states of the peers in `count` rounds."""
    for _ in range(count):
        for each in visited:
            each.visit(each.alone)
        with one_core_taken():
            for each in visited:
                each.visit(each.beside)


def rows(name: str, threads: int, visited: Sequence[Visited]) -> Iterator[str]:
    """The rows of a case. The ratio is to ours that waits in the same way, or spins if the peer has no choice."""
    ours = {each.waiting: each.beside.median for each in visited if each.name == "ours"}
    for each in visited:
        times = [1e3 * seconds for state in (each.alone, each.beside) for seconds in (state.median, state.late)]
        own = ours.get(each.waiting or SPINS)  # absent if ours is wrong
        ratio = f"{each.beside.median / own:.2f}" if own else "-"
        cells = [name, threads, each.name, each.waiting or "-", *map(number, times)]
        cells += [f"{each.beside.median / each.alone.median:.2f}", f"{each.beside.cores:.2f}", ratio]
        yield f"| {' | '.join(map(str, cells))} |"


HEADER = """| case | threads | peer | waiting | alone ms | 90 % | beside ms | 90 % | slower | cores | ratio |
|---|--:|---|---|--:|--:|--:|--:|--:|--:|--:|"""


def main() -> int:
    """Print the table row by row, and write it to a file."""
    parser = table_parser("load", __doc__, rounds=5, threads=str(len(os.sched_getaffinity(0))))
    parser.add_argument("--peers", default=PEERS, help=f"only these peers, and ours (default: {PEERS})")
    parser.add_argument("--peer-python", action="append", default=[], metavar="PYTHON",
                        help="an interpreter with torch or OpenVINO; may be given several times")  # fmt: skip
    parser.add_argument("--pinned", action="store_true", help="give each thread of an operator a core of its own")
    args = parser.parse_args()
    cases = {case.name: case for case in CASES}
    pythons = interpreters(args.peer_python)

    def lines() -> Iterator[str]:
        for name in (*OPERATORS, *LAYERS):
            for threads in args.threads if re.search(args.cases, name) else ():
                if name in LAYERS:
                    problem = layers(LAYERS[name], threads, args.peers)
                else:
                    problem = operators(cases[name], threads, by_waiting, args.peers)
                with problem as visited:
                    measure(visited, args.rounds)
                yield from rows(name, threads, visited)

    with contextlib.ExitStack() as stack:
        by_waiting = {}
        for waiting, spin in WAITING.items():
            libraries = pythons if waiting == SPINS else {"ort": pythons["ort"]}
            by_waiting[waiting] = stack.enter_context(Workers(libraries, pinned=args.pinned, spin=spin))
        print_table(HEADER, lines(), args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
