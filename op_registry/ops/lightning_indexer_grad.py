"""LightningIndexerGrad: the backward pass of the index scores. Attribute names are camelCase, the last
misspelled."""

from fa_compiler.op_registry.macros import REG_OP

HALFS = "DT_BF16, DT_FLOAT16"

OPDEF = (
    REG_OP(
        "LightningIndexerGrad",
        "opdef_2025_12",
        source="cannmirror/ops-transformer 05c401f9 (2025-12-31) "
        "attention/lightning_indexer_grad/op_host/lightning_indexer_grad_def.cpp",
        cann="8.5.0-beta.1",
        note="attribute names are camelCase and determinstic is misspelled in the registration",
    )
    .INPUT("query", HALFS)
    .INPUT("key", HALFS)
    .INPUT("dy", HALFS)
    .INPUT("sparse_indices", "DT_INT32")
    .INPUT("weights", HALFS)
    .OPTIONAL_INPUT("actual_seq_lengths_query", "DT_INT32")
    .OPTIONAL_INPUT("actual_seq_lengths_key", "DT_INT32")
    .OUTPUT("dq", HALFS)
    .OUTPUT("dk", HALFS)
    .OUTPUT("dweights", HALFS)
    .REQUIRED_ATTR("headNum", "Int")
    .ATTR("layout", "String", "BSND")
    .ATTR("sparseMode", "Int", 3)
    .ATTR("preTokens", "Int", 65536)
    .ATTR("nextTokens", "Int", 65536)
    .ATTR("determinstic", "Bool", False)
    .PRODUCT(
        "ascend910b ascend910_93",
        """
        query=key=dy=weights=dq=dk=dweights
        BF16
        FLOAT16
        """,
    )
)

VARIANTS = (OPDEF.OP_END_FACTORY_REG(),)
