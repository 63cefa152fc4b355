"""SparseFlashAttentionGrad: the backward pass of SparseFlashAttention.

Two official orders exist. The newest variant here is that of 2025-12, which the operator document follows;
the reordered one of 2026 is chosen by name.
"""

from fa_compiler.op_registry.macros import REG_OP

HALFS = "DT_BF16, DT_FLOAT16"

OPDEF_2025_12 = (
    REG_OP(
        "SparseFlashAttentionGrad",
        "opdef_2025_12",
        source="cannmirror/ops-transformer 05c401f9 (2025-12-31) "
        "attention/sparse_flash_attention_grad/op_host/sparse_flash_attention_grad_def.cpp; "
        "aclnn document aclnnSparseFlashAttentionGrad",
        cann="8.5.0-beta.1",
        note="the aclnn document gives sparse_indices as INT64 and its sample builds INT64 lengths; both are INT32",
    )
    .INPUT("query", HALFS)
    .INPUT("key", HALFS)
    .INPUT("value", HALFS)
    .INPUT("sparse_indices", "DT_INT32")
    .INPUT("d_out", HALFS)
    .INPUT("out", HALFS)
    .INPUT("softmax_max", "DT_FLOAT")
    .INPUT("softmax_sum", "DT_FLOAT")
    .OPTIONAL_INPUT("actual_seq_lengths_query", "DT_INT32")
    .OPTIONAL_INPUT("actual_seq_lengths_kv", "DT_INT32")
    .OPTIONAL_INPUT("query_rope", HALFS)
    .OPTIONAL_INPUT("key_rope", HALFS)
    .OUTPUT("d_query", HALFS)
    .OUTPUT("d_key", HALFS)
    .OUTPUT("d_value", HALFS)
    .OPTIONAL_OUTPUT("d_query_rope", HALFS)
    .OPTIONAL_OUTPUT("d_key_rope", HALFS)
    .REQUIRED_ATTR("scale_value", "Float")
    .REQUIRED_ATTR("sparse_block_size", "Int")
    .ATTR("layout", "String", "BSND")
    .ATTR("sparse_mode", "Int", 3)
    .ATTR("pre_tokens", "Int", 2147483647)
    .ATTR("next_tokens", "Int", 2147483647)
    .ATTR("deterministic", "Bool", False)
)

REORDERED_2026 = (
    OPDEF_2025_12.then(
        "opdef_2026_reordered",
        source="recursion-ascend/ops-transformer@a093e954 "
        "attention/sparse_flash_attention_grad/op_host/sparse_flash_attention_grad_def.cpp",
        note="on Ascend 950, too; value became optional (then V is key without its rope part, and d_key is the "
        "gradient of both) and moved back; positions differ",
    )
    .OPTIONAL_INPUT("sinks", "DT_FLOAT")
    .OPTIONAL_INPUT("value", HALFS)
    .INPUT_ORDER(
        "query key sparse_indices d_out out softmax_max softmax_sum sinks value actual_seq_lengths_query "
        "actual_seq_lengths_kv query_rope key_rope"
    )
    .OPTIONAL_OUTPUT("d_value", HALFS)
    .OPTIONAL_OUTPUT("d_sinks", "DT_FLOAT")
    .ATTR("sparse_block_size", "Int", 1)
)

PRODUCTS = "ascend910b ascend910_93"
TYPES = """
    query=key=value=d_out=out=query_rope=key_rope=d_query=d_key=d_value=d_query_rope=d_key_rope
    BF16
    FLOAT16
    """

VARIANTS = (
    REORDERED_2026.PRODUCT(PRODUCTS, TYPES)
    .PRODUCT("ascend910_95 ascend950", note="combinations of types are not known; one half type, by SFAG.1")
    .OP_END_FACTORY_REG(),
    OPDEF_2025_12.PRODUCT(PRODUCTS, TYPES).OP_END_FACTORY_REG(),
)
