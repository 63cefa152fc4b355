"""LayerNormV3: subtracts the mean of rows, divides them by their deviation, and multiplies them by
a weight.

Its constraints are LNT.1 to LNT.5. The axes of x from `begin_norm_axis` on are normalised. gamma
and beta have the axes from `begin_params_axis` on. The open sources have the kernels of 950; those
of the other products are part of CANN only. Where nodes become an operator of this kind, it is
LayerNormV4, which is told the normalised sizes in place of the axes. A LayerNormalization whose
mean or deviation is read becomes LayerNormV3 in an `.air` file.
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
ROWS = """
    x=y      gamma=beta=mean=rstd
    FLOAT    FLOAT
    FLOAT16  FLOAT
    FLOAT16  FLOAT16
    BF16     FLOAT
    BF16     BF16
    """


NARROW = """
    x=y      gamma=beta=mean=rstd
    FLOAT    FLOAT
    FLOAT16  FLOAT
    FLOAT16  FLOAT16
    """
NOTE = "by the document; the open definition names ascend950 only"


def _with_products(started: REG_OP) -> REG_OP:
    """The products are the same in all releases."""
    wide = started.PRODUCT("ascend950", ROWS).PRODUCT("ascend910b ascend910_93", ROWS, note=NOTE)
    return wide.PRODUCT("ascend310p", NARROW, note=NOTE)


FIRST = (
    REG_OP(
        "LayerNormV3",
        "proto_2026_02",
        source="hicann/ops-nn v9.0.0-beta.1 (2026-02-13) norm/layer_norm_v3/op_graph/layer_norm_v3_proto.h; same, "
        "op_host/layer_norm_v3_def.cpp; same, op_host/arch35/layer_norm_v3_tiling_base.cpp; same, the README; "
        "v8.5.0-beta.1 (2025-12-31) of the same, norm/layer_norm_v4/op_host/layer_norm_v4_tiling.h, with its tilings",
        cann="8.5.0-beta.1",
    )
    .INPUT("x", FLOATS)
    .INPUT("gamma", FLOATS)
    .INPUT("beta", FLOATS)
    .OUTPUT("y", FLOATS)
    .OUTPUT("mean", FLOATS)
    .OUTPUT("rstd", FLOATS)
    .ATTR("begin_norm_axis", "Int", 0)
    .ATTR("begin_params_axis", "Int", 0)
    .ATTR("epsilon", "Float", 1e-5)
)
CURRENT = FIRST.then(
    "proto_2026_08",
    source="hicann/ops-nn v9.2.0-beta.1 (2026-08-01) norm/layer_norm_v3/op_graph/layer_norm_v3_proto.h; same, "
    "op_host/layer_norm_v3_def.cpp; same, op_host/arch35/layer_norm_v3_tiling_base.cpp; same, "
    "op_host/layer_norm_v3_infershape.cpp; a5189f54a of the same, the document ascendirLayerNormV3",
    cann="9.2.0-beta.1",
)
AXES = ("begin_norm_axis", "begin_params_axis")

rules = Rules("LNT", typed=("x", "gamma", "beta"))


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """x is float32, float16 or bfloat16. gamma and beta have one type, which is that of x, or
    float32."""
    yield from norms.float_type(call, "x")
    yield from norms.weight_types(call, ("gamma", "beta"), call.dtype("x"))


@rules(2)
def axes(call: CheckedNode) -> Iterator[Diagnostic]:
    """begin_norm_axis and begin_params_axis are axes of x; they may count from its end. x has an
    axis."""
    rank = call.rank("x")
    if rank == 0:
        yield Diagnostic("x", "x has rank 0, expected at least 1", "document")
    elif rank is not None:
        for name in AXES:
            if not -rank <= call.attr(name) < rank:
                yield Diagnostic(
                    name, f"{name} is {call.attr(name)}, expected {-rank} to {rank - 1}"
                )


@rules(3)
def one_axis(call: CheckedNode) -> Iterator[Diagnostic]:
    """On 950 before CANN 9.2, begin_norm_axis and begin_params_axis are the same axis."""
    rank = call.rank("x")
    if (
        call.spec.variant != FIRST.spec.variant
        or not call.on("950")
        or rank is None
        or any(axes(call))
    ):
        return
    norm, params = (call.attr(name) % rank for name in AXES)
    if norm != params:
        yield Diagnostic(
            "begin_params_axis",
            f"begin_params_axis is {params}, expected {norm} as begin_norm_axis",
        )


@rules(4)
def weights(call: CheckedNode) -> Iterator[Diagnostic]:
    """gamma and beta have the sizes of x from begin_params_axis on."""
    x = call.shape("x")
    if x is not None and not any(axes(call)):
        for name in ("gamma", "beta"):
            yield from shape_is(name, call[name], x[call.attr("begin_params_axis") % len(x) :])


@rules(5)
def elements(call: CheckedNode) -> Iterator[Diagnostic]:
    """x has elements."""
    yield from norms.elements(call, "x")


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """y has the type and shape of x. mean and rstd have the type of gamma, and size 1 along the
    normalised axes."""
    x, begin, rows = inputs["x"], attrs["begin_norm_axis"], None
    if x.shape is not None and -len(x.shape) <= begin < len(x.shape):
        first = begin % len(x.shape)
        rows = x.shape[:first] + (1,) * (len(x.shape) - first)
    statistics = TensorInfo(inputs["gamma"].dtype, rows)
    return {"y": TensorInfo(x.dtype, x.shape), "mean": statistics, "rstd": statistics}


OPERATOR = Operator(
    variants=(
        _with_products(FIRST).OP_END_FACTORY_REG(),
        _with_products(CURRENT).OP_END_FACTORY_REG(),
    ),
    infer=infer,
    rules=rules,
    kernel=None,
    is_attention=False,
)
