"""SparseFlashAttentionGrad: the gradients of SparseFlashAttention from the statistics of its forward pass.

Over the keys j of the list of row i, as often as it lists them:

    P_ij = exp(S_ij - max_i) / sum_i;  dP_ij = dO_i . v_j;  dS = P (dP - dO_i . O_i)
    dq_i = scale sum_j dS_ij k_j;  dk_j += scale dS_ij q_i;  dv_j += P_ij dO_i

and the same for the rope parts. The inputs are in the order of 2025-12. Lists have no other end than -1: unlike the
forward pass, no count of visible blocks cuts them.
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import Call, Floats, Output, operator
from fa_compiler.reference.sparse import SparseCall, chosen, joined


@operator("SparseFlashAttentionGrad")
def sparse_flash_attention_grad(call: Call) -> dict[str, Output]:
    """d_query, d_key, d_value, d_query_rope, d_key_rope; the latter two are [0] without rope."""
    side = SparseCall(call, ("actual_seq_lengths_query", "actual_seq_lengths_kv"))
    query, key = joined(side, "query", "query_rope", False), joined(side, "key", "key_rope", True)
    if query.shape[-1] != key.shape[-1]:
        raise call.error("key", f"has head size {key.shape[-1]}, expected {query.shape[-1]}")
    value = side.by_key("value", side.key_heads, -1)
    d_out = side.by_token("d_out", side.heads, value.shape[-1])
    out = side.by_token("out", side.heads, value.shape[-1])
    top, total = side.statistics("softmax_max"), side.statistics("softmax_sum")
    indices = side.indices(any_heads=True)
    block, scale = int(call.attrs["sparse_block_size"]), float(call.attrs["scale_value"])
    d_query, d_key, d_value = np.zeros_like(query), np.zeros_like(key), np.zeros_like(value)
    for row in side.rows():
        for head in range(side.heads):
            kv_head = head // side.group
            places = row.sequence.keys[chosen(indices[row.token, kv_head], block, row.visible, capped=False)]
            q, d_o = query[row.token, head], d_out[row.token, head]
            scores = scale * (key[places, kv_head] @ q)
            p = np.exp(scores - top[row.token, head]) / total[row.token, head]
            d_s = scale * p * (value[places, kv_head] @ d_o - d_o @ out[row.token, head])
            d_query[row.token, head] = d_s @ key[places, kv_head]
            np.add.at(d_key[:, kv_head], places, d_s[:, None] * q)
            np.add.at(d_value[:, kv_head], places, p[:, None] * d_o)
    dtype, width = call.tensor("query").dtype, side.width

    def rope(values: Floats) -> Floats:
        return np.zeros(0) if call.optional("query_rope") is None else values[..., width:]

    return {
        "d_query": Output(side.shaped(d_query[..., :width]), dtype),
        "d_key": Output(side.shaped_keys(d_key[..., :width]), dtype),
        "d_value": Output(side.shaped_keys(d_value), dtype),
        "d_query_rope": Output(rope(side.shaped(d_query)), dtype),
        "d_key_rope": Output(rope(side.shaped_keys(d_key)), dtype),
    }
