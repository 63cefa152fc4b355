"""The three methods against one call of the kernel on the whole sequence: layouts, bands, masks, rules for odd rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from fa_compiler.lowering.ort import eager
from fa_compiler.op_registry.collectives import CONTIGUOUS, METHODS, ORDERS, ZIGZAG
from fa_compiler.op_registry.geometry import SEQUENCE_AXIS
from fa_compiler.parallel.communicator import Array, Communicator
from fa_compiler.parallel.methods import sequence_attention
from fa_compiler.parallel.parts import Parts
from fa_compiler.parallel.threads import run_threads
from fa_compiler.passes.parallel.methods import AttentionSizes, bytes_sent, refused_methods
from tests.pairs import pairwise

from .running import BANDS, shape_in

BATCH, HEADS, KEY_HEADS, LENGTH, SIZE, VALUE = 2, 6, 3, 17, 8, 8
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mean": {"cpu_empty_rows": "mean"},
    "nan": {"cpu_empty_rows": "nan"},
    "score of masked keys": {"cpu_mask_value": -2.0},
    "soft cap": {"cpu_softcap": 1.5},
}


def drawn(layout: str, dtype: Any = np.float32, seed: int = 0) -> dict[str, Array]:
    """query, key and value."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, heads, size in (("query", HEADS, SIZE), ("key", KEY_HEADS, SIZE), ("value", KEY_HEADS, VALUE)):
        made[name] = rng.standard_normal(shape_in(layout, BATCH, heads, LENGTH, size)).astype(dtype)
    return made


def mask_of(kind: str, seed: int = 1) -> dict[str, Array]:
    """An atten_mask, True where a key is excluded: none, of the keys, or of rows and keys; one row of the last excludes
    all keys."""
    rng = np.random.default_rng(seed)
    if kind == "none":
        return {}
    mask = rng.random((BATCH, 1, 1 if kind == "keys" else LENGTH, LENGTH)) < 0.4
    mask[0, 0, -1] |= kind == "rows"
    return {"atten_mask": mask}


def by_kernel(attrs: Mapping[str, Any], inputs: Mapping[str, Array]) -> Array:
    """One call on the whole sequence; its band applies without a mask, too."""
    every = {"atten_mask": np.zeros((1, 1), np.bool_), **inputs}
    return eager.run("FlashAttentionScore", every, attrs, ["attention_out"])["attention_out"]


def by_ranks(attrs: Mapping[str, Any], inputs: Mapping[str, Array], ranks: int, order: str) -> tuple[Array, list[int]]:
    """The same by ranks, and the bytes that each rank sent."""
    axis = SEQUENCE_AXIS[attrs["input_layout"]]
    parts = Parts(order, ranks, LENGTH)

    def own(name: str, array: Array, rank: int) -> Array:
        if name in ("query", "key", "value", "query_rope", "key_rope"):
            return parts.own(array, axis, rank)
        rows = attrs["method"] != "all-to-all" and array.ndim > 1 and array.shape[-2] != 1
        return parts.own(array, array.ndim - 2, rank) if rows else array

    def task(communicator: Communicator) -> tuple[Array, int]:
        mine = {name: own(name, array, communicator.rank) for name, array in inputs.items()}
        return sequence_attention(communicator, parts, attrs, mine)[0], communicator.sent

    results = run_threads(ranks, task, 60)
    return parts.joined([out for out, _ in results], axis), [sent for _, sent in results]


def attrs_of(layout: str, band: str, **more: Any) -> dict[str, Any]:
    pre, after = BANDS[band]
    return {
        "head_num": HEADS,
        "input_layout": layout,
        "scale_value": 0.3,
        "keep_prob": 1.0,
        "sparse_mode": 0,
        "pre_tockens": pre,
        "next_tockens": after,
        **more,
    }


def compare(attrs: dict[str, Any], inputs: dict[str, Array], ranks: int, order: str, tolerance: float = 2e-6) -> None:
    expected = by_kernel(attrs, inputs)
    for method in METHODS:
        if method in refused_methods(HEADS, KEY_HEADS, ranks, False, ""):
            continue
        found, _ = by_ranks({**attrs, "method": method}, inputs, ranks, order)
        np.testing.assert_array_equal(np.isnan(expected), np.isnan(found), err_msg=method)
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance, err_msg=method)


@pytest.mark.parametrize(
    "layout, band, mask, extra, ranks, order",
    pairwise(["BSH", "SBH", "BSND", "BNSD"], [*BANDS], ["none", "keys", "rows"], [*EXTRAS], [2, 3, 5, 6], ORDERS),
)
def test_every_kind(layout: str, band: str, mask: str, extra: str, ranks: int, order: str) -> None:
    compare(attrs_of(layout, band, **EXTRAS[extra]), {**drawn(layout), **mask_of(mask)}, ranks, order)


@pytest.mark.parametrize("extra", ["mean", "nan"])
def test_keys_that_serve_several_batch_entries(extra: str) -> None:
    """A row without a key gets the mean of the values that all entries share."""
    given = drawn("BNSD")
    inputs = {"query": given["query"], "key": given["key"][:1], "value": given["value"][:1], **mask_of("rows")}
    compare(attrs_of("BNSD", "none", **EXTRAS[extra]), inputs, 3, ZIGZAG)


@pytest.mark.parametrize("rows", [1, LENGTH])
def test_a_bias(rows: int) -> None:
    bias = np.random.default_rng(3).standard_normal((1, HEADS, rows, LENGTH)).astype(np.float32)
    compare(attrs_of("BNSD", "causal", pse_type=0), {**drawn("BNSD"), "real_shift": bias}, 3, ZIGZAG)


def test_a_bias_of_masked_keys() -> None:
    """Some chunks see all their keys, and have no mask of their own."""
    bias = np.random.default_rng(3).standard_normal((1, HEADS, 1, LENGTH)).astype(np.float32)
    attrs = attrs_of("BNSD", "causal", pse_type=0, cpu_mask_value=-2.0, cpu_masked_bias="added")
    compare(attrs, {**drawn("BNSD"), "real_shift": bias}, 3, ZIGZAG)


def test_rope_parts() -> None:
    rng = np.random.default_rng(4)
    rope = {
        "query_rope": rng.standard_normal((BATCH, HEADS, LENGTH, 4)).astype(np.float32),
        "key_rope": rng.standard_normal((BATCH, KEY_HEADS, LENGTH, 4)).astype(np.float32),
    }
    compare(attrs_of("BNSD", "causal"), {**drawn("BNSD"), **rope}, 3, ZIGZAG)


@pytest.mark.parametrize("method", ["gather", "all-to-all"])
def test_a_sink(method: str) -> None:
    inputs = {**drawn("BNSD"), "sink": np.linspace(-1, 1, HEADS, dtype=np.float32)}
    attrs = attrs_of("BNSD", "window")
    found, _ = by_ranks({**attrs, "method": method}, inputs, 3, ZIGZAG)
    np.testing.assert_allclose(found, by_kernel(attrs, inputs), rtol=0, atol=2e-6)


def test_float16() -> None:
    compare(attrs_of("BSH", "causal"), drawn("BSH", np.float16), 3, ZIGZAG, tolerance=4e-3)


@pytest.mark.parametrize("rows", ["", "zero", "infinite"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_undefined_softmaxes(number: float, rows: str) -> None:
    """A score that is NaN or infinite in one part makes its row undefined in every part."""
    inputs = drawn("BNSD")
    inputs["key"][0, 1, 4, 2] = number
    compare(attrs_of("BNSD", "causal", cpu_nan_rows=rows), inputs, 3, ZIGZAG)


def test_a_part_whose_bias_is_minus_infinity() -> None:
    """Such a part has no softmax of its own, and the row has one."""
    bias = np.zeros((1, 1, 1, LENGTH), np.float32)
    bias[..., :7] = -np.inf
    compare(attrs_of("BNSD", "none", pse_type=0), {**drawn("BNSD"), "real_shift": bias}, 3, CONTIGUOUS)


@pytest.mark.parametrize("empty_rows", ["", "mean", "nan"])
@pytest.mark.parametrize("order", ORDERS)
def test_scores_of_the_lowest_number(order: str, empty_rows: str) -> None:
    """The largest score of a row with keys may be that of a row without a key. Then the keys count, beside parts whose
    keys the mask excludes."""
    bias = np.zeros((1, HEADS, LENGTH, LENGTH), np.float32)
    bias[:, :, 4] = bias[:, :, 11:] = np.finfo(np.float32).min
    mask = np.zeros((BATCH, 1, LENGTH, LENGTH), np.bool_)
    mask[:, :, 4, 1:3] = mask[:, :, 11:, :7] = mask[1, :, 12] = mask[:, :, 9] = True
    inputs = {**drawn("BNSD"), "real_shift": bias, "atten_mask": mask}
    compare(attrs_of("BNSD", "causal", pse_type=0, cpu_empty_rows=empty_rows), inputs, 3, order)


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("mask_value", [None, -2.0, float(np.finfo(np.float32).min)])
def test_values_that_are_not_finite(mask_value: float | None, number: float) -> None:
    """A masked key counts in a part of masked keys alone. Beside larger scores of another part its value is not
    read."""
    inputs = {**drawn("BNSD"), **mask_of("rows")}
    inputs["value"][1, 0, 12, 3] = number
    more = {} if mask_value is None else {"cpu_mask_value": mask_value}
    compare(attrs_of("BNSD", "causal", **more), inputs, 3, CONTIGUOUS)


@pytest.mark.parametrize("method", METHODS)
def test_bytes(method: str) -> None:
    """A rank sends as many bytes as the cost model says, where the ranks divide tokens and heads; a ring agrees at its
    end on whether it is defined, which takes 9 bytes to every other rank."""
    ranks = 3
    inputs = {name: array[:, :, :15] for name, array in drawn("BNSD").items()}
    sizes = AttentionSizes("", HEADS, KEY_HEADS, SIZE + VALUE, 4, False, {})
    expected = bytes_sent(method, sizes, ranks, 15, BATCH) + (ranks - 1) * (9 if method == "ring" else 0)
    parts = Parts(CONTIGUOUS, ranks, 15)

    def task(communicator: Communicator) -> int:
        mine = {name: parts.own(array, 2, communicator.rank) for name, array in inputs.items()}
        sequence_attention(communicator, parts, {**attrs_of("BNSD", "none"), "method": method}, mine)
        return communicator.sent

    assert run_threads(ranks, task, 60) == [expected] * ranks
