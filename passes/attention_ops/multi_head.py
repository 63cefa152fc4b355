"""com.microsoft MultiHeadAttention and DecoderMaskedMultiHeadAttention.

    query, key, value   [B, S, N * D], [B, T, N * D], [B, T, N * E]
                        or key and value [B, N, T, D] (cross attention with cached keys)
                        or key [B, T, N, 2, D], which holds the values, too; or query [B, S, N, 3,
                        D], which holds all
    bias                added to query, key and value first; beside cached keys only to the query
    key_padding_mask, attention_bias, unidirectional, mask_filter_value
                        padding.py
    past_key, past_value   concatenated in front of key and value; the results become present_key
                           and present_value
    past_sequence_length   the number of keys in caches [B, N, M, D] that have room for more. The
                        new keys are written after them (cache_rows.py), and the keys after the new
                        ones are excluded. Mask and bias are as wide as the keys so far, and are
                        padded to M. The excluded rows of present are those of past, whether the two
                        are one buffer or not, so the user need not say which

DecoderMaskedMultiHeadAttention computes the same for one row, and has past_sequence_length beside
its past. ONNX Runtime's CPU kernel runs it with past_present_share_buffer, or with cached keys and
values instead of a past and new ones.

ONNX Runtime's CPU kernel does not take the packed forms of rank 5. Here they mean what the
operator's documentation says.

Refused: the score matrix as an output; a past without both presents, beside which ONNX Runtime
reads what lies behind the new keys in memory; new keys [B, N, T, D] beside a cache with room, into
which it does not write them; cache_indirection, which names the beam whose cache holds a key; for a
decoder, query, key and value side by side in one tensor, with which ONNX Runtime crashes, and new
keys of several rows, of which it reads the wrong ones. Where the number of new rows is open, a run
with several of them ends in an error of a Reshape.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.attention_ops.cache_rows import CacheRows
from fa_compiler.passes.attention_ops.call import ConvertedOp, OpConverter, Operand
from fa_compiler.passes.attention_ops.key_masks import RANGE_SINCE, DimRef, KeyMaskBuilder
from fa_compiler.passes.attention_ops.padding import PreallocatedCache, ScoreBias
from fa_compiler.passes.emit.build import INT64
from fa_compiler.passes.ir.nodes import constant, int_attr
from fa_compiler.passes.matching.match import AttentionMatch

PACKED = 5
SMALL = 1 << 16
"""Constants up to this many elements are cut before the run, not in it."""


@dataclass(frozen=True)
class InputIndices:
    """The indices of the optional inputs of an operator."""

    bias: int
    mask: int
    addend: int
    past_key: int
    past_value: int
    past_length: int
    indirection: int


MULTI_HEAD = InputIndices(3, 4, 5, 6, 7, 8, 9)
DECODER = InputIndices(10, 3, 4, 5, 6, 7, 9)


def convert(call: OpConverter) -> ConvertedOp:
    """The record of a MultiHeadAttention node."""
    return _converted(call, MULTI_HEAD, call.input(MULTI_HEAD.past_length))


def convert_decoder(call: OpConverter) -> ConvertedOp:
    """The record of a DecoderMaskedMultiHeadAttention node."""
    if call.input(1) is None or call.input(2) is None:
        raise call.decline(
            Code.READY_MADE,
            "query, key and value lie side by side, which ONNX Runtime does not run",
        )
    cached, shared = (
        _cached(call, call.required_input(1)),
        int_attr(call.node, "past_present_share_buffer", 0) != 0,
    )
    not_taken = "which ONNX Runtime's CPU kernel does not take"
    if cached and shared:
        raise call.decline(Code.READY_MADE, f"cached keys are updated, {not_taken}")
    if cached:
        return _converted(call, DECODER, None)
    if not shared:
        raise call.decline(Code.READY_MADE, f"past and present are not one buffer, {not_taken}")
    return _converted(call, DECODER, call.required_input(DECODER.past_length))


def _converted(call: OpConverter, places: InputIndices, length: ir.Value | None) -> ConvertedOp:
    """The record of either operator, whose past has room for more keys behind its first `length` if
    that is given."""
    call.check_matrix("qk", after_softmax=False)
    if call.input(places.indirection) is not None:
        raise call.decline(
            Code.READY_MADE, "keys lie in the caches of other beams, and the data decide in which"
        )
    operands = _operands(call)
    if places is DECODER and length is not None:
        operands = operands[0], _one_row(call, operands[1]), _one_row(call, operands[2])
    query, key, value = _biased(call, call.input(places.bias), *operands)
    past: tuple[ir.Value, ...] = ()
    if call.input(places.past_key) is not None and call.input(places.past_value) is not None:
        past = call.required_input(places.past_key), call.required_input(places.past_value)
    if past:
        call.check_presents(
            "ONNX Runtime's CPU kernel reads beyond the new keys where a past has no present_key and present_value"
        )
    if length is not None and not past:
        raise call.decline(Code.READY_MADE, "the length of a past is given, and no past")
    if length is not None and _cached(call, key):
        reason = (
            f"{key.name!r} has four dimensions, and ONNX Runtime's CPU kernel does not write such keys "
            "into a cache"
        )
        raise call.decline(Code.READY_MADE, reason, "give key and value three dimensions")
    heads, mask, addend = (
        int_attr(call.node, "num_heads", 0),
        call.input(places.mask),
        call.input(places.addend),
    )
    projected = MultiHeadInputs(call, heads, query, key, value, past, mask, addend, length)
    match, keys, values = projected.match(presents=bool(call.presents(key, value)))
    return ConvertedOp(match, call.presents(keys, values))


def _biased(call: OpConverter, bias: ir.Value | None, *operands: ir.Value) -> tuple[ir.Value, ...]:
    """The operands with the bias of their projection added; cached keys and values already contain
    theirs."""
    if bias is None:
        return operands
    query, key, _ = given = operands
    made: list[ir.Value] = []
    start = 0
    if _cached(call, key):
        operands = (query,)
    for operand in operands:
        width = call.size(operand, -1)
        if width is None:
            raise call.decline(
                Code.SHAPE, "the parts of the bias are not known before the model runs"
            )
        part = part_of(call, bias, start, start + width, axis=0)
        made.append(call.builder.add(operand, part))
        start += width
    return (*made, *given[len(made) :])


def part_of(call: OpConverter, value: ir.Value, start: int, end: int, axis: int) -> ir.Value:
    """A slice of a value along one axis; that of a small constant is a constant. Raises Decline
    without the axis."""
    builder, array = call.builder, constant(value, limit=SMALL)
    if call.info.shape(value) is not None:
        call.dim(value, axis)
    if array is not None:
        return builder.constant(np.ascontiguousarray(array.take(range(start, end), axis)), "part")
    return builder.slice(value, [start], [end], [axis])


def _operands(call: OpConverter) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Query, key and value, each as a value of its own."""
    query, key, value = call.required_input(0), call.input(1), call.input(2)
    if key is None:
        return _unpacked(call, query, 0), _unpacked(call, query, 1), _unpacked(call, query, 2)
    if value is None:
        return query, _unpacked(call, key, 0), _unpacked(call, key, 1)
    return query, key, value


def _one_row(call: OpConverter, value: ir.Value) -> ir.Value:
    """A decoder's new keys or values [B, 1, N * D]. Raises Decline where there are several rows.

    ONNX Runtime reads the wrong rows there. Where their number is open, a Reshape refuses a run
    with several.
    """
    rows, width = call.size(value, 1), call.size(value, 2)
    if rows == 1 or width is None:  # an unknown width is declined later, with the head size
        return value
    if rows is not None:
        reason = f"{value.name!r} has {rows} rows, and ONNX Runtime's CPU kernel writes one behind the past"
        raise call.decline(Code.READY_MADE, reason)
    return call.builder.reshape(value, [0, 1, width])


def _unpacked(call: OpConverter, packed: ir.Value, index: int) -> ir.Value:
    """One part of [B, S, N, parts, D], as [B, S, N * D]."""
    shape = call.shape(packed)
    if len(shape) != PACKED:
        raise call.decline(Code.RANK, f"{packed.name!r} is not packed in 5 dimensions")
    width = (shape[2] * shape[4]).const
    if width is None:
        raise call.decline(Code.SHAPE, "the head size is not known before the model runs")
    builder = call.builder
    part = builder.gather(packed, builder.constant(np.array(index, dtype=np.int64), "number"), 3)
    return builder.reshape(part, [0, 0, width])


@dataclass(frozen=True)
class MultiHeadInputs:
    """Query [B, S, N * D], key and value likewise or [B, N, T, D], with their past and what is
    added to the scores."""

    call: OpConverter
    heads: int
    query: ir.Value
    key: ir.Value
    value: ir.Value
    past: tuple[ir.Value, ...]
    mask: ir.Value | None
    addend: ir.Value | None
    length: ir.Value | None = None
    """The number of keys in a past that has room for more, int32 [1]."""

    def match(self, presents: bool) -> tuple[AttentionMatch, ir.Value, ir.Value]:
        """The record, all keys and all values; with `presents` keys and values are [B, N, T, D]."""
        call, key, value = self.call, self.key, self.value
        added = self._rows(key)
        new = call.dim(key, added.axis)
        if self.past or presents:
            key, value = call.split_heads(key, self.heads), call.split_heads(value, self.heads)
        past: ir.Value | PreallocatedCache | None = None
        if self.past:
            past = self.past[0]
            if self.length is not None:
                past = self._preallocated(past, self.length, added)
            pairs = zip(self.past, (key, value), strict=True)
            key, value = (self._together(old, own, past) for old, own in pairs)
        q, k, v = (
            call.operand(self.query, "BSH", self.heads),
            self._operand(key),
            self._operand(value),
        )
        scores = call.scores(q, k, v)
        key_masks = KeyMaskBuilder(
            call, DimRef(self.query, 1), self._rows(key), DimRef(self.query, 0)
        )
        plan = ScoreBias(call, key_masks, scores, self.mask, self.addend, past, new).plan()
        match = call.record(q, k, v, scores, plan, call.number("scale", 0.0) or None, "BSH")
        return match, key, value

    def _preallocated(self, past: ir.Value, length: ir.Value, added: DimRef) -> PreallocatedCache:
        builder = self.call.builder
        if len(self.call.shape(past)) != 4 or builder.opset < RANGE_SINCE:
            reason = f"new keys cannot be placed in {past.name!r} in opset {builder.opset}"
            raise self.call.decline(Code.READY_MADE, reason)
        before = builder.reshape(builder.cast(length, INT64), [1])
        return PreallocatedCache(before, builder.length(added.value, added.axis))

    def _together(
        self, old: ir.Value, new: ir.Value, past: ir.Value | PreallocatedCache
    ) -> ir.Value:
        """The old and the new keys or values in one tensor."""
        call, dtype = self.call, self.call.info.dtype(new)
        if not isinstance(past, PreallocatedCache):
            return call.builder.concat([old, new], 2)
        made = CacheRows(call, self.heads, DimRef(self.query, 0)).updated(
            old, new, past.before, past.rows
        )
        call.info.set(made, (*call.shape(new)[:2], *call.shape(old)[2:]), dtype)
        return made

    def _operand(self, value: ir.Value) -> Operand:
        return self.call.operand(value, self._layout(value), self.heads)

    def _rows(self, value: ir.Value) -> DimRef:
        """The number of keys or values."""
        return DimRef(value, self._layout(value).index("S"))

    def _layout(self, value: ir.Value) -> str:
        """The layout of keys or values."""
        return "BNSD" if _cached(self.call, value) else "BSH"


def _cached(call: OpConverter, value: ir.Value) -> bool:
    return len(call.shape(value)) == 4
