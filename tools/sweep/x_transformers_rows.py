"""Rows of x-transformers: each with one of its options."""

from __future__ import annotations

import functools
from typing import Any

from tools.sweep.rows import Row, by_position

# The row: whether tokens attend later ones, too, and the options of the attention layers.
TABLE: dict[str, tuple[bool, dict[str, Any]]] = {
    "encoder": (True, {}),
    "decoder": (False, {}),
    "decoder_flash": (False, {"attn_flash": True}),
    "encoder_flash": (True, {"attn_flash": True}),
    "rotary": (False, {"rotary_pos_emb": True}),
    "rotary_xpos": (False, {"rotary_xpos": True}),
    "t5_bias": (True, {"rel_pos_bias": True}),
    "t5_bias_causal": (False, {"rel_pos_bias": True}),
    "dynamic_bias": (True, {"dynamic_pos_bias": True, "dynamic_pos_bias_log_distance": False}),
    "alibi": (False, {"alibi_pos_bias": True, "alibi_num_heads": 2}),
    "grouped_heads": (False, {"attn_kv_heads": 2}),
    "one_key_head": (False, {"attn_one_kv_head": True}),
    "key_norm": (False, {"attn_qk_norm": True, "attn_qk_norm_scale": 10}),
    "memory_keys": (True, {"attn_num_mem_kv": 4}),
    "memory_keys_causal": (False, {"attn_num_mem_kv": 4}),
    "talking_heads": (True, {"attn_pre_talking_heads": True, "attn_post_talking_heads": True}),
    "sparse_topk": (True, {"attn_sparse_topk": 4}),
    "gated_values": (False, {"attn_gate_values": True}),
    "on_attention": (True, {"attn_on_attn": True}),
    "sandwich_norm": (True, {"sandwich_norm": True}),
    "macaron": (True, {"macaron": True}),
    "residual_attention": (True, {"residual_attn": True}),
    "residual_attention_causal": (False, {"residual_attn": True}),
    "shift_tokens": (False, {"shift_tokens": 1}),
    "value_residual": (False, {"learned_value_residual_mix": True, "add_value_residual": True}),
    "softclamp": (False, {"attn_softclamp_logits": True}),
    "data_dependent_alibi": (False, {"attn_data_dependent_alibi": True}),
    "laser": (False, {"attn_qk_norm": True, "attn_laser": True}),
    "selective": (False, {"attn_selective": True}),
    "sigmoid": (False, {"attn_sigmoid": True}),
    "head_scale": (True, {"attn_head_scale": True, "ff_relu_squared": True}),
}


def make(both_ways: bool, options: dict[str, Any], _: str) -> tuple[Any, dict[str, Any]]:
    """A model of tokens and a padding mask; two sequences of 12 tokens, the second one shorter."""
    import torch
    from x_transformers import Decoder, Encoder, TransformerWrapper

    layers = (Encoder if both_ways else Decoder)(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
    model = TransformerWrapper(num_tokens=99, max_seq_len=64, attn_layers=layers)

    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: Any, mask: Any) -> Any:
            return self.model(tokens, mask=mask)

    tokens = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, 9:] = False
    return by_position(Masked()), {"tokens": tokens, "mask": mask}


AXES = {name: {0: "batch", 1: "sequence"} for name in ("tokens", "mask")}
ROWS = [
    Row("x_transformers", name, functools.partial(make, both_ways, options), AXES)
    for name, (both_ways, options) in TABLE.items()
]
