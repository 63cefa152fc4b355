"""Attention over caches in parts, against one call of the kernel on all keys: layouts, bands, masks, odd rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from fa_compiler.lowering.ort import eager
from fa_compiler.op_registry.collectives import CYCLIC, MERGE
from fa_compiler.op_registry.geometry import SEQUENCE_AXIS, UNLIMITED
from fa_compiler.parallel.cached import KEYS, ROWS, cache_attention
from fa_compiler.parallel.communicator import Array, Communicator
from fa_compiler.parallel.parts import divided, regrouped
from fa_compiler.parallel.threads import run_threads
from fa_compiler.passes.parallel.methods import AttentionSizes, bytes_held, bytes_sent
from tests.pairs import pairwise

from .running import BANDS, shape_in

BATCH, HEADS, KEY_HEADS, LENGTH, SIZE = 2, 6, 3, 19, 8
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mean": {"cpu_empty_rows": "mean"},
    "nan": {"cpu_empty_rows": "nan"},
    "unmasked": {"cpu_empty_rows": "unmasked"},
    "score of masked keys": {"cpu_mask_value": -2.0},
    "soft cap": {"cpu_softcap": 1.5},
}


def drawn(layout: str, rows: int, length: int = LENGTH, dtype: Any = np.float32) -> dict[str, Array]:
    """query, key and value."""
    rng = np.random.default_rng(rows)
    made = {}
    for name, heads, tokens in (("query", HEADS, rows), ("key", KEY_HEADS, length), ("value", KEY_HEADS, length)):
        made[name] = rng.standard_normal(shape_in(layout, BATCH, heads, tokens, SIZE)).astype(dtype)
    return made


def attrs_of(layout: str, band: str, mode: int, **more: Any) -> dict[str, Any]:
    pre, after = BANDS[band]
    sizes = {"head_num": HEADS, "input_layout": layout, "scale_value": 0.3, "keep_prob": 1.0}
    return {**sizes, "sparse_mode": mode, "pre_tockens": pre, "next_tockens": after, **more}


def by_kernel(attrs: Mapping[str, Any], inputs: Mapping[str, Array]) -> Array:
    """One call on all keys, with the band as a mask of rows and keys."""
    axis = SEQUENCE_AXIS[attrs["input_layout"]]
    rows, keys = inputs["query"].shape[axis], inputs["key"].shape[axis]
    places = np.arange(rows)[:, None] + (keys - rows if attrs["sparse_mode"] == 4 else 0)
    distance = np.arange(keys)[None] - places
    band = (distance < -attrs["pre_tockens"]) | (distance > attrs["next_tockens"])
    every = {**inputs, "atten_mask": inputs.get("atten_mask", np.zeros((1, 1), np.bool_)) | band}
    unlimited = {"sparse_mode": 0, "pre_tockens": UNLIMITED, "next_tockens": UNLIMITED}
    return eager.run("FlashAttentionScore", every, {**attrs, **unlimited}, ["attention_out"])["attention_out"]


def by_ranks(attrs: Mapping[str, Any], inputs: Mapping[str, Array], ranks: int) -> tuple[list[Array], list[int]]:
    """The result of each rank, and the bytes that it sent."""
    axis = SEQUENCE_AXIS[attrs["input_layout"]]
    parts = divided(CYCLIC, ranks, inputs["key"].shape[axis])

    def task(own: Communicator) -> tuple[Array, int]:
        mine = {name: parts.own(each, axis, own.rank) if name in KEYS else each for name, each in inputs.items()}
        return cache_attention(own, parts, attrs, mine), own.sent

    found = run_threads(ranks, task, 60)
    return [out for out, _ in found], [sent for _, sent in found]


def compare(attrs: Mapping[str, Any], inputs: Mapping[str, Array], ranks: int, tolerance: float = 2e-6) -> list[int]:
    expected = by_kernel(attrs, inputs)
    found, sent = by_ranks(attrs, inputs, ranks)
    for each in found:
        np.testing.assert_array_equal(each, found[0])  # all ranks have the same numbers
        np.testing.assert_array_equal(np.isnan(expected), np.isnan(each))
        np.testing.assert_allclose(each, expected, rtol=0, atol=tolerance)
    return sent


@pytest.mark.parametrize(
    "layout, band, mode, mask, extra, ranks, rows",
    pairwise(
        ["BSH", "SBH", "BSND", "BNSD"], [*BANDS], [0, 4], ["none", "keys", "rows"], [*EXTRAS], [1, 2, 3, 5], [1, 4]
    ),
)
def test_every_kind(layout: str, band: str, mode: int, mask: str, extra: str, ranks: int, rows: int) -> None:
    inputs = drawn(layout, rows)
    if mask != "none":
        drawn_mask = np.random.default_rng(1).random((BATCH, 1, 1 if mask == "keys" else rows, LENGTH)) < 0.4
        drawn_mask[0, 0, -1] |= mask == "rows"  # a row without a key
        inputs["atten_mask"] = drawn_mask
    compare(attrs_of(layout, band, mode, **EXTRAS[extra]), inputs, ranks)


@pytest.mark.parametrize("length", [1, 2])
def test_fewer_keys_than_ranks(length: int) -> None:
    compare(attrs_of("BNSD", "causal", 4, cpu_empty_rows="mean"), drawn("BNSD", 1, length), 4)


def test_a_part_that_is_masked() -> None:
    """A rank has no key that a row may attend."""
    mask = np.zeros((BATCH, 1, 1, LENGTH), np.bool_)
    mask[..., 1::3] = True
    compare(attrs_of("BSH", "none", 0, cpu_empty_rows="mean"), {**drawn("BSH", 2), "atten_mask": mask}, 3)


@pytest.mark.parametrize("empty_rows", ["", "mean", "nan"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_scores_of_the_lowest_number(ranks: int, empty_rows: str) -> None:
    """The largest score of a row with keys may be that of a row without a key. Then the keys count, and the ranks whose
    keys the mask excludes do not."""
    bias = np.zeros((1, HEADS, 2, LENGTH), np.float32)
    bias[:, :, 0] = np.finfo(np.float32).min
    mask = np.zeros((BATCH, 1, 1, LENGTH), np.bool_)
    mask[..., 1::3] = True
    attrs = attrs_of("BNSD", "none", 0, pse_type=0, cpu_empty_rows=empty_rows)
    compare(attrs, {**drawn("BNSD", 2), "real_shift": bias, "atten_mask": mask}, ranks)


def test_a_score_of_masked_keys_that_is_the_lowest_number() -> None:
    """A row all of whose keys are masked is their mean, on each rank and on all."""
    mask = np.zeros((BATCH, 1, 2, LENGTH), np.bool_)
    mask[0, :, 0] = True
    attrs = attrs_of("BNSD", "window", 4, cpu_mask_value=float(np.finfo(np.float32).min))
    compare(attrs, {**drawn("BNSD", 2), "atten_mask": mask}, 3)


def test_rows_of_several_calls() -> None:
    """The prompt is longer than the rows of a call. The last calls do not see the first keys."""
    rows = ROWS + 44
    compare(attrs_of("BNSD", "window", 4), drawn("BNSD", rows, rows + 5), 3)
    compare(attrs_of("BNSD", "causal", 4), drawn("BNSD", rows, rows + 5), 3)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_bias(rows: int) -> None:
    bias = np.random.default_rng(3).standard_normal((1, HEADS, rows, LENGTH)).astype(np.float32)
    compare(attrs_of("BNSD", "causal", 4, pse_type=0), {**drawn("BNSD", 3), "real_shift": bias}, 4)
    masked = attrs_of("BNSD", "none", 4, pse_type=0, cpu_mask_value=-2.0, cpu_masked_bias="added")
    compare(masked, {**drawn("BNSD", 3), "real_shift": bias}, 4)


def test_rope_parts() -> None:
    rng = np.random.default_rng(4)
    rope = {
        "query_rope": rng.standard_normal((BATCH, HEADS, 2, 4)).astype(np.float32),
        "key_rope": rng.standard_normal((BATCH, KEY_HEADS, LENGTH, 4)).astype(np.float32),
    }
    compare(attrs_of("BNSD", "causal", 4), {**drawn("BNSD", 2), **rope}, 3)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_sink(ranks: int) -> None:
    """The sink is one more result, of zeros. A row that the band leaves without a key has nothing else."""
    inputs = {**drawn("BNSD", 4, 3), "sink": np.linspace(-1, 1, HEADS, dtype=np.float32)}
    compare(attrs_of("BNSD", "window", 4), inputs, ranks)


def test_large_scores() -> None:
    """The logarithms are of differences: scores of some thousands keep their digits."""
    inputs = drawn("BNSD", 1)
    inputs["query"] *= 3000
    compare(attrs_of("BNSD", "none", 0), inputs, 4, 2e-5)


def test_more_ranks_than_one_update_takes() -> None:
    compare(attrs_of("BNSD", "none", 0), drawn("BNSD", 1, 40), 18)


def test_a_mask_of_another_length() -> None:
    inputs = {**drawn("BNSD", 1), "atten_mask": np.zeros((1, 1, 1, LENGTH + 2), np.bool_)}
    with pytest.raises(eager.KernelError, match="atten_mask has 21 columns, and there are 19 keys"):
        by_ranks(attrs_of("BNSD", "none", 0), inputs, 2)


def test_float16() -> None:
    compare(attrs_of("BSH", "none", 0), drawn("BSH", 1, dtype=np.float16), 3, tolerance=4e-3)


@pytest.mark.parametrize("rows", ["", "zero", "infinite"])
@pytest.mark.parametrize("name, number", [("key", np.nan), ("key", np.inf), ("value", np.nan), ("value", np.inf)])
def test_what_is_not_finite(name: str, number: float, rows: str) -> None:
    inputs = drawn("BNSD", 2)
    inputs[name][0, 1, 4, 2] = number
    compare(attrs_of("BNSD", "causal", 4, cpu_nan_rows=rows), inputs, 3)


@pytest.mark.parametrize("rows", [1, 3])
def test_bytes_and_memory(rows: int) -> None:
    """A rank sends as many bytes as the cost model says, and has its share of the keys and values."""
    ranks, length = 3, 18
    inputs = drawn("BNSD", rows, length)
    sizes = AttentionSizes("", HEADS, KEY_HEADS, 2 * SIZE, 4, True, {}, SIZE, rows)
    assert compare(attrs_of("BNSD", "causal", 4), inputs, ranks) == [bytes_sent(MERGE, sizes, ranks, length, BATCH)] * 3
    own = [divided(CYCLIC, ranks, length).own(inputs[name], 2, 0) for name in ("key", "value")]
    assert sum(each.nbytes for each in own) == bytes_held(sizes, ranks, length, BATCH)


def test_tokens_in_another_order() -> None:
    """Each token goes to the rank whose turn it is, whoever had it."""
    whole = np.arange(2 * 11 * 3).reshape(2, 11, 3)
    places = np.random.default_rng(0).permutation(11)
    own = [places[:2], places[2:2], places[2:]]

    def task(communicator: Communicator) -> Array:
        positions = own[communicator.rank]
        (part,), length = regrouped(communicator, [(whole[:, positions], 1)], positions)
        assert length == 11
        return part

    for rank, part in enumerate(run_threads(3, task, 20)):
        np.testing.assert_array_equal(part, whole[:, rank::3])
