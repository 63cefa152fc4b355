"""The search for a correction of rank one, p (r^T S), at one random point: beside query, key and
value, two more operands with the dimensions of a key are searched.

    correction :=
      1     write, read, +        S = S' + k v^T + p (r^T S')
      2   | write, read, -        the same with -p: GDN-2 writes k (v - S'^T r)^T, where p is -k
    write :=
      6     p | read * gate       the product, element by element, which code of RWKV-7 makes for
                                  each token anew
    read :=
      3     after the decay       r^T S', in the rule `general`
      4   | before the decay      r^T S, in the rule `dplr`: RWKV-7
    not found :=
      5     write and read are both multiples of the key, by a number for each head

Case 4 is no case 3 with r e^-g: where a decay is 0, the former reads what the latter has lost. So
the operator has a rule for each. Both take r as it stands, and are exact for every decay. Without a
decay they are the same, and that is case 3. Case 5 is a delta rule whose beta is missing beside the
value or beside the memory. It is left, and the report names it, because such a file may be wrong.

With the state before a token, its result is a sum of three: what the query reads of the decayed
state, what it reads of the write, and what it reads of the correction. All writes and all
corrections are computed, and each sum of two that is right is looked up: the work grows with the
number of writes plus that of corrections, and not with their product.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from fa_compiler.passes.linear.candidates import Operand
from fa_compiler.passes.linear.field import PRIME, inverse, matmul, reduced, times
from fa_compiler.passes.linear.recurrence import columns, dot


@dataclass(frozen=True)
class Correction:
    """A correction of rank one: what is written and what reads the state. With a gate, their
    product is written."""

    write: Operand
    gate: Operand | None
    read: Operand
    is_subtracted: bool
    reads_before_decay: bool

    @property
    def operands(self) -> tuple[Operand | None, ...]:
        """All of them."""
        return self.write, self.gate, self.read


@dataclass(frozen=True)
class Fit:
    """What makes the result of one token, by the places of the operands."""

    query: int
    key: int
    value: int
    ratio: int
    """The scale modulo the prime."""
    write: int
    """Its place among the keys; behind them, the place of a gate among the reads."""
    read: int
    is_subtracted: bool
    reads_before_decay: bool


@dataclass(frozen=True)
class Token:
    """One token of a few heads: the output [B], and the keys and queries [l,B,D], values [n,B] and
    rows that read the state [r,B,D], of which it may be made; and the state before its decay and
    after it, [B,D] each."""

    goal: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    reads: np.ndarray
    before: np.ndarray
    after: np.ndarray

    def work(self, scales: int) -> int:
        """The numbers that a search with so many scales computes."""
        count, reads = len(self.keys), len(self.reads)
        writes = count * len(self.values)
        return count * (scales * writes + self.goal.size * (writes + 2 * (count + reads) * reads))

    def _is_along_key(self, key: int, write: int, read: int) -> bool:
        """Are both the write and the read multiples of the key?"""
        own = len(self.keys)
        written = (
            self.keys[write] if write < own else times(self.reads[read], self.reads[write - own])
        )
        rows = (written, self.reads[read])
        # 5
        return all(
            (times(row, self.keys[key][:, :1]) == times(row[:, :1], self.keys[key])).all()
            for row in rows
        )

    def fitting(self, scales: Collection[int]) -> Iterator[Fit]:
        """What makes the output one of these scales times what the recurrence gives."""
        ratios = np.array([*scales], np.int64)
        goals = times(inverse(ratios)[:, None], self.goal)
        places = [False, True] if (self.before != self.after).any() else [False]  # 3 and 4
        held = np.stack(
            [dot(self.reads, self.before if is_before else self.after) for is_before in places]
        )
        attended = dot(self.keys[:, None], self.keys)  # [q,l,B], as all that follows for each query
        writes = times(attended[:, :, None], self.values)  # [q,l,n,B]
        weighed = times(self.keys[:, None], self.reads)
        gated = matmul(np.moveaxis(self.reads, 0, 1), np.moveaxis(weighed, 1, 3))  # 6: [q,B,r,r]
        own = np.broadcast_to(attended[:, :, None], (*attended.shape[:2], *self.reads.shape[:2]))
        written = np.concatenate([own, np.moveaxis(gated, 1, 3)], axis=1)
        corrections = times(written[:, None], held[:, None])  # [q,..,l + r,r,B]
        rest = reduced(goals - dot(self.keys, self.after)[:, None])
        for query, scale, write, correction, is_subtracted in _sums(rest, writes, corrections):
            key, value = map(int, np.unravel_index(write, writes.shape[1:-1]))
            place, low, high = map(int, np.unravel_index(correction, corrections.shape[1:-1]))
            if key != query and not self._is_along_key(key, low, high):
                ratio = int(ratios[scale])
                yield Fit(query, key, value, ratio, low, high, is_subtracted, places[place])


def _sums(
    wanted: np.ndarray, writes: np.ndarray, corrections: np.ndarray
) -> Iterator[tuple[int, int, int, int, bool]]:
    """The places of a query, a wanted number [q,n,B], a write [q,...,B] and a correction [q,...,B]
    that is added or subtracted, where the sum of the last two is the first. The first of equal
    corrections is taken."""
    # of heads
    sums, added, held = (
        columns(array).reshape(len(array), -1) for array in (wanted, writes, corrections)
    )
    first = np.arange(len(sums))[:, None] * PRIME  # each query has numbers of its own
    signed = (np.concatenate([held, reduced(-held)], axis=1) + first).reshape(-1)  # 1 and 2
    order = np.argsort(signed, kind="stable")
    ordered = signed[order]
    missing = reduced(sums[:, :, None] - added[:, None]) + first[:, None]
    places = np.minimum(np.searchsorted(ordered, missing), len(ordered) - 1)
    own = held.shape[1]
    for query, one, write in np.argwhere(ordered[places] == missing):
        place = int(order[places[query, one, write]]) - 2 * own * int(query)
        yield int(query), int(one), int(write), place % own, place >= own
