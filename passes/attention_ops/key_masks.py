"""The keys that each row may see, as boolean tensors computed from positions: True where a key is
excluded.

They are used where no sparse_mode says the same: for bounds that differ between batch entries, and
for sequences of several lengths. i is the index of the row and j that of the key, both from 0:

    beyond(lengths)      j >= length                        [B, 1, 1, T]
    before(starts)       j < start                          [B, 1, 1, T]
    outside(low, high)   j - i < low or j - i > high        [S, T], or [B, 1, S, T] when a bound is
                                                          [B, 1, 1, 1]

In ai.onnx Attention and GroupQueryAttention a row whose keys are all excluded by a float mask
gives 0. The plan of a float mask is therefore

    float mask                                            plan
    ----------------------------------------------------  ----------------------------------------------
    proven to hold 0 and excluding numbers only           atten_mask where it is not 0
    proven to hold no excluding number                    real_shift
    anything else                                         real_shift, and atten_mask where it excludes
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.decline import label
from fa_compiler.passes.answer.options import UNBROKEN
from fa_compiler.passes.answer.report import Code, Missed, MissedCode
from fa_compiler.passes.attention_ops.call import OpConverter
from fa_compiler.passes.ir.nodes import FOLD_LIMIT
from fa_compiler.passes.masks.band import Band, SparseMode, mode_of
from fa_compiler.passes.masks.expressible import why_not_expressible
from fa_compiler.passes.masks.mask import MaskPlan, MaskPlanner
from fa_compiler.passes.masks.mask_values import TermValues
from fa_compiler.passes.masks.missed import is_dense, plan_with_missed
from fa_compiler.passes.masks.packing import ContiguousLabels
from fa_compiler.passes.masks.row_guard import RowGuard
from fa_compiler.passes.masks.score_ops import (
    Add,
    AlignedTensor,
    BiasOp,
    BiasOperand,
    ExcludedPositions,
    Select,
)
from fa_compiler.passes.masks.structure import Grid, NoStructure, Structure, structure

INT64 = ir.DataType.INT64
RANGE_SINCE = 11
Bound = ir.Value | int | None


@dataclass(frozen=True)
class DimRef:
    """A length, given as one dimension of a value."""

    value: ir.Value
    axis: int


@dataclass(frozen=True)
class Window:
    """A band, and its bounds as they are computed in the graph.

    `low` or `high` is None where the band has no such bound, or one that cannot be computed.
    """

    band: Band
    low: Bound
    high: Bound

    @staticmethod
    def of(lower: Dim | int | None, upper: Dim | int | None) -> Window:
        """The window between two sizes. A bound can be computed where its size is a number."""
        bounds = [Dim(bound) if isinstance(bound, int) else bound for bound in (lower, upper)]
        low, high = (None if bound is None else bound.const for bound in bounds)
        return Window(Band(*bounds), low, high)


@dataclass(frozen=True)
class StructuredBias:
    """A bias as padding and a band: the masks of the padding, and the band and the window as one
    window or one mode."""

    masked: tuple[ExcludedPositions, ...]
    window: Window | None
    mode: SparseMode | None


@dataclass(frozen=True)
class KeyMaskBuilder:
    """Builds masks over the rows and keys of one call."""

    call: OpConverter
    q_seq: DimRef
    kv_seq: DimRef
    batch: DimRef

    def mask_from(self, lengths: ir.Value) -> ir.Value:
        """The keys from a length on; `lengths` are [B]."""
        return self.call.builder.not_(
            self.call.builder.less(self._range(self.kv_seq), self.by_batch(lengths))
        )

    def mask_before(self, starts: ir.Value) -> ir.Value:
        """The keys before a start; `starts` are [B]."""
        return self.call.builder.less(self._range(self.kv_seq), self.by_batch(starts))

    def mask_outside_band(self, low: Bound, high: Bound) -> ir.Value:
        """The keys outside a band; at least one bound is given."""
        rows = self.call.builder.unsqueeze(self._range(self.q_seq), (1,))
        keys = self._range(self.kv_seq)
        parts: list[ir.Value] = []
        if high is not None:
            parts.append(self.call.builder.less(self._shifted(rows, high), keys))
        if low is not None:
            parts.append(self.call.builder.less(keys, self._shifted(rows, low)))
        return reduce(self.call.builder.or_, parts)

    def plan(
        self,
        scores: Arrangement,
        masked: list[ExcludedPositions],
        bias: tuple[BiasOp, ...],
        window: Window | None,
        mode: SparseMode | None = None,
    ) -> MaskPlan:
        """The plan of these parts, in which a row without a key gives 0. There is no window beside
        a mode.

        The window becomes a sparse_mode where one says the same in every run and no mask depends on
        the row; for Ascend only where there is no mask.
        """
        full = mode is None  # does every row have a key where there is no mask?
        reason, empty = "", "zero"
        if window is not None:
            mode, reason, keys = self._mode_of(window, masked, scores)
            full = window.band.never_empty(self.call.viewer.space.size(scores[2]), keys)
        if full and not masked:
            empty = ""
        if window is not None and mode is None:
            self._check_computable(window)
            excluded = self.mask_outside_band(window.low, window.high)
            masked = [*masked, ExcludedPositions(self.call.aligned(excluded, scores))]
        missed: tuple[Missed, ...] = ()
        if mode is None:
            missed = self._missed(masked, scores, reason)
        return MaskPlan(masked=tuple(masked), bias=bias, mode=mode, empty_rows=empty, missed=missed)

    def _mode_of(
        self, window: Window, masked: Sequence[ExcludedPositions], scores: Arrangement
    ) -> tuple[SparseMode | None, str, Dim]:
        """The sparse_mode that a window is, or None and the reason; and the number of keys by which
        this is known."""
        space, options = self.call.viewer.space, self.call.options
        rows, keys = space.size(scores[2]), space.size(scores[3])
        own = space.resolve(chain(*(chain(*part.view.base_dims) for part in masked)))
        if not set(own).isdisjoint(space.resolve(scores[2])) or (
            masked and options.target != "ort"
        ):
            return None, "its window stands beside a mask", keys
        mode = mode_of(window.band, rows, keys)
        if mode is None:  # the scores may have the values' name for the number of keys
            keys = self.call.dim(self.kv_seq.value, self.kv_seq.axis)
            mode = mode_of(window.band, rows, keys)
        if mode is None:
            return None, "no sparse_mode is its window in every run", keys
        unsaid = why_not_expressible(mode, rows, keys, options)
        if unsaid is not None:
            return None, unsaid, keys
        return mode, "", keys

    def _missed(
        self, masked: Sequence[ExcludedPositions], scores: Arrangement, window_reason: str
    ) -> tuple[Missed, ...]:
        """Why a mask that runs along rows and keys is no band."""
        call, viewer = self.call, self.call.viewer
        grid = Grid.of(scores[2], scores[3], viewer.space)
        dense = [part for part in masked if is_dense(part.view, grid, viewer.space)]
        if not dense:
            return ()
        part, reason = dense[0], window_reason or "the mask and the band together are no band"
        if not window_reason and call.builder.has_made(part.view.base):
            reason = "which keys a row sees depends on numbers of the run"
        elif not window_reason:
            term = Select(
                call.node,
                AlignedTensor(part.view.base, part.view.base_dims),
                not part.when,
                -math.inf,
            )
            known = structure([term], grid, viewer)
            if isinstance(known, NoStructure):
                return (known.missed(call.node),)
        return (Missed(MissedCode.DENSE_MASK, reason, label(call.node)),)

    def structured(
        self, addend: ir.Value, scores: Arrangement, window: Window | None, beside_masks: bool
    ) -> StructuredBias | None:
        """What an addend of 0 and excluding numbers excludes beside a window, and `beside_masks` if
        so, if it is padding and a band. None where it is not, or where no sparse_mode is both the
        band and the window."""
        call, grid = self.call, Grid.of(scores[2], scores[3], self.call.viewer.space)
        term = Add(
            call.node, AlignedTensor(addend, call.viewer.alignment(addend, scores, call.node))
        )
        known = structure([term], grid, call.viewer)
        if isinstance(known, NoStructure) or known.assumed:
            return None
        masks = tuple(
            ExcludedPositions(call.along(part.given.value, part.dims), part.given.when)
            for part in known.padding
        )
        if known.mode is None:
            return StructuredBias(masks, window, None)
        if not self._takes(known, grid, beside_masks):
            return None
        if window is None:
            return StructuredBias(masks, None, known.mode)
        rows, keys = grid.sizes
        own = mode_of(window.band, rows, keys)
        if own is None:
            return None
        if own == known.mode or known.mode.includes(own, rows == keys):
            return StructuredBias(masks, window, None)
        if own.includes(known.mode, rows == keys):
            return StructuredBias(masks, None, known.mode)
        return None

    def excluded(
        self, mask: ir.Value, when: bool, scores: Arrangement, band: bool, beside_masks: bool
    ) -> tuple[list[ExcludedPositions], SparseMode | None]:
        """The exclusions of a mask that excludes keys where its truth value is `when`.

        A mask with a structure (structure.py) becomes its padding and, if `band` allows it, a
        sparse_mode. `beside_masks` says whether other masks stand beside it.
        """
        call = self.call
        grid = Grid.of(scores[2], scores[3], call.viewer.space)
        placed = AlignedTensor(mask, call.viewer.alignment(mask, scores, call.node))
        term = Select(call.node, placed, not when, -math.inf)
        known = structure([term], grid, call.viewer)
        takes = (
            band and not isinstance(known, NoStructure) and self._takes(known, grid, beside_masks)
        )
        if isinstance(known, NoStructure) or (known.mode is not None and not takes):
            return [ExcludedPositions(call.along(mask, placed.dims), when)], None
        return [
            ExcludedPositions(call.along(part.given.value, part.dims), part.given.when)
            for part in known.padding
        ], known.mode

    def plain(self, addend: ir.Value, scores: Arrangement) -> MaskPlan:
        """The plan of an addend alone, as for an Add of the same numbers to the scores
        (mask.py)."""
        call = self.call
        values = TermValues(call.viewer)
        grid = Grid.of(scores[2], scores[3], call.viewer.space)
        planner = MaskPlanner(values, grid)
        term = Add(
            call.node, AlignedTensor(addend, call.viewer.alignment(addend, scores, call.node))
        )
        return plan_with_missed(planner, (term,), RowGuard.NONE)

    def packed(
        self, mask: ir.Value, when: bool, scores: Arrangement, fallback: MaskPlan
    ) -> MaskPlan:
        """The plan with packed sequences where the mask says nothing else (packing.py), else
        `fallback`.

        `fallback` is the plan whose only part is this mask.
        """
        call = self.call
        grid = Grid.of(scores[2], scores[3], call.viewer.space)
        placed = AlignedTensor(mask, call.viewer.alignment(mask, scores, call.node))
        contiguity = ContiguousLabels(call.facts)
        known = structure(
            [Select(call.node, placed, not when, -math.inf)], grid, call.viewer, contiguity
        )
        if isinstance(known, NoStructure) or known.packing is None or call.options.target != "ort":
            return fallback
        packing = known.packing
        assumed: tuple[str, ...] = ()
        if not packing.in_runs:
            if UNBROKEN not in call.options.assume:
                return replace(fallback, missed=(packing.missed,))
            assumed = (UNBROKEN,)
        view = call.along(packing.labels, packing.dims)
        return MaskPlan(mode=known.mode, assumed=assumed, packed=view, fallback=fallback)

    def _takes(self, known: Structure, grid: Grid, beside_masks: bool) -> bool:
        """Can the target take the band of a structure, beside its padding and other masks? Only the
        CPU kernel takes a mask there."""
        mode, options = known.mode, self.call.options
        if (
            mode is None
            or mode.prefix
            or ((known.padding or beside_masks) and options.target != "ort")
        ):
            return False
        return why_not_expressible(mode, *grid.sizes, options) is None

    def _check_computable(self, window: Window) -> None:
        bounds = ((window.band.lower, window.low), (window.band.upper, window.high))
        if any(bound is not None and value is None for bound, value in bounds):
            raise self.call.decline(
                Code.SHAPE, "the bounds of its band are not known before the model runs"
            )

    def added(
        self,
        mask: ir.Value,
        full: ir.Value,
        scores: Arrangement,
        lowest: float,
        filler: float = -math.inf,
    ) -> tuple[list[ExcludedPositions], tuple[BiasOp, ...]]:
        """What a float mask excludes and what it adds. Numbers up to `lowest` exclude a key.

        `full` is the mask, padded with `filler` to the number of keys.
        """
        call, builder = self.call, self.call.builder
        view, whole = call.aligned(full, scores), full is mask or filler > lowest
        values, bounds = call.facts.sets.of(mask), call.facts.bounds.unless_nan(mask)
        excludes = any(number <= lowest for number in values or ())
        if self.only_excludes(mask, lowest):
            if whole and not excludes:
                return [], ()
            return [ExcludedPositions(view)], ()
        bias: tuple[BiasOp, ...] = (Add(call.node, BiasOperand(view)),)
        harmless = (values is not None and not excludes) or (
            bounds is not None and bounds[0] > lowest
        )
        if harmless and whole:
            return [], bias
        limit = builder.constant(np.array(lowest, dtype=np.float32), "number")
        excluded = builder.op("LessOrEqual", [builder.cast(full, ir.DataType.FLOAT), limit])
        return [ExcludedPositions(call.aligned(excluded, scores))], bias

    def filled_up(self, mask: ir.Value, filler: float | bool) -> ir.Value:
        """A mask, its last dimension padded with `filler` to the number of keys. Raises Decline."""
        builder, dtype, shape = self.call.builder, self.call.info.dtype(mask), self.call.shape(mask)
        exact = dtype is not None and (
            dtype == ir.DataType.BOOL or (dtype.is_integer() and math.isfinite(filler))
        )
        if dtype is None or not (exact or dtype.is_floating_point()):
            raise self.call.decline(
                Code.DTYPE, f"the type of {mask.name!r} is unknown, or none of a mask"
            )
        short = self.call.builder.sub(
            self.length(self.kv_seq), self.length(DimRef(mask, len(shape) - 1))
        )
        pads = builder.concat([builder.ints([0] * (2 * len(shape) - 1)), short], 0)
        filled = builder.op(
            "Pad", [mask, pads, builder.constant(np.array(filler, dtype.numpy()), "number")]
        )
        columns = self.call.dim(self.kv_seq.value, self.kv_seq.axis)
        self.call.info.set(filled, (*shape[:-1], columns), dtype)
        return filled

    def only_excludes(self, mask: ir.Value, lowest: float) -> bool:
        """Is a float mask proven to hold nothing but 0 and excluding numbers?"""
        values = self.call.facts.sets.of(mask)
        return values is not None and all(x == 0.0 or x <= lowest for x in values)

    def length(self, dim: DimRef) -> ir.Value:
        """The length, int64 [1]."""
        return self.call.builder.length(dim.value, dim.axis)

    def _range(self, dim: DimRef) -> ir.Value:
        builder = self.call.builder
        const = self.call.size(dim.value, dim.axis)
        if const is not None and const <= FOLD_LIMIT:
            return builder.constant(np.arange(const, dtype=np.int64), "positions")
        if builder.opset < RANGE_SINCE:
            raise self.call.decline(
                Code.READY_MADE, f"its mask cannot be computed in opset {builder.opset}"
            )
        return builder.range(self.length(dim))

    def by_batch(self, vector: ir.Value) -> ir.Value:
        """One number for each batch entry, [B], as int64 [B, 1, 1, 1]."""
        return self.call.builder.unsqueeze(self.call.builder.cast(vector, INT64), (1, 2, 3))

    def add_const(self, number: ir.Value, by: int) -> ir.Value:
        """The sum of a computed number and a constant."""
        if by == 0:
            return number
        return self.call.builder.add(number, self.call.builder.ints([by]))

    def bounds_from(self, start: ir.Value, offsets: Iterable[int | None]) -> list[ir.Value | None]:
        """The bounds of a band, by their offsets from a computed number; None where there is no
        bound."""
        return [None if offset is None else self.add_const(start, offset) for offset in offsets]

    def _shifted(self, rows: ir.Value, by: ir.Value | int) -> ir.Value:
        """The rows plus a bound of a band."""
        if isinstance(by, int):
            return self.add_const(rows, by)
        return self.call.builder.add(rows, by)
