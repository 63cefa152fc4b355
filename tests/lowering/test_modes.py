"""Masks beside a band, prefixes, and the sparse modes of packed sequences, on every kernel variant."""

from __future__ import annotations

import numpy as np
import pytest

from fa_compiler import ops

from .problems import DTYPES, OP, OUTPUTS, PREFIX_MASK, TRIANGLE, Form, agree, check
from .variants import thinned

pytestmark = pytest.mark.usefixtures("isa")

EMPTY_RULES = ("", "zero", "mean", "unmasked", "nan")
BANDS = [(2, 0, 0), (3, 0, 0), (4, 20, 3), (4, 700, -2)]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(17)


def in_full(form: Form, shape: tuple[int, int], keys: np.ndarray) -> np.ndarray:
    """The band of a form and a mask of its keys as one mask of the scores."""
    queries, length = shape
    distance = np.arange(length) - np.arange(queries)[:, None]
    offset = length - queries
    mode = form.attrs["sparse_mode"]
    first = offset - form.attrs["pre_tockens"] if mode == 4 else -(2**40)
    last = {2: 0, 3: offset, 4: offset + form.attrs["next_tockens"]}[mode]
    return (distance < first) | (distance > last) | keys


@thinned(rule=EMPTY_RULES, band=BANDS, lengths=[(40, 40), (100, 700), (3, 900), (50, 20)])
def test_a_mask_of_keys_beside_a_band(
    lengths: tuple[int, int], band: tuple[int, int, int], rule: str, rng: np.random.Generator
) -> None:
    """Left padding below a causal band leaves its first rows without keys; the same mask written out gives the same."""
    (queries, keys), (mode, pre, following) = lengths, band
    attrs = {"sparse_mode": mode, "pre_tockens": pre, "next_tockens": following, "cpu_empty_rows": rule}
    form = Form(batch=2, heads=4, kv_heads=2, queries=queries, keys=keys, attrs=attrs)
    mask = np.zeros((2, 1, 1, keys), np.bool_)
    mask[0, ..., : keys // 3] = True
    mask[1, ..., keys - 3 :] = True
    mask[1, ..., rng.integers(0, keys, 4)] = True
    inputs = form.inputs(rng)
    got = check(inputs | {"atten_mask": mask}, form.all_attrs)
    whole = inputs | {"atten_mask": in_full(form, (queries, keys), mask)}
    plain = ops.run(OP, whole, form.all_attrs | {"sparse_mode": 1}, OUTPUTS)
    for name in OUTPUTS:
        agree(got[name], plain[name], name)


@thinned(
    shape=[(2, 4, 1, 70), (1, 4, 1, 70), (1, 1, 1, 70), (2, 1, 1, 1), (1, 1, 1, 1), (2, 4, 1, 1)],
    dtype=[np.bool_, np.uint8],
)
def test_shapes_of_a_mask_of_keys(shape: tuple[int, ...], dtype: type, rng: np.random.Generator) -> None:
    form = Form(batch=2, heads=4, kv_heads=2, queries=50, keys=70, attrs={"sparse_mode": 3})
    check(form.inputs(rng) | {"atten_mask": (rng.random(shape) < 0.5).astype(dtype) * dtype(3)}, form.all_attrs)


@thinned(layout=["BSH", "SBH", "BSND"], dtype=DTYPES)
def test_layouts_of_a_mask_of_keys(layout: str, dtype: str, rng: np.random.Generator) -> None:
    form = Form(layout, dtype, queries=50, keys=70, attrs={"sparse_mode": 2, "cpu_empty_rows": "mean"})
    check(form.inputs(rng) | {"atten_mask": rng.random((2, 1, 1, 70)) < 0.5}, form.all_attrs)


@pytest.mark.parametrize(("queries", "keys"), [(40, 40), (30, 700), (50, 20), (700, 600)])
@pytest.mark.parametrize("layout", ["BNSD", "BSH"])
def test_prefixes(queries: int, keys: int, layout: str, rng: np.random.Generator) -> None:
    form = Form(layout, batch=3, queries=queries, keys=keys, attrs={"sparse_mode": 6})
    low = max(0, keys - queries)
    prefix = np.array([low, keys, (low + keys) // 2], np.int64)
    check(form.inputs(rng) | {"atten_mask": PREFIX_MASK, "prefix": prefix}, form.all_attrs)


def test_prefix_written_out(rng: np.random.Generator) -> None:
    """Mode 5 takes the mask as it is, and mode 6 the prefix alone."""
    form = Form(batch=2, queries=30, keys=50, attrs={"sparse_mode": 5})
    prefix = np.array([23, 41], np.int64)
    distance = np.arange(50) - np.arange(30)[:, None]
    mask = (distance > 20) & (np.arange(50) >= prefix[:, None, None, None])
    inputs = form.inputs(rng)
    got = check(inputs | {"atten_mask": mask, "prefix": prefix}, form.all_attrs)
    check(inputs | {"atten_mask": mask}, form.all_attrs)
    constant = inputs | {"atten_mask": PREFIX_MASK, "prefix": prefix}
    compressed = ops.run(OP, constant, form.all_attrs | {"sparse_mode": 6}, OUTPUTS)
    for name in OUTPUTS:
        agree(got[name], compressed[name], name)


@pytest.mark.parametrize("order", ["", "same_as_input"])
@pytest.mark.parametrize(("mode", "pre", "following"), [(6, 0, 0), (7, 50, 0), (7, 60, -2), (8, 50, 3), (8, 70, -1)])
def test_packed_modes(mode: int, pre: int, following: int, order: str, rng: np.random.Generator) -> None:
    """The band of mode 7 belongs to the last sequence with queries, that of mode 8 to the first."""
    attrs = {"sparse_mode": mode, "pre_tockens": pre, "next_tockens": following, "softmax_out_layout": order}
    form = Form("TND", heads=4, kv_heads=2, queries=(0, 3, 17, 33, 0), keys=(4, 9, 17, 40, 5), attrs=attrs)
    extra = {"atten_mask": PREFIX_MASK, "prefix": np.array([0, 6, 12, 7, 0])} if mode == 6 else {"atten_mask": TRIANGLE}
    check(form.inputs(rng) | extra, form.all_attrs)


@pytest.mark.parametrize("constant", [True, False])
def test_blocks_that_nobody_sees_are_not_read(constant: bool, rng: np.random.Generator) -> None:
    """NaN keys above the diagonal change nothing, with many query rows and with few."""
    for queries in (120, 2):
        attrs = {"sparse_mode": 4, "pre_tockens": 9, "next_tockens": -800}
        form = Form(batch=1, queries=queries, keys=1600, attrs=attrs)
        inputs = form.inputs(rng) | {"atten_mask": TRIANGLE if constant else np.zeros((1, 1, 1, 1600), np.bool_)}
        inputs["key"][:, :, 900:] = np.nan
        inputs["value"][:, :, 900:] = np.inf
        got = check(inputs, form.all_attrs)
        assert np.isfinite(got["attention_out"]).all()
