"""FlashAttentionScore: the training forward pass of attention."""

from fa_compiler.op_registry.macros import REG_OP

FLOATS = "DT_FLOAT16, DT_BF16, DT_FLOAT32"
FLOATS_OLD = "DT_FLOAT16, DT_FLOAT32, DT_BF16"
FLOATS_FP8 = "DT_FLOAT8_E5M2, DT_FLOAT8_E4M3FN, DT_FLOAT16, DT_BF16, DT_FLOAT32"

OLDEST = (
    REG_OP(
        "FlashAttentionScore",
        "experiment_ops_oldest",
        source="Ascend/torchair third_party/ascend/include/ops/op_proto/inc/experiment_ops.h:1585",
        note="atten_mask is a float tensor that is added, is_flash chooses the implementation",
    )
    .INPUT("query", FLOATS_OLD)
    .INPUT("key", FLOATS_OLD)
    .INPUT("value", FLOATS_OLD)
    .OPTIONAL_INPUT("real_shift", FLOATS_OLD)
    .OPTIONAL_INPUT("drop_mask", "DT_UINT1, DT_UINT8")
    .OPTIONAL_INPUT("padding_mask", FLOATS_OLD)
    .OPTIONAL_INPUT("atten_mask", FLOATS_OLD)
    .OUTPUT("softmax_max", "DT_FLOAT32")
    .OUTPUT("softmax_sum", "DT_FLOAT32")
    .OUTPUT("softmax_out", FLOATS_OLD)
    .OUTPUT("attention_out", FLOATS_OLD)
    .ATTR("scale_value", "Float", 1.0)
    .ATTR("keep_prob", "Float", 1.0)
    .ATTR("pre_tockens", "Int", 2147483647)
    .ATTR("next_tockens", "Int", 2147483647)
    .REQUIRED_ATTR("head_num", "Int")
    .REQUIRED_ATTR("is_flash", "Bool")
    .REQUIRED_ATTR("input_layout", "String")
)

RAW_OPS = (
    OLDEST.then(
        "torchair_raw_ops",
        source="Ascend/torchair python/torchair/_ge_concrete_graph/auto_generated_ge_raw_ops.py:18244",
        note="the source is Python and gives no types: they are those of seed_v2_cann8",
    )
    .DROP("is_flash")
    .INPUT("query", FLOATS)
    .INPUT("key", FLOATS)
    .INPUT("value", FLOATS)
    .OPTIONAL_INPUT("real_shift", FLOATS)
    .OPTIONAL_INPUT("drop_mask", "DT_UINT8")
    .OPTIONAL_INPUT("padding_mask", FLOATS)
    .OPTIONAL_INPUT("atten_mask", "DT_BOOL, DT_UINT8")
    .OPTIONAL_INPUT("prefix", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("actual_seq_qlen", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("actual_seq_kvlen", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("q_start_idx", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("kv_start_idx", "DT_INT64", value_depend="optional")
    .OUTPUT("softmax_out", FLOATS)
    .OUTPUT("attention_out", FLOATS)
    .ATTR("inner_precise", "Int", 1)
    .ATTR("sparse_mode", "Int", 0)
)

SEED_V2 = (
    RAW_OPS.then("seed_v2_cann8", source="operator document FlashAttentionScoreV2, its REG_OP", cann="8.0")
    .ATTR("inner_precise", "Int", 0)
    .ATTR("pse_type", "Int", 1)
)

OPDEF_2025_11 = (
    SEED_V2.then(
        "opdef_2025_11",
        source="hicann/ops-transformer attention/flash_attention_score/op_host/flash_attention_score_def.cpp",
        cann="8.5.0-alpha",
        note="the file registers no attributes and no header of that time is known: the new attributes and the "
        "types are those of the 2026 header",
    )
    .INPUT("query", FLOATS_FP8)
    .INPUT("key", FLOATS_FP8)
    .INPUT("value", FLOATS_FP8)
    .OPTIONAL_INPUT("d_scale_q", "DT_FLOAT32")
    .OPTIONAL_INPUT("d_scale_k", "DT_FLOAT32")
    .OPTIONAL_INPUT("d_scale_v", "DT_FLOAT32")
    .OPTIONAL_INPUT("query_rope", FLOATS_FP8)
    .OPTIONAL_INPUT("key_rope", FLOATS_FP8)
    .ATTR("seed", "Int", 0)
    .ATTR("offset", "Int", 0)
    .ATTR("out_dtype", "Int", 0)
    .ATTR("softmax_out_layout", "String", "")
)

OPDEF_2025_12 = OPDEF_2025_11.then(
    "opdef_2025_12",
    source="cannmirror/ops-transformer 05c401f9 (2025-12-31) "
    "attention/flash_attention_score/op_host/flash_attention_score_def.cpp",
    cann="8.5.0-beta.1",
).OPTIONAL_INPUT("sink", "DT_FLOAT32")

CONFLICT = (
    OPDEF_2025_11.then(
        "intermediate_proto_conflict",
        source="yuanfang-chen/ops-transformer@0f9bde41 "
        "attention/flash_attention_score/op_graph/flash_attention_score_proto.h",
        note="a header that put p_scale before the rope inputs: why inputs are bound by name, never by position",
    )
    .OPTIONAL_INPUT("p_scale", "DT_FLOAT32")
    .INPUT_ORDER(
        "query key value real_shift drop_mask padding_mask atten_mask prefix actual_seq_qlen actual_seq_kvlen "
        "q_start_idx kv_start_idx d_scale_q d_scale_k d_scale_v p_scale query_rope key_rope"
    )
)

PROTO_2026 = (
    OPDEF_2025_12.then(
        "proto_2026",
        source="recursion-ascend/ops-transformer@a093e954 "
        "attention/flash_attention_score/op_graph/flash_attention_score_proto.h; "
        "CANN operator document Ascendir_FlashAttentionScore.md; "
        "products: the operator definition of opdef_2025_12",
        cann="9.0",
    )
    .OPTIONAL_INPUT("p_scale", "DT_FLOAT32")
    .PRODUCT(
        "ascend910b ascend910_93",
        """
        query=key=value=padding_mask=softmax_out=attention_out  real_shift  atten_mask  query_rope=key_rope
        FLOAT16  FLOAT16  UINT8  FLOAT
        BF16     BF16     UINT8  FLOAT
        FLOAT16  FLOAT16  BOOL   FLOAT
        BF16     BF16     BOOL   FLOAT
        FLOAT16  FLOAT    UINT8  FLOAT
        BF16     FLOAT    UINT8  FLOAT
        FLOAT16  FLOAT    BOOL   FLOAT
        BF16     FLOAT    BOOL   FLOAT
        FLOAT    FLOAT    UINT8  FLOAT
        FLOAT    FLOAT    BOOL   FLOAT
        """,
        unchecked="query_rope key_rope",
        note="the rope inputs are registered as FLOAT here although the kernels take the type of query",
    )
    .PRODUCT(
        "ascend910_95",
        """
        query=key=value=query_rope=key_rope  real_shift  padding_mask=softmax_out=attention_out  atten_mask
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
        note="HIFLOAT8 is in the operator definition only, not in the header",
    )
)

VARIANTS = (
    OLDEST.OP_END_FACTORY_REG(),
    RAW_OPS.OP_END_FACTORY_REG(),
    SEED_V2.OP_END_FACTORY_REG(),
    OPDEF_2025_11.OP_END_FACTORY_REG(),
    OPDEF_2025_12.OP_END_FACTORY_REG(),
    CONFLICT.OP_END_FACTORY_REG(),
    PROTO_2026.OP_END_FACTORY_REG(),
)
