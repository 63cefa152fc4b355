"""SparseFlashAttentionGrad: the gradients of SparseFlashAttention from the statistics of its
forward pass.

With the sums over the keys j in the list of row i, as often as they are listed:

    P_ij = exp(S_ij - max_i) / sum_i;  dP_ij = dO_i . v_j;  dS = P (dP - dO_i . O_i)
    dq_i = scale sum_j dS_ij k_j;  dk_j += scale dS_ij q_i;  dv_j += P_ij dO_i

The rope parts have the same gradients. With sinks, which are part of the statistics (the variant of
2026):

    d_sink = - sum_i exp(sink - max_i) / sum_i  dO_i . O_i

Without the input value (the variant of 2026), v is k without its rope part, and d_key is the sum of
both gradients. A list ends at -1 only; unlike in the forward pass, the number of visible blocks
does not limit it.
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import Floats, OpCall, Output, operator
from fa_compiler.reference.sparse import SparseCall, chosen, joined
from fa_compiler.reference.statistics import unrounded


@operator("SparseFlashAttentionGrad")
def sparse_flash_attention_grad(call: OpCall) -> dict[str, Output]:
    """d_query, d_key, d_value, d_query_rope, d_key_rope and d_sinks. Each is [0] if its input is
    absent."""
    side = SparseCall(call, ("actual_seq_lengths_query", "actual_seq_lengths_kv"))
    query, key = joined(side, "query", "query_rope", False), joined(side, "key", "key_rope", True)
    merged = call.optional("value") is None
    value = key[..., : side.width] if merged else side.by_key("value", side.key_heads, -1)
    sinks = side.sinks()
    d_out = side.by_token("d_out", side.heads, value.shape[-1])
    out = side.by_token("out", side.heads, value.shape[-1])
    top, total = side.statistics("softmax_max"), side.statistics("softmax_sum")
    indices = side.indices(any_heads=True)
    block, scale = int(call.attrs["sparse_block_size"]), float(call.attrs["scale_value"])
    d_query, d_key, d_value = np.zeros_like(query), np.zeros_like(key), np.zeros_like(value)
    d_sinks = np.zeros(0 if sinks is None else side.heads)
    for row in side.rows():
        for head in range(side.heads):
            kv_head = head // side.group
            places = row.sequence.keys[
                chosen(indices[row.token, kv_head], block, row.visible, capped=False)
            ]
            q, d_o = query[row.token, head], d_out[row.token, head]
            scores = scale * (key[places, kv_head] @ q)
            share = d_o @ out[row.token, head]
            if sinks is not None:
                d_sinks[head] -= (
                    np.exp(sinks[head] - top[row.token, head]) / total[row.token, head] * share
                )
            largest = unrounded(top[row.token, head], scores.max(initial=-np.inf))
            p = np.exp(scores - largest) / total[row.token, head]
            d_s = scale * p * (value[places, kv_head] @ d_o - share)
            d_query[row.token, head] = d_s @ key[places, kv_head]
            np.add.at(d_key[:, kv_head], places, d_s[:, None] * q)
            np.add.at(d_value[:, kv_head], places, p[:, None] * d_o)
    dtype, width = call.tensor("query").dtype, side.width
    if merged:
        d_key[..., :width] += d_value
        d_value = np.zeros(0)

    def rope(values: Floats) -> Floats:
        return np.zeros(0) if call.optional("query_rope") is None else values[..., width:]

    return {
        "d_query": Output(side.shaped(d_query[..., :width]), dtype),
        "d_key": Output(side.shaped_keys(d_key[..., :width]), dtype),
        "d_value": Output(d_value if merged else side.shaped_keys(d_value), dtype),
        "d_query_rope": Output(rope(side.shaped(d_query)), dtype),
        "d_key_rope": Output(rope(side.shaped_keys(d_key)), dtype),
        "d_sinks": Output(d_sinks, np.dtype(np.float32)),
    }
