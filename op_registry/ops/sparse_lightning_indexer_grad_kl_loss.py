"""SparseLightningIndexerGradKLLoss: the KL loss of the index scores and its gradients."""

from fa_compiler.op_registry.macros import REG_OP

HALFS = "DT_FLOAT16, DT_BF16"
PATH = "attention/sparse_lightning_indexer_grad_kl_loss"

OPDEF_2025_12 = (
    REG_OP(
        "SparseLightningIndexerGradKLLoss",
        "opdef_2025_12",
        source="cannmirror/ops-transformer 05c401f9 (2025-12-31) "
        f"{PATH}/op_host/sparse_lightning_indexer_grad_kl_loss_def.cpp; "
        "aclnn document aclnnSparseLightningIndexerGradKLLoss",
        cann="8.5.0-beta.1",
        note="the names are weight and d_weight, not weights and dWeights as the aclnn document writes",
    )
    .INPUT("query", HALFS)
    .INPUT("key", HALFS)
    .INPUT("query_index", HALFS)
    .INPUT("key_index", HALFS)
    .INPUT("weight", HALFS)
    .INPUT("sparse_indices", "DT_INT32")
    .INPUT("softmax_max", "DT_FLOAT")
    .INPUT("softmax_sum", "DT_FLOAT")
    .OPTIONAL_INPUT("query_rope", HALFS)
    .OPTIONAL_INPUT("key_rope", HALFS)
    .OPTIONAL_INPUT("actual_seq_lengths_query", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("actual_seq_lengths_key", "DT_INT64", value_depend="optional")
    .OUTPUT("d_query_index", HALFS)
    .OUTPUT("d_key_index", HALFS)
    .OUTPUT("d_weight", HALFS)
    .OUTPUT("loss", "DT_FLOAT")
    .REQUIRED_ATTR("scale_value", "Float")
    .ATTR("layout", "String", "TND")
    .ATTR("sparse_mode", "Int", 3)
    .ATTR("pre_tokens", "Int", 2147483647)
    .ATTR("next_tokens", "Int", 2147483647)
    .ATTR("deterministic", "Bool", False)
)

OPDEF_2026 = (
    OPDEF_2025_12.then(
        "opdef_2026",
        source="recursion-ascend/ops-transformer@a093e954 "
        f"{PATH}/op_host/sparse_lightning_indexer_grad_kl_loss_def.cpp; "
        "products: the operator definition of opdef_2025_12",
        cann="9.0",
        note="sinks is in the ascend950 block only; FLOAT weights go with fp16 or bf16 queries",
    )
    .INPUT("weight", f"{HALFS}, DT_FLOAT")
    .OPTIONAL_INPUT("sinks", "DT_FLOAT")
    .OUTPUT("d_weight", f"{HALFS}, DT_FLOAT")
    .ATTR("layout", "String", "BSND", note="TND in 2025-12: always write it")
    .PRODUCT(
        "ascend910b ascend910_93",
        """
        query=key=query_index=key_index=weight=query_rope=key_rope=d_query_index=d_key_index=d_weight
        FLOAT16
        BF16
        """,
    )
)

VARIANTS = (OPDEF_2025_12.OP_END_FACTORY_REG(), OPDEF_2026.OP_END_FACTORY_REG())
