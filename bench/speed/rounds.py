"""The measurement of one case: in every round, every peer and the machine's limits are measured once.

A measurement of a peer begins with a pause, in which the threads of the peer before stop waiting for work. Calls
without timing follow, until the processor's clock is up again. Then up to 5 calls are timed, for about 20 ms; for a
decode step, the processor's caches are emptied before each call. A peer that is much slower than the fastest one gets
fewer rounds. If the rounds take long, all of them end early.

The time of a peer is the median of its calls. The limit for products and exponentials is computed with the best rates
in the same rounds. The limit of a decode step is the median time of plain reads of the cache in the same rounds.
"""

from __future__ import annotations

import math
import os
import re
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from bench.speed import graphs, truth
from bench.speed.cases import Case
from bench.speed.limits import Machine, Rates, needed, parts
from bench.speed.peer import lower_precision
from bench.speed.worker import FLUSHED
from bench.speed.workers import Workers, processor_seconds
from tools.processes import HelperError, Server

PROBES = 3
PAUSE = 0.03
WARM = 0.03
"""The seconds of calls without timing. After a single such call of 11 ms, the next calls still took 12 % longer."""

SLOW = 0.25
"""A peer is measured in two rounds only if a call takes more than this many seconds, and more than three times as long
as the fastest peer. It is measured in one round if a call even takes four times this many seconds."""

HOPELESS = 5.0
"""A slow peer that takes this many times as long as the fastest one is not measured again with fewer threads."""

MOST_SCORES = 4 << 30
"""A tensor of all scores has at most this many bytes; peers that would make a larger one are left out."""

LONGEST = 4.0
"""After this many seconds no further round begins, except the second one."""


@dataclass
class Contestant:
    """A peer that returned a result, right or wrong."""

    server: Server
    error: float
    seconds: float
    times: list[float] = field(default_factory=list)

    def visits(self, fastest: float, rounds: int) -> int:
        """The number of rounds in which the peer takes part."""
        if self.seconds > max(4 * SLOW, 3 * fastest):
            return 1
        return min(2, rounds) if self.seconds > max(SLOW, 3 * fastest) else rounds


def write_case(case: Case, folder: Path) -> None:
    """Write the files that the workers read."""
    truth.write(case, folder)
    write_unfused(case, folder)


def write_unfused(case: Case, folder: Path) -> None:
    """Write the exporter's spelling, unless nobody can run it."""
    if case.score_bytes <= MOST_SCORES:
        onnx.save(graphs.unfused(case), str(folder / "unfused.onnx"))


def hopeless(result: Mapping[str, Any]) -> dict[str, str]:
    """The peers of a result that are too slow by `HOPELESS`, with the reason."""
    medians = {name: peer["median_ms"] for name, peer in result["peers"].items()}
    least = max(1e3 * SLOW, HOPELESS * min(medians.values(), default=0.0))
    reason = f"too slow with {result['threads']} threads"
    return {name: reason for name, median in medians.items() if median > least and name != "ours"}


def measure(
    case: Case,
    folder: Path,
    threads: int,
    rounds: int,
    workers: Workers,
    machine: Machine,
    chosen: re.Pattern[str],
    out: Mapping[str, str],
) -> dict[str, Any]:
    """One row of the results for the JSON file. Our operators and the peers whose names match the pattern take part,
    except those in `out`, which maps them to the reason."""
    servers, absent = workers.take(case, folder, threads)
    absent |= out
    wanted = {name: server for name, server in servers.items() if name not in out}
    wanted = {name: server for name, server in wanted.items() if name == "ours" or chosen.search(name)}
    contestants = prepared(case, wanted, absent)
    load = _Load([os.getpid(), *{server.greeting["pid"] for server in servers.values()}])
    course = Course(case, folder, Rates(machine, threads))
    course.run(contestants, rounds, absent)
    busy = load.others()
    workers.forget(threads)
    limit = course.limit()
    return {
        "case": asdict(case),
        "threads": threads,
        "rounds": course.done,
        "limit_ms": 1e3 * sum(limit.values()),
        "limit_parts_ms": {name: 1e3 * seconds for name, seconds in limit.items()},
        "rates": dict(course.rates.best),
        "aim": case.aim,
        "others_cores": busy,
        "peers": {name: _summary(peer, name, truth.TOLERANCE[case.dtype]) for name, peer in contestants.items()},
        "absent": absent,
    }


def prepared(case: Case, servers: Mapping[str, Server], absent: dict[str, str]) -> dict[str, Contestant]:
    """The peers that return a result. `absent` gets the reasons for the others."""
    contestants = {}
    for name, server in servers.items():
        answer: dict[str, Any] = {"not": too_large(name, case)}
        if not answer["not"]:
            answer = _asked(server, {"prepare": name})
        if "not" in answer:
            absent[name] = answer["not"]
        else:
            contestants[name] = Contestant(server, answer["error"], min(answer["seconds"]))
    return contestants


@dataclass
class Course:
    """The rounds of one case, and the machine's rates and read times in these rounds."""

    case: Case
    folder: Path
    rates: Rates
    reads: list[float] = field(default_factory=list)
    done: int = 0

    def run(self, contestants: dict[str, Contestant], rounds: int, absent: dict[str, str]) -> None:
        """Run the rounds and add the times to the contestants. One that fails goes to `absent`."""
        cache = [np.load(self.folder / f"{name}.npy") for name in "kv"] if self.case.kind == "decode" else []
        other = np.ones(FLUSHED // 8 if cache else 0)
        fastest = min((each.seconds for each in contestants.values()), default=0.0)
        start = time.perf_counter()
        while self.done < rounds and (self.done < 2 or time.perf_counter() - start < LONGEST):
            for _ in range(PROBES):
                self.rates.probe(needed(self.case))
                if cache:
                    other.sum()
                    self.reads.append(self.rates.machine.read(cache[0], cache[1], self.rates.threads))
            for name, peer in list(contestants.items()):
                if self.done >= peer.visits(fastest, rounds):
                    continue
                answer = _visited(name, peer, cold=bool(cache))
                if "not" in answer:
                    absent[name] = answer["not"]
                    del contestants[name]
                else:
                    peer.times += answer["seconds"]
            self.done += 1

    def limit(self) -> dict[str, float]:
        """The limit in seconds, by part."""
        return {"read": statistics.median(self.reads)} if self.reads else parts(self.case, self.rates.best)


def _asked(server: Server, question: dict[str, Any]) -> dict[str, Any]:
    try:
        return server.ask(question)
    except HelperError as error:
        return {"not": f"failed: {error}"}


def _visited(name: str, peer: Contestant, cold: bool) -> dict[str, Any]:
    time.sleep(PAUSE)
    calls = max(1, min(3 if cold else 5, int(0.02 / max(peer.seconds, 1e-6))))
    warm = min(20, math.ceil(WARM / max(peer.seconds, 1e-6))) if peer.seconds < SLOW else 0
    return _asked(peer.server, {"time": name, "calls": calls, "warm": warm, "flush": cold})


def _summary(peer: Contestant, name: str, allowed: float) -> dict[str, Any]:
    """The row of a peer. A NaN error becomes null, because JSON has no NaN."""
    if lower_precision(name):
        allowed = truth.TOLERANCE["bfloat16"]
    times = sorted(1e3 * seconds for seconds in peer.times)
    return {
        "median_ms": statistics.median(times),
        "min_ms": times[0],
        "p90_ms": times[int(0.9 * (len(times) - 1))],
        "calls": len(times),
        "error": peer.error if peer.error == peer.error else None,
        "right": peer.error <= allowed,
    }


def too_large(name: str, case: Case) -> str:
    """Why a peer that makes a tensor of all scores does not fit into memory beside the other peers; "" if it does."""
    need = 2.2 * case.score_bytes + (1 << 30)
    if case.score_bytes < 1 << 30 or name in ("ours", "torch-sdpa", "torch-flex"):
        return ""
    if case.score_bytes > MOST_SCORES:
        return f"its scores would take {case.score_bytes >> 30} GiB"
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) << 10
    return "" if free > need else f"not enough memory: {free >> 30} GiB are free, it takes {int(need) >> 30}"


class _Load:
    """Measures how many cores other processes use."""

    def __init__(self, own: list[int]) -> None:
        self.own = own
        self.start = (time.perf_counter(), self._busy(), processor_seconds(own))

    def others(self) -> float | None:
        """The average number of cores that others, including other guests of the host, used; None if unknown."""
        wall, busy, own = self.start
        took = max(time.perf_counter() - wall, 1e-3)
        try:
            used = processor_seconds(self.own) - own
        except OSError:  # a worker has ended
            return None
        return round(max(0.0, (self._busy() - busy - used) / took), 2)

    @staticmethod
    def _busy() -> float:
        user, nice, system, _, _, irq, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
        return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
