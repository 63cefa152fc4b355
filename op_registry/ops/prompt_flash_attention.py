"""PromptFlashAttention: attention of a whole prompt (prefill)."""

from fa_compiler.op_registry.macros import REG_OP

HALFS = "DT_FLOAT16, DT_BF16"
HALFS_INT8 = "DT_FLOAT16, DT_BF16, DT_INT8"
OLD = "DT_FLOAT16, DT_FLOAT32"

FIRST = (
    REG_OP(
        "PromptFlashAttention",
        "first_public",
        source="first public operator header of CANN",
        note="the source gives the name padding_mask only: all else is as in experiment_ops",
    )
    .INPUT("query", OLD)
    .INPUT("key", OLD)
    .INPUT("value", OLD)
    .OPTIONAL_INPUT("padding_mask", OLD)
    .OPTIONAL_INPUT("atten_mask", OLD)
    .OPTIONAL_INPUT("actual_seq_lengths", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("actual_seq_lengths_kv", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("deq_scale1", "DT_UINT64")
    .OPTIONAL_INPUT("quant_scale1", "DT_FLOAT32")
    .OPTIONAL_INPUT("deq_scale2", "DT_UINT64")
    .OPTIONAL_INPUT("quant_scale2", "DT_FLOAT32")
    .OPTIONAL_INPUT("quant_offset2", "DT_FLOAT32")
    .OUTPUT("attention_out", OLD)
    .REQUIRED_ATTR("num_heads", "Int")
    .ATTR("scale_value", "Float", 1.0)
    .ATTR("pre_tokens", "Int", 214748647)
    .ATTR("next_tokens", "Int", 0)
    .ATTR("input_layout", "String", "BSH")
    .ATTR("num_key_value_heads", "Int", 1)
    .ATTR("sparse_mode", "Int", 0)
    .ATTR("inner_precise", "Int", 1)
)

EXPERIMENT = (
    FIRST.then("experiment_ops", source="Ascend/torchair experiment_ops.h:1893")
    .DROP("padding_mask")
    .OPTIONAL_INPUT("pse_shift", OLD)
    .INPUT_ORDER(
        "query key value pse_shift atten_mask actual_seq_lengths actual_seq_lengths_kv deq_scale1 quant_scale1 "
        "deq_scale2 quant_scale2 quant_offset2"
    )
)

CURRENT = (
    EXPERIMENT.then(
        "opdef_2025_12",
        source="yuanfang-chen/ops-transformer@b1498789 "
        "attention/prompt_flash_attention/op_graph/prompt_flash_attention_proto.h; "
        "cannmirror/ops-transformer 05c401f9 (2025-12-31) "
        "attention/prompt_flash_attention/op_host/prompt_flash_attention_def.cpp",
        cann="8.5.0-beta.1",
    )
    .INPUT("query", HALFS_INT8)
    .INPUT("key", HALFS_INT8)
    .INPUT("value", HALFS_INT8)
    .OPTIONAL_INPUT("pse_shift", HALFS)
    .OPTIONAL_INPUT("atten_mask", "DT_FLOAT16, DT_BOOL, DT_INT8, DT_UINT8")
    .OPTIONAL_INPUT("deq_scale1", "DT_UINT64, DT_FLOAT32")
    .OPTIONAL_INPUT("deq_scale2", "DT_UINT64, DT_FLOAT32")
    .OPTIONAL_INPUT("quant_scale2", "DT_FLOAT32, DT_BF16")
    .OPTIONAL_INPUT("quant_offset2", "DT_FLOAT32, DT_BF16")
    .OUTPUT("attention_out", "DT_FLOAT16, DT_INT8, DT_BF16")
    .ATTR("pre_tokens", "Int", 214748647, note="a typing error for 2147483647 that every header registers")
    .ATTR("num_key_value_heads", "Int", 0)
    .PRODUCT(
        "ascend910b ascend910_93 mc62cm12a ascend910_95",
        """
        query=key=value  pse_shift  atten_mask  deq_scale1=deq_scale2  quant_scale2=quant_offset2  attention_out
        FLOAT16  FLOAT16  FLOAT16  UINT64  FLOAT  FLOAT16
        FLOAT16  FLOAT16  BOOL     UINT64  FLOAT  INT8
        BF16     BF16     BOOL     UINT64  FLOAT  BF16
        INT8     FLOAT16  BOOL     UINT64  FLOAT  FLOAT16
        INT8     FLOAT16  BOOL     UINT64  FLOAT  INT8
        BF16     BF16     INT8     UINT64  FLOAT  BF16
        INT8     FLOAT16  INT8     UINT64  FLOAT  FLOAT16
        INT8     FLOAT16  INT8     UINT64  FLOAT  INT8
        BF16     BF16     UINT8    UINT64  FLOAT  BF16
        INT8     FLOAT16  UINT8    UINT64  FLOAT  FLOAT16
        INT8     FLOAT16  UINT8    UINT64  FLOAT  INT8
        FLOAT16  FLOAT16  BOOL     UINT64  FLOAT  FLOAT16
        FLOAT16  FLOAT16  INT8     UINT64  FLOAT  FLOAT16
        FLOAT16  FLOAT16  UINT8    UINT64  FLOAT  FLOAT16
        FLOAT16  FLOAT16  FLOAT16  FLOAT   FLOAT  FLOAT16
        FLOAT16  FLOAT16  BOOL     FLOAT   FLOAT  INT8
        BF16     BF16     BOOL     FLOAT   FLOAT  BF16
        INT8     FLOAT16  BOOL     FLOAT   FLOAT  FLOAT16
        INT8     FLOAT16  BOOL     FLOAT   FLOAT  INT8
        BF16     BF16     INT8     FLOAT   FLOAT  BF16
        INT8     FLOAT16  INT8     FLOAT   FLOAT  FLOAT16
        INT8     FLOAT16  INT8     FLOAT   FLOAT  INT8
        BF16     BF16     UINT8    FLOAT   FLOAT  BF16
        INT8     FLOAT16  UINT8    FLOAT   FLOAT  FLOAT16
        INT8     FLOAT16  UINT8    FLOAT   FLOAT  INT8
        FLOAT16  FLOAT16  BOOL     FLOAT   FLOAT  FLOAT16
        FLOAT16  FLOAT16  INT8     FLOAT   FLOAT  FLOAT16
        FLOAT16  FLOAT16  UINT8    FLOAT   FLOAT  FLOAT16
        BF16     BF16     BOOL     UINT64  FLOAT  INT8
        BF16     BF16     BOOL     UINT64  BF16   INT8
        FLOAT16  FLOAT16  INT8     UINT64  FLOAT  INT8
        FLOAT16  FLOAT16  UINT8    FLOAT   FLOAT  INT8
        """,
    )
    .PRODUCT(
        "ascend310p",
        """
        query=key=value=pse_shift=attention_out  atten_mask  deq_scale1=deq_scale2  quant_scale2=quant_offset2
        FLOAT16  BOOL  UINT64  FLOAT
        """,
    )
)

VARIANTS = (FIRST.OP_END_FACTORY_REG(), EXPERIMENT.OP_END_FACTORY_REG(), CURRENT.OP_END_FACTORY_REG())
