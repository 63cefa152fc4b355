"""Sequences of one token among packed ones: IncreFlashAttention reads their keys in the pages where
they lie.

    the sequences of one token   their queries, rows of the block table and lengths, behind an entry
                                 without keys: the operator refuses a batch without entries
    all others                   FlashAttentionScore, in which the former have no keys and get rows
                                 of 0
    the result                   that of FlashAttentionScore, into which the rows of
                                 IncreFlashAttention are written

The two give the same: a single token is the last one of its sequence and sees all keys, causal or
not. For a window the block table begins with the page of the first key in it, and a mask excludes
the keys in front of it in that page. IncreFlashAttention has no sink, and pages of limited sizes
only; where these are needed, the keys of all sequences are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from fa_compiler.op_registry.ops.incre_flash_attention import (
    MAX_BLOCK,
    MAX_D,
    MAX_GROUP,
    MAX_N,
    MAX_PAGE_WIDTH,
)
from fa_compiler.passes.algebra.symbolic import consts
from fa_compiler.passes.attention_ops.pages import NO_PAGE, Pages, Sequences
from fa_compiler.passes.emit.build import Builder

OP = "IncreFlashAttention"
PAGE_UNIT = 16
"""The number of tokens in a page is a multiple of it."""


def takes_pages(heads: int, kv_heads: int, size: int, block_size: int | None) -> bool:
    """Does IncreFlashAttention take pages of this many tokens, which is None where it may differ
    between runs?"""
    fits = (
        size <= MAX_D
        and kv_heads <= MAX_N
        and heads <= MAX_GROUP * kv_heads
        and kv_heads * size <= MAX_PAGE_WIDTH
    )
    return (
        fits
        and block_size is not None
        and 0 < block_size <= MAX_BLOCK
        and block_size % PAGE_UNIT == 0
    )


@dataclass(frozen=True)
class SingleTokens:
    """The sequences of one token.

    `tokens` int64 [count] are the tokens. Behind an entry without keys, `table` int32 [count + 1,
    blocks] has the rows of the block table, `lengths` int64 [count + 1] the numbers of keys, and
    `excluded`, booleans [count + 1, keys], the keys in front of a window.
    """

    builder: Builder
    tokens: ir.Value
    table: ir.Value
    lengths: ir.Value
    excluded: ir.Value | None = None

    @staticmethod
    def of(sequences: Sequences, pages: Pages, window: int) -> SingleTokens:
        """Those of a run, which see `window` keys at most; all where that is below 0."""
        builder, alone = sequences.builder, sequences.is_single
        tokens, past = (
            builder.op("Compress", [value, alone], {"axis": 0})
            for value in (sequences.begins, sequences.past)
        )
        counts = builder.add(past, builder.ints([1]))
        rows = builder.op("Compress", [pages.table, alone], {"axis": 0})
        first = builder.constant(np.zeros((1, 1), np.int32), "number")
        width = builder.concat([builder.ints([1]), builder.dimension(pages.table, 1)], 0)
        nothing = builder.expand(first, width)
        table = builder.concat([nothing, rows], 0)
        lengths = builder.concat([builder.ints([0]), counts], 0)
        every = SingleTokens(builder, tokens, table, lengths)
        return every if window < 0 else every._within(window, pages.block_size)

    def _within(self, window: int, block_size: ir.Value) -> SingleTokens:
        """The same with the pages of the last `window` keys."""
        builder, most = self.builder, self.builder.dimension(self.table, 1)
        touched = builder.div(builder.add(block_size, builder.ints([window - 2])), block_size)
        count = builder.min(builder.add(touched, builder.ints([1])), most)
        earliest = builder.add(self.lengths, builder.ints([-window]))
        first = builder.max(earliest, builder.ints([0]))
        skipped = builder.div(first, block_size)
        before = builder.mul(skipped, block_size)
        ahead = builder.add(builder.unsqueeze(skipped, (1,)), builder.range(count))
        last = builder.sub(most, builder.ints([1]))
        columns = builder.min(ahead, last)
        pages = builder.op("GatherElements", [self.table, columns], {"axis": 1})
        is_behind = builder.greater(ahead, last)
        absent = builder.constant(np.array(NO_PAGE, np.int32), "number")
        table = builder.where(is_behind, absent, pages)
        begin = builder.unsqueeze(builder.sub(first, before), (1,))
        places = builder.range(builder.mul(count, block_size))
        excluded = builder.less(places, begin)
        lengths = builder.sub(self.lengths, before)
        return replace(self, table=table, lengths=lengths, excluded=excluded)

    def inputs(self, query: ir.Value, caches: Sequence[ir.Value]) -> dict[str, ir.Value | None]:
        """The inputs of IncreFlashAttention for a query [T, heads, size] and caches [blocks,
        tokens, heads, size]."""
        builder, dtype = self.builder, self.builder.info.dtype(query)
        shape = builder.info.shape(query)
        assert dtype is not None and shape is not None
        zero = builder.cast(builder.constant(np.zeros((1, 1), np.float32), "number"), dtype)
        sizes = consts(shape[1:])
        nothing = builder.expand(zero, [1, *(size or 0 for size in sizes)])
        own = builder.gather(query, self.tokens, 0)
        rows = builder.unsqueeze(builder.concat([nothing, own], 0), (1,))
        key, value = (builder.reshape(cache, [0, 0, -1]) for cache in caches)
        return {
            "query": rows,
            "key": key,
            "value": value,
            "atten_mask": self.excluded,
            "actual_seq_lengths": self.lengths,
            "block_table": self.table,
        }

    def joined(self, out: ir.Value, rows: ir.Value) -> ir.Value:
        """The result [T, heads, size] with the rows of IncreFlashAttention, [count + 1, 1, heads,
        size]."""
        builder = self.builder
        own = builder.squeeze(builder.slice(rows, [1], [int(np.iinfo(np.int64).max)], [0]), (1,))
        places = builder.unsqueeze(self.tokens, (1,))
        return builder.scatter_nd(out, places, own)
