"""The numbers that a length meets: none is overlooked of an operator that nobody thought of."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from fa_compiler.passes.linear import meetings
from fa_compiler.passes.linear.meetings import NOTED, NOTHING, Meetings, Numbers
from fa_compiler.passes.linear.operators import EXACT, RULES
from fa_compiler.passes.linear.tensors import Tensor, exact
from fa_compiler.passes.ops.movers import ARRAY_MOVES


def test_every_operator_is_noted_or_has_a_reason() -> None:
    assert {*RULES, *EXACT} <= {*NOTED, *NOTHING}
    unknown = {*NOTHING} - {*RULES, *EXACT}
    assert not unknown, f"passes/linear/meetings.py: NOTHING names {unknown}, which no rule follows"
    assert all(NOTHING.values()) and NOTHING.keys().isdisjoint({*NOTED, *meetings._KINDS})


def met(op_type: str, *constants: list[int], **attributes: int | list[int]) -> Numbers:
    """The numbers of a node that reads 3 rows at one point and 5 at another one."""
    node, found = ir.node(op_type, [None], attributes), Meetings()
    for rows in (3, 5):
        found.begin()
        found.add(node, [Tensor((rows,)), *(exact(np.array(numbers)) for numbers in constants)])
    return found.numbers()


@pytest.mark.parametrize("op_type", sorted({*ARRAY_MOVES} & meetings._KINDS.keys() - {*meetings.MERGING}))
def test_a_move_without_a_row_meets_all_its_integers(op_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new operator that moves arrays, such as Roll, is noted before anyone says which of its integers count."""
    monkeypatch.setattr(meetings, "_KINDS", {})
    found = met(op_type, [70], [90], shift=80, shifts=[60], step=2)
    assert found.compared | found.factors >= {60, 70, 80, 90}
    assert found.divisors == found.cut >= {2, 60, 70, 80, 90}


def test_a_scatter_into_rows_that_vary() -> None:
    rows = met("ScatterElements", [70])
    assert rows.compared == {70} and not rows.is_unclear


def test_a_quotient_of_what_is_left() -> None:
    """((n - 600) / 20 - 3) / 7 is 5 where n is 1,360."""
    found = Numbers(compared={5}, divisors={20, 7}, added={600, 3})
    assert {5 * 7, 5 * 20 + 600, (5 * 7 + 3) * 20 + 600} <= {*found.edges}
    rows = Numbers(compared={50, 600}, divisors={20}, cut={600})
    assert 50 * 20 + 600 in rows.edges


def test_what_sizes_are_multiples_of() -> None:
    assert met("Slice").factors == {2}  # 3 and 5 rows
    assert not met("Transpose").factors
