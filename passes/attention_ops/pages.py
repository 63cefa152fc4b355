"""Packed sequences whose keys lie in the pages of a cache: where each token and each key is, in
plain operators.

A block table [B, blocks of a sequence] names the block of each position: position p of sequence b
is in block table[b, p // size], at p % size. A number below 0 stands for no page. A run that reads
or writes there ends in an error of GatherND, Gather or ScatterND, because the number becomes one
that no cache has. So does a run in which a sequence with tokens has a number of earlier keys below
0: ONNX's indices count from the end there, so that its keys would be written into the pages of
others.

What is computed has one number for each token or key, and none for each pair of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.emit.build import INT64, Builder

INT32 = ir.DataType.INT32
ADDING_SINCE = 16
"""The first opset whose ScatterElements adds, by which the rows of each sequence are counted."""
LARGEST = int(np.iinfo(np.int64).max)
NO_PAGE = int(np.iinfo(np.int32).max)
NO_POSITION = int(np.iinfo(np.int32).min)


def refused_below_zero(builder: Builder, positions: ir.Value) -> ir.Value:
    """First positions, int64 [B], of which one below 0 becomes one that no index and no number of
    keys can have."""
    is_malformed = builder.less(positions, builder.ints([0]))
    return builder.where(is_malformed, builder.ints([NO_POSITION]), positions)


@dataclass(frozen=True)
class Rows:
    """Rows that belong to the sequences, end to end: tokens or keys. All are int64.

    `ends` [B] says where the rows of each sequence end, and `count` [1] how many there are. `owner`
    [count] is the sequence of each row, and `positions` [count] its position in that sequence.
    """

    ends: ir.Value
    count: ir.Value
    owner: ir.Value
    positions: ir.Value

    @staticmethod
    def of(builder: Builder, ends: ir.Value, begins: ir.Value, first: ir.Value) -> Rows:
        """The rows of sequences that begin at the rows `begins` with the positions `first`, int64
        [B]."""
        count = builder.slice(ends, [-1], [LARGEST], [0])
        places = builder.add(count, builder.ints([1]))
        zeros = builder.expand(builder.ints([0]), places)
        ones = builder.expand(builder.ints([1]), builder.shape_of(ends))
        marks = builder.op("ScatterElements", [zeros, ends, ones], {"axis": 0, "reduction": "add"})
        counted = builder.cum_sum(marks, builder.constant(np.array(0, np.int64), "number"))
        owner = builder.slice(counted, [0], count, [0])
        shift = builder.sub(first, begins)
        own = builder.gather(shift, owner, 0)
        return Rows(ends, count, owner, builder.add(builder.range(count), own))


@dataclass(frozen=True)
class Sequences:
    """The sequences of a run: where the tokens of each begin and end, and how many keys it has
    before, int64 [B]."""

    builder: Builder
    begins: ir.Value
    ends: ir.Value
    past: ir.Value

    @staticmethod
    def of(builder: Builder, limits: ir.Value, past: ir.Value) -> Sequences:
        """Those of cumulative_sequence_length [B + 1] and past_seqlens [B]."""
        wide = builder.cast(limits, INT64)
        begins, ends = builder.slice(wide, [0], [-1], [0]), builder.slice(wide, [1], [LARGEST], [0])
        return Sequences(
            builder, begins, ends, refused_below_zero(builder, builder.cast(past, INT64))
        )

    @property
    def is_single(self) -> ir.Value:
        """Which sequences have one token, booleans [B]."""
        new = self.builder.sub(self.ends, self.begins)
        return self.builder.equal(new, self.builder.ints([1]))

    def tokens(self) -> Rows:
        """The new tokens."""
        return Rows.of(self.builder, self.ends, self.begins, self.past)

    def keys(self, window: int, least: int) -> Rows:
        """The keys that some token attends, which sees `window` of them at most; all where that is
        below 0. A sequence of fewer than `least` tokens has none."""
        builder, zero = self.builder, self.builder.ints([0])
        new = builder.sub(self.ends, self.begins)
        first = builder.mul(self.past, zero)
        if window > 0:
            earliest = builder.add(self.past, builder.ints([1 - window]))
            first = builder.max(earliest, zero)
        seen = builder.sub(builder.add(self.past, new), first)
        is_there = builder.greater_or_equal(new, builder.ints([least]))
        lengths = builder.where(is_there, seen, zero)
        axis = builder.constant(np.array(0, np.int64), "number")
        ends = builder.cum_sum(lengths, axis)
        begins = builder.sub(ends, lengths)
        return Rows.of(builder, ends, begins, first)


@dataclass(frozen=True)
class Pages:
    """A block table without numbers below 0, int32 [B, blocks of a sequence], and the size of a
    block, int64 [1]."""

    builder: Builder
    table: ir.Value
    block_size: ir.Value

    @staticmethod
    def of(builder: Builder, table: ir.Value, cache: ir.Value) -> Pages:
        """Those of a block table, int32, and a cache [blocks, tokens, heads, size]."""
        zero, absent = (
            builder.constant(np.array(number, np.int32), "number") for number in (0, NO_PAGE)
        )
        is_absent = builder.less(table, zero)
        safe = builder.where(is_absent, absent, table)
        return Pages(builder, safe, builder.dimension(cache, 1))

    def slots(self, rows: Rows) -> ir.Value:
        """The number of each row's place among those of all blocks, int64 [count]."""
        builder = self.builder
        number = builder.div(rows.positions, self.block_size)
        pair = builder.concat([builder.unsqueeze(part, (1,)) for part in (rows.owner, number)], 1)
        block = builder.cast(builder.op("GatherND", [self.table, pair]), INT64)
        place = builder.sub(rows.positions, builder.mul(number, self.block_size))
        return builder.add(builder.mul(block, self.block_size), place)

    def write(self, cache: ir.Value, rows: ir.Value, slots: ir.Value) -> ir.Value:
        """The cache with rows [count, heads, size] in these places, int64 [count]."""
        builder = self.builder
        block = builder.div(slots, self.block_size)
        place = builder.sub(slots, builder.mul(block, self.block_size))
        pair = builder.concat([builder.unsqueeze(part, (1,)) for part in (block, place)], 1)
        return builder.scatter_nd(cache, pair, rows)

    def read(self, cache: ir.Value, slots: ir.Value, heads: int, size: int) -> ir.Value:
        """The rows [count, heads, size] of a cache in these places, int64 [count]."""
        flat = self.builder.reshape(cache, [-1, heads, size])
        return self.builder.gather(flat, slots, 0)
