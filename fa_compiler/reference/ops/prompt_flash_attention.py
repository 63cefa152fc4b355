"""PromptFlashAttention of floats: attention_out."""

from __future__ import annotations

from fa_compiler.reference.call import Call, Output, operator
from fa_compiler.reference.prompt import Prompt

NOT_COMPUTED = ("deq_scale1", "quant_scale1", "deq_scale2", "quant_scale2", "quant_offset2")


@operator("PromptFlashAttention")
def prompt_flash_attention(call: Call) -> dict[str, Output]:
    """attention_out, in query's type."""
    prompt = Prompt(call, "scale_value", NOT_COMPUTED)
    query = call.tensor("query")
    return {"attention_out": Output(prompt.compute()[0], query.dtype)}
