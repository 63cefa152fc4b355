"""The attention operators of ONNX Runtime and of ATC's parser."""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ops.context import Context, Fact, Shape, rule

_DOMAIN = "com.microsoft"


def _with_past(past: Shape | None, axis: int, new: Dim) -> Dim:
    """The number of past and new tokens, where those of the past are along this axis."""
    return new if past is None else past[axis] + new


@rule("MultiHeadAttention", "DecoderMaskedMultiHeadAttention", domain=_DOMAIN)
def _multi_head(ctx: Context) -> list[Fact]:
    # past_key, past_value, past_sequence_length
    first = 6 if ctx.node.op_type == "MultiHeadAttention" else 5
    query, heads, dtype = ctx.shape(0), ctx.int_attr("num_heads", 0), ctx.dtype(0)
    widths = _widths(ctx, heads)
    if query is None or len(query) < 3 or heads <= 0 or widths is None:
        return [Fact(None, dtype)] * 3
    key, value, new = widths
    past = ctx.shape(first, rank=4)
    presents: list[Shape | None] = [None, None]
    if ctx.has(first + 2):
        presents = [ctx.shape(first), ctx.shape(first + 1)]
    elif past is not None or not ctx.has(first):
        length = _with_past(past, 2, new)
        presents = [
            (query[0], Dim(heads), length, Dim.floordiv(width, heads)) for width in (key, value)
        ]
    return [Fact((*query[:2], value), dtype), *(Fact(shape, dtype) for shape in presents)]


def _widths(ctx: Context, heads: int) -> tuple[Dim, Dim, Dim] | None:
    """The widths of all heads of key and value, and the number of new keys."""
    if not ctx.has(1) or not ctx.has(2):
        packed = ctx.shape(1 if ctx.has(1) else 0, rank=5)
        return None if packed is None else (packed[4] * heads, packed[4] * heads, packed[1])
    match ctx.shape(1), ctx.shape(2):
        case (_, _, keys, key_size), (_, _, _, value_size):
            return key_size * heads, value_size * heads, keys
        case (_, keys, key_width), (_, _, value_width):
            return key_width, value_width, keys
    return None


@rule("Attention", "QAttention", domain=_DOMAIN)
def _attention(ctx: Context) -> list[Fact]:
    quantised = ctx.node.op_type == "QAttention"
    dtype, past_index = (ctx.dtype(2), 8) if quantised else (ctx.dtype(0), 4)
    source, heads = ctx.shape(0, rank=3), ctx.int_attr("num_heads", 0)
    width = _value_width(ctx)
    if source is None or heads <= 0 or width is None:
        return [Fact(None, dtype)] * 2
    past = ctx.shape(past_index, rank=5)
    present: Shape | None = None
    if past is not None or not ctx.has(past_index):
        present = (
            Dim(2),
            source[0],
            Dim(heads),
            _with_past(past, 3, source[1]),
            Dim.floordiv(width, heads),
        )
    if ctx.int_attr("past_present_share_buffer", 0):
        present = None
    return [Fact((*source[:2], width), dtype), Fact(present, dtype)]


def _value_width(ctx: Context) -> Dim | None:
    """The features of the values: the third of `qkv_hidden_sizes`, else a third of the columns of
    the weights."""
    sizes, weights = ctx.ints_attr("qkv_hidden_sizes"), ctx.shape(1, rank=2)
    if sizes and any(sizes):
        return Dim(sizes[2])
    return None if weights is None else Dim.floordiv(weights[1], 3)


@rule("GroupQueryAttention", domain=_DOMAIN)
def _group_query(ctx: Context) -> list[Fact]:
    query, dtype = ctx.shape(0, rank=3), ctx.dtype(0)
    heads, kv_heads = ctx.int_attr("num_heads", 0), ctx.int_attr("kv_num_heads", 0)
    if query is None or heads <= 0 or kv_heads <= 0:
        return [Fact(None, dtype)] * 3
    packed = not ctx.has(1)
    size = Dim.floordiv(query[2], heads + 2 * kv_heads * packed)
    present = Fact((query[0], Dim(kv_heads), query[1], size), dtype)
    if ctx.has(3):
        # With a past, the length depends on total_sequence_length, which is known only at run time.
        present = Fact((query[0], Dim(kv_heads), Dim.fresh(), size), ctx.dtype(3))
    return [Fact((*query[:2], size * heads), dtype), present, present]


@rule("PagedAttention", "SparsePagedAttention", domain=_DOMAIN)
def _paged(ctx: Context) -> list[Fact]:
    query, cache, heads = ctx.shape(0, rank=2), ctx.shape(3, rank=4), ctx.int_attr("num_heads", 0)
    out: Shape | None = None
    if query is not None and cache is not None and heads > 0:
        size = cache[3]
        if (given := ctx.int_attr("v_head_size", 0)) > 0:
            size = Dim(given)
        out = (query[0], size * heads)
    return [
        Fact(out, ctx.dtype(0)),
        *(Fact(ctx.shape(index), ctx.dtype(index)) for index in (3, 4)),
    ]


@rule("DynamicSparseAttention", domain=_DOMAIN)
def _dynamic_sparse(ctx: Context) -> list[Fact]:
    query, past, heads = ctx.shape(0, rank=3), ctx.shape(3, rank=4), ctx.int_attr("num_heads", 0)
    dtype = ir.DataType.BFLOAT16 if ctx.int_attr("output_bf16", 0) else ctx.dtype(0)
    out: Shape | None = None
    if query is not None and past is not None and heads > 0:
        out = (*query[:2], past[3] * heads)
    return [Fact(out, dtype), *(Fact(ctx.shape(index), ctx.dtype(index)) for index in (3, 4))]


@rule("NPUFlashAttention", "NPUPromptFlashAttention", "NPUIncreFlashAttention", domain="npu")
@rule("NPUFlashAttention", "NPUPromptFlashAttention", "NPUIncreFlashAttention")
def _npu(ctx: Context) -> Fact:
    query, key, value = (ctx.shape(index) for index in range(3))
    if query is None or not key or not value or key[-1] != value[-1]:
        return Fact(None, ctx.dtype(0))
    if ctx.attr("input_layout") == "BNSD_BSND" and len(query) == 4:
        query = (query[0], query[2], query[1], query[3])
    return Fact(query, ctx.dtype(0))
