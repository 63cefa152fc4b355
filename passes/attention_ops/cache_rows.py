"""Writes rows of a cache [B, K, P, D] in place, each by its batch entry, head and position
(scatter_row_indices.py)."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.attention_ops.call import OpConverter
from fa_compiler.passes.attention_ops.key_masks import DimRef
from fa_compiler.passes.emit.scatter_row_indices import scatter_row_indices


@dataclass(frozen=True)
class CacheRows:
    """The rows of caches with `heads` heads and `batch` batch entries."""

    call: OpConverter
    heads: int
    batch: DimRef

    def updated(self, cache: ir.Value, new: ir.Value, before: ir.Value, rows: ir.Value) -> ir.Value:
        """The cache with the new rows [B, K, S, D] from position `before` on.

        `before` is int64 [B] or [1], and `rows` is S, int64 [1].
        """
        builder = self.call.builder
        offsets = builder.unsqueeze(builder.range(rows), (0, 1, 3))
        places = builder.add(builder.unsqueeze(before, (1, 2, 3)), offsets)
        return builder.scatter_nd(cache, self.index(places, rows), new)

    def index(self, places: ir.Value, count: ir.Value) -> ir.Value:
        """Batch entry, head and position of every row, int64 [B, K, count, 3]; `places` are [B or
        1, 1, count, 1]."""
        heads = self.call.builder.ints([self.heads])
        return scatter_row_indices(self.call.builder, (self.entries(), heads), places, count)

    def entries(self) -> ir.Value:
        """The number of batch entries, int64 [1]."""
        return self.call.builder.length(self.batch.value, self.batch.axis)
