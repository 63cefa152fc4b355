"""Fully masked rows of a pair: the operator has to give the gradients what the graph gives them.

The cases:

    forward part's row        the graph's dS in that row       what is emitted
    none, or 0                anything finite                  the plan as it is: the operator gives
                                                               zeros
    mean or NaN               zeros (a selection)              cpu_empty_rows at the gradient, too
    mean                      zeros times the row of P         the same
    a number as score         zeros, times P or not            cpu_mask_value and cpu_masked_bias at
                                                               the gradient, too
    such a number and a bias  computed like any other, or      the mask as a bias, which makes it a
                              row like any other zeros times P, which may be NaN
    mean, NaN or unmasked     computed like any other          the mask as a bias, which makes it a
                                                               row like any other
    NaN                       zeros times the row of P: NaN    the same
    NaN                       both, at different keys          declined
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fa_compiler.passes.answer.decline import Decline, label
from fa_compiler.passes.answer.options import (
    MASKS_DOMINATE,
    NO_EMPTY_ROWS,
    NO_EMPTY_ROWS_HINT,
    Options,
)
from fa_compiler.passes.answer.report import Code, Missed, MissedCode
from fa_compiler.passes.backward.match import Gradient, Pair, PairDecline
from fa_compiler.passes.backward.quantities import ZEROS, MaskedRows
from fa_compiler.passes.ir.nodes import instances
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.masks.bias_checks import FILL
from fa_compiler.passes.masks.magnitudes import ASSUMED_MASK
from fa_compiler.passes.masks.mask import MaskPlan
from fa_compiler.passes.masks.score_ops import BiasOperand, Select
from fa_compiler.passes.matching.match import AttentionMatch


def keep_empty_rows(pair: Pair, options: Options) -> Pair:
    """The pair with the plan whose fully masked rows give the gradients what the graph gave them.
    Raises PairDecline."""
    match, empty_rows = _planned(pair, options)
    backward = replace(match.space.settle(pair.backward), empty_rows=empty_rows)
    return replace(pair, forward=match, backward=backward)


@dataclass(frozen=True)
class _GradientRows:
    """What the graph's gradients are in rows that are masked everywhere: those of query and key,
    made from dS, and those of the values, made from P. `uses_raw` says whether one reads the
    probabilities before their guard."""

    scores: frozenset[MaskedRows]
    values: frozenset[MaskedRows]
    uses_raw: bool

    @staticmethod
    def of(pair: Pair) -> _GradientRows:
        """The rows of the gradients of a pair."""
        gradients = pair.backward.gradients
        return _GradientRows(
            frozenset(gradient.rows for gradient in gradients if gradient.role != "value"),
            frozenset(gradient.rows for gradient in gradients if gradient.role == "value"),
            any(gradient.source.raw for gradient in gradients),
        )

    @property
    def states(self) -> frozenset[MaskedRows]:
        """What the rows are in any of the gradients."""
        return self.scores | self.values

    def beside_nan(self) -> _GradientRows:
        """The same rows where the forward part has NaN: zeros times NaN are NaN, like any other
        multiple of NaN."""
        if MaskedRows.SCALED not in self.scores:
            return self
        return replace(self, scores=self.scores - {MaskedRows.SCALED} | {MaskedRows.SAME})

    def are_zeros_beside(self, empty_rows: str) -> bool:
        """Is dS zeros in rows that the forward part makes a mean or NaN, and P what it is there?"""
        zeros = {"mean": ZEROS, "nan": {MaskedRows.ZERO}}.get(empty_rows)
        return zeros is not None and self.scores <= zeros and self.values <= {MaskedRows.SAME}

    def differ_beside_bias(self, pair: Pair) -> bool:
        """Do rows of the mask's number plus a bias differ from what the operator gives: computed
        like any other, or zeros times P, which may be NaN?"""
        derivation = pair.derivation
        infinite = derivation.masking.planner.values.first_infinite(derivation.paths.scores.terms)
        may_be_nan = infinite is not None and not self.scores.isdisjoint(ZEROS - {MaskedRows.ZERO})
        return pair.forward.mask.adds_bias_to_masked and (
            MaskedRows.SAME in self.scores or may_be_nan
        )


def _planned(pair: Pair, options: Options) -> tuple[AttentionMatch, str]:
    """The match with the plan to emit, and the attribute cpu_empty_rows of the gradient. Raises
    PairDecline."""
    rows = _GradientRows.of(pair)
    match = _as_bias(pair) if rows.differ_beside_bias(pair) else pair.forward
    plan = match.mask
    if plan.masked_score is not None:
        _check_mask_value(pair, plan)
        return match, ""
    if _leaves_nan(plan):
        rows = rows.beside_nan()
    _check_rows(rows, plan, pair, options)
    if plan.empty_rows in ("", "zero") or rows.are_zeros_beside(plan.empty_rows):
        return match, plan.empty_rows
    if rows.states == {MaskedRows.SAME}:
        return _as_bias(pair), ""
    raise _rows_differ(
        pair, "rows that are masked everywhere get another gradient than the operator gives"
    )


def _selections(plan: MaskPlan) -> list[Select[BiasOperand]]:
    """The selections that a plan carries out as a bias."""
    return instances(plan.bias, Select)


def _leaves_nan(plan: MaskPlan) -> bool:
    """Does a plan give NaN in rows that are masked everywhere?"""
    selections = _selections(plan)
    return plan.empty_rows == "nan" or (
        bool(selections) and all(step.fill == -math.inf for step in selections)
    )


def _check_rows(rows: _GradientRows, plan: MaskPlan, pair: Pair, options: Options) -> None:
    """Decline gradients made of numbers that a guard replaces, and gradients that are zero where a
    selection is a bias."""
    if (rows.uses_raw and plan.nan_rows) or (MaskedRows.RAW in rows.states and plan.empty_rows):
        raise _rows_differ(pair, "the gradient uses the probabilities before their guard")
    if (
        _selections(plan)
        and rows.states != {MaskedRows.SAME}
        and NO_EMPTY_ROWS not in options.assume
    ):
        raise _rows_differ(
            pair, "a selection is a bias here, and the gradient is zero where it masks a whole row"
        )


def _check_mask_value(pair: Pair, plan: MaskPlan) -> None:
    """Decline gradients that leave out the share of masked keys.

    With a mask value, masked keys have probabilities: the gradient has to be computed with all of
    them and masked afterwards. These are finite, unless a bias makes all scores of a row -inf. The
    operator has none for keys without a value.
    """
    value = plan.masked_score or 0.0
    hint = (
        f"--assume {MASKS_DOMINATE} if no score of the model comes near it"
        if value <= ASSUMED_MASK
        else FILL
    )
    for gradient in pair.backward.gradients:
        if plan.drops_masked_values or _leaves_out_masked(gradient):
            reason = f"masked scores become {value:g}: masked keys may have a share, which the gradient leaves out"
            raise PairDecline.about(
                pair.backward.node, Decline(Code.MASK_VALUE, reason, gradient.node, hint)
            )


def _leaves_out_masked(gradient: Gradient) -> bool:
    """Is a gradient not that of all keys, with dS masked afterwards?"""
    source = gradient.source
    if source.spoilt or source.raw:
        return True
    if gradient.role == "value":
        return source.rows is not MaskedRows.SAME or bool(source.zeroed)
    return source.rows not in ZEROS


def _as_bias(pair: Pair) -> AttentionMatch:
    """The match with every mask as a bias, exactly as it was added or put in. A band is then
    missed."""
    masking, terms, space = (
        pair.derivation.masking,
        pair.derivation.paths.scores.terms,
        pair.forward.space.branch(),
    )
    values = replace(masking.planner.values, viewer=Viewer(masking.planner.viewer.facts, space))
    plan = replace(masking.planner, as_bias=True, values=values).plan(terms, masking.tested)
    missed = pair.forward.mask.missed
    if pair.forward.mask.mode is not None:
        reason = "a row that is masked everywhere gets a gradient like any other, which a band does not give it"
        missed = (
            Missed(MissedCode.DENSE_MASK, reason, label(pair.backward.node), NO_EMPTY_ROWS_HINT),
        )
    return replace(pair.forward, mask=replace(plan, missed=missed)).within(space)


def _rows_differ(pair: Pair, reason: str) -> PairDecline:
    node = pair.backward.node
    return PairDecline.about(node, Decline(Code.EMPTY_ROWS, reason, node, NO_EMPTY_ROWS_HINT))
