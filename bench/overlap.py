"""Measures how much of its messages a ring hides: one causal attention by each method of docs/parallel.md.

    python -m bench.overlap [--ranks 2,4] [--tokens 4096] [--heads 8] [--key-heads 8] [--rounds 7]
        [--out build/bench/overlap.md]

The ranks are threads of this process. Their messages go through memory, and the network is emulated: what a rank sends
at once arrives only when its bytes, divided by the bandwidth, have passed as seconds. The bandwidth is chosen so that
the messages of gather take a part of the time that the attention takes without a network, or a multiple of it. The
methods run in turns, and each figure is the median of the rounds.

`hidden` is the part of the messages of the ring that took no time: 1 - (ring - ring without a network) / messages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np

from bench.table import numbers, print_table, table_parser
from fa_compiler.lowering.ort.eager import taking_turns
from fa_compiler.op_registry.collectives import GATHER, METHODS, RING, ZIGZAG
from fa_compiler.op_registry.geometry import UNLIMITED
from fa_compiler.parallel.communicator import Array, Communicator, Pending, Shape
from fa_compiler.parallel.cores import threads_of_rank
from fa_compiler.parallel.methods import sequence_attention
from fa_compiler.parallel.parts import Parts
from fa_compiler.parallel.threads import run_threads

SIZE = 64
RATIOS = (0.25, 0.5, 1.0, 2.0)
"""The time of the messages of gather, as a part of the time without a network."""


class Network(Communicator):
    """A rank whose messages take the time that their bytes need at a bandwidth."""

    def __init__(self, inner: Communicator, bandwidth: float) -> None:
        super().__init__(inner.rank, inner.size, inner.timeout)
        self._inner, self._bandwidth = inner, bandwidth

    def start(
        self, sends: Sequence[tuple[int, Array]], receives: Sequence[tuple[int, Shape, np.dtype[Any]]]
    ) -> Pending:
        """Start the messages. All ranks send at the same time and as much, so the own bytes tell when others arrive."""
        arrival = time.monotonic() + sum(array.nbytes for _, array in sends) / self._bandwidth
        return _Arriving(self._inner.start(sends, receives), arrival)

    def abort(self, message: str) -> None:
        """Tell the other ranks."""
        self._inner.abort(message)


class _Arriving(Pending):
    def __init__(self, inner: Pending, arrival: float) -> None:
        self._inner, self._arrival = inner, arrival

    def wait(self) -> list[Array]:
        arrays = self._inner.wait()
        time.sleep(max(0.0, self._arrival - time.monotonic()))
        return arrays


class Case:
    """One causal attention of some ranks."""

    def __init__(self, ranks: int, tokens: int, heads: int, key_heads: int) -> None:
        self.parts = Parts(ZIGZAG, ranks, tokens)
        generator = np.random.default_rng(0)
        self._whole = {
            name: generator.standard_normal((1, tokens, count * SIZE)).astype(np.float32)
            for name, count in (("query", heads), ("key", key_heads), ("value", key_heads))
        }
        self._attrs = {
            "head_num": heads,
            "input_layout": "BSH",
            "scale_value": SIZE**-0.5,
            "pre_tockens": UNLIMITED,
            "next_tockens": 0,
            "sparse_mode": 0,
        }
        self.sent = (ranks - 1) * tokens // ranks * key_heads * 2 * SIZE * 4
        """The bytes that a rank sends by gather, and in a ring."""

    def seconds(self, method: str, bandwidth: float) -> float:
        """The time of the slowest rank."""

        def rank(communicator: Communicator) -> float:
            own = {name: self.parts.own(whole, 1, communicator.rank) for name, whole in self._whole.items()}
            network = Network(communicator, bandwidth)
            threads = threads_of_rank(network)
            network.share(b"")  # all ranks begin together
            begin = time.monotonic()
            with taking_turns(threads):
                sequence_attention(network, self.parts, {**self._attrs, "method": method}, own)
            return time.monotonic() - begin

        return max(run_threads(self.parts.ranks, rank))


def medians(case: Case, bandwidth: float, rounds: int) -> dict[str, float]:
    """The seconds of each method, in turns."""
    found: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(rounds):
        for method, times in found.items():
            times.append(case.seconds(method, bandwidth))
    return {method: median(times) for method, times in found.items()}


def rows(counts: Sequence[int], tokens: int, heads: int, key_heads: int, rounds: int) -> Iterator[str]:
    """The rows of the table: for each number of ranks one without a network, and one for each of RATIOS."""
    for ranks in counts:
        case = Case(ranks, tokens, heads, key_heads)
        medians(case, np.inf, 1)  # the first calls make the sessions of the kernels
        alone = medians(case, np.inf, rounds)
        yield _row(ranks, 0.0, alone, "")
        for ratio in RATIOS:
            messages = ratio * alone[GATHER]
            found = medians(case, case.sent / messages, rounds)
            hidden = 1 - (found[RING] - alone[RING]) / messages
            yield _row(ranks, messages, found, f"{hidden:.0%}")


def _row(ranks: int, messages: float, found: dict[str, float], hidden: str) -> str:
    times = " | ".join(f"{found[method] * 1e3:.1f}" for method in METHODS)
    return f"| {ranks} | {messages * 1e3:.1f} | {times} | {hidden} |"


def main() -> None:
    """Print the table."""
    parser = table_parser("overlap", __doc__, 7)
    parser.add_argument("--ranks", type=numbers, default="2,4")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--key-heads", type=int, default=8)
    args = parser.parse_args()
    header = f"| ranks | messages, ms | {' | '.join(f'{method}, ms' for method in METHODS)} | hidden |"
    header += f"\n|{' ---: |' * (len(METHODS) + 3)}"
    print_table(header, rows(args.ranks, args.tokens, args.heads, args.key_heads, args.rounds), args.out)


if __name__ == "__main__":
    main()
