"""LayerNormV4: subtracts the mean of rows, divides them by their deviation, and multiplies them by
a weight.

Its constraints are LN.1 to LN.7. `normalized_shape` holds the sizes of the last axes of x, which
are normalised. The kernels compute in float32 and round y once.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from fa_compiler.op_registry.constraints import norms
from fa_compiler.op_registry.constraints.core import CheckedNode, Rules, shape_is, text
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.geometry import differ
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.node import TensorInfo
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs

FLOATS = "DT_FLOAT, DT_FLOAT16, DT_BF16"

CURRENT = (
    REG_OP(
        "LayerNormV4",
        "proto_2025_12",
        source="hicann/ops-nn v8.5.0-beta.1 (2025-12-31) norm/layer_norm_v4/op_graph/layer_norm_v4_proto.h, unchanged "
        "in e5c3fa93 (2026-08-22); same, op_host/layer_norm_v4_def.cpp; same, op_host/layer_norm_v4_tiling_base.cpp "
        "and the templates beside it; same, op_kernel/layer_norm_v4_align.h",
        cann="8.5.0-beta.1",
    )
    .INPUT("x", FLOATS)
    .INPUT("normalized_shape", "DT_INT32, DT_INT64")
    .OPTIONAL_INPUT("gamma", FLOATS)
    .OPTIONAL_INPUT("beta", FLOATS)
    .OUTPUT("y", FLOATS)
    .OUTPUT("mean", FLOATS)
    .OUTPUT("rstd", FLOATS)
    .ATTR("epsilon", "Float", 1e-5)
    .PRODUCT(
        "ascend910b ascend910_93",
        """
        x=y      normalized_shape gamma=beta mean=rstd
        FLOAT    INT32            FLOAT      FLOAT
        FLOAT16  INT32            FLOAT      FLOAT
        FLOAT16  INT32            FLOAT16    FLOAT
        BF16     INT32            FLOAT      FLOAT
        BF16     INT32            BF16       FLOAT
        """,
    )
    .PRODUCT(
        "ascend310p",
        """
        x=y      normalized_shape gamma=beta mean=rstd
        FLOAT16  INT32            FLOAT      FLOAT
        FLOAT16  INT32            FLOAT16    FLOAT
        """,
    )
    .PRODUCT(
        "ascend910_95 ascend950",
        """
        x=y      normalized_shape gamma=beta mean=rstd
        FLOAT    INT32            FLOAT      FLOAT
        FLOAT16  INT32            FLOAT      FLOAT
        FLOAT16  INT32            FLOAT16    FLOAT
        BF16     INT32            FLOAT      FLOAT
        BF16     INT32            BF16       FLOAT
        FLOAT    INT64            FLOAT      FLOAT
        FLOAT16  INT64            FLOAT      FLOAT
        FLOAT16  INT64            FLOAT16    FLOAT
        BF16     INT64            FLOAT      FLOAT
        BF16     INT64            BF16       FLOAT
        """,
    )
)

MOST_ON_310P = 64
"""The numbers in a row on 310P, whose only kernel is the one for short rows."""
ALIGNED_ON_310P = 16

rules = Rules("LN", typed=("x", "gamma", "beta"))


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """x is float32, float16 or bfloat16. gamma and beta have one type, which is that of x, or
    float32."""
    yield from norms.float_type(call, "x")
    yield from norms.weight_types(call, ("gamma", "beta"), call.dtype("x"))


@rules(2)
def ranks(call: CheckedNode) -> Iterator[Diagnostic]:
    """x has 1 to 8 axes. normalized_shape is a vector of 1 to as many numbers, or one number."""
    rank, count = call.rank("x"), _count(call)
    if rank is not None and not 1 <= rank <= norms.MOST_AXES:
        yield Diagnostic("x", f"x has rank {rank}, expected 1 to {norms.MOST_AXES}")
    elif (own := call.rank("normalized_shape")) is not None and own > 1:
        yield Diagnostic("normalized_shape", f"normalized_shape has rank {own}, expected 0 or 1")
    elif count is not None and not 1 <= count <= (norms.MOST_AXES if rank is None else rank):
        yield Diagnostic(
            "normalized_shape", f"normalized_shape has {count} numbers, expected 1 to {rank or 8}"
        )


@rules(3)
def sizes(call: CheckedNode) -> Iterator[Diagnostic]:
    """normalized_shape holds the sizes of the last axes of x."""
    last, content = _last(call), call.content("normalized_shape")
    if last is not None and content is not None and any(map(differ, content, last)):
        message = (
            f"normalized_shape is {text(tuple(content))}, expected {text(last)} as the end of x"
        )
        yield Diagnostic("normalized_shape", message)


@rules(4)
def weights(call: CheckedNode) -> Iterator[Diagnostic]:
    """gamma and beta have the shape that normalized_shape holds."""
    if (last := _last(call)) is not None:
        for name in ("gamma", "beta"):
            yield from shape_is(name, call[name], last)


@rules(5)
def elements(call: CheckedNode) -> Iterator[Diagnostic]:
    """x has elements."""
    yield from norms.elements(call, "x")


rules.shared(6, "epsilon", norms.epsilon)


@rules(7)
def short_rows(call: CheckedNode) -> Iterator[Diagnostic]:
    """On 310P a row holds at most 64 numbers, and no multiple of 16."""
    last = _last(call)
    known = [size for size in last or () if isinstance(size, int)]
    if not call.on("310P") or last is None or len(known) != len(last):
        return
    if (count := prod(known)) > MOST_ON_310P or count % ALIGNED_ON_310P == 0:
        yield Diagnostic(
            "x", f"a row of x holds {count} numbers, expected at most 64 and no multiple of 16"
        )


def _count(call: CheckedNode) -> int | None:
    """The number of axes that are normalised; None where it is not known."""
    shape = call.shape("normalized_shape")
    if shape is None or len(shape) > 1:
        return None
    first = shape[0] if shape else 1
    return first if isinstance(first, int) else None


def _last(call: CheckedNode) -> tuple[int | str | None, ...] | None:
    """The sizes of the axes that are normalised; None where they are not known."""
    shape, count = call.shape("x"), _count(call)
    if shape is None or count is None or any(ranks(call)):
        return None
    return shape[len(shape) - count :]


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """y has the type and shape of x. mean and rstd are float32 and have size 1 along the normalised
    axes."""
    x, given = inputs["x"], inputs["normalized_shape"].shape
    first = 1 if given == () else next(iter(given or (None,)))
    rows = TensorInfo("DT_FLOAT")
    if x.shape is not None and isinstance(first, int):
        count = min(first, len(x.shape))
        rows = TensorInfo("DT_FLOAT", x.shape[: len(x.shape) - count] + (1,) * count)
    return {"y": TensorInfo(x.dtype, x.shape), "mean": rows, "rstd": rows}


OPERATOR = Operator(
    variants=(CURRENT.OP_END_FACTORY_REG(),),
    infer=infer,
    rules=rules,
    kernel=None,
    is_attention=False,
)
