"""The int8 caches of a GroupQueryAttention.

    present     holds past as it is, and the new keys or values quantised: round(x * (1 / scale)) with ties to even,
                held between -128 and 127; what is not a number becomes 127. The product with the reciprocal, rounded
                to float32, is what ONNX Runtime computes; QuantizeLinear divides
    attention   reads present * scale

    k_quant_type, v_quant_type   PER_TENSOR, one scale, or PER_CHANNEL, one for each number of each key head; both alike
    k_scale, v_scale             constants

Taken where the attention becomes an IncreFlashAttention, which reads int8 where it lies: one row, proven or vouched
for, no sink and no bias, and a window of one batch entry only. Taken also where rows are proven to be several: the
products outweigh the float copy of the caches that is made then. Refused besides: caches of 4 bits or float8, and any
for Ascend, which has no float32 there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.nodes import constant, text_attr
from fa_compiler.passes.ready_made.call import Conversion
from fa_compiler.passes.report import Code

SCALES = (12, 13)
TYPES = ("k_quant_type", "v_quant_type")
LARGEST, SMALLEST = 127.0, -128.0


@dataclass(frozen=True)
class Scale:
    """The scale of one cache, float32: of one element, or [1, K, 1, D]."""

    call: Conversion
    array: np.ndarray

    @staticmethod
    def of(call: Conversion, heads: int, size: int | None) -> tuple[Scale, Scale] | None:
        """Those of keys and values; None where the caches are not quantised."""
        kinds = {text_attr(call.node, name, "NONE") for name in TYPES}
        if kinds == {"NONE"}:
            return None
        types = {call.info.dtype(call.needed(index)) for index in (3, 4)}
        if call.options.target != "ort" or types != {ir.DataType.INT8} or len(kinds) != 1:
            raise call.decline(Code.READY_MADE, "caches are quantised otherwise than to int8 in ONNX Runtime")
        scales: list[Scale] = []
        for index in SCALES:
            array = constant(call.needed(index))
            if array is None or array.dtype != np.float32 or not (np.isfinite(array) & (array > 0)).all():
                raise call.decline(Code.READY_MADE, "the scales of quantised caches are not constants above 0")
            form = (1,) if kinds == {"PER_TENSOR"} else (1, heads, 1, size or 0)
            if array.size != np.prod(form):
                raise call.decline(Code.SHAPE, f"{array.size} scales do not fit {kinds.pop()}")
            scales.append(Scale(call, array.reshape(form)))
        return scales[0], scales[1]

    def packed(self, new: ir.Value) -> ir.Value:
        """New keys or values [B, K, S, D] as int8."""
        builder, dtype = self.call.builder, ir.DataType.FLOAT
        reciprocal = builder.constant(np.float32(1.0) / self.array, "scale")
        rounded = builder.op("Round", [builder.op("Mul", [new, reciprocal], dtype)], dtype)
        most, least = (builder.constant(np.array(number, np.float32), "number") for number in (LARGEST, SMALLEST))
        below = builder.op("Less", [rounded, most], ir.DataType.BOOL)
        held = builder.op("Max", [builder.op("Where", [below, rounded, most], dtype), least], dtype)
        return builder.cast(held, ir.DataType.INT8)

    def unpacked(self, cache: ir.Value) -> ir.Value:
        """A cache in float32."""
        builder, dtype = self.call.builder, ir.DataType.FLOAT
        if self.array.size == 1:
            scale = builder.constant(self.array.reshape(()), "scale")
            return builder.op("DequantizeLinear", [cache, scale], dtype)
        scale = builder.constant(self.array, "scale")
        return builder.op("Mul", [builder.cast(cache, dtype), scale], dtype)
