"""Attention in odd spellings and near misses of it."""

from __future__ import annotations

from tests.fuzz.kind import Kind, Outcome
from tests.fuzz.oracle import Feed, Judge
from tests.passes.builder import build
from tests.passes.strategies import even


class Compose(Kind):
    """Random spellings."""

    def check(self, seed: int) -> Outcome:
        case = build(even(seed))
        feeds = [Feed("plain", case.feeds(each)) for each in (seed, seed + 1)]
        return Judge(case.model, feeds, again=seed % 16 == 0, note=repr(case.spelling)).outcome()
