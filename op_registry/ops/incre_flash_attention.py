"""IncreFlashAttention: attention of one new token on a key-value cache (decoding)."""

from fa_compiler.op_registry.macros import REG_OP

HALFS = "DT_FLOAT16, DT_BF16"
HALFS_INT8 = "DT_FLOAT16, DT_BF16, DT_INT8"
OLD = "DT_FLOAT16, DT_BF16, DT_FLOAT32, DT_INT8"

FIRST = (
    REG_OP(
        "IncreFlashAttention",
        "first_public",
        source="first public operator header of CANN",
        note="the source gives names only: the types are those of experiment_ops",
    )
    .INPUT("query", OLD)
    .DYNAMIC_INPUT("key", OLD)
    .DYNAMIC_INPUT("value", OLD)
    .OPTIONAL_INPUT("padding_mask", HALFS)
    .OPTIONAL_INPUT("atten_mask", "DT_FLOAT16, DT_BOOL, DT_FLOAT32")
    .OPTIONAL_INPUT("actual_seq_lengths", "DT_INT64", value_depend="optional")
    .OUTPUT("attention_out", OLD)
    .REQUIRED_ATTR("num_heads", "Int")
    .ATTR("scale_value", "Float", 1.0)
    .ATTR("input_layout", "String", "BSH")
    .ATTR("num_key_value_heads", "Int", 1)
)

EXPERIMENT = (
    FIRST.then("experiment_ops", source="Ascend/torchair experiment_ops.h:1766")
    .DROP("padding_mask")
    .OPTIONAL_INPUT("pse_shift", HALFS)
    .INPUT_ORDER("query key value pse_shift atten_mask actual_seq_lengths")
    .OPTIONAL_INPUT("dequant_scale1", "DT_UINT64, DT_FLOAT32")
    .OPTIONAL_INPUT("quant_scale1", "DT_FLOAT32")
    .OPTIONAL_INPUT("dequant_scale2", "DT_UINT64, DT_FLOAT32")
    .OPTIONAL_INPUT("quant_scale2", "DT_FLOAT32")
    .OPTIONAL_INPUT("quant_offset2", "DT_FLOAT32")
    .OPTIONAL_INPUT("antiquant_scale", "DT_FLOAT16")
    .OPTIONAL_INPUT("antiquant_offset", "DT_FLOAT16")
    .OPTIONAL_INPUT("block_table", "DT_INT32")
    .OPTIONAL_INPUT("kv_padding_size", "DT_INT64")
    .ATTR("block_size", "Int", 0)
    .ATTR("inner_precise", "Int", 1)
)

CURRENT = (
    EXPERIMENT.then(
        "opdef_2025_12",
        source="yuanfang-chen/ops-transformer@8512c325 "
        "attention/incre_flash_attention/op_graph/incre_flash_attention_proto.h; "
        "cannmirror/ops-transformer 05c401f9 (2025-12-31) "
        "attention/incre_flash_attention/op_host/incre_flash_attention_def.cpp; "
        "aclnn document aclnnIncreFlashAttentionV4",
        cann="8.5.0-beta.1",
        note="the header admits INT8 queries, the operator definition does not",
    )
    .INPUT("query", HALFS_INT8)
    .DYNAMIC_INPUT("key", HALFS_INT8)
    .DYNAMIC_INPUT("value", HALFS_INT8)
    .OPTIONAL_INPUT("atten_mask", "DT_BOOL, DT_INT8, DT_UINT8")
    .OPTIONAL_INPUT("dequant_scale1", "DT_UINT64, DT_FLOAT")
    .OPTIONAL_INPUT("quant_scale1", "DT_FLOAT")
    .OPTIONAL_INPUT("dequant_scale2", "DT_UINT64, DT_FLOAT")
    .OPTIONAL_INPUT("quant_scale2", "DT_FLOAT, DT_BF16")
    .OPTIONAL_INPUT("quant_offset2", "DT_FLOAT, DT_BF16")
    .OPTIONAL_INPUT("antiquant_scale", HALFS)
    .OPTIONAL_INPUT("antiquant_offset", HALFS)
    .OUTPUT("attention_out", HALFS_INT8)
    .ATTR(
        "num_key_value_heads",
        "Int",
        1,
        meaning=0,
        note="the header says 1, the operator definition and the aclnn document 0 (as many as num_heads)",
    )
    .PRODUCT(
        "ascend910b ascend910_93 mc62cm12a ascend910_95",
        """
        query=pse_shift=antiquant_scale=antiquant_offset  key=value  atten_mask  dequant_scale1=dequant_scale2 \
        quant_scale2=quant_offset2  attention_out
        FLOAT16  FLOAT16  BOOL   UINT64  FLOAT  FLOAT16
        BF16     BF16     BOOL   UINT64  FLOAT  BF16
        FLOAT16  FLOAT16  BOOL   UINT64  FLOAT  INT8
        FLOAT16  INT8     BOOL   UINT64  FLOAT  FLOAT16
        FLOAT16  INT8     BOOL   UINT64  FLOAT  INT8
        BF16     INT8     BOOL   UINT64  FLOAT  BF16
        FLOAT16  FLOAT16  INT8   UINT64  FLOAT  FLOAT16
        BF16     BF16     INT8   UINT64  FLOAT  BF16
        FLOAT16  FLOAT16  INT8   UINT64  FLOAT  INT8
        FLOAT16  INT8     INT8   UINT64  FLOAT  FLOAT16
        FLOAT16  INT8     INT8   UINT64  FLOAT  INT8
        BF16     INT8     INT8   UINT64  FLOAT  BF16
        FLOAT16  FLOAT16  UINT8  UINT64  FLOAT  FLOAT16
        BF16     BF16     UINT8  UINT64  FLOAT  BF16
        FLOAT16  FLOAT16  UINT8  UINT64  FLOAT  INT8
        FLOAT16  INT8     UINT8  UINT64  FLOAT  FLOAT16
        FLOAT16  INT8     UINT8  UINT64  FLOAT  INT8
        BF16     INT8     UINT8  UINT64  FLOAT  BF16
        BF16     INT8     BOOL   FLOAT   BF16   INT8
        BF16     BF16     BOOL   FLOAT   BF16   INT8
        BF16     INT8     BOOL   FLOAT   FLOAT  INT8
        BF16     BF16     BOOL   FLOAT   FLOAT  INT8
        """,
    )
    .PRODUCT(
        "ascend310p",
        """
        query=pse_shift=antiquant_scale=antiquant_offset=attention_out  key=value  atten_mask \
        dequant_scale1=dequant_scale2  quant_scale2=quant_offset2
        FLOAT16  FLOAT16  FLOAT16  UINT64  FLOAT
        FLOAT16  FLOAT16  BOOL     UINT64  FLOAT
        FLOAT16  INT8     BOOL     UINT64  FLOAT
        """,
    )
)

VARIANTS = (FIRST.OP_END_FACTORY_REG(), EXPERIMENT.OP_END_FACTORY_REG(), CURRENT.OP_END_FACTORY_REG())
