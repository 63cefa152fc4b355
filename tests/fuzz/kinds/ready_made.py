"""Attention operators of other domains, from tests/fuzz/operators.py."""

from __future__ import annotations

from tests.fuzz.feeds import feeds
from tests.fuzz.kind import Kind, Outcome
from tests.fuzz.operators import operator
from tests.fuzz.oracle import Judge


class ReadyMade(Kind):
    """One operator, fed in several ways."""

    innocent = ("run_original",)

    def check(self, seed: int) -> Outcome:
        case = operator(seed)
        note = f"{' '.join(case.words)} open {''.join(sorted(case.open))} {dict(case.sizes)}"
        judge = Judge(case.model, lambda: feeds(case, seed), again=seed % 32 == 0, note=note, hides_nan=True)
        judge.group = f"{case.words[0].partition(' {')[0]} {case.inputs[0].dtype}, "
        return judge.outcome()
