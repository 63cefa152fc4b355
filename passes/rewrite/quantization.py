"""Values after a DequantizeLinear from int8 with constant scales, and results before a
QuantizeLinear to int8.

    key = (key_int8.to(torch.float32) - zero_point) * scale[:, None, :]         # one scale for each head and element
    key = key_int8.to(torch.float32) * scale
    out = torch.clamp(torch.round(attention(query, key, value) / out_scale), -128,
    127).to(torch.int8)

    dequantised :=                      x is of int8, the scale and the zero point are constants
      1     DequantizeLinear(x, scale, zero point or none)
      2   | Mul(Cast(x), scale)         with the operands in either order
      3   | Cast(x)

DequantizeLinear computes (x - zero point) * scale. The operator computes (x + offset) * scale,
which is exactly the same with offset = -zero point. There is one scale, or one for each head, for
each element of a head, or for both. In 2 the zero points are 0, and the constant may run along
several axes. A constant of one number is usually part of the product's scale already, so that only
the Cast (3) is left.

QuantizeLinear computes round(x / scale) + zero point, saturated, with ties to even. The operator
computes round(x * quant_scale2 + quant_offset2). Both give the same bits where all of these hold:

    the scale is a power of two     the quotient and the product are then both exact
    the zero point is 0             the operator adds it before it rounds, where any other zero
                                    point would move ties and round the sum
    x is float32                    the operator does not round it to 16 bits in between

NaN becomes -128 in ONNX Runtime, and in the operator's kernel, too.

For Ascend no QuantizeLinear is fused, because the operator rounds to float16 first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes, KnownAxes
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import Options
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.nodes import (
    ABSENT,
    constant,
    distinct_consumers,
    first,
    input_of,
    int_attr,
    is_op,
    operand_at,
    producer,
    sole,
)
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

    def by_channel(
        self, heads: Axes, depth: Axes, space: KnownAxes
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Scales and zero points as [heads, depth]; None where they run along other axes."""
        form = tuple(space.size(axes).const or 0 for axes in (heads, depth))
        own: tuple[int, ...] = (1, 1)
        if self.channels is not None:
            channels = space.resolve(self.channels)
            forms = {heads: (form[0], 1), depth: (1, form[1])} | {heads + depth: form}
            if not channels or channels not in forms:
                return None
            own = forms[channels]
        scale, zero = (
            np.broadcast_to(part.reshape(own), form) for part in (self.scale, self.zero_point)
        )
        return scale, zero


def match_dequantize(
    value: ir.Value, dims: Arrangement, dtype: ir.DataType, info: ShapeInfo
) -> DequantizedInput | None:
    """The int8 source of a value of type `dtype`, arranged as `dims`; None where it is not
    dequantised."""
    node = value.producer()
    if info.dtype(value) != dtype:
        return None
    if is_op(node, "DequantizeLinear"):  # 1
        return _dequantized(node, dims, info)
    if is_op(node, "Mul"):  # 2
        pairs = (node.inputs, node.inputs[::-1])
        return first(
            _scaled(_widened(operand, info), constant(factor), dims, dtype, info)
            for operand, factor in pairs
        )
    if (x := _widened(value, info)) is not None:  # 3
        return DequantizedInput(x, np.ones(1), np.zeros(1, np.int64), None)
    return None


def _dequantized(node: ir.Node, dims: Arrangement, info: ShapeInfo) -> DequantizedInput | None:
    """The int8 source of a DequantizeLinear by one scale, or by one for each element along an axis;
    None otherwise."""
    value, x, scale = node.outputs[0], operand_at(node, 0), constant(operand_at(node, 1))
    if scale is None or info.dtype(x) != ir.DataType.INT8 or int_attr(node, "block_size", 0):
        return None
    zero = _zero_point(node, scale.shape)
    if zero is None or zero.size != scale.size or not _scales_to(scale, info.dtype(value)):
        return None
    channels: Axes | None = None
    if scale.size != 1:
        axis, shape = int_attr(node, "axis", 1) % len(dims), info.shape(value)
        if scale.ndim != 1 or shape is None or shape[axis] != scale.size:
            return None  # With another number of scales such a model fails in every run.
        channels = dims[axis]
    return DequantizedInput(x, scale.reshape(-1), zero.reshape(-1).astype(np.int64), channels)


def _zero_point(node: ir.Node, shape: tuple[int, ...]) -> np.ndarray | None:
    """The zero point of a DequantizeLinear or QuantizeLinear, zeros of a shape where it has none;
    None where it is no constant."""
    point = input_of(node, 2)
    if point is None:
        return np.zeros(shape, np.int8)
    return constant(point)


def _scales_to(scale: np.ndarray, dtype: ir.DataType | None) -> bool:
    """Are these finite numbers of a type?"""
    return (
        dtype is not None
        and scale.dtype == dtype.numpy()
        and bool(np.isfinite(scale.astype(np.float64)).all())
    )


def _scaled(
    x: ir.Value | None,
    scale: np.ndarray | None,
    dims: Arrangement,
    dtype: ir.DataType,
    info: ShapeInfo,
) -> DequantizedInput | None:
    """The int8 source of a product x * scale; None where one of the two is missing, or where the
    scale makes the product larger than x."""
    shape = info.shape(x or ABSENT)
    if x is None or scale is None or shape is None:
        return None
    if scale.ndim > len(shape) or not _scales_to(scale, dtype):
        return None
    runs = (1,) * (len(shape) - scale.ndim) + scale.shape
    if any(count not in (1, size.const) for count, size in zip(runs, shape, strict=True)):
        return None
    channels: Axes | None = None
    if scale.size > 1:
        channels = tuple(chain(*(dim for dim, count in zip(dims, runs, strict=True) if count != 1)))
    return DequantizedInput(x, scale.reshape(-1), np.zeros(scale.size, np.int64), channels)


def _widened(value: ir.Value | None, info: ShapeInfo) -> ir.Value | None:
    """The int8 value that a Cast makes a value of; None for other values. Every float type holds
    all int8 numbers exactly."""
    cast = producer(value)
    if not is_op(cast, "Cast") or info.dtype(operand_at(cast, 0)) != ir.DataType.INT8:
        return None
    return cast.inputs[0]


@dataclass(frozen=True)
class QuantizedOutput:
    """The QuantizeLinear that reads a result, and the quant_scale2 that scales by the same."""

    node: ir.Node
    scale: float


def match_quantize(result: ir.Value, options: Options, info: ShapeInfo) -> QuantizedOutput | None:
    """The QuantizeLinear that is the only reader of a result; None where there is no such reader.

    Raises Decline where the operator is not proven to round as it does.
    """
    node, maker = sole(distinct_consumers(result)), result.producer()
    if (
        not is_op(node, "QuantizeLinear")
        or node.inputs[0] is not result
        or result.is_graph_output()
    ):
        return None
    if maker is None or node.graph is not maker.graph:
        return None
    number, zero = constant(node.inputs[1]), _zero_point(node, (1,))
    if (
        info.dtype(node.outputs[0]) != ir.DataType.INT8
        or number is None
        or number.size != 1
        or zero is None
    ):
        raise Decline(Code.ILLEGAL, "its result is not quantised to int8 by one known scale", node)
    if (
        options.target != "ort"
        or info.dtype(result) != ir.DataType.FLOAT
        or number.dtype != np.float32
    ):
        raise Decline(Code.ILLEGAL, "its result is rounded to 16 bits before it is quantised", node)
    scale = float(number.reshape(-1)[0])
    if zero.any():
        raise Decline(
            Code.ILLEGAL,
            "the operator adds the zero point before it rounds, and QuantizeLinear adds it afterwards",
            node,
        )
    if not _has_exact_inverse(scale):
        raise Decline(
            Code.ILLEGAL, f"the operator multiplies, and 1 / {scale:g} is not exact", node
        )
    return QuantizedOutput(node, 1.0 / scale)


def _has_exact_inverse(scale: float) -> bool:
    """Is a number a power of two whose inverse is a float32?"""
    return (
        0.0 < scale < math.inf
        and math.frexp(scale)[0] == 0.5
        and math.isfinite(np.float32(1.0 / scale))
    )
