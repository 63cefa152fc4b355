"""The groups of movers.py and the forms of moves.py belong together."""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.passes.ops.movers import MOVES
from fa_compiler.passes.ops.moves import Move, operators_of

SOMETIMES = {"Add", "Sub", "Cast", "Concat", "Dropout", "Pad"}
"""The operators that also compute something, and so are in no group."""


def forms(form: type[Move] = Move) -> Iterator[type[Move]]:
    """The forms of moves."""
    for below in form.__subclasses__():
        yield below
        yield from forms(below)


def test_every_operator_that_moves_elements_is_in_one_group() -> None:
    entered = set(operators_of(*forms()))
    assert entered == {*MOVES, *SOMETIMES}, "passes/ops/movers.py: add a new form to the group that says what it costs"
    assert len(MOVES) == len({*MOVES})
