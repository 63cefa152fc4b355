"""The simulation of many ranks counts what the ranks compute and send."""

from __future__ import annotations

import numpy as np
import pytest

from bench.parallel import Heads, rows, simulated, visible
from fa_compiler.op_registry.collectives import METHODS, ORDERS, chunks
from fa_compiler.passes.parallel.methods import Machine

HEADS = Heads("", 8, 2, 64)


@pytest.mark.parametrize("order", ORDERS)
def test_visible_scores(order: str) -> None:
    """Pair by pair, as a causal mask of the whole sequence leaves them."""
    length, ranks = 21, 3
    places = [
        np.concatenate([np.arange(*chunk) for chunk in chunks(order, ranks, rank, length)]) for rank in range(ranks)
    ]
    expected = [[int((keys[None] <= queries[:, None]).sum()) for keys in places] for queries in places]
    assert visible(order, ranks, length).tolist() == expected


def test_free_network_and_free_arithmetic() -> None:
    """Without the time of messages all methods take that of the products; without products, that of the messages."""
    length, ranks = 16_384, 8
    free = Machine(latency=0, bandwidth=np.inf, arithmetic=1e12, memory=np.inf)
    products = length * length / 2 / ranks * 8 * 128 / 1e12
    for method in METHODS:
        assert simulated(method, HEADS, ranks, length, free)[0] == pytest.approx(products, rel=0.02)
    quick = Machine(latency=1e-6, bandwidth=1e9, arithmetic=np.inf, memory=np.inf)
    part = length / ranks * 2 * 128 * 2
    assert simulated("gather", HEADS, ranks, length, quick)[0] == pytest.approx(7 * (1e-6 + part / 1e9))
    assert simulated("ring", HEADS, ranks, length, quick)[0] == pytest.approx(7 * (1e-6 + part / 1e9))


def test_table() -> None:
    """One row for each case, and one method marked in each; all-to-all ends at the number of heads."""
    lines = list(rows(Machine(5e-6, 25e9, 1e14, 1e12), [8, 256]))
    assert len(lines) == 18
    assert all(line.count("*") == 1 for line in lines)
    assert [line for line in lines if "| - |" in line] == lines[1::2]
