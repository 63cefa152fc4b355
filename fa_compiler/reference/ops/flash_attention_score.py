"""FlashAttentionScore: O = dropout(softmax(mask(S))) V, and the row statistics the gradient needs.

A query, key or value of batch 1 is repeated to the batch of the others (extension
EXT-BATCH-BROADCAST). Only the valid rows of key and value are read (extension EXT-KEY-LENGTH). The
results and statistics of empty inputs are 0, and so are those of a packed batch entry that has
queries but no keys.
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.attention import Attention
from fa_compiler.reference.call import OpCall, Output, operator
from fa_compiler.reference.layouts import repeat_batch, shorten_keys
from fa_compiler.reference.softmax import softmax, weighted_sum
from fa_compiler.reference.statistics import check_order, pack


@operator("FlashAttentionScore")
def flash_attention_score(call: OpCall) -> dict[str, Output]:
    """softmax_max and softmax_sum (float32), softmax_out (never computed, [0,0,0,0]) and
    attention_out."""
    attention = Attention(repeat_batch(shorten_keys(call)), pse_name="real_shift")
    side = attention.query_side
    if call.attrs.get("cpu_mask_batch") == "repeated" and side.layout == "TND":
        raise call.error("cpu_mask_batch", "'repeated' needs a layout with a batch, not TND")
    order = check_order(call, "softmax_out_layout")
    empty_rows, nan_rows = (
        str(call.attrs.get(name, "")) for name in ("cpu_empty_rows", "cpu_nan_rows")
    )
    valueless = call.attrs.get("cpu_masked_values") == "zero"
    biased = call.attrs.get("cpu_masked_bias") == "added"
    row_max = [np.zeros((side.heads, length)) for length in side.lengths]
    row_sum = [np.zeros((side.heads, length)) for length in side.lengths]
    out = [np.zeros((side.heads, length, attention.value_width)) for length in side.lengths]
    for batch, head, kv_head in attention.heads():
        sink = None if attention.sink is None else float(attention.sink[head])
        scores, allowed = attention.scores(batch, head, kv_head), attention.allowed(batch, head)
        masked = attention.masked_scores(batch, head) if biased else attention.mask_value
        rows = softmax(scores, allowed, sink, empty_rows, nan_rows, masked, valueless)
        row_max[batch][head] = rows.max
        row_sum[batch][head] = rows.sum
        kept = attention.dropout.factors(batch, head)
        weights = rows.probabilities if kept is None else rows.probabilities * kept
        out[batch][head] = weighted_sum(weights, attention.value[batch][kv_head], rows.read)
    dtype = call.tensor("query").dtype
    statistic = np.dtype(np.float32)
    return {
        "softmax_max": Output(pack(row_max, side, order), statistic),
        "softmax_sum": Output(pack(row_sum, side, order), statistic),
        "softmax_out": Output(np.zeros((0, 0, 0, 0)), dtype),
        "attention_out": Output(side.join(out, attention.value_width), dtype),
    }
