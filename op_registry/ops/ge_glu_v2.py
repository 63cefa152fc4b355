"""GeGluV2: splits a tensor in two halves, and multiplies Gelu of one of them by the other.

Its constraints are GG.1 to GG.5. The kernels compute Gelu in float32 and round it to the type of x,
which gives the second output, and then multiply.
"""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.op_registry.constraints import norms
from fa_compiler.op_registry.constraints.core import CheckedNode, Rules
from fa_compiler.op_registry.constraints.gates import halved, parts_of_axis
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs

FLOATS = "DT_BF16, DT_FLOAT16, DT_FLOAT"

CURRENT = (
    REG_OP(
        "GeGluV2",
        "proto_2025_12",
        source="hicann/ops-nn v8.5.0-beta.1 (2025-12-31) activation/ge_glu_v2/op_graph/ge_glu_v2_proto.h, unchanged in "
        "e5c3fa93 (2026-08-22); same, op_host/ge_glu_v2_def.cpp; same, op_host/ge_glu_v2_tiling.cpp; same, "
        "op_kernel/tanh/ge_glu_v2_fp16_align.h; same, the document aclnnGeGluV3",
        cann="8.5.0-beta.1",
    )
    .INPUT("x", FLOATS)
    .OUTPUT("y", FLOATS)
    .OUTPUT("gelu", FLOATS)
    .ATTR("dim", "Int", -1)
    .ATTR("approximate", "Int", 1)
    .ATTR("activate_left", "Bool", False)
    .PRODUCT(
        "ascend910b ascend910_93 ascend910_95 ascend950",
        """
        x=y=gelu
        FLOAT16
        BF16
        FLOAT
        """,
    )
    .PRODUCT(
        "ascend310p",
        """
        x=y=gelu
        FLOAT16
        FLOAT
        """,
    )
)

EXACT, TANH = 0, 1
"""What `approximate` may be."""

rules = Rules("GG", typed=("x",))


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """x is float32, float16 or bfloat16."""
    yield from norms.float_type(call, "x")


@rules(2)
def halves(call: CheckedNode) -> Iterator[Diagnostic]:
    """x has 1 to 8 axes, and the axis dim among them, whose size is even."""
    yield from parts_of_axis(call)


@rules(3)
def elements(call: CheckedNode) -> Iterator[Diagnostic]:
    """x has elements."""
    yield from norms.elements(call, "x")


rules.values(4, "approximate", (EXACT, TANH), wanted="0 (exact) or 1 (tanh)")


@rules(5)
def form(call: CheckedNode) -> Iterator[Diagnostic]:
    """On 310P approximate is 1 (tanh), whose kernel it has."""
    if call.on("310P") and call.attr("approximate") == EXACT:
        yield Diagnostic("approximate", "approximate is 0, expected 1 (tanh)", "document")


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """y and gelu have the type and shape of x, but half its size along the axis dim."""
    half = halved(inputs["x"], attrs["dim"])
    return {"y": half, "gelu": half}


OPERATOR = Operator(
    variants=(CURRENT.OP_END_FACTORY_REG(),),
    infer=infer,
    rules=rules,
    kernel=None,
    is_attention=False,
)
