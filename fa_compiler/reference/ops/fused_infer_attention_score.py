"""FusedInferAttentionScore: attention of a prompt and of single tokens, on caches of every form."""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import Call, Output, operator
from fa_compiler.reference.prompt import Operator, Prompt

FUSED = Operator(
    layouts=(
        *("BSH", "BSND", "BNSD", "TND", "NTD", "NSD"),
        *("BNSD_BSND", "BSH_BNSD", "BSND_BNSD", "NTD_TND", "TND_NTD", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD"),
    ),
    scale="scale",
    chain=("dequant_scale1", "quant_scale1", "dequant_scale2"),
    fused=True,
)

NOT_COMPUTED = ("dequant_scale_query", "key_rope_antiquant_scale")
"""Inputs of calls whose rounding of probabilities no source states."""


@operator("FusedInferAttentionScore")
def fused_infer_attention_score(call: Call) -> dict[str, Output]:
    """attention_out in query's type (INT8 with quant_scale2, float16 of an INT8 query without it); softmax_lse in
    float32, [B,N1,S1,1] or [T,N1,1], [0] where it is not asked for."""
    for name in NOT_COMPUTED:
        if call.inputs.get(name) is not None:
            raise call.error(name, "full quantisation with scales of the query is not computed")
    results = Prompt(call, FUSED).compute()
    wanted = results.lse if call.attrs["softmax_lse_flag"] else np.zeros(0)
    return {"attention_out": Output(results.out, results.dtype), "softmax_lse": Output(wanted, np.dtype(np.float32))}
