"""The groups of movers.py and the forms of moves.py belong together."""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.passes.ops.movers import ARRAY_MOVES, MOVES
from fa_compiler.passes.ops.moves import Move, operators_of

SOMETIMES = {"Add", "Sub", "Cast", "Concat", "Dropout", "Pad"}
"""The operators that also compute something, and so are no moves wherever they stand."""


def forms(form: type[Move] = Move) -> Iterator[type[Move]]:
    """The forms of moves."""
    for below in form.__subclasses__():
        yield below
        yield from forms(below)


def test_every_operator_that_moves_elements_is_a_move_always_or_sometimes() -> None:
    entered = set(operators_of(*forms()))
    assert entered == {*MOVES, *SOMETIMES} and SOMETIMES.isdisjoint(MOVES)
    assert len(MOVES) == len({*MOVES})


def test_the_moves_of_arrays() -> None:
    """A form without `on_arrays` is none, and Identity has a rule of its own."""
    assert {*MOVES} - {*ARRAY_MOVES} == {"Identity", "ReverseSequence", "DepthToSpace", "SpaceToDepth"}
    assert {*ARRAY_MOVES} <= {*MOVES}
