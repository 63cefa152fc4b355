"""Quantised operators of ONNX and of com.microsoft. Their shapes are those of the operators that
they stand for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ir.nodes import sole, without_none
from fa_compiler.passes.ops.context import (
    Content,
    Context,
    Fact,
    axis_in,
    broadcast,
    content_fact,
    dim_array,
    integers_of,
    rank_of,
    rule,
    with_dims,
)
from fa_compiler.passes.ops.linear import CONTRIB, gemm_shape, matmul_shape, window_shape
from fa_compiler.passes.ops.parts import concat_shape

_INTEGERS = (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16)


@rule("DynamicQuantizeLinear")
def _dynamic(ctx: Context) -> list[Fact]:
    return [
        Fact(ctx.shape(0), ir.DataType.UINT8),
        Fact((), ir.DataType.FLOAT),
        Fact((), ir.DataType.UINT8),
    ]


@rule("QuantizeLinear")
@rule("QuantizeLinear", domain=CONTRIB)
def _quantize(ctx: Context) -> Fact:
    dtype = ctx.dtype_or(2, ctx.dtype_attr("output_dtype") or ir.DataType.UINT8)
    numbers, scale, point = ctx.content(0), _number(ctx, 1), _point(ctx, 2)
    floats = numbers is not None and numbers.dtype == np.float32
    if (
        dtype in _INTEGERS
        and numbers is not None
        and floats
        and scale is not None
        and point is not None
    ):
        limits = np.iinfo(dtype.numpy())
        with np.errstate(all="ignore"):
            steps = np.rint(numbers / np.float32(scale))
        if np.isfinite(steps).all():
            integers = np.clip(steps.astype(np.float64) + point, limits.min, limits.max)
            return content_fact(dim_array(integers.astype(np.int64)), dtype)
    return Fact(ctx.shape(0), dtype)


@rule("DequantizeLinear")
@rule("DequantizeLinear", domain=CONTRIB)
def _dequantize(ctx: Context) -> Fact:
    dtype = ctx.dtype_attr("output_dtype") or ctx.dtype(1)
    integers, scale, point = _integers(ctx.content(0)), _number(ctx, 1), _point(ctx, 2)
    if (
        dtype == ir.DataType.FLOAT
        and integers is not None
        and scale is not None
        and point is not None
    ):
        return content_fact((integers - point).astype(np.float32) * np.float32(scale), dtype)
    return Fact(ctx.shape(0), dtype)


def _number(ctx: Context, index: int) -> float | None:
    """A float32 input of one known number."""
    content = ctx.content(index)
    if content is None or content.size != 1 or content.dtype != np.float32:
        return None
    return float(content.reshape(-1)[0])


def _point(ctx: Context, index: int) -> int | None:
    """A zero point of one known number; 0 where the input is absent."""
    if not ctx.has(index):
        return 0
    return sole(ctx.ints(index))


def _integers(content: Content | None) -> npt.NDArray[np.int64] | None:
    """A content of integers that are the same in every run."""
    numbers = None if content is None or content.dtype != object else integers_of(content)
    return None if numbers is None else numbers.astype(np.int64)


@rule("MatMulInteger")
def _matmul_integer(ctx: Context) -> Fact:
    return Fact(matmul_shape(ctx.shape(0), ctx.shape(1)), ir.DataType.INT32)


@rule("QLinearMatMul")
def _qlinear_matmul(ctx: Context) -> Fact:
    return Fact(matmul_shape(ctx.shape(0), ctx.shape(3)), ctx.dtype(7))


@rule("MatMulIntegerToFloat", domain=CONTRIB)
def _matmul_to_float(ctx: Context) -> Fact:
    return Fact(matmul_shape(ctx.shape(0), ctx.shape(1)), ctx.dtype(2))


@rule("DynamicQuantizeMatMul", domain=CONTRIB)
def _dynamic_matmul(ctx: Context) -> Fact:
    return Fact(matmul_shape(ctx.shape(0), ctx.shape(1)), ctx.dtype(0))


@rule("QGemm", domain=CONTRIB)
def _qgemm(ctx: Context) -> Fact:
    return Fact(gemm_shape(ctx, 0, 3), ctx.dtype_or(8, ir.DataType.FLOAT))


@rule("ConvInteger")
def _conv_integer(ctx: Context) -> Fact:
    return Fact(window_shape(ctx, 1), ir.DataType.INT32)


@rule("QLinearConv")
def _qlinear_conv(ctx: Context) -> Fact:
    return Fact(window_shape(ctx, 3), ctx.dtype(7))


@rule("QLinearAdd", "QLinearMul", domain=CONTRIB)
def _qlinear_binary(ctx: Context) -> Fact:
    return Fact(broadcast(ctx.shape(0), ctx.shape(3)), ctx.dtype(0))


@rule("QLinearWhere", domain=CONTRIB)
def _qlinear_where(ctx: Context) -> Fact:
    return Fact(broadcast(ctx.shape(0), ctx.shape(1), ctx.shape(4)), ctx.dtype(1))


@rule("QLinearConcat", domain=CONTRIB)
def _qlinear_concat(ctx: Context) -> Fact:
    """Behind the scale and zero point of the result, each tensor has its scale and zero point
    behind it."""
    shapes, dtype = [ctx.shape(place) for place in range(2, len(ctx.facts), 3)], ctx.dtype(1)
    ranks = {len(shape) for shape in without_none(shapes)}
    axis = ctx.axis_attr(sole(ranks))
    if axis is None:
        return Fact(None, dtype)
    return Fact(concat_shape(shapes, axis), dtype)


@rule("QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax", domain=CONTRIB)
def _qlinear_unary(ctx: Context) -> Fact:
    return Fact(ctx.shape(0), ctx.dtype(0))


@rule("GatherBlockQuantized", domain=CONTRIB)
def _gather_blocks(ctx: Context) -> Fact:
    """Several elements that are narrower than a byte lie in one of uint8 along the last axis, or
    have an own type."""
    data, indices, dtype = ctx.shape(0), ctx.shape(1), ctx.dtype(2)
    axis = axis_in(ctx.int_attr("gather_axis", 0), rank_of(data))
    if data is None or indices is None or axis is None:
        return Fact(None, dtype)
    if ctx.dtype(0) == ir.DataType.UINT8:
        data = (*data[:-1], data[-1] * (8 // ctx.int_attr("bits", 4)))
    return Fact(with_dims(data, axis, *indices), dtype)


@rule("MatMulNBits", "MatMulBnb4", domain=CONTRIB)
def _matmul_bits(ctx: Context) -> Fact:
    shape, columns = ctx.shape(0), ctx.int_attr("N", 0)
    if not shape or columns < 1:
        return Fact(None, ctx.dtype(0))
    return Fact((*shape[:-1], Dim(columns)), ctx.dtype(0))
