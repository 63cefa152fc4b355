"""FlashAttentionScore: O = dropout(softmax(mask(S))) V, and the row statistics the gradient needs.

Query, key and value of batch 1 are repeated to the batch of the others (extension EXT-BATCH-BROADCAST), and of key and
value only as many rows are read as are keys (extension EXT-KEY-LENGTH).
Empty inputs give zeros, also in the statistics; so does a packed batch that has queries and no keys.
"""

from __future__ import annotations

import numpy as np

from fa_compiler.op_registry.extensions import EMPTY_ROWS, MASKED_BIAS, MASKED_VALUES, NAN_ROWS
from fa_compiler.reference.attention import Attention
from fa_compiler.reference.call import Call, Output, operator
from fa_compiler.reference.layouts import repeat_batch, shorten_keys
from fa_compiler.reference.softmax import softmax, weighted_sum
from fa_compiler.reference.statistics import check_order, pack


@operator("FlashAttentionScore")
def flash_attention_score(call: Call) -> dict[str, Output]:
    """softmax_max and softmax_sum (float32), softmax_out (never computed: [0,0,0,0]) and attention_out."""
    attention = Attention(repeat_batch(shorten_keys(call)), pse_name="real_shift")
    side = attention.query_side
    order = check_order(call, "softmax_out_layout")
    empty_rows, nan_rows = _empty_rows(call, attention), _nan_rows(call)
    mask_value, valueless, biased = _mask_value(call), _valueless(call), _masked_bias(call)
    row_max = [np.zeros((side.heads, length)) for length in side.lengths]
    row_sum = [np.zeros((side.heads, length)) for length in side.lengths]
    out = [np.zeros((side.heads, length, attention.value_width)) for length in side.lengths]
    for batch, head, kv_head in attention.heads():
        sink = None if attention.sink is None else float(attention.sink[head])
        scores, allowed = attention.scores(batch, head, kv_head), attention.allowed(batch, head)
        masked = attention.masked_scores(batch, head, mask_value) if biased else mask_value
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


def _empty_rows(call: Call, attention: Attention) -> str:
    value = str(call.attrs.get("cpu_empty_rows", ""))
    if value not in EMPTY_ROWS:
        raise call.error("cpu_empty_rows", f"must be one of {', '.join(EMPTY_ROWS[1:])}, got {value!r}")
    if attention.sink is not None and value not in ("", "zero"):
        raise call.error("cpu_empty_rows", f"{value!r} has no meaning beside a sink, which no mask excludes")
    return value


def _nan_rows(call: Call) -> str:
    value = str(call.attrs.get("cpu_nan_rows", ""))
    if value not in NAN_ROWS:
        raise call.error("cpu_nan_rows", f"must be one of {', '.join(NAN_ROWS[1:])}, got {value!r}")
    return value


def _mask_value(call: Call) -> float:
    value = float(call.attrs.get("cpu_mask_value", -np.inf))
    if np.isnan(value) or value == np.inf:
        raise call.error("cpu_mask_value", f"must be a finite number, got {value}")
    return value


def _masked_bias(call: Call) -> bool:
    value = str(call.attrs.get("cpu_masked_bias", ""))
    if value not in MASKED_BIAS:
        raise call.error("cpu_masked_bias", f"must be {MASKED_BIAS[1]}, got {value!r}")
    if value and call.optional("atten_mask") is None:
        raise call.error("cpu_masked_bias", "needs the input atten_mask")
    if value and _valueless(call):
        raise call.error("cpu_masked_values", "masked keys whose bias is added to their score have values")
    return value == "added"


def _valueless(call: Call) -> bool:
    value = str(call.attrs.get("cpu_masked_values", ""))
    if value not in MASKED_VALUES:
        raise call.error("cpu_masked_values", f"must be {MASKED_VALUES[1]}, got {value!r}")
    return value == "zero"
