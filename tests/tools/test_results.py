"""The comparison of tools/compat: what counts as another result."""

from __future__ import annotations

import numpy as np
import pytest

from tools.compat.results import difference

WANTED = np.array([1.0, -np.inf, np.nan, 4.0], np.float32)


@pytest.mark.parametrize(
    ("got", "words"),
    [
        (WANTED, ""),
        (WANTED * np.float32(1.001), ""),
        (WANTED * np.float32(1.1), "differs by"),
        (np.array([1.0, -np.inf, 0.0, 4.0], np.float32), "NaN elsewhere"),
        (np.full(4, np.nan, np.float32), "NaN elsewhere"),
        (np.array([1.0, np.inf, np.nan, 4.0], np.float32), "differs by inf"),
        (WANTED[:2], "the shape [2] instead of [4]"),
    ],
)
def test_what_differs(got: np.ndarray, words: str) -> None:
    found = difference([got], [WANTED], lambda _: 0.01)
    assert words in found and bool(words) == bool(found)


def test_integers_are_equal_or_not() -> None:
    ones = np.ones(2, np.int64)
    assert difference([ones], [ones], lambda _: 1.0) == ""
    assert difference([ones + 1], [ones], lambda _: 1.0) == "output 0 has other integers"
