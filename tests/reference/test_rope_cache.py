"""KvRmsNormRopeCache and QkvRmsNormRopeCache beside what their documents say, written out token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fa_compiler import reference
from tests.corrupted import BASES

OP = "KvRmsNormRopeCache"


def one(mode: str = "Norm", **changes: Any) -> dict[str, np.ndarray]:
    """A call of one token: its latent is (3, 4), and its key (1, 2, 5, 6) is turned by a quarter."""
    inputs = {
        "kv": np.array([[[[3.0, 4.0, 1.0, 2.0, 5.0, 6.0]]]]),
        "gamma": np.array([1.0, 2.0]),
        "cos": np.full((1, 1, 1, 4), 0.0),
        "sin": np.full((1, 1, 1, 4), 1.0),
        "index": np.array([[1]] if mode == "Norm" else [1]),
        "k_cache": np.full((1, 1, 2, 4) if mode == "Norm" else (2, 16, 1, 4), 9.0),
        "ckv_cache": np.full((1, 1, 2, 2) if mode == "Norm" else (2, 16, 1, 2), 9.0),
    }
    given = inputs | changes
    return {name: array.astype(np.float16) if array.dtype == np.float64 else array for name, array in given.items()}


def test_a_latent_is_normalised_and_a_key_is_turned() -> None:
    found = reference.run(OP, one(), {"epsilon": 0.0, "is_output_kv": True}, dtype="float64")
    root = np.sqrt(12.5)
    assert np.allclose(found["c_kv"].ravel(), [3 / root, 8 / root])
    assert np.allclose(found["k_rope"].ravel(), [-2, -6, 1, 5])
    assert np.allclose(found["k_cache"][0, 0], [[9] * 4, [-2, -6, 1, 5]])
    assert np.allclose(found["ckv_cache"][0, 0, 1], [3 / root, 8 / root])


def test_with_v_the_key_is_normalised_first() -> None:
    inputs = one(
        kv=np.array([[[[3.0, 4.0, 12.0]]]]),
        gamma=np.array([1.0, 1.0, 2.0]),
        cos=np.zeros((1, 1, 1, 2)),
        sin=np.ones((1, 1, 1, 2)),
        v=np.array([[[[7.0, 8.0]]]]),
        k_cache=np.zeros((1, 1, 2, 3)),
    )
    found = reference.run(OP, inputs, {"epsilon": 0.0, "is_output_kv": True}, dtype="float64")
    root = np.sqrt(169 / 3)
    assert np.allclose(found["k_cache"][0, 0, 1], [-4 / root, 3 / root, 24 / root])
    assert found["ckv_cache"][0, 0, 1].tolist() == [7, 8]
    assert not found["k_rope"].any()  # the mode Norm without scales does not give it


def test_nothing_is_written_at_minus_one() -> None:
    found = reference.run(OP, one(index=np.array([[-1]])), {}, dtype="float64")
    assert (found["k_cache"] == 9).all()
    assert (found["ckv_cache"] == 9).all()
    assert not found["c_kv"].any()


@pytest.mark.parametrize(("mode", "place"), [("PA", 17), ("PA_BNSD", 1)])
def test_a_place_among_all_pages(mode: str, place: int) -> None:
    found = reference.run(OP, one(mode, index=np.array([place])), {"cache_mode": mode}, dtype="float64")
    rows = found["k_cache"].reshape(32, 4)
    assert [n for n in range(32) if (rows[n] != 9).all()] == [place]


def test_numbers_of_8_bits_are_rounded_to_even_and_saturated() -> None:
    inputs = one(k_cache=np.zeros((1, 1, 2, 4), np.int8)) | {
        "k_rope_scale": np.array([0.25, 0.25, 2.5, 100.0], np.float32),
        "k_rope_offset": np.array([0.0, 1.0, 0.0, 0.0], np.float32),
    }
    found = reference.run(OP, inputs, {})
    assert found["k_cache"].dtype == np.int8
    assert found["k_cache"][0, 0, 1].tolist() == [0, 0, 2, 127]


@pytest.mark.parametrize("seed", range(12))
def test_all_modes_write_the_same_rows(seed: int) -> None:
    """A token's row is found where index and the mode say, in the memory of NZ as well."""
    inputs, attrs = BASES[OP][0](np.random.default_rng(seed))
    found, mode = reference.run(OP, inputs, attrs), attrs["cache_mode"]
    plain = {name: array for name, array in inputs.items() if not name.endswith(("_scale", "_offset"))}
    wide = inputs["kv"].dtype
    batch, heads, tokens, _ = inputs["kv"].shape
    for name in ("k_cache", "ckv_cache"):
        plain[name] = np.zeros((batch, heads, 8, inputs[name].shape[-1]), wide)
    plain["index"] = np.tile(np.arange(tokens), (batch, 1))
    rows = reference.run(OP, plain, {}, dtype="float64")["k_cache"][:, :, :tokens]
    if "k_rope_scale" in inputs:
        rows = np.clip(np.rint(rows * inputs["k_rope_scale"][:, None]), -128, 127)
    cache = found["k_cache"].astype(np.float64)
    if mode.endswith("NZ"):
        part = 32 if found["k_cache"].dtype == np.int8 else 16
        cache = cache.reshape(3, heads, -1, 32, part).transpose(0, 3, 1, 2, 4).reshape(3, 32, heads, -1)
    places = inputs["index"].reshape(batch, -1)
    for entry in range(batch):
        for token in range(tokens):
            if mode == "Norm":
                got = cache[entry, :, places[entry, token]]
            elif "BLK" in mode:
                got = cache[places[entry, 0] // 32, token]
            else:
                got = cache[places[entry, token] // 32, places[entry, token] % 32]
            assert np.allclose(got, rows[entry, :, token], atol=1 if "k_rope_scale" in inputs else 0.05)


@pytest.mark.parametrize("seed", range(8))
def test_joined_heads(seed: int) -> None:
    """Query, key and value of each token, head by head, and the places of the caches."""
    name = "QkvRmsNormRopeCache"
    inputs, attrs = BASES[name][0](np.random.default_rng(seed))
    found = reference.run(name, inputs, attrs | {"epsilon": 1e-6})
    wide = {key: array.astype(np.float64) for key, array in inputs.items()}
    counts = attrs["head_nums"]
    for row, place in enumerate(inputs["index"]):
        heads = wide["qkv"][row].reshape(-1, 128)
        for head, numbers in enumerate(heads[: counts[0] + counts[1]]):
            gamma = wide["q_gamma" if head < counts[0] else "k_gamma"]
            y = numbers / np.sqrt(np.mean(numbers**2) + 1e-6) * gamma
            turned = y * wide["cos"][row] + np.concatenate([-y[64:], y[:64]]) * wide["sin"][row]
            if head < counts[0]:
                got = found["q_out"][row].astype(np.float64).reshape(-1, 128)[head]
                np.testing.assert_allclose(got, turned, atol=0.1)
                continue
            check(found, inputs, "k", place, turned)
        check(found, inputs, "v", place, heads[-1])


def check(found: Any, inputs: dict[str, np.ndarray], name: str, place: int, numbers: np.ndarray) -> None:
    """The numbers of the only head of key or value stand in their cache."""
    cache = found[f"{name}_cache"]
    if f"{name}_scale" in inputs:
        moved = numbers / inputs[f"{name}_scale"][0] + inputs.get(f"{name}_offset", np.zeros((1, 128)))[0]
        numbers = np.clip(np.rint(moved), -128, 127)
    got = cache[place // 32, :, place % 32].astype(np.float64).ravel()
    np.testing.assert_allclose(got, numbers, atol=1.01 if cache.dtype == np.int8 else 0.1)


def test_places_that_no_token_has_stay() -> None:
    inputs, attrs = BASES["QkvRmsNormRopeCache"][0](np.random.default_rng(1))
    inputs["index"] = np.full_like(inputs["index"], -1)
    found = reference.run("QkvRmsNormRopeCache", inputs, attrs)
    for name in ("k_cache", "v_cache"):
        np.testing.assert_array_equal(found[name].astype(np.float64), inputs[name].astype(np.float64))
    assert not found["k_out_before_quant"].any()
