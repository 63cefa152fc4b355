"""Sequences of one token among packed ones: IncreFlashAttention reads their keys in the pages where they lie.

    the sequences of one token   their queries, rows of the block table and lengths, behind an entry without keys: the
                                 operator refuses a batch without entries
    all others                   FlashAttentionScore, in which the former have no keys and get rows of 0
    the result                   that of FlashAttentionScore, into which the rows of IncreFlashAttention are written

The two give the same: a single token is the last one of its sequence and sees all keys, causal or not.
IncreFlashAttention has no window, no sink, and pages of limited sizes only; where these are needed, the keys of all
sequences are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fa_compiler.op_registry.ops.incre_flash_attention import MAX_BLOCK, MAX_D, MAX_GROUP, MAX_N, MAX_PAGE_WIDTH
from fa_compiler.passes.attention_ops.pages import Pages, Sequences
from fa_compiler.passes.emit.build import INT64, Builder

OP = "IncreFlashAttention"
PAGE_UNIT = 16
"""The number of tokens in a page is a multiple of it."""


def takes_pages(heads: int, kv_heads: int, size: int, block_size: int | None) -> bool:
    """Does IncreFlashAttention take pages of this many tokens, which is None where it may differ between runs?"""
    fits = size <= MAX_D and kv_heads <= MAX_N and heads <= MAX_GROUP * kv_heads and kv_heads * size <= MAX_PAGE_WIDTH
    return fits and block_size is not None and 0 < block_size <= MAX_BLOCK and block_size % PAGE_UNIT == 0


@dataclass(frozen=True)
class SingleTokens:
    """The sequences of one token, each with its token, and behind an entry without keys the rows of the block table,
    int32 [count + 1, blocks of a sequence], and the numbers of keys, int64 [count + 1]."""

    builder: Builder
    tokens: ir.Value
    table: ir.Value
    lengths: ir.Value

    @staticmethod
    def of(sequences: Sequences, pages: Pages) -> SingleTokens:
        """Those of a run."""
        builder, alone = sequences.builder, sequences.is_single
        tokens, past = (
            builder.op("Compress", [value, alone], INT64, {"axis": 0}) for value in (sequences.begins, sequences.past)
        )
        counts = builder.op("Add", [past, builder.ints([1])], INT64)
        rows = builder.op("Compress", [pages.table, alone], ir.DataType.INT32, {"axis": 0})
        first = builder.constant(np.zeros((1, 1), np.int32), "number")
        width = builder.op("Concat", [builder.ints([1]), builder.dimension(pages.table, 1)], INT64, {"axis": 0})
        nothing = builder.op("Expand", [first, width], ir.DataType.INT32)
        table = builder.op("Concat", [nothing, rows], ir.DataType.INT32, {"axis": 0})
        lengths = builder.op("Concat", [builder.ints([0]), counts], INT64, {"axis": 0})
        return SingleTokens(builder, tokens, table, lengths)

    def inputs(self, query: ir.Value, caches: Sequence[ir.Value]) -> dict[str, ir.Value]:
        """The inputs of IncreFlashAttention for a query [T, heads, size] and caches [blocks, tokens, heads, size]."""
        builder, dtype = self.builder, self.builder.info.dtype(query)
        shape = builder.info.shape(query)
        assert dtype is not None and shape is not None
        zero = builder.cast(builder.constant(np.zeros((1, 1), np.float32), "number"), dtype)
        sizes = [size.const for size in shape[1:]]
        nothing = builder.op("Expand", [zero, builder.ints([1, *(size or 0 for size in sizes)])], dtype)
        own = builder.op("Gather", [query, self.tokens], dtype, {"axis": 0})
        rows = builder.units("Unsqueeze", builder.op("Concat", [nothing, own], dtype, {"axis": 0}), (1,))
        key, value = (builder.op("Reshape", [cache, builder.ints([0, 0, -1])], dtype) for cache in caches)
        return {
            "query": rows,
            "key": key,
            "value": value,
            "actual_seq_lengths": self.lengths,
            "block_table": self.table,
        }

    def joined(self, out: ir.Value, rows: ir.Value, dtype: ir.DataType) -> ir.Value:
        """The result [T, heads, size] with the rows of IncreFlashAttention, [count + 1, 1, heads, size]."""
        builder = self.builder
        bounds = [builder.ints([number]) for number in (1, int(np.iinfo(np.int64).max), 0)]
        own = builder.units("Squeeze", builder.op("Slice", [rows, *bounds], dtype), (1,))
        places = builder.units("Unsqueeze", self.tokens, (1,))
        return builder.op("ScatterND", [out, places, own], dtype)
