"""Simulates one attention on 8 to 1,024 ranks: which method of docs/parallel.md is the fastest, and what it needs.

    python -m bench.parallel [--latency 5e-6] [--bandwidth 25e9] [--arithmetic 1e14] [--memory 1e12]
        [--ranks 8,32,128,512,1024] [--out build/bench/parallel.md]

No ranks run. The simulation follows each rank step by step: it computes the scores that the causal mask leaves for its
chunks of tokens, and sends and receives the bytes of its method. A message takes the latency, and its bytes divided by
the bandwidth; a rank sends one message at a time. In a ring, a rank begins a step when it has computed the one before
and has what its neighbour sent at the beginning of that one, and joining two partial results reads and writes memory.
The options are seconds, bytes per second and multiplications and additions per second of one rank. The defaults stand
for an accelerator with a network of 200 Gbit/s.

A cell gives the milliseconds of the slowest rank, and the MiB that a rank holds besides its own part. The fastest
method is marked by *. Numbers are bfloat16, the batch is 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bench.table import numbers, print_table, table_parser
from fa_compiler.op_registry.collectives import ALL_TO_ALL, GATHER, METHODS, RING, ZIGZAG, chunks
from fa_compiler.passes.parallel.methods import AttentionSizes, Machine, bytes_sent, refused_methods

LENGTHS = (32_768, 131_072, 1_048_576)
BYTES = 2


@dataclass(frozen=True)
class Heads:
    """The heads of one attention."""

    name: str
    query: int
    key: int
    size: int

    def sizes(self, ranks: int) -> AttentionSizes:
        """The record that the cost model takes."""
        refused = refused_methods(self.query, self.key, ranks, has_sink=False, empty_rows="")
        return AttentionSizes(self.name, self.query, self.key, 2 * self.size, BYTES, True, refused)


CASES = (
    Heads("32 heads of 128", 32, 32, 128),
    Heads("32 heads on 8", 32, 8, 128),
    Heads("64 heads on 1", 64, 1, 128),
)


def visible(order: str, ranks: int, length: int) -> np.ndarray:
    """The scores that a causal mask leaves for the queries of one rank (row) and the keys of another (column)."""
    starts, stops = (
        np.array([[chunk[end] for chunk in chunks(order, ranks, rank, length)] for rank in range(ranks)], np.float64)
        for end in (0, 1)
    )
    total = np.zeros((ranks, ranks))
    for own in range(starts.shape[1]):
        for other in range(starts.shape[1]):
            first, last = starts[:, own, None], stops[:, own, None]
            low, high = starts[None, :, other], stops[None, :, other]
            rows, keys = last - first, high - low
            same = first == low
            total += np.where(same, rows * (rows + 1) / 2, np.where(low < first, rows * keys, 0.0))
    return total


def simulated(method: str, heads: Heads, ranks: int, length: int, machine: Machine) -> tuple[float, float]:
    """The seconds of the slowest rank, and the bytes that a rank holds besides its own part."""
    sizes = heads.sizes(ranks)
    sent = bytes_sent(method, sizes, ranks, length, batch=1)
    transfer = (ranks - 1) * machine.latency + sent / machine.bandwidth
    each = heads.query * sizes.width / machine.arithmetic
    part = length / ranks * heads.key * sizes.width * BYTES
    if method == ALL_TO_ALL:
        work = length * (length + 1) / 2 * each / ranks
        return work + transfer + (ranks - 1) * machine.latency, 0.0
    work = visible(ZIGZAG, ranks, length) * each
    if method == GATHER:
        return transfer + float(work.sum(1).max()), (ranks - 1) * part
    return _ring(work, part, length / ranks * heads.query * sizes.width * BYTES, ranks, machine), 2 * part


def _ring(work: np.ndarray, part: float, result: float, ranks: int, machine: Machine) -> float:
    """The time of a ring, for the seconds of work with each part, and the bytes of a part and of a result."""
    every = np.arange(ranks)
    begin = np.zeros(ranks)
    joining = 3 * result / machine.memory
    for step in range(ranks):
        computed = begin + work[every, (every - step) % ranks] + (joining if step else 0.0)
        arrived = np.roll(begin + machine.latency + part / machine.bandwidth, 1)
        begin = computed if step == ranks - 1 else np.maximum(computed, arrived)
    return float(begin.max())


def rows(machine: Machine, counts: list[int]) -> Iterator[str]:
    """The rows of the table."""
    for heads in CASES:
        for length in LENGTHS:
            for ranks in counts:
                refused = heads.sizes(ranks).refused
                found = {
                    method: simulated(method, heads, ranks, length, machine)
                    for method in METHODS
                    if method not in refused
                }
                best = min(found, key=lambda method: found[method][0])
                cells = [
                    f"{found[each][0] * 1e3:,.2f}{'*' if each == best else ''} ({found[each][1] / 2**20:,.0f})"
                    if each in found
                    else "-"
                    for each in (GATHER, ALL_TO_ALL, RING)
                ]
                yield f"| {heads.name} | {length:,} | {ranks:,} | {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser: argparse.ArgumentParser = table_parser("parallel", __doc__, 1)
    parser.add_argument("--latency", type=float, default=5e-6)
    parser.add_argument("--bandwidth", type=float, default=25e9)
    parser.add_argument("--arithmetic", type=float, default=1e14)
    parser.add_argument("--memory", type=float, default=1e12)
    parser.add_argument("--ranks", type=numbers, default="8,32,128,512,1024")
    args = parser.parse_args()
    machine = Machine(args.latency, args.bandwidth, args.arithmetic, args.memory)
    header = "| attention | tokens | ranks | gather | all-to-all | ring |\n| --- | ---: | ---: | ---: | ---: | ---: |"
    print_table(header, rows(machine, args.ranks), args.out)


if __name__ == "__main__":
    main()
