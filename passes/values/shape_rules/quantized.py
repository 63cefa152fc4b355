"""Quantised operators of ONNX and of com.microsoft. Their shapes are those of the operators that they stand for."""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.passes.values.shape_rules.context import Context, Fact, rule
from fa_compiler.passes.values.shape_rules.linear import matmul_shape
from fa_compiler.passes.values.symbolic import Dim

_CONTRIB = "com.microsoft"


@rule("DynamicQuantizeLinear")
def _dynamic(ctx: Context) -> list[Fact]:
    return [Fact(ctx.shape(0), ir.DataType.UINT8), Fact((), ir.DataType.FLOAT), Fact((), ir.DataType.UINT8)]


@rule("QuantizeLinear")
@rule("QuantizeLinear", domain=_CONTRIB)
def _quantize(ctx: Context) -> Fact:
    chosen = ctx.dtype_attr("output_dtype")
    dtype = ctx.dtype(2) if ctx.has(2) else chosen or ir.DataType.UINT8
    return Fact(ctx.shape(0), dtype)


@rule("DequantizeLinear")
@rule("DequantizeLinear", domain=_CONTRIB)
def _dequantize(ctx: Context) -> Fact:
    return Fact(ctx.shape(0), ctx.dtype_attr("output_dtype") or ctx.dtype(1))


@rule("MatMulInteger")
def _matmul_integer(ctx: Context) -> Fact:
    return Fact(matmul_shape(ctx.shape(0), ctx.shape(1)), ir.DataType.INT32)


@rule("QLinearMatMul")
def _qlinear_matmul(ctx: Context) -> Fact:
    return Fact(matmul_shape(ctx.shape(0), ctx.shape(3)), ctx.dtype(7))


@rule("MatMulIntegerToFloat", domain=_CONTRIB)
def _matmul_to_float(ctx: Context) -> Fact:
    return Fact(matmul_shape(ctx.shape(0), ctx.shape(1)), ctx.dtype(2))


@rule("DynamicQuantizeMatMul", domain=_CONTRIB)
def _dynamic_matmul(ctx: Context) -> Fact:
    return Fact(matmul_shape(ctx.shape(0), ctx.shape(1)), ctx.dtype(0))


@rule("MatMulNBits", "MatMulBnb4", domain=_CONTRIB)
def _matmul_bits(ctx: Context) -> Fact:
    shape, columns = ctx.shape(0), ctx.int_attr("N", 0)
    return Fact(None if not shape or columns < 1 else (*shape[:-1], Dim(columns)), ctx.dtype(0))
