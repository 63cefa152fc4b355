"""The attention operators of ATC's ONNX parser: NPUFlashAttention, NPUPromptFlashAttention,
NPUIncreFlashAttention.

                    NPUFlashAttention          NPUPromptFlashAttention      NPUIncreFlashAttention
    layouts         BSH, SBH                   BSH, BSND, BNSD, BNSD_BSND   BSH, BSND, BNSD; one row
    key heads       width / head size          num_key_value_heads or all   all
    scores          scale * (q k' + bias)      scale * q k' + bias          scale * q k' + bias
    mask            True excludes; sparse_mode 0 to 4 for the first two, see below; by key alone for
                    the third
    lengths         none                       of the keys                  of the keys
    input numbers   0..8                       0..4, 6                      0..5: one key and one value tensor

    sparse_mode without a mask                 no mask at all
    0                                          the mask, and -pre <= j - i <= next; from 2^20 on pre
                                               or next is no limit
    1                                          the mask
    2, 3, 4 with a constant compressed mask    the bands of FlashAttentionScore; 3 and 4 only
                                               without lengths

Refused: dropout, prefixes, lengths of the queries (the rows after them are not specified),
compressed biases, quantisation, a compressed mask that is not a constant, floats as masks, and
lists of key and value tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from fa_compiler.op_registry.constraints.training import compressed_mask
from fa_compiler.passes.algebra.axes import Arrangement
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.attention_ops.call import ConvertedOp, OpConverter
from fa_compiler.passes.attention_ops.key_masks import DimRef, KeyMaskBuilder, Window
from fa_compiler.passes.ir.nodes import constant, int_attr, text_attr
from fa_compiler.passes.masks.score_ops import BiasOp, ExcludedPositions, Scale

LONGEST = 1 << 20
"""No sequence is longer: pre_tokens or next_tokens of this size or more are no limit."""
COMPRESSED_ROWS = 1024
MASKS = (ir.DataType.BOOL, ir.DataType.UINT8, ir.DataType.INT8)
INCREMENTAL_FILL = -1e12
BY_ROW = {3: (1,)}
BY_KEY = {2: (1, 2), 3: (1,)}
"""The dimensions that a mask of rows and keys, and one of keys alone, lack at a rank."""


@dataclass(frozen=True)
class NpuCall:
    """The inputs and attributes of any of the three operators, as FlashAttentionScore names
    them."""

    layout: str
    output_layout: str
    heads: int
    kv_heads: int
    scale: float
    bias: ir.Value | None
    scaled_bias: bool
    mask: ir.Value | None
    lengths: ir.Value | None
    mode: int = 1
    before: int = LONGEST
    after: int = LONGEST

    def band(self, corner: Dim) -> Window:
        """The window of pre and next tokens around the diagonal through a corner."""
        lower = upper = None
        if self.before < LONGEST:
            lower = corner - self.before
        if self.after < LONGEST:
            upper = corner + self.after
        return Window.of(lower, upper)


def flash(call: OpConverter) -> ConvertedOp:
    """The record of an NPUFlashAttention node."""
    layout, heads = _text(call, "input_layout"), int_attr(call.node, "head_num", 0)
    if layout not in ("BSH", "SBH"):
        raise call.decline(Code.READY_MADE, f"its parser does not know the layout {layout!r}")
    if call.number("keep_prob", 1.0) != 1.0:
        raise call.decline(
            Code.READY_MADE, "dropout, whose mask is made up where the operator is parsed"
        )
    _refuse(call, {6: "a prefix", 7: "lengths of the queries", 8: "lengths of the keys"})
    width, kv_width = call.size(call.required_input(0), 2), call.size(call.required_input(1), 2)
    if width is None or kv_width is None or heads <= 0 or kv_width * heads % width:
        raise call.decline(Code.SHAPE, "the number of heads is not known before the model runs")
    return _converted(
        call,
        NpuCall(
            layout,
            layout,
            heads,
            kv_width * heads // width,
            call.number("scale", 1.0),
            _filled_input(call, 3),
            scaled_bias=True,
            mask=_filled_input(call, 5),
            lengths=None,
            mode=int_attr(call.node, "sparse_mode", 0),
            before=int_attr(call.node, "pre_tockens", 0),
            after=int_attr(call.node, "next_tockens", 0),
        ),
    )


def prompt(call: OpConverter) -> ConvertedOp:
    """The record of an NPUPromptFlashAttention node."""
    layout, heads = _text(call, "input_layout"), int_attr(call.node, "num_heads", 0)
    if layout not in ("BSH", "BSND", "BNSD", "BNSD_BSND"):
        raise call.decline(
            Code.READY_MADE, f"the layout {layout!r} is none of FlashAttentionScore's"
        )
    _refuse(call, {5: "lengths of the queries", **dict.fromkeys(range(7, 12), "quantisation")})
    return _converted(
        call,
        NpuCall(
            layout.split("_")[0],
            layout.split("_")[-1],
            heads,
            int_attr(call.node, "num_key_value_heads", 0) or heads,
            call.number("scale_value", 1.0),
            _filled_input(call, 3),
            scaled_bias=False,
            mask=_filled_input(call, 4),
            lengths=_filled_input(call, 6),
            mode=int_attr(call.node, "sparse_mode", 0),
            before=int_attr(call.node, "pre_tokens", 0),
            after=int_attr(call.node, "next_tokens", 0),
        ),
    )


def incremental(call: OpConverter) -> ConvertedOp:
    """The record of an NPUIncreFlashAttention node."""
    layout, heads = _text(call, "input_layout"), int_attr(call.node, "num_heads", 0)
    if layout not in ("BSH", "BSND", "BNSD"):
        raise call.decline(
            Code.READY_MADE, f"the layout {layout!r} is none of FlashAttentionScore's"
        )
    if len(call.node.inputs) != 6:
        raise call.decline(Code.READY_MADE, "lists of key and value tensors")
    if call.size(call.required_input(0), layout.index("S")) != 1:
        raise call.decline(Code.SHAPE, "the query is not proven to be a single row")
    scale = call.number("scale_value", 1.0)
    lengths = _filled_input(call, 5)
    return _converted(
        call,
        NpuCall(
            layout,
            layout,
            heads,
            heads,
            scale,
            _filled_input(call, 3),
            False,
            _filled_input(call, 4),
            lengths,
        ),
        by_key=True,
    )


def _converted(call: OpConverter, given: NpuCall, by_key: bool = False) -> ConvertedOp:
    counts = (given.heads, given.kv_heads, given.kv_heads)
    q, k, v = (
        call.operand(call.required_input(index), given.layout, count)
        for index, count in enumerate(counts)
    )
    scores = call.scores(q, k, v)
    batch, rows = (DimRef(call.required_input(0), given.layout.index(letter)) for letter in "BS")
    key_masks = KeyMaskBuilder(
        call, rows, DimRef(call.required_input(1), given.layout.index("S")), batch
    )
    masked: list[ExcludedPositions] = []
    bias = _bias(call, given, scores)
    if by_key and given.mask is not None:
        mask = ExcludedPositions(call.aligned(_in_rank_4(call, given.mask, BY_KEY), scores))
        bias = (mask.filled(call.node, INCREMENTAL_FILL), *bias)
    window = None
    if given.mask is not None and not by_key:
        window = _masked(call, given, scores, masked)
    if given.lengths is not None:
        masked.append(ExcludedPositions(call.aligned(key_masks.mask_from(given.lengths), scores)))
    plan = key_masks.plan(scores, masked, bias, window)
    return ConvertedOp(call.record(q, k, v, scores, plan, given.scale, given.output_layout))


def _bias(call: OpConverter, given: NpuCall, scores: Arrangement) -> tuple[BiasOp, ...]:
    if given.bias is None:
        return ()
    if call.size(given.bias, -2) == COMPRESSED_ROWS != call.viewer.space.size(scores[2]).const:
        raise call.decline(Code.READY_MADE, "a bias of 1024 rows is a compressed one for more")
    add = call.adding(given.bias, scores)
    if not given.scaled_bias:
        return (add,)
    return add, Scale(call.node, given.scale)


def _is_compressed_mask(content: np.ndarray[Any, Any]) -> bool:
    """Whether this is the mask of sparse_modes 2 to 4: [2048, 2048], with leading 1s, nonzero above
    the diagonal."""
    wanted = compressed_mask(2)
    if content.shape[-2:] != wanted.shape or content.size != wanted.size:
        return False
    return np.array_equal(content.reshape(wanted.shape) != 0, wanted)


def _masked(
    call: OpConverter, given: NpuCall, scores: Arrangement, masked: list[ExcludedPositions]
) -> Window | None:
    """The window of the sparse_mode, if it has one. A mask that is needed besides is added to
    `masked`."""
    assert given.mask is not None
    if given.mode in (0, 1):
        masked.append(ExcludedPositions(call.aligned(_in_rank_4(call, given.mask, BY_ROW), scores)))
        if given.mode == 1 or min(given.before, given.after) >= LONGEST:
            return None
        return given.band(Dim(0))
    if given.mode > 4 or given.mode < 0:
        raise call.decline(
            Code.READY_MADE, f"sparse_mode {given.mode} needs what the operator has no input for"
        )
    content = constant(given.mask)
    if content is None or not _is_compressed_mask(content):
        raise call.decline(
            Code.READY_MADE, f"the mask of sparse_mode {given.mode} is not the constant triangle"
        )
    if given.mode == 2:
        return Window.of(None, 0)
    if given.lengths is not None:
        raise call.decline(
            Code.READY_MADE, "the band's corner lies at another length in each batch"
        )
    space = call.viewer.space
    corner = space.size(scores[3]) - space.size(scores[2])
    if given.mode == 3:
        return Window.of(None, corner)
    return given.band(corner)


def _in_rank_4(
    call: OpConverter, mask: ir.Value, missing: Mapping[int, tuple[int, ...]]
) -> ir.Value:
    """A mask as bool, with the dimensions of heads and rows that are `missing` at its rank."""
    if call.info.dtype(mask) not in MASKS:
        raise call.decline(Code.DTYPE, "the mask is neither boolean nor of 8 bits")
    rank = len(call.shape(mask))
    mask = call.builder.cast(mask, ir.DataType.BOOL)
    return call.builder.unsqueeze(mask, missing.get(rank, ()))


def _text(call: OpConverter, name: str) -> str:
    return text_attr(call.node, name, "")


def _filled_input(call: OpConverter, index: int) -> ir.Value | None:
    """An input; None where it is absent or has no elements, which means the same."""
    value = call.input(index)
    if value is None or any(size == 0 for size in call.shape(value)):
        return None
    return value


def _refuse(call: OpConverter, inputs: dict[int, str]) -> None:
    for index, what in inputs.items():
        if _filled_input(call, index) is not None:
            raise call.decline(Code.READY_MADE, f"{what} has no counterpart here")
