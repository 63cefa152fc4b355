"""When a number that is put in place of scores may be carried out on a bias of 0 instead: what each check refuses, it
says. The order of additions is checked in rounding.py.

All raise Decline with `mask_value`.
"""

from __future__ import annotations

from fa_compiler.passes.decline import Decline
from fa_compiler.passes.masks.mask_values import DOMINATING, TermValues
from fa_compiler.passes.masks.terms import SelectTerm, Term
from fa_compiler.passes.options import MASKS_DOMINATE
from fa_compiler.passes.report import Code


def check_outweighs(terms: tuple[Term, ...], index: int, values: TermValues) -> None:
    """A fill that is put in place of scores has to outweigh them."""
    term = terms[index]
    if isinstance(term, SelectTerm) and not values.outweighs(terms, index):
        raise _too_small(term)


def check_adds_up(terms: tuple[Term, ...], index: int, values: TermValues) -> None:
    """score + fill has to round to fill: what the user vouches for is not enough to put a fill into a bias."""
    term = terms[index]
    assert isinstance(term, SelectTerm)
    if any(value > DOMINATING for value in (term.fill, *(values.of(terms, index) or ()))):
        raise _too_small(term)


def _too_small(term: SelectTerm) -> Decline:
    return Decline(
        Code.MASK_VALUE,
        f"masked scores become {term.fill:g}, which other scores could undercut",
        term.node,
        f"--assume {MASKS_DOMINATE} if no score of the model comes near it",
    )
