"""The tables of docs/recognised.md say what the code does: every reason code, and every spelling that the tests
compose."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fa_compiler.passes import Code
from fa_compiler.passes.answer.report import MissedCode
from tests.passes.accepted import ACCEPTED, ANY
from tests.passes.strategies import FIELDS, MASK

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "recognised.md").read_text(encoding="utf-8")
HINTS = {
    Code.MASK_VALUE: "`--assume masks-dominate`, if no score comes near the number",
    Code.EMPTY_ROWS: "`--assume no-empty-rows`, if no row is masked everywhere",
}
"""What the declines with these codes advise, which the code itself does not know."""


def table(heading: str) -> dict[str, list[str]]:
    """The rows of the table that begins with a heading, by their first cell."""
    lines = PAGE[PAGE.index(f"| {heading} |") :].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return {row[0]: row[1:] for row in rows}


def test_every_code_is_explained() -> None:
    wanted = {
        f"`{code}`": [code.meaning.replace("|", r"\|"), HINTS.get(code) or code.advice or "nothing"] for code in Code
    }
    rows = "\n".join(f"| {name} | {' | '.join(cells)} |" for name, cells in wanted.items())
    assert table("code") == wanted, f"the table has to be:\n{rows}"


def test_everything_that_can_be_missed_is_explained() -> None:
    assert table("missed") == {f"`{code}`": [code.meaning] for code in MissedCode}


@pytest.mark.parametrize("row", ACCEPTED)
def test_what_is_accepted_is_tested(row: str) -> None:
    (text,) = table("where")[row]
    for words, tests in ACCEPTED[row].items():
        assert words in text
        if isinstance(tests, str):
            assert (ROOT / "tests" / "passes" / tests).is_file()


def test_every_row_is_tested() -> None:
    assert list(table("where")) == list(ACCEPTED)


@pytest.mark.parametrize("field", [*FIELDS, *MASK])
def test_every_composed_choice_is_documented(field: str) -> None:
    """No choice of the composer without words, and none in the table that it does not make."""
    claimed = [
        value
        for row in ACCEPTED.values()
        for tests in row.values()
        if not isinstance(tests, str)
        for value in tests.get(field, ())
    ]
    composed = {**FIELDS, **MASK}[field]
    assert claimed == list(ANY) or set(claimed) == set(composed)
