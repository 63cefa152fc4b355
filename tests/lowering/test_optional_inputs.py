"""Sink, slopes, rope parts and dropout, alone and beside masks and bands, on every kernel variant."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fa_compiler import ops

from .problems import DTYPES, OP, OUTPUTS, TRIANGLE, Form, check, mask
from .variants import thinned

pytestmark = pytest.mark.usefixtures("isa")

LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(27)


def form_of(layout: str, dtype: str = "float32", square: bool = False, **attrs: Any) -> Form:
    """Few and many query rows for each of two key heads, or packed sequences of both kinds."""
    if layout == "TND":
        keys = (3, 0, 37) if square else (9, 2, 50)
        return Form(layout, dtype, heads=4, kv_heads=2, queries=(3, 0, 37), keys=keys, attrs=attrs)
    return Form(layout, dtype, heads=4, kv_heads=2, queries=37, keys=37 if square else 50, attrs=attrs)


# --- sink


@thinned(layout=LAYOUTS, dtype=DTYPES)
def test_sink(layout: str, dtype: str, rng: np.random.Generator) -> None:
    form = form_of(layout, dtype)
    check(form.inputs(rng) | {"sink": np.array([-3, 0, 2, 9], np.float32)}, form.all_attrs)


@thinned(queries=[2, 40], mode=[0, 2, 3, 4])
def test_sink_and_rows_without_keys(mode: int, queries: int, rng: np.random.Generator) -> None:
    """Such a row is 0, its largest score the sink and its sum 1."""
    attrs = {"sparse_mode": mode, "pre_tockens": 30, "next_tockens": 0}
    form = Form(batch=2, heads=4, kv_heads=2, queries=queries, keys=queries, attrs=attrs)
    array = np.zeros((2, 1, 1, queries), np.bool_)
    array[0, ..., : queries // 2] = True
    if mode == 0:
        array = array | (np.triu(np.ones((queries, queries), np.bool_), 1))
    sink = np.array([-3, 0, 2, 9], np.float32)
    got = check(form.inputs(rng) | {"sink": sink, "atten_mask": array}, form.all_attrs)
    rows = slice(0, queries // 2)
    assert not got["attention_out"][0, :, rows].any()
    assert (got["softmax_max"][0, :, rows] == sink[:, None, None]).all()
    assert (got["softmax_sum"][0, :, rows] == 1).all()


@thinned(queries=[2, 40], low=[-1e30, -np.inf])
def test_sink_beside_an_additive_mask(low: float, queries: int, rng: np.random.Generator) -> None:
    """As gpt-oss has it: masked scores are very low, the sink takes their whole weight."""
    form = Form(batch=1, heads=4, kv_heads=4, queries=queries, keys=600, attrs={"pse_type": 0})
    bias = np.where(mask(rng, (1, 1, queries, 600)), np.float32(low), np.float32(0))
    bias[..., 0, :] = low
    got = check(form.inputs(rng) | {"sink": rng.standard_normal(4, np.float32), "real_shift": bias}, form.all_attrs)
    assert not got["attention_out"][:, :, 0].any()


@thinned(
    value=[-np.inf, np.inf, np.nan, -3e38, 3e38, 100.0],
    rule=["", "zero", "infinite"],
    queries=[2, 30],
    masked=[None, -1e4],
)
def test_unusual_sinks(value: float, rule: str, queries: int, masked: float | None, rng: np.random.Generator) -> None:
    given = {} if masked is None else {"cpu_mask_value": masked}
    form = Form(batch=1, queries=queries, keys=700, attrs={"cpu_nan_rows": rule, "pse_type": 0, **given})
    array = mask(rng, (queries, 700))
    array[1] = True
    bias = np.zeros((1, 1, 1, 700), np.float32)
    inputs = form.inputs(rng) | {"sink": np.array([value, 0], np.float32), "atten_mask": array, "real_shift": bias}
    check(inputs, form.all_attrs)
    inputs["real_shift"] = np.full_like(bias, -np.inf)
    check(inputs, form.all_attrs)


# --- slopes


@thinned(layout=LAYOUTS, dtype=list(DTYPES), pse_type=[2, 3], by_batch=[True, False])
def test_slopes(layout: str, dtype: str, pse_type: int, by_batch: bool, rng: np.random.Generator) -> None:
    form = form_of(layout, dtype, square=True, pse_type=pse_type)
    batches = 3 if layout == "TND" else 2
    slopes = rng.random((batches, 4) if by_batch else (4,), np.float32)
    check(form.inputs(rng) | {"real_shift": slopes}, form.all_attrs)


@pytest.mark.parametrize(("query", "key"), [(0, 5), (70000, 3), (2**40, 2**40 + 2**31 - 1), (None, -40), (12, None)])
@pytest.mark.parametrize("pse_type", [2, 3])
def test_starts(query: int | None, key: int | None, pse_type: int, rng: np.random.Generator) -> None:
    """Only the first element counts. The slopes are so small that far distances do not swallow the scores."""
    far = abs((key or 0) - (query or 0))
    form = form_of("BNSD", square=True, pse_type=pse_type)
    inputs = form.inputs(rng) | {"real_shift": rng.random(4, np.float32) / max(1, far / 4)}
    for name, value in (("q_start_idx", query), ("kv_start_idx", key)):
        if value is not None:
            inputs[name] = np.array([value, 99], np.int64)
    check(inputs, form.all_attrs)


def test_slopes_with_a_band_and_long_sequences(rng: np.random.Generator) -> None:
    form = Form(
        batch=1,
        queries=1100,
        keys=1100,
        size=8,
        attrs={"pse_type": 2, "sparse_mode": 4, "pre_tockens": 300, "next_tockens": 100},
    )
    check(form.inputs(rng) | {"real_shift": np.array([0.5, 0.01], np.float32), "atten_mask": TRIANGLE}, form.all_attrs)


def test_starts_in_mode_8_are_those_of_the_first_sequence(rng: np.random.Generator) -> None:
    attrs = {"pse_type": 2, "sparse_mode": 8, "pre_tockens": 100, "next_tockens": 20}
    form = Form("TND", queries=(9, 17, 30), keys=(12, 17, 30), attrs=attrs)
    starts = {"q_start_idx": np.array([3]), "kv_start_idx": np.array([0])}
    check(
        form.inputs(rng) | starts | {"real_shift": np.array([0.3, 0.2], np.float32), "atten_mask": TRIANGLE},
        form.all_attrs,
    )


# --- rope


@thinned(layout=LAYOUTS, dtype=DTYPES)
def test_rope(layout: str, dtype: str, rng: np.random.Generator) -> None:
    form = form_of(layout, dtype)
    rope = Form(**{**vars(form), "size": 11}).inputs(rng)
    check(form.inputs(rng) | {"query_rope": rope["query"], "key_rope": rope["key"]}, form.all_attrs)


@pytest.mark.parametrize(("size", "rope"), [(1, 1), (512, 64), (128, 64), (768, 130), (3, 768), (16, 0)])
@pytest.mark.parametrize("queries", [1, 13])
def test_rope_sizes(size: int, rope: int, queries: int, rng: np.random.Generator) -> None:
    form = Form(batch=1, heads=2, kv_heads=1, queries=queries, keys=40, size=size, value_size=min(size, 512))
    inputs = form.inputs(rng)
    inputs["query_rope"] = rng.standard_normal((1, 2, queries, rope), np.float32) / np.float32(max(rope, 1) ** 0.5)
    inputs["key_rope"] = rng.standard_normal((1, 1, 40, rope), np.float32)
    got = check(inputs, form.all_attrs)
    if size + rope <= 768:
        joined = {
            "query": np.concatenate([inputs.pop("query"), inputs.pop("query_rope")], -1),
            "key": np.concatenate([inputs.pop("key"), inputs.pop("key_rope")], -1),
        }
        whole = ops.run(OP, inputs | joined, form.all_attrs, OUTPUTS)
        for name in OUTPUTS:
            np.testing.assert_array_equal(got[name], whole[name], name)


@pytest.mark.parametrize("ones", [("query",), ("key",), ("key", "value")])
def test_rope_of_a_batch_that_is_repeated(ones: tuple[str, ...], rng: np.random.Generator) -> None:
    form = Form(batch=3)
    inputs = form.inputs(rng)
    for name in ("query", "key"):
        inputs[f"{name}_rope"] = rng.standard_normal((*inputs[name].shape[:3], 5), np.float32)
    for name in ones:
        for part in {name, f"{name}_rope"} & set(inputs):
            inputs[part] = inputs[part][1:2]
    check(inputs, form.all_attrs)


# --- dropout


@thinned(layout=LAYOUTS, dtype=DTYPES)
def test_dropout(layout: str, dtype: str, rng: np.random.Generator) -> None:
    form = form_of(layout, dtype, keep_prob=0.7)
    bits = 4 * (3 * 9 + 37 * 50) if layout == "TND" else 2 * 4 * 37 * 50
    drop = np.packbits(rng.random(bits) < 0.7, bitorder="little")
    check(form.inputs(rng) | {"drop_mask": drop}, form.all_attrs)


@pytest.mark.parametrize("rule", ["", "mean", "unmasked", "nan"])
@pytest.mark.parametrize(("queries", "keys"), [(3, 601), (100, 613)])
def test_dropout_beside_a_mask(queries: int, keys: int, rule: str, rng: np.random.Generator) -> None:
    """The sums are those before dropout, and what an empty row gives is dropped, too. The mask may be longer."""
    form = Form(queries=queries, keys=keys, attrs={"keep_prob": 0.5, "cpu_empty_rows": rule})
    array = mask(rng, (queries, keys))
    array[1] = True
    inputs = form.inputs(rng) | {"atten_mask": array}
    drop = np.packbits(rng.random(4 * queries * keys) < 0.5, bitorder="little")
    got = check(inputs | {"drop_mask": np.append(drop, np.uint8(255))}, form.all_attrs)
    plain = ops.run(OP, inputs, form.all_attrs | {"keep_prob": 1.0}, OUTPUTS)
    for name in ("softmax_max", "softmax_sum"):
        np.testing.assert_array_equal(got[name], plain[name], name)


def test_dropout_with_sink_rope_slopes_and_a_band(rng: np.random.Generator) -> None:
    form = Form(
        heads=4,
        kv_heads=2,
        queries=130,
        keys=130,
        attrs={"keep_prob": 0.9, "pse_type": 3, "sparse_mode": 3, "scale_value": 0.2},
    )
    inputs = form.inputs(rng) | {
        "drop_mask": np.packbits(rng.random(2 * 4 * 130 * 130) < 0.9, bitorder="little"),
        "sink": rng.standard_normal(4, np.float32),
        "real_shift": rng.random(4, np.float32),
        "query_rope": rng.standard_normal((2, 4, 130, 8), np.float32),
        "key_rope": rng.standard_normal((2, 2, 130, 8), np.float32),
        "atten_mask": rng.random((2, 1, 1, 130)) < 0.3,
    }
    check(inputs, form.all_attrs)
