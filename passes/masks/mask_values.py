"""The numbers that the terms of a mask can be before the softmax, and whether they outweigh the
scores."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.intervals import Interval
from fa_compiler.passes.answer.options import MASKS_DOMINATE
from fa_compiler.passes.ir.nodes import instances, sole
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.masks.magnitudes import (
    ASSUMED_MASK,
    DOMINATING,
    FLOAT16_MAX,
    FLOAT32_MAX,
    HARMLESS_SHIFT,
    SMALL_SHARE,
)
from fa_compiler.passes.masks.score_like import holds_large, is_score_like
from fa_compiler.passes.masks.score_ops import Add, Floor, Scale, Select, Term

UNKNOWN = frozenset((math.nan,))
"""The numbers of a term of which nothing is known. NaN is no number of a mask, neither large nor
small."""


@dataclass(frozen=True)
class TermValues:
    """Answers questions about the terms of one attention. A term is given by its index among
    them."""

    viewer: Viewer
    sink_lower_bound: float | None = None
    """A lower bound of all sinks; -inf if none is known. None without a sink."""

    def numbers_of(self, term: Term) -> frozenset[float]:
        """The numbers that an addend adds or a selection puts in; UNKNOWN where they are not known,
        and for other terms."""
        if isinstance(term, Select):
            return frozenset((term.fill,))
        if not isinstance(term, Add):
            return UNKNOWN
        numbers = self.viewer.facts.sets.of(term.operand.value)
        return UNKNOWN if numbers is None else frozenset(number * term.sign for number in numbers)

    def numbers_before_softmax(self, terms: tuple[Term, ...], index: int) -> frozenset[float]:
        """The numbers of an addend or a fill before the softmax, after later factors and floors;
        UNKNOWN where they are not known."""
        numbers, dtype = self.numbers_of(terms[index]), self._dtype(terms[index])
        for later in terms[index + 1 :]:
            if isinstance(later, Scale):
                numbers = _scaled(numbers, later.factor, dtype)
            elif isinstance(later, Floor):
                numbers = frozenset(max(number, later.floor) for number in numbers)
        return numbers

    def mask_value(self, terms: tuple[Term, ...], index: int) -> float | None:
        """The v of an addend that holds only 0 and one number v that outweighs the scores, before
        and after later factors; None for other terms."""
        value, dtype = (
            sole(self.numbers_before_softmax(terms, index) - {0.0}),
            self._dtype(terms[index]),
        )
        if value is None or not self.dominates(value, dtype):
            return None
        return value if self.dominates(min(self.numbers_of(terms[index])), dtype) else None

    def dominates(self, value: float, dtype: ir.DataType | None) -> bool:
        """Does a number of this type outweigh every score? It does by its size, or because the user
        vouches for it."""
        if value == -math.inf:
            return True
        if MASKS_DOMINATE in self.viewer.facts.options.assume and value <= ASSUMED_MASK:
            return True
        return dtype in (ir.DataType.FLOAT, ir.DataType.BFLOAT16) and value <= DOMINATING

    def outweighs(self, terms: tuple[Term, ...], index: int) -> bool:
        """Does a fill outweigh the scores, both where it is put in and before the softmax?"""
        dtype = self._dtype(terms[index])
        numbers = self.numbers_of(terms[index]) | self.numbers_before_softmax(terms, index)
        return all(self.dominates(number, dtype) for number in numbers)

    def changes_no_softmax(
        self, terms: tuple[Term, ...], index: int, most: float = HARMLESS_SHIFT
    ) -> bool:
        """Is an addend one number that leaves every softmax unchanged?

        One number up to `most` that is added to all scores does, because it shifts whole rows.
        Beside a sink, or before a selection with a moderate fill, only 0 does: another number
        shifts the scores, but neither the sink nor the fill.
        """
        term = terms[index]
        if not isinstance(term, Add) or not term.operand.never_enlarges:
            return False
        number = self.viewer.facts.sets.only(term.operand.value)
        if number is None:
            return False
        replaced = any(later.fill > DOMINATING for later in instances(terms[index + 1 :], Select))
        shows = replaced or self.sink_lower_bound is not None
        return number == 0.0 or (abs(number) <= most and not shows)

    def is_small_beside(
        self,
        terms: tuple[Term, ...],
        index: int,
        fill: float = DOMINATING,
        share: float = SMALL_SHARE,
    ) -> bool:
        """Is the absolute value of an addend proven to be less than this share of a mask's fill,
        whatever factors follow?

        A fill of -inf needs no proof. Nothing competes with it, and a row that holds nothing else
        has no softmax in any case. A dominating fill outweighs every score, and so every addend
        that is score-like (score_like.py).
        """
        if fill == -math.inf:
            return True
        term = terms[index]
        if not isinstance(term, Add):
            return False
        interval = self._interval(term)
        if interval is None:
            return fill <= DOMINATING and is_score_like(term.operand.value, self.viewer)
        return _largest(max(map(abs, interval)), terms[index + 1 :]) < -fill * share

    def stays_above(self, terms: tuple[Term, ...], index: int, fill: float) -> bool:
        """Is an addend proven to be far above a mask's fill, whatever factors follow? It may have
        any size."""
        interval = self._interval(terms[index])
        positive = all(later.factor > 0 for later in instances(terms[index + 1 :], Scale))
        if interval is None or not positive:
            return self.is_small_beside(terms, index, fill)
        return (
            fill == -math.inf
            or _largest(max(-interval[0], 0.0), terms[index + 1 :]) < -fill * SMALL_SHARE
        )

    def keeps_fill(self, terms: tuple[Term, ...], index: int) -> bool:
        """Is a score lost in the sum of this addend and a dominating fill? It is if the addend is
        proven not to cancel the fill."""
        interval = self._interval(terms[index])
        return interval is not None and interval[1] <= -DOMINATING * SMALL_SHARE

    def may_be_plus_infinity(self, terms: tuple[Term, ...], index: int) -> bool:
        """May an addend become +inf? An added mask of -inf then gives NaN and masks nothing.

        The addend's bounds tell it. Where they are unknown, a large number that is combined into
        the addend counts as one that may become +inf. An input of the model counts as one that does
        not.
        """
        term, interval = terms[index], self._interval(terms[index])
        if not isinstance(term, Add):
            return False
        if interval is None:
            return holds_large(term.operand.value, self.viewer.facts.bounds)
        return not _largest(interval[1], terms[index + 1 :]) < FLOAT32_MAX

    def cannot_exclude(self, terms: tuple[Term, ...], index: int) -> bool:
        """Is this term proven to make no score -inf, alone or together with others? Two finite
        numbers of masks may overflow when they are added."""
        term = terms[index]
        if isinstance(term, Add):
            return self.changes_no_softmax(terms, index) or self.is_small_beside(terms, index)
        return not isinstance(term, Select)

    def may_be_infinite(self, terms: tuple[Term, ...], index: int) -> bool:
        """May an addend or a fill be infinite before the softmax? It may where its numbers are
        unknown."""
        term = terms[index]
        if not isinstance(term, Add | Select):
            return False
        numbers = self.numbers_before_softmax(terms, index)
        if numbers != UNKNOWN:
            return not all(map(math.isfinite, numbers))
        interval = self._interval(term)
        return interval is None or not all(map(math.isfinite, interval))

    def first_infinite(self, terms: tuple[Term, ...]) -> Term | None:
        """The first term after which a score may be infinite, alone or together with the terms
        before it; None if all are bounded. The scores themselves are not counted: beside the
        largest float32 a finite score is rounded away.
        """
        size = 0.0
        for term in terms:
            match term:
                case Add():
                    size += self.viewer.facts.largest(term.operand.value)
                case Select():
                    size = max(size, abs(term.fill))
                case Scale():
                    size *= abs(term.factor)
                case Floor():
                    size = max(size, abs(term.floor))
            if not size <= FLOAT32_MAX:
                return term
        return None

    def is_float32(self, term: Term) -> bool:
        """Are the scores float32 where the term joins them? Scores of 16 bits are rounded coarsely
        anyway."""
        return self._dtype(term) == ir.DataType.FLOAT

    def _dtype(self, term: Term) -> ir.DataType | None:
        """The type of the scores where the term joins them."""
        return self.viewer.info.dtype(term.node.outputs[0])

    def _interval(self, term: Term) -> Interval | None:
        """The interval of what an addend adds, unless it is NaN; None where it is unknown, and for
        other terms."""
        if not isinstance(term, Add):
            return None
        interval = self.viewer.facts.bounds.unless_nan(term.operand.value)
        if interval is None:
            return None
        low, high = sorted(end * term.sign for end in interval)
        return low, high


def _scaled(
    numbers: frozenset[float], factor: float, dtype: ir.DataType | None
) -> frozenset[float]:
    """The products, rounded to float32. UNKNOWN where one is NaN, or where one is too large for 16
    bits: whether this product overflows depends on how ONNX Runtime computes it."""
    with np.errstate(all="ignore"):
        products = frozenset(
            float(np.float32(number) * np.float32(factor)) + 0.0 for number in numbers
        )
    if any(map(math.isnan, products)):
        return UNKNOWN
    if dtype != ir.DataType.FLOAT and any(
        FLOAT16_MAX < abs(number) < math.inf for number in products
    ):
        return UNKNOWN
    return products


def _largest(size: float, later: tuple[Term, ...]) -> float:
    """The largest that a number of this size becomes by the factors after it."""
    largest = size
    for term in instances(later, Scale):
        size *= abs(term.factor)
        largest = max(largest, size)
    return largest
