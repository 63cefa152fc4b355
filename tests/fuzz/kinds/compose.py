"""Attention in odd spellings and near misses, from the grammar of tests/fuzz/grammar.py."""

from __future__ import annotations

from tests.fuzz.feeds import feeds
from tests.fuzz.grammar import compose
from tests.fuzz.kind import Kind, Outcome
from tests.fuzz.oracle import Judge


class Compose(Kind):
    """One attention of the grammar, fed in several ways."""

    innocent = ("run_original",)

    def check(self, seed: int) -> Outcome:
        case = compose(seed)
        note = f"{' '.join(case.words)} {' '.join(case.assume)} open {''.join(sorted(case.open))} {dict(case.sizes)}"
        judge = Judge(
            case.model,
            lambda: feeds(case, seed),
            case.assume,
            again=seed % 32 == 0,
            note=note,
            undefined=case.undefined,
        )
        judge.group = f"{case.inputs[0].dtype}, "
        return judge.outcome()
