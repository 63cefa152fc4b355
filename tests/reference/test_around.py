"""The operators around attention, worked out by hand, and where they round."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from fa_compiler import reference
from fa_compiler.lowering.ort.eager import KernelError
from fa_compiler.lowering.ort.eager import run as run_kernel


def test_rows_are_divided_by_their_root_mean_square() -> None:
    x = np.array([[3.0, 4.0], [0.0, 0.0]])
    found = reference.run("RmsNorm", {"x": x, "gamma": [2.0, 1.0]}, {"epsilon": 0.25}, dtype="float64")
    assert np.allclose(found["rstd"], [[1 / np.sqrt(12.75)], [2.0]])
    assert np.allclose(found["y"], [[6 / np.sqrt(12.75), 4 / np.sqrt(12.75)], [0, 0]])


def test_all_axes_of_gamma_are_normalised() -> None:
    rng = np.random.default_rng(3)
    x, gamma = rng.standard_normal((2, 3, 4)), rng.standard_normal((3, 4))
    found = reference.run("RmsNorm", {"x": x, "gamma": gamma}, {"epsilon": 0.0}, dtype="float64")
    assert found["rstd"].shape == (2, 1, 1)
    assert np.allclose((found["y"] / gamma * (found["y"] / gamma)).mean(axis=(1, 2)), 1)


def test_a_row_that_overflows_is_zero_and_a_row_without_a_size_is_nan() -> None:
    """As in plain operators: the root is infinite, or 0."""
    inputs = {"x": np.array([[1e300, 1.0], [0.0, 0.0]]), "gamma": np.ones(2)}
    found = reference.run("RmsNorm", inputs, {"epsilon": 0.0}, dtype="float64")["y"]
    assert (found[0] == 0).all()
    assert np.isnan(found[1]).all()


def test_the_sum_is_rounded_before_it_is_normalised() -> None:
    half = ml_dtypes.bfloat16
    inputs = {
        "x1": np.array([[256.0, 1.0]], half),
        "x2": np.array([[1.0, 0.0]], half),
        "gamma": np.array([1.0, 1.0], half),
    }
    found = reference.run("AddRmsNorm", inputs, {"epsilon": 0.0})
    assert found["x"].astype(np.float64).tolist() == [[256.0, 1.0]]  # 257 is no number of bfloat16
    assert found["y"].dtype == half
    exact = reference.run("AddRmsNorm", inputs, {"epsilon": 0.0}, dtype="float64")
    assert exact["x"].tolist() == [[257.0, 1.0]]


@pytest.mark.parametrize("count", [1, 2])
def test_layer_norm_subtracts_the_mean(count: int) -> None:
    x = np.random.default_rng(4).standard_normal((2, 3, 4)) + 5
    inputs = {"x": x, "normalized_shape": np.array(x.shape[-count:], np.int32)}
    plain = reference.run("LayerNormV4", inputs, {"epsilon": 0.0}, dtype="float64")
    axes = tuple(range(3 - count, 3))
    assert plain["mean"].shape == (2, 3, 1) if count == 1 else (2, 1, 1)
    assert np.allclose(plain["y"].mean(axis=axes), 0)
    assert np.allclose(plain["y"].var(axis=axes), 1)
    weights = {"gamma": np.full(x.shape[-count:], 2.0), "beta": np.full(x.shape[-count:], 3.0)}
    scaled = reference.run("LayerNormV4", inputs | weights, {"epsilon": 0.0}, dtype="float64")["y"]
    assert np.allclose(scaled, 2 * plain["y"] + 3)


def test_the_sum_is_not_rounded_before_layer_norm() -> None:
    half = ml_dtypes.bfloat16
    one, other = np.array([[256.0, 254.0]], half), np.array([[1.0, 0.0]], half)
    weights = {"gamma": np.ones(2, half), "beta": np.zeros(2, half)}
    found = reference.run("AddLayerNorm", {"x1": one, "x2": other, **weights}, {"epsilon": 1.0})
    assert found["x"].astype(np.float64).tolist() == [[256.0, 254.0]]  # 257 is no number of bfloat16
    assert found["mean"].tolist() == [[255.5]]
    assert found["rstd"][0, 0] == np.float32(1 / np.sqrt(1.5**2 + 1))
    shifted = reference.run("AddLayerNorm", {"x1": one, "x2": other, **weights, "bias": np.full(2, 4, half)}, {})
    assert shifted["mean"].tolist() == [[259.5]]


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_the_first_half_is_the_gate(dim: int) -> None:
    gate, up = np.array([[1.0, -2.0]]), np.array([[3.0, 5.0]])
    found = reference.run("SwiGlu", {"x": np.concatenate([gate, up], axis=dim)}, {"dim": dim}, dtype="float64")["y"]
    assert np.allclose(found, gate / (1 + np.exp(-gate)) * up)


def test_infinite_gates_are_as_in_plain_operators() -> None:
    x = np.array([[-np.inf, np.inf, -1e4, np.nan, 1.0, 1.0, 2.0, 1.0]])
    found = reference.run("SwiGlu", {"x": x}, {}, dtype="float64")["y"][0]
    assert np.isnan(found[[0, 3]]).all()
    assert found[1] == np.inf
    assert found[2] == 0


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(("approximate", "expected"), [(0, 0.8413447460685429), (1, 0.8411919906082768)])
def test_gelu_of_either_half(left: bool, approximate: int, expected: float) -> None:
    x = np.array([[1.0, -3.0]] if left else [[-3.0, 1.0]])
    attrs = {"approximate": approximate, "activate_left": left}
    found = reference.run("GeGluV2", {"x": x}, attrs, dtype="float64")
    assert np.allclose(found["gelu"], expected, atol=1e-15)
    assert np.allclose(found["y"], -3 * expected, atol=1e-15)


@pytest.mark.parametrize(("approximate", "expected"), [("none", 0.8413447460685429), ("tanh", 0.8411919906082768)])
def test_gelu_alone(approximate: str, expected: float) -> None:
    found = reference.run("GeluV2", {"x": np.array([1.0, 0.0])}, {"approximate": approximate}, dtype="float64")["y"]
    assert np.allclose(found, [expected, 0], atol=1e-15)


def test_gelu_is_rounded_before_it_is_multiplied() -> None:
    x = np.array([[1.0, 512.0]], ml_dtypes.bfloat16)
    found = reference.run("GeGluV2", {"x": x}, {"activate_left": True})
    assert found["gelu"].astype(np.float64) == 0.83984375  # of 0.8412
    assert found["y"].astype(np.float64) == 430
    exact = reference.run("GeGluV2", {"x": x}, {"activate_left": True}, dtype="float64")
    assert round(exact["y"][0, 0]) == 431


@pytest.mark.parametrize("interleaved", [True, False])
def test_swish_between_limits(interleaved: bool) -> None:
    gate, up = np.array([8.0, -9.0, 1.0]), np.array([0.5, 9.0, -9.0])
    x = np.stack([gate, up], axis=1).reshape(1, 6) if interleaved else np.concatenate([gate, up])[None]
    found = reference.run("ClippedSwiglu", {"x": x}, {"interleaved": interleaved}, dtype="float64")["y"]
    bounded = np.array([7.0, -9.0, 1.0])
    assert np.allclose(found, bounded / (1 + np.exp(-np.float32(1.702) * bounded)) * np.array([1.5, 8.0, -6.0]))
    one = reference.run("ClippedSwiglu", {"x": np.stack([x, x]), "group_index": np.array([0, 1])}, {}, dtype="float64")
    assert (one["y"][1] == 0).all()
    assert one["y"][0].any()


ROTATED = {0: [-3, -4, 1, 2], 1: [-2, 1, -4, 3], 2: [-2, 1, -4, 3], 3: [-2, -4, 1, 3]}


@pytest.mark.parametrize("mode", ROTATED)
def test_pairs_are_rotated(mode: int) -> None:
    x = np.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    zero, one = np.zeros_like(x), np.ones_like(x)
    inputs = {"x": x, "cos": zero, "sin": one}
    found = reference.run("RotaryPositionEmbedding", inputs, {"mode": mode}, dtype="float64")["y"]
    assert found.ravel().tolist() == ROTATED[mode]
    kept = reference.run("RotaryPositionEmbedding", inputs | {"cos": one, "sin": zero}, {"mode": mode})["y"]
    assert kept.ravel().tolist() == ([1, 3, 2, 4] if mode == 3 else [1, 2, 3, 4])
    matrix = inputs | {"rotate": np.eye(4)[::-1].copy()}
    assert reference.run("RotaryPositionEmbedding", matrix, {})["y"].ravel().tolist() == [4, 3, 2, 1]


@pytest.mark.parametrize(("name", "mode"), [("half", 0), ("interleave", 1), ("quarter", 2)])
def test_query_and_key_are_rotated(name: str, mode: int) -> None:
    x = np.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    inputs = {"query": x, "key": np.concatenate([x, x], axis=2), "cos": np.zeros_like(x), "sin": np.ones_like(x)}
    found = reference.run("ApplyRotaryPosEmb", inputs, {"rotary_mode": name}, dtype="float64")
    assert found["query"].ravel().tolist() == ROTATED[mode]
    assert found["key"].ravel().tolist() == 2 * ROTATED[mode]


def test_there_is_no_kernel_in_the_library() -> None:
    with pytest.raises(KernelError, match=r"the library has no kernel of it; fa_compiler.reference.run computes it"):
        run_kernel("SwiGlu", {"x": np.ones((2, 4), np.float32)}, {})
