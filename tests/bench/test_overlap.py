"""The emulated network takes the time of the bytes, and a ring hides a part of it."""

from __future__ import annotations

import numpy as np

from bench.overlap import RATIOS, Case, rows
from fa_compiler.op_registry.collectives import METHODS


def test_messages_take_their_time() -> None:
    """0.2 seconds for the bytes of gather. A ring sends as many, and all-to-all more."""
    case = Case(ranks=2, tokens=32, heads=4, key_heads=2)
    assert case.sent == 16 * 2 * 2 * 64 * 4
    for method in METHODS:
        case.seconds(method, np.inf)  # makes the sessions of the kernels
        assert case.seconds(method, case.sent / 0.2) >= 0.2


def test_table() -> None:
    """A row without a network, and one for each ratio."""
    lines = list(rows([2], tokens=32, heads=4, key_heads=2, rounds=1))
    assert len(lines) == 1 + len(RATIOS)
    assert all(line.count("|") == 7 for line in lines)
    assert lines[0].split("|")[2].strip() == "0.0"
    assert all("%" in line for line in lines[1:])
