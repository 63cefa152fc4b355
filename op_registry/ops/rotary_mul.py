"""RotaryMul: rotates halves of the last axis by the angles of positions.

It computes what RotaryPositionEmbedding computes in mode 0; on 950, GE puts that operator in its
place. Its constraints are RTM.1 to RTM.6. x is BNSD, BSND or SBND: the axes along which r1 and r2
repeat are the batch and the heads. Its kernels are part of CANN only; how they round in 16 bits is
not in the open sources. Nothing becomes RotaryMul, because RotaryPositionEmbedding and
ApplyRotaryPosEmb are made where it could be.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from fa_compiler.op_registry.constraints import norms
from fa_compiler.op_registry.constraints.core import CheckedNode, Rules, shape_is, text
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.geometry import exceeds, no_multiple, shapes_differ
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.node import TensorInfo
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs

FLOATS = "DT_FLOAT16, DT_FLOAT, DT_BFLOAT16"
ROWS = """
    x=r1=r2=y
    FLOAT16
    FLOAT
    BF16
    """
DOCUMENT = "by the document of torch_npu.npu_rotary_mul"

CURRENT = (
    REG_OP(
        "RotaryMul",
        "proto_nn_other",
        source="hicann/ops-math v8.5.0-beta.1 (2025-12-31) common/src/framework/npu_rotary_mul_onnx_plugin.cpp, which "
        "makes it; nn_other.h of CANN's headers of prototypes; the page RotaryMul of CANN's operator specifications "
        "(Atlas A2); Ascend/op-plugin, the document torch_npu.npu_rotary_mul; the document "
        "RotaryMul2RotaryPositionEmbeddingFusionPass of CANN",
        cann="8.5.0-beta.1",
    )
    .INPUT("x", FLOATS)
    .INPUT("r1", FLOATS)
    .INPUT("r2", FLOATS)
    .OUTPUT("y", FLOATS)
    .PRODUCT("ascend910b", ROWS)
    .PRODUCT("ascend910_93", ROWS, note=DOCUMENT)
    .PRODUCT(
        "ascend950", ROWS, note="a fusion pass of GE puts RotaryPositionEmbedding in its place"
    )
    .PRODUCT(
        "ascend310p ascend910",
        """
        x=r1=r2=y
        FLOAT16
        FLOAT
        """,
        note=DOCUMENT,
    )
)

MOST_ENTRIES = 1000
"""The batch and the heads are fewer than this."""
MOST_REPEATS = 1024
"""The axes along which r1 is repeated have fewer elements than this."""
KEPT = ((2,), (0, 2), (1,), (0, 1), (0,), (0, 1, 2))
"""The axes of x that r1 may have in front of the last one: 11SD, B1SD, 1S1D, BS1D or SB1D, S11D,
and all of them."""

rules = Rules("RTM", typed=("x", "r1", "r2"))


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """x, r1 and r2 have one type, which is float32, float16 or bfloat16."""
    yield from norms.float_type(call, "x")
    first = call.dtype("x")
    for name in ("r1", "r2"):
        found = call.dtype(name)
        if first and found and found != first:
            yield Diagnostic(name, f"{name} is {found}, expected {first} as x", "aclnn")


@rules(2)
def ranks(call: CheckedNode) -> Iterator[Diagnostic]:
    """x, r1 and r2 have 4 axes."""
    for name in ("x", "r1", "r2"):
        if call.rank(name) not in (None, 4):
            yield Diagnostic(name, f"{name} has rank {call.rank(name)}, expected 4", "document")


@rules(3)
def tables(call: CheckedNode) -> Iterator[Diagnostic]:
    """r1 and r2 have one shape: that of x, with size 1 in place of the heads, or of the batch and
    the heads. x is BNSD, BSND or SBND."""
    if any(ranks(call)):
        return
    x, r1 = call.shape("x"), call.shape("r1")
    if r1 is not None:
        yield from shape_is("r2", call["r2"], r1)
    if x is None or r1 is None:
        return
    legal = [
        tuple(size if place in (*kept, 3) else 1 for place, size in enumerate(x)) for kept in KEPT
    ]
    if all(shapes_differ(r1, each) for each in legal):
        message = (
            f"r1 has the shape {text(r1)}, expected 11SD, B1SD or all of x {text(x)} in its order"
        )
        yield Diagnostic("r1", message, "document")


@rules(4)
def width(call: CheckedNode) -> Iterator[Diagnostic]:
    """The last axis is a multiple of 64."""
    shape = call.shape("x")
    if shape and no_multiple(shape[-1], 64):
        yield Diagnostic(
            "x", f"x has the last size {shape[-1]}, expected a multiple of 64", "document"
        )


@rules(5)
def entries(call: CheckedNode) -> Iterator[Diagnostic]:
    """Batch and heads are fewer than 1000: the axes of x along which r1 has the size 1."""
    for place, size in _repeated(call):
        if exceeds(size, MOST_ENTRIES - 1):
            yield Diagnostic(
                "x",
                f"x has the size {size} along the axis {place}, expected less than 1000",
                "document",
            )


@rules(6)
def repeats(call: CheckedNode) -> Iterator[Diagnostic]:
    """The axes along which r1 has the size 1 have fewer than 1024 elements together."""
    count = prod(size for _, size in _repeated(call))
    if exceeds(count, MOST_REPEATS - 1):
        yield Diagnostic(
            "r1", f"r1 is repeated {count} times, expected less than {MOST_REPEATS}", "document"
        )


def _repeated(call: CheckedNode) -> Iterator[tuple[int, int]]:
    """The axes of x along which r1 has the size 1, with their sizes where they are known."""
    x, r1 = call.shape("x"), call.shape("r1")
    if x is None or r1 is None or any(ranks(call)):
        return
    for place, (size, own) in enumerate(zip(x[:-1], r1[:-1], strict=True)):
        if own == 1 and isinstance(size, int):
            yield place, size


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
