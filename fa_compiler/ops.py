"""One operator at a time, eagerly, on the CPU kernel.

out = fa_compiler.ops.run(
    "FlashAttentionScore",
    {"query": q, "key": k, "value": v},
    {"head_num": 12, "input_layout": "BNSD", "scale_value": 0.125},
    outputs=["attention_out"],
)["attention_out"]
"""

from fa_compiler.lowering.ort.eager import KernelError, run

__all__ = ["KernelError", "run"]
