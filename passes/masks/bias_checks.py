"""When a number that is put in place of scores may be carried out on a bias of 0 instead: what each check refuses, it
says. The order of additions is checked in rounding.py.

All raise Decline with `mask_value`.
"""

from __future__ import annotations

import math

from fa_compiler.passes.decline import Decline
from fa_compiler.passes.masks.magnitudes import DOMINATING
from fa_compiler.passes.masks.mask_values import TermValues
from fa_compiler.passes.report import Code
from fa_compiler.passes.score_ops import Placed, Select, Term

FILL = "put -inf in place of masked scores, or the lowest number of their type"


def check_outweighs(terms: tuple[Term, ...], index: int, values: TermValues) -> None:
    """A fill that is put in place of scores has to outweigh them."""
    term = terms[index]
    if isinstance(term, Select) and not values.outweighs(terms, index):
        raise _too_small(term)


def check_adds_up(terms: tuple[Term, ...], index: int, values: TermValues) -> None:
    """score + fill has to round to fill: what the user vouches for is not enough to put a fill into a bias."""
    term = terms[index]
    assert isinstance(term, Select)
    if any(value > DOMINATING for value in (term.fill, *(values.of(terms, index) or ()))):
        raise _too_small(term)


def _too_small(term: Select[Placed]) -> Decline:
    if math.isnan(term.fill):
        return Decline(Code.MASK_VALUE, "masked scores become NaN, and so does every row with one", term.node, FILL)
    reason = f"masked scores become {term.fill:g}, and a score below that would count less than a masked one"
    return Decline(Code.MASK_VALUE, reason, term.node, FILL)
