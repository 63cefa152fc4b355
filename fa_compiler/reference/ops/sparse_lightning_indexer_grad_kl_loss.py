"""SparseLightningIndexerGradKLLoss: the KL divergence of the indexer from attention, and its
gradients.

For each row, over the first min(K, visible) entries of its list, which all have to be keys of the
sequence:

    p_j = 1/N1 sum over heads g of exp(scale (q_g . k_j + q_rope_g . k_rope_j) - max_g) / sum_g
    r_hj = relu(q_index_h . k_index_j);  I_j = sum_h w_h r_hj;  y = softmax(I)
    loss += sum_j max(p_j, 1e-8) (ln max(p_j, 1e-8) - ln max(y_j, 1e-8))
    dI = y - p;  dw_h = sum_j dI_j r_hj;  dS_hj = dI_j w_h [r_hj > 0]
    dq_index_h = sum_j dS_hj k_index_j;  dk_index_j += sum_h dS_hj q_index_h

Sinks are part of the statistics. The probability of the sinks is subtracted from the number of
heads:

    p_j = sum_g exp(...) / sum_g  /  (N1 - sum_g exp(sink_g - max_g) / sum_g)

If this difference is less than LEAST_LEFT of the number of heads, the rounding of the statistics
makes it useless. p is then the sum over the heads divided by its own sum over the list.

p is treated as a constant. It sums to 1 if the statistics come from the same keys and sinks. The
gradients are those of the loss if p and y exceed 1e-8 and p sums to 1. The extension attribute
cpu_loss_floor replaces the number 1e-8. With 0 there is no floor, and a key with p = 0 adds nothing
to the loss.
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import Floats, OpCall, Output, operator
from fa_compiler.reference.sparse import SparseCall, joined
from fa_compiler.reference.statistics import unrounded

LEAST_LEFT = 2.0**-10
"""The least part of the number of heads that may remain when the probability of the sinks is
subtracted."""


def _target(scores: Floats, top: Floats, total: Floats, sinks: Floats | None) -> Floats:
    """p of the listed keys [K], from the scores of attention [N1,K] and its statistics [N1]."""
    logs = scores - unrounded(top, scores.max(axis=1))[:, None] - np.log(total)[:, None]
    heads = float(len(top))
    if sinks is not None:
        left = heads - float(np.sum(np.exp(sinks - top) / total))
        if left < LEAST_LEFT * heads:
            p: Floats = np.exp(logs - logs.max()).sum(axis=0)
            p /= p.sum()
            return p
        heads = left
    mean: Floats = np.exp(logs).sum(axis=0) / heads
    return mean


@operator("SparseLightningIndexerGradKLLoss")
def sparse_lightning_indexer_grad_kl_loss(call: OpCall) -> dict[str, Output]:
    """d_query_index, d_key_index and d_weight in the shapes of their inputs, and the loss, [1] in
    float32."""
    side = SparseCall(call, ("actual_seq_lengths_query", "actual_seq_lengths_key"))
    query, key = (
        joined(side, "query", "query_rope", False),
        joined(side, "key", "key_rope", True)[:, 0],
    )
    query_index, key_index = (
        side.by_token("query_index", -1, -1),
        side.by_key("key_index", 1, -1)[:, 0],
    )
    weight = side.by_token("weight", query_index.shape[1])
    indices = side.indices()[:, 0]
    top, total = side.statistics("softmax_max"), side.statistics("softmax_sum")
    sinks = side.sinks()
    scale, floor = float(call.attrs["scale_value"]), float(call.attrs.get("cpu_loss_floor", 1e-8))
    d_query, d_key, d_weight = (
        np.zeros_like(query_index),
        np.zeros_like(key_index),
        np.zeros_like(weight),
    )
    loss = 0.0
    for row in side.rows():
        used = min(indices.shape[-1], row.visible)
        if used == 0:
            continue
        entries = indices[row.token, :used]
        if ((entries < 0) | (entries >= len(row.sequence.keys))).any():
            raise call.error(
                "sparse_indices",
                f"the first {used} entries of a row must all be keys of its sequence",
            )
        places = row.sequence.keys[entries]
        scores = scale * (query[row.token] @ key[places].T)
        with np.errstate(invalid="ignore"):
            p = _target(scores, top[row.token], total[row.token], sinks)
        relu = np.maximum(query_index[row.token] @ key_index[places].T, 0.0)
        index_scores = weight[row.token] @ relu
        shifted = index_scores - index_scores.max()
        log_y = shifted - np.log(np.sum(np.exp(shifted)))
        d_scores = np.exp(log_y) - p
        target = np.maximum(p, floor)
        with np.errstate(divide="ignore"):
            parts = np.log(target) - np.maximum(log_y, np.log(floor))
        loss += float(np.sum(target[target != 0] * parts[target != 0]))
        d_weight[row.token] = relu @ d_scores
        d_s = np.where(relu <= 0, 0.0, d_scores * weight[row.token][:, None])
        d_query[row.token] = d_s @ key_index[places]
        np.add.at(d_key, places, d_s.T @ query_index[row.token])
    dtype = call.tensor("query_index").dtype
    return {
        "d_query_index": Output(side.shaped(d_query), dtype),
        "d_key_index": Output(side.shaped_keys(d_key[:, None]), dtype),
        "d_weight": Output(side.shaped(d_weight), call.tensor("weight").dtype),
        "loss": Output(np.array([loss]), np.dtype(np.float32)),
    }
