"""`python -m bench.load`, with servers that answer made-up times."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from bench import load
from bench.speed import rounds
from bench.speed.cases import Case
from tests.systems import TOOLS

CASE = Case("small", "forward", 1, 2, 2, 8, 8, 8)


class Server:
    """A worker whose calls take 10 ms the first time that a peer is visited, and 30 ms after that."""

    def __init__(self, *peers: str, wrong: str = "") -> None:
        self.greeting: dict[str, Any] = {"pid": os.getpid(), "peers": peers}
        self.wrong = wrong
        self.asked: list[dict[str, Any]] = []

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(question)
        if "prepare" in question:
            return {"error": 1.0 if question["prepare"] == self.wrong else 0.0, "seconds": [0.02, 0.01]}
        visits = [each for each in self.asked if each.get("time") == question["time"] and each["calls"] > 0]
        return {"seconds": [0.01 if len(visits) == 1 else 0.03] * question["calls"]}


class Workers:
    """The workers of some peers."""

    def __init__(self, server: Server) -> None:
        self.server, self.forgotten = server, 0

    def take(self, case: Case, folder: Path, threads: int) -> tuple[dict[str, Server], dict[str, str]]:
        assert (folder / "q.npy").is_file()
        return dict.fromkeys(self.server.greeting["peers"], self.server), {}

    def forget(self, threads: int) -> None:
        self.forgotten += 1


@TOOLS
def test_peers_alone_and_beside_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers of ONNX Runtime twice, others once; neither those that are wrong nor those that nobody chose."""
    monkeypatch.setattr(rounds, "PAUSE", 0.0)
    spinning = Workers(Server("ours", "ort-mha", "ov-sdpa", "torch-sdpa", "torch-flex", wrong="torch-sdpa"))
    sleeping = Workers(Server("ours", "ort-mha"))
    by_waiting: Any = {"spins": spinning, "sleeps": sleeping}
    with load.operators(CASE, 2, by_waiting, load.PEERS) as visited:
        load.measure(visited, 1)
    assert spinning.forgotten == sleeping.forgotten == 1
    timed = [question for question in spinning.server.asked if question.get("calls")]
    assert all(question["calls"] == load.VISIT / 0.01 and not question["flush"] for question in timed)
    lines = list(load.rows("small", 2, visited))
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert all(len(row) == load.HEADER.splitlines()[0].count("|") - 1 for row in cells)
    assert [row[:4] for row in cells] == [
        ["small", "2", "ours", "spins"],
        ["small", "2", "ort-mha", "spins"],
        ["small", "2", "ov-sdpa", "-"],
        ["small", "2", "ours", "sleeps"],
        ["small", "2", "ort-mha", "sleeps"],
    ]
    assert all(row[4:9] == ["10", "10", "30", "30", "3.00"] and row[10] == "1.00" for row in cells)


def test_median_and_90th_percentile() -> None:
    state = load.State([n / 1000 for n in range(10, 0, -1)], elapsed=2.0, busy=3.0)
    assert (state.median, state.late, state.cores) == (0.0055, 0.009, 1.5)
    assert load.State([0.5]).late == 0.5


@TOOLS
def test_the_caches_are_emptied_before_a_decode_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "PAUSE", 0.0)
    server: Any = Server()
    load.Visited("ours", load.SPINS, server, 0.02, cold=True).visit(load.State())
    assert [(question["calls"], question["warm"], question["flush"]) for question in server.asked] == [
        (0, round(load.WARM / (0.02 + load.FLUSH)), False),
        (round(load.VISIT / (0.02 + load.FLUSH)), 0, True),
    ]


def test_the_program_computes_until_it_is_ended() -> None:
    with load.one_core_taken() as program:
        assert program.poll() is None
    assert program.returncode is not None
