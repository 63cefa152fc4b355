"""The inputs, outputs and attributes that are known of operators whose definition may grow under
one version number.

ONNX Runtime adds inputs and attributes to its operators in later releases, and com.microsoft stays
at version 1. A reader that takes what it knows and drops the rest would then change results. So
whoever reads one of these operators asks `unknown_part` first, and leaves the node as it is where
something is there that nobody has looked at:

- an input or an output beyond the known ones, if it is used;
- an attribute of another name, whatever its value;
- a version of the domain above the known one.

A name is listed here when its reader computes with it, when it declines the node because of it, or
when it changes no result (`inner_precise`, `accuracy_level`). `tests/passes/ir/test_signatures.py`
compares the lists with the schemas of the installed releases of ONNX and ONNX Runtime.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.answer.options import NEWEST_OPSET
from fa_compiler.passes.ir.nodes import domain_of, is_read, opset

CONTRIB = "com.microsoft"


@dataclass(frozen=True)
class Signature:
    """The known parts of an operator, up to a version of its domain. With `variadic` the last input
    may be repeated."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: frozenset[str]
    variadic: bool = False
    version: int = 1

    @staticmethod
    def of(
        inputs: str, outputs: str, attributes: str = "", *, variadic: bool = False, version: int = 1
    ) -> Signature:
        """The signature of these names, which spaces separate."""
        names = frozenset(attributes.split())
        return Signature(tuple(inputs.split()), tuple(outputs.split()), names, variadic, version)


_CONTRIB = {
    "Attention": Signature.of(
        "input weights bias mask_index past attention_bias past_sequence_length",
        "output present",
        "do_rotary mask_filter_value num_heads past_present_share_buffer qkv_hidden_sizes rotary_embedding_dim scale "
        "unidirectional",
    ),
    "DecoderMaskedMultiHeadAttention": Signature.of(
        "query key value mask_index attention_bias past_key past_value past_sequence_length beam_width "
        "cache_indirection bias",
        "output present_key present_value qk",
        "mask_filter_value num_heads output_qk past_present_share_buffer scale",
    ),
    "CausalConvWithState": Signature.of(
        "input weight bias past_state",
        "output present_state state_update",
        "activation channels_last dilation input_channel_offset input_channels ndim state_channels_last state_length "
        "state_update_capacity state_window",
    ),
    "DynamicSparseAttention": Signature.of(
        "query key value past_key past_value auxiliary_key auxiliary_value selected_indices selected_counts seqlens_k "
        "total_sequence_length cos_cache sin_cache position_ids q_norm_weight k_norm_weight head_sink committed_length "
        "key_scale value_scale",
        "output present_key present_value validation_status",
        "attention_mode auxiliary_kv_shared do_rotary is_causal kv_num_heads local_window_size num_heads output_bf16 "
        "qk_norm_epsilon rotary_interleaved rotary_offset scale selected_kv_source smooth_softmax",
    ),
    "FusedMatMul": Signature.of("A B", "Y", "alpha transA transB transBatchA transBatchB"),
    "GatedDeltaNet": Signature.of(
        "query key value cu_seqlens decay beta initial_state a_log dt_bias capture_count state_update_active",
        "output final_state state_update",
        "beta_activation chunk_size gate_activation gate_lower_bound qk_l2_norm scale state_update_capacity "
        "update_rule",
    ),
    "GroupQueryAttention": Signature.of(
        "query key value past_key past_value seqlens_k total_sequence_length cos_cache sin_cache position_ids "
        "attention_bias head_sink k_scale v_scale q_norm_weight k_norm_weight query_seqlens",
        "output present_key present_value output_qk",
        "causal do_rotary k_norm_epsilon k_quant_type kv_cache_bit_width kv_num_heads local_window_size num_heads "
        "q_norm_epsilon qk_norm_epsilon qk_output rotary_interleaved scale sliding_window_cache smooth_softmax softcap "
        "v_quant_type",
    ),
    "LinearAttention": Signature.of(
        "query key value past_state decay beta",
        "output present_state",
        "chunk_size kv_num_heads q_num_heads scale state_window update_rule",
    ),
    "MatMulIntegerToFloat": Signature.of("A B a_scale b_scale a_zero_point b_zero_point bias", "Y"),
    "MatMulNBits": Signature.of(
        "A B scales zero_points g_idx bias",
        "Y",
        "K N accuracy_level bits block_size weight_prepacked",
    ),
    "MultiHeadAttention": Signature.of(
        "query key value bias key_padding_mask attention_bias past_key past_value past_sequence_length "
        "cache_indirection",
        "output present_key present_value qk",
        "mask_filter_value num_heads scale unidirectional",
    ),
    "PackedAttention": Signature.of(
        "input weights bias token_offset cumulative_sequence_length attention_bias",
        "output",
        "num_heads qkv_hidden_sizes scale",
    ),
    "PackedMultiHeadAttention": Signature.of(
        "query key value bias token_offset cumulative_sequence_length attention_bias",
        "output",
        "mask_filter_value num_heads scale",
    ),
    "PagedAttention": Signature.of(
        "query key value key_cache value_cache cumulative_sequence_length past_seqlens block_table cos_cache sin_cache "
        "slot_mapping head_sink q_norm_weight k_norm_weight k_scale v_scale attention_metadata",
        "output key_cache_out value_cache_out",
        "do_rotary is_causal k_cache_dtype k_quant_type kv_cache_layout kv_num_heads local_window_size num_heads "
        "qk_norm_epsilon rotary_interleaved rotary_offset scale softcap v_cache_dtype v_head_size v_quant_type",
    ),
    "QAttention": Signature.of(
        "input weight bias input_scale weight_scale mask_index input_zero_point weight_zero_point past",
        "output present",
        "do_rotary mask_filter_value num_heads past_present_share_buffer scale unidirectional",
    ),
    "QLinearAdd": Signature.of(
        "A A_scale A_zero_point B B_scale B_zero_point C_scale C_zero_point", "C"
    ),
    "QLinearMul": Signature.of(
        "A A_scale A_zero_point B B_scale B_zero_point C_scale C_zero_point", "C"
    ),
    "QLinearSoftmax": Signature.of(
        "X X_scale x_zero_point y_scale y_zero_point", "Y", "axis opset"
    ),
    "QLinearWhere": Signature.of(
        "condition X x_scale x_zero_point Y y_scale y_zero_point z_scale z_zero_point", "Z"
    ),
    "RMSNormRotary": Signature.of(
        "X scale position_ids cosine sine prefill_numerics",
        "Y normalized_fp32",
        "epsilon flatten_batch input_start input_width output_fp16 rotary_embedding_dim use_fp32_arithmetic",
    ),
    "SparsePagedAttention": Signature.of(
        "query key value key_cache value_cache cumulative_sequence_length past_seqlens block_table slot_mapping "
        "selected_indices selected_counts auxiliary_key auxiliary_value auxiliary_lengths cos_cache sin_cache "
        "head_sink q_norm_weight k_norm_weight k_scale v_scale attention_metadata",
        "output key_cache_out value_cache_out",
        "attention_mode auxiliary_cache_layout auxiliary_kv_shared do_rotary is_causal k_quant_type kv_num_heads "
        "local_window_size num_heads qk_norm_epsilon rotary_interleaved rotary_offset scale selected_kv_source softcap "
        "v_quant_type",
    ),
    "SwiGLU": Signature.of(
        "gate up", "output", "activation_alpha activation_beta limit round_activation"
    ),
    # What the sharder and the conversion to .air read besides.
    "BiasGelu": Signature.of("A B", "C"),
    "FastGelu": Signature.of("X bias", "Y"),
    "Gelu": Signature.of("X", "Y"),
    "QuickGelu": Signature.of("X", "Y", "alpha"),
    "RotaryEmbedding": Signature.of(
        "input position_ids cos_cache sin_cache",
        "output",
        "interleaved is_packed_batching num_heads rotary_embedding_dim scale",
    ),
    "SkipLayerNormalization": Signature.of(
        "input skip gamma beta bias", "output mean inv_std_var input_skip_bias_sum", "epsilon"
    ),
    "SkipSimplifiedLayerNormalization": Signature.of(
        "input skip gamma bias", "output mean inv_std_var input_skip_bias_sum", "epsilon"
    ),
    "TransposeMatMul": Signature.of("A B", "Y", "alpha transA transB"),
}
_NPU = {
    "NPUFlashAttention": Signature.of(
        "query key value real_shift padding_mask atten_mask prefix actual_seq_qlen actual_seq_kvlen",
        "attention_out",
        "head_num input_layout scale keep_prob pre_tockens next_tockens inner_precise sparse_mode "
        "gen_mask_parallel sync",
    ),
    "NPUPromptFlashAttention": Signature.of(
        "query key value pse_shift atten_mask actual_seq_lengths actual_seq_lengths_kv deq_scale1 quant_scale1 "
        "deq_scale2 quant_scale2 quant_offset2",
        "attention_out",
        "num_heads input_layout scale_value pre_tokens next_tokens num_key_value_heads sparse_mode inner_precise",
    ),
    "NPUIncreFlashAttention": Signature.of(
        "query key value pse_shift atten_mask actual_seq_lengths",
        "attention_out",
        "num_heads input_layout scale_value",
        variadic=True,
    ),
}
SIGNATURES: dict[tuple[str, str], Signature] = {
    ("", "Attention"): Signature.of(
        "Q K V attn_mask past_key past_value nonpad_kv_seqlen",
        "Y present_key present_value qk_matmul_output",
        "is_causal kv_num_heads left_window_size q_num_heads qk_matmul_output_mode right_window_size scale softcap "
        "softmax_precision",
        version=NEWEST_OPSET,
    ),
    ("", "LinearAttention"): Signature.of(
        "query key value past_state decay beta",
        "output present_state",
        "chunk_size kv_num_heads q_num_heads scale update_rule",
        version=NEWEST_OPSET,
    ),
    ("", "CausalConvWithState"): Signature.of(
        "input weight bias past_state", "output present_state", "activation", version=NEWEST_OPSET
    ),
    ("", "SwiGLU"): Signature.of("A B", "Y", "alpha", version=NEWEST_OPSET),
    ("", "Swish"): Signature.of("X", "Y", "alpha", version=NEWEST_OPSET),
    ("ai.onnx.preview", "FlexAttention"): Signature.of(
        "Q K V", "Y", "prob_mod scale score_mod softmax_precision"
    ),
    **{(CONTRIB, name): signature for name, signature in _CONTRIB.items()},
    **{("npu", name): signature for name, signature in _NPU.items()},
    **{
        ("", name): Signature(s.inputs, s.outputs, s.attributes, s.variadic, NEWEST_OPSET)
        for name, s in _NPU.items()
    },
}
"""By domain and type; the standard domain is ""."""


def unknown_part(node: ir.Node) -> str | None:
    """What is used of a node and not known, in words such as "the input 17 'rows'"; None where all
    is known.

    An operator without an entry in SIGNATURES is not examined.
    """
    domain = domain_of(node)
    known = SIGNATURES.get((domain, node.op_type))
    if known is None:
        return None
    if opset(node, domain) > known.version:
        return f"version {opset(node, domain)} of {domain or 'ai.onnx'}"
    names = sorted(set(node.attributes) - known.attributes)
    if names:
        return f"the attribute {names[0]!r}"
    further = () if known.variadic else node.inputs[len(known.inputs) :]
    for index, value in enumerate(further, len(known.inputs)):
        if value is not None:
            return f"the input {index} {value.name!r}"
    for index, output in enumerate(node.outputs[len(known.outputs) :], len(known.outputs)):
        if is_read(output):
            return f"the output {index} {output.name!r}"
    return None
