"""A second opinion on the plans for masks: the terms and the plan are run beside each other on small rows of keys.

The planner (`passes/masks/mask.py`) proves a plan by its cases. This oracle knows none of them. It takes the terms of
the scores, draws what each term may be at a key, and computes the probabilities twice: by the terms, one after the
other in float32, and by what the plan says of the operator. The plan is right if both agree.

    what is drawn        from
    -------------------  ----------------------------------------------------------------------------------------------
    a key                its class: one number of each addend, and for each selection whether it keeps the score
    numbers of an        its set of numbers where that is known, else its interval's ends and some numbers between
    addend               them, else scores; an addend that may be a mask given to the model has large numbers, too,
                         and one that is multiplied by a huge number has multiples of it
    a row                one to three keys of any classes; a term without an axis of keys is the same at all of them
    scores, sinks        numbers of common size; a sink is above its lower bound

Equal answers for all classes and rows are no proof, but no case can hide from them that a plan treats a class wrongly:
in a row of several classes every weight shows. What the oracle takes from the planner: which keys a structure (a band,
padding, labels of sequences) excludes, whether that leaves every row a key, and how a joined addend is taken apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast
from unittest import mock

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import NO_EMPTY_ROWS
from fa_compiler.passes.ir.nodes import SIXTEEN_BITS
from fa_compiler.passes.masks.joined_masks import with_masks_separated
from fa_compiler.passes.masks.magnitudes import ASSUMED_MASK, FLOAT32_MAX, HUGE
from fa_compiler.passes.masks.mask import MaskPlan, MaskPlanner
from fa_compiler.passes.masks.mask_terms import aligned
from fa_compiler.passes.masks.row_guard import RowGuard
from fa_compiler.passes.masks.score_like import is_score_like
from fa_compiler.passes.masks.score_ops import Add, BiasOp, Floor, Scale, Select, Term
from fa_compiler.passes.masks.structure import Structure
from fa_compiler.reference.softmax import softmax

Array = npt.NDArray[Any]

SCORES = (-9.0, -1.5, 0.0, 0.75, 12.0)
"""Scores of common size."""
LARGE = (-math.inf, -3e38, -1e9, -65504.0, -1e4)
"""What an addend may hold that is given to the model and may be a mask; what is subtracted, with the other sign."""
LONGEST, POSITIONS = 4096.0, (2.0**50, 2.0**90)
"""Positions and sizes have the interval of int64, also after a slope: an end of this size means a long sequence."""
MOST_NUMBERS, MOST_CLASSES, MOST_ROWS = 6, 40, 600
TOLERANCE = 2e-6
"""Of a probability in float32. The difference of scores near 12 is known to 1e-6."""
TOLERANCE_16 = 2e-2
"""ONNX Runtime may round scores to 16 bits between two terms: a score near 12 to 2^-5 in bfloat16."""
LAST_BIT = 2.0**-24
SHOWN = 1e6
"""A number up to this rounds the scores that it is added to; beyond, it swallows them."""
RANGE_16 = 65504.0


@dataclass(frozen=True)
class Verdict:
    """What the oracle says of a plan: `word` is confirmed, refuted or unread; `detail` is why."""

    word: str
    detail: str = ""


@dataclass(frozen=True)
class Planned:
    """One call of the planner."""

    planner: MaskPlanner
    terms: tuple[Term, ...]
    guard: RowGuard
    plan: MaskPlan


@contextmanager
def judged(verdicts: list[tuple[Planned, Verdict]]) -> Iterator[None]:
    """Inside, each plan that the planner makes is judged at once, while the graph is as the planner saw it."""
    plain = MaskPlanner.plan

    def plan(self: MaskPlanner, terms: tuple[Term, ...], guard: RowGuard) -> MaskPlan:
        made = plain(self, terms, guard)
        planned = Planned(self, terms, guard, made)
        verdicts.append((planned, verdict(planned)))
        return made

    with mock.patch.object(MaskPlanner, "plan", plan):
        yield


def verdict(planned: Planned) -> Verdict:
    """Does the plan give the probabilities that the terms give? The terms are read as they are, or, where the plan does
    not fit these, with joined addends taken apart."""
    answer = Verdict("unread", "no terms")
    parted = with_masks_separated(planned.terms, planned.planner.values)
    for terms in [planned.terms, *([parted] if parted != planned.terms else [])]:
        try:
            answer = _Rows(planned, terms).verdict()
        except _UnreadError as reason:
            answer = Verdict("unread", str(reason))
        if answer.word == "confirmed":
            break
    return answer


class _UnreadError(Exception):
    """The oracle does not see how a plan belongs to the terms."""


class _Rows:
    """Rows of keys for some terms: arrays [rows, keys] of the number of each term at each key, and of the scores."""

    def __init__(self, planned: Planned, terms: tuple[Term, ...]) -> None:
        self.planned, self.terms, self.plan = planned, terms, planned.plan
        self.values = planned.planner.values
        self.numbers = [self._numbers(term) or [0.0] for term in terms]  # nothing is known of a tensor without elements
        dtypes = {self.values.viewer.info.dtype(term.node.outputs[0]) for term in terms}
        self.is_short = bool(dtypes & set(SIXTEEN_BITS))
        self.rng = np.random.default_rng(len(terms))

    def verdict(self) -> Verdict:
        excluding = self._excluding()
        for keys in (1, 2, 3):
            drawn = self._drawn(keys)
            scores = self.rng.choice(np.array(SCORES, np.float32), drawn[0].shape) if drawn else self._scores(keys)
            for sink in self._sinks():
                if answer := self._fault(drawn, scores, excluding, sink):
                    return Verdict("refuted", answer)
        return Verdict("confirmed")

    # -- what may be ----------------------------------------------------------------------------------

    def _numbers(self, term: Term) -> list[float]:
        """What a term may hold at one key: numbers of an addend, or 0 and 1 of a condition. A term whose structure says
        that it excludes nothing holds what excludes nothing."""
        if isinstance(term, Select):
            return [float(term.keep)] if self._excludes_nothing(term) else [0.0, 1.0]
        if not isinstance(term, Add) or self._excludes_nothing(term):
            return [0.0]
        value, facts = term.operand.value, self.values.viewer.facts
        large = [term.sign * number for number in LARGE]
        if (known := facts.sets.of(value)) is not None:
            numbers = sorted(known)
            return numbers if len(numbers) <= MOST_NUMBERS else [*numbers[:2], *numbers[-2:]]
        interval, factor = facts.bounds.unless_nan(value), self._huge_factor(value)
        if factor is not None and (interval is None or math.inf in (-interval[0], interval[1])):
            return [0.0, factor, factor / 2]
        if interval is not None:
            low, high = (
                math.copysign(LONGEST, end) if POSITIONS[0] < abs(end) < POSITIONS[1] else end for end in interval
            )
            counts = LONGEST in (-low, high)
            inside = [x for x in (*SCORES, *(() if counts else large[1:])) if low < x < high]
            return [low, *inside, *([] if high in (low, math.inf) else [high])]
        if is_score_like(value, self.values.viewer):
            return [*SCORES]
        dtype = self.values.viewer.info.dtype(value)
        return [*SCORES, *(x for x in large if dtype is not ir.DataType.FLOAT16 or not RANGE_16 < abs(x) < math.inf)]

    def _huge_factor(self, value: ir.Value) -> float | None:
        """The huge constant that an addend is a multiple of, as (1 - mask) * low is; None of other addends."""
        viewer = self.values.viewer
        view = viewer.view(value, factors=False)
        product, sign = (value if view is None else view.base).producer(), 1.0
        while product is not None and product.op_type == "Neg" and product.inputs[0] is not None:
            product, sign = product.inputs[0].producer(), -sign
        if product is None or product.op_type != "Mul":
            return None
        numbers = (viewer.facts.sets.of(factor) for factor in product.inputs)
        alone = [next(iter(known)) for known in numbers if known is not None and len(known) == 1]
        return next((sign * number for number in alone if math.isfinite(number) and abs(number) >= HUGE), None)

    def _excludes_nothing(self, term: Term) -> bool:
        structure = self.planned.planner.structure((term,))
        parts = isinstance(structure, Structure) and (structure.mode, structure.packing, structure.padding)
        return parts == (None, None, ())

    def _sinks(self) -> list[float | None]:
        """Sinks, or none."""
        least = self.values.sink_lower_bound
        if least is None:
            return [None]
        return [max(least, number) for number in (-9.0, 3.0)]

    def _scores(self, keys: int) -> Array:
        return np.array(list(itertools.product(SCORES, repeat=keys)), np.float32)

    def _drawn(self, keys: int) -> list[Array]:
        """The numbers of each term, [rows, keys] each."""
        if not self.terms:
            return []
        every = list(itertools.islice(itertools.product(*self.numbers), 20_000))
        if len(every) > MOST_CLASSES:
            places = self.rng.choice(len(every), MOST_CLASSES, replace=False)
            every = [every[place] for place in sorted(places)]
        classes = np.array(every, np.float64)
        rows = np.array(list(itertools.product(range(len(classes)), repeat=keys)))
        if len(rows) > MOST_ROWS:
            rows = rows[self.rng.choice(len(rows), MOST_ROWS, replace=False)]
        rows = np.repeat(rows, 3, axis=0)
        drawn = [classes[rows][..., index] for index in range(len(self.terms))]
        return [
            np.broadcast_to(x[:, :1], x.shape) if _is_alike(term) else x
            for x, term in zip(drawn, self.terms, strict=True)
        ]

    # -- the original ---------------------------------------------------------------------------------

    def _carried_out(self, x: Array, drawn: Sequence[Array]) -> tuple[Array, Array]:
        """The terms carried out on scores, and the largest number that rounded each result."""
        largest = np.abs(x)
        for term, numbers in zip(self.terms, drawn, strict=True):
            x = _step(term, x, numbers)
            size = np.where(np.abs(x) < SHOWN, np.abs(x), 0.0)
            largest = np.maximum(largest, size)
        return x, largest

    def _masked_by_terms(self, drawn: Sequence[Array]) -> Array:
        """Which keys a term masks, in the sense of the promise that no row is masked everywhere: such a number at
        every key, of whatever sign, swallows the scores of the row."""
        masked = np.zeros(drawn[0].shape, np.bool_)
        for term, numbers in zip(self.terms, drawn, strict=True):
            if isinstance(term, Select):
                masked |= (numbers != 0.0) != term.keep
            elif isinstance(term, Add):
                masked |= np.abs(numbers) >= -ASSUMED_MASK
        return masked

    def _guarded(self, probabilities: Array, scores: Array, drawn: Sequence[Array]) -> Array:
        """The probabilities behind the guard."""
        guard = self.planned.guard
        if guard is RowGuard.NAN:
            return np.where(np.isnan(probabilities), 0.0, probabilities)
        if guard is RowGuard.NONE:
            return probabilities
        if guard in (RowGuard.SELECTION, RowGuard.PRODUCT):
            selects = [index for index, term in enumerate(self.terms) if isinstance(term, Select)]
            kept = ~self._excluded(drawn, selects or self._masks())
            return np.where(kept, probabilities, 0.0) if guard is RowGuard.SELECTION else probabilities * kept
        tested = scores if guard is RowGuard.SCORES else self._carried_out(np.zeros_like(scores), drawn)[0]
        return np.where((tested == -np.inf).all(axis=1, keepdims=True), 0.0, probabilities)

    # -- the plan -------------------------------------------------------------------------------------

    def _excluding(self) -> list[int]:
        """The terms that make the plan's mask: all selections where each masked key has a score of bias, else those
        that may mask and are not in the bias."""
        plan = self.plan
        if not plan.masked and plan.mode is None and plan.packed is None:
            return []
        selects = [index for index, term in enumerate(self.terms) if isinstance(term, Select)]
        if plan.adds_bias_to_masked and selects:
            return selects
        masks = [index for index in self._masks() if index not in self._places()]
        if not masks:
            raise _UnreadError("no term that is left over is a mask")
        return masks

    def _masks(self) -> list[int]:
        """The selections and the addends that hold the number of a mask, besides 0."""
        return [index for index, term in enumerate(self.terms) if isinstance(term, Select) or self._is_mask(index)]

    def _is_mask(self, index: int) -> bool:
        term, others = self.terms[index], {number for number in self.numbers[index] if number != 0.0}
        return isinstance(term, Add) and len(others) == 1 and others.pop() * term.sign <= ASSUMED_MASK

    def _excluded(self, drawn: Sequence[Array], masks: list[int]) -> Array:
        """The keys that one of these terms excludes."""
        excluded = np.zeros(drawn[0].shape, np.bool_)
        for index in masks:
            term = self.terms[index]
            excluded |= (drawn[index] != 0.0) != (isinstance(term, Select) and term.keep)
        return excluded

    def _fills_beside_band(self, step: BiasOp) -> bool:
        """Does a step of the bias put the lowest number at the keys that padding beside a band excludes?"""
        is_band = self.plan.mode is not None and self.planned.planner.options.target == "ascend"
        return is_band and isinstance(step, Select) and step.fill == -FLOAT32_MAX

    def _places(self) -> list[int | None]:
        """The term of each step of the bias; None of a step that belongs to the mask."""
        places: list[int | None] = []
        for step in self.plan.bias:
            if self._fills_beside_band(step):
                places.append(None)
                continue
            own = [index for index, term in enumerate(self.terms) if term.node is step.node and index not in places]
            alike = [index for index in own if isinstance(self.terms[index], type(step))]
            alike.sort(key=lambda index: not self._reads(step, index))
            filled = [index for index, term in enumerate(self.terms) if term.node is step.node]
            if not alike and not (isinstance(step, Select) and filled):
                raise _UnreadError(f"no term is {type(step).__name__} of {step.node.name!r}")
            if isinstance(step, Add) and len(filled) > 1 and not self._reads(step, alike[0]):
                raise _UnreadError(f"a step reads the addend of {step.node.name!r} before it was taken apart")
            places.append(alike[0] if alike else filled[-1])
        return places

    def _reads(self, step: BiasOp, index: int) -> bool:
        """Does a step of the bias read the tensor of a term? Terms that were one addend share their node."""
        term = self.terms[index]
        if not isinstance(step, Add | Select) or not isinstance(term, Add | Select):
            return False
        return aligned(term.operand, self.values.viewer, term.node).base is step.operand.view.base

    def _bias(self, drawn: Sequence[Array], excluded: Array) -> Array:
        bias = np.zeros(excluded.shape, np.float32)
        for step, place in zip(self.plan.bias, self._places(), strict=True):
            if place is None:
                bias = np.where(excluded, np.float32(-FLOAT32_MAX), bias)
            elif isinstance(step, Select) and isinstance(self.terms[place], Add):
                # The number of an addend is put at the keys that padding excludes, where the addend holds it.
                bias = np.where(drawn[place] != 0.0, np.float32(step.fill), bias)
            else:
                bias = _step(step, bias, drawn[place])
        return bias

    def _fault(self, drawn: list[Array], scores: Array, excluding: list[int], sink: float | None) -> str:
        """How the plan's probabilities differ from those of the terms; empty where they agree."""
        plan = self.plan
        with np.errstate(all="ignore"):
            final, largest = self._carried_out(scores, drawn)
            allowed = np.ones_like(scores, np.bool_)
            wanted = softmax(final.astype(np.float64), allowed, sink).probabilities
            wanted = self._guarded(wanted, final, drawn)
            excluded = self._excluded(drawn, excluding) if excluding else np.zeros(scores.shape, np.bool_)
            factor = math.prod(term.factor for term in self.terms if isinstance(term, Scale))
            bias = self._bias(drawn, excluded)
            own = (scores * np.float32(factor) + bias).astype(np.float64)
            masked: float | Array = -math.inf
            if plan.masked_score is not None:
                masked = plan.masked_score
                if plan.adds_bias_to_masked:
                    masked = (np.float32(masked) + bias).astype(np.float64)
            got = softmax(
                own, ~excluded, sink, plan.empty_rows, plan.nan_rows, masked, plan.drops_masked_values
            ).probabilities
            tolerance: Array = np.array(TOLERANCE_16 if self.is_short else TOLERANCE)
            tolerance = tolerance + 4 * LAST_BIT * largest.max(axis=1, keepdims=True)
            # A row that holds NaN gives NaN, at whatever key it is.
            undefined = [np.isnan(x).any(axis=1, keepdims=True) for x in (got, wanted)]
            wrong = ~(np.abs(got - wanted) <= tolerance) & ~(undefined[0] & undefined[1])
            if self.is_short:
                wrong &= ~((np.abs(final) > RANGE_16) & np.isfinite(final)).any(axis=1, keepdims=True)
            if drawn and self._has_no_empty_rows():
                wrong &= ~self._masked_by_terms(drawn).all(axis=1, keepdims=True)
            for index in self._masks():
                if self.planned.planner.never_empty((self.terms[index],)):
                    wrong &= ~self._excluded(drawn, [index]).all(axis=1, keepdims=True)
        if not wrong.any():
            return ""
        row = int(np.argwhere(wrong)[0][0])
        keys = [tuple(float(numbers[row, key]) for numbers in drawn) for key in range(scores.shape[1])]
        return (
            f"scores {scores[row].tolist()} with {keys} give {wanted[row].tolist()} by the terms and "
            f"{got[row].tolist()} by the plan {plan.mask_label}"
        )

    def _has_no_empty_rows(self) -> bool:
        """Does the user vouch for it, or does the structure prove it, that no row is masked everywhere?"""
        if NO_EMPTY_ROWS in self.plan.assumed or self.plan.packed is not None:
            return True
        try:
            return self.planned.planner.never_empty(self.terms)
        except Decline:
            return False


def _is_alike(term: Term) -> bool:
    """Has a term one number for all keys of a row?"""
    return isinstance(term, Add | Select) and not (term.operand.dims and term.operand.dims[-1])


def _step(step: Term | BiasOp, x: Array, numbers: Array) -> Array:
    """One term, or one step of a bias, carried out in float32."""
    if isinstance(step, Add):
        made = x + np.float32(step.sign) * numbers.astype(np.float32)
    elif isinstance(step, Select):
        made = np.where((numbers != 0.0) == step.keep, x, np.float32(step.fill))
    elif isinstance(step, Scale):
        made = x * np.float32(step.factor)
    else:
        made = np.maximum(x, np.float32(cast(Floor, step).floor))
    return made.astype(np.float32)
