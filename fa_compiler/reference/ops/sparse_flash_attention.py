"""SparseFlashAttention: softmax attention of each query token to the keys that its list selects.

    S_ij = scale (q_i . k_j + q_rope_i . k_rope_j),  O_i = sum_j P_ij v_j,  j over the list of row i, as often as listed

An entry of sparse_indices is a block of sparse_block_size keys of the row's sequence. A row without
a key gives 0, or the result that cpu_empty_rows asks for. Its softmax_max is -2e38 and its
softmax_sum 0; with sinks, they are the sink and 1.
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import OpCall, Output, operator
from fa_compiler.reference.sparse import EMPTY_MAX, SparseCall, chosen, joined


@operator("SparseFlashAttention")
def sparse_flash_attention(call: OpCall) -> dict[str, Output]:
    """attention_out, softmax_max and softmax_sum. The last two are [0] without
    return_softmax_lse."""
    side = SparseCall(
        call,
        ("actual_seq_lengths_query", "actual_seq_lengths_kv"),
        ("layout_query", "layout_kv"),
        counted=True,
    )
    query, key = joined(side, "query", "query_rope", False), joined(side, "key", "key_rope", True)
    value = side.by_key("value", side.key_heads, -1)
    indices = side.indices(any_heads=True)
    block, scale = int(call.attrs["sparse_block_size"]), float(call.attrs["scale_value"])
    rule = str(call.attrs.get("cpu_empty_rows", ""))
    sinks = side.sinks()
    out = np.zeros((side.tokens, side.heads, value.shape[-1]))
    top = np.full((side.tokens, side.heads), EMPTY_MAX)
    total = np.zeros((side.tokens, side.heads))
    if sinks is not None:
        top[:], total[:] = sinks, 1.0
    for row in side.rows():
        for head in range(side.heads):
            kv_head = head // side.group
            places = row.sequence.keys[
                chosen(indices[row.token, kv_head], block, row.visible, capped=True)
            ]
            if places.size == 0:
                if row.sequence.keys.size == 0:
                    continue  # a sequence without keys gives 0 with every rule
                if rule == "mean":
                    out[row.token, head] = value[row.sequence.keys, kv_head].mean(axis=0)
                elif rule == "nan":
                    out[row.token, head] = np.nan
                continue
            scores = scale * (key[places, kv_head] @ query[row.token, head])
            largest = scores.max() if sinks is None else np.maximum(scores.max(), sinks[head])
            with np.errstate(invalid="ignore", over="ignore"):
                weights = np.exp(scores - largest)
                sum_ = weights.sum() + (0.0 if sinks is None else np.exp(sinks[head] - largest))
                out[row.token, head] = weights / sum_ @ value[places, kv_head]
            top[row.token, head], total[row.token, head] = largest, sum_
    wanted = bool(call.attrs["return_softmax_lse"])
    statistics = [
        side.pack_statistics(values) if wanted else np.zeros(0) for values in (top, total)
    ]
    single = np.dtype(np.float32)
    return {
        "attention_out": Output(side.shaped(out), call.tensor("query").dtype),
        "softmax_max": Output(statistics[0], single),
        "softmax_sum": Output(statistics[1], single),
    }
