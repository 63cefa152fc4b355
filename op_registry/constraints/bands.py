"""The checks of the band of pre_tockens and next_tockens, which the training operators have.

The CPU kernel takes every band: rows that it leaves without keys are defined there
(EXT-BAND-OUTSIDE).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fa_compiler.op_registry.constraints.core import CheckedNode
from fa_compiler.op_registry.diagnostic import Diagnostic

Faults = Iterator[tuple[str, str]]
"""Attributes or inputs with the sentence that says what is wrong."""


def band(call: CheckedNode) -> Iterator[Diagnostic]:
    """Outside TND, in sparse_mode 0 and 4, the band of pre_tockens and next_tockens overlaps the
    scores. The CPU kernel also takes a band that misses them: its query rows then have no keys."""
    outside = call.extension("EXT-BAND-OUTSIDE")
    for tensor, message in _band_faults(call):
        yield Diagnostic(tensor, message, extension=outside)


def _band_faults(call: CheckedNode) -> Faults:
    g, mode = call.geometry, call.attr("sparse_mode")
    if (
        call["atten_mask"] is None
        or mode not in (0, 4)
        or not isinstance(g.s1, int)
        or not isinstance(g.s2, int)
    ):
        return
    pre, nxt = call.attr("pre_tockens"), call.attr("next_tockens")
    shift = g.s2 - g.s1 if mode == 4 else 0
    # The scores that the band allows have -left <= j - i <= right.
    left, right = pre - shift, nxt + shift
    where = f"pre_tockens {pre} and next_tockens {nxt} in sparse_mode {mode}"
    if left < 0 and right < 0:
        yield "pre_tockens", f"{where} both lie outside, expected a band that meets the scores"
    elif left < 0 and (right < -left or -left >= g.s2):
        yield (
            "pre_tockens",
            f"{where} leave an empty band, expected {-left} or more to the right of it",
        )
    elif right < 0 and (left < -right or -right >= g.s1):
        yield (
            "next_tockens",
            f"{where} leave an empty band, expected {-right} or more to the left of it",
        )


class _Sequence(NamedTuple):
    """A packed sequence: its place in the batch, its queries and its keys."""

    place: int
    queries: int
    keys: int


@dataclass(frozen=True)
class _PackedBand:
    """The band of a mask over packed sequences. `sequences` are those that have queries, at least
    one; `most_keys` is the largest number of keys of all sequences."""

    mode: int
    pre: int
    nxt: int
    sequences: tuple[_Sequence, ...]
    most_keys: int

    @property
    def unbounded(self) -> bool:
        """Whether the band reaches beyond every length, to the left and, unless it is causal, to
        the right."""
        most_queries = max(sequence.queries for sequence in self.sequences)
        return self.pre >= most_queries and (self.nxt == 0 or self.nxt >= self.most_keys)


def packed_band(call: CheckedNode) -> Iterator[Diagnostic]:
    """The limits that the sparse modes of TND put on the sequence lengths and on pre_tockens and
    next_tockens. The CPU kernel has none of these limits."""
    outside = call.extension("EXT-BAND-OUTSIDE")
    lengths = call.geometry.sequences
    sequences = tuple(_Sequence(n, *length) for n, length in enumerate(lengths) if length.queries)
    if call["atten_mask"] is None or not sequences:
        return
    mode, pre, nxt = (call.attr(name) for name in ("sparse_mode", "pre_tockens", "next_tockens"))
    packed = _PackedBand(mode, pre, nxt, sequences, max(length.keys for length in lengths))
    for check in PACKED_BANDS.get(mode, ()):
        for tensor, message in check(packed):
            yield Diagnostic(tensor, message, extension=outside)


def _stated_band(packed: _PackedBand) -> Faults:
    """next_tockens >= 0, and k + pre_tockens >= q unless the band is unbounded."""
    if packed.nxt < 0:
        yield (
            "next_tockens",
            f"next_tockens is {packed.nxt}, expected 0 or more in sparse_mode 0 of TND",
        )
        return
    if packed.unbounded:
        return
    for place, queries, keys in packed.sequences:
        if keys + packed.pre < queries:
            message = f"pre_tockens {packed.pre} leaves rows of sequence {place} without keys, expected a longer band"
            yield "pre_tockens", message
            return


def _no_surplus_queries(packed: _PackedBand) -> Faults:
    """q <= k."""
    for place, queries, keys in packed.sequences:
        if queries > keys:
            message = f"actual_seq_qlen gives sequence {place} {queries} queries for {keys} keys"
            yield (
                "actual_seq_qlen",
                f"{message}, expected at least as many keys in sparse_mode {packed.mode}",
            )
            return


def _right_aligned_band(packed: _PackedBand) -> Faults:
    """pre_tockens >= 0, pre_tockens + next_tockens >= 0, and next_tockens >= q - k."""
    pre, nxt = packed.pre, packed.nxt
    if pre < 0 or (nxt < 0 and pre + nxt < 0):
        message = f"pre_tockens is {pre} and next_tockens {nxt}, expected pre_tockens and their sum to be >= 0"
        yield "pre_tockens", message
        return
    for place, queries, keys in packed.sequences:
        if queries - nxt > keys:
            yield "next_tockens", f"next_tockens {nxt} leaves rows of sequence {place} without keys"
            return


def _band_of_last(packed: _PackedBand) -> Faults:
    """The last sequence: pre_tockens >= k and q - k <= next_tockens <= 0."""
    place, queries, keys = packed.sequences[-1]
    yield from _all_keys_before(packed, packed.sequences[-1])
    if packed.nxt > 0 or queries - packed.nxt > keys:
        wanted = f"0 or less and at least {queries - keys} for sequence {place}"
        yield "next_tockens", f"next_tockens is {packed.nxt}, expected {wanted}"


def _band_of_first(packed: _PackedBand) -> Faults:
    """The first sequence: pre_tockens >= k and next_tockens >= q - k."""
    place, queries, keys = packed.sequences[0]
    yield from _all_keys_before(packed, packed.sequences[0])
    if queries - packed.nxt > keys:
        wanted = f"at least {queries - keys} for sequence {place}"
        yield "next_tockens", f"next_tockens is {packed.nxt}, expected {wanted}"


def _all_keys_before(packed: _PackedBand, sequence: _Sequence) -> Faults:
    """pre_tockens >= k."""
    if packed.pre < sequence.keys:
        wanted = f"at least {sequence.keys}, the keys of sequence {sequence.place}"
        yield "pre_tockens", f"pre_tockens is {packed.pre}, expected {wanted}"


PACKED_BANDS: dict[int, tuple[Callable[[_PackedBand], Faults], ...]] = {
    0: (_stated_band,),
    3: (_no_surplus_queries,),
    4: (_right_aligned_band,),
    7: (_no_surplus_queries, _band_of_last),
    8: (_band_of_first,),
}
"""The checks of each sparse mode of TND, in which q and k are the queries and keys of a sequence
that has queries."""
