"""Quantisation, written out in other operators: GE's own operators apply scales differently."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fa_compiler.lowering.ascend.convert.emit import Tensor
from fa_compiler.lowering.ascend.convert.errors import CannotMapError
from fa_compiler.lowering.ascend.convert.forward.contractions import matmul
from fa_compiler.lowering.ascend.convert.forward.onnx_call import OnnxCall, handles

_TYPES = ("DT_INT8", "DT_UINT8", "DT_INT16", "DT_UINT16")
_RANGES = {name: np.iinfo(name.removeprefix("DT_").lower()) for name in _TYPES}


def _along(call: OnnxCall, vector: Tensor) -> Tensor:
    """A scale or zero point in a shape that broadcasts to the input: one number, or one for each
    index of `axis`."""
    if call.integer("block_size", 0):
        raise CannotMapError("GE has no scale for blocks", "quantise each tensor or each channel")
    if vector.rank == 0 or vector.shape == (1,):
        return call.squeeze(vector, list(range(vector.rank)))
    rank, axis = call.x().rank, call.axis(1)
    return call.unsqueeze(vector, list(range(1, rank - axis)))


@handles("DequantizeLinear")
def _dequantize(call: OnnxCall) -> Tensor:
    """(x - zero point) * scale. The difference is exact in float32 for up to 16 bits; the zero
    point of int32 is 0."""
    if call.x().dtype not in (*_RANGES, "DT_INT32"):
        raise CannotMapError("its integers are not exact in float32", "use 8 or 16 bits")
    scale = _along(call, call.x(1))
    wide = call.cast(call.x(), "DT_FLOAT")
    if call.has(2) and call.x().dtype != "DT_INT32":
        wide = call.binary("Sub", wide, call.cast(_along(call, call.x(2)), "DT_FLOAT"))
    return call.cast(call.binary("Mul", wide, call.cast(scale, "DT_FLOAT")), call.out().dtype)


@handles("MatMulInteger")
def _matmul_integer(call: OnnxCall) -> Tensor:
    """The product of the operands minus their zero points, in int32. Those of the first operand are
    for its rows."""
    a, b = (call.cast(call.x(place), "DT_INT32") for place in (0, 1))
    if min(a.rank, b.rank) < 2:
        raise CannotMapError("an operand is a vector", "make it a matrix")
    if call.has(2):
        zero = call.cast(call.x(2), "DT_INT32")
        a = call.binary("Sub", a, call.unsqueeze(zero, [1]) if zero.rank == 1 else zero)
    if call.has(3):
        b = call.binary("Sub", b, call.cast(call.x(3), "DT_INT32"))
    return matmul(call, a, b)


@handles("QuantizeLinear")
def _quantize(call: OnnxCall) -> Tensor:
    """The quotient rounded with ties to even, plus the zero point, saturated to the type."""
    dtype = call.out().dtype
    if dtype not in _RANGES or call.x().dtype != "DT_FLOAT":
        raise CannotMapError(f"the quantisation from {call.x().dtype} to {dtype} is not converted")
    rounded = call.unary("Round", call.binary("RealDiv", call.x(), _along(call, call.x(1))))
    if call.has(2):
        rounded = call.binary("Add", rounded, call.cast(_along(call, call.x(2)), "DT_FLOAT"))
    low, high = (
        call.like(float(bound), rounded) for bound in (_RANGES[dtype].min, _RANGES[dtype].max)
    )
    return call.cast(call.binary("Minimum", call.binary("Maximum", rounded, low), high), dtype)


@handles("DynamicQuantizeLinear")
def _quantize_dynamically(call: OnnxCall) -> Sequence[Tensor]:
    """The range of the values, extended to 0, is mapped to 0 to 255. If all values are 0, the scale
    is 1."""
    x = call.x()
    axes = call.emitter.ints(range(x.rank))
    zero, most = call.like(0, x), call.like(255, x)
    single = x.with_shape(())
    low = call.binary("Minimum", call.reduced("ReduceMin", x, axes, single), zero)
    span = call.binary(
        "Sub", call.binary("Maximum", call.reduced("ReduceMax", x, axes, single), zero), low
    )
    empty = call.binary("Equal", span, zero, "DT_BOOL")
    scale = call.emitter.op(
        "SelectV2", empty, call.like(1, x), call.binary("RealDiv", span, most), out=single
    )

    def inside(value: Tensor) -> Tensor:
        return call.binary("Minimum", call.binary("Maximum", value, zero), most)

    point = call.unary("Round", inside(call.unary("Neg", call.binary("RealDiv", low, scale))))
    rounded = call.binary("Add", call.unary("Round", call.binary("RealDiv", x, scale)), point)
    return call.cast(inside(rounded), "DT_UINT8"), scale, call.cast(point, "DT_UINT8")
