"""Tokens a second of the exporter's files: what is timed, and what a row says."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bench.exporter_tokens import _row
from bench.exporter_worker import measure, prompt_of
from tests.systems import TOOLS


@TOOLS
def test_the_prompt_ends_with_its_first_token() -> None:
    begun: list[int] = []

    def begin(words: np.ndarray) -> Iterator[int]:
        begun.append(words.shape[1])
        yield from range(100)

    found = measure(begin, 5, 3)
    assert begun == [5, 5] and found["chosen"] == [0, 1, 2, 3]
    assert found["prefill"] >= 0 and found["decode"] >= 0 and found["peak_mib"] > 0
    assert np.array_equal(prompt_of(5), prompt_of(5))


@TOOLS
def test_a_row_has_the_best_round_and_the_tokens_up_to_the_first_other_one() -> None:
    rounds = [
        {"prefill": 2.0, "decode": 1.0, "chosen": [7, 8, 9], "peak_mib": 10},
        {"prefill": 1.0, "decode": 4.0, "chosen": [7, 8, 9], "peak_mib": 30},
    ]
    cells = _row("ours", 2, 100, rounds, [7, 5, 9]).split(" | ")
    assert cells[:8] == ["| ours", "2", "100", "2", "100", "2", "30", "1 of 3"]
