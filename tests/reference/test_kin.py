"""The operators around attention that nothing becomes, computed number by number from what their documents say."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest

from fa_compiler import reference
from tests.corrupted import BASES


@pytest.mark.parametrize("seed", range(8))
def test_rows_are_multiplied_by_a_weight_plus_one(seed: int) -> None:
    inputs, attrs = BASES["GemmaRmsNorm"][0](np.random.default_rng(seed))
    found = reference.run("GemmaRmsNorm", inputs, attrs, dtype="float64")
    gamma = inputs["gamma"].astype(np.float64).ravel().tolist()
    rows = inputs["x"].astype(np.float64).reshape(-1, len(gamma)).tolist()
    epsilon = float(np.float32(attrs["epsilon"]))
    for row, y, rstd in zip(rows, found["y"].reshape(-1, len(gamma)), found["rstd"].ravel(), strict=True):
        root = sqrt(sum(number * number for number in row) / len(row) + epsilon)
        assert rstd == pytest.approx(1 / root, rel=1e-12)
        assert y == pytest.approx([number / root * (1 + own) for number, own in zip(row, gamma, strict=True)], rel=1e-9)


def test_the_one_is_added_before_anything_is_rounded() -> None:
    inputs = {"x": np.ones((1, 2), np.float16), "gamma": np.array([2**-12, -1.0], np.float16)}
    wide = reference.run("GemmaRmsNorm", {**inputs, "gamma": inputs["gamma"].astype(np.float32)}, {"epsilon": 0.0})
    assert wide["y"].dtype == np.float16
    exact = reference.run("GemmaRmsNorm", inputs, {"epsilon": 0.0}, dtype="float64")["y"]
    assert exact.tolist() == [[1 + 2**-12, 0.0]]  # 1 + 2**-12 is no number of float16
