"""com.microsoft GroupQueryAttention without a past: a prompt.

    query, key, value   [B, S, N * D], [B, S, K * D], [B, S, K * D], or all three side by side in query
    seqlens_k           keys after a batch's last one are excluded; every query row is computed all the same
    causal              1 unless given: key j is attended when j <= i
    local_window_size   w keys at most: i - w < j
    attention_bias      added
    head_sink, smooth_softmax
                        one more score in every row, the operator's sink; 0 for smooth_softmax
    present_key, present_value   the keys and values by heads

Without a past ONNX Runtime insists on as many keys as rows, and on total_sequence_length being their number. It has two
kernels. That for float32, several causal rows, present outputs and no sink gives 0 for a row without a key, and takes
-inf and the lowest float32 in attention_bias for an excluded key (keys.py); the other computes such rows as any other,
and looks back from a batch's last key in the rows behind it, so a window is refused there.

Refused besides: a past, because it may be the buffer that present is written to in place, which separate operators
cannot do; softcap; rotary positions and norms inside the operator; quantised keys; the score or probability matrix as
an output.
"""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.passes.axes import Axes
from fa_compiler.passes.band import Band
from fa_compiler.passes.mask_values import FLOAT32_MAX
from fa_compiler.passes.nodes import int_attr
from fa_compiler.passes.ready_made.call import Call, Converted
from fa_compiler.passes.ready_made.keys import Keys, Measure, Window
from fa_compiler.passes.ready_made.multi_head import part_of
from fa_compiler.passes.report import Code
from fa_compiler.passes.sinks import Sink
from fa_compiler.passes.symbolic import Dim
from fa_compiler.passes.terms import Add, Masked, Shift

PAST, LENGTHS, ADDEND, SINK = (3, 4), 5, 10, 11
SCALES, NORMS = (12, 13), (14, 15)


def convert(call: Call) -> Converted:
    """The record of a GroupQueryAttention node."""
    _check(call)
    node = call.node
    heads, kv_heads = int_attr(node, "num_heads", 0), int_attr(node, "kv_num_heads", 0)
    query, key, value = _operands(call, heads, kv_heads)
    q, k, v = (call.operand(each, "BSH", count) for each, count in ((query, heads), (key, kv_heads), (value, kv_heads)))
    scores = call.scores(q, k, v)
    keys = Keys(call, Measure(query, 1), Measure(key, 1), Measure(query, 0))
    lengths = keys.more(call.builder.cast(call.needed(LENGTHS), ir.DataType.INT64), 1)
    masked = [Masked(call.aligned(keys.beyond(lengths), scores))]
    shifts: tuple[Shift, ...] = ()
    addend = call.input(ADDEND)
    if addend is not None and _streamed(call):
        excluded, shifts = keys.added(addend, addend, scores, -FLOAT32_MAX)
        masked.extend(excluded)
        if excluded and not call.shape(query)[1].is_at_least(2):
            reason = "a masked row gives 0, but NaN where it is the only one, and how many there are is not known"
            raise call.decline(Code.EMPTY_ROWS, reason)
    elif addend is not None:
        shifts = (Add(call.aligned(addend, scores), 1.0),)
    plan = keys.plan(scores, masked, shifts, _window(call))
    match = call.record(q, k, v, scores, plan, call.number("scale", 0.0) or None, "BSH", _sink(call, scores[1]))
    pairs = ((call.wanted(1), key), (call.wanted(2), value))
    return Converted(match, tuple((old, call.split_heads(new, kv_heads)) for old, new in pairs if old is not None))


def _check(call: Call) -> None:
    node = call.node
    if call.wanted(3) is not None:
        late = int_attr(node, "qk_output", 0) == 2
        code = Code.PROBABILITIES_ARE_OUTPUT if late else Code.SCORES_ARE_OUTPUT
        raise call.decline(code, f"output_qk, the {'probabilities' if late else 'scores'}, is read")
    if call.number("softcap", 0.0) != 0.0:
        raise call.decline(Code.SOFTCAP, "the scores go through softcap * tanh(scores / softcap)")
    if any(call.input(index) is not None for index in PAST):
        reason = "past and present may share a buffer that is written in place, which separate operators cannot do"
        raise call.decline(Code.READY_MADE, reason)
    if int_attr(node, "do_rotary", 0):
        raise call.decline(Code.READY_MADE, "do_rotary: rotary positions inside the operator are not taken apart")
    if any(call.input(index) is not None for index in (*SCALES, *NORMS)):
        raise call.decline(Code.READY_MADE, "quantised keys or norms inside the operator are not taken apart")
    if int_attr(node, "local_window_size", -1) == 0 or int_attr(node, "sliding_window_cache", 0):
        raise call.decline(Code.READY_MADE, "a window of no keys, or one kept in the cache")
    if int_attr(node, "local_window_size", -1) > 0 and not _streamed(call):
        reason = "here ONNX Runtime moves the window of rows behind a batch's end back to that end"
        raise call.decline(Code.READY_MADE, reason)


def _streamed(call: Call) -> bool:
    """Does ONNX Runtime take its second kernel: float32, causal, with present outputs, without a sink, several rows?"""
    node = call.node
    if not int_attr(node, "causal", 1) or call.size(call.needed(0), 1) == 1:
        return False
    cached = len(node.outputs) > 1 and bool(node.outputs[1].name)
    sunk = call.input(SINK) is not None or int_attr(node, "smooth_softmax", 0) == 1
    return cached and not sunk and call.info.dtype(call.needed(0)) == ir.DataType.FLOAT


def _operands(call: Call, heads: int, kv_heads: int) -> tuple[ir.Value, ir.Value, ir.Value]:
    query, key, value = call.needed(0), call.input(1), call.input(2)
    if key is not None and value is not None:
        return query, key, value
    width = call.size(query, -1)
    parts = heads + 2 * kv_heads
    if width is None or not parts or width % parts:
        raise call.decline(Code.SHAPE, "the width of query, key and value together is not known before the model runs")
    size = width // parts
    first, second = heads * size, (heads + kv_heads) * size
    cuts = ((0, first), (first, second), (second, width))
    query, key, value = (part_of(call, query, start, end, axis=2) for start, end in cuts)
    return query, key, value


def _window(call: Call) -> Window | None:
    if not int_attr(call.node, "causal", 1):
        return None
    before = int_attr(call.node, "local_window_size", -1)
    low = None if before < 0 else 1 - before
    return Window(Band(None if low is None else Dim(low), Dim(0)), low, 0)


def _sink(call: Call, heads: Axes) -> Sink | None:
    value = call.input(SINK)
    if value is not None:
        view = call.viewer.view(value, factors=False)
        if view is None or len(view.dims) != 1:
            raise call.decline(Code.RANK, f"{value.name!r} is not one number for each head")
        call.together(heads, view.dims[0], "number of heads")
        return Sink(view)
    return Sink() if int_attr(call.node, "smooth_softmax", 0) == 1 else None
