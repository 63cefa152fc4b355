"""Quantisation, spelt out: GE's own operators fold scales in other ways."""

from __future__ import annotations

import numpy as np

from fa_compiler.lowering.ascend.convert.emit import Tensor
from fa_compiler.lowering.ascend.convert.errors import CannotMapError
from fa_compiler.lowering.ascend.convert.forward.call import Call, handles

_TYPES = ("DT_INT8", "DT_UINT8", "DT_INT16", "DT_UINT16")
_RANGES = {name: np.iinfo(name.removeprefix("DT_").lower()) for name in _TYPES}


def _along(call: Call, vector: Tensor) -> Tensor:
    """A scale or zero point that broadcasts with the input: one number, or one for each place along `axis`."""
    if call.integer("block_size", 0):
        raise CannotMapError("GE has no scale for blocks", "quantise each tensor or each channel")
    if vector.rank == 0 or vector.shape == (1,):
        return call.squeeze(vector, list(range(vector.rank)))
    rank, axis = call.x().rank, call.axis(1)
    return call.unsqueeze(vector, list(range(1, rank - axis)))


@handles("DequantizeLinear")
def _dequantize(call: Call) -> Tensor:
    """(x - zero point) * scale; the difference is exact in float32."""
    scale = _along(call, call.x(1))
    wide = call.cast(call.x(), "DT_FLOAT")
    if call.has(2):
        wide = call.binary("Sub", wide, call.cast(_along(call, call.x(2)), "DT_FLOAT"))
    if call.x().dtype not in _RANGES:
        raise CannotMapError("its integers are not exact in float32", "use 8 or 16 bits")
    return call.cast(call.binary("Mul", wide, call.cast(scale, "DT_FLOAT")), call.out().dtype)


@handles("QuantizeLinear")
def _quantize(call: Call) -> Tensor:
    """The quotient rounded with halves to even, plus the zero point, kept inside the type."""
    dtype = call.out().dtype
    if dtype not in _RANGES or call.x().dtype != "DT_FLOAT":
        raise CannotMapError(f"GE has no quantisation from {call.x().dtype} to {dtype} that is spelt out here")
    rounded = call.unary("Round", call.binary("RealDiv", call.x(), _along(call, call.x(1))))
    if call.has(2):
        rounded = call.binary("Add", rounded, call.cast(_along(call, call.x(2)), "DT_FLOAT"))
    low, high = (call.like(float(bound), rounded) for bound in (_RANGES[dtype].min, _RANGES[dtype].max))
    return call.cast(call.binary("Minimum", call.binary("Maximum", rounded, low), high), dtype)
