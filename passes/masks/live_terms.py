"""The terms that change a softmax, and what the cases of mask.py ask of all of them together."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import elsewhere, instances, sole, without_absent
from fa_compiler.passes.masks.magnitudes import HUGE, LOST_SHARE, MAX_FINE, SMALL_SHARE
from fa_compiler.passes.masks.mask_values import TermValues
from fa_compiler.passes.masks.rounding import reordering_decline
from fa_compiler.passes.masks.score_ops import Add, Scale, Select, Term

INFINITE_MASK = frozenset((0.0, -math.inf))
"""The numbers of an addend that either leaves a score or makes it -inf."""


@dataclass(frozen=True)
class LiveTerms:
    """The terms of one attention that change its softmax, in order. A term is given by its
    index."""

    terms: tuple[Term, ...]
    values: TermValues

    @cached_property
    def adds(self) -> tuple[int, ...]:
        """The addends."""
        return tuple(index for index, term in enumerate(self.terms) if isinstance(term, Add))

    @cached_property
    def selects(self) -> tuple[int, ...]:
        """The selections."""
        return tuple(index for index, term in enumerate(self.terms) if isinstance(term, Select))

    @property
    def node(self) -> ir.Node:
        """The node of the last term."""
        return self.terms[-1].node

    def without(self, indices: Collection[int]) -> tuple[Term, ...]:
        """The other terms."""
        return tuple(elsewhere(self.terms, indices))

    @property
    def not_selected(self) -> tuple[Term, ...]:
        """The terms that are not selections."""
        return self.without(self.selects)

    def numbers_of(self, indices: Iterable[int]) -> frozenset[float]:
        """The numbers of addends and fills where they join the scores, NaN for those that are not
        known."""
        return frozenset[float]().union(
            *(self.values.numbers_of(self.terms[index]) for index in indices)
        )

    def numbers_before_softmax(self, indices: Iterable[int]) -> frozenset[float]:
        """The numbers of addends and fills before the softmax, NaN for those that are not known."""
        return frozenset[float]().union(
            *(self.values.numbers_before_softmax(self.terms, index) for index in indices)
        )

    # Selections, for cases 4 to 7.

    @property
    def selections_outweigh(self) -> bool:
        """Does each fill outweigh the scores?"""
        return all(self.values.outweighs(self.terms, index) for index in self.selects)

    @property
    def selections_come_last(self) -> bool:
        """Are there selections, all of them after all addends?"""
        return bool(self.selects) and max(self.adds, default=-1) < self.selects[0]

    @property
    def fill(self) -> float:
        """The one number that all fills are before the softmax; NaN where they are several, or not
        known."""
        fill = sole(self.numbers_before_softmax(self.selects))
        return math.nan if fill is None else fill

    @property
    def biases_stay_above_fill(self) -> bool:
        """Is each bias far above the fill, which stands in place of the sum of score and bias?"""
        return all(
            self.values.is_small_beside(self.terms, index, self.fill, SMALL_SHARE)
            for index in self.adds
        )

    @property
    def biases_are_lost_in_fill(self) -> bool:
        """Is each bias lost in the fill that is added to score and bias, both before and after
        later factors?

        A bias of +inf is not lost in -inf. A bias in whose place the fill stands is not added to
        it: this bias only has to stay above the fill.
        """
        weakest = max(self.fill, *self.numbers_of(self.selects))
        return all(self._is_lost(index, weakest) for index in self.adds)

    def _is_lost(self, index: int, fill: float) -> bool:
        if self._is_replaced(index):
            return self.values.stays_above(self.terms, index, fill)
        is_small = self.values.is_small_beside(self.terms, index, fill, LOST_SHARE)
        return is_small and not self.values.may_be_plus_infinity(self.terms, index)

    def _is_replaced(self, index: int) -> bool:
        """Do an addend and the selection after it come from one addend, Where(c, bias, v)?"""
        node, later = self.terms[index].node, self.terms[index + 1 : index + 2]
        return any(term.node is node for term in instances(later, Select))

    # Addends of {0, v}, for cases 2, 3, 5 and 8.

    @cached_property
    def added_masks(self) -> dict[int, float]:
        """The addends of {0, v}, each with its v before the softmax."""
        values = {index: self.values.mask_value(self.terms, index) for index in self.adds}
        return without_absent(values)

    @property
    def added_masks_are_infinite(self) -> bool:
        """Does each addend of {0, v} make the scores that it masks -inf?"""
        return self.numbers_of(self.added_masks) <= INFINITE_MASK

    def biases_are_small(self, fill: float, share: float) -> bool:
        """Is each addend that is no mask less than this share of the number of a mask?"""
        biases = (index for index in self.adds if index not in self.added_masks)
        return all(self.values.is_small_beside(self.terms, index, fill, share) for index in biases)

    def with_infinite_masks_selected(self) -> LiveTerms:
        """The terms, in which each addend of {0, -inf} selects -inf, where all selections do so and
        no bias comes after the first such addend. Without selections the terms stay as they are."""
        infinite = [index for index, value in self.added_masks.items() if value == -math.inf]
        masks = [index for index in infinite if self.numbers_of([index]) <= INFINITE_MASK]
        biases = [index for index in self.adds if index not in masks]
        if self.numbers_of(self.selects) != {-math.inf} or max(biases, default=-1) > min(
            masks, default=-1
        ):
            return self
        terms = (
            _selecting_infinity(term) if index in masks else term
            for index, term in enumerate(self.terms)
        )
        return LiveTerms(tuple(terms), self.values)

    @property
    def keeps_fills(self) -> bool:
        """Is every addend proven not to cancel the number of a mask that it is added to?"""
        return all(self.values.keeps_fill(self.terms, index) for index in self.adds)

    # Masked keys that have a score, for cases 8 and 9.

    @property
    def adds_alike(self) -> bool:
        """Is it the same whether the terms are added to the number of masked keys one by one, or
        their sum is added?"""
        coarse = any(abs(fill) < HUGE for fill in self.numbers_of(self.selects))
        return not coarse and reordering_decline(self.terms, self.values, ()) is None

    @property
    def scales_moderate_fills(self) -> bool:
        """Does a factor round the sum of an addend and a fill in which the addend is neither lost
        nor fine?"""
        end = len(self.terms)
        moderate = (
            i
            for i in self.selects
            if any(MAX_FINE < abs(fill) < HUGE for fill in self.numbers_of([i]))
        )
        first = next(moderate, end)
        added = min((index for index in self.adds if index > first), default=end)
        return any(term.rounds for term in instances(self.terms[added:], Scale))


def _selecting_infinity(term: Term) -> Term:
    """An addend of {0, -inf} as a selection of -inf."""
    assert isinstance(term, Add)
    return Select(term.node, term.operand, False, -math.inf)


@dataclass(frozen=True)
class ScoredMasks:
    """Cases 8 and 9: the terms that mask keys, while masked keys keep a score."""

    live: LiveTerms
    masks: tuple[int, ...]
    is_one_of_several: bool = False
    """Is the mask a band, beside further addends that mask?"""

    @property
    def others(self) -> tuple[Term, ...]:
        """The terms that do not mask."""
        return self.live.without(self.masks)

    @property
    def mask_terms(self) -> tuple[Term, ...]:
        """The terms of which the boolean mask is made: the addends that mask, or all terms where
        selections do."""
        if self.live.selects:
            return self.live.terms
        return tuple(self.live.terms[index] for index in self.masks)

    @property
    def number(self) -> float | None:
        """The one number that all masked keys have where only biases are added to it (case 8); None
        elsewhere."""
        live = self.live
        if live.selects:
            numbers, is_below = (
                live.numbers_of(self.masks),
                live.selects[-1] < min(live.adds, default=len(live.terms)),
            )
        else:
            # An addend holds 0 where it masks nothing.
            numbers, is_below = live.numbers_of(self.masks) - {0.0}, len(self.masks) == 1
        only_added = len(live.adds) + len(live.selects) == len(live.terms)
        if is_below and only_added:
            return sole(numbers)
        return None

    @property
    def is_known(self) -> bool:
        """Is the weight of masked keys known? Their numbers have to be known before the softmax,
        none of them +inf or rounded by a later factor, and a sink needs a lower bound."""
        live = self.live
        numbers_known = all(number < math.inf for number in live.numbers_before_softmax(self.masks))
        return (
            numbers_known
            and not live.scales_moderate_fills
            and live.values.sink_lower_bound != -math.inf
        )

    @property
    def is_scored(self) -> bool:
        """Do masked keys have a score: a number and biases (case 8), or all terms on 0 beside a
        selection (case 9)?"""
        return bool(self.live.selects) if self.number is None else bool(self.others)
