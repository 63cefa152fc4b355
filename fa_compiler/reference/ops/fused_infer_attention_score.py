"""FusedInferAttentionScore of floats: attention_out and softmax_lse.

With one row of query in BSH, BSND or BNSD the operator takes the path of decoding, in which sparse_mode and the tokens
mean nothing and the mask excludes keys.
"""

from __future__ import annotations

import numpy as np

from fa_compiler.op_registry import get
from fa_compiler.reference.call import Call, Output, operator
from fa_compiler.reference.prompt import Prompt

COMPUTED = (
    *("query", "key", "value", "pse_shift", "atten_mask", "actual_seq_lengths", "actual_seq_lengths_kv"),
    "learnable_sink",
)


@operator("FusedInferAttentionScore")
def fused_infer_attention_score(call: Call) -> dict[str, Output]:
    """attention_out in query's type; softmax_lse (float32) [B,N1,S1,1], [0] where it is not asked for."""
    others = tuple(name for name in get("FusedInferAttentionScore").input_names if name not in COMPUTED)
    if call.attrs["pse_type"] not in (0, 1):
        raise call.error("pse_type", "this reference computes no slopes")
    prompt = Prompt(call, "scale", others)
    sink = call.optional("learnable_sink")
    if sink is not None and sink.shape != (prompt.heads,):
        raise call.error("learnable_sink", f"shape {list(sink.shape)} is not [{prompt.heads}]")
    numbers = None if sink is None else sink.astype(np.float64)
    out, lse = prompt.compute(numbers, one_row_mode=prompt.s1 == 1)
    wanted = lse if call.attrs["softmax_lse_flag"] else np.zeros(0)
    query = call.tensor("query")
    return {"attention_out": Output(out, query.dtype), "softmax_lse": Output(wanted, np.dtype(np.float32))}
