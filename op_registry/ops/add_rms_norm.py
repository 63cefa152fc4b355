"""AddRmsNorm: adds two tensors, and normalises the rows of the sum as RmsNorm does.

Its constraints are ARN.1 to ARN.6. A2 and A3 round the sum to its type before they normalise it,
and the normalised row before they multiply it by gamma. On 950 both stay float32.
"""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.op_registry.constraints import norms
from fa_compiler.op_registry.constraints.core import CheckedNode, Rules, shape_is
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.node import TensorInfo
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs

FLOATS = "DT_FLOAT, DT_FLOAT16, DT_BF16"

CURRENT = (
    REG_OP(
        "AddRmsNorm",
        "proto_2025_12",
        source="hicann/ops-nn v8.5.0-beta.1 (2025-12-31) norm/add_rms_norm/op_graph/add_rms_norm_proto.h, unchanged "
        "in e5c3fa93 (2026-08-22); same, op_host/add_rms_norm_def.cpp; same, op_kernel/add_rms_norm.h",
        cann="8.5.0-beta.1",
    )
    .INPUT("x1", FLOATS)
    .INPUT("x2", FLOATS)
    .INPUT("gamma", FLOATS)
    .OUTPUT("y", FLOATS)
    .OUTPUT("rstd", "DT_FLOAT, DT_FLOAT, DT_FLOAT")
    .OUTPUT("x", FLOATS)
    .ATTR("epsilon", "Float", 1e-6)
    .PRODUCT(
        "ascend910b ascend910_93 ascend910_95 ascend950",
        """
        x1=x2=gamma=y=x  rstd
        FLOAT16          FLOAT
        FLOAT            FLOAT
        BF16             FLOAT
        """,
    )
    .PRODUCT(
        "ascend310p",
        """
        x1=x2=gamma=y=x  rstd
        FLOAT16          FLOAT
        FLOAT            FLOAT
        """,
        note="rstd is not valid on this product",
    )
)

rules = Rules("ARN", typed=("x1", "x2", "gamma"))


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """x1, x2 and gamma have one type, which is float32, float16 or bfloat16."""
    yield from norms.float_type(call, "x1")
    first = call.dtype("x1")
    for name in ("x2", "gamma"):
        found = call.dtype(name)
        if first and found and found != first:
            yield Diagnostic(name, f"{name} is {found}, expected {first} as x1", "aclnn")


@rules(2)
def ranks(call: CheckedNode) -> Iterator[Diagnostic]:
    """x1 has 1 to 8 axes, and gamma 1 to as many as x1."""
    yield from norms.ranks(call, "x1")


@rules(3)
def operands(call: CheckedNode) -> Iterator[Diagnostic]:
    """x2 has the shape of x1: nothing is broadcast."""
    shape = call.shape("x1")
    if shape is not None:
        yield from shape_is("x2", call["x2"], shape)


@rules(4)
def weights(call: CheckedNode) -> Iterator[Diagnostic]:
    """gamma has the sizes of the last axes of x1."""
    yield from norms.weights(call, "x1")


@rules(5)
def elements(call: CheckedNode) -> Iterator[Diagnostic]:
    """x1 has elements."""
    yield from norms.elements(call, "x1")


rules.shared(6, "epsilon", norms.epsilon)


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """y has the type and shape of x1, and so has x, the sum. rstd is float32 and has size 1 along
    the axes of gamma."""
    x = inputs["x1"]
    same = TensorInfo(x.dtype, x.shape)
    return {"y": same, "rstd": norms.reciprocal(x, inputs["gamma"]), "x": same}


OPERATOR = Operator(
    variants=(CURRENT.OP_END_FACTORY_REG(),),
    infer=infer,
    rules=rules,
    kernel=None,
    is_attention=False,
)
