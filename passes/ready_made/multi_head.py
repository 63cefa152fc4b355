"""com.microsoft MultiHeadAttention.

    query, key, value   [B, S, N * D], [B, T, N * D], [B, T, N * E]
                        key and value [B, N, T, D] (cross attention with cached keys)
                        key [B, T, N, 2, D] and no value; query [B, S, N, 3, D] and neither
    bias                added to query, key and value before; to the query alone beside cached keys
    key_padding_mask, attention_bias, unidirectional, mask_filter_value
                        padding.py
    past_key, past_value   concatenated before key and value; present_key, present_value become what was concatenated

ONNX Runtime's CPU kernel does not take the packed forms of rank 5; they mean what the operator's documentation says.

Refused: the score matrix as an output, and buffers shared by past and present.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.match import AttentionMatch
from fa_compiler.passes.nodes import constant, int_attr
from fa_compiler.passes.ready_made.call import Call, Converted, Operand
from fa_compiler.passes.ready_made.keys import Keys, Measure
from fa_compiler.passes.ready_made.padding import Additions
from fa_compiler.passes.report import Code

BIAS, MASK, ADDEND, PAST_KEY, PAST_VALUE, PAST_LENGTH, INDIRECTION = range(3, 10)
PACKED = 5
SMALL = 1 << 16
"""Constants up to this many elements are cut before the run, not in it."""


def convert(call: Call) -> Converted:
    """The record of a MultiHeadAttention node."""
    if call.wanted(3) is not None:
        raise call.decline(Code.SCORES_ARE_OUTPUT, "qk, the scores, is read")
    if call.input(PAST_LENGTH) is not None or call.input(INDIRECTION) is not None:
        raise call.decline(Code.READY_MADE, "past and present share a buffer, which is written in place")
    query, key, value = _biased(call, *_operands(call))
    past_key, past_value = call.input(PAST_KEY), call.input(PAST_VALUE)
    past = None if past_key is None or past_value is None else (past_key, past_value)
    heads, mask, addend = int_attr(call.node, "num_heads", 0), call.input(MASK), call.input(ADDEND)
    presents = [call.wanted(1), call.wanted(2)]
    projected = Projected(call, heads, query, key, value, past, mask, addend)
    match, keys, values = projected.match(presents=any(presents))
    pairs = zip(presents, (keys, values), strict=True)
    return Converted(match, tuple((old, new) for old, new in pairs if old is not None))


def _biased(call: Call, *operands: ir.Value) -> tuple[ir.Value, ...]:
    """The operands with the bias of their projection; cached keys and values have had theirs."""
    bias = call.input(BIAS)
    if bias is None:
        return operands
    query, key, _ = operands
    made: list[ir.Value] = []
    start = 0
    for operand in (query,) if _cached(call, key) else operands:
        width = call.shape(operand)[-1].const
        if width is None:
            raise call.decline(Code.SHAPE, "the parts of the bias are not known before the model runs")
        part = part_of(call, bias, start, start + width, axis=0)
        made.append(call.builder.op("Add", [operand, part], call.info.dtype(operand)))
        start += width
    return (*made, *operands[len(made) :])


def part_of(call: Call, value: ir.Value, start: int, end: int, axis: int) -> ir.Value:
    """A slice of a value along one axis; of a small constant, a constant."""
    builder, array = call.builder, constant(value, limit=SMALL)
    if array is not None:
        return builder.constant(np.ascontiguousarray(array.take(range(start, end), axis)), "part")
    bounds = [builder.ints([number]) for number in (start, end, axis)]
    return builder.op("Slice", [value, *bounds], call.info.dtype(value))


def _operands(call: Call) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Query, key and value, each a value of its own."""
    query, key, value = call.needed(0), call.input(1), call.input(2)
    if key is None:
        return _unpacked(call, query, 0), _unpacked(call, query, 1), _unpacked(call, query, 2)
    if value is None:
        return query, _unpacked(call, key, 0), _unpacked(call, key, 1)
    return query, key, value


def _unpacked(call: Call, packed: ir.Value, index: int) -> ir.Value:
    """One part of [B, S, N, parts, D], as [B, S, N * D]."""
    if len(call.shape(packed)) != PACKED:
        raise call.decline(Code.RANK, f"{packed.name!r} is not packed in 5 dimensions")
    builder, dtype = call.builder, call.info.dtype(packed)
    part = builder.op(
        "Gather", [packed, builder.constant(np.array(index, dtype=np.int64), "number")], dtype, {"axis": 3}
    )
    return builder.op("Reshape", [part, builder.ints([0, 0, -1])], dtype)


@dataclass(frozen=True)
class Projected:
    """Query [B, S, N * D], key and value likewise or [B, N, T, D], with what is added to the scores."""

    call: Call
    heads: int
    query: ir.Value
    key: ir.Value
    value: ir.Value
    past: tuple[ir.Value, ir.Value] | None
    mask: ir.Value | None
    addend: ir.Value | None

    def match(self, presents: bool) -> tuple[AttentionMatch, ir.Value, ir.Value]:
        """The record, and all keys and values, with `presents` as [B, N, T, D]."""
        call, key, value = self.call, self.key, self.value
        new = call.shape(key)[2 if _cached(call, key) else 1]
        if self.past is not None or presents:
            key, value = call.split_heads(key, self.heads), call.split_heads(value, self.heads)
        if self.past is not None:
            key, value = (
                call.builder.op("Concat", [old, made], call.info.dtype(made), {"axis": 2})
                for old, made in zip(self.past, (key, value), strict=True)
            )
        q, k, v = call.operand(self.query, "BSH", self.heads), self._operand(key), self._operand(value)
        scores = call.scores(q, k, v)
        keys = Keys(call, Measure(self.query, 1), Measure(key, 2 if _cached(call, key) else 1), Measure(self.query, 0))
        past = None if self.past is None else self.past[0]
        plan = Additions(call, keys, scores, self.mask, self.addend, past, new).plan()
        match = call.record(q, k, v, scores, plan, call.number("scale", 0.0) or None, "BSH")
        return match, key, value

    def _operand(self, value: ir.Value) -> Operand:
        return self.call.operand(value, "BNSD" if _cached(self.call, value) else "BSH", self.heads)


def _cached(call: Call, value: ir.Value) -> bool:
    return len(call.shape(value)) == 4
