"""com.microsoft Attention and QAttention: the projection of query, key and value included.

    query | key | value = input [B, S, I] x weights [I, N * D + N * D + N * E] + bias
                          cut as qkv_hidden_sizes says, else into three equal parts
                          QAttention takes input and weights as 8-bit integers, with a scale and a
                          zero point each; the product is a MatMulIntegerToFloat, which gives the
                          same bits. Everything after it is in floats
    mask_index, attention_bias, unidirectional, mask_filter_value
                          padding.py
    past [2, B, N, P, D]  keys and values, concatenated in front of the new ones; present likewise

past_sequence_length matters only where past and present share a buffer.

Refused: do_rotary, and a shared buffer, which ONNX Runtime's CPU kernel does not take either;
QAttention on Ascend, which has no MatMulIntegerToFloat, and in float16, for which that operator has
no CPU kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.attention_ops.call import ConvertedOp, OpConverter
from fa_compiler.passes.attention_ops.multi_head import MultiHeadInputs, part_of
from fa_compiler.passes.ir.nodes import int_attr

WEIGHTS, BIAS = 1, 2


@dataclass(frozen=True)
class InputIndices:
    """The indices of the inputs that differ between the two operators. `quantisation` are scale and
    zero point of the input, then those of the weights."""

    mask: int
    past: int
    addend: int
    quantisation: tuple[int, int, int, int] | None = None


FLOAT = InputIndices(3, 4, 5)
QUANTISED = InputIndices(5, 8, 9, (3, 6, 4, 7))
"""The operator has nine inputs, and so no addend."""


def convert(call: OpConverter) -> ConvertedOp:
    """The record of an Attention node of com.microsoft."""
    return _converted(call, FLOAT)


def convert_quantised(call: OpConverter) -> ConvertedOp:
    """The record of a QAttention node."""
    if call.options.target != "ort":
        reason = "the projection inside QAttention is quantised"
        raise call.decline(Code.READY_MADE, reason, "fuse the model before it is quantised")
    return _converted(call, QUANTISED)


def _converted(call: OpConverter, places: InputIndices) -> ConvertedOp:
    node, builder = call.node, call.builder
    if int_attr(node, "do_rotary", 0):
        raise call.decline(
            Code.READY_MADE, "do_rotary: rotary positions inside the operator are not taken apart"
        )
    if int_attr(node, "past_present_share_buffer", 0):
        reason = "past and present share a buffer, which ONNX Runtime's CPU kernel does not take"
        raise call.decline(Code.READY_MADE, reason)
    widths = _widths(call)
    past, present = call.input(places.past), call.used_output(1)
    if widths[2] != widths[0] and (past is not None or present is not None):
        raise call.decline(Code.SHAPE, "past and present hold keys and values of different widths")
    query, key, value = _projected(call, widths, places.quantisation)
    halves: tuple[ir.Value, ...] = ()
    if past is not None:
        halves = _half(call, past, 0), _half(call, past, 1)
    heads = int_attr(node, "num_heads", 0)
    mask, addend = call.input(places.mask), call.input(places.addend)
    projected = MultiHeadInputs(call, heads, query, key, value, halves, mask, addend)
    match, keys, values = projected.match(presents=present is not None)
    if present is None:
        return ConvertedOp(match)
    parts = [builder.unsqueeze(part, (0,)) for part in (keys, values)]
    return ConvertedOp(match, ((present, builder.concat(parts, 0)),))


def _widths(call: OpConverter) -> list[int]:
    """The widths of query, key and value."""
    attr = call.node.attributes.get("qkv_hidden_sizes")
    if attr is not None and any(attr.as_ints()):
        return list(attr.as_ints())
    total = call.size(call.required_input(WEIGHTS), -1)
    if total is None or total % 3:
        raise call.decline(
            Code.SHAPE, "the width of the projection is not known before the model runs"
        )
    return [total // 3] * 3


def _projected(
    call: OpConverter, widths: list[int], quantisation: tuple[int, int, int, int] | None
) -> list[ir.Value]:
    """Query, key and value, [B, S, width] each."""
    builder, operands, bias = (
        call.builder,
        [call.required_input(0), call.required_input(WEIGHTS)],
        call.input(BIAS),
    )
    if quantisation is None:
        made = builder.op("MatMul", operands)
        if bias is not None:
            made = builder.add(made, bias)
    else:
        scale, zero_point, weight_scale, weight_zero_point = (
            call.input(index) for index in quantisation
        )
        if scale is None or call.info.dtype(scale) != ir.DataType.FLOAT:
            raise call.decline(
                Code.READY_MADE, "a quantised product has a CPU kernel for float32 results only"
            )
        inputs = [*operands, scale, weight_scale, zero_point, weight_zero_point, bias]
        made = builder.op(
            "MatMulIntegerToFloat", inputs, dtype=ir.DataType.FLOAT, domain=call.node.domain
        )
    ends = np.cumsum([0, *widths])
    return [
        part_of(call, made, int(ends[index]), int(ends[index + 1]), axis=2) for index in range(3)
    ]


def _half(call: OpConverter, past: ir.Value, index: int) -> ir.Value:
    number = call.builder.constant(np.array(index, dtype=np.int64), "number")
    return call.builder.gather(past, number, 0)
