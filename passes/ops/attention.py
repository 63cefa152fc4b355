"""The attention operators of ONNX, which exist from opset 23 on."""

from __future__ import annotations

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ops.context import (
    Context,
    Fact,
    Shape,
    rule,
    with_dims,
)


def _heads(shape: Shape | None, count: int) -> Shape | None:
    """A 3-D [B, S, H*D] or 4-D operand as [B, H, S, D]."""
    if shape is None or len(shape) == 4:
        return shape
    if len(shape) != 3 or count <= 0:
        return None
    return shape[0], Dim(count), shape[1], Dim.floordiv(shape[2], count)


@rule("Attention")
def _attention(ctx: Context) -> list[Fact]:
    dtype = ctx.dtype(0)
    given = ctx.shape(0)
    query = _heads(given, ctx.int_attr("q_num_heads", 0))
    key = _heads(ctx.shape(1), ctx.int_attr("kv_num_heads", 0))
    value = _heads(ctx.shape(2), ctx.int_attr("kv_num_heads", 0))
    if given is None or query is None or key is None or value is None:
        return [Fact(None, dtype)]
    present_key, present_value = _present(ctx, key, 4), _present(ctx, value, 5)
    batch, heads, length, _ = query
    result: Shape = (batch, heads, length, value[3])
    if len(given) != 4:
        result = (batch, length, heads * value[3])
    scores = None if present_key is None else (batch, heads, length, present_key[2])
    return [
        Fact(result, dtype),
        Fact(present_key, ctx.dtype(1)),
        Fact(present_value, ctx.dtype(2)),
        Fact(scores, dtype),
    ]


def _present(ctx: Context, new: Shape, index: int) -> Shape | None:
    """The shape of new keys or values behind those of the past, which is input `index` where there
    is one."""
    past = ctx.shape(index, rank=4)
    if not ctx.has(index):
        return new
    if past is None:
        return None
    return with_dims(new, 2, past[2] + new[2])


@rule("FlexAttention", domain="ai.onnx.preview")
def _flex_attention(ctx: Context) -> Fact:
    query, value = ctx.shape(0), ctx.shape(2)
    if query is None or value is None or not len(query) == len(value) == 4:
        return Fact(None, ctx.dtype(0))
    return Fact((*query[:3], value[3]), ctx.dtype(0))
