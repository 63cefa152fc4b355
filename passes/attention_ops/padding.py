"""What com.microsoft's operators add to the scores in ONNX Runtime's CPU kernels: padding,
causality and bias.

    scores = (scale * q k' + attention_bias) + M
    M      = lowest              at causal positions: j > past + i, in every row but the last
           = mask_filter_value   at padded positions
           = 0                   elsewhere

`lowest` is the lowest float32; a position that is causal and padded gets it instead of
mask_filter_value. The last row is never causal. That makes a difference only where there are more
new keys than rows, which is refused. A padding mask holds integers and has one of these forms:

    [B]         lengths: keys from a length on are padded
    [2 * B]     all ends, then all starts: keys from an end on are padded, and keys before a start
    [3 * B + 2] the lengths first, then numbers that only other kernels read
    [B, T]      keys are padded where the mask is not positive. ONNX Runtime ignores [B, 1] beside
                more keys, and refuses it beside a cache with room
    [B, S, T]   the same for each row

    what                                        plan
    ------------------------------------------  ------------------------------------------------------------
    padding alone, bias alone                   as for an Add of the same numbers (mask.py)
    causal alone                                sparse_mode
    causal and padding by `lowest`              sparse_mode and atten_mask; a row whose visible keys are all padded
                                                gives the mean of all values, for all scores are `lowest`
    causal and padding by another number,       sparse_mode and real_shift: beside any visible key a key with the score
      not below -3e38, bias above -1e38           `lowest` has no weight
    anything else with causality                real_shift: the sum as it is written above
    padding and bias                            real_shift, likewise
    keys after the last new one                atten_mask for these keys, real_shift for padding and bias. Every row
                                                  sees its own key, so that later keys have no weight in any row
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.decline import Decline, label
from fa_compiler.passes.answer.options import MASKS_DOMINATE, NO_EMPTY_ROWS, NO_EMPTY_ROWS_HINT
from fa_compiler.passes.answer.report import Code, Missed, MissedCode
from fa_compiler.passes.attention_ops.call import OpConverter
from fa_compiler.passes.attention_ops.key_masks import DimRef, KeyMaskBuilder, Window
from fa_compiler.passes.ir.nodes import int_attr
from fa_compiler.passes.masks.band import Band
from fa_compiler.passes.masks.magnitudes import DOMINATING, FLOAT32_MAX, MAX_FINE, SMALL_SHARE
from fa_compiler.passes.masks.mask import MaskPlan
from fa_compiler.passes.masks.score_ops import BiasOp, ExcludedPositions

FILTER_FLOOR = -3e38
BIAS_FLOOR = -1e38
"""Sums above these are so far above `lowest` that a key with the score `lowest` has the probability
0."""


@dataclass(frozen=True)
class PreallocatedCache:
    """A cache with room for more keys: it holds `before` keys and, after them, `rows` new ones,
    int64 [1] each."""

    before: ir.Value
    rows: ir.Value


@dataclass(frozen=True)
class ScoreBias:
    """The additions to the scores of one call.

    `mask` and `bias` are inputs of the call, and `new` is the number of new keys. `past` is the
    tensor of the older keys, or the cache with room that holds them and the new ones.
    """

    call: OpConverter
    key_masks: KeyMaskBuilder
    scores: Arrangement
    mask: ir.Value | None
    bias: ir.Value | None
    past: ir.Value | PreallocatedCache | None
    new: Dim

    def plan(self) -> MaskPlan:
        """The plan; see the table above."""
        padded = None
        if self.mask is not None:
            padded = self._padded(self.mask)
        band = self._causal()
        assumed = self._check_order(padded is not None, band is not None)
        plan = self._ordered(padded, band)
        return replace(plan, assumed=tuple(sorted({*plan.assumed, *assumed})))

    def _ordered(self, padded: ir.Value | None, band: Window | None) -> MaskPlan:
        """The plan where the order of the sums does not matter."""
        if isinstance(self.past, PreallocatedCache):
            return self._plan_for_preallocated(self.past, padded, band)
        if band is None:
            return self._bidirectional(padded)
        if padded is None and self.bias is None:
            return self.key_masks.plan(self.scores, [], (), band)
        if self.bias is None and self.filter == -FLOAT32_MAX:
            return self._filled_with_lowest(padded, band)
        if self._stays_above():
            return self.key_masks.plan(self.scores, [], self._sum(padded, None), band)
        if NO_EMPTY_ROWS in self.call.options.assume:
            plan = self.key_masks.plan(self.scores, [], self._sum(padded, None), band)
            return replace(plan, assumed=(NO_EMPTY_ROWS,))
        bias = self._sum(padded, self.key_masks.mask_outside_band(band.low, band.high))
        return MaskPlan(bias=bias, missed=(self._missed(NO_EMPTY_ROWS_HINT),))

    def _check_order(self, padded: bool, causal: bool) -> tuple[str, ...]:
        """What the user vouches for so that the bias may be added to M instead of to the scores.
        Raises Decline."""
        fills = ((self.filter, padded), (-FLOAT32_MAX, causal))
        numbers = [number for number, given in fills if given and number not in (0.0, -math.inf)]
        if self.bias is None or not numbers or (ends := self._finite_ends(self.bias)) is None:
            return ()
        low, high = ends
        needed = {
            MASKS_DOMINATE: any(
                number <= -MAX_FINE and high > -number * SMALL_SHARE for number in numbers
            ),
            NO_EMPTY_ROWS: any(
                number > DOMINATING and max(abs(number), -low, high) >= MAX_FINE
                for number in numbers
            ),
        }
        wanted = [word for word, is_needed in needed.items() if is_needed]
        if set(wanted) <= self.call.options.assume:
            return tuple(wanted)
        raise self._depends_on_order(wanted)

    def _depends_on_order(self, wanted: Sequence[str]) -> Decline:
        """The decline of sums whose order may matter, if the user does not vouch for these
        words."""
        reasons = {
            MASKS_DOMINATE: "a bias as large as the number of masked keys would cancel it, and its size is not known",
            NO_EMPTY_ROWS: f"ONNX Runtime adds {self.filter:g} to the sum of scores and bias, which rounds a row that "
            "is padded everywhere as no sum of the two masks does",
        }
        conditions = {
            MASKS_DOMINATE: "no number of the bias comes near the mask's",
            NO_EMPTY_ROWS: "no query row is masked everywhere",
        }
        reason = "; ".join(reasons[word] for word in wanted)
        condition = " and ".join(conditions[word] for word in wanted)
        return self.call.decline(
            Code.MASK_VALUE, reason, f"--assume {','.join(wanted)} if {condition}"
        )

    def _finite_ends(self, bias: ir.Value) -> tuple[float, float] | None:
        """The smallest and the largest finite number a bias may hold; None where it holds 0 and
        infinities only."""
        values, bounds = self.call.facts.sets.of(bias), self.call.facts.bounds.unless_nan(bias)
        if values is None:
            return bounds or (-math.inf, math.inf)
        finite = [x for x in values if x != 0.0 and math.isfinite(x)]
        if not finite:
            return None
        return min(finite), max(finite)

    @property
    def filter(self) -> float:
        """The number at padded positions."""
        return self.call.number("mask_filter_value", -10000.0)

    def _plan_for_preallocated(
        self, past: PreallocatedCache, padded: ir.Value | None, band: Window | None
    ) -> MaskPlan:
        """The plan for a cache with room, in which only the first keys count."""
        end = self.call.builder.add(past.before, past.rows)
        behind = ExcludedPositions(self.call.aligned(self.key_masks.mask_from(end), self.scores))
        causal = None
        missed: tuple[Missed, ...] = ()
        if not self._stays_above() and not (padded is None and self.bias is None):
            if band is not None:
                causal, missed = (
                    self.key_masks.mask_outside_band(band.low, band.high),
                    (self._missed(None),),
                )
            band = None
        plan = self.key_masks.plan(self.scores, [behind], self._sum(padded, causal), band)
        return replace(plan, empty_rows="", missed=(*plan.missed, *missed))

    def _missed(self, hint: str | None) -> Missed:
        """Why the causal mask is a part of the bias."""
        reason = "padding or a bias may be as low as the causal mask, to which it is added"
        return Missed(MissedCode.DENSE_MASK, reason, label(self.call.node), hint)

    def _bidirectional(self, padded: ir.Value | None) -> MaskPlan:
        builder = self.call.builder
        if padded is not None and self.bias is not None:
            return MaskPlan(bias=self._sum(padded, None))
        addend = self.bias
        if padded is not None:
            numbers = [
                builder.constant(np.array(x, dtype=np.float32), "number")
                for x in (self.filter, 0.0)
            ]
            addend = builder.op("Where", [padded, *numbers])
        if addend is None:
            return MaskPlan()
        return self.key_masks.plain(addend, self.scores)

    def _filled_with_lowest(self, padded: ir.Value | None, band: Window) -> MaskPlan:
        assert padded is not None
        assume, target = self.call.options.assume, self.call.options.target
        if target != "ort" and NO_EMPTY_ROWS not in assume:
            raise self.call.decline(
                Code.EMPTY_ROWS,
                "a row whose visible keys are all padded gives the mean of all values, which the product does not",
                NO_EMPTY_ROWS_HINT,
            )
        plan = self.key_masks.plan(
            self.scores, [ExcludedPositions(self.call.aligned(padded, self.scores))], (), band
        )
        if NO_EMPTY_ROWS in assume:
            return replace(plan, empty_rows="", assumed=(NO_EMPTY_ROWS,))
        return replace(plan, empty_rows="mean")

    def _stays_above(self) -> bool:
        """Is the sum at every visible key so far above `lowest` that causal positions have no
        weight beside it?"""
        if self.mask is not None and self.filter < FILTER_FLOOR:
            return False
        if self.bias is None:
            return True
        values, bounds = (
            self.call.facts.sets.of(self.bias),
            self.call.facts.bounds.unless_nan(self.bias),
        )
        if not values and bounds is None:
            return False
        low = min(values or bounds or ())
        if self.mask is None or self.filter > BIAS_FLOOR:
            return low >= BIAS_FLOOR
        return low >= 0.0

    def _sum(self, padded: ir.Value | None, causal: ir.Value | None) -> tuple[BiasOp, ...]:
        """The bias that puts in the numbers of the given masks and then adds the call's own
        bias."""
        operations: list[BiasOp] = []
        for mask, fill in ((padded, self.filter), (causal, -FLOAT32_MAX)):
            if mask is not None:
                operations.append(
                    ExcludedPositions(self.call.aligned(mask, self.scores)).filled(
                        self.call.node, fill
                    )
                )
        if self.bias is not None:
            operations.append(self.call.adding(self._filled_up(self.bias, 0), self.scores))
        return tuple(operations)

    def _filled_up(self, value: ir.Value, filler: int) -> ir.Value:
        """A mask or bias, padded with `filler` where a cache has room for more keys than it has
        columns."""
        columns = self.call.viewer.space.size(self.scores[3])
        if not isinstance(self.past, PreallocatedCache) or self.call.dim(value, -1) == columns:
            return value
        return self.key_masks.filled_up(value, filler)

    def _causal(self) -> Window | None:
        """The band of a unidirectional call; None where it excludes nothing. Raises Decline."""
        if int_attr(self.call.node, "unidirectional", 0) != 1:
            return None
        rows = self.call.viewer.space.size(self.scores[2])
        if rows.const == 1:
            return None
        if not (rows - self.new).is_at_least(0):
            reason = "the last row of a unidirectional call sees all keys, and there may be more new keys than rows"
            raise self.call.decline(Code.READY_MADE, reason)
        if self.past is None:
            return Window.of(None, 0)
        if isinstance(self.past, PreallocatedCache):
            return Window(Band(None, Dim.fresh()), None, self.past.before)
        return Window(
            Band(None, self.call.dim(self.past, 2)),
            None,
            self.key_masks.length(DimRef(self.past, 2)),
        )

    # -- padding masks
    # ----------------------------------------------------------------------------------

    def _padded(self, mask: ir.Value) -> ir.Value | None:
        """True where a key is padded, in a shape that broadcasts to the scores; None where the mask
        is ignored."""
        call, builder = self.call, self.call.builder
        shape = call.shape(mask)
        columns = call.viewer.space.size(self.scores[3])
        if len(shape) == 1:
            return self._by_lengths(mask, shape[0])
        if len(shape) > 3:
            raise call.decline(
                Code.READY_MADE,
                f"a mask of rank {len(shape)}, which ONNX Runtime does not take here",
            )
        room = isinstance(self.past, PreallocatedCache)
        # The softmax over a single key is 1 where the sum of its score and the number is finite.
        finite = abs(self.filter) < -FILTER_FLOOR
        unseen = columns.never_one or (self.bias is None and finite and columns.const != 1)
        if call.dim(mask, -1).const == 1 and unseen and not room:
            return None
        zero = builder.constant(np.array(0, dtype=np.int32), "number")
        whole = self._filled_up(builder.cast(mask, ir.DataType.INT32), 1)
        padded = builder.not_(builder.greater(whole, zero))
        by_key = len(shape) == 2
        padded = builder.unsqueeze(padded, range(1, 2 + by_key))
        if by_key and not room and not self._is_as_long(shape[1], columns):
            length = self.key_masks.length(self.key_masks.kv_seq)
            counts = builder.equal(builder.length(mask, 1), length)
            padded = builder.and_(padded, counts)
        return padded

    @staticmethod
    def _is_as_long(size: Dim, columns: Dim) -> bool:
        """Is a mask as wide as the keys in every run? ONNX Runtime accepts no other width, except
        1."""
        return size == columns or size.never_one

    def _by_lengths(self, mask: ir.Value, count: Dim) -> ir.Value:
        """The keys that a vector of `count` lengths says are padded. Raises Decline where its form
        is not known."""
        call, builder = self.call, self.call.builder
        batch = call.shape(call.required_input(0))[0]
        if count == batch:
            return self.key_masks.mask_from(mask)
        if count == batch * 2:
            pairs = builder.reshape(mask, [2, -1])
            ends, starts = (
                builder.op(
                    "Gather", [pairs, builder.constant(np.array(side, dtype=np.int64), "number")]
                )
                for side in (0, 1)
            )
            return builder.or_(self.key_masks.mask_from(ends), self.key_masks.mask_before(starts))
        if count == batch * 3 + 2:
            end = self.key_masks.length(self.key_masks.batch)
            lengths = builder.slice(mask, [0], end, [0])
            return self.key_masks.mask_from(lengths)
        raise call.decline(
            Code.SHAPE, f"the length of {mask.name!r} is not proven to be a multiple of the batch"
        )
