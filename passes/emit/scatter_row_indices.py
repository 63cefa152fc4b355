"""The indices with which ScatterND writes rows into a tensor: one for each dimension up to that of
the rows.

A ScatterND whose input and output are one buffer writes only the new rows. Nothing else may then
read the rows that it replaces.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.ir.nodes import FOLD_LIMIT


def scatter_row_indices(
    builder: Builder, leading: Sequence[ir.Value], rows: ir.Value, count: ir.Value
) -> ir.Value:
    """int64 [*leading, count, len(leading) + 1]: every index of the leading dimensions, each with
    the indices `rows`.

    `leading` and `count` are sizes, int64 [1]. `rows` are indices that broadcast to [*leading,
    count, 1].
    """
    depth = len(leading)
    target = builder.concat([*leading, count, builder.ints([1])], 0)
    parts = []
    for axis, size in enumerate(leading):
        numbers = _below(builder, size)
        others = tuple(other for other in range(depth + 2) if other != axis)
        parts.append(builder.expand(builder.unsqueeze(numbers, others), target))
    parts.append(builder.expand(rows, target))
    if len(parts) == 1:
        return parts[0]
    return builder.concat(parts, depth + 1)


def _below(builder: Builder, size: ir.Value) -> ir.Value:
    """The numbers 0, 1, ... below a size; a constant where the size is known and not too large."""
    count = FOLD_LIMIT + 1 if size.const_value is None else int(size.const_value.numpy()[0])
    if count > FOLD_LIMIT:
        return builder.range(size)
    return builder.constant(np.arange(count, dtype=np.int64), "positions")
