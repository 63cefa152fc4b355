"""The lists of selected keys of SparsePagedAttention and DynamicSparseAttention, as
SparseFlashAttention takes them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.attention_ops.direct import DirectConversion

INT32, INT64 = ir.DataType.INT32, ir.DataType.INT64


def selected_entries(
    conversion: DirectConversion, given: ir.Value, counts: ir.Value, own: ir.Value | None
) -> ir.Value:
    """The positions in the lists `given` [T, entries], of which `counts` [T] count, int32 [T,
    entries].

    Behind those that count there is -1, which ends a list. With `own`, the positions of the tokens,
    int64 [T], a later position becomes one behind all keys, which the operator passes over. Its own
    causal mode would end each list after as many entries as the token sees keys.
    """
    builder, shape = conversion.builder, conversion.facts.info.sizes(given)
    if len(shape) != 2:
        raise conversion.decline("selected_indices is not proven to be [T, entries]")
    places = builder.range(builder.dimension(given, 1))
    wide = builder.unsqueeze(builder.cast(counts, INT64), (1,))
    does_count = builder.less(places, wide)
    nothing = builder.constant(np.array(-1, np.int32), "number")
    chosen = builder.where(does_count, given, nothing)
    if own is None:
        return chosen
    last = builder.unsqueeze(builder.cast(own, INT32), (1,))
    is_later = builder.greater(chosen, last)
    behind = builder.constant(np.array(np.iinfo(np.int32).max, np.int32), "number")
    return builder.where(is_later, behind, chosen)
