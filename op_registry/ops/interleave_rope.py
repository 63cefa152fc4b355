"""InterleaveRope: sorts a head into its elements of even and of odd places, and rotates the halves.

It computes what RotaryPositionEmbedding computes in mode 3, for heads of 64. Its constraints are
ILR.1 and ILR.2. The kernels compute in float32 and round once. The prototype calls the operator
experimental. Nothing becomes it, because RotaryPositionEmbedding and ApplyRotaryPosEmb are made.
"""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.op_registry.constraints.core import CheckedNode, Rules, one_type, shape_is, text
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.geometry import shape_of
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.node import TensorInfo
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs

HALFS = ("DT_FLOAT16", "DT_BF16")

CURRENT = (
    REG_OP(
        "InterleaveRope",
        "proto_2025_12",
        source="mirror-cann/ops-transformer v8.5.0-beta.1 (2025-12-31) posembedding/interleave_rope/op_graph/"
        "interleave_rope_proto.h, unchanged in 3a280bcc (2026-07-21); same, op_host/interleave_rope_def.cpp; same, "
        "op_host/interleave_rope_tiling.cpp; same, op_kernel/interleave_rope_b1sd.h and the kernels beside it; same, "
        "the README",
        cann="8.5.0-beta.1",
    )
    .INPUT("x", "DT_FLOAT16, DT_BF16")
    .INPUT("cos", "DT_FLOAT16, DT_BF16")
    .INPUT("sin", "DT_FLOAT16, DT_BF16")
    .OUTPUT("y", "DT_FLOAT16, DT_BF16")
    .PRODUCT(
        "ascend910b ascend910_93",
        """
        x=cos=sin=y
        FLOAT16
        BF16
        """,
        note="the document aclnnInterleaveRope names 950 in their place, unlike the definition and the README",
    )
)

WIDTH = 64
"""The only width of a head."""

rules = Rules("ILR", typed=("x", "cos", "sin"))


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """x, cos and sin have one type, FLOAT16 or BF16."""
    yield from one_type(call, ("x", "cos", "sin"), HALFS)


@rules(2)
def sizes(call: CheckedNode) -> Iterator[Diagnostic]:
    """x is [B,N,S,64] and has elements. cos and sin are [B,1,S,64] or [B,1,1,64], of one shape."""
    x = shape_of(call["x"], 4)
    yield from shape_is("x", call["x"], (None, None, None, WIDTH))
    if 0 in x:
        yield Diagnostic("x", f"x has the shape {text(x)}, expected sizes of at least 1")
    cos = shape_of(call["cos"], 4)
    yield from shape_is("cos", call["cos"], (x[0], 1, 1 if cos[2] == 1 else x[2], WIDTH))
    yield from shape_is("sin", call["sin"], cos)


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
