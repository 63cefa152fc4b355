"""Attention operators of other domains, from tools/fuzz/operators.py."""

from __future__ import annotations

from tools.fuzz.feeds import feeds
from tools.fuzz.operators import operator
from tools.fuzz.oracle import Judge
from tools.fuzz.reduction import GraphKind

ADDING = "com.microsoft Attention "
"""The operator adds one product after the other to a mask of -1e4."""
LAST_BITS = 100.0
"""What results may be apart then: the last bit of -1e4 is 1e-3."""


class ReadyMade(GraphKind):
    """One operator, fed in several ways."""

    def judge(self, seed: int) -> Judge:
        case = operator(seed)
        note = f"{' '.join(case.words)} open {''.join(sorted(case.open))} {dict(case.sizes)}"
        group = f"{case.words[0].partition(' {')[0]} {case.inputs[0].dtype}, "
        made = Judge(case.model, lambda: feeds(case, seed), case.assume, seed % 32 == 0, note, group, hides_nan=True)
        if group.startswith(ADDING):
            made.rough = LAST_BITS
        return made
