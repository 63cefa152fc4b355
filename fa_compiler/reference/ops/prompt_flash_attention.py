"""PromptFlashAttention: attention of a whole prompt of one or more rows."""

from __future__ import annotations

from fa_compiler.reference.call import OpCall, Output, operator
from fa_compiler.reference.prompt import Operator, Prompt

PROMPT = Operator(
    layouts=("BSH", "BSND", "BNSD", "BNSD_BSND"),
    scale="scale_value",
    int8_scales=("deq_scale1", "quant_scale1", "deq_scale2"),
    fused=False,
)


@operator("PromptFlashAttention")
def prompt_flash_attention(call: OpCall) -> dict[str, Output]:
    """attention_out in query's type; INT8 with quant_scale2, float16 for an INT8 query without
    it."""
    results = Prompt(call, PROMPT).compute()
    return {"attention_out": Output(results.out, results.dtype)}
