"""LightningIndexerGrad: the gradients of the index scores of the listed keys.

With r_hj = relu(q_ih . k_j) and dy_j the gradient of the score of entry j of row i's list:

    dw_ih = sum_j dy_j r_hj;  dS_hj = dy_j w_ih [r_hj > 0];  dq_ih = sum_j dS_hj k_j;  dk_j += sum_h dS_hj q_ih

The first min(K, visible) entries are used, in sparseMode 0 all K entries; -1 does not end the list.
An entry outside the sequence is an error.
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import OpCall, Output, operator
from fa_compiler.reference.sparse import SparseCall


@operator("LightningIndexerGrad")
def lightning_indexer_grad(call: OpCall) -> dict[str, Output]:
    """dq, dk and dweights, each in the shape of its input."""
    side = SparseCall(
        call, ("actual_seq_lengths_query", "actual_seq_lengths_key"), mode="sparseMode"
    )
    query, key = side.by_token("query", side.heads, -1), side.by_key("key", 1, -1)[:, 0]
    weights = side.by_token("weights", side.heads)
    indices = side.indices()[:, 0]
    count = indices.shape[-1]
    dy = side.by_token("dy", count)
    d_query, d_key, d_weights = np.zeros_like(query), np.zeros_like(key), np.zeros_like(weights)
    for row in side.rows():
        used = count if side.mode == 0 else min(count, row.visible)
        entries = indices[row.token, :used]
        if ((entries < 0) | (entries >= len(row.sequence.keys))).any():
            raise call.error(
                "sparse_indices",
                f"the first {used} entries of a row must all be keys of its sequence",
            )
        places = row.sequence.keys[entries]
        d = dy[row.token, :used]
        relu = np.maximum(query[row.token] @ key[places].T, 0.0)
        d_weights[row.token] = relu @ d
        d_s = np.where(relu <= 0, 0.0, d * weights[row.token][:, None])
        d_query[row.token] = d_s @ key[places]
        np.add.at(d_key, places, d_s.T @ query[row.token])
    dtype = call.tensor("query").dtype
    return {
        "dq": Output(side.shaped(d_query), dtype),
        "dk": Output(side.shaped_keys(d_key[:, None]), dtype),
        "dweights": Output(side.shaped(d_weights), call.tensor("weights").dtype),
    }
