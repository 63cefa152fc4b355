"""A mean of large values is a number although their sum is none; what is not finite stays so, and where it was."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fa_compiler import ops, reference

from .decoding import Form as Decoding
from .problems import OP, Form
from .variants import thinned

pytestmark = pytest.mark.usefixtures("isa")

LARGEST = float(np.finfo(np.float32).max)
TYPES = {np.float32: 2.0**-17, ml_dtypes.bfloat16: 2.0**-6}
"""What is allowed of the largest value: the sums of up to 9000 numbers; bfloat16 rounds probabilities, too."""


def compare(op: str, inputs: dict[str, Any], attrs: dict[str, Any], outputs: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The kernel's results beside those of float64; every column is measured by its own largest number."""
    got, want = ops.run(op, inputs, attrs, outputs), reference.run(op, inputs, attrs, outputs)
    bound = TYPES[inputs["query"].dtype.type]
    for name in outputs:
        found, right = (array.astype(np.float64) for array in (got[name], want[name]))
        special = ~np.isfinite(right)
        np.testing.assert_array_equal(found[special], right[special], err_msg=name)
        assert np.isfinite(found[~special]).all(), name
        axes = tuple(range(right.ndim - 1))
        largest = np.abs(np.where(special, 0.0, right)).max(axis=axes, keepdims=True)
        error = np.abs(np.where(special, 0.0, found - np.where(special, 0.0, right)))
        assert (error <= bound * largest).all(), (name, float((error / np.maximum(largest, 1e-45)).max()))
    return got


def with_large_values(value: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Columns near 1.7e38 and of either sign, near 1, and near 1e-30."""
    size = value.shape[-1]
    levels = np.array([1.7e38, -1.7e38, 1.0, 1e-30])[np.arange(size) % 4]
    return (levels * rng.uniform(0.9, 1.0, value.shape)).astype(value.dtype)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(23)


@thinned(
    lengths=[(1, 40), (3, 9000), (12, 700), (33, 40), (49, 700), (70, 300)],
    dtype=["float32", "bfloat16"],
    outputs=[("attention_out",), ("softmax_sum", "attention_out")],
)
def test_attention(lengths: tuple[int, int], dtype: str, outputs: tuple[str, ...], rng: np.random.Generator) -> None:
    """Few rows, many keys that are cut into chunks, panels and their halves."""
    queries, keys = lengths
    form = Form(dtype=dtype, batch=1, heads=1, kv_heads=1, queries=queries, keys=keys, attrs={"scale_value": 0.1})
    inputs = form.inputs(rng)
    inputs["value"] = with_large_values(inputs["value"], rng)
    compare(OP, inputs, form.all_attrs, outputs)


@thinned(queries=[1, 9, 40], scores=[-105.0, -200.0, -3e4])
def test_far_keys_weigh_nothing(queries: int, scores: float) -> None:
    """exp(-105) of 1e38 is 2.5e-8; a probability as small as the smallest normal number would be worth 1.2."""
    form = Form(batch=1, heads=1, kv_heads=1, queries=queries, keys=40, attrs={"scale_value": 1.0})
    inputs = form.inputs(np.random.default_rng(0))
    inputs["query"] = np.zeros_like(inputs["query"])
    inputs["key"] = np.zeros_like(inputs["key"])
    inputs["query"][..., 0], inputs["key"][..., 1:, 0] = 1.0, scores
    inputs["value"] = np.full_like(inputs["value"], 1e38)
    inputs["value"][..., 0, :] = 1.0
    out = ops.run(OP, inputs, form.all_attrs, ("attention_out",))["attention_out"]
    np.testing.assert_allclose(out, 1.0, rtol=2e-6)


@pytest.mark.parametrize("queries", [2, 40])
def test_infinite_values_beside_large_ones(queries: int, rng: np.random.Generator) -> None:
    """An infinity shows in its column of the rows that attend it, however small its probability is."""
    form = Form(batch=1, heads=1, kv_heads=1, queries=queries, keys=50, attrs={"scale_value": 1.0})
    inputs = form.inputs(rng)
    inputs["value"] = with_large_values(inputs["value"], rng)
    inputs["value"][0, 0, 7, 2] = np.inf
    inputs["value"][0, 0, 9, 3] = np.nan
    inputs["key"][0, 0, 7] = -3.0 * inputs["query"][0, 0, 0]
    mask = np.zeros((queries, 50), np.bool_)
    mask[1, [7, 9]] = True
    found = compare(OP, inputs | {"atten_mask": mask}, form.all_attrs, ("attention_out",))["attention_out"]
    assert np.isinf(found[0, 0, 0, 2]) and np.isnan(found[0, 0, 0, 3]) and np.isfinite(found[0, 0, 1]).all()


@thinned(queries=[3, 40], rule=["mean", "unmasked", "score"])
def test_rows_without_a_key(rule: str, queries: int, rng: np.random.Generator) -> None:
    form = Form(batch=1, heads=1, kv_heads=1, queries=queries, keys=50)
    attrs = {**form.all_attrs, **({"cpu_mask_value": -5.0} if rule == "score" else {"cpu_empty_rows": rule})}
    inputs = form.inputs(rng) | {"atten_mask": np.ones((queries, 50), np.bool_)}
    inputs["value"] = with_large_values(inputs["value"], rng)
    inputs["atten_mask"][0, :20] = False
    compare(OP, inputs, attrs, ("attention_out",))


@thinned(storage=["plain", "list", "pages"], dtype=["float32", "bfloat16"], length=[40, 5000])
def test_decoding(length: int, dtype: str, storage: str, rng: np.random.Generator) -> None:
    form = Decoding(dtype=dtype, length=length, storage=storage, lists=(length, length))
    inputs = form.inputs(rng)
    values = inputs["value"]
    inputs["value"] = (
        [with_large_values(value, rng) for value in values]
        if isinstance(values, list)
        else with_large_values(values, rng)
    )
    compare("IncreFlashAttention", inputs, form.all_attrs, ("attention_out",))
    if storage == "plain":
        inputs["atten_mask"] = np.ones((form.batch, length), np.bool_)  # the mean of all values
        compare("IncreFlashAttention", inputs, form.all_attrs, ("attention_out",))


@thinned(dtype=[np.float32, ml_dtypes.bfloat16], heads=[2, 16])
def test_selected_keys(heads: int, dtype: Any, rng: np.random.Generator) -> None:
    tokens, keys, size = 3, 130, 32
    inputs: dict[str, Any] = {
        "query": rng.standard_normal((1, tokens, heads, size)).astype(dtype),
        "key": rng.standard_normal((1, keys, 1, size)).astype(dtype),
        "value": with_large_values(np.zeros((1, keys, 1, size), dtype), rng),
        "sparse_indices": np.stack([rng.permutation(keys) for _ in range(tokens)]).astype(np.int32)[None, :, None],
    }
    inputs["sparse_indices"][0, 2] = -1
    attrs = {"scale_value": 0.1, "sparse_mode": 0, "attention_mode": 2, "cpu_empty_rows": "mean"}
    compare("SparseFlashAttention", inputs, attrs, ("attention_out",))
    inputs["value"][0, 5, 0, 2] = np.inf
    compare("SparseFlashAttention", inputs, attrs, ("attention_out",))
