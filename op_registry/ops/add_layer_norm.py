"""AddLayerNorm: adds two tensors and a bias, and normalises the rows of the sum as LayerNorm does.

Its constraints are ALN.1 to ALN.8. The kernels compute the sum in float32, and normalise it before
they round it: y and x are rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.op_registry.constraints import norms
from fa_compiler.op_registry.constraints.core import CheckedNode, Rules, shape_is, text
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.geometry import shapes_differ
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.node import TensorInfo
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs

FLOATS = "DT_FLOAT16, DT_BF16, DT_FLOAT"

CURRENT = (
    REG_OP(
        "AddLayerNorm",
        "proto_2025_12",
        source="hicann/ops-nn v8.5.0-beta.1 (2025-12-31) norm/add_layer_norm/op_graph/add_layer_norm_proto.h, "
        "unchanged in e5c3fa93 (2026-08-22); same, op_host/add_layer_norm_def.cpp; same, "
        "op_host/add_layer_norm_tiling.cpp; same, op_kernel/add_layer_norm_kernel.h; same, the document "
        "aclnnAddLayerNorm",
        cann="8.5.0-beta.1",
    )
    .INPUT("x1", FLOATS)
    .INPUT("x2", FLOATS)
    .INPUT("gamma", FLOATS)
    .INPUT("beta", FLOATS)
    .OPTIONAL_INPUT("bias", FLOATS)
    .OUTPUT("y", FLOATS)
    .OUTPUT("mean", "DT_FLOAT, DT_FLOAT, DT_FLOAT")
    .OUTPUT("rstd", "DT_FLOAT, DT_FLOAT, DT_FLOAT")
    .OUTPUT("x", FLOATS)
    .ATTR("epsilon", "Float", 1e-5)
    .ATTR("additional_output", "Bool", False)
    .PRODUCT(
        "ascend910b ascend910_93 ascend910_95 ascend950",
        """
        x1       x2       gamma=beta  bias=y=x  mean=rstd
        FLOAT    FLOAT16  FLOAT       FLOAT     FLOAT
        FLOAT    BF16     FLOAT       FLOAT     FLOAT
        FLOAT16  FLOAT    FLOAT       FLOAT     FLOAT
        BF16     FLOAT    FLOAT       FLOAT     FLOAT
        FLOAT16  FLOAT16  FLOAT       FLOAT16   FLOAT
        BF16     BF16     FLOAT       BF16      FLOAT
        FLOAT16  FLOAT16  FLOAT16     FLOAT16   FLOAT
        BF16     BF16     BF16        BF16      FLOAT
        FLOAT    FLOAT    FLOAT       FLOAT     FLOAT
        """,
    )
    .PRODUCT(
        "ascend310p",
        """
        x1=x2=gamma=beta=bias=y=x  mean=rstd
        FLOAT16                    FLOAT
        FLOAT                      FLOAT
        """,
        note="mean and rstd are not valid on this product",
    )
)

rules = Rules("ALN", typed=("x1", "x2", "gamma", "beta", "bias"))


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """x1 and x2 have one type, which is float32, float16 or bfloat16, or one of them is float32.
    gamma and beta have one type, which is that of x1 and x2, or float32. bias has the type of the
    sum."""
    yield from norms.float_type(call, "x1")
    first, second = call.dtype("x1"), call.dtype("x2")
    if not first or not second:
        return
    if second != first and "DT_FLOAT" not in (first, second):
        yield Diagnostic("x2", f"x2 is {second}, expected {first} as x1, or DT_FLOAT", "aclnn")
        return
    yield from norms.float_type(call, "x2")
    total = _sum_type(first, second)
    yield from norms.weight_types(call, ("gamma", "beta"), total)
    bias = call.dtype("bias")
    if bias and bias != total:
        yield Diagnostic("bias", f"bias is {bias}, expected {total} as the sum", "aclnn")


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
    """gamma has the sizes of the last axes of x1, and beta the shape of gamma."""
    yield from norms.weights(call, "x1")
    gamma = call.shape("gamma")
    if gamma is not None:
        yield from shape_is("beta", call["beta"], gamma)


@rules(5)
def bias(call: CheckedNode) -> Iterator[Diagnostic]:
    """bias has the shape of gamma or of x1."""
    own, gamma, x = (call.shape(name) for name in ("bias", "gamma", "x1"))
    if own is None or gamma is None or x is None:
        return
    if shapes_differ(own, gamma) and shapes_differ(own, x):
        yield Diagnostic(
            "bias", f"bias has the shape {text(own)}, expected {text(gamma)} or {text(x)}"
        )


@rules(6)
def elements(call: CheckedNode) -> Iterator[Diagnostic]:
    """x1 has elements."""
    yield from norms.elements(call, "x1")


rules.shared(7, "epsilon", norms.epsilon)


@rules(8)
def least_bytes(call: CheckedNode) -> Iterator[Diagnostic]:
    """On 310P the normalised axes hold at least 32 bytes."""
    yield from norms.least_bytes(call, "x1")


def _sum_type(first: str, second: str) -> str:
    return first if first == second else "DT_FLOAT"


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """y has the shape of x1, and so has x, the sum. Both have the type of x1 and x2, or float32
    where these differ. mean and rstd are float32 and have size 1 along the axes of gamma."""
    x = inputs["x1"]
    same = TensorInfo(_sum_type(x.dtype, inputs["x2"].dtype), x.shape)
    rows = norms.reciprocal(x, inputs["gamma"])
    return {"y": same, "mean": rows, "rstd": rows, "x": same}


OPERATOR = Operator(
    variants=(CURRENT.OP_END_FACTORY_REG(),),
    infer=infer,
    rules=rules,
    kernel=None,
    is_attention=False,
)
