"""SparseFlashAttention: attention on the keys a LightningIndexer selected."""

from fa_compiler.op_registry.macros import REG_OP

HALFS = "DT_FLOAT16, DT_BF16"

OPDEF_2025_12 = (
    REG_OP(
        "SparseFlashAttention",
        "opdef_2025_12",
        source="cannmirror/ops-transformer 05c401f9 (2025-12-31) "
        "attention/sparse_flash_attention/op_host/sparse_flash_attention_def.cpp; "
        "Ascend/torchair python/torchair/_ge_concrete_graph/ge_converter/custom/sparse_flash_attention.py",
        cann="8.5.0-beta.1",
    )
    .INPUT("query", HALFS)
    .INPUT("key", HALFS)
    .INPUT("value", HALFS)
    .INPUT("sparse_indices", "DT_INT32")
    .OPTIONAL_INPUT("block_table", "DT_INT32")
    .OPTIONAL_INPUT("actual_seq_lengths_query", "DT_INT32")
    .OPTIONAL_INPUT("actual_seq_lengths_kv", "DT_INT32")
    .OPTIONAL_INPUT("query_rope", HALFS)
    .OPTIONAL_INPUT("key_rope", HALFS)
    .OUTPUT("attention_out", HALFS)
    .OUTPUT("softmax_max", "DT_FLOAT")
    .OUTPUT("softmax_sum", "DT_FLOAT")
    .REQUIRED_ATTR("scale_value", "Float")
    .ATTR("sparse_block_size", "Int", 1)
    .ATTR("layout_query", "String", "BSND")
    .ATTR("layout_kv", "String", "BSND")
    .ATTR("sparse_mode", "Int", 3)
    .ATTR("pre_tokens", "Int", 9223372036854775807)
    .ATTR("next_tokens", "Int", 9223372036854775807)
    .ATTR("attention_mode", "Int", 0, note="tiling accepts only 2: always write it")
    .ATTR("return_softmax_lse", "Bool", False)
)

PROTO_2026 = (
    OPDEF_2025_12.then(
        "proto_2026",
        source="hicann/ops-transformer@2784ddc6 "
        "attention/sparse_flash_attention/op_graph/sparse_flash_attention_proto.h; "
        "products: the operator definition of opdef_2025_12, and Ascend 950 as the constraints list says",
        cann="9.0",
        note="sinks is for Ascend 950 only; softmax_max and softmax_sum are required outputs in any case",
    )
    .OPTIONAL_INPUT("sinks", "DT_FLOAT")
    .PRODUCT(
        "ascend910b ascend910_93",
        """
        query=key=value=query_rope=key_rope=attention_out
        FLOAT16
        BF16
        """,
    )
    .PRODUCT("ascend910_95 ascend950", note="combinations of types are not known; one half type, by SFA.1")
)

VARIANTS = (OPDEF_2025_12.OP_END_FACTORY_REG(), PROTO_2026.OP_END_FACTORY_REG())
