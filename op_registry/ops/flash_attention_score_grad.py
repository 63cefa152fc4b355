"""FlashAttentionScoreGrad: the backward pass of FlashAttentionScore."""

from fa_compiler.op_registry.macros import REG_OP

FLOATS = "DT_FLOAT16, DT_BF16, DT_FLOAT32"
FLOATS_OLD = "DT_FLOAT16, DT_FLOAT32, DT_BF16"
FLOATS_FP8 = "DT_FLOAT8_E5M2, DT_FLOAT8_E4M3FN, DT_FLOAT16, DT_BF16, DT_FLOAT32"

OLDEST = (
    REG_OP(
        "FlashAttentionScoreGrad",
        "experiment_ops_oldest",
        source="Ascend/torchair third_party/ascend/include/ops/op_proto/inc/experiment_ops.h:1644",
    )
    .INPUT("query", FLOATS_OLD)
    .INPUT("key", FLOATS_OLD)
    .INPUT("value", FLOATS_OLD)
    .INPUT("dy", FLOATS_OLD)
    .OPTIONAL_INPUT("pse_shift", FLOATS_OLD)
    .OPTIONAL_INPUT("drop_mask", "DT_UINT8")
    .OPTIONAL_INPUT("padding_mask", FLOATS_OLD)
    .OPTIONAL_INPUT("atten_mask", FLOATS_OLD)
    .OPTIONAL_INPUT("softmax_max", "DT_FLOAT32")
    .OPTIONAL_INPUT("softmax_sum", "DT_FLOAT32")
    .OPTIONAL_INPUT("softmax_in", FLOATS_OLD)
    .OPTIONAL_INPUT("attention_in", FLOATS_OLD)
    .OUTPUT("dq", FLOATS_OLD)
    .OUTPUT("dk", FLOATS_OLD)
    .OUTPUT("dv", FLOATS_OLD)
    .OUTPUT("dpse", FLOATS_OLD)
    .ATTR("scale_value", "Float", 1.0)
    .ATTR("keep_prob", "Float", 1.0)
    .ATTR("pre_tockens", "Int", 65536)
    .ATTR("next_tockens", "Int", 65536)
    .REQUIRED_ATTR("head_num", "Int")
    .REQUIRED_ATTR("input_layout", "String")
)

RAW_OPS = (
    OLDEST.then(
        "torchair_raw_ops",
        source="Ascend/torchair python/torchair/_ge_concrete_graph/auto_generated_ge_raw_ops.py:18394",
        note="the source is Python and gives no types: they are those of cann_8x_header",
    )
    .INPUT("query", FLOATS)
    .INPUT("key", FLOATS)
    .INPUT("value", FLOATS)
    .INPUT("dy", FLOATS)
    .OPTIONAL_INPUT("pse_shift", FLOATS)
    .OPTIONAL_INPUT("padding_mask", FLOATS)
    .OPTIONAL_INPUT("atten_mask", "DT_BOOL, DT_UINT8")
    .OPTIONAL_INPUT("softmax_in", FLOATS)
    .OPTIONAL_INPUT("attention_in", FLOATS)
    .OPTIONAL_INPUT("prefix", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("actual_seq_qlen", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("actual_seq_kvlen", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("q_start_idx", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("kv_start_idx", "DT_INT64", value_depend="optional")
    .OUTPUT("dq", FLOATS)
    .OUTPUT("dk", FLOATS)
    .OUTPUT("dv", FLOATS)
    .OUTPUT("dpse", FLOATS)
    .ATTR("inner_precise", "Int", 1)
    .ATTR("sparse_mode", "Int", 0)
)

CANN_8X = (
    RAW_OPS.then("cann_8x_header", source="built-in operator header of CANN 8.x", cann="8.0")
    .ATTR("pre_tockens", "Int", 2147483647)
    .ATTR("next_tockens", "Int", 2147483647)
    .ATTR("inner_precise", "Int", 0)
    .ATTR("pse_type", "Int", 1)
)

OPDEF_2025_11 = (
    CANN_8X.then(
        "opdef_2025_11",
        source="hicann/ops-transformer attention/flash_attention_score_grad/op_host/flash_attention_score_grad_def.cpp",
        cann="8.5.0-alpha",
        note="the types are those of the 2026 header",
    )
    .INPUT("query", FLOATS_FP8)
    .INPUT("key", FLOATS_FP8)
    .INPUT("value", FLOATS_FP8)
    .INPUT("dy", FLOATS_FP8)
    .OPTIONAL_INPUT("attention_in", FLOATS_FP8)
    .OPTIONAL_INPUT("d_scale_q", "DT_FLOAT32")
    .OPTIONAL_INPUT("d_scale_k", "DT_FLOAT32")
    .OPTIONAL_INPUT("d_scale_v", "DT_FLOAT32")
    .OPTIONAL_INPUT("d_scale_dy", "DT_FLOAT32")
    .OPTIONAL_INPUT("d_scale_o", "DT_FLOAT32")
    .OPTIONAL_INPUT("query_rope", FLOATS_FP8)
    .OPTIONAL_INPUT("key_rope", FLOATS_FP8)
    .OUTPUT("dq_rope", FLOATS)
    .OUTPUT("dk_rope", FLOATS)
    .ATTR("seed", "Int", 0)
    .ATTR("offset", "Int", 0)
    .ATTR("out_dtype", "Int", 0)
    .ATTR("softmax_in_layout", "String", "")
)

OPDEF_2025_12 = (
    OPDEF_2025_11.then(
        "opdef_2025_12",
        source="cannmirror/ops-transformer 05c401f9 (2025-12-31) "
        "attention/flash_attention_score_grad/op_host/flash_attention_score_grad_def.cpp",
        cann="8.5.0-beta.1",
        note="dq_rope, dk_rope and dsink are required outputs in the default block, optional on 910b and 910_93",
    )
    .OPTIONAL_INPUT("sink", "DT_FLOAT32")
    .OUTPUT("dsink", "DT_FLOAT32")
    .ATTR("seed", "Int", 2)
)

PROTO_2026 = (
    OPDEF_2025_12.then(
        "proto_2026",
        source="yuanfang-chen/ops-transformer@82a2f876 "
        "attention/flash_attention_score_grad/op_graph/flash_attention_score_grad_proto.h; "
        "CANN operator document Ascendir_FlashAttentionScoreGrad.md; "
        "products: the operator definition of opdef_2025_12",
        cann="9.0",
        note="backs aclnnFlashAttentionScoreGrad V1 to V3 and aclnnFlashAttentionUnpaddingScoreGrad V1 to V5",
    )
    .OPTIONAL_INPUT("ds_scale", "DT_FLOAT32")
    .OPTIONAL_INPUT("p_scale", "DT_FLOAT32")
    .ATTR("seed", "Int", 0, note="the operator definition of 2025-12 says 2, every header 0")
    .PRODUCT(
        "ascend910b ascend910_93",
        """
        query=key=value=dy=padding_mask=softmax_in=attention_in=query_rope=key_rope=dq=dk=dv=dpse=dq_rope=dk_rope \
        pse_shift  atten_mask
        FLOAT16  FLOAT16  UINT8
        BF16     BF16     UINT8
        FLOAT16  FLOAT16  BOOL
        BF16     BF16     BOOL
        FLOAT16  FLOAT    UINT8
        BF16     FLOAT    UINT8
        FLOAT16  FLOAT    BOOL
        BF16     FLOAT    BOOL
        FLOAT    FLOAT    BOOL
        """,
        note="float32 with a UINT8 atten_mask is not registered here",
    )
    .PRODUCT(
        "ascend910_95",
        """
        query=key=value=dy=query_rope=key_rope  pse_shift \
        padding_mask=softmax_in=attention_in=dq=dk=dv=dpse=dq_rope=dk_rope  atten_mask
        FLOAT16        FLOAT16  FLOAT16  UINT8
        BF16           BF16     BF16     UINT8
        FLOAT16        FLOAT16  FLOAT16  BOOL
        BF16           BF16     BF16     BOOL
        FLOAT16        FLOAT    FLOAT16  UINT8
        BF16           FLOAT    BF16     UINT8
        FLOAT16        FLOAT    FLOAT16  BOOL
        BF16           FLOAT    BF16     BOOL
        FLOAT          FLOAT    FLOAT    UINT8
        FLOAT          FLOAT    FLOAT    BOOL
        HIFLOAT8       FLOAT16  FLOAT16  UINT8
        HIFLOAT8       BF16     BF16     BOOL
        FLOAT8_E5M2    FLOAT16  FLOAT16  UINT8
        FLOAT8_E5M2    BF16     BF16     BOOL
        FLOAT8_E4M3FN  FLOAT16  FLOAT16  UINT8
        FLOAT8_E4M3FN  BF16     BF16     BOOL
        HIFLOAT8       FLOAT16  FLOAT16  BOOL
        HIFLOAT8       BF16     BF16     UINT8
        FLOAT8_E5M2    FLOAT16  FLOAT16  BOOL
        FLOAT8_E5M2    BF16     BF16     UINT8
        FLOAT8_E4M3FN  FLOAT16  FLOAT16  BOOL
        FLOAT8_E4M3FN  BF16     BF16     UINT8
        """,
    )
)

VARIANTS = (
    OLDEST.OP_END_FACTORY_REG(),
    RAW_OPS.OP_END_FACTORY_REG(),
    CANN_8X.OP_END_FACTORY_REG(),
    OPDEF_2025_11.OP_END_FACTORY_REG(),
    OPDEF_2025_12.OP_END_FACTORY_REG(),
    PROTO_2026.OP_END_FACTORY_REG(),
)
