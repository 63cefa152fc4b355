"""FlashAttentionScore on every kernel variant against the float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fa_compiler import ops

from .problems import DTYPES, OP, OUTPUTS, TRIANGLE, Form, check, mask
from .variants import thinned

FOUR_LAYOUTS = ("BSH", "SBH", "BSND", "BNSD")
LARGEST = float(np.finfo(np.float32).max)

pytestmark = pytest.mark.usefixtures("isa")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@thinned(dtype=DTYPES, layout=[*FOUR_LAYOUTS, "TND"])
def test_layouts_with_grouped_heads_and_a_value_size_of_its_own(
    layout: str, dtype: str, rng: np.random.Generator
) -> None:
    lengths: dict[str, Any] = {"queries": (5, 0, 21), "keys": (9, 4, 30)} if layout == "TND" else {}
    form = Form(layout, dtype, heads=6, kv_heads=2, size=12, value_size=20, **lengths)
    check(form.inputs(rng), form.all_attrs)


@thinned(
    layout=FOUR_LAYOUTS,
    ones=[("query",), ("key",), ("value",), ("key", "value"), ("query", "key"), ("query", "value")],
    mask_batch=[None, 1, 3],
)
def test_a_batch_of_one_is_repeated(
    layout: str, ones: tuple[str, ...], mask_batch: int | None, rng: np.random.Generator
) -> None:
    form = Form(layout, batch=3, heads=4, kv_heads=2, queries=14, keys=35, value_size=20)
    axis = 1 if layout == "SBH" else 0
    inputs = form.inputs(rng)
    for name in ones:
        inputs[name] = np.take(inputs[name], [1], axis)
    if mask_batch is not None:
        inputs["atten_mask"] = mask(rng, (mask_batch, 1, 14, 35))
        inputs["atten_mask"][-1, :, 3] = True
        inputs["real_shift"] = rng.standard_normal((4 - mask_batch, 4, 14, 35), np.float32)
    got = check(inputs, form.all_attrs)
    copies = {name: np.repeat(inputs[name], 3, axis) for name in ones}
    whole = ops.run(OP, inputs | copies, form.all_attrs, OUTPUTS)
    for name in OUTPUTS:
        np.testing.assert_array_equal(got[name], whole[name])


def test_a_batch_of_one_beside_an_empty_one(rng: np.random.Generator) -> None:
    inputs = Form(batch=1).inputs(rng)
    inputs["key"] = inputs["key"][:0]
    got = check(inputs, Form().all_attrs)
    assert got["attention_out"].shape == (0, 2, 33, 16)


# Tails of every kind: fewer rows and keys than a vector, a tile (12 or 6 rows), a panel (32, 16 or 8 keys), a block
# (96 rows, 512 keys), and one more than each.
@pytest.mark.parametrize("queries", [1, 2, 7, 12, 13, 96, 97])
@pytest.mark.parametrize("keys", [1, 5, 32, 33, 512, 600])
def test_lengths(queries: int, keys: int, rng: np.random.Generator) -> None:
    form = Form(batch=1, queries=queries, keys=keys)
    check(form.inputs(rng), form.all_attrs)


# 32 heads are not cut along the keys: one row takes 4096 of them at a time, from 5 rows on 2048.
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("queries", "keys"), [(1, 4096), (1, 4099), (5, 2100)])
@pytest.mark.parametrize("biased", [False, True])
def test_several_blocks_of_a_few_rows(
    dtype: str, queries: int, keys: int, biased: bool, rng: np.random.Generator
) -> None:
    attrs = {"pse_type": 0} if biased else {}
    form = Form(dtype=dtype, batch=1, heads=32, kv_heads=32, queries=queries, keys=keys, size=8, attrs=attrs)
    inputs = form.inputs(rng)
    if biased:
        inputs["real_shift"] = rng.standard_normal((1, 32, queries, keys)).astype(dtype)
        inputs["atten_mask"] = mask(rng, (1, 1, queries, keys))
    check(inputs, form.all_attrs)


@pytest.mark.parametrize("size", [1, 3, 16, 31, 64, 80, 128, 192, 256, 513, 768])
def test_head_sizes(size: int, rng: np.random.Generator) -> None:
    form = Form(batch=1, heads=1, kv_heads=1, queries=13, keys=40, size=size)
    check(form.inputs(rng), form.all_attrs)


@pytest.mark.parametrize(("heads", "queries"), [(4, 64), (8, 64), (12, 64), (8, 12)])
def test_rows_that_are_copied_give_the_same_bits(heads: int, queries: int, rng: np.random.Generator) -> None:
    """Behind each other, the heads put rows 1, 2 or 3 KB apart, which some kernels do not read in place."""
    form = Form(layout="BSH", batch=1, heads=heads, kv_heads=heads, queries=queries, keys=300, size=64)
    inputs = form.inputs(rng)
    got = check(inputs, form.all_attrs)["attention_out"]
    apart = {name: array.reshape(1, -1, heads, 64).transpose(0, 2, 1, 3) for name, array in inputs.items()}
    alone = ops.run(OP, apart, {**form.all_attrs, "input_layout": "BNSD"}, ("attention_out",))["attention_out"]
    np.testing.assert_array_equal(got.reshape(1, queries, heads, 64).transpose(0, 2, 1, 3), alone)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_few_rows_give_the_bits_that_they_have_among_many(dtype: str, rng: np.random.Generator) -> None:
    """The number of threads decides how many rows share a tile; with AVX-512, 9 to 16 rows have their own kernel."""
    form = Form(dtype=dtype, batch=1, heads=1, kv_heads=1, queries=64, keys=301, size=72)
    inputs = form.inputs(rng)
    many = check(inputs, form.all_attrs)["attention_out"]
    few = check(inputs | {"query": inputs["query"][..., :12, :]}, form.all_attrs)["attention_out"]
    np.testing.assert_array_equal(few, many[..., :12, :])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("size", "value_size"), [(33, 33), (65, 129)])
def test_odd_sizes_of_16_bits(dtype: str, size: int, value_size: int, rng: np.random.Generator) -> None:
    """Rows begin between two floats: make sanitize sees a load that does not expect it."""
    form = Form(dtype=dtype, batch=1, queries=13, keys=40, size=size, value_size=value_size)
    check(form.inputs(rng), form.all_attrs)


@pytest.mark.parametrize("value_size", [1, 17, 64, 200])
def test_value_sizes(value_size: int, rng: np.random.Generator) -> None:
    form = Form(batch=1, size=24, value_size=value_size)
    check(form.inputs(rng), form.all_attrs)


@thinned(kv_heads=[1, 2, 4, 8], queries=[1, 3, 40, 130])
def test_query_heads_share_key_heads(kv_heads: int, queries: int, rng: np.random.Generator) -> None:
    form = Form(heads=8, kv_heads=kv_heads, queries=queries)
    check(form.inputs(rng), form.all_attrs)


@thinned(
    dtype=[np.bool_, np.uint8],
    shape=[
        (2, 2, 50, 290),
        (2, 1, 50, 290),
        (1, 1, 50, 290),
        (50, 290),
        (2, 1, 1, 290),
        (1, 2, 50, 1),
        (2, 2, 1, 1),
        (1, 290),
        (50, 1),
        (1, 1),
    ],
)
def test_mask_shapes(shape: tuple[int, ...], dtype: type, rng: np.random.Generator) -> None:
    form = Form(queries=50, keys=290)
    array = rng.random(shape) < 0.4 if shape[-1] == 1 else mask(rng, shape)
    # A uint8 mask excludes by any number that is not 0.
    inputs = form.inputs(rng) | {"atten_mask": array.astype(dtype) * dtype(7)}
    check(inputs, form.all_attrs)


@thinned(
    layout=FOUR_LAYOUTS,
    band=[(2, 0, 0), (3, 0, 0), (4, 7, 3), (4, 300, -2), (4, -3, 10), (4, 0, 0), (0, 20, 0), (0, 3, 5), (1, 0, 0)],
    lengths=[(40, 40), (33, 300), (120, 50)],
)
def test_sparse_modes(
    layout: str, band: tuple[int, int, int], lengths: tuple[int, int], rng: np.random.Generator
) -> None:
    (mode, pre, following), (queries, keys) = band, lengths
    attrs = {"sparse_mode": mode, "pre_tockens": pre, "next_tockens": following}
    form = Form(layout, batch=1, queries=queries, keys=keys, attrs=attrs)
    array = TRIANGLE if mode >= 2 else mask(rng, (queries, keys))
    check(form.inputs(rng) | {"atten_mask": array}, form.all_attrs)


def test_without_a_mask_the_mode_is_ignored(rng: np.random.Generator) -> None:
    form = Form(attrs={"sparse_mode": 3, "pre_tockens": 1, "next_tockens": 0})
    inputs = form.inputs(rng)
    got = check(inputs, form.all_attrs)["attention_out"]
    plain = ops.run(OP, inputs, Form().all_attrs)["attention_out"]
    np.testing.assert_array_equal(got, plain)


def test_whole_blocks_are_masked_open_and_mixed(rng: np.random.Generator) -> None:
    """Three blocks of 512 keys: one seen by nobody, one by everybody, one by some; rows differ, too."""
    form = Form(batch=1, heads=1, kv_heads=1, queries=100, keys=1400)
    array = np.zeros((100, 1400), np.bool_)
    array[:, :512] = True
    array[:, 1200:] = rng.random((100, 200)) < 0.5
    array[10:20, :1200] = True
    array[50:60, 1100:1133] = True
    check(form.inputs(rng) | {"atten_mask": array}, form.all_attrs)


@thinned(mode=[0, 1, 2, 3, 4], order=["", "same_as_input"])
def test_packed_sequences(mode: int, order: str, rng: np.random.Generator) -> None:
    attrs = {"sparse_mode": mode, "pre_tockens": 30, "next_tockens": 2, "softmax_out_layout": order}
    form = Form("TND", heads=4, kv_heads=2, queries=(3, 0, 17, 1), keys=(5, 2, 17, 40), attrs=attrs)
    for array in (mask(rng, (17, 40)), mask(rng, (21, 64))) if mode < 2 else (TRIANGLE,):
        check(form.inputs(rng) | {"atten_mask": array}, form.all_attrs)


def test_packed_rows_that_no_batch_owns_are_zero(rng: np.random.Generator) -> None:
    form = Form("TND", queries=(4, 6, 5), keys=(4, 6, 5))
    inputs = form.inputs(rng)
    inputs["actual_seq_qlen"] = np.array([4, 10, 0], np.int64)
    inputs["actual_seq_kvlen"] = np.array([4, 4, 0], np.int64)  # batch 1 has queries and no keys
    got = check(inputs, form.all_attrs)
    assert not got["attention_out"][4:].any()


@thinned(pse_type=[0, 1], bias_dtype=["same", "float32"], dtype=DTYPES)
def test_bias_types(dtype: str, bias_dtype: str, pse_type: int, rng: np.random.Generator) -> None:
    form = Form(dtype=dtype, attrs={"pse_type": pse_type})
    own = DTYPES[dtype if bias_dtype == "same" else bias_dtype]
    bias = (2 * rng.standard_normal((2, 2, 33, 29))).astype(own)
    check(form.inputs(rng) | {"real_shift": bias}, form.all_attrs)


@thinned(
    shape=[
        (2, 3, 37, 260),
        (1, 3, 37, 260),
        (2, 3, 1, 260),
        (1, 3, 1, 260),
        (2, 1, 37, 260),
        (1, 1, 37, 260),
        (1, 1, 1, 260),
        (2, 1, 37, 1),
        (1, 1, 1, 1),
    ],
    dtype=["float32", "float16"],
)
def test_bias_shapes_with_a_mask(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> None:
    form = Form(dtype=dtype, heads=3, kv_heads=3, queries=37, keys=260, attrs={"pse_type": 0})
    inputs = form.inputs(rng) | {
        "real_shift": rng.standard_normal(shape).astype(DTYPES[dtype]),
        "atten_mask": mask(rng, (2, 1, 37, 260)),
    }
    check(inputs, form.all_attrs)


@thinned(layout=FOUR_LAYOUTS, windows=[(2, 3), (3, 1), (6, 2)], mode=[0, 3])
def test_masks_of_a_part_of_the_batch(
    layout: str, windows: tuple[int, int], mode: int, rng: np.random.Generator
) -> None:
    """As of the windows of an image, in a batch of images: entry b reads entry b % W of the mask and of the bias."""
    attrs = {"pse_type": 0, "sparse_mode": mode, "cpu_mask_batch": "repeated"}
    form = Form(layout, batch=6, queries=9, keys=20, attrs=attrs)
    masked, biased = windows
    inputs = form.inputs(rng) | {
        "real_shift": rng.standard_normal((biased, 2, 9, 20)).astype(np.float32),
        "atten_mask": mask(rng, (masked, 1, 1 if mode else 9, 20)),
    }
    got = check(inputs, form.all_attrs)["attention_out"]
    whole = {
        name: np.tile(inputs[name], (6 // inputs[name].shape[0], 1, 1, 1)) for name in ("real_shift", "atten_mask")
    }
    assert np.array_equal(got, check(inputs | whole, form.all_attrs | {"cpu_mask_batch": ""})["attention_out"])


def test_compressed_bias(rng: np.random.Generator) -> None:
    """The last 1024 rows of an ALiBi bias stand for all of them."""
    length = 1100
    form = Form(batch=1, queries=length, keys=length, size=8, attrs={"pse_type": 0, "sparse_mode": 2})
    distance = np.arange(length)[None, :] - np.arange(length)[:, None]
    slopes = np.array([0.5, 0.25], np.float32)[:, None, None]
    full = (slopes * distance).astype(np.float32)[None]
    inputs = form.inputs(rng) | {"atten_mask": TRIANGLE}
    got = check(inputs | {"real_shift": full[:, :, -1024:]}, form.all_attrs)
    whole = ops.run(OP, inputs | {"real_shift": full}, form.all_attrs, OUTPUTS)
    for name in OUTPUTS:
        np.testing.assert_array_equal(got[name], whole[name])


@pytest.mark.parametrize("full", [True, False])
def test_packed_bias(full: bool, rng: np.random.Generator) -> None:
    form = Form("TND", queries=(3, 0, 17), keys=(5, 2, 20), attrs={"pse_type": 0})
    count = 2 * (3 * 5 + 17 * 20) if full else 2 * (5 + 2 + 20)
    bias = rng.standard_normal((count, 1)).astype(np.float32)
    check(form.inputs(rng) | {"real_shift": bias}, form.all_attrs)


def test_packed_compressed_bias(rng: np.random.Generator) -> None:
    form = Form("TND", queries=(40, 1060), keys=(40, 1060), size=8, attrs={"pse_type": 0, "sparse_mode": 3})
    bias = -0.1 * rng.random((1, 2, 1024, 1060), np.float32)
    check(form.inputs(rng) | {"real_shift": bias, "atten_mask": TRIANGLE}, form.all_attrs)


EMPTY_RULES = ("", "zero", "mean", "unmasked", "nan")


@thinned(rule=EMPTY_RULES, dtype=DTYPES)
def test_rows_that_attend_nothing(rule: str, dtype: str, rng: np.random.Generator) -> None:
    """Left padding: the first rows see only padding, on all heads of batch 0."""
    form = Form(dtype=dtype, heads=4, kv_heads=2, queries=50, keys=300, attrs={"cpu_empty_rows": rule})
    array = mask(rng, (2, 1, 50, 300))
    array[0, :, :20] = True
    array[1, :, 49] = True
    got = check(form.inputs(rng) | {"atten_mask": array}, form.all_attrs)
    assert (got["softmax_max"][0, :, :20] == -LARGEST).all()
    assert (got["softmax_sum"][0, :, :20] == LARGEST).all()


@pytest.mark.parametrize("rule", EMPTY_RULES)
@pytest.mark.parametrize(("queries", "keys"), [(110, 40), (13, 5)])
def test_rows_before_the_band(rule: str, queries: int, keys: int, rng: np.random.Generator) -> None:
    """With more queries than keys sparse_mode 3 leaves the first rows without keys: a causal model with a bias."""
    form = Form(queries=queries, keys=keys, attrs={"sparse_mode": 3, "cpu_empty_rows": rule, "pse_type": 0})
    bias = rng.standard_normal((1, 2, queries, keys)).astype(np.float32)
    check(form.inputs(rng) | {"atten_mask": TRIANGLE, "real_shift": bias}, form.all_attrs)


@thinned(empty=EMPTY_RULES, rule=["", "zero", "infinite"])
def test_undefined_rows(rule: str, empty: str, rng: np.random.Generator) -> None:
    """All attended scores -inf, NaN scores, +inf scores, and rows that are merely mostly -inf."""
    attrs = {"cpu_empty_rows": empty, "cpu_nan_rows": rule, "pse_type": 0}
    form = Form(batch=1, heads=1, kv_heads=1, queries=12, keys=300, attrs=attrs)
    bias = np.zeros((1, 1, 12, 300), np.float32)
    bias[..., 0, :] = -np.inf
    bias[..., 1, :299] = -np.inf
    bias[..., 2, 7] = np.nan
    bias[..., 3, :] = np.nan
    bias[..., 4, 280] = np.inf
    bias[..., 5, 3] = np.inf
    array = np.zeros((12, 300), np.bool_)
    array[6] = True  # empty
    array[7, :290] = True  # what is attended is -inf
    bias[..., 7, 290:] = -np.inf
    array[8, 5] = True  # the NaN is not attended
    bias[..., 8, 5] = np.nan
    array[9, 5] = True  # nor the +inf
    bias[..., 9, 5] = np.inf
    got = check(form.inputs(rng) | {"real_shift": bias, "atten_mask": array}, form.all_attrs)
    out = got["attention_out"][0, 0]
    assert np.isfinite(out[[1, 8, 9, 10, 11]]).all()
    infinite, others = out[[0, 7]], out[[2, 3, 4, 5]]
    assert (infinite == 0).all() if rule else np.isnan(infinite).all()
    assert (others == 0).all() if rule == "zero" else np.isnan(others).all()


@thinned(queries=[1, 12], keys=[20, 700], biased=[False, True])
def test_largest_score_beside_a_nan(queries: int, keys: int, biased: bool, rng: np.random.Generator) -> None:
    """A NaN score is the largest, also beside one of +inf: of attended keys and of masked ones with a biased score."""
    more = {"cpu_mask_value": -9.0, "cpu_masked_bias": "added"} if biased else {}
    form = Form(batch=2, queries=queries, keys=keys, attrs={"pse_type": 0} | more)
    half = keys // 2
    array = np.zeros((queries, keys), np.bool_)
    array[:, half:] = True
    for attended in ((), (np.inf,), (np.nan, np.inf), (np.inf, np.nan)):
        for masked in ((), (np.nan,), (np.inf,), (np.inf, np.nan)):
            bias = np.zeros((2, 2, queries, keys), np.float32)
            bias[0, 0, -1, : len(attended)] = attended
            bias[0, 0, -1, half : half + len(masked)] = masked
            got = check(form.inputs(rng) | {"real_shift": bias, "atten_mask": array}, form.all_attrs)["softmax_max"]
            seen = (*attended, *masked) if biased else attended
            assert np.isnan(got[0, 0, -1]).all() == bool(np.isnan(seen).any())
            assert np.isfinite(got[1]).all()


def test_masked_scores_of_rows_that_share_a_bias(rng: np.random.Generator) -> None:
    """Also behind a row that is NaN because it attends a key of an infinite score."""
    form = Form(batch=1, heads=2, queries=3, keys=4, attrs={"pse_type": 0, "cpu_masked_bias": "added"})
    array = np.ones((3, 4), np.bool_)
    array[0, 0] = array[1:, 1] = False
    bias = np.array([[[[np.inf, 1.0, 2.0, 3.0]], [[4.0, 5.0, 6.0, 7.0]]]], np.float32)
    check(form.inputs(rng) | {"real_shift": bias, "atten_mask": array}, form.all_attrs | {"cpu_mask_value": -1e4})


@pytest.mark.parametrize("rule", ["", "zero", "infinite"])
def test_nan_and_inf_in_query_and_key(rule: str, rng: np.random.Generator) -> None:
    form = Form(batch=1, queries=20, keys=40, attrs={"cpu_nan_rows": rule})
    inputs = form.inputs(rng) | {"atten_mask": mask(rng, (20, 40))}
    inputs["atten_mask"][:10, 3] = True
    inputs["query"][0, 0, 5, 2] = np.nan
    inputs["query"][0, 1, 6, 2] = np.inf
    inputs["key"][0, 1, 3, 1] = np.nan
    check(inputs, form.all_attrs)


@pytest.mark.parametrize("rule", ["zero", "infinite"])
@pytest.mark.parametrize("queries", [40, 2])
def test_values_in_rows_of_no_probability(rule: str, queries: int, rng: np.random.Generator) -> None:
    """A guard makes the probabilities 0, and 0 * inf is NaN, except at masked keys, which are not read."""
    form = Form(batch=1, queries=queries, keys=700, attrs={"cpu_nan_rows": rule, "pse_type": 0})
    inputs = form.inputs(rng)
    bias = np.zeros((1, 1, queries, 700), np.float32)
    bias[..., ::2, :] = -np.inf
    masked = np.zeros((1, 2, 1, 700), np.bool_)
    masked[:, 1, :, 600] = True  # head 1 does not read the values that are not finite
    inputs["value"][0, :, 600, 3:5] = np.inf, np.nan
    got = check(inputs | {"real_shift": bias, "atten_mask": masked}, form.all_attrs)["attention_out"]
    assert np.isnan(got[0, 0, ::2, 3:5]).all()
    assert not got[0, 0, ::2, :3].any() and not got[0, 1, ::2].any()


@pytest.mark.parametrize("queries", [40, 2])
def test_masked_keys_that_have_a_score_are_read_where_they_have_a_weight(
    queries: int, rng: np.random.Generator
) -> None:
    form = Form(batch=1, queries=queries, keys=300, attrs={"cpu_mask_value": -1e4, "cpu_empty_rows": "mean"})
    inputs = form.inputs(rng)
    masked = mask(rng, (queries, 300))
    masked[:, 290] = True
    masked[0] = True  # only here do masked keys have a weight
    inputs["value"][0, :, 290] = np.inf
    got = check(inputs | {"atten_mask": masked}, form.all_attrs)["attention_out"]
    assert (got[0, :, 0] == np.inf).all() and np.isfinite(got[0, :, 1:]).all()


def test_values_that_are_not_attended_are_not_read(rng: np.random.Generator) -> None:
    for queries in (30, 4):  # packed, and straight from K and V
        form = Form(batch=1, queries=queries, keys=600)
        inputs = form.inputs(rng) | {"atten_mask": mask(rng, (queries, 600))}
        inputs["value"][0, 0, 5] = np.nan
        inputs["value"][0, 0, 560, 3] = np.inf
        inputs["value"][0, 1, 7, 2] = -np.inf
        half = queries // 2
        inputs["atten_mask"][:half, [5, 7, 560]] = True
        inputs["atten_mask"][half:, 5] = False
        got = check(inputs, form.all_attrs)
        assert np.isfinite(got["attention_out"][0, :, :half]).all()
        assert np.isnan(got["attention_out"][0, 0, half:]).any()


@thinned(lowest=[-LARGEST, -1e30, -1e9, -1e4], pse_type=[0, 1])
def test_bias_that_swallows_the_scores(lowest: float, pse_type: int, rng: np.random.Generator) -> None:
    """An additive mask: a row full of it is uniform at -FLT_MAX, and the plain softmax again at -1e4."""
    form = Form(batch=1, queries=8, keys=280, attrs={"pse_type": pse_type, "scale_value": 0.5})
    bias = np.where(mask(rng, (1, 1, 8, 280)), np.float32(lowest), np.float32(0))
    bias[..., 2, :] = lowest
    inputs = form.inputs(rng) | {"real_shift": bias}
    got = check(inputs, form.all_attrs)["attention_out"]
    if lowest < -1e29:
        np.testing.assert_allclose(got[0, :, 2], inputs["value"][0].mean(axis=1), atol=1e-5)


@pytest.mark.parametrize("scale", [-3.0, 3.0])
def test_scores_far_apart(scale: float, rng: np.random.Generator) -> None:
    """The largest score comes last, so that every block shrinks what was summed before it, down to nothing."""
    form = Form(batch=1, queries=15, keys=1600, attrs={"scale_value": scale})
    inputs = form.inputs(rng)
    inputs["key"] *= np.linspace(0, 30, 1600, dtype=np.float32)[:, None]
    check(inputs, form.all_attrs)


@thinned(queries=[2, 20], size=[1e6, 1e15, 1e19, 3e38])
def test_huge_scores(size: float, queries: int) -> None:
    """One key wins wherever the scores are finite; a product that overflows is +inf, whose softmax is NaN."""
    form = Form(batch=1, heads=1, kv_heads=1, queries=queries, keys=40, size=4)
    inputs = {
        name: np.zeros((1, 1, length, 4), np.float32)
        for name, length in (("query", queries), ("key", 40), ("value", 40))
    }
    inputs["query"][..., 0] = size
    inputs["key"][..., 0] = np.linspace(0, 4, 40)
    inputs["value"][..., 0] = np.arange(40)
    for scale in (1.0, 0.25):
        got = ops.run(OP, inputs, {**form.all_attrs, "scale_value": scale}, ["attention_out"])["attention_out"]
        with np.errstate(over="ignore"):
            overflows = np.isinf(np.float32(size) * np.float32(4))
        assert np.isnan(got[..., 0]).all() if overflows else (got[..., 0] == 39).all()


@pytest.mark.parametrize(
    ("layout", "shapes"),
    [
        ("BNSD", ((0, 2, 3, 4), (0, 2, 5, 4))),
        ("BNSD", ((2, 2, 0, 4), (2, 2, 5, 4))),
        ("BNSD", ((2, 2, 3, 4), (2, 2, 0, 4))),
        ("BNSD", ((2, 2, 3, 0), (2, 2, 5, 0))),
        ("BSND", ((2, 3, 2, 4), (2, 5, 0, 4))),
        ("BSH", ((2, 3, 8), (2, 0, 8))),
        ("SBH", ((0, 2, 8), (5, 2, 8))),
    ],
)
def test_empty_tensors(layout: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    query, key = (np.ones(shape, np.float32) for shape in shapes)
    got = check({"query": query, "key": key, "value": key}, {"head_num": 2, "input_layout": layout})
    for array in got.values():
        assert not array.any()


def test_outputs_are_independent_of_each_other(rng: np.random.Generator) -> None:
    form = Form()
    inputs = form.inputs(rng)
    everything = ops.run(OP, inputs, form.all_attrs)
    assert everything["softmax_out"].shape == (0, 0, 0, 0)
    for names in (["softmax_sum", "attention_out"], ["attention_out", "softmax_max"]):
        got = ops.run(OP, inputs, form.all_attrs, names)
        assert list(got) == names
        for name in names:
            np.testing.assert_array_equal(got[name], everything[name])
    # Without statistics, which the gradient computes again, few rows may add up their products in another order.
    alone = ops.run(OP, inputs, form.all_attrs, ["attention_out"])
    assert list(alone) == ["attention_out"]
    np.testing.assert_allclose(alone["attention_out"], everything["attention_out"], rtol=1e-5, atol=1e-6)


def test_the_same_question_gives_the_same_bits(rng: np.random.Generator) -> None:
    """Which thread takes which task must not matter."""
    form = Form(queries=300, keys=600)
    inputs = form.inputs(rng)
    first = ops.run(OP, inputs, form.all_attrs, ["attention_out"])["attention_out"]
    for _ in range(3):
        again = ops.run(OP, inputs, form.all_attrs, ["attention_out"])["attention_out"]
        np.testing.assert_array_equal(first, again)
