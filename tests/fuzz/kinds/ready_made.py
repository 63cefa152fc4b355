"""Attention operators of other domains, from tests/fuzz/operators.py."""

from __future__ import annotations

from tests.fuzz.feeds import feeds
from tests.fuzz.operators import operator
from tests.fuzz.oracle import Judge
from tests.fuzz.reduction import GraphKind


class ReadyMade(GraphKind):
    """One operator, fed in several ways."""

    def judge(self, seed: int) -> Judge:
        case = operator(seed)
        note = f"{' '.join(case.words)} open {''.join(sorted(case.open))} {dict(case.sizes)}"
        group = f"{case.words[0].partition(' {')[0]} {case.inputs[0].dtype}, "
        return Judge(case.model, lambda: feeds(case, seed), case.assume, seed % 32 == 0, note, group, hides_nan=True)
