"""LightningIndexer: scores each visible key for each query token and lists the best.

    I_ij = sum over index heads h of w_ih relu(q_ih . k_j)

Without a scale. The best sparse_count keys are listed by descending score, of equal scores the first key first, as
ONNX's TopK has it (the processor's order is its own). Slots that are left are -1, with the score -inf.
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import Call, Output, operator
from fa_compiler.reference.sparse import SparseCall


@operator("LightningIndexer")
def lightning_indexer(call: Call) -> dict[str, Output]:
    """sparse_indices (int32), and sparse_values ([0] unless return_values)."""
    side = SparseCall(
        call, ("actual_seq_lengths_query", "actual_seq_lengths_key"), ("layout_query", "layout_key"), counted=True
    )
    query, key = side.by_token("query", side.heads, -1), side.by_key("key", 1, -1)[:, 0]
    weights = side.by_token("weights", side.heads)
    count = int(call.attrs["sparse_count"])
    indices = np.full((side.tokens, 1, count), -1.0)
    values = np.full((side.tokens, 1, count), -np.inf)
    for row in side.rows():
        keys = key[row.sequence.keys[: row.visible]]
        scores = weights[row.token] @ np.maximum(query[row.token] @ keys.T, 0.0)
        best = np.argsort(-scores, kind="stable")[:count]
        indices[row.token, 0, : len(best)] = best
        values[row.token, 0, : len(best)] = scores[best]
    wanted = bool(call.attrs["return_values"])
    return {
        "sparse_indices": Output(side.shaped(indices), np.dtype(np.int32)),
        "sparse_values": Output(side.shaped(values) if wanted else np.zeros(0), call.tensor("query").dtype),
    }
