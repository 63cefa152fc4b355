"""Rows of a cache [B, K, P, D]: named by batch entry, head and place, and written in place.

A ScatterND finds its output where its input is when both are one buffer, and writes the new rows only; nothing else may
read what the cache was.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.build import INT64
from fa_compiler.passes.ready_made.call import Call
from fa_compiler.passes.ready_made.keys import Measure


@dataclass(frozen=True)
class CacheRows:
    """The rows of caches with `heads` heads for as many batch entries as there are."""

    call: Call
    heads: int
    batch: Measure

    def updated(self, cache: ir.Value, new: ir.Value, before: ir.Value, rows: ir.Value) -> ir.Value:
        """The cache with new rows [B, K, S, D] from `before` on, int64 [B] or [1]; `rows` is S, int64 [1]."""
        builder = self.call.builder
        offsets = builder.units("Unsqueeze", builder.range(rows), (0, 1, 3))
        places = builder.op("Add", [builder.units("Unsqueeze", before, (1, 2, 3)), offsets], INT64)
        return builder.op("ScatterND", [cache, self.index(places, rows), new], self.call.info.dtype(new))

    def index(self, places: ir.Value, count: ir.Value) -> ir.Value:
        """Batch entry, head and place of every row, int64 [B, K, count, 3]; places are [B or 1, 1, count, 1]."""
        builder, entries = self.call.builder, self.entries()
        numbers = builder.units("Unsqueeze", builder.range(entries), (1, 2, 3))
        heads = builder.constant(np.arange(self.heads, dtype=np.int64).reshape(1, -1, 1, 1), "positions")
        parts = [entries, builder.ints([self.heads]), count, builder.ints([1])]
        shape = builder.op("Concat", parts, INT64, {"axis": 0})
        whole = [builder.op("Expand", [part, shape], INT64) for part in (numbers, heads, places)]
        return builder.op("Concat", whole, INT64, {"axis": 3})

    def entries(self) -> ir.Value:
        """How many batch entries there are, int64 [1]."""
        return self.call.builder.length(self.batch.value, self.batch.axis)
