"""ONNX Runtime's own operators (com.microsoft) around attention in optimised and training
graphs."""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ops.context import (
    Context,
    Fact,
    Shape,
    broadcast,
    rule,
    shape_of_groups,
    shape_rule,
)
from fa_compiler.passes.ops.linear import matmul_shape

_DOMAIN = "com.microsoft"
POINTWISE_CONTRIB = ("Gelu", "FastGelu", "QuickGelu", "BiasGelu")
"""Those of POINTWISE (elementwise.py) that are ONNX Runtime's own."""


@rule(
    *(*POINTWISE_CONTRIB, "GeluGrad", "SoftmaxGrad", "SoftmaxGrad_13", "DropoutGrad"),
    *("BiasSoftmax", "RotaryEmbedding", "TanhGrad", "SigmoidGrad", "ReluGrad", "Inverse"),
    domain=_DOMAIN,
)
def _shape_of_first(ctx: Context) -> Fact:
    return Fact(ctx.shape(0), ctx.dtype(0))


def _swapped(shape: Shape | None, matrix: bool, batch: bool) -> Shape | None:
    """The operand as FusedMatMul reads it. With `batch`, axis 0 first moves after the other batch
    axes."""
    if shape is None or len(shape) < 2:
        return shape
    if batch:
        shape = (*shape[1:-1], shape[0], shape[-1])
    if matrix:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return shape


@rule("FusedMatMul", "TransposeMatMul", domain=_DOMAIN)
def _fused_matmul(ctx: Context) -> Fact:
    left = _swapped(
        ctx.shape(0), ctx.int_attr("transA", 0) == 1, ctx.int_attr("transBatchA", 0) == 1
    )
    right = _swapped(
        ctx.shape(1), ctx.int_attr("transB", 0) == 1, ctx.int_attr("transBatchB", 0) == 1
    )
    return Fact(matmul_shape(left, right), ctx.dtype(0))


@rule("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain=_DOMAIN)
def _skip_layer_norm(ctx: Context) -> list[Fact]:
    shape, dtype = ctx.shape(0), ctx.dtype(0)
    statistics = Fact(shape_of_groups(shape, -1), ir.DataType.FLOAT)
    return [Fact(shape, dtype), statistics, statistics, Fact(shape, dtype)]


@rule("SimplifiedLayerNormalization")
@rule("SimplifiedLayerNormalization", "LayerNormalization", domain=_DOMAIN)
def _simplified_layer_norm(ctx: Context) -> list[Fact]:
    shape = ctx.shape(0)
    statistics = Fact(shape_of_groups(shape, ctx.int_attr("axis", -1)), ir.DataType.FLOAT)
    # the weight's type, by their schemas
    return [Fact(shape, ctx.dtype(1)), statistics, statistics]


@rule("SwiGLU", domain=_DOMAIN)
def _swiglu(ctx: Context) -> Fact:
    shape = ctx.shape(0)
    if shape and not ctx.has(1):
        shape = (*shape[:-1], Dim.floordiv(shape[-1], 2))
    return Fact(shape, ctx.dtype(0))


@rule("RMSNormRotary", domain=_DOMAIN)
def _rms_norm_rotary(ctx: Context) -> list[Fact]:
    shape = ctx.shape(0, rank=4)
    dtype = ir.DataType.FLOAT16 if ctx.int_attr("output_fp16", 0) else ir.DataType.BFLOAT16
    if shape is None:
        return [Fact(None, dtype), Fact(None, ir.DataType.FLOAT)]
    batch, tokens, heads, stride = shape
    width, front = stride, (batch, tokens)
    if (given := ctx.int_attr("input_width", 0)) > 0:
        width = Dim(given)
    if ctx.int_attr("flatten_batch", 0):
        front = Dim(1), batch * tokens
    return [
        Fact((*front, heads * width), dtype),
        Fact((batch, tokens, heads, width), ir.DataType.FLOAT),
    ]


@rule("EmbedLayerNormalization", "QEmbedLayerNormalization", domain=_DOMAIN)
def _embed_layer_norm(ctx: Context) -> list[Fact]:
    ids, words = ctx.shape(0), ctx.shape(2)
    if ids is None or words is None or len(ids) != 2 or len(words) != 2:
        return []
    # The quantised one has the type of the scale of its words.
    dtype = ctx.dtype(2 if ctx.node.op_type == "EmbedLayerNormalization" else 8)
    return [Fact((*ids, words[1]), dtype), Fact((ids[0],), ir.DataType.INT32)]


@rule("LayerNormalizationGrad", "SimplifiedLayerNormalizationGrad", domain=_DOMAIN)
def _layer_norm_grad(ctx: Context) -> list[Fact]:
    scale = Fact(ctx.shape(2), ctx.dtype(2))
    return [Fact(ctx.shape(1), ctx.dtype(1)), scale, scale]


@rule("BiasGeluGrad_dX", domain=_DOMAIN)
def _bias_gelu_grad(ctx: Context) -> Fact:
    return Fact(ctx.shape(1), ctx.dtype(1))


@rule("BiasAdd", domain=_DOMAIN)
def _bias_add(ctx: Context) -> Fact:
    return Fact(broadcast(ctx.shape(0), ctx.shape(1)), ctx.dtype(0))


@shape_rule("BiasSplitGelu", domain=_DOMAIN)
def _bias_split_gelu(ctx: Context, shape: Shape) -> Shape | None:
    return (*shape[:-1], Dim.floordiv(shape[-1], 2)) if shape else None
