"""What an attention's terms and guards come to: the mask plan, and what was decided on the way to
it.

    terms     those of the scores; a mask by which probabilities are divided again (renormalised.py)
              is one more
    guard     what a guard after the softmax tests (guards.py), or a factor on the probabilities
              that is the mask
    factors   if one on the scores is of unknown size (factors.py), a mask whose finite number is
              added stays a bias
    sink      beside the scores it makes a row without a key 0; as a gate, or in the total alone, it
              leaves that row NaN

Refused with a sink:
    a guard that tests the scores or the bias
    a guard by the mask, unless the sink is proven to be less than +inf
    a gate, or a sink in the total alone: terms that may make a whole row -inf, unless a guard makes
        that row 0
    a gate with a guard against NaN: terms that may make a score +inf

Refused beside a softmax that is spelt exp(x - log(sum(exp(x)))), where finite numbers may be all
that a row holds:
    numbers that are not proven to be 0 or less
    other numbers, unless the only mask is proven to leave each row a key, or the user vouches for
    no-empty-rows

Beside a number such as -1e9 the logarithm is rounded away, and each key of the row gets the weight
1, not its share. The largest x of any other row is between two scores of the product, or a score
and 0, if no term gives a score more than 0. The logarithm is then rounded as it is without a mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import onnx_ir as ir

from fa_compiler.passes.answer.decline import Decline, label
from fa_compiler.passes.answer.options import (
    BOUNDED_SCORES,
    DROP_ROUNDINGS,
    NO_EMPTY_ROWS,
    NO_EMPTY_ROWS_HINT,
)
from fa_compiler.passes.answer.report import Code, Missed, MissedCode
from fa_compiler.passes.ir.nodes import SIXTEEN_BITS
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.masks.mask import MaskPlan, MaskPlanner
from fa_compiler.passes.masks.mask_values import UNKNOWN, TermValues
from fa_compiler.passes.masks.missed import plan_with_missed
from fa_compiler.passes.masks.row_guard import RowGuard
from fa_compiler.passes.masks.score_ops import Add, Floor, Scale, Term
from fa_compiler.passes.masks.structure import Grid
from fa_compiler.passes.matching.activation_rounding import rounding_starts
from fa_compiler.passes.matching.attention_paths import AttentionPaths
from fa_compiler.passes.matching.bounded import BoundedScores
from fa_compiler.passes.matching.factors import Factor
from fa_compiler.passes.matching.guards import MaskedScores, only_mask, product_guard
from fa_compiler.passes.matching.probabilities import Probabilities
from fa_compiler.passes.matching.roles import KeySide
from fa_compiler.passes.matching.sinks import FoundSink, sink_lower_bound
from fa_compiler.passes.matching.weights import base_of

LOGARITHM_ADVICE = (
    "write it as a Softmax; or mask the scores with -inf, and add nothing else to them"
)


@dataclass(frozen=True)
class Masking:
    """The plan and its planner.

    `row` is the label of the query dimension that counts its rows, None if it has none. `tested` is
    the meaning of the guard's nodes alone, and `factors` are the factors on the probabilities that
    are no mask. The plan is that of `terms` with `guard` after the softmax.
    """

    plan: MaskPlan
    planner: MaskPlanner
    row: str | None
    tested: RowGuard
    factors: tuple[Factor, ...]
    terms: tuple[Term, ...]
    guard: RowGuard

    @staticmethod
    def of(
        paths: AttentionPaths,
        key: KeySide,
        probabilities: Probabilities,
        found_sink: FoundSink | None,
    ) -> Masking:
        """The masking of an attention whose scores have this sink beside them. Raises Decline."""
        guarded, space = Guarded.of(paths, key, probabilities), paths.viewer.space
        terms, guard = guarded.terms, guarded.guard
        row = key.row(paths.qk, terms, paths.viewer)
        q_seq = key.q_seq(paths.qk, row, space)
        planner = MaskPlanner(
            TermValues(paths.viewer, guarded.lower_bound(found_sink, paths)),
            Grid.of(q_seq, key.kv_seq, space),
            packing=not paths.route.gradient or probabilities.dropout is None,
            gradient=paths.route.gradient,
            unbounded=paths.scores.unbounded is not None,
            narrow=paths.viewer.info.dtype(paths.after.product.output) in SIXTEEN_BITS,
        )
        guarded.check_empty_rows(paths, planner.values)
        masking = Masking(MaskPlan(), planner, row, guarded.tested, guarded.factors, terms, guard)
        return replace(masking, plan=masking.plan_with(guard, paths))

    def plan_with(self, guard: RowGuard, paths: AttentionPaths) -> MaskPlan:
        """The plan of the terms with another guard after the softmax. Raises Decline."""
        planner, terms = self.planner, self.terms
        plan = plan_with_missed(planner, terms, guard, _stays_bias(paths, planner, terms))
        if paths.gate is not None and plan.nan_rows:
            _check_below_infinity(planner.values, terms)
            plan = replace(plan, nan_rows="")
        return plan.assuming(*_assumed(paths, planner, terms))


@dataclass(frozen=True)
class Guarded:
    """The terms of an attention, and what zeroes rows behind its softmax.

    `guard` belongs to the terms, among which is a mask by which probabilities are divided again.
    `tested` is the meaning of the guard's nodes alone, and `factors` are the factors on the
    probabilities that are no mask.
    """

    terms: tuple[Term, ...]
    guard: RowGuard
    tested: RowGuard
    factors: tuple[Factor, ...]

    @staticmethod
    def of(paths: AttentionPaths, key: KeySide, probabilities: Probabilities) -> Guarded:
        """What the guard, a division and the factors behind the softmax come to. Raises Decline."""
        after, viewer, terms, factors = (
            paths.after,
            paths.viewer,
            paths.scores.terms,
            probabilities.factors,
        )
        tested = RowGuard.NONE
        if after.guard is not None:
            tested = after.guard.meaning(
                MaskedScores(terms, key.kv_seq, viewer, probabilities.seen)
            )
        guard = tested
        if after.divided is not None:
            mask = BoundedScores(viewer.facts).mask_of(
                after.divided, key.kv_seq, viewer, probabilities.seen
            )
            terms, guard = (*terms, mask), RowGuard.NAN if after.divided.zeros else RowGuard.NONE
        if guard is RowGuard.NONE and (choice := product_guard(factors, terms, viewer)) is not None:
            others = tuple(factor for factor in factors if factor is not choice)
            return Guarded(terms, RowGuard.PRODUCT, tested, others)
        return Guarded(terms, guard, tested, factors)

    @property
    def by_mask(self) -> bool:
        """Does the guard zero the rows that the mask masks?"""
        return self.guard in (RowGuard.SELECTION, RowGuard.PRODUCT)

    def lower_bound(self, sink: FoundSink | None, paths: AttentionPaths) -> float | None:
        """A number that every sink is above; None without a sink. Raises Decline."""
        if sink is None:
            return None
        if self.guard in (RowGuard.BIAS, RowGuard.SCORES):
            reason = "a guard that tests the scores, not the sink beside them"
            raise Decline(Code.PROBABILITY_TERM, reason, paths.anchor.node)
        return sink_lower_bound(sink, paths.viewer.facts, self.by_mask)

    def check_empty_rows(self, paths: AttentionPaths, values: TermValues) -> None:
        """Decline terms that may make a whole row -inf beside a gate, or a sink in the total
        alone."""
        total = paths.anchor.sink
        leaves_nan = paths.gate is not None or (total is not None and total.clamped_max is None)
        if leaves_nan and self.guard is RowGuard.SELECTION:
            _check_finite(values, self.terms, only_mask(self.terms))
        elif leaves_nan and self.guard in (RowGuard.PRODUCT, RowGuard.NONE):
            _check_finite(values, self.terms, None)


def _assumed(paths: AttentionPaths, planner: MaskPlanner, terms: tuple[Term, ...]) -> Iterator[str]:
    """What the user vouches for beside the plan. Raises Decline."""
    anchor = paths.anchor
    if paths.after.divided is not None or anchor.overflows:
        yield BOUNDED_SCORES
    if anchor.overflows and paths.finite is not None:
        yield NO_EMPTY_ROWS
    if anchor.rounds and paths.finite is not None:
        yield from _assumed_for_logarithm(planner, terms, paths.finite)
    if any(rounding_starts(node) for node in (*paths.before.nodes, *paths.after.nodes)):
        yield DROP_ROUNDINGS


def _stays_bias(
    paths: AttentionPaths, planner: MaskPlanner, terms: tuple[Term, ...]
) -> Missed | None:
    """Why every mask stays a bias beside a factor of unknown size; None where none has to."""
    factor = paths.scores.unbounded
    if factor is None or not planner.outweighs_masks(terms):
        return None
    reason = "scores times a factor of unknown size may outweigh the number of the mask"
    hint = "make the factor a constant, or mask with -inf"
    return Missed(MissedCode.DENSE_MASK, reason, label(factor.node), hint)


def _assumed_for_logarithm(
    planner: MaskPlanner, terms: tuple[Term, ...], finite: Term
) -> tuple[str, ...]:
    """What the user vouches for beside a softmax that subtracts the logarithm of its sum. Raises
    Decline."""
    reason = (
        "the softmax is spelt exp(scores - log(sum(exp(scores)))), and the logarithm is rounded away in a row "
        "whose scores are all as large as the numbers of a mask, which this term may bring about"
    )
    if not all(_only_lowers(planner.values, terms, index) for index in range(len(terms))):
        raise Decline(Code.SCORE_TERM, reason, finite.node, LOGARITHM_ADVICE)
    masks = [term for term in terms if not isinstance(term, Scale)]
    if len(masks) == 1 and planner.never_empty(terms):
        return ()
    if NO_EMPTY_ROWS in planner.options.assume:
        return (NO_EMPTY_ROWS,)
    raise Decline(
        Code.SCORE_TERM, reason, finite.node, f"{NO_EMPTY_ROWS_HINT}; or {LOGARITHM_ADVICE}"
    )


def _only_lowers(values: TermValues, terms: tuple[Term, ...], index: int) -> bool:
    """Does a term leave each score, or give it or add to it a number that is 0 or less, whatever
    factors follow?"""
    term = terms[index]
    if isinstance(term, Scale):
        return term.factor > 0.0
    numbers = values.numbers_before_softmax(terms, index)
    return isinstance(term, Floor) or all(number <= 0.0 for number in numbers)


def _check_finite(values: TermValues, terms: tuple[Term, ...], zeroed: Term | None) -> None:
    """Decline terms that may make a whole row -inf; where `zeroed` alone does so, a guard makes it
    0."""
    others = [index for index, term in enumerate(terms) if term is not zeroed]
    masks = [index for index in others if not values.cannot_exclude(terms, index)]
    for index in masks:
        if len(masks) > 1 or values.may_be_infinite(terms, index):
            reason = "a row whose scores are all -inf gives NaN, and 0 beside a sink"
            raise Decline(Code.EMPTY_ROWS, reason, terms[index].node)


def _check_below_infinity(values: TermValues, terms: tuple[Term, ...]) -> None:
    """Decline terms that may make a score +inf; inputs of the model are assumed not to hold
    +inf."""
    for index, term in enumerate(terms):
        numbers = values.numbers_before_softmax(terms, index)
        added = (
            numbers == UNKNOWN
            and isinstance(term, Add)
            and not _is_given(term.operand.value, values.viewer)
        )
        if math.inf in numbers or (added and values.may_be_infinite(terms, index)):
            reason = "a guard makes a row with a score of +inf 0, where a sink beside the scores makes it NaN"
            raise Decline(Code.MASK_VALUE, reason, term.node)


def _is_given(value: ir.Value, viewer: Viewer) -> bool:
    """Is a value an input or initializer, rearranged or not?"""
    return base_of(value, viewer).producer() is None
