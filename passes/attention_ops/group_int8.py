"""The int8 caches of a GroupQueryAttention.

    present     past as it is, and the new keys or values quantised: round(x * (1 / scale)) with
                ties to even, clamped to the range from -128 to 127; NaN becomes 127. ONNX Runtime
                multiplies by the reciprocal in float32, which it casts 16-bit rows to, so this is
                no QuantizeLinear, which divides
    attention   reads present * scale

    k_quant_type, v_quant_type   PER_TENSOR (one scale) or PER_CHANNEL (one for each element of each
                                 key head); both the same
    k_scale, v_scale             constants

Accepted where the attention becomes an IncreFlashAttention, which reads int8 caches in place: there
is one row, proven or vouched for, no sink and no bias, and a window only with a single batch entry.
Also accepted where several rows are proven: the caches are then copied to float32, and the products
cost more than that copy. Refused besides: caches of 4 bits or float8, and all of them for Ascend,
where the operator has no float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.attention_ops.call import OpConverter
from fa_compiler.passes.ir.nodes import constant, int_attr, text_attr

SCALES = (12, 13)
TYPES = ("k_quant_type", "v_quant_type")
LARGEST, SMALLEST = 127.0, -128.0


def is_quantised(call: OpConverter) -> bool:
    """Are the caches quantised?"""
    return any(text_attr(call.node, name, "NONE") != "NONE" for name in TYPES)


@dataclass(frozen=True)
class Scale:
    """The scale of one cache, float32 [1] or [1, K, 1, D]."""

    call: OpConverter
    array: np.ndarray

    @staticmethod
    def of(call: OpConverter, heads: int, size: int | None) -> tuple[Scale, Scale] | None:
        """The scales of keys and values; None where the caches are not quantised. Raises
        Decline."""
        kinds = {text_attr(call.node, name, "NONE") for name in TYPES}
        if kinds == {"NONE"}:
            return None
        types = {call.info.dtype(call.required_input(index)) for index in (3, 4)}
        whole = types == {ir.DataType.INT8} and int_attr(call.node, "kv_cache_bit_width", 8) in (
            0,
            8,
        )
        if call.options.target != "ort" or not whole or len(kinds) != 1:
            raise call.decline(
                Code.READY_MADE, "caches are quantised otherwise than to int8 in ONNX Runtime"
            )
        scales: list[Scale] = []
        for index in SCALES:
            array = constant(call.required_input(index))
            if (
                array is None
                or array.dtype != np.float32
                or not (np.isfinite(array) & (array > 0)).all()
            ):
                raise call.decline(
                    Code.READY_MADE, "the scales of quantised caches are not constants above 0"
                )
            form: tuple[int, ...] = (1, heads, 1, size or 0)
            if kinds == {"PER_TENSOR"}:
                form = (1,)
            if array.size != np.prod(form):
                raise call.decline(Code.SHAPE, f"{array.size} scales do not fit {kinds.pop()}")
            scales.append(Scale(call, array.reshape(form)))
        return scales[0], scales[1]

    def packed(self, new: ir.Value) -> ir.Value:
        """New keys or values [B, K, S, D], quantised to int8."""
        builder, dtype = self.call.builder, ir.DataType.FLOAT
        reciprocal = builder.constant(np.float32(1.0) / self.array, "scale")
        rounded = builder.op("Round", [builder.mul(builder.cast(new, dtype), reciprocal)])
        most, least = (
            builder.constant(np.array(number, np.float32), "number")
            for number in (LARGEST, SMALLEST)
        )
        below = builder.less(rounded, most)
        held = builder.max(builder.where(below, rounded, most), least)
        return builder.cast(held, ir.DataType.INT8)

    def unpacked(self, cache: ir.Value) -> ir.Value:
        """A cache, dequantised to float32."""
        builder, dtype = self.call.builder, ir.DataType.FLOAT
        if self.array.size == 1:
            scale = builder.constant(self.array.reshape(()), "scale")
            return builder.op("DequantizeLinear", [cache, scale])
        scale = builder.constant(self.array, "scale")
        return builder.mul(builder.cast(cache, dtype), scale)
