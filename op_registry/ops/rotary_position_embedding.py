"""RotaryPositionEmbedding: rotates pairs of the last axis by the angles of positions.

Its constraints are RPE.1 to RPE.8. x has batch, tokens and heads in any order in front of its last
axis. The shape of cos and sin tells which of them are the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.op_registry.constraints import norms
from fa_compiler.op_registry.constraints.core import CheckedNode, Rules, shape_is, text
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.geometry import differ, exceeds, no_multiple
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.node import TensorInfo
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs

FLOATS = "DT_FLOAT16, DT_FLOAT, DT_BFLOAT16"
ROWS = """
    x=cos=sin=y
    FLOAT16
    FLOAT
    BF16
    """

FIRST = (
    REG_OP(
        "RotaryPositionEmbedding",
        "proto_2025_12",
        source="mirror-cann/ops-transformer v8.5.0-beta.1 posembedding/rotary_position_embedding/op_graph/"
        "rotary_position_embedding_proto.h; same, op_host/rotary_position_embedding_def.cpp",
        cann="8.5.0-beta.1",
    )
    .INPUT("x", FLOATS)
    .INPUT("cos", FLOATS)
    .INPUT("sin", FLOATS)
    .OUTPUT("y", FLOATS)
    .ATTR("mode", "Int", 0)
    .PRODUCT("ascend910b ascend910_93 ascend910_95", ROWS)
)

CURRENT = (
    FIRST.then(
        "proto_2026",
        source="mirror-cann/ops-transformer v9.0.0 posembedding/rotary_position_embedding/op_graph/"
        "rotary_position_embedding_proto.h, unchanged in 3a280bcc (2026-07-21); same, "
        "op_host/rotary_position_embedding_def.cpp; same, op_host/rope_rotate_half_tiling.cpp; same, the document "
        "aclnnRotaryPositionEmbedding",
        cann="9.0",
    )
    .OPTIONAL_INPUT("rotate", FLOATS)
    .PRODUCT(
        "ascend910b ascend910_93 ascend910_95 ascend950",
        ROWS,
        note="the definition names ascend310p, too, but the list of products says that it does not have the operator",
    )
)

HALF, INTERLEAVE, QUARTER, INTERLEAVE_HALF = range(4)
"""What `mode` may be: which elements of the last axis are a pair."""
MOST_ENTRIES = 1000
"""On A2 and A3 the batch and the heads are fewer than this."""

rules = Rules("RPE", typed=("x", "cos", "sin", "rotate"))


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """x, cos, sin and rotate have one type, which is float32, float16 or bfloat16."""
    yield from norms.float_type(call, "x")
    first = call.dtype("x")
    for name in ("cos", "sin", "rotate"):
        found = call.dtype(name)
        if first and found and found != first:
            yield Diagnostic(name, f"{name} is {found}, expected {first} as x", "aclnn")


@rules(2)
def ranks(call: CheckedNode) -> Iterator[Diagnostic]:
    """x has 3 or 4 axes, and cos and sin as many."""
    rank = call.rank("x")
    if rank not in (None, 3, 4):
        yield Diagnostic("x", f"x has rank {rank}, expected 3 or 4")
        return
    for name in ("cos", "sin"):
        found = call.rank(name)
        if found is not None and (found != rank if rank else found not in (3, 4)):
            yield Diagnostic(name, f"{name} has rank {found}, expected {rank or '3 or 4'} as x")


@rules(3)
def tables(call: CheckedNode) -> Iterator[Diagnostic]:
    """cos and sin have one shape, which broadcasts to that of x: each axis has the size of x, or 1,
    and the last one has the size of x."""
    if any(ranks(call)):
        return
    x, cos = call.shape("x"), call.shape("cos")
    if cos is not None:
        yield from shape_is("sin", call["sin"], cos)
    if x is None or cos is None:
        return
    faults = [
        differ(own, 1) and differ(own, size) for own, size in zip(cos[:-1], x[:-1], strict=True)
    ]
    if any(faults) or differ(cos[-1], x[-1]):
        yield Diagnostic(
            "cos", f"cos has the shape {text(cos)}, which does not broadcast to {text(x)} of x"
        )


@rules(4)
def mode(call: CheckedNode) -> Iterator[Diagnostic]:
    """mode is 0 (half) or 1 (interleave), and on 950 also 2 (quarter) or 3 (interleave-half)."""
    allowed = range(4) if call.product is None or call.on("950") else range(2)
    if call.attr("mode") not in allowed:
        yield Diagnostic("mode", f"mode is {call.attr('mode')}, expected 0 to {allowed[-1]}")


@rules(5)
def width(call: CheckedNode) -> Iterator[Diagnostic]:
    """The last axis is even, for quarter a multiple of 4. It is at most 896, on 950 at most
    1024."""
    shape = call.shape("x")
    if not shape:
        return
    part = 4 if call.attr("mode") == QUARTER else 2
    most = 1024 if call.product is None or call.on("950") else 896
    if no_multiple(shape[-1], part):
        yield Diagnostic("x", f"x has the last size {shape[-1]}, expected a multiple of {part}")
    if exceeds(shape[-1], most):
        yield Diagnostic("x", f"x has the last size {shape[-1]}, expected at most {most}")


@rules(6)
def heads_first(call: CheckedNode) -> Iterator[Diagnostic]:
    """On A2 and A3, the first two axes of x are few where cos has the size 1 along both: their
    product is at most 8 times the tokens, if half of a row is a multiple of 32 bytes; otherwise it
    is at most half the tokens, or a row has at least 80 elements."""
    if call.product is None or call.on("950") or call.attr("mode") != HALF:
        return
    sizes = _heads_and_tokens(call)
    if sizes is None:
        return
    heads, tokens, row = sizes
    aligned = row // 2 * (4 if call.dtype("x") == "DT_FLOAT" else 2) % 32 == 0
    if heads > 8 * tokens if aligned else 2 * heads > tokens and row < 80:
        yield Diagnostic(
            "x", f"x has {heads} heads in front of {tokens} tokens, which are too many"
        )


def _heads_and_tokens(call: CheckedNode) -> tuple[int, int, int] | None:
    """Batch times heads, the tokens and the width, where the first two axes of x are repeated and
    all sizes are known; None elsewhere. Where there is one token, cos tells no order."""
    x, cos = call.shape("x") or (), call.shape("cos") or ()
    sizes = [size for size in x if isinstance(size, int)]
    if len(x) != 4 or len(cos) != 4 or len(sizes) != 4 or sizes[2] == 1:
        return None
    if not differ(cos[0], sizes[0]) or not differ(cos[1], sizes[1]):
        return None
    return sizes[0] * sizes[1], sizes[2], sizes[3]


@rules(7)
def entries(call: CheckedNode) -> Iterator[Diagnostic]:
    """On A2 and A3, batch and heads are fewer than 1000: the axes of x along which cos has the size
    1."""
    x, cos = call.shape("x"), call.shape("cos")
    if call.product is None or call.on("950") or x is None or cos is None or len(x) != len(cos):
        return
    for place, (size, own) in enumerate(zip(x[:-1], cos[:-1], strict=True)):
        if own == 1 and exceeds(size, MOST_ENTRIES - 1):
            yield Diagnostic(
                "x",
                f"x has the size {size} along the axis {place}, expected less than 1000",
                "document",
            )


@rules(8)
def matrix(call: CheckedNode) -> Iterator[Diagnostic]:
    """rotate is a square matrix as wide as x."""
    x = call.shape("x")
    if x:
        yield from shape_is("rotate", call["rotate"], (x[-1], x[-1]))


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """y has the type and shape of x."""
    return {"y": TensorInfo(inputs["x"].dtype, inputs["x"].shape)}


OPERATOR = Operator(
    variants=(FIRST.OP_END_FACTORY_REG(), CURRENT.OP_END_FACTORY_REG()),
    infer=infer,
    rules=rules,
    kernel=None,
    is_attention=False,
)
