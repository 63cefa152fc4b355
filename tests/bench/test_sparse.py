"""The cases of `python -m bench.sparse`, at small sizes."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from bench import sparse


def _small(dtype: str) -> argparse.Namespace:
    return argparse.Namespace(heads=3, rows=2, selected=8, dtype=dtype, only=set(sparse.CASES))


def test_both_types_give_the_same_first_result() -> None:
    """With bfloat16 the same numbers, rounded: inputs to 8 bits, 8 keys to a sum, so results differ by some percent."""
    wide, narrow = ([case.ours() for case in sparse.cases(64, _small(dtype), 1)] for dtype in sparse.TYPES)
    assert [result.shape for result in wide] == [(2, 3, 512), (2, 3, 512), (1, 2, 8), (1, 2, 64, 128)]
    for exact, rounded in zip(wide, narrow, strict=True):
        assert exact.dtype == rounded.dtype == np.float32
        assert 0 < np.abs(exact - rounded).max() < 0.1 * np.abs(exact).max()


@pytest.mark.parametrize("only", [{"gradient"}, {"indexer", "attention"}])
def test_only_some(only: set[str]) -> None:
    options = _small("float32")
    options.only = only
    assert {case.name for case in sparse.cases(64, options, 1)} == only
