"""The gradient sees the probabilities of the forward pass, however large the scores are.

A row of P adds up to 1, so the gradients of all values of a head add up to the rows of dy that read them. At scores of
1e5 a unit in the last place is 1 %, so this holds only where both passes round every score alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fa_compiler import ops, reference

from .problems import DTYPES, TRIANGLE, Form
from .variants import thinned

pytestmark = pytest.mark.usefixtures("isa")

# Of the sums that are compared: float32 adds up some hundred numbers, and 16 bits round each of 33 gradients.
TOLERANCE = {"float32": 2e-6, "float16": 2.0**-8, "bfloat16": 2.0**-5}

# Few rows, rows that are a tail of their own behind whole vectors, and whole blocks.
ROWS = (1, 8, 17, 49)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(17)


def large(form: Form, rng: np.random.Generator, magnitude: float) -> dict[str, Any]:
    """Query and key so long that scores are `magnitude` and beyond."""
    inputs: dict[str, Any] = form.inputs(rng)
    for name in ("query", "key"):
        inputs[name] = (inputs[name].astype(np.float64) * magnitude**0.5).astype(inputs[name].dtype)
    return inputs


def backward(
    inputs: dict[str, Any], attrs: dict[str, Any], rng: np.random.Generator, run: Any = ops.run
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The gradient's inputs from the forward pass of `run`, and its results."""
    forward = run("FlashAttentionScore", inputs, attrs, ("softmax_max", "softmax_sum", "attention_out"))
    out = forward["attention_out"]
    given = {("pse_shift" if name == "real_shift" else name): value for name, value in inputs.items()}
    given |= {"softmax_max": forward["softmax_max"], "softmax_sum": forward["softmax_sum"], "attention_in": out}
    given["dy"] = rng.standard_normal(out.shape).astype(out.dtype)
    return given, run("FlashAttentionScoreGrad", given, attrs, ("dq", "dk", "dv"))


def assert_whole(gradient: np.ndarray, dy: np.ndarray, axes: Sequence[int], dtype: str) -> None:
    """The sums over all rows and heads are equal; `axes` are those of tokens and heads."""
    got, want = (array.astype(np.float64).sum(axis=tuple(axes)) for array in (gradient, dy))
    bound = TOLERANCE[dtype] * np.abs(dy.astype(np.float64)).sum(axis=tuple(axes)).max()
    assert np.abs(got - want).max() <= bound


@pytest.mark.parametrize("queries", ROWS)
@pytest.mark.parametrize(
    ("dtype", "magnitude"), [("float32", 1e5), ("float32", 1e9), ("float16", 1e5), ("bfloat16", 1e9)]
)
def test_rows_of_probabilities_add_up_to_one(
    dtype: str, magnitude: float, queries: int, rng: np.random.Generator
) -> None:
    form = Form(dtype=dtype, heads=4, kv_heads=2, queries=queries, keys=33, size=64)
    given, found = backward(large(form, rng, magnitude), form.all_attrs, rng)
    assert np.abs(given["softmax_max"]).max() > 1e5
    assert_whole(found["dv"], given["dy"], (0, 1, 2), dtype)
    for gradient in found.values():
        assert np.isfinite(gradient.astype(np.float64)).all()


@thinned(layout=["BSH", "SBH", "BSND", "TND"], dtype=list(DTYPES))
def test_layouts(layout: str, dtype: str, rng: np.random.Generator) -> None:
    lengths: Any = {"queries": (3, 49), "keys": (33, 20)} if layout == "TND" else {"queries": 5, "keys": 33}
    form = Form(layout, dtype, heads=2, kv_heads=2, size=64, **lengths)
    given, found = backward(large(form, rng, 1e5), form.all_attrs, rng)
    folded = layout in ("BSH", "SBH")
    dv, dy = (x.reshape(*x.shape[:-1], 2, 64) if folded else x for x in (found["dv"], given["dy"]))
    assert_whole(dv, dy, range(dv.ndim - 1), dtype)


@thinned(
    queries=[5, 17], feature=["bias inside", "bias outside", "slopes", "mask", "rope", "triangle", "negative scale"]
)
def test_features(feature: str, queries: int, rng: np.random.Generator) -> None:
    keys = 33 if feature != "slopes" else queries
    form = Form(heads=2, queries=queries, keys=keys, size=64)
    inputs, attrs = large(form, rng, 1e5), form.all_attrs
    if feature.startswith("bias"):
        inputs["real_shift"] = rng.standard_normal((1, 2, queries, keys)).astype(np.float32) * 1e4
        attrs["pse_type"] = 1 if feature == "bias inside" else 0
    elif feature == "slopes":
        inputs["real_shift"] = np.array([1234.5, 0.3], np.float32)
        attrs["pse_type"] = 2
    elif feature == "mask":
        inputs["atten_mask"] = rng.random((queries, keys)) < 0.3
        inputs["atten_mask"][:, 0] = False
    elif feature == "triangle":
        inputs["atten_mask"], attrs["sparse_mode"] = TRIANGLE, 2
    elif feature == "rope":
        for name in ("query", "key"):
            inputs[f"{name}_rope"] = inputs[name][..., :17].copy() * np.float32(3)
    else:
        attrs["scale_value"] = -attrs["scale_value"]
    given, found = backward(inputs, attrs, rng)
    assert_whole(found["dv"], given["dy"], (0, 1, 2), "float32")


def test_probabilities_never_exceed_those_of_the_statistics(rng: np.random.Generator) -> None:
    """With a softmax_max that is less than the scores P is 1 / softmax_sum, as for the largest score."""
    form = Form(heads=2, queries=5, keys=7, size=16)
    given, _ = backward(large(form, rng, 1e5), form.all_attrs, rng)
    given["softmax_max"][:] = -1e8
    given["softmax_sum"][:] = 4.0
    for run in (ops.run, reference.run):
        found = run("FlashAttentionScoreGrad", given, form.all_attrs, ("dq", "dk", "dv"))
        np.testing.assert_allclose(
            found["dv"], np.broadcast_to(given["dy"].sum(2, keepdims=True) / 4, found["dv"].shape), rtol=1e-5, atol=1e-5
        )
        assert np.isfinite(found["dq"]).all() and np.isfinite(found["dk"]).all()


def test_nan_stays_where_it_is(rng: np.random.Generator) -> None:
    """A NaN score, or a NaN among the statistics, is no reason to take softmax_max for the score."""
    form = Form(heads=2, queries=5, keys=7, size=16)
    inputs = large(form, rng, 1e5)
    inputs["query"][0, 0, 1, 3] = np.nan
    given, found = backward(inputs, form.all_attrs, rng)
    given["softmax_max"][1, 1, 2] = np.nan
    found = ops.run("FlashAttentionScoreGrad", given, form.all_attrs, ("dq", "dk", "dv"))
    want = reference.run("FlashAttentionScoreGrad", given, form.all_attrs, ("dq", "dk", "dv"))
    for name, value in want.items():
        np.testing.assert_array_equal(np.isnan(found[name]), np.isnan(value), name)
    assert np.isnan(found["dq"]).any(axis=-1).sum() == 2


def test_the_reference_keeps_to_its_own_statistics(rng: np.random.Generator) -> None:
    """float32 rounds its softmax_max by more than 1 at 1e9."""
    form = Form(heads=2, queries=9, keys=33, size=64)
    given, found = backward(large(form, rng, 1e9), form.all_attrs, rng, reference.run)
    assert_whole(found["dv"], given["dy"], (0, 1, 2), "float32")


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("heads", [1, 3, 16])
def test_selected_keys(heads: int, dtype: str, rng: np.random.Generator) -> None:
    tokens, keys, count = 7, 60, 50
    query, key = (
        (rng.standard_normal(shape) * (300.0 if dtype == "float16" else 3e4)).astype(DTYPES[dtype])
        for shape in ((1, tokens, heads, 64), (1, keys, 1, 64))
    )
    inputs = {
        "query": query,
        "key": key,
        "value": rng.standard_normal((1, keys, 1, 64)).astype(DTYPES[dtype]),
        "sparse_indices": np.stack([rng.permutation(keys)[:count] for _ in range(tokens)])
        .astype(np.int32)
        .reshape(1, tokens, 1, count),
    }
    attrs = {"scale_value": 1.3, "sparse_mode": 0, "sparse_block_size": 1}
    out = ops.run("SparseFlashAttention", inputs, attrs | {"attention_mode": 2, "return_softmax_lse": True})
    given = inputs | {name: out[name] for name in ("softmax_max", "softmax_sum")} | {"out": out["attention_out"]}
    given["d_out"] = rng.standard_normal(query.shape).astype(query.dtype)
    found = ops.run("SparseFlashAttentionGrad", given, attrs | {"layout": "BSND"})
    assert_whole(found["d_value"], given["d_out"], (0, 1, 2), dtype)
