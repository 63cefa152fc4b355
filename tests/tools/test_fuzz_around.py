"""The search for faults in what is around attention: its cases are models, and it sees a fault."""

from __future__ import annotations

import pytest

from fa_compiler.passes.around import rows
from tools.fuzz.kinds.around import Around

SEEDS = range(112, 120)
"""One of these cases is a norm whose fault only `expect_norm` sees."""


def outcomes() -> tuple[list[str], list[str]]:
    """What becomes of the cases, and the titles of what they find."""
    found = [Around().check(seed) for seed in SEEDS]
    return [each.word for each in found], [each.finding.title for each in found if each.finding is not None]


def test_blocks_are_fused_and_no_fault_is_found() -> None:
    words, titles = outcomes()
    assert not titles
    assert words.count("fused") >= len(words) // 2
    assert words.count("skipped") <= 1


def test_a_check_that_is_missing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "expect_norm", lambda *_: None)
    _, titles = outcomes()
    assert "other numbers [RmsNorm]" in titles
