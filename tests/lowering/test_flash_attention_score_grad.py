"""FlashAttentionScoreGrad on every kernel variant against the float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fa_compiler import ops, reference
from tests.pairs import pairwise

from .gradients import GRADIENTS, OP, backward, check
from .problems import DTYPES, PREFIX_MASK, TRIANGLE, Form, Inputs, mask
from .variants import thinned

LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")

pytestmark = pytest.mark.usefixtures("isa")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(17)


def checked(form: Form, rng: np.random.Generator, **more: Any) -> dict[str, np.ndarray]:
    inputs, attrs = backward(form.inputs(rng) | more, form.all_attrs, rng)
    return check(inputs, attrs)


@thinned(dtype=DTYPES, layout=LAYOUTS)
def test_layouts_with_grouped_heads_and_a_value_size_of_its_own(
    layout: str, dtype: str, rng: np.random.Generator
) -> None:
    lengths: dict[str, Any] = {"queries": (5, 0, 21, 3), "keys": (9, 4, 30, 0)} if layout == "TND" else {}
    checked(Form(layout, dtype, heads=6, kv_heads=2, size=12, value_size=20, **lengths), rng)


# Tails of every kind: fewer rows and keys than a vector, a tile (12 or 6 rows), a panel (32, 16 or 8 keys), a block
# (192 rows, 128 keys), a wave (1152 rows), and one more than each.
@pytest.mark.parametrize(
    ("queries", "keys", "dtype"),
    pairwise([1, 2, 7, 12, 13, 192, 193, 1153], [1, 5, 32, 33, 128, 129], ["float32", "bfloat16"]),
)
def test_lengths(queries: int, keys: int, dtype: str, rng: np.random.Generator) -> None:
    checked(Form(dtype=dtype, batch=1, queries=queries, keys=keys), rng)


# The diagonal goes through blocks, tiles and vectors at every place; columns that no row of a block sees are left out.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (201, 350), (1000, 1000)])
def test_triangles(queries: int, keys: int, dtype: str, rng: np.random.Generator) -> None:
    form = Form(dtype=dtype, batch=1, heads=1, kv_heads=1, queries=queries, keys=keys, attrs={"sparse_mode": 3})
    checked(form, rng, atten_mask=TRIANGLE)


@thinned(dtype=["float32", "bfloat16"], size=[1, 3, 16, 31, 64, 80, 128, 256, 513, 768])
def test_head_sizes(size: int, dtype: str, rng: np.random.Generator) -> None:
    checked(Form(dtype=dtype, batch=1, heads=1, kv_heads=1, queries=13, keys=40, size=size), rng)


@thinned(dtype=["float32", "bfloat16"], value_size=[1, 17, 64, 200])
def test_value_sizes(value_size: int, dtype: str, rng: np.random.Generator) -> None:
    checked(Form(dtype=dtype, batch=1, size=24, value_size=value_size), rng)


# With many rows of a group a wave holds some heads only, or a part of one.
@thinned(kv_heads=[1, 2, 8], queries=[1, 3, 40, 400])
def test_query_heads_share_key_heads(kv_heads: int, queries: int, rng: np.random.Generator) -> None:
    checked(Form(heads=8, kv_heads=kv_heads, queries=queries), rng)


def test_many_small_sequences_run_as_one_task_each(rng: np.random.Generator) -> None:
    """Beside one that is most of the work and is cut into parts."""
    lengths = (400, *[7, 1, 12] * 10)
    checked(Form("TND", heads=4, kv_heads=2, queries=lengths, keys=lengths), rng)


@thinned(
    dtype=[np.bool_, np.uint8],
    shape=[(2, 2, 50, 290), (1, 1, 50, 290), (50, 290), (2, 1, 1, 290), (1, 2, 50, 1), (2, 2, 1, 1), (50, 1)],
)
def test_mask_shapes(shape: tuple[int, ...], dtype: type, rng: np.random.Generator) -> None:
    array = rng.random(shape) < 0.4 if shape[-1] == 1 else mask(rng, shape)
    checked(Form(queries=50, keys=290), rng, atten_mask=array.astype(dtype) * dtype(7))


@thinned(
    layout=["BSH", "BNSD", "TND"],
    band=[(2, 0, 0), (3, 0, 0), (4, 7, 3), (4, 300, -2), (4, -3, 10), (0, 20, 0), (0, 3, 5), (1, 0, 0)],
    sizes=[(33, 300), (120, 50)],
)
def test_sparse_modes(
    layout: str, band: tuple[int, int, int], sizes: tuple[int, int], rng: np.random.Generator
) -> None:
    (mode, pre, following), (queries, keys) = band, sizes
    attrs = {"sparse_mode": mode, "pre_tockens": pre, "next_tockens": following}
    lengths: dict[str, Any] = {"queries": queries, "keys": keys}
    if layout == "TND":
        lengths = {"queries": (queries, 4), "keys": (keys, 7)}
    array = TRIANGLE if mode >= 2 else mask(rng, (queries, keys))
    checked(Form(layout, batch=1, attrs=attrs, **lengths), rng, atten_mask=array)


@pytest.mark.parametrize("mode", [7, 8])
def test_modes_of_packed_sequences(mode: int, rng: np.random.Generator) -> None:
    attrs = {"sparse_mode": mode, "pre_tockens": 60, "next_tockens": -2}
    lengths = (40, 33, 50)
    checked(Form("TND", queries=lengths, keys=lengths, attrs=attrs), rng, atten_mask=TRIANGLE)


@pytest.mark.parametrize("layout", ["BSND", "TND"])
def test_prefixes(layout: str, rng: np.random.Generator) -> None:
    lengths: Any = (30, 30) if layout == "TND" else 30
    form = Form(layout, queries=lengths, keys=lengths, attrs={"sparse_mode": 6})
    checked(form, rng, atten_mask=PREFIX_MASK, prefix=np.array([3, 17]))


@pytest.mark.parametrize("mode", [2, 3, 4])
def test_a_mask_of_keys_beside_the_band(mode: int, rng: np.random.Generator) -> None:
    attrs = {"sparse_mode": mode, "pre_tockens": 20, "next_tockens": 5}
    checked(Form(queries=50, keys=290, attrs=attrs), rng, atten_mask=mask(rng, (2, 1, 1, 290)))


@thinned(shape=[(2, 2, 50, 290), (1, 2, 1, 290), (2, 1, 50, 1)], dtype=list(DTYPES), pse_type=[0, 1])
def test_bias(pse_type: int, shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> None:
    form = Form(dtype=dtype, queries=50, keys=290, attrs={"pse_type": pse_type})
    bias = rng.standard_normal(shape).astype(DTYPES[dtype])
    got = checked(form, rng, real_shift=bias)
    np.testing.assert_array_equal(got["dpse"], np.zeros(shape))


@thinned(pse_type=[2, 3], layout=["BSH", "TND"])
def test_slopes(pse_type: int, layout: str, rng: np.random.Generator) -> None:
    lengths: Any = (70, 20) if layout == "TND" else 70
    form = Form(layout, queries=lengths, keys=lengths, attrs={"pse_type": pse_type})
    checked(form, rng, real_shift=rng.random((2, 2), np.float32), q_start_idx=np.array([4]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sink_and_its_gradient(layout: str, rng: np.random.Generator) -> None:
    lengths: Any = {"queries": (70, 20), "keys": (50, 230)} if layout == "TND" else {"queries": 70, "keys": 230}
    form = Form(layout, heads=4, kv_heads=2, attrs={"sparse_mode": 2}, **lengths)
    got = checked(form, rng, sink=rng.standard_normal(4, np.float32), atten_mask=TRIANGLE)
    assert np.all(got["dsink"] != 0)


@thinned(layout=LAYOUTS, dtype=DTYPES)
def test_rope(layout: str, dtype: str, rng: np.random.Generator) -> None:
    lengths: Any = {"queries": (70, 20), "keys": (50, 230)} if layout == "TND" else {"queries": 70, "keys": 230}
    form = Form(layout, dtype, heads=4, kv_heads=2, size=24, value_size=24, **lengths)
    rope = Form(layout, dtype, heads=4, kv_heads=2, size=8, **lengths).inputs(rng)
    checked(form, rng, query_rope=rope["query"], key_rope=rope["key"])


@thinned(layout=["BSND", "TND"], dtype=["float32", "bfloat16"])
def test_dropout(layout: str, dtype: str, rng: np.random.Generator) -> None:
    lengths: Any = {"queries": (70, 20), "keys": (50, 230)} if layout == "TND" else {"queries": 70, "keys": 230}
    form = Form(layout, dtype, attrs={"keep_prob": 0.7}, **lengths)
    drop = np.packbits(rng.random(2 * 2 * 70 * 230) < 0.7, bitorder="little")
    checked(form, rng, drop_mask=drop)


@thinned(rule=["", "zero", "mean", "nan"], dropped=[False, True], dtype=["float32", "bfloat16"])
def test_rows_without_a_key(rule: str, dropped: bool, dtype: str, rng: np.random.Generator) -> None:
    array = mask(rng, (2, 1, 50, 290))
    array[:, :, 7] = True
    more: Inputs = {"atten_mask": array}
    attrs: dict[str, Any] = {"cpu_empty_rows": rule}
    if dropped:
        more["drop_mask"] = np.packbits(rng.random(4 * 50 * 290) < 0.7, bitorder="little")
        attrs["keep_prob"] = 0.7
    got = checked(Form(dtype=dtype, queries=50, keys=290, attrs=attrs), rng, **more)
    np.testing.assert_array_equal(got["dq"][:, :, 7], 0.0)


@thinned(mode=[1, 4], dropped=[False, True], bias=["", "row", "rows"], dtype=["float32", "bfloat16"])
def test_masked_keys_that_keep_a_score(
    mode: int, dropped: bool, bias: str, dtype: str, rng: np.random.Generator
) -> None:
    """They count in dV, also those beyond a band; what is not finite in their keys is not read. A bias of -1e4 leaves
    some of them no weight, in all rows of a head or in some."""
    attrs = {"sparse_mode": mode, "cpu_mask_value": -3.0, "pre_tockens": 30, "next_tockens": 5}
    form = Form(dtype=dtype, queries=110, keys=290, attrs=attrs)
    inputs: Inputs = form.inputs(rng) | {"atten_mask": mask(rng, (2, 1, 110 if mode == 1 else 1, 290))}
    inputs["atten_mask"][..., 250] = True
    inputs["key"][:, :, 250] = np.inf
    if bias:
        shape = (2, 2, 1 if bias == "row" else 110, 290)
        inputs["real_shift"] = rng.choice([0.5, -1.0, -1e4], shape).astype(inputs["query"].dtype)
        inputs["real_shift"][1, 1] = -1e4
        attrs |= {"pse_type": 0, "cpu_masked_bias": "added"}
    if dropped:
        inputs["drop_mask"] = np.packbits(rng.random(4 * 110 * 290) < 0.7, bitorder="little")
        attrs["keep_prob"] = 0.7
    got = check(*backward(inputs, form.all_attrs | attrs, rng))
    assert np.all(got["dv"] != 0) or bias


@thinned(rule=["", "zero", "infinite"], dtype=["float32", "bfloat16"])
def test_rows_whose_softmax_is_undefined(rule: str, dtype: str, rng: np.random.Generator) -> None:
    bias = rng.standard_normal((1, 2, 50, 290)).astype(np.float32)
    bias[0, 0, 3] = -np.inf
    bias[0, 1, 5, 7] = np.nan
    bias[0, 1, 6, 8] = np.inf
    form = Form(dtype=dtype, queries=50, keys=290, attrs={"pse_type": 0, "cpu_nan_rows": rule})
    checked(form, rng, real_shift=bias)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_and_queries_that_are_not_attended_need_not_be_finite(dtype: str, rng: np.random.Generator) -> None:
    form = Form(dtype=dtype, queries=110, keys=290, attrs={"cpu_empty_rows": "zero"})
    inputs = form.inputs(rng)
    array = mask(rng, (1, 1, 110, 290))
    array[..., 250] = True
    array[..., 100, :] = True
    inputs["key"][:, :, 250] = np.nan
    inputs["value"][:, :, 250] = np.inf
    inputs["query"][:, :, 100, 3] = np.nan
    given, attrs = backward(inputs | {"atten_mask": array}, form.all_attrs, rng)
    given["dy"][:, :, 100, 2] = np.inf
    got = check(given, attrs)
    assert all(np.isfinite(got[name]).all() for name in ("dq", "dk", "dv"))


@pytest.mark.parametrize("order", ["", "same_as_input"])
def test_orders_of_the_statistics(order: str, rng: np.random.Generator) -> None:
    form = Form("TND", heads=4, kv_heads=2, queries=(5, 0, 21), keys=(9, 4, 30))
    check(*backward(form.inputs(rng), form.all_attrs, rng, order))


@pytest.mark.parametrize(
    "wanted", [("dv",), ("dq",), ("dk",), ("dq", "dk"), ("dk", "dv"), ("dpse",), ("dsink",), ("dq_rope", "dsink")]
)
def test_gradients_that_nobody_asks_for(wanted: tuple[str, ...], rng: np.random.Generator) -> None:
    form = Form(queries=50, keys=200)
    inputs, attrs = backward(form.inputs(rng) | {"sink": np.ones(2, np.float32)}, form.all_attrs, rng)
    check(inputs, attrs, wanted)


@thinned(empty=["batch", "queries", "keys", "heads"], layout=["BSND", "BNSD", "SBH"])
def test_empty_tensors(empty: str, layout: str, rng: np.random.Generator) -> None:
    if empty == "heads":
        if layout == "SBH":
            pytest.skip("without heads the head size is not known")
        form = Form(layout, kv_heads=0)
    else:
        form = Form(layout, **{empty: 0})
    inputs, attrs = backward(form.inputs(rng), form.all_attrs, rng)
    got = ops.run(OP, inputs, attrs)
    want = reference.run(OP, inputs, attrs)
    for name in GRADIENTS:
        np.testing.assert_array_equal(got[name], want[name])


def test_tokens_of_no_sequence_get_nothing(rng: np.random.Generator) -> None:
    form = Form("TND", queries=(5, 21), keys=(9, 30))
    inputs = form.inputs(rng)
    for name in ("query", "key", "value"):
        inputs[name] = np.concatenate([inputs[name], np.ones((3, 2, 16), np.float32)])
    given, attrs = backward(inputs, form.all_attrs, rng)
    got = check(given, attrs)
    assert all(not got[name][-3:].any() for name in ("dq", "dk", "dv"))


def test_finite_differences(rng: np.random.Generator) -> None:
    """Of the kernel's own forward pass: sum(dy * attention_out) along random directions. With a step of 1e-2 its third
    derivative gives 1e-4 of the slope at most, and float32 sums of 100 numbers around 1, 1e-7 * 10 / 1e-2, as much."""
    form = Form(heads=4, kv_heads=2, queries=20, keys=25, size=8)
    inputs = form.inputs(rng) | {"atten_mask": mask(rng, (20, 25))}
    forward = ops.run("FlashAttentionScore", inputs, form.all_attrs)
    dy = rng.standard_normal(forward["attention_out"].shape).astype(np.float32)
    given = inputs | {
        "dy": dy,
        "attention_in": forward["attention_out"],
        **{name: forward[name] for name in ("softmax_max", "softmax_sum")},
    }
    got = ops.run(OP, given, form.all_attrs, ["dq", "dk", "dv"])
    for name, gradient in (("query", "dq"), ("key", "dk"), ("value", "dv")):
        direction = rng.standard_normal(inputs[name].shape).astype(np.float32)
        moved = [
            ops.run(
                "FlashAttentionScore",
                inputs | {name: inputs[name] + step * direction},
                form.all_attrs,
                ["attention_out"],
            )["attention_out"]
            for step in (np.float32(1e-2), np.float32(-1e-2))
        ]
        slope = float(np.sum(dy.astype(np.float64) * (moved[0].astype(np.float64) - moved[1]))) / 2e-2
        want = float(np.sum(got[gradient].astype(np.float64) * direction))
        assert abs(slope - want) <= 2e-3 * max(1.0, float(np.linalg.norm(got[gradient]))), (name, slope, want)
