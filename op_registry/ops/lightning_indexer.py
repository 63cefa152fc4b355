"""LightningIndexer: scores every key with the index heads and keeps the best ones."""

from fa_compiler.op_registry.macros import REG_OP

HALFS = "DT_BF16, DT_FLOAT16"
PRODUCTS = "ascend910b ascend910_93"
TYPES = """
    query=key=weights=sparse_values
    BF16
    FLOAT16
    """

OPDEF = (
    REG_OP(
        "LightningIndexer",
        "opdef_2025_12",
        source="cannmirror/ops-transformer 05c401f9 (2025-12-31) "
        "attention/lightning_indexer/op_host/lightning_indexer_def.cpp; "
        "Ascend/torchair python/torchair/_ge_concrete_graph/ge_converter/custom/lightning_indexer.py",
        cann="8.5.0-beta.1",
    )
    .INPUT("query", HALFS)
    .INPUT("key", HALFS)
    .INPUT("weights", HALFS)
    .OPTIONAL_INPUT("actual_seq_lengths_query", "DT_INT32")
    .OPTIONAL_INPUT("actual_seq_lengths_key", "DT_INT32")
    .OPTIONAL_INPUT("block_table", "DT_INT32")
    .OUTPUT("sparse_indices", "DT_INT32")
    .OUTPUT("sparse_values", HALFS)
    .ATTR("layout_query", "String", "BSND")
    .ATTR("layout_key", "String", "BSND")
    .ATTR("sparse_count", "Int", 2048)
    .ATTR("sparse_mode", "Int", 3)
    .ATTR("pre_tokens", "Int", 9223372036854775807)
    .ATTR("next_tokens", "Int", 9223372036854775807)
    .ATTR("return_values", "Bool", False)
    .PRODUCT(PRODUCTS, TYPES)
)

ASCEND950 = (
    OPDEF.then(
        "ascend950_spec",
        source="public CANN operator document (Ascend950 operator specification) LightningIndexer.md",
        note="FLOAT weights go with fp16 or bf16 queries, on Ascend950 only",
    )
    .INPUT("weights", f"{HALFS}, DT_FLOAT")
    .PRODUCT(PRODUCTS, TYPES)
)

VARIANTS = (OPDEF.OP_END_FACTORY_REG(), ASCEND950.OP_END_FACTORY_REG())
