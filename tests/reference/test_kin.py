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


@pytest.mark.parametrize("seed", range(8))
def test_rows_from_an_axis_on_are_centred(seed: int) -> None:
    inputs, attrs = BASES["LayerNormV3"][0](np.random.default_rng(seed))
    found = reference.run("LayerNormV3", inputs, attrs, dtype="float64")
    x = inputs["x"].astype(np.float64)
    gamma, beta = (np.broadcast_to(inputs[name].astype(np.float64), x.shape) for name in ("gamma", "beta"))
    axis = attrs["begin_norm_axis"] % x.ndim
    assert found["mean"].shape == found["rstd"].shape == x.shape[:axis] + (1,) * (x.ndim - axis)
    epsilon = float(np.float32(attrs["epsilon"]))
    for place in np.ndindex(x.shape[:axis]):
        row = x[place].ravel().tolist()
        mean = sum(row) / len(row)
        root = sqrt(sum((number - mean) ** 2 for number in row) / len(row) + epsilon)
        expected = (x[place] - mean) / root * gamma[place] + beta[place]
        np.testing.assert_allclose(found["y"][place], expected, rtol=1e-9, atol=1e-12)
        assert found["mean"][place].item() == pytest.approx(mean, abs=1e-12)
        assert found["rstd"][place].item() == pytest.approx(1 / root, rel=1e-12)


def test_statistics_have_the_type_of_the_weight() -> None:
    x = np.array([[1.0, 2.0, 2.0, 3.0]], np.float16)
    attrs = {"begin_norm_axis": 1, "begin_params_axis": 1, "epsilon": 0.5}
    for dtype in (np.float16, np.float32):
        weights = {name: np.full(4, number, dtype) for name, number in (("gamma", 2), ("beta", 3))}
        found = reference.run("LayerNormV3", {"x": x, **weights}, attrs)
        assert found["y"].dtype == np.float16
        assert found["mean"].dtype == found["rstd"].dtype == dtype
        assert found["y"].tolist() == [[1.0, 3.0, 3.0, 5.0]]
        assert (found["mean"].item(), found["rstd"].item()) == (2.0, 1.0)


@pytest.mark.parametrize("seed", range(6))
def test_halves_are_rotated(seed: int) -> None:
    """Each pair is a complex number."""
    inputs, attrs = BASES["RotaryMul"][0](np.random.default_rng(seed))
    found = reference.run("RotaryMul", inputs, attrs, dtype="float64")["y"]
    x = inputs["x"].astype(np.float64)
    cos, sin = (np.broadcast_to(inputs[name].astype(np.float64), x.shape) for name in ("r1", "r2"))
    np.testing.assert_allclose(found, complex_pairs(x[..., :32], x[..., 32:], cos, sin), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_neighbours_are_rotated_and_sorted(seed: int) -> None:
    inputs, attrs = BASES["InterleaveRope"][0](np.random.default_rng(seed))
    found = reference.run("InterleaveRope", inputs, attrs, dtype="float64")["y"]
    x = inputs["x"].astype(np.float64)
    cos, sin = (np.broadcast_to(inputs[name].astype(np.float64), x.shape) for name in ("cos", "sin"))
    pairs = x.reshape(*x.shape[:-1], 32, 2)
    np.testing.assert_allclose(found, complex_pairs(pairs[..., 0], pairs[..., 1], cos, sin), rtol=1e-12, atol=1e-12)


def complex_pairs(real: np.ndarray, imaginary: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """The pairs as complex numbers, multiplied by the numbers of the first half, and by those of the second."""
    pairs, turns = real + 1j * imaginary, cos + 1j * sin
    half = real.shape[-1]
    return np.concatenate([(pairs * turns[..., :half]).real, (pairs * turns[..., half:]).imag], axis=-1)
