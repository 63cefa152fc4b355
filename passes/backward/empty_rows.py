"""Fully masked rows of a pair: the operator has to give the gradients what the graph gives them.

The cases:

    forward part's row        the graph's dS in that row       what is emitted
    none, or 0                anything finite                  the plan as it is: the operator gives zeros
    mean or NaN               zeros (a selection)              cpu_empty_rows at the gradient, too
    mean                      zeros times the row of P         the same
    a number as score         zeros, times P or not            cpu_mask_value and cpu_masked_bias at the gradient, too
    such a number and a bias  computed like any other, or      the mask as a bias, which makes it a row like any other
                              zeros times P, which may be NaN
    mean, NaN or unmasked     computed like any other          the mask as a bias, which makes it a row like any other
    NaN                       zeros times the row of P: NaN    the same
    NaN                       both, at different keys          declined
"""

from __future__ import annotations

import math
from dataclasses import replace

from fa_compiler.passes.answer.decline import Decline, label
from fa_compiler.passes.answer.options import MASKS_DOMINATE, NO_EMPTY_ROWS, NO_EMPTY_ROWS_HINT, Options
from fa_compiler.passes.answer.report import Code, Missed, MissedCode
from fa_compiler.passes.backward.match import Pair, PairDecline
from fa_compiler.passes.backward.quantities import ZEROS, MaskedRows
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.masks.bias_checks import FILL
from fa_compiler.passes.masks.magnitudes import ASSUMED_MASK
from fa_compiler.passes.masks.mask import MaskPlan
from fa_compiler.passes.masks.score_ops import Select
from fa_compiler.passes.matching.match import AttentionMatch


def keep_empty_rows(pair: Pair, options: Options) -> Pair:
    """The pair with the plan whose fully masked rows give the gradients what the graph gave them. Raises
    PairDecline."""
    match, empty_rows = _planned(pair, options)
    backward = replace(match.space.settle(pair.backward), empty_rows=empty_rows)
    return replace(pair, forward=match, backward=backward)


def _planned(pair: Pair, options: Options) -> tuple[AttentionMatch, str]:
    match, gradients = pair.forward, pair.backward.gradients
    plan = match.mask
    scores = {gradient.rows for gradient in gradients if gradient.role != "value"}
    values = {gradient.rows for gradient in gradients if gradient.role == "value"}
    added = pair.derivation.masking.planner.values.first_infinite(pair.derivation.paths.scores.terms)
    may_be_nan = added is not None and not scores.isdisjoint(ZEROS - {MaskedRows.ZERO})
    if plan.adds_bias_to_masked and (MaskedRows.SAME in scores or may_be_nan):
        match = _as_bias(pair)
        plan = match.mask
    if plan.masked_score is not None:
        _check_mask_value(pair, plan)
        return match, ""
    carried_out = [step for step in plan.bias if isinstance(step, Select)]
    if plan.empty_rows == "nan" or (carried_out and all(step.fill == -math.inf for step in carried_out)):
        # Zeros times NaN are NaN, like any other multiple of a row of NaN.
        scores = {MaskedRows.SAME if each is MaskedRows.SCALED else each for each in scores}
    states = scores | values
    used_raw = any(gradient.source.raw for gradient in gradients)
    if (used_raw and plan.nan_rows) or (MaskedRows.RAW in states and plan.empty_rows):
        raise _rows_differ(pair, "the gradient uses the probabilities before their guard")
    if carried_out and states != {MaskedRows.SAME} and NO_EMPTY_ROWS not in options.assume:
        raise _rows_differ(pair, "a selection is a bias here, and the gradient is zero where it masks a whole row")
    if plan.empty_rows in ("", "zero"):
        return match, plan.empty_rows
    zeros = scores <= (ZEROS if plan.empty_rows == "mean" else {MaskedRows.ZERO})
    if zeros and values <= {MaskedRows.SAME} and plan.empty_rows in ("mean", "nan"):
        return match, plan.empty_rows
    if states == {MaskedRows.SAME}:
        return _as_bias(pair), ""
    raise _rows_differ(pair, "rows that are masked everywhere get another gradient than the operator gives")


def _check_mask_value(pair: Pair, plan: MaskPlan) -> None:
    """Decline gradients that leave out the share of masked keys.

    With a mask value, masked keys have probabilities: the gradient has to be computed with all of them and masked
    afterwards. These are finite, unless a bias makes all scores of a row -inf. The operator has none for keys without a
    value.
    """
    for gradient in pair.backward.gradients:
        wanted = {MaskedRows.SAME} if gradient.role == "value" else ZEROS
        source, value = gradient.source, plan.masked_score or 0.0
        zeroed = gradient.role == "value" and source.zeroed
        if plan.drops_masked_values or source.rows not in wanted or source.spoilt or source.raw or zeroed:
            reason = f"masked scores become {value:g}: masked keys may have a share, which the gradient leaves out"
            hint = (
                f"--assume {MASKS_DOMINATE} if no score of the model comes near it" if value <= ASSUMED_MASK else FILL
            )
            raise PairDecline.about(pair.backward.node, Decline(Code.MASK_VALUE, reason, gradient.node, hint))


def _as_bias(pair: Pair) -> AttentionMatch:
    """The match with every mask as a bias, exactly as it was added or put in. A band is then missed."""
    masking, terms, space = pair.derivation.masking, pair.derivation.paths.scores.terms, pair.forward.space.branch()
    values = replace(masking.planner.values, viewer=Viewer(masking.planner.viewer.facts, space))
    plan = replace(masking.planner, as_bias=True, values=values).plan(terms, masking.tested)
    missed = pair.forward.mask.missed
    if pair.forward.mask.mode is not None:
        reason = "a row that is masked everywhere gets a gradient like any other, which a band does not give it"
        missed = (Missed(MissedCode.DENSE_MASK, reason, label(pair.backward.node), NO_EMPTY_ROWS_HINT),)
    return replace(pair.forward, mask=replace(plan, missed=missed)).within(space)


def _rows_differ(pair: Pair, reason: str) -> PairDecline:
    node = pair.backward.node
    return PairDecline.about(node, Decline(Code.EMPTY_ROWS, reason, node, NO_EMPTY_ROWS_HINT))
