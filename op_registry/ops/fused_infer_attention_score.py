"""FusedInferAttentionScore: inference attention, prefill and decoding in one operator."""

from fa_compiler.op_registry.macros import REG_OP

INT8_HALFS = "DT_INT8, DT_FLOAT16, DT_BF16"
HALFS = "DT_FLOAT16, DT_BF16"
HALFS_INT8 = "DT_FLOAT16, DT_BF16, DT_INT8"
HALFS_INT8_4 = "DT_FLOAT16, DT_BF16, DT_INT8, DT_INT4"
FLOATS = "DT_FLOAT16, DT_BF16, DT_FLOAT"
FLOATS32 = "DT_FLOAT16, DT_BF16, DT_FLOAT32"
FLOAT_BF16 = "DT_FLOAT, DT_BF16"
INT8_TO_FP8 = f"{INT8_HALFS}, DT_HIFLOAT8, DT_FLOAT8_E5M2, DT_FLOAT8_E4M3FN"
INT8_TO_FP4 = f"{INT8_TO_FP8}, DT_FLOAT4_E2M1, DT_FLOAT4_E1M2, DT_INT4"
ON_950 = f"{HALFS_INT8}, DT_HIFLOAT8, DT_FLOAT8_E4M3FN"
ON_950_KV = f"{HALFS_INT8_4}, DT_HIFLOAT8, DT_FLOAT8_E4M3FN, DT_FLOAT4_E2M1, DT_FLOAT4_E1M2"
ON_950_SCALE = f"{FLOATS}, DT_FLOAT8_E8M0"

CANN_8X = (
    REG_OP(
        "FusedInferAttentionScore",
        "cann_8x_header",
        source="built-in operator header of CANN 8.x",
        cann="8.0",
        note="the source gives names and counts: types and defaults are those of experiment_ops",
    )
    .INPUT("query", INT8_HALFS)
    .DYNAMIC_INPUT("key", INT8_HALFS)
    .DYNAMIC_INPUT("value", INT8_HALFS)
    .OPTIONAL_INPUT("pse_shift", HALFS)
    .OPTIONAL_INPUT("atten_mask", "DT_FLOAT16, DT_BOOL, DT_UINT8, DT_INT8")
    .OPTIONAL_INPUT("actual_seq_lengths", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("actual_seq_lengths_kv", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("dequant_scale1", "DT_UINT64")
    .OPTIONAL_INPUT("quant_scale1", "DT_FLOAT")
    .OPTIONAL_INPUT("dequant_scale2", "DT_UINT64")
    .OPTIONAL_INPUT("quant_scale2", FLOAT_BF16)
    .OPTIONAL_INPUT("quant_offset2", FLOAT_BF16)
    .OPTIONAL_INPUT("antiquant_scale", FLOATS)
    .OPTIONAL_INPUT("antiquant_offset", FLOATS)
    .OPTIONAL_INPUT("block_table", "DT_INT32")
    .OPTIONAL_INPUT("query_padding_size", "DT_INT64")
    .OPTIONAL_INPUT("kv_padding_size", "DT_INT64")
    .OPTIONAL_INPUT("key_antiquant_scale", FLOATS)
    .OPTIONAL_INPUT("key_antiquant_offset", FLOATS)
    .OPTIONAL_INPUT("value_antiquant_scale", FLOATS)
    .OPTIONAL_INPUT("value_antiquant_offset", FLOATS)
    .OPTIONAL_INPUT("key_shared_prefix", INT8_HALFS)
    .OPTIONAL_INPUT("value_shared_prefix", INT8_HALFS)
    .OPTIONAL_INPUT("actual_shared_prefix_len", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("query_rope", INT8_HALFS)
    .OPTIONAL_INPUT("key_rope", INT8_HALFS)
    .OPTIONAL_INPUT("key_rope_antiquant_scale", INT8_HALFS)
    .OUTPUT("attention_out", "DT_FLOAT16, DT_FLOAT, DT_INT8, DT_BF16")
    .OUTPUT("softmax_lse", "DT_FLOAT16, DT_FLOAT, DT_BF16")
    .REQUIRED_ATTR("num_heads", "Int")
    .ATTR("scale", "Float", 1.0)
    .ATTR("pre_tokens", "Int", 2147483647)
    .ATTR("next_tokens", "Int", 2147483647)
    .ATTR("input_layout", "String", "BSH")
    .ATTR("num_key_value_heads", "Int", 0)
    .ATTR("sparse_mode", "Int", 0)
    .ATTR("inner_precise", "Int", 0)
    .ATTR("block_size", "Int", 0)
    .ATTR("antiquant_mode", "Int", 0)
    .ATTR("softmax_lse_flag", "Bool", False)
    .ATTR("key_antiquant_mode", "Int", 0)
    .ATTR("value_antiquant_mode", "Int", 0)
)

EXPERIMENT = (
    CANN_8X.then("experiment_ops", source="Ascend/torchair experiment_ops.h:3911 (2026-06)")
    .OPTIONAL_INPUT("dequant_scale_query", "DT_FLOAT")
    .OPTIONAL_INPUT("learnable_sink", "DT_BF16")
    .OPTIONAL_INPUT("q_start_idx", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("kv_start_idx", "DT_INT64", value_depend="optional")
    .ATTR("query_quant_mode", "Int", 0)
    .ATTR("pse_type", "Int", 0)
    .ATTR("out_dtype", "Int", 0)
)

CURRENT = (
    EXPERIMENT.then(
        "opdef_2025_12",
        source="cannmirror/ops-transformer 05c401f9 (2025-12-31) "
        "attention/fused_infer_attention_score/op_host/fused_infer_attention_score_def.cpp; "
        "CANN header attention/fused_infer_attention_score/op_graph/fused_infer_attention_score_proto.h (2026)",
        cann="8.5.0-beta.1",
    )
    .INPUT("query", INT8_TO_FP8)
    .DYNAMIC_INPUT("key", INT8_TO_FP4)
    .DYNAMIC_INPUT("value", INT8_TO_FP4)
    .OPTIONAL_INPUT("dequant_scale1", "DT_UINT64, DT_FLOAT")
    .OPTIONAL_INPUT("quant_scale1", "DT_FLOAT32")
    .OPTIONAL_INPUT("dequant_scale2", "DT_UINT64, DT_FLOAT")
    .OPTIONAL_INPUT("quant_scale2", "DT_FLOAT32, DT_BF16")
    .OPTIONAL_INPUT("quant_offset2", "DT_FLOAT32, DT_BF16")
    .OPTIONAL_INPUT("antiquant_scale", FLOATS32)
    .OPTIONAL_INPUT("antiquant_offset", FLOATS32)
    .OPTIONAL_INPUT("key_antiquant_scale", FLOATS32)
    .OPTIONAL_INPUT("key_antiquant_offset", FLOATS32)
    .OPTIONAL_INPUT("value_antiquant_scale", FLOATS32)
    .OPTIONAL_INPUT("value_antiquant_offset", FLOATS32)
    .OPTIONAL_INPUT("key_rope_antiquant_scale", HALFS)
    .OPTIONAL_INPUT("dequant_scale_query", "DT_FLOAT32")
    .OUTPUT("attention_out", HALFS_INT8)
    .OUTPUT("softmax_lse", "DT_FLOAT")
    .ATTR("inner_precise", "Int", 1, note="0 in torchair's experiment_ops.h")
    .PRODUCT(
        "ascend910b ascend910_93",
        types={
            "query": HALFS_INT8,
            "key": HALFS_INT8_4,
            "value": HALFS_INT8_4,
            "quant_scale2": "DT_FLOAT, DT_BF16, DT_FLOAT16",
            "quant_offset2": "DT_FLOAT, DT_BF16, DT_FLOAT16",
            "key_shared_prefix": "DT_FLOAT16, DT_BF16, DT_INT8, DT_FLOAT, DT_INT4",
            "value_shared_prefix": "DT_FLOAT16, DT_BF16, DT_INT8, DT_FLOAT, DT_INT4",
            "query_rope": HALFS_INT8,
            "key_rope": HALFS_INT8_4,
            "key_rope_antiquant_scale": FLOATS,
        },
        note="69 combinations, not listed here",
    )
    .PRODUCT(
        "ascend910_95",
        types={
            "query": ON_950,
            "key": ON_950_KV,
            "value": ON_950_KV,
            "pse_shift": FLOATS,
            "quant_scale2": "DT_FLOAT, DT_BF16, DT_FLOAT16",
            "quant_offset2": "DT_FLOAT, DT_BF16, DT_FLOAT16",
            "antiquant_scale": ON_950_SCALE,
            "antiquant_offset": ON_950_SCALE,
            "key_antiquant_scale": ON_950_SCALE,
            "key_antiquant_offset": ON_950_SCALE,
            "value_antiquant_scale": ON_950_SCALE,
            "value_antiquant_offset": ON_950_SCALE,
            "key_shared_prefix": f"{ON_950_KV}, DT_FLOAT",
            "value_shared_prefix": f"{ON_950_KV}, DT_FLOAT",
            "query_rope": ON_950,
            "key_rope": ON_950_KV,
            "key_rope_antiquant_scale": ON_950_SCALE,
            "attention_out": ON_950,
        },
        note="291 combinations, not listed here",
    )
)

VARIANTS = (CANN_8X.OP_END_FACTORY_REG(), EXPERIMENT.OP_END_FACTORY_REG(), CURRENT.OP_END_FACTORY_REG())
