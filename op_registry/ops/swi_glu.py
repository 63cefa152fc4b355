"""SwiGlu: splits a tensor in two halves, and multiplies Swish of the first by the second.

Its constraints are SG.1 to SG.4.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from fa_compiler.op_registry import dtypes
from fa_compiler.op_registry.constraints import norms
from fa_compiler.op_registry.constraints.core import CheckedNode, Rules
from fa_compiler.op_registry.constraints.gates import halved
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.geometry import no_multiple
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs

FLOATS = "DT_BF16, DT_FLOAT16, DT_FLOAT"

CURRENT = (
    REG_OP(
        "SwiGlu",
        "proto_2025_12",
        source="hicann/ops-nn v8.5.0-beta.1 (2025-12-31) activation/swi_glu/op_graph/swi_glu_proto.h, unchanged in "
        "e5c3fa93 (2026-08-22); same, op_host/swi_glu_def.cpp; same, op_host/swi_glu_tiling.cpp",
        cann="8.5.0-beta.1",
    )
    .INPUT("x", FLOATS)
    .OUTPUT("y", FLOATS)
    .ATTR("dim", "Int", -1)
    .PRODUCT(
        "ascend910b ascend910_93 ascend910_95 ascend950",
        """
        x=y
        FLOAT16
        FLOAT
        BF16
        """,
    )
    .PRODUCT(
        "ascend310p",
        """
        x=y
        FLOAT16
        FLOAT
        """,
    )
)

ALIGNED = 64
"""The bytes of a half of a row are a multiple of this on 310P."""

rules = Rules("SG", typed=("x",))


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """x is float32, float16 or bfloat16."""
    yield from norms.float_type(call, "x")


@rules(2)
def axis(call: CheckedNode) -> Iterator[Diagnostic]:
    """x has the axis dim, which counts from the end if it is negative."""
    rank, dim = call.rank("x"), call.attr("dim")
    if rank == 0:
        yield Diagnostic("x", "x is a scalar, expected an axis to split")
    elif rank is not None and not -rank <= dim < rank:
        yield Diagnostic("dim", f"dim is {dim}, expected {-rank} to {rank - 1}")


@rules(3)
def halves(call: CheckedNode) -> Iterator[Diagnostic]:
    """The size of the axis dim is even."""
    shape = call.shape("x")
    if shape is None or any(axis(call)):
        return
    if no_multiple(size := shape[call.attr("dim")], 2):
        yield Diagnostic(
            "x", f"x has the size {size} along the axis {call.attr('dim')}, expected an even one"
        )


@rules(4)
def aligned(call: CheckedNode) -> Iterator[Diagnostic]:
    """On 310P the half of the axes from dim on holds a multiple of 64 bytes, and x has elements."""
    shape, dtype = call.shape("x"), call.dtype("x")
    if (
        not call.on("310P")
        or shape is None
        or not dtype
        or dtype not in dtypes.FLOATS
        or any(axis(call))
    ):
        return
    yield from norms.elements(call, "x")
    last = shape[call.attr("dim") % len(shape) :]
    sizes = [size for size in last if isinstance(size, int)]
    half = prod(sizes) * dtypes.lookup(dtype).bits // 16
    if len(sizes) == len(last) and half % ALIGNED:
        yield Diagnostic(
            "x", f"a half of x holds {half} bytes in a row, expected a multiple of {ALIGNED}"
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
