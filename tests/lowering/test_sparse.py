"""The sparse family's kernels against the float64 reference, on every instruction set, and what they refuse."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from fa_compiler import ops, reference
from fa_compiler.lowering.ort import register_custom_ops
from fa_compiler.lowering.ort.eager import compute
from fa_compiler.op_registry import DOMAIN, NodeError, as_arrays, full_attrs, get, place_inputs
from tests import sparse_problems as problems
from tests.examples import examples

from .refusals import refused

UNIT = {np.dtype(np.float32): 2.0**-24, np.dtype(np.float16): 2.0**-11, np.dtype(ml_dtypes.bfloat16): 2.0**-8}
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)

# The fixture only sets an environment variable, which holds for all examples of a test.
sweep = settings(
    max_examples=examples(8),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)
seeds = given(seed=st.integers(0, 2**31), dtype=st.sampled_from(DTYPES))


EMPTY_ROW = 1e37
"""The softmax_max of an empty row is larger."""


def terms(inputs: Any, attrs: Any) -> dict[str, float]:
    """How large the terms of a gradient are that is a difference: of P dO V and P dO O for the scores, and of two
    probabilities that both may be 1 for the indexer; times how often they are rounded. A list of one key leaves nothing
    but their rounding."""

    def norm(name: str) -> float:
        return _norm(inputs, name)

    if "query_index" in inputs:
        score = norm("query_index") * norm("key_index")
        weight = float(np.abs(_finite(inputs, "weight")).max(initial=0.0))
        sides = {"query_index": norm("key_index") * weight, "key_index": norm("query_index") * weight}
        return {"d_weight": 4 * score, **{f"d_{name}": 4 * size for name, size in sides.items()}}
    if "d_out" not in inputs:
        return {}
    size = attrs["scale_value"] * norm("d_out") * (norm("value") + norm("out"))
    size *= 4 + math.sqrt(inputs["d_out"].shape[-1])
    pairs = (("query", "key"), ("query_rope", "key_rope"))
    others = {name: other for pair in pairs for name, other in (pair, pair[::-1]) if name in inputs}
    return {f"d_{name}": size * norm(other) for name, other in others.items()}


GATES = (
    (("query_index", "key_index", "weight"), ("d_query_index", "d_key_index"), None),
    (("query", "key", "weights"), ("dq", "dk"), "dy"),
)
"""Of each indexer's gradient: query, key and weights, their gradients, and what it is given (1 where that is the
difference of two probabilities)."""


def gates(inputs: Any) -> dict[str, np.ndarray]:
    """What each row of a gradient may have or lack where a score is 0 but for its rounding: the ReLU is open or not."""
    found: dict[str, np.ndarray] = {}
    for names, gradients, above in GATES:
        if not inputs.keys() >= set(names):
            continue
        rows, keys, weights = (_finite(inputs, name) for name in names)
        width = rows.shape[-1]
        scores = rows.reshape(-1, width) @ keys.reshape(-1, width).T
        norms = [np.sqrt((each**2).sum(axis=-1)).reshape(-1) for each in (rows, keys)]
        open_or_not = np.abs(scores) <= (math.sqrt(width) + 4) * 2.0**-24 * np.multiply.outer(*norms)
        size = np.abs(weights).max(initial=0.0)
        size *= 1.0 if above is None else np.abs(_finite(inputs, above)).max(initial=0.0)
        for side, (gradient, own) in enumerate(zip(gradients, (rows, keys), strict=True)):
            count = open_or_not.sum(axis=1 - side).reshape(*own.shape[:-1], 1)
            found[gradient] = count * size * norms[1 - side].max(initial=0.0)
    return found


def _finite(inputs: Any, name: str) -> np.ndarray:
    numbers = np.asarray(inputs.get(name, inputs["key"] if name == "value" else 0.0), np.float64)
    return np.where(np.isfinite(numbers), numbers, 0.0)


def _norm(inputs: Any, name: str) -> float:
    return float(np.sqrt((_finite(inputs, name) ** 2).sum(axis=-1)).max(initial=0.0))


def rounding(inputs: Any, attrs: Any) -> float:
    """What the rounding of two scores does to a probability, relative to itself (see `problems.bounds`)."""
    pairs = [(query, query.replace("query", "key")) for query in ("query", "query_rope") if query in inputs]
    depth = sum(inputs[query].shape[-1] for query, _ in pairs)
    score = sum(_norm(inputs, query) * _norm(inputs, key) for query, key in pairs)
    return 2 * (math.sqrt(depth) + 4) * 2.0**-24 * abs(attrs.get("scale_value", 0.0)) * score


def compare(op: str, inputs: Any, attrs: Any, cann: str | None = None) -> None:
    """Every output, NaN and infinities included. The bound: inputs are of order 1 and sums at most a few hundred long,
    so float32 arithmetic is wrong by some 1e-6 of the largest number, by more where scores are large, and 16 bits are
    rounded once more. A gradient whose terms cancel is wrong by a few roundings of these. Where bfloat16 is multiplied
    in pairs, probabilities and their gradients are rounded to it, too (as on the device): each by 2**-9 of itself, and
    numbers made of them by less than 2**-8 of the largest."""
    expected = reference.run(op, inputs, attrs, dtype="float64", cann=cann)
    found = ops.run(op, inputs, attrs, cann=cann)
    cancelling, turning = terms(inputs, attrs), gates(inputs)
    for name, right in expected.items():
        assert found[name].shape == right.shape, name
        value = found[name].astype(np.float64)
        special = ~np.isfinite(right)
        np.testing.assert_array_equal(value[special], right[special], err_msg=name)
        sizes = np.abs(right[~special])
        # The statistic of an empty row is exact and no measure for the others.
        largest = (sizes[sizes < EMPTY_ROW] if name == "softmax_max" else sizes).max(initial=0.0)
        rounded = 2.0**-8 * largest if found[name].dtype == ml_dtypes.bfloat16 else 0.0
        bound = (4e-6 + rounding(inputs, attrs)) * max(largest, 1.0) + 2.0**-24 * cancelling.get(name, 0.0)
        bound = bound + UNIT[found[name].dtype] * np.abs(right[~special]) + rounded
        bound = bound + np.broadcast_to(turning.get(name, 0.0), right.shape)[~special]
        # What is beyond the type's range is infinite there.
        most = float(ml_dtypes.finfo(found[name].dtype).max)
        worst = np.abs(value[~special].clip(-most, most) - right[~special].clip(-most, most)) - bound
        assert (worst <= 0).all(), (name, float(worst.max()))


@seeds
@sweep
@pytest.mark.usefixtures("isa")
def test_attention(seed: int, dtype: Any) -> None:
    compare("SparseFlashAttention", *problems.attention(seed, dtype))


@seeds
@sweep
@pytest.mark.usefixtures("isa")
def test_attention_gradient(seed: int, dtype: Any) -> None:
    compare("SparseFlashAttentionGrad", *problems.attention_grad(seed, dtype))


@seeds
@sweep
@pytest.mark.usefixtures("isa")
def test_attention_gradient_in_the_order_of_2026(seed: int, dtype: Any) -> None:
    compare("SparseFlashAttentionGrad", *problems.attention_grad(seed, dtype, reordered=True), problems.REORDERED)


@seeds
@sweep
@pytest.mark.usefixtures("isa")
def test_index_gradient(seed: int, dtype: Any) -> None:
    compare("LightningIndexerGrad", *problems.indexer_grad(seed, dtype))


@seeds
@sweep
@pytest.mark.usefixtures("isa")
def test_index_loss(seed: int, dtype: Any) -> None:
    compare("SparseLightningIndexerGradKLLoss", *problems.indexer_loss(seed, dtype))


@seeds
@pytest.mark.parametrize("floor", [0.0, 0.02])
@sweep
@pytest.mark.usefixtures("isa")
def test_index_loss_with_another_floor(seed: int, dtype: Any, floor: float) -> None:
    """None, or one that many probabilities are below."""
    inputs, attrs = problems.indexer_loss(seed, dtype)
    compare("SparseLightningIndexerGradKLLoss", inputs, attrs | {"cpu_loss_floor": floor})


@seeds
@sweep
@pytest.mark.usefixtures("isa")
def test_indexer(seed: int, dtype: Any) -> None:
    """Two scores that differ by less than their rounding may change places; a listed key's own score is right."""
    inputs, attrs = problems.indexer(seed, dtype)
    found = ops.run("LightningIndexer", inputs, attrs)["sparse_indices"]
    if "block_table" in inputs:  # beside which there are no values
        inputs, attrs = problems.unpaged(inputs, attrs, "layout_key")
    everything = reference.run(
        "LightningIndexer", inputs, attrs | {"sparse_count": 200, "return_values": True}, dtype="float64"
    )
    scores = {}
    for place in np.ndindex(found.shape[:-1]):
        listed = everything["sparse_indices"][place].astype(int)
        scores = dict(zip(listed.tolist(), everything["sparse_values"][place].tolist(), strict=True))
        count = min(attrs["sparse_count"], int((listed >= 0).sum()))
        assert (found[place][count:] == -1).all()
        assert len(set(found[place][:count].tolist())) == count
        best = everything["sparse_values"][place][:count]
        chosen = np.array([scores[key] for key in found[place][:count].tolist()])
        np.testing.assert_allclose(chosen, best, rtol=0, atol=2e-5 * max(1.0, np.abs(best).max(initial=0.0)))


@pytest.mark.usefixtures("isa")
def test_values_are_the_scores_of_the_listed_keys() -> None:
    rng = np.random.default_rng(3)
    inputs = {
        "query": rng.standard_normal((1, 5, 20, 24)).astype(np.float32),
        "key": rng.standard_normal((1, 300, 1, 24)).astype(np.float32),
        "weights": rng.standard_normal((1, 5, 20)).astype(np.float32),
    }
    found = ops.run("LightningIndexer", inputs, {"sparse_count": 100, "return_values": True, "sparse_mode": 0})
    scores = np.einsum(
        "bth,bthj->btj", inputs["weights"], np.maximum(np.einsum("bthd,bjnd->bthj", inputs["query"], inputs["key"]), 0)
    )
    for i in range(5):
        listed = found["sparse_indices"][0, i, 0]
        np.testing.assert_allclose(found["sparse_values"][0, i, 0], scores[0, i, listed], atol=1e-3)
        assert (np.diff(found["sparse_values"][0, i, 0]) <= 0).all()


@pytest.mark.usefixtures("isa")
def test_equal_scores_are_listed_by_position() -> None:
    """Many scores are 0 (relu), some of them -0: ties, which TopK of ONNX breaks by position, too."""
    keys = 700
    key = np.zeros((1, keys, 1, 1), np.float32)
    key[0, 350:360] = 1
    key[0, 600:] = np.nan_to_num(-1.0)
    inputs = {"query": np.ones((1, 1, 1, 1), np.float32), "key": key, "weights": np.ones((1, 1, 1), np.float32)}
    for weight in (1.0, -1.0):
        inputs["weights"][:] = weight
        found = ops.run("LightningIndexer", inputs, {"sparse_count": 40, "sparse_mode": 0})["sparse_indices"][0, 0, 0]
        zeros = [j for j in range(keys) if not 350 <= j < 360]
        right = [*range(350, 360), *zeros[:30]] if weight > 0 else zeros[:40]
        assert found.tolist() == right


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("count", [3, 40, 700])
@pytest.mark.parametrize("first", [False, True])
def test_where_keys_rank_whose_score_is_nan(first: bool, count: int) -> None:
    """Behind -inf, or in front of infinity, whatever the bits of NaN: infinity times 0 has its sign bit set. Equal ones
    are listed by position. ONNX Runtime's TopK puts them first, too."""
    keys = 700
    key = np.random.default_rng(3).standard_normal((1, keys, 1, 1)).astype(np.float32)
    key[0, [77, 500, 699]], key[0, [5, 600]] = np.nan, np.inf
    key[0, [8, 640]] = -np.float32(np.nan)
    query = np.ones((1, 2, 1, 1), np.float32)
    inputs = {"query": query, "key": key, "weights": np.array([[[1.0], [-1.0]]], np.float32)}
    attrs: dict[str, Any] = {"sparse_count": count, "sparse_mode": 0, "return_values": True}
    attrs |= {"cpu_nan_scores": "first"} if first else {}
    found, right = ops.run("LightningIndexer", inputs, attrs), reference.run("LightningIndexer", inputs, attrs)
    for name in ("sparse_indices", "sparse_values"):
        np.testing.assert_array_equal(found[name], right[name].astype(found[name].dtype), err_msg=name)
    listed = found["sparse_indices"][0, :, 0]
    undefined = [8, 77, 500, 640, 699]
    for row in listed:
        if first:
            assert row[:5].tolist() == undefined[:count]
        elif count == keys:
            assert row[-5:].tolist() == undefined
        else:
            assert not set(undefined) & set(row.tolist())
    if first:
        scores = np.maximum(key[0, :, 0, 0], 0) * inputs["weights"][0]
        for row, weighted in zip(listed, scores, strict=True):
            np.testing.assert_array_equal(row, np.lexsort((-weighted, ~np.isnan(weighted)))[:count])


@pytest.mark.usefixtures("isa")
def test_long_lists_and_rows_of_many_tasks() -> None:
    """More keys than a block, more rows than two chunks keep, all keys in random order and then twice."""
    rng = np.random.default_rng(5)
    tokens, heads, keys = 100, 20, 500
    inputs = {
        "query": rng.standard_normal((tokens, heads, 40)).astype(np.float32),
        "key": rng.standard_normal((keys, 1, 40)).astype(np.float32),
        "value": rng.standard_normal((keys, 1, 24)).astype(np.float32),
        "sparse_indices": np.stack(
            [np.concatenate([rng.permutation(keys), rng.permutation(keys)[:9]]) for _ in range(tokens)]
        )
        .astype(np.int32)
        .reshape(tokens, 1, -1),
        "actual_seq_lengths_query": np.array([tokens], np.int32),
        "actual_seq_lengths_kv": np.array([keys], np.int32),
    }
    attrs = {"scale_value": 0.1, "sparse_block_size": 1, "sparse_mode": 0}
    packed = {"layout_query": "TND", "layout_kv": "TND", "attention_mode": 2, "return_softmax_lse": True}
    compare("SparseFlashAttention", inputs, attrs | packed)
    # Without the repeated entries, which the gradient reads and the forward pass does not: all keys have been listed.
    inputs["sparse_indices"] = inputs["sparse_indices"][..., :keys]
    result = reference.run("SparseFlashAttention", inputs, attrs | packed)
    given = inputs | {
        "d_out": rng.standard_normal((tokens, heads, 24)).astype(np.float32),
        "out": result["attention_out"],
    }
    given |= {name: result[name] for name in ("softmax_max", "softmax_sum")}
    compare("SparseFlashAttentionGrad", given, attrs | {"layout": "TND"})


def many_keys(tokens: int, heads: int, keys: int, count: int, dtype: Any = np.float32) -> tuple[Any, Any]:
    """A gradient: rows list `count` of many keys, some of them twice; each of two key heads has its own lists."""
    rng = np.random.default_rng(keys)
    shapes = {"query": (tokens, heads, 20), "key": (keys, 2, 20), "value": (keys, 2, 32)}
    inputs: Any = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    inputs |= {
        "sparse_indices": rng.integers(0, keys, (tokens, 2, count)).astype(np.int32),
        "actual_seq_lengths_query": np.array([tokens], np.int32),
        "actual_seq_lengths_kv": np.array([keys], np.int32),
    }
    attrs = {"scale_value": 0.1, "sparse_block_size": 1, "sparse_mode": 0}
    packed = {"layout_query": "TND", "layout_kv": "TND", "attention_mode": 2, "return_softmax_lse": True}
    result = reference.run("SparseFlashAttention", inputs, attrs | packed)
    inputs["d_out"] = rng.standard_normal((tokens, heads, 32)).astype(dtype)
    inputs |= {"out": result["attention_out"], **{name: result[name] for name in ("softmax_max", "softmax_sum")}}
    return inputs, attrs | {"layout": "TND"}


MANY_KEYS = {
    "ranges": (9, 4, 5000, 300),
    "ranges_and_chunks": (140, 40, 4500, 100),
    "few_in_a_range": (5, 4, 9000, 8),
    "few_in_a_range_and_chunks": (350, 60, 9000, 8),
}
"""Keys of several ranges, in one chunk of rows and in several. Rows that list few keys of a range have no ranges."""


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("sizes", MANY_KEYS.values(), ids=MANY_KEYS.keys())
def test_gradients_of_many_keys(sizes: tuple[int, int, int, int]) -> None:
    compare("SparseFlashAttentionGrad", *many_keys(*sizes))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_gradients_of_many_keys_in_16_bits(dtype: Any) -> None:
    compare("SparseFlashAttentionGrad", *many_keys(*MANY_KEYS["ranges"], dtype))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("heads", [1, 3, 6, 8, 13, 16, 40])
def test_rows_read_in_place(heads: int, dtype: Any) -> None:
    """Whole vectors of float32, or of bfloat16 for more heads than eight, are read where they lie: no number of a key
    that is not listed may be read with them; a key that is listed twice gets both gradients."""
    rng = np.random.default_rng(heads)
    tokens, keys, width, rope = 3, 130, 64, 32
    listed = rng.permutation(keys)[:70]
    latent, key_rope = (rng.standard_normal((keys, 1, n)).astype(dtype) for n in (width, rope))
    for tensor in (latent, key_rope):
        tensor[np.setdiff1d(np.arange(keys), listed)] = np.nan
    inputs: Any = {
        "query": rng.standard_normal((tokens, heads, width)).astype(dtype),
        "key": latent,
        "sparse_indices": np.stack([np.append(rng.permutation(listed), listed[:5]) for _ in range(tokens)])
        .astype(np.int32)
        .reshape(tokens, 1, -1),
        "query_rope": rng.standard_normal((tokens, heads, rope)).astype(dtype),
        "key_rope": key_rope,
        "actual_seq_lengths_query": np.array([tokens], np.int32),
        "actual_seq_lengths_kv": np.array([keys], np.int32),
    }
    attrs = {"scale_value": 0.1, "sparse_block_size": 1, "sparse_mode": 0}
    packed = {"layout_query": "TND", "layout_kv": "TND", "attention_mode": 2, "return_softmax_lse": True}
    for value in (latent, latent[:, :, ::-1].copy()):
        given = inputs | {"value": value}
        compare("SparseFlashAttention", given, attrs | packed)
        result = reference.run("SparseFlashAttention", given, attrs | packed)
        given |= {"d_out": rng.standard_normal((tokens, heads, width)).astype(dtype)}
        given |= {"out": result["attention_out"]} | {name: result[name] for name in ("softmax_max", "softmax_sum")}
        compare("SparseFlashAttentionGrad", given, attrs | {"layout": "TND"})
    given |= {"value": None, "sinks": rng.standard_normal(heads).astype(np.float32)}
    compare("SparseFlashAttentionGrad", given, attrs | {"layout": "TND"}, problems.REORDERED)


@pytest.mark.usefixtures("isa")
def test_index_gradients_of_many_keys() -> None:
    """Keys of several ranges and rows of several chunks. The numbers are quarters: a score of 0 is 0 in any order."""
    rng = np.random.default_rng(3)
    tokens, heads, keys, count = 130, 64, 4500, 200
    inputs: Any = {
        name: (rng.integers(-8, 9, shape) / 4).astype(np.float32)
        for name, shape in {
            "query": (1, tokens, heads, 20),
            "key": (1, keys, 1, 20),
            "weights": (1, tokens, heads),
            "dy": (1, tokens, count),
        }.items()
    }
    lists = [rng.permutation(keys - tokens)[:count] for _ in range(tokens)]
    inputs["sparse_indices"] = np.stack(lists).astype(np.int32).reshape(1, tokens, 1, count)
    compare("LightningIndexerGrad", inputs, {"headNum": heads})


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("heads", [1, 9, 16, 33, 64])
@pytest.mark.parametrize("width", [32, 128])
def test_index_heads_of_bfloat16_pairs(heads: int, width: int) -> None:
    """More keys than a block, an odd number of them, and the sizes at which bfloat16 is multiplied in pairs."""
    rng = np.random.default_rng(heads)
    tokens, keys, count = 5, 190, 77
    inputs: Any = {
        "query": rng.standard_normal((1, tokens, heads, width)).astype(ml_dtypes.bfloat16),
        "key": rng.standard_normal((1, keys, 1, width)).astype(ml_dtypes.bfloat16),
        "weights": (rng.standard_normal((1, tokens, heads)) / heads).astype(ml_dtypes.bfloat16),
        "sparse_indices": np.stack([rng.permutation(keys - tokens)[:count] for _ in range(tokens)])
        .astype(np.int32)
        .reshape(1, tokens, 1, count),
        "dy": rng.standard_normal((1, tokens, count)).astype(ml_dtypes.bfloat16),
    }
    compare("LightningIndexerGrad", inputs, {"headNum": heads})
    attended: Any = {
        "query": rng.standard_normal((1, tokens, 20, 64)).astype(ml_dtypes.bfloat16),
        "key": rng.standard_normal((1, keys, 1, 64)).astype(ml_dtypes.bfloat16),
        "sparse_indices": inputs["sparse_indices"],
    }
    attrs = {"scale_value": 0.125, "return_softmax_lse": True, "attention_mode": 2}
    result = reference.run("SparseFlashAttention", attended | {"value": attended["key"]}, attrs)
    loss = attended | {f"{name}_index": inputs[name] for name in ("query", "key")} | {"weight": inputs["weights"]}
    loss |= {name: result[name] for name in ("softmax_max", "softmax_sum")}
    compare("SparseLightningIndexerGradKLLoss", loss, {"scale_value": 0.125, "layout": "BSND"})


PROBLEMS: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("SparseFlashAttention", problems.attention),
    ("SparseFlashAttentionGrad", problems.attention_grad),
    ("LightningIndexer", problems.indexer),
    ("LightningIndexerGrad", problems.indexer_grad),
    ("SparseLightningIndexerGradKLLoss", problems.indexer_loss),
)


@pytest.mark.parametrize(("op", "make"), PROBLEMS, ids=[op for op, _ in PROBLEMS])
def test_threads_change_no_bit(op: str, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums into keys are split by keys and columns, not among threads; so the number of threads does not show."""
    for seed in range(6):
        same_with_any_threads(op, *make(seed, np.float32), monkeypatch)


@pytest.mark.parametrize("sizes", MANY_KEYS.values(), ids=MANY_KEYS.keys())
def test_threads_change_no_bit_of_many_keys(sizes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    same_with_any_threads("SparseFlashAttentionGrad", *many_keys(*sizes), monkeypatch)


def same_with_any_threads(op: str, inputs: Any, attrs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fa_compiler.lowering.ort import eager

    results = []
    for threads in (1, 2, 5):
        original = ort.SessionOptions

        def options(threads: int = threads, original: Any = original) -> Any:
            made = original()
            made.intra_op_num_threads = threads
            return made

        monkeypatch.setattr(eager.ort, "SessionOptions", options)
        eager._session.cache_clear()
        results.append(ops.run(op, inputs, attrs))
        monkeypatch.setattr(eager.ort, "SessionOptions", original)
    eager._session.cache_clear()
    for name, value in results[0].items():
        for other in results[1:]:
            np.testing.assert_array_equal(value, other[name])


def test_a_kernel_may_be_called_by_several_threads() -> None:
    inputs, attrs = problems.attention_grad(11, np.float32)
    expected = ops.run("SparseFlashAttentionGrad", inputs, attrs)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: ops.run("SparseFlashAttentionGrad", inputs, attrs), range(16)):
            for name, value in expected.items():
                np.testing.assert_array_equal(value, found[name])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("heads", [1, 20])
def test_a_block_of_scores_of_minus_infinity_leaves_no_trace(heads: int) -> None:
    """As a softmax over all keys at once: NaN only where every score of the row is -inf."""
    rng = np.random.default_rng(4)
    key = rng.standard_normal((1, 300, 1, 1)).astype(np.float32)
    key[0, :200] = -np.inf
    inputs = {
        "query": np.ones((1, 2, heads, 1), np.float32),
        "key": key,
        "value": rng.standard_normal((1, 300, 1, 5)).astype(np.float32),
        "sparse_indices": np.stack([np.arange(300), np.arange(300)]).astype(np.int32).reshape(1, 2, 1, 300),
    }
    inputs["sparse_indices"][0, 1, 0, 150:] = -1
    attrs = {"scale_value": 1.0, "sparse_mode": 0, "attention_mode": 2}
    compare("SparseFlashAttention", inputs, attrs)


@pytest.mark.usefixtures("isa")
def test_each_output_may_be_the_only_one() -> None:
    for op, make in PROBLEMS:
        inputs, attrs = make(7, np.float32)
        together = ops.run(op, inputs, attrs)
        for name, value in together.items():
            np.testing.assert_array_equal(ops.run(op, inputs, attrs, [name])[name], value, err_msg=f"{op}: {name}")


def test_both_orders_of_the_gradient_in_one_model() -> None:
    """ONNX Runtime tells them apart by their types, and so does the reference."""
    op = "SparseFlashAttentionGrad"
    inputs, attrs = problems.attention_grad(3, np.float16)
    specs = [get(op, name) for name in ("opdef_2025_12", problems.REORDERED)]
    nodes, results = [], []
    for i, spec in enumerate(specs):
        names = place_inputs(spec, {name: name for name in inputs})
        outputs = [f"{name}_{i}" for name in spec.output_names if name[2:] in inputs]
        node = helper.make_node(op, [name or "" for name in names], outputs, domain=DOMAIN)
        node.attribute.extend(helper.make_attribute(*item) for item in full_attrs(spec, attrs).items())
        nodes.append(node)
        results += [helper.make_tensor_value_info(name, TensorProto.FLOAT16, None) for name in outputs]
    given = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), None)
        for name, array in inputs.items()
    ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(helper.make_graph(nodes, "both", given, results), opset_imports=opsets, ir_version=8)
    options = ort.SessionOptions()
    register_custom_ops(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found = session.run(None, inputs)
    expected = reference.evaluator(model).run(None, inputs)
    half = len(results) // 2
    for value, again, right in zip(found[:half], found[half:], expected[half:], strict=True):
        np.testing.assert_array_equal(value, again)
        np.testing.assert_allclose(value.astype(np.float64), right.astype(np.float64), atol=0.02)
    with pytest.raises(NodeError, match="needs the input value"):
        ops.run(op, {**inputs, "value": None}, attrs)
    _, text = refused(op, {**inputs, "sinks": np.zeros(999, np.float32)}, attrs, problems.REORDERED)
    assert re.search(r"input sinks has shape \[999\], .*\(SFAG.3\)", text), text


def test_weights_may_be_float_beside_halfs() -> None:
    inputs, attrs = problems.indexer(4, np.float16)
    inputs["weights"] = inputs["weights"].astype(np.float32)
    attrs["return_values"] = attrs["layout_key"] != "PA_BSND"
    found, right = (module.run("LightningIndexer", inputs, attrs) for module in (ops, reference))
    np.testing.assert_allclose(found["sparse_values"], right["sparse_values"], rtol=2e-3, atol=2e-3)
    inputs, attrs = problems.indexer_loss(4, np.float16)
    inputs["weight"] = inputs["weight"].astype(np.float32)
    compare("SparseLightningIndexerGradKLLoss", inputs, attrs)
    assert ops.run("SparseLightningIndexerGradKLLoss", inputs, attrs)["d_weight"].dtype == np.float32


def test_no_tokens() -> None:
    inputs, attrs = problems.attention_grad(0, np.float32)
    empty = {name: value for name, value in inputs.items() if not name.startswith("actual")}
    for name in ("query", "query_rope", "d_out", "out", "sparse_indices", "softmax_max", "softmax_sum"):
        if name in empty:
            shape = list(empty[name].shape)
            shape[1 if attrs["layout"] == "TND" and "softmax" in name else -3 if "softmax" not in name else -2] = 0
            empty[name] = np.zeros(shape, empty[name].dtype)
    if attrs["layout"] == "TND":
        empty |= {"actual_seq_lengths_query": np.array([0], np.int32)}
        empty |= {"actual_seq_lengths_kv": np.array([len(empty["key"])], np.int32)}
    found = ops.run("SparseFlashAttentionGrad", empty, attrs)
    assert found["d_query"].size == 0
    assert not found["d_key"].any()
    assert not found["d_value"].any()


def changed(op: str, seed: int, layout: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first problem from `seed` on in that layout, without pages."""
    make = dict(PROBLEMS)[op]
    while True:
        inputs, attrs = make(seed, np.float32)
        if attrs.get("layout", attrs.get("layout_query")) == layout and "block_table" not in inputs:
            return inputs, attrs
        seed += 1


REFUSED = [
    ("SparseFlashAttention", {}, {"attention_mode": 0}, "SFA.5"),
    ("SparseFlashAttention", {}, {"sparse_mode": 4}, "SFA.7"),
    ("SparseFlashAttention", {}, {"pre_tokens": 5}, "SFA.7"),
    ("SparseFlashAttention", {}, {"sparse_block_size": 0}, "SFA.8"),
    ("SparseFlashAttention", {}, {"layout_query": "SBH"}, "SFA.2"),
    ("SparseFlashAttention", {}, {"layout_kv": "TND"}, "SFA.2"),
    ("SparseFlashAttention", {}, {"layout_kv": "PA_BSND", "return_softmax_lse": True}, "SFA.13"),
    ("SparseFlashAttention", {}, {"cpu_empty_rows": "unmasked", "return_softmax_lse": False}, "SFA.9"),
    ("SparseFlashAttention", {"value": np.zeros((1, 2, 3, 4), np.float32)}, {}, "SFA.4"),
    ("SparseFlashAttention", {"query": np.zeros((2, 3, 4), np.float32)}, {}, "SFA.2"),
    ("SparseFlashAttention", {"sparse_indices": np.zeros((1, 1, 1, 1, 1), np.int32)}, {}, "SFA.9"),
    ("SparseFlashAttention", {"actual_seq_lengths_kv": np.array([10**6], np.int32)}, {}, "SFA.10"),
    ("SparseFlashAttention", {"sinks": np.zeros(999, np.float32)}, {"cpu_empty_rows": ""}, "SFA.14"),
    ("SparseFlashAttention", {"block_table": np.zeros((1, 1), np.int32)}, {}, "SFA.11"),
    ("SparseFlashAttention", {"query_rope": np.zeros((1, 1, 1, 1), np.float32), "key_rope": None}, {}, "SFA.6"),
    ("SparseFlashAttentionGrad", {}, {"sparse_mode": 1}, "SFAG.7"),
    ("SparseFlashAttentionGrad", {}, {"sparse_block_size": -1}, "SFAG.6"),
    ("SparseFlashAttentionGrad", {}, {"layout": "PA_BSND"}, "SFAG.2"),
    ("SparseFlashAttentionGrad", {"softmax_max": np.zeros((1, 1, 1, 8), np.float32)}, {}, "SFAG.9"),
    ("SparseFlashAttentionGrad", {"d_out": np.zeros((1, 1, 1, 1), np.float32)}, {}, "SFAG.4"),
    ("SparseLightningIndexerGradKLLoss", {"sinks": np.zeros(999, np.float32)}, {}, "KL.4"),
    ("LightningIndexer", {}, {"sparse_count": 0}, "LI.4"),
    ("LightningIndexer", {}, {"sparse_mode": 2}, "LI.5"),
    ("LightningIndexer", {}, {"layout_key": "PA_BSND", "return_values": True}, "LI.6"),
    ("LightningIndexer", {"weights": np.zeros((1, 1, 1, 1), np.float32)}, {}, "LI.2"),
    ("LightningIndexerGrad", {}, {"headNum": 999}, "LIG.3"),
    ("LightningIndexerGrad", {}, {"sparseMode": 2}, "LIG.6"),
    ("LightningIndexerGrad", {"dy": np.zeros((1, 1, 1), np.float32)}, {}, "LIG.4"),
    ("SparseLightningIndexerGradKLLoss", {}, {"sparse_mode": 0}, "KL.8"),
    ("SparseLightningIndexerGradKLLoss", {}, {"cpu_loss_floor": -1.0}, "KL.8"),
    ("SparseLightningIndexerGradKLLoss", {"weight": np.zeros((1, 1, 1), np.float32)}, {}, "KL.5"),
    ("SparseLightningIndexerGradKLLoss", {"softmax_sum": np.zeros((1, 1, 1, 999), np.float32)}, {}, "KL.11"),
]


@pytest.mark.parametrize(
    ("op", "inputs", "attrs", "code"), REFUSED, ids=[f"{row[3]}-{i}" for i, row in enumerate(REFUSED)]
)
def test_refusals(op: str, inputs: dict[str, Any], attrs: dict[str, Any], code: str) -> None:
    good, settings_ = changed(op, 1, "BSND")
    _, text = refused(op, good | inputs, settings_ | attrs)
    assert re.search(rf"node '{op}' \({op}\): .*\({code}\)", text), text


def test_a_required_attribute_has_no_default() -> None:
    spec = get("SparseFlashAttention")
    inputs, attrs = changed(spec.name, 1, "BSND")
    incomplete = {name: value for name, value in full_attrs(spec, attrs).items() if name != "scale_value"}
    with pytest.raises(ops.KernelError, match="the required attribute scale_value is absent"):
        compute(spec, as_arrays(spec, inputs), incomplete)


def test_lists_of_the_indexer_s_gradients_hold_keys_only() -> None:
    for op, code in (("LightningIndexerGrad", "LIG.4"), ("SparseLightningIndexerGradKLLoss", "KL.9")):
        inputs, attrs = changed(op, 1, "BSND")
        indices = inputs["sparse_indices"].copy()
        for bad in (-1, inputs["key"].shape[1]):
            indices[0, -1, 0, 0] = bad
            with pytest.raises(ops.KernelError, match=rf"holds {bad} among the first .*\({code}\)"):
                ops.run(op, inputs | {"sparse_indices": indices}, attrs)


def test_packed_lengths_are_cumulative() -> None:
    inputs, attrs = changed("SparseFlashAttention", 1, "TND")
    wrong = inputs | {"actual_seq_lengths_query": np.array([4, 1], np.int32)}
    _, text = refused("SparseFlashAttention", wrong, attrs)
    assert re.search(r"cumulative.*\(SFA.10\)", text), text


def test_pages_outside_of_the_key_are_refused() -> None:
    key = np.zeros((3, 4, 1, 8), np.float32)
    inputs = {
        "query": np.zeros((1, 2, 1, 8), np.float32),
        "key": key,
        "value": key,
        "sparse_indices": np.zeros((1, 2, 1, 1), np.int32),
        "block_table": np.array([[0, 3]], np.int32),
        "actual_seq_lengths_kv": np.array([5], np.int32),
    }
    attrs = {"scale_value": 1.0, "layout_kv": "PA_BSND", "attention_mode": 2}
    _, text = refused("SparseFlashAttention", inputs, attrs)
    assert "names the page 3, expected 0 to 2 (SFA.11)" in text
    # A page behind the last key is not looked at.
    ops.run("SparseFlashAttention", inputs | {"actual_seq_lengths_kv": np.array([4], np.int32)}, attrs)


@pytest.mark.skipif(os.environ.get("FA_COMPILER_ISA") is not None, reason="the variant is chosen by the environment")
def test_the_product_s_sizes() -> None:
    """D 512, rope 64, K beyond the keys; value is key itself."""
    rng = np.random.default_rng(2)
    latent = (0.3 * rng.standard_normal((1, 130, 1, 512))).astype(np.float16)
    inputs = {
        "query": (0.3 * rng.standard_normal((1, 3, 128, 512))).astype(np.float16),
        "key": latent,
        "value": latent,
        "query_rope": rng.standard_normal((1, 3, 128, 64)).astype(np.float16),
        "key_rope": rng.standard_normal((1, 130, 1, 64)).astype(np.float16),
    }
    index = {
        "query": rng.standard_normal((1, 3, 64, 128)).astype(np.float16),
        "key": rng.standard_normal((1, 130, 1, 128)).astype(np.float16),
        "weights": rng.standard_normal((1, 3, 64)).astype(np.float16),
    }
    inputs["sparse_indices"] = ops.run("LightningIndexer", index, {"sparse_count": 2048})["sparse_indices"]
    compare("SparseFlashAttention", inputs, {"scale_value": 576**-0.5, "attention_mode": 2, "return_softmax_lse": True})


def test_a_trained_indexer_has_the_losses_of_the_dense_computation() -> None:
    """examples/train_indexer.py: the operators together, their gradients through many steps of descent."""
    path = Path(__file__).parents[2] / "examples" / "train_indexer.py"
    found = importlib.util.spec_from_file_location("train_indexer", path)
    assert found is not None and found.loader is not None
    example = importlib.util.module_from_spec(found)
    sys.modules["train_indexer"] = example
    found.loader.exec_module(example)
    curves = [np.array(example.train(step, 200)) for step in (example.fused, example.dense)]
    # Rounding grows over the steps, and near the end of a list two keys may change places.
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-3)
    assert curves[0][-20:].mean() < 0.5 * curves[0][:3].mean()


NAN_PLACES = ("query", "key", "weight", "query_index", "key_index", "softmax_max", "softmax_sum")


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("floor", [1e-8, 0.0])
@pytest.mark.parametrize("name", NAN_PLACES)
def test_a_nan_shows_in_the_loss_and_its_gradients(name: str, floor: float) -> None:
    """In the same places in every variant."""
    for seed in (1, 2, 5, 8):
        inputs, attrs = problems.indexer_loss(seed, np.float32)
        inputs[name] = inputs[name].copy()
        inputs[name].reshape(-1)[:3] = np.nan
        compare("SparseLightningIndexerGradKLLoss", inputs, attrs | {"cpu_loss_floor": floor})


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("heads", [1, 5, 20])
@pytest.mark.parametrize("special", [np.nan, np.inf])
def test_a_nan_score_is_the_largest(heads: int, special: float) -> None:
    """Also beside an infinite score, in another block of keys, and among scores of -inf."""
    rng = np.random.default_rng(heads)
    key = rng.uniform(0.5, 1.0, (1, 130, 1, 4)).astype(np.float32)
    key[0, 3], key[0, 60], key[0, 100], key[0, 128] = special, np.nan, np.inf, -np.inf
    inputs = {
        "query": rng.uniform(0.5, 1.0, (1, 5, heads, 4)).astype(np.float32),
        "key": key,
        "value": rng.standard_normal((1, 130, 1, 3)).astype(np.float32),
        "sparse_indices": np.full((1, 5, 1, 130), -1, np.int32),
    }
    rows = (range(50), range(130), [*range(50, 70), 100], [128, 60], [5, 128, 129])
    for i, row in enumerate(rows):
        inputs["sparse_indices"][0, i, 0, : len(row)] = row
    attrs = {"scale_value": 1.0, "sparse_mode": 0, "attention_mode": 2, "return_softmax_lse": True}
    compare("SparseFlashAttention", inputs, attrs)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("level", [10.0, 20.0, 60.0, 1000.0])
def test_sinks_that_hold_all_of_the_mass(level: float) -> None:
    """What they leave is lost in the rounding of the statistics, and p is what it is without them."""
    for seed in (1, 2, 3, 4, 7):
        inputs, attrs = problems.indexer_loss(seed, np.float32)
        heads = inputs["query"].shape[-2]
        inputs["softmax_max"] = np.full_like(inputs["softmax_max"], level)
        inputs["softmax_sum"] = np.ones_like(inputs["softmax_sum"])
        inputs["sinks"] = np.full(heads, level, np.float32)
        compare("SparseLightningIndexerGradKLLoss", inputs, attrs)
        found = ops.run("SparseLightningIndexerGradKLLoss", inputs, attrs)
        for value in found.values():
            assert np.isfinite(value).all()


HUGE = (2**31, 2**61, 2**62, 2**63 - 1)


def unchecked(op: str, inputs: Any, attrs: Any) -> dict[str, Any]:
    """What the kernel gives where the registry is not asked, as in a model."""
    spec = get(op)
    return compute(spec, as_arrays(spec, inputs), full_attrs(spec, attrs))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("block", HUGE)
def test_blocks_longer_than_any_sequence(block: int) -> None:
    """Their first one holds all keys, the others none: no product of their length wraps."""
    rng = np.random.default_rng(9)
    inputs: Any = {
        "query": rng.standard_normal((1, 4, 2, 8)).astype(np.float32),
        "key": rng.standard_normal((1, 30, 1, 8)).astype(np.float32),
        "value": rng.standard_normal((1, 30, 1, 8)).astype(np.float32),
        "sparse_indices": np.array([[0, 1, 7], [5, 0, -1], [2**31 - 1, 8, 4], [4, 2, 1]], np.int32)[None, :, None],
    }
    attrs = {"scale_value": 0.3, "sparse_mode": 0, "sparse_block_size": 32}
    forward = attrs | {"attention_mode": 2, "return_softmax_lse": True}
    with pytest.raises(ops.KernelError, match="sparse_block_size"):
        ops.run("SparseFlashAttention", inputs, forward | {"sparse_block_size": block})
    result = unchecked("SparseFlashAttention", inputs, forward)
    for name, value in unchecked("SparseFlashAttention", inputs, forward | {"sparse_block_size": block}).items():
        np.testing.assert_array_equal(value, result[name], name)
    given = inputs | {name: result[name] for name in ("softmax_max", "softmax_sum")} | {"out": result["attention_out"]}
    given |= {"d_out": rng.standard_normal((1, 4, 2, 8)).astype(np.float32)}
    # Rows 2 and 3 select nothing; row 1 does, and forward it did not, for only one entry is read there.
    given["softmax_max"][given["softmax_sum"] == 0], given["softmax_sum"][given["softmax_sum"] == 0] = 1.0, 2.0
    longest = unchecked("SparseFlashAttentionGrad", given, attrs)
    for name, value in unchecked("SparseFlashAttentionGrad", given, attrs | {"sparse_block_size": block}).items():
        np.testing.assert_array_equal(value, longest[name], name)
