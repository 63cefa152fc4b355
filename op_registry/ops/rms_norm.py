"""RmsNorm: divides rows by their root mean square, and multiplies them by a weight.

Its constraints are RN.1 to RN.6. The normalised axes are those of gamma, which are the last ones of
x.
"""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.op_registry.constraints import norms
from fa_compiler.op_registry.constraints.core import CheckedNode, Rules
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.node import TensorInfo
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs

FLOATS = "DT_FLOAT, DT_FLOAT16, DT_BF16"

CURRENT = (
    REG_OP(
        "RmsNorm",
        "proto_2025_12",
        source="hicann/ops-nn v8.5.0-beta.1 (2025-12-31) norm/rms_norm/op_graph/rms_norm_proto.h, unchanged in "
        "e5c3fa93 (2026-08-22); same, op_host/rms_norm_def.cpp; same, the document ascendirRmsNorm",
        cann="8.5.0-beta.1",
    )
    .INPUT("x", FLOATS)
    .INPUT("gamma", FLOATS)
    .OUTPUT("y", FLOATS)
    .OUTPUT("rstd", "DT_FLOAT, DT_FLOAT, DT_FLOAT")
    .ATTR("epsilon", "Float", 1e-6)
    .PRODUCT(
        "ascend910b ascend910_93 ascend910_95 ascend950",
        """
        x=y      gamma    rstd
        FLOAT16  FLOAT    FLOAT
        BF16     FLOAT    FLOAT
        FLOAT16  FLOAT16  FLOAT
        FLOAT    FLOAT    FLOAT
        BF16     BF16     FLOAT
        """,
    )
    .PRODUCT(
        "ascend310p",
        """
        x=y      gamma    rstd
        FLOAT16  FLOAT16  FLOAT
        FLOAT    FLOAT    FLOAT
        """,
        note="the definition names ascend910, too, but the documents say that this product does not have it",
    )
)

rules = Rules("RN", typed=("x", "gamma"))


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """x is float32, float16 or bfloat16. gamma has the type of x, or is float32."""
    yield from norms.float_type(call, "x")
    x, gamma = call.dtype("x"), call.dtype("gamma")
    if x and gamma and gamma not in (x, "DT_FLOAT"):
        yield Diagnostic("gamma", f"gamma is {gamma}, expected {x} as x, or DT_FLOAT", "aclnn")


@rules(2)
def ranks(call: CheckedNode) -> Iterator[Diagnostic]:
    """x has 1 to 8 axes, and gamma 1 to as many as x."""
    yield from norms.ranks(call, "x")


@rules(3)
def weights(call: CheckedNode) -> Iterator[Diagnostic]:
    """gamma has the sizes of the last axes of x."""
    yield from norms.weights(call, "x")


@rules(4)
def elements(call: CheckedNode) -> Iterator[Diagnostic]:
    """x has elements."""
    yield from norms.elements(call, "x")


rules.shared(5, "epsilon", norms.epsilon)


@rules(6)
def least_bytes(call: CheckedNode) -> Iterator[Diagnostic]:
    """On 310P the normalised axes hold at least 32 bytes."""
    yield from norms.least_bytes(call, "x")


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """y has the type and shape of x. rstd is float32 and has size 1 along the axes of gamma."""
    x = inputs["x"]
    return {"y": TensorInfo(x.dtype, x.shape), "rstd": norms.reciprocal(x, inputs["gamma"])}


OPERATOR = Operator(
    variants=(CURRENT.OP_END_FACTORY_REG(),),
    infer=infer,
    rules=rules,
    kernel=None,
    is_attention=False,
)
