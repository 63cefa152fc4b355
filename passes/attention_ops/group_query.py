"""com.microsoft GroupQueryAttention.

    query, key, value   [B, S, N * D], [B, S, K * D], [B, S, K * D], or all three side by side in
                        query
    past_key, past_value   the earlier keys and values, [B, K, P, D]; group_cache.py joins the new
                           ones with them
    seqlens_k           the keys after the last one of a batch entry are excluded; still every query
                        row is computed
    causal              1 by default: key j is attended when j <= before + i, where `before` is the
                        number of keys that are taken from past
    local_window_size   w keys at most: before + i - w < j
    attention_bias      added; it is as wide as total_sequence_length. Where present is wider the
                        bias is padded: the keys there are after every row's last key
    head_sink, smooth_softmax
                        one more score in every row, the sink of FlashAttentionScore; for
                        smooth_softmax it is 0
    do_rotary           query and key are rotated before the attention (rotary.py)
    softcap             c: the scaled scores become c * tanh(scores / c) before attention_bias is
                        added (not on Ascend)
    k_scale, v_scale    the scales of int8 caches (group_int8.py)
    present_key, present_value   all keys and values, [B, K, T, D]

Key and value may have no rows beside a past, as in layers that read the caches of an earlier layer.
Then past is read where it lies; ONNX Runtime makes sure that it holds all keys. Its first seqlens_k
+ 1 rows are present, and the rest depends on the memory, as above (group_cache.py).

Without a past ONNX Runtime requires as many keys as rows, and total_sequence_length to be their
number. With a past it takes prompts, several rows of one batch entry, or one row of each batch
entry.

It has two kernels. The streaming one runs for float32 or quantised caches, several keys, causal
attention, present outputs, and neither a sink nor a soft cap. It gives 0 for a row without a key,
and an attention_bias of -inf or the lowest float32 excludes a key there (key_masks.py). Where it is
open whether there are several keys, the model asks in each run: a bias excludes nothing where there
is one. The other kernel gives that key's value then, whatever finite number the bias adds. Beside
-inf it gives NaN, so that the user has to vouch for a key in every row. The other kernel computes a
row without a key like any other row. For the rows of a prompt that lie after the last key of their
batch entry it moves the window back to that key. A window is therefore refused for it, except for a
single row with a past.

Where seqlens_k is proven to be total_sequence_length - 1 for every batch entry, nothing is excluded
behind it. The window is then one of positions, and a bias of 0 and excluding numbers is padding and
a band, if it has that structure.

Refused besides: new keys behind a past without present outputs, where ONNX Runtime reads other
memory in place of the past; caches of another type than the query, unless they are quantised;
sliding_window_cache; norms inside the operator; the score or probability matrix as an output;
query_seqlens, the number of rows of each batch entry that count in a chunk padded on the right: the
rows behind them are not written to the caches, and their results are not specified.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes
from fa_compiler.passes.answer.decline import first_reason
from fa_compiler.passes.answer.options import (
    DECODE,
    NO_EMPTY_ROWS,
    NO_EMPTY_ROWS_HINT,
    ONE_TOKEN_HINT,
)
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.attention_ops.call import ConvertedOp, OpConverter
from fa_compiler.passes.attention_ops.group_cache import Caches, RunSizes, full_length
from fa_compiler.passes.attention_ops.group_int8 import SCALES, Scale, is_quantised
from fa_compiler.passes.attention_ops.key_masks import DimRef, KeyMaskBuilder, Window
from fa_compiler.passes.attention_ops.multi_head import part_of
from fa_compiler.passes.attention_ops.rotary import Rotary
from fa_compiler.passes.emit.build import INT64
from fa_compiler.passes.ir.nodes import int_attr, operand_at
from fa_compiler.passes.layout.views import View
from fa_compiler.passes.masks.band import Band, SparseMode
from fa_compiler.passes.masks.magnitudes import FLOAT32_MAX
from fa_compiler.passes.masks.mask import MaskPlan
from fa_compiler.passes.masks.score_ops import BiasOp, ExcludedPositions
from fa_compiler.passes.matching.sinks import Sink

PAST, LENGTHS, TOTAL, ADDEND, SINK = (3, 4), 5, 6, 10, 11
NORMS = (14, 15)
VALID_ROWS = 16


def convert(call: OpConverter) -> ConvertedOp:
    """The record of a GroupQueryAttention node."""
    _check(call)
    heads, kv_heads = _heads(call)
    query, key, value = _operands(call, heads, kv_heads)
    past, rotated = call.input(PAST[0]), int_attr(call.node, "do_rotary", 0) == 1
    if past is None and not rotated:
        return _convert_prompt(call, query, key, value)
    sizes = RunSizes.of(call, query, call.required_input(LENGTHS), call.required_input(TOTAL))
    if past is not None and call.size(key, 1) == 0:
        return _convert_without_new(call, query, (key, value), sizes)
    caches = None
    if past is not None:
        call.check_presents(
            "ONNX Runtime's CPU kernel reads other memory in place of a past that has no present_key and present_value"
        )
        caches = Caches.of(
            call, query, sizes, [call.required_input(index) for index in PAST], kv_heads
        )
    if rotated:
        rotary = Rotary.of(call, sizes)
        query, key = rotary.turned(query, heads), rotary.turned(key, kv_heads)
    if caches is None:
        return _convert_prompt(call, query, key, value)
    return _convert_with_past(call, query, key, value, caches)


def _convert_with_past(
    call: OpConverter, query: ir.Value, key: ir.Value, value: ir.Value, caches: Caches
) -> ConvertedOp:
    """The record of a call with a past."""
    heads, kv_heads = _heads(call)
    if call.dim(key, 1) != call.dim(query, 1):
        raise call.decline(Code.SHAPE, "the new keys are not proven to be as many as the rows")
    olds = [call.required_input(index) for index in PAST]
    new = [call.split_heads(rows, kv_heads) for rows in (key, value)]
    scales = Scale.of(call, kv_heads, call.size(olds[0], 3))
    if scales is None:
        presents = read = [caches.present(old, rows) for old, rows in zip(olds, new, strict=True)]
    else:
        _check_quantised(call)
        parts = list(zip(scales, olds, new, strict=True))
        presents = [caches.present(old, scale.packed(rows)) for scale, old, rows in parts]
        read = [scale.unpacked(present) for scale, present in zip(scales, presents, strict=True)]
    q = call.operand(query, "BSH", heads)
    k, v = (call.operand(cache, "BNSD") for cache in read)
    scores = call.scores(q, k, v)
    key_masks = KeyMaskBuilder(call, DimRef(query, 1), DimRef(presents[0], 2), DimRef(query, 0))
    if caches.grow:
        plan = _plan_of_full(call, key_masks, scores, _window_behind(call, key_masks, olds[0]))
    else:
        plan = _plan_with_past(call, key_masks, scores, caches.sizes)
    plan = replace(plan, assumed=(*caches.assumed, *plan.assumed))
    match = call.record(
        q, k, v, scores, plan, call.number("scale", 0.0) or None, "BSH", _sink(call, scores[1])
    )
    return ConvertedOp(match, call.presents(*presents))


def _convert_without_new(
    call: OpConverter, query: ir.Value, empty: tuple[ir.Value, ir.Value], sizes: RunSizes
) -> ConvertedOp:
    """The record of a call whose new keys are none: it reads the caches that another layer has
    written."""
    heads, kv_heads = _heads(call)
    if is_quantised(call):
        raise call.decline(
            Code.READY_MADE, "the caches are quantised, and there are no new keys beside them"
        )
    if int_attr(call.node, "do_rotary", 0) == 1:
        query = Rotary.of(call, sizes).turned(query, heads)
    pasts = [call.required_input(index) for index in PAST]
    q = call.operand(query, "BSH", heads)
    k, v = (call.operand(past, "BNSD") for past in pasts)
    scores = call.scores(q, k, v)
    key_masks = KeyMaskBuilder(call, DimRef(query, 1), DimRef(pasts[0], 2), DimRef(query, 0))
    plan = _plan_with_past(call, key_masks, scores, sizes)
    made: list[ir.Value] = []
    if call.presents(*pasts):
        held = replace(sizes, rows=call.builder.ints([0]), before=sizes.lengths, full=None)
        caches = Caches.of(call, query, held, pasts, kv_heads)
        plan = replace(plan, assumed=(*caches.assumed, *plan.assumed))
        made = [
            caches.present(past, call.split_heads(new, kv_heads))
            for past, new in zip(pasts, empty, strict=True)
        ]
    match = call.record(
        q, k, v, scores, plan, call.number("scale", 0.0) or None, "BSH", _sink(call, scores[1])
    )
    return ConvertedOp(match, call.presents(*made))


def _convert_prompt(
    call: OpConverter, query: ir.Value, key: ir.Value, value: ir.Value
) -> ConvertedOp:
    """The record of a call without a past."""
    heads, kv_heads = _heads(call)
    q = call.operand(query, "BSH", heads)
    k, v = (call.operand(rows, "BSH", kv_heads) for rows in (key, value))
    scores = call.scores(q, k, v)
    key_masks = KeyMaskBuilder(call, DimRef(query, 1), DimRef(key, 1), DimRef(query, 0))
    plan = _plan_of_prompt(call, key_masks, scores)
    match = call.record(
        q, k, v, scores, plan, call.number("scale", 0.0) or None, "BSH", _sink(call, scores[1])
    )
    presents = tuple(
        (old, call.split_heads(new, kv_heads)) for old, new in call.presents(key, value)
    )
    return ConvertedOp(match, presents)


def _plan_of_prompt(call: OpConverter, key_masks: KeyMaskBuilder, scores: Arrangement) -> MaskPlan:
    """The plan of a call without a past."""
    seqlens, rows = call.required_input(LENGTHS), call.dim(call.required_input(0), 1)
    if full_length(call, seqlens, rows) is not None:
        return _plan_of_full(call, key_masks, scores, _window(call))
    lengths = key_masks.add_const(call.builder.cast(seqlens, INT64), 1)
    added = AttentionBias.of(call, key_masks, scores, _window(call), beside_masks=True)
    beyond = ExcludedPositions(call.aligned(key_masks.mask_from(lengths), scores))
    plan = key_masks.plan(scores, [beyond, *added.masked], added.bias, added.window, added.mode)
    return replace(plan, assumed=added.assumed)


def _plan_of_full(
    call: OpConverter, key_masks: KeyMaskBuilder, scores: Arrangement, window: Window | None
) -> MaskPlan:
    """The plan where every batch entry has all keys: every row sees its own, unless the bias
    excludes it."""
    added = AttentionBias.of(call, key_masks, scores, window, beside_masks=False)
    plan = key_masks.plan(scores, [*added.masked], added.bias, added.window, added.mode)
    if not added.masked or added.assumed:
        plan = replace(plan, empty_rows="")
    return replace(plan, assumed=added.assumed)


@dataclass(frozen=True)
class AttentionBias:
    """What attention_bias excludes and adds, and what the user vouches for. `window` and `mode` are
    the window of the operator and what of the bias is a band; one of them is None."""

    window: Window | None
    masked: tuple[ExcludedPositions, ...] = ()
    bias: tuple[BiasOp, ...] = ()
    mode: SparseMode | None = None
    assumed: tuple[str, ...] = ()

    @staticmethod
    def of(
        call: OpConverter,
        key_masks: KeyMaskBuilder,
        scores: Arrangement,
        window: Window | None,
        beside_masks: bool,
    ) -> AttentionBias:
        """The attention_bias of a call beside its window, and `beside_masks` if so; empty where
        there is none. Raises Decline."""
        addend = call.input(ADDEND)
        if addend is None:
            return AttentionBias(window)
        columns = call.viewer.space.size(scores[3])
        full = addend
        if call.dim(addend, -1) != columns:
            full = key_masks.filled_up(addend, 0.0)
        if not _streamed(call, behind=call.input(PAST[0]) is not None):
            return AttentionBias(window, bias=(call.adding(full, scores),))
        masked, bias = key_masks.added(addend, full, scores, -FLOAT32_MAX, filler=0.0)
        parts = None
        if masked and not bias:
            parts = key_masks.structured(full, scores, window, beside_masks)
        added = AttentionBias(window, tuple(masked), bias)
        if parts is not None:
            added = AttentionBias(parts.window, parts.masked, (), parts.mode)
        if not masked or call.shape(call.required_input(0))[1].is_at_least(2):
            return added
        if NO_EMPTY_ROWS in call.options.assume:
            return replace(added, assumed=(NO_EMPTY_ROWS,))
        if not _is_finite(call, addend):
            reason = "a masked row gives 0, but NaN where it has one key, and how many there are is not known"
            raise call.decline(Code.EMPTY_ROWS, reason, NO_EMPTY_ROWS_HINT)
        several = _has_several_keys(call)
        return replace(added, masked=tuple(_only_if(call, several, part) for part in added.masked))


def _is_finite(call: OpConverter, value: ir.Value) -> bool:
    """Is no number of a value -inf?"""
    values, bounds = call.facts.sets.of(value), call.facts.bounds.unless_nan(value)
    return (values is not None and -math.inf not in values) or (
        bounds is not None and bounds[0] > -math.inf
    )


def _has_several_keys(call: OpConverter) -> ir.Value:
    """Whether the run has several keys, a bool. Where it has one, ONNX Runtime runs its other
    kernel."""
    builder = call.builder
    total = builder.reshape(builder.cast(call.required_input(TOTAL), INT64), [])
    return builder.greater(total, builder.constant(np.array(1, np.int64), "number"))


def _only_if(call: OpConverter, condition: ir.Value, part: ExcludedPositions) -> ExcludedPositions:
    """Positions that are excluded only where a bool holds."""
    builder, view = call.builder, part.view
    excluded = builder.cast(view.base, ir.DataType.BOOL)
    if not part.when:
        excluded = builder.not_(excluded)
    both = builder.and_(excluded, condition)
    return ExcludedPositions(View(both, view.base_dims, view.dims), cut=part.cut)


def _plan_with_past(
    call: OpConverter, key_masks: KeyMaskBuilder, scores: Arrangement, sizes: RunSizes
) -> MaskPlan:
    """The plan of a call with a past. Every row sees its own key, unless it lies after the end of
    its batch entry."""
    alone = _single(call)
    excluded = _excluded_with_past(call, key_masks, sizes)
    added = AttentionBias.of(call, key_masks, scores, None, beside_masks=bool(excluded))
    masked = [ExcludedPositions(call.aligned(mask, scores)) for mask in excluded]
    plan = key_masks.plan(scores, [*masked, *added.masked], added.bias, None, added.mode)
    assumed = added.assumed
    if alone and call.size(call.required_input(0), 1) is None:
        assumed = (DECODE, *assumed)
    may_be_empty = (_window_size(call) > 0 and not alone) or (added.masked and not added.assumed)
    if not may_be_empty:
        plan = replace(plan, empty_rows="")
    return replace(plan, assumed=assumed)


def _excluded_with_past(
    call: OpConverter, key_masks: KeyMaskBuilder, sizes: RunSizes
) -> list[ir.Value]:
    """The masks of the keys that no row sees, and of those outside the window of each row."""
    width = _window_size(call)
    if not int_attr(call.node, "causal", 1):
        return [key_masks.mask_from(sizes.lengths)]
    if _single(call):
        end = sizes.after(call)
        excluded = [key_masks.mask_from(end)]
        if width > 0:
            excluded.append(key_masks.mask_before(key_masks.add_const(end, -width)))
        return excluded
    high, low = key_masks.by_batch(sizes.before), None
    if width > 0:
        low = key_masks.add_const(high, 1 - width)
    return [key_masks.mask_from(sizes.lengths), key_masks.mask_outside_band(low, high)]


def _window_size(call: OpConverter) -> int:
    """The number of keys that a row sees at most; -1 where there is no window."""
    return int_attr(call.node, "local_window_size", -1)


def _single(call: OpConverter) -> bool:
    """Is there a single row, proven or vouched for?"""
    rows = call.size(call.required_input(0), 1)
    return rows == 1 or (rows is None and DECODE in call.options.assume)


def _heads(call: OpConverter) -> tuple[int, int]:
    """The number of query heads, and that of key and value heads."""
    return int_attr(call.node, "num_heads", 0), int_attr(call.node, "kv_num_heads", 0)


def _check(call: OpConverter) -> None:
    """Decline what no attention of ours computes. The shapes are checked with the operands."""
    node = call.node
    call.check_matrix("output_qk", int_attr(node, "qk_output", 0) == 2)
    call.softcap()
    past = call.has_input(*PAST)
    reason = first_reason(
        {
            "query_seqlens: the rows that do not count are not written to the caches": call.has_input(
                VALID_ROWS
            ),
            "norms inside the operator are not taken apart": call.has_input(*NORMS),
            "the keys of a prompt are quantised, and no past says how": not past
            and call.has_input(*SCALES),
            "the cache holds a window, whose keys the operator moves when it is full, and unspecified rows behind": (
                int_attr(node, "sliding_window_cache", 0) != 0
            ),
            "a window of no keys": _window_size(call) == 0,
            "past and query have different types, and no scale says what the numbers of past mean": (
                past and not is_quantised(call) and _has_other_caches(call)
            ),
        }
    )
    if reason is not None:
        raise call.decline(Code.READY_MADE, reason)
    if _window_size(call) > 0 and not (_streamed(call) or (past and _single(call))):
        reason = "ONNX Runtime gives the padding behind a prompt the window of the prompt's last token here"
        is_open = past and call.size(call.required_input(0), 1) is None
        raise call.decline(Code.READY_MADE, reason, ONE_TOKEN_HINT if is_open else None)


def _has_other_caches(call: OpConverter) -> bool:
    """Has past another type than the query?"""
    types = {call.info.dtype(operand_at(call.node, index)) for index in (0, *PAST)}
    return len(types - {None}) > 1


def _check_quantised(call: OpConverter) -> None:
    """Decline int8 caches, unless an IncreFlashAttention would read them or there are several
    rows."""
    query = call.required_input(0)
    rows = call.size(query, 1)
    if rows is not None and rows > 1:
        return
    if not _single(call):
        reason = "int8 caches are read by IncreFlashAttention, which takes one row"
        raise call.decline(Code.READY_MADE, reason, ONE_TOKEN_HINT)
    what = ""
    if _has_sink(call) or call.has_input(ADDEND):
        what = "sinks and biases"
    if _window_size(call) > 0 and call.size(query, 0) != 1:
        what = "windows of several batch entries"
    if what:
        reason = f"int8 caches are read by IncreFlashAttention, which has no {what}: each step would copy the caches"
        raise call.decline(Code.READY_MADE, reason)


def _streamed(call: OpConverter, behind: bool = False) -> bool:
    """Does ONNX Runtime run its streaming kernel: float32 or quantised caches, causal, several
    keys, present outputs, no sink or soft cap?

    There are several keys where there are several rows; a single row may have several after a past,
    if `behind`. A row that has its own key gives the same in both kernels. Caches without new keys
    need no present outputs.
    """
    node = call.node
    if not int_attr(node, "causal", 1) or (
        call.size(call.required_input(0), 1) == 1 and not behind
    ):
        return False
    key = call.input(1)
    without_new = key is not None and len(call.shape(key)) == 3 and call.size(key, 1) == 0
    cached = without_new or (len(node.outputs) > 1 and bool(node.outputs[1].name))
    plain = not _has_sink(call) and call.softcap() == 0.0
    return (
        cached
        and plain
        and (call.info.dtype(call.required_input(0)) == ir.DataType.FLOAT or is_quantised(call))
    )


def _has_sink(call: OpConverter) -> bool:
    """Has every row one more score?"""
    return call.has_input(SINK) or int_attr(call.node, "smooth_softmax", 0) == 1


def _operands(call: OpConverter, heads: int, kv_heads: int) -> tuple[ir.Value, ir.Value, ir.Value]:
    query, key, value = call.required_input(0), call.input(1), call.input(2)
    if key is not None and value is not None:
        return query, key, value
    width = call.size(query, -1)
    parts = heads + 2 * kv_heads
    if width is None or not parts or width % parts:
        raise call.decline(
            Code.SHAPE,
            "the width of query, key and value together is not known before the model runs",
        )
    size = width // parts
    first, second = heads * size, (heads + kv_heads) * size
    cuts = ((0, first), (first, second), (second, width))
    query, key, value = (part_of(call, query, start, end, axis=2) for start, end in cuts)
    return query, key, value


def _window(call: OpConverter) -> Window | None:
    """The window of a prompt; None where a row sees all keys."""
    if not int_attr(call.node, "causal", 1):
        return None
    width = _window_size(call)
    if width < 0:
        return Window.of(None, 0)
    return Window.of(1 - width, 0)


def _window_behind(call: OpConverter, key_masks: KeyMaskBuilder, past: ir.Value) -> Window | None:
    """The window of rows behind a past that is full; None where a row sees all keys."""
    width = _window_size(call)
    if not int_attr(call.node, "causal", 1) or (
        width < 0 and call.size(call.required_input(0), 1) == 1
    ):
        return None
    before, lowest = call.dim(past, 2), None
    if width > 0:
        lowest = 1 - width
    lower = None if lowest is None else before + lowest
    bounds = key_masks.bounds_from(key_masks.length(DimRef(past, 2)), (lowest, 0))
    return Window(Band(lower, before), *bounds)


def _sink(call: OpConverter, heads: Axes) -> Sink | None:
    value = call.input(SINK)
    if value is not None:
        view = call.viewer.view(value, factors=False)
        if view is None or len(view.dims) != 1:
            raise call.decline(Code.RANK, f"{value.name!r} is not one number for each head")
        call.together(heads, view.dims[0], "number of heads")
        return Sink(view)
    if not _has_sink(call):
        return None
    return Sink()
