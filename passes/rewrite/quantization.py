"""Values after a DequantizeLinear from int8 with constant scales, and results before a QuantizeLinear to int8.

DequantizeLinear computes (x - zero point) * scale. The operator computes (x + offset) * scale, which is exactly the
same with offset = -zero point. There is one scale, or one for each head, for each element of a head, or for both. A
Cast from int8 and a Mul by a constant compute the same with zero points of 0, and the constant may run along several
axes. A constant of one number is usually part of the product's scale already, so that only the Cast is left.

QuantizeLinear computes round(x / scale) + zero point, saturated, with ties to even. The operator computes
round(x * quant_scale2 + quant_offset2). Both give the same bits where all of these hold:

    the scale is a power of two     the quotient and the product are then both exact
    the zero point is 0             the operator adds it before it rounds, where any other zero point would move ties
                                    and round the sum
    x is float32                    the operator does not round it to 16 bits in between

NaN becomes -128 in ONNX Runtime, and in the operator's kernel, too.

For Ascend no QuantizeLinear is fused, because the operator rounds to float16 first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes, KnownAxes
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import Options
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.nodes import constant, distinct_consumers, int_attr, is_op
from fa_compiler.passes.values.shapes import ShapeInfo


@dataclass(frozen=True)
class DequantizedInput:
    """An int8 value with its scales and zero points.

    `channels` are the axes that scales and zero points run along; None where each is one number.
    """

    value: ir.Value
    scale: np.ndarray
    zero_point: np.ndarray
    channels: Axes | None

    def by_channel(self, heads: Axes, depth: Axes, space: KnownAxes) -> tuple[np.ndarray, np.ndarray] | None:
        """Scales and zero points as [heads, depth]; None where they run along other axes."""
        form = tuple(space.size(axes).const or 0 for axes in (heads, depth))
        channels = () if self.channels is None else space.resolve(self.channels)
        own = {(): (1, 1), heads: (form[0], 1), depth: (1, form[1])} | {heads + depth: form}
        if (self.channels is not None and not channels) or channels not in own:
            return None
        scale, zero = (np.broadcast_to(part.reshape(own[channels]), form) for part in (self.scale, self.zero_point))
        return scale, zero


def match_dequantize(
    value: ir.Value, dims: Arrangement, dtype: ir.DataType, info: ShapeInfo
) -> DequantizedInput | None:
    """The int8 source of a value of type `dtype`, arranged as `dims`; None where it is not dequantised."""
    node = value.producer()
    if node is not None and is_op(node, "Mul"):
        return _multiplied(node, dims, dtype, info)
    widened = None if node is None or info.dtype(value) != dtype else _widened(node, info)
    if widened is not None:
        return DequantizedInput(widened, np.ones(1), np.zeros(1, np.int64), None)
    if node is None or not is_op(node, "DequantizeLinear") or len(node.inputs) < 2:
        return None
    x, scale = node.inputs[0], constant(node.inputs[1])
    point = node.inputs[2] if len(node.inputs) > 2 else None
    if x is None or scale is None or info.dtype(x) != ir.DataType.INT8 or int_attr(node, "block_size", 0):
        return None
    zero = np.zeros(scale.shape, np.int8) if point is None else constant(point)
    if zero is None or zero.size != scale.size or (scale.size != 1 and scale.ndim != 1):
        return None
    if info.dtype(value) != dtype or scale.dtype != dtype.numpy() or not np.isfinite(scale.astype(np.float64)).all():
        return None
    axis, shape = int_attr(node, "axis", 1) % len(dims), info.shape(value)
    if scale.size != 1 and (shape is None or shape[axis] != scale.size):
        return None  # Such a model fails in every run.
    channels = None if scale.size == 1 else dims[axis]
    return DequantizedInput(x, scale.reshape(-1), zero.reshape(-1).astype(np.int64), channels)


def _multiplied(node: ir.Node, dims: Arrangement, dtype: ir.DataType, info: ShapeInfo) -> DequantizedInput | None:
    """The int8 source of a Mul of a constant and a Cast from int8; None for other nodes."""
    for operand, factor in (node.inputs, node.inputs[::-1]):
        maker, scale = None if operand is None else operand.producer(), constant(factor)
        x = None if maker is None else _widened(maker, info)
        shape = None if x is None else info.shape(x)
        if x is None or shape is None or scale is None or info.dtype(node.outputs[0]) != dtype:
            continue
        if scale.ndim > len(shape) or scale.dtype != dtype.numpy() or not np.isfinite(scale.astype(np.float64)).all():
            continue
        runs = (1,) * (len(shape) - scale.ndim) + scale.shape
        if any(count not in (1, size.const) for count, size in zip(runs, shape, strict=True)):
            continue
        channels = tuple(axis for dim, count in zip(dims, runs, strict=True) if count != 1 for axis in dim)
        return DequantizedInput(
            x, scale.reshape(-1), np.zeros(scale.size, np.int64), channels if scale.size > 1 else None
        )
    return None


def _widened(node: ir.Node, info: ShapeInfo) -> ir.Value | None:
    """The int8 input of a Cast; None for other nodes. Every float type holds all int8 numbers exactly."""
    x = node.inputs[0] if is_op(node, "Cast") else None
    return x if x is not None and info.dtype(x) == ir.DataType.INT8 else None


@dataclass(frozen=True)
class QuantizedOutput:
    """The QuantizeLinear that reads a result, and the quant_scale2 that scales by the same."""

    node: ir.Node
    scale: float


def match_quantize(result: ir.Value, options: Options, info: ShapeInfo) -> QuantizedOutput | None:
    """The QuantizeLinear that is the only reader of a result; None where there is no such reader.

    Raises Decline where the operator is not proven to round as it does.
    """
    readers = distinct_consumers(result)
    node = readers[0] if len(readers) == 1 else None
    maker = result.producer()
    if node is None or not is_op(node, "QuantizeLinear") or node.inputs[0] is not result or result.is_graph_output():
        return None
    if maker is None or node.graph is not maker.graph:
        return None
    number = constant(node.inputs[1])
    point = node.inputs[2] if len(node.inputs) > 2 else None
    zero = np.zeros(1) if point is None else constant(point)
    if info.dtype(node.outputs[0]) != ir.DataType.INT8 or number is None or number.size != 1 or zero is None:
        raise Decline(Code.ILLEGAL, "its result is not quantised to int8 by one known scale", node)
    if options.target != "ort" or info.dtype(result) != ir.DataType.FLOAT or number.dtype != np.float32:
        raise Decline(Code.ILLEGAL, "its result is rounded to 16 bits before it is quantised", node)
    scale = float(number.reshape(-1)[0])
    if zero.any():
        raise Decline(Code.ILLEGAL, "the operator adds the zero point before it rounds, QuantizeLinear behind", node)
    if not 0.0 < scale < math.inf or math.frexp(scale)[0] != 0.5 or not math.isfinite(np.float32(1.0 / scale)):
        raise Decline(Code.ILLEGAL, f"the operator multiplies, and 1 / {scale:g} is not exact", node)
    return QuantizedOutput(node, 1.0 / scale)
