"""Chooses how the ranks compute one attention, by a model of its cost.

There are R ranks, a sequence of S tokens, L = S / R tokens of a rank, and a batch of B. Query and
key have N1 and N2 heads, of sizes D, and those of value have Dv. A number has W bytes. For one
attention a rank sends

    gather        (R - 1) L B N2 (D + Dv) W                     its keys and values to every other
                                                                rank
    ring          (R - 1) L B N2 (D + Dv) W                     as much, to its neighbour, in R - 1
                                                                steps
    all-to-all    (R - 1) L B (n1 (D + Dv) + n2 (D + Dv)) W     to every other rank the n1 query
                                                                heads that are computed there, with
                                                                the n2 key heads that these need,
                                                                and later
                                                                its rows of the n1 = N1 / R heads
                                                                that it computed

and holds more than its own part for a moment: the keys and values of all tokens (gather), those of
two parts (ring), or nothing that grows with the number of ranks (all-to-all). A transfer takes
latency + bytes / bandwidth. A ring sends while it computes, so only what takes longer counts; each
of its steps reads and writes a partial result once more. The cheapest method is taken whose keys
and values need at most MOST_GATHERED bytes.

Keys that are those of caches stay where they are: each rank holds S / R of them, B N2 (D + Dv) W
bytes a key. For each of M new tokens a rank sends

    merge         (R - 1) M B N1 (Dv W + 8)                     its result of the row to every other
                                                                rank, with the maximum and the sum
                                                                of its softmax in float32

It reads its keys and values once, at `memory` bytes per second.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fa_compiler.op_registry.collectives import (
    ALL_TO_ALL,
    GATHER,
    MERGE,
    METHODS,
    RING,
    chunk_numbers,
)
from fa_compiler.passes.answer.option import told

MOST_GATHERED = 256 << 20
"""The most bytes of gathered keys and values of one attention."""


def _figure(default: float, unit: str, what: str) -> float:
    """The field of a figure that users may set."""
    number = re.sub(r"e\+?(-?)0*", r"e\1", f"{default:g}")  # 8e9, not 8e+09
    text = f"the machine for which auto chooses: {what} (default {number})"
    made: float = field(default=default, metadata=told(text, metavar=unit))
    return made


@dataclass(frozen=True)
class Machine:
    """What a rank and the network do. The defaults are for processes of one machine or a fast
    network.

    `latency` are the seconds that a message takes however short it is, and `bandwidth` the bytes
    per second from one rank to another. `arithmetic` are the multiplications and additions per
    second of one rank in an attention, and `memory` the bytes per second that it reads and writes.
    """

    latency: float = _figure(20e-6, "S", "seconds of a short message")
    bandwidth: float = _figure(8e9, "N", "bytes per second from rank to rank")
    arithmetic: float = _figure(2e11, "N", "multiplications and additions per second of a rank")
    memory: float = _figure(1e10, "N", "bytes per second that a rank reads and writes")


@dataclass(frozen=True)
class AttentionSizes:
    """What the choice depends on. `heads`, `key_heads`, `width` (D + Dv) are numbers; `bytes` is
    those of one element. `rows` is the number of new tokens in front of caches, and None for a
    sequence that the ranks divide; `value_width` is Dv."""

    name: str
    heads: int
    key_heads: int
    width: int
    bytes: int
    causal: bool
    refused: Mapping[str, str]
    """The methods that this attention does not allow, and why."""
    value_width: int = 0
    rows: int | None = None


@dataclass(frozen=True)
class Choice:
    """The method of one attention, with the bytes that a rank sends and the seconds of every method
    that is allowed. `held` are the bytes of the rank's part of its caches, None without caches."""

    name: str
    method: str
    causal: bool
    sent: Mapping[str, int]
    seconds: Mapping[str, float]
    refused: Mapping[str, str]
    held: int | None = None


@dataclass(frozen=True)
class Handed:
    """What the ranks hand on for one node: `bytes` for each chunk of the sequence and each sequence
    of the batch."""

    name: str
    bytes: int

    def sent(self, order: str, ranks: int, batch: int) -> int:
        """The bytes that a rank sends: those of its chunks, to every other rank."""
        return (ranks - 1) * len(chunk_numbers(order, ranks, 0)) * batch * self.bytes


def bytes_sent(method: str, sizes: AttentionSizes, ranks: int, length: int, batch: int) -> int:
    """The bytes that a rank sends for one attention, for a length that the ranks divide."""
    if method == MERGE:
        return (
            (ranks - 1)
            * (sizes.rows or 1)
            * batch
            * sizes.heads
            * (sizes.value_width * sizes.bytes + 8)
        )
    tokens = (ranks - 1) * (length // ranks) * batch * sizes.bytes * sizes.width
    if method != ALL_TO_ALL:
        return tokens * sizes.key_heads
    return tokens * (sizes.heads // ranks + max(1, sizes.key_heads // ranks))


def bytes_held(sizes: AttentionSizes, ranks: int, length: int, batch: int) -> int:
    """The bytes of a rank's part of the caches of one attention, which have `length` tokens in all
    ranks together."""
    return -(-length // ranks) * batch * sizes.key_heads * sizes.width * sizes.bytes


def seconds(
    method: str, sizes: AttentionSizes, ranks: int, length: int, batch: int, machine: Machine
) -> float:
    """The time of one attention by the model above, computing included."""
    sent = bytes_sent(method, sizes, ranks, length, batch)
    work = (
        length
        * length
        / ranks
        * batch
        * sizes.heads
        * sizes.width
        / (2 if sizes.causal else 1)
        / machine.arithmetic
    )
    transfer = (ranks - 1) * machine.latency + sent / machine.bandwidth
    if method == MERGE:
        read = bytes_held(sizes, ranks, length, batch) / machine.memory
        return max(work * (sizes.rows or 1) / length, read) + transfer
    if method == GATHER:
        return work + transfer
    if method == ALL_TO_ALL:
        return work + transfer + (ranks - 1) * machine.latency
    partial = length / ranks * batch * sizes.heads * sizes.width * sizes.bytes
    return max(work, transfer) + (ranks - 1) * 3 * partial / machine.memory + machine.latency


def choose(
    sizes: AttentionSizes, wanted: str, ranks: int, length: int, batch: int, machine: Machine
) -> Choice:
    """The method that was wanted, or for "auto" the cheapest one that is allowed."""
    if sizes.rows is not None:
        return _choose_for_caches(sizes, wanted, ranks, length, batch, machine)
    allowed = [method for method in METHODS if method not in sizes.refused]
    sent = {method: bytes_sent(method, sizes, ranks, length, batch) for method in allowed}
    times = {method: seconds(method, sizes, ranks, length, batch, machine) for method in allowed}
    method = wanted
    if wanted == "auto":
        gathered = length * batch * sizes.key_heads * sizes.width * sizes.bytes
        small = [method for method in allowed if method != GATHER or gathered <= MOST_GATHERED]
        method = min(small or allowed, key=times.__getitem__)
    refused = sizes.refused
    if wanted == MERGE:
        refused = {**refused, MERGE: "its keys are not those of caches"}
    return Choice(sizes.name, method, sizes.causal, sent, times, refused)


def _choose_for_caches(
    sizes: AttentionSizes, wanted: str, ranks: int, length: int, batch: int, machine: Machine
) -> Choice:
    method, refused = MERGE, {}
    if wanted not in ("auto", MERGE):
        method, refused = (
            wanted,
            {wanted: "its keys are those of caches, of which each rank has a part"},
        )
    sent = {MERGE: bytes_sent(MERGE, sizes, ranks, length, batch)}
    times = {MERGE: seconds(MERGE, sizes, ranks, length, batch, machine)}
    return Choice(
        sizes.name,
        method,
        sizes.causal,
        sent,
        times,
        refused,
        bytes_held(sizes, ranks, length, batch),
    )


def refused_methods(
    heads: int, key_heads: int, ranks: int, has_sink: bool, empty_rows: str
) -> dict[str, str]:
    """The methods that an attention does not allow, and why."""
    refused: dict[str, str] = {}
    group = heads // max(key_heads, 1)
    if heads % ranks:
        refused[ALL_TO_ALL] = f"{ranks} ranks do not divide its {heads} heads"
    elif (own := heads // ranks) % group and group % own:
        refused[ALL_TO_ALL] = (
            f"the {own} heads of a rank and the {group} heads of a group do not divide each other"
        )
    if has_sink:
        refused[RING] = "its softmax has a sink"
    elif empty_rows == "unmasked":
        refused[RING] = "its rows without a key attend all keys"
    return refused
