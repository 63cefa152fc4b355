"""ClippedSwiglu: SwiGLU between limits, as gpt-oss has it.

Its constraints are CS.1 to CS.5. The kernels compute in float32 and round once. Sources after
9.2.0-beta.1 add an attribute clamp_mode. Its default 0 is what this variant computes, and other
values have an effect on 950 only.
"""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.op_registry.constraints import norms
from fa_compiler.op_registry.constraints.core import CheckedNode, Rules, text
from fa_compiler.op_registry.constraints.gates import halved, parts_of_axis
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.geometry import exceeds
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs

FLOATS = "DT_BF16, DT_FLOAT16, DT_FLOAT"
ROWS = """
    x=y      group_index
    FLOAT16  INT64
    FLOAT    INT64
    BF16     INT64
    """

CURRENT = (
    REG_OP(
        "ClippedSwiglu",
        "proto_2025_12",
        source="hicann/ops-nn v8.5.0-beta.1 (2025-12-31) activation/clipped_swiglu/op_graph/clipped_swiglu_proto.h, "
        "unchanged in v9.2.0-beta.1 (2026-08-01); same, op_host/clipped_swiglu_def.cpp; same, "
        "op_host/clipped_swiglu_tiling.cpp; same, op_kernel/clipped_swiglu.hpp; same, the document aclnnClippedSwiglu",
        cann="8.5.0-beta.1",
    )
    .INPUT("x", FLOATS)
    .OPTIONAL_INPUT("group_index", "DT_INT64")
    .OUTPUT("y", FLOATS)
    .ATTR("dim", "Int", -1)
    .ATTR("alpha", "Float", 1.702)
    .ATTR("limit", "Float", 7.0)
    .ATTR("bias", "Float", 1.0)
    .ATTR("interleaved", "Bool", True)
    .PRODUCT("ascend910b ascend910_93", ROWS)
    .PRODUCT("ascend950", ROWS, note="from 9.1.0 (2026-07-30) on")
)

MOST_GROUPS = 8192

rules = Rules("CS", typed=("x",))


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


@rules(4)
def limit(call: CheckedNode) -> Iterator[Diagnostic]:
    """limit is positive."""
    if not call.attr("limit") > 0:
        yield Diagnostic("limit", f"limit is {call.attr('limit')}, expected more than 0")


@rules(5)
def groups(call: CheckedNode) -> Iterator[Diagnostic]:
    """group_index is a vector of 1 to 8192 numbers."""
    shape = call.shape("group_index")
    if shape is None:
        return
    if len(shape) != 1 or shape[0] == 0 or exceeds(shape[0], MOST_GROUPS):
        yield Diagnostic(
            "group_index",
            f"group_index has the shape {text(shape)}, expected 1 to {MOST_GROUPS} numbers",
        )


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """y has the type and shape of x, but half its size along the axis dim."""
    return {"y": halved(inputs["x"], attrs["dim"])}


OPERATOR = Operator(
    variants=(CURRENT.OP_END_FACTORY_REG(),),
    infer=infer,
    rules=rules,
    kernel=None,
    is_attention=False,
)
