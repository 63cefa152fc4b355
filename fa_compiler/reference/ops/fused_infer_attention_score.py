"""FusedInferAttentionScore: attention of a prompt or of single tokens over caches of every form."""

from __future__ import annotations

import numpy as np

from fa_compiler.reference.call import OpCall, Output, operator
from fa_compiler.reference.prompt import Operator, Prompt

FUSED = Operator(
    layouts=(
        *("BSH", "BSND", "BNSD", "TND", "NTD", "NSD"),
        *(
            "BNSD_BSND",
            "BSH_BNSD",
            "BSND_BNSD",
            "NTD_TND",
            "TND_NTD",
            "BSH_NBSD",
            "BSND_NBSD",
            "BNSD_NBSD",
        ),
    ),
    scale="scale",
    int8_scales=("dequant_scale1", "quant_scale1", "dequant_scale2"),
    fused=True,
)

NOT_COMPUTED = ("dequant_scale_query", "key_rope_antiquant_scale")
"""Inputs that are not supported: no source tells how the operator rounds probabilities with
them."""


@operator("FusedInferAttentionScore")
def fused_infer_attention_score(call: OpCall) -> dict[str, Output]:
    """attention_out and softmax_lse.

    attention_out has query's type, but is INT8 with quant_scale2, and float16 for an INT8 query
    without it. softmax_lse is [B,N1,S1,1] or [T,N1,1] in float32, or [0] if it is not requested.
    """
    for name in NOT_COMPUTED:
        if call.inputs.get(name) is not None:
            raise call.error(name, "full quantisation with scales of the query is not computed")
    results = Prompt(call, FUSED).compute()
    wanted = results.lse if call.attrs["softmax_lse_flag"] else np.zeros(0)
    return {
        "attention_out": Output(results.out, results.dtype),
        "softmax_lse": Output(wanted, np.dtype(np.float32)),
    }
