"""Checks whether a selection may be carried out on a bias of 0 instead of on the scores.

All raise Decline with `mask_value`. The order of additions is checked in rounding.py.
"""

from __future__ import annotations

import math

from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.masks.magnitudes import DOMINATING
from fa_compiler.passes.masks.mask_values import TermValues
from fa_compiler.passes.masks.score_ops import AlignedTensor, Select, Term

FILL = "put -inf in place of masked scores, or the lowest number of their type"


def check_outweighs(terms: tuple[Term, ...], index: int, values: TermValues) -> None:
    """Raise Decline unless a fill, which is put in place of scores, outweighs them."""
    term = terms[index]
    if isinstance(term, Select) and not values.outweighs(terms, index):
        raise _too_small(term)


def check_adds_up(terms: tuple[Term, ...], index: int, values: TermValues) -> None:
    """Raise Decline unless score + fill rounds to the fill. It is not enough here that the user
    vouches for a fill."""
    term = terms[index]
    assert isinstance(term, Select)
    if any(
        number > DOMINATING for number in (term.fill, *values.numbers_before_softmax(terms, index))
    ):
        raise _too_small(term)


def _too_small(term: Select[AlignedTensor]) -> Decline:
    if math.isnan(term.fill):
        return Decline(
            Code.MASK_VALUE,
            "masked scores become NaN, and so does every row with one",
            term.node,
            FILL,
        )
    reason = f"masked scores become {term.fill:g}, and a score below that would count less than a masked one"
    return Decline(Code.MASK_VALUE, reason, term.node, FILL)
