"""RingAttentionUpdate: joins two partial attention results of ring attention."""

from fa_compiler.op_registry.macros import REG_OP

FLOATS = "DT_FLOAT16, DT_BF16, DT_FLOAT32"

CURRENT = (
    REG_OP(
        "RingAttentionUpdate",
        "opdef_2025_12",
        source="cannmirror/ops-transformer 05c401f9 (2025-12-31) "
        "attention/ring_attention_update/op_graph/ring_attention_update_proto.h; "
        "same, op_host/ring_attention_update_def.cpp",
        cann="8.5.0-beta.1",
    )
    .INPUT("prev_attn_out", FLOATS)
    .INPUT("prev_softmax_max", "DT_FLOAT32")
    .INPUT("prev_softmax_sum", "DT_FLOAT32")
    .INPUT("cur_attn_out", FLOATS)
    .INPUT("cur_softmax_max", "DT_FLOAT32")
    .INPUT("cur_softmax_sum", "DT_FLOAT32")
    .OPTIONAL_INPUT("actual_seq_qlen", "DT_INT64")
    .OUTPUT("attn_out", FLOATS)
    .OUTPUT("softmax_max", "DT_FLOAT32")
    .OUTPUT("softmax_sum", "DT_FLOAT32")
    .ATTR("input_layout", "String", "SBH")
    .ATTR("input_softmax_layout", "String", "")
    .PRODUCT(
        "ascend910b ascend910_93",
        """
        prev_attn_out=cur_attn_out=attn_out
        FLOAT
        FLOAT16
        BF16
        """,
    )
)

VARIANTS = (CURRENT.OP_END_FACTORY_REG(),)
