"""AttentionUpdate: joins the attention results of several sequence-parallel ranks."""

from fa_compiler.op_registry.macros import REG_OP

FLOATS = "DT_FLOAT, DT_FLOAT16, DT_BF16"

EXPERIMENT = (
    REG_OP("AttentionUpdate", "experiment_ops", source="Ascend/torchair experiment_ops.h:3867")
    .DYNAMIC_INPUT("lse", "DT_FLOAT")
    .DYNAMIC_INPUT("go", FLOATS)
    .OUTPUT("output", FLOATS)
    .OUTPUT("lse_m", "DT_FLOAT")
    .REQUIRED_ATTR("update_type", "Int")
    .REQUIRED_ATTR("sp", "Int")
)

CURRENT = EXPERIMENT.then(
    "opdef_2025_12",
    source="cannmirror/ops-transformer 05c401f9 (2025-12-31) "
    "attention/attention_update/op_graph/attention_update_proto.h; same, op_host/attention_update_def.cpp",
    cann="8.5.0-beta.1",
).PRODUCT(
    "ascend910b ascend910_93 ascend910_95",
    """
    go=output
    FLOAT
    FLOAT16
    BF16
    """,
)

VARIANTS = (EXPERIMENT.OP_END_FACTORY_REG(), CURRENT.OP_END_FACTORY_REG())
