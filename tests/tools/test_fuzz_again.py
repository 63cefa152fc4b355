"""What a second fusion of a model may not do is found."""

from __future__ import annotations

from itertools import count

import pytest

import fa_compiler
from tools.fuzz.kinds.again import Again


def test_a_second_run_that_fuses(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = Again()
    seed = next(seed for seed in count() if kind.check(seed).word == "fused")
    assert kind.check(seed).finding is None
    judge, optimize = kind.judge(seed), fa_compiler.optimize
    assert judge is not None
    given = judge.model
    monkeypatch.setattr(fa_compiler, "optimize", lambda _, **options: optimize(given, **options))
    finding = judge.outcome().finding
    assert finding is not None and finding.title.startswith("a second run fuses more [FlashAttention")
