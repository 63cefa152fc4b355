"""ApplyRotaryPosEmb: rotates pairs of the last axis of a query and of a key by the angles of
positions, in place.

Its constraints are APE.1 to APE.8. The attribute `layout` tells the order of batch, tokens and
heads in front of the last axis. A rotation of a part of each head, which CANN 9.1 has, is not
described here.
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

CURRENT = (
    REG_OP(
        "ApplyRotaryPosEmb",
        "proto_2025_12",
        source="mirror-cann/ops-transformer v8.5.0-beta.1 posembedding/apply_rotary_pos_emb/op_graph/"
        "apply_rotary_pos_emb_proto.h, unchanged in 3a280bcc (2026-07-21); same, op_host/apply_rotary_pos_emb_def.cpp; "
        "same, op_host/apply_rotary_pos_emb_tiling.cpp; same, op_host/apply_rotary_pos_emb_tiling_base_arch35.cpp; "
        "same, the document aclnnApplyRotaryPosEmbV2",
        cann="8.5.0-beta.1",
    )
    .INPUT("query", FLOATS)
    .INPUT("key", FLOATS)
    .INPUT("cos", FLOATS)
    .INPUT("sin", FLOATS)
    .OUTPUT("query", FLOATS)
    .OUTPUT("key", FLOATS)
    .ATTR("layout", "Int", 1)
    .ATTR("rotary_mode", "String", "half")
    .PRODUCT(
        "ascend910b ascend910_93 ascend910_95 ascend950",
        """
        query=key=cos=sin=query=key
        FLOAT16
        FLOAT
        BF16
        """,
    )
    .PRODUCT(
        "ascend310p",
        """
        query=key=cos=sin=query=key
        FLOAT16
        FLOAT
        """,
    )
)

AXES = {1: "BSND", 2: "SBND", 3: "BNSD", 4: "TND"}
"""The layouts: the order of batch, tokens (S, T), heads and the last axis."""
PARTS = {"half": 2, "interleave": 2, "quarter": 4}
"""The modes, and what the last axis is a multiple of."""
WIDTHS = (64, 128)
"""What the last axis may be on other products than 950."""
MOST_HEADS = 255
"""The heads of query and key together, on other products than 950."""

rules = Rules("APE", typed=("query", "key", "cos", "sin"))


def _is_narrow(call: CheckedNode) -> bool:
    """Is this a product with the kernel of A2 and A3?"""
    return call.product is not None and not call.on("950")


def _sizes(call: CheckedNode, name: str) -> dict[str, int | str | None] | None:
    """The sizes of a tensor by the letters of the layout; None where it is absent or has another
    rank."""
    axes, shape = AXES.get(call.attr("layout"), ""), call.shape(name)
    if shape is None or len(shape) != len(axes):
        return None
    return dict(zip(axes.replace("T", "S"), shape, strict=True))


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """query, key, cos and sin have one type, which is float32, float16 or bfloat16."""
    yield from norms.float_type(call, "query")
    first = call.dtype("query")
    for name in ("key", "cos", "sin"):
        found = call.dtype(name)
        if first and found and found != first:
            yield Diagnostic(name, f"{name} is {found}, expected {first} as query", "aclnn")


@rules(2)
def layout(call: CheckedNode) -> Iterator[Diagnostic]:
    """layout is 1 (BSND) or 4 (TND), and on 950 also 2 (SBND) or 3 (BNSD). Each tensor has as many
    axes."""
    allowed = (1, 4) if _is_narrow(call) else tuple(AXES)
    found = call.attr("layout")
    if found not in allowed:
        yield Diagnostic(
            "layout", f"layout is {found}, expected one of {', '.join(map(str, allowed))}"
        )
        return
    for name in ("query", "key", "cos", "sin"):
        rank = call.rank(name)
        if rank not in (None, len(AXES[found])):
            yield Diagnostic(
                name, f"{name} has rank {rank}, expected {len(AXES[found])} for layout {found}"
            )


@rules(3)
def keys(call: CheckedNode) -> Iterator[Diagnostic]:
    """key has the sizes of query in all axes but the heads."""
    query, key = _sizes(call, "query"), _sizes(call, "key")
    if query is None or key is None:
        return
    if any(differ(key[axis], query[axis]) for axis in query if axis != "N"):
        yield Diagnostic(
            "key", f"key has the shape {text(call.shape('key'))}, query {text(call.shape('query'))}"
        )


@rules(4)
def tables(call: CheckedNode) -> Iterator[Diagnostic]:
    """cos and sin have one shape: the sizes of query, with one head. On 950 the batch may be 1,
    too."""
    query, cos = _sizes(call, "query"), _sizes(call, "cos")
    if cos is not None:
        yield from shape_is("sin", call["sin"], tuple(cos.values()))
    if query is None or cos is None:
        return
    wanted = {**query, "N": 1}
    if not _is_narrow(call) and cos.get("B") == 1:
        wanted["B"] = 1
    if any(differ(cos[axis], wanted[axis]) for axis in cos):
        expected = text(tuple(wanted.values()))
        yield Diagnostic("cos", f"cos has the shape {text(call.shape('cos'))}, expected {expected}")


@rules(5)
def mode(call: CheckedNode) -> Iterator[Diagnostic]:
    """rotary_mode is half, and on 950 also interleave or quarter. Other products do not read it."""
    allowed = ("half",) if _is_narrow(call) else tuple(PARTS)
    if call.attr("rotary_mode") not in allowed:
        found = f"rotary_mode is {call.attr('rotary_mode')!r}"
        yield Diagnostic("rotary_mode", f"{found}, expected {' or '.join(map(repr, allowed))}")


@rules(6)
def width(call: CheckedNode) -> Iterator[Diagnostic]:
    """The last axis is 64 or 128. On 950 it is even, for quarter a multiple of 4, and at most
    1024."""
    shape = call.shape("query")
    if not shape:
        return
    if _is_narrow(call):
        if all(differ(shape[-1], size) for size in WIDTHS):
            yield Diagnostic("query", f"query has the last size {shape[-1]}, expected 64 or 128")
        return
    part = PARTS.get(call.attr("rotary_mode"), 1)
    if no_multiple(shape[-1], part) or exceeds(shape[-1], 1024):
        yield Diagnostic(
            "query",
            f"query has the last size {shape[-1]}, expected a multiple of {part} up to 1024",
        )


@rules(7)
def heads(call: CheckedNode) -> Iterator[Diagnostic]:
    """query and key together have at most 255 heads, except on 950."""
    query, key = _sizes(call, "query"), _sizes(call, "key")
    if not _is_narrow(call) or query is None or key is None:
        return
    counts = query["N"], key["N"]
    total = sum(count for count in counts if isinstance(count, int))
    if total > MOST_HEADS:
        yield Diagnostic(
            "query", f"query and key have {total} heads, expected at most {MOST_HEADS}"
        )


@rules(8)
def elements(call: CheckedNode) -> Iterator[Diagnostic]:
    """query and key have elements."""
    yield from norms.elements(call, "query")
    yield from norms.elements(call, "key")


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """The results have the types and shapes of query and key."""
    return {name: TensorInfo(inputs[name].dtype, inputs[name].shape) for name in ("query", "key")}


OPERATOR = Operator(
    variants=(CURRENT.OP_END_FACTORY_REG(),),
    infer=infer,
    rules=rules,
    kernel=None,
    is_attention=False,
)
