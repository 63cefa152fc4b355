"""GeluV2: multiplies each number by the share of a normal distribution below it.

Its constraints are GV.1 and GV.2. The open sources have the kernels of 950, which compute in
float32 and round once. Those of the other products are part of CANN only.
"""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.op_registry.constraints import norms
from fa_compiler.op_registry.constraints.core import CheckedNode, Rules
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.node import TensorInfo
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs

FLOATS = "DT_BF16, DT_FLOAT16, DT_FLOAT"

CURRENT = (
    REG_OP(
        "GeluV2",
        "proto_2025_12",
        source="hicann/ops-nn v9.0.0-beta.2 (2026-03-25) activation/gelu_v2/op_graph/gelu_v2_proto.h; v8.5.0-beta.1 "
        "(2025-12-31) of the same, activation/gelu_v2/op_host/op_api/gelu_v2.cpp, which calls it with these operands; "
        "same, the document aclnnGeluV2",
        cann="8.5.0-beta.1",
    )
    .INPUT("x", FLOATS)
    .OUTPUT("y", FLOATS)
    .ATTR("approximate", "String", "none")
    .PRODUCT(
        "ascend910b ascend910_93 ascend910_95 ascend950",
        """
        x=y
        FLOAT16
        BF16
        FLOAT
        """,
    )
    .PRODUCT(
        "ascend310p ascend910",
        """
        x=y
        FLOAT16
        FLOAT
        """,
    )
)

EXACT, TANH = "none", "tanh"
"""What `approximate` may be."""

rules = Rules("GV", typed=("x",))


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """x is float32, float16 or bfloat16."""
    yield from norms.float_type(call, "x")


rules.values(2, "approximate", (EXACT, TANH))


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """y has the type and shape of x."""
    return {"y": TensorInfo(inputs["x"].dtype, inputs["x"].shape)}


OPERATOR = Operator(
    variants=(CURRENT.OP_END_FACTORY_REG(),),
    infer=infer,
    rules=rules,
    kernel=None,
    is_attention=False,
)
