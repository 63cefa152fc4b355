"""LightningIndexer: scores each visible key for each query token and lists the best keys.

    I_ij = sum over index heads h of w_ih relu(q_ih . k_j)

There is no scale. The best sparse_count keys are listed by descending score. Of equal scores the
first key comes first, as in ONNX's TopK; the processor has an order of its own. Free entries of the
list are -1, with the score -inf.

A key whose score is NaN ranks last, behind -inf. So says the kernel of Ascend 950, where the NaN of
its arithmetic is the smallest number of a radix selection (FloatToSortableKey in ops-transformer,
attention/lightning_indexer/op_kernel/ arch35/vf/common/lightning_indexer_vector1_base.h). The
reference in the operator's own tests sorts NaN to the same end. A2 and A3 sort by Sort32, of which
nothing is documented for NaN. With cpu_nan_scores "first" NaN ranks first, as in the TopK of ONNX
Runtime.
"""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import OpCall, Output, operator
from fa_compiler.reference.sparse import SparseCall


@operator("LightningIndexer")
def lightning_indexer(call: OpCall) -> dict[str, Output]:
    """sparse_indices (int32), and sparse_values ([0] unless return_values)."""
    side = SparseCall(
        call,
        ("actual_seq_lengths_query", "actual_seq_lengths_key"),
        ("layout_query", "layout_key"),
        counted=True,
    )
    query, key = side.by_token("query", side.heads, -1), side.by_key("key", 1, -1)[:, 0]
    weights = side.by_token("weights", side.heads)
    count = int(call.attrs["sparse_count"])
    indices = np.full((side.tokens, 1, count), -1.0)
    values = np.full((side.tokens, 1, count), -np.inf)
    for row in side.rows():
        keys = key[row.sequence.keys[: row.visible]]
        scores = weights[row.token] @ np.maximum(query[row.token] @ keys.T, 0.0)
        undefined = np.isnan(scores) ^ (call.attrs.get("cpu_nan_scores") == "first")
        best = np.lexsort((-scores, undefined))[:count]
        indices[row.token, 0, : len(best)] = best
        values[row.token, 0, : len(best)] = scores[best]
    wanted = bool(call.attrs["return_values"])
    return {
        "sparse_indices": Output(side.shaped(indices), np.dtype(np.int32)),
        "sparse_values": Output(
            side.shaped(values) if wanted else np.zeros(0), call.tensor("query").dtype
        ),
    }
