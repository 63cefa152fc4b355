"""The sparse family's reference against an independent dense computation, its gradients against finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fa_compiler import reference
from tests import sparse_problems as problems

SEEDS = range(24)


def run(
    op: str, inputs: Any, attrs: Any, names: tuple[str, ...] | None = None, cann: str | None = None
) -> dict[str, Any]:
    return reference.run(op, inputs, attrs, names, dtype="float64", cann=cann)


def sequences(inputs: Any, layout: str, queries: str, keys: str, counted: bool) -> list[tuple[Any, Any]]:
    """For each sequence, where its rows lie in the query's tensors and its keys in the key's."""
    query, key = inputs["query"], inputs["key"]
    if layout == "TND":
        q, k = (np.concatenate([[0], inputs[name]]) for name in (queries, keys))
        return [((slice(q[b], q[b + 1]),), (slice(k[b], k[b + 1]),)) for b in range(len(q) - 1)]
    found = []
    for b in range(query.shape[0]):
        q_len = inputs[queries][b] if counted and queries in inputs else query.shape[1]
        k_len = inputs[keys][b] if counted and keys in inputs else key.shape[1]
        found.append(((b, slice(0, q_len)), (b, slice(0, k_len))))
    return found


def counts(entries: Any, block: int, rows: int, keys: int, mode: int, capped: bool) -> Any:
    """How often each row attends each key: [rows, keys]."""
    times = np.zeros((rows, keys))
    for i in range(rows):
        limit = keys if mode == 0 else keys - rows + i + 1
        if limit <= 0:
            continue
        for slot, entry in enumerate(entries[i]):
            if entry < 0 or (capped and slot == -(-limit // block)):
                break
            for token in range(entry * block, (entry + 1) * block):
                if token < min(limit, keys):
                    times[i, token] += 1
    return times


@pytest.mark.parametrize("seed", SEEDS)
def test_attention_is_a_weighted_softmax(seed: int) -> None:
    """exp(S) counted as often as listed, over all keys at once and without subtracting a maximum."""
    inputs, attrs = problems.attention(seed, np.float64)
    if attrs["layout_kv"] == "PA_BSND":
        return
    result = run("SparseFlashAttention", inputs, attrs)
    names = ("actual_seq_lengths_query", "actual_seq_lengths_kv")
    n1, n2 = inputs["query"].shape[-2], inputs["key"].shape[-2]
    expected = np.zeros_like(result["attention_out"])
    for q_at, k_at in sequences(inputs, attrs["layout_query"], *names, counted=True):
        for head in range(n1):
            kv = head // (n1 // n2)
            q, k, v = inputs["query"][q_at][:, head], inputs["key"][k_at][:, kv], inputs["value"][k_at][:, kv]
            scores = q @ k.T
            if "query_rope" in inputs:
                scores = scores + inputs["query_rope"][q_at][:, head] @ inputs["key_rope"][k_at][:, kv].T
            listed = inputs["sparse_indices"][q_at]
            entries = listed[:, kv if listed.shape[1] == n2 else 0]
            block, mode = attrs["sparse_block_size"], attrs["sparse_mode"]
            weights = counts(entries, block, len(q), len(k), mode, True) * np.exp(scores * attrs["scale_value"])
            sums = weights.sum(axis=1, keepdims=True)
            empty = (sums[:, 0] == 0) & (len(k) > 0)  # of no keys at all the sum is 0
            if "sinks" in inputs:
                sums = sums + np.exp(np.float64(inputs["sinks"][head]))
            out = weights @ v / np.where(sums == 0, 1, sums)
            if attrs.get("cpu_empty_rows") == "mean":
                out[empty] = v.mean(axis=0)
            elif attrs.get("cpu_empty_rows") == "nan":
                out[empty] = np.nan
            expected[q_at][:, head] = out
    np.testing.assert_allclose(result["attention_out"], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_pages_change_nothing(seed: int) -> None:
    for op, make, key in (
        ("SparseFlashAttention", problems.attention, "layout_kv"),
        ("LightningIndexer", problems.indexer, "layout_key"),
    ):
        inputs, attrs = make(seed, np.float64)
        if attrs[key] != "PA_BSND":
            continue
        again = run(op, *problems.unpaged(inputs, attrs, key))
        for name, value in run(op, inputs, attrs).items():
            np.testing.assert_array_equal(value, again[name])


def differences(function: Any, inputs: Any, name: str, rng: Any) -> list[tuple[tuple[int, ...], float]]:
    """Central differences of a number at a few places of an input."""
    found = []
    for _ in range(4):
        place = tuple(int(rng.integers(0, size)) for size in inputs[name].shape)
        values = []
        for step in (1e-5, -1e-5):
            moved = inputs[name].copy()
            moved[place] += step
            values.append(function(inputs | {name: moved}))
        found.append((place, (values[0] - values[1]) / 2e-5))
    return found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("merged", [False, True])
def test_attention_gradients_are_derivatives(seed: int, merged: bool) -> None:
    """`merged`: key stands for value, too, and gets both gradients."""
    inputs, attrs = problems.attention(seed, np.float64, plain=True, sinks=bool(seed % 3))
    inputs["value"] = (inputs["key"] if merged else inputs["value"]).copy()
    inputs |= {"sinks": inputs["sinks"].astype(np.float64)} if "sinks" in inputs else {}
    rng = np.random.default_rng(seed)
    result = run("SparseFlashAttention", inputs, attrs)
    d_out = rng.standard_normal(result["attention_out"].shape)

    def loss(changed: Any) -> float:
        changed = changed | ({"value": changed["key"]} if merged else {})
        return float((run("SparseFlashAttention", changed, attrs, ("attention_out",))["attention_out"] * d_out).sum())

    given = inputs | {"d_out": d_out, "out": result["attention_out"]}
    given |= {name: result[name] for name in ("softmax_max", "softmax_sum")}
    kept = {name: attrs[name] for name in ("scale_value", "sparse_block_size", "sparse_mode")}
    capped = {"sparse_indices": ended(inputs, attrs)}
    if merged:
        del inputs["value"], given["value"]
    cann = problems.REORDERED if merged or "sinks" in inputs else None
    gradients = run("SparseFlashAttentionGrad", given | capped, kept | {"layout": attrs["layout_query"]}, cann=cann)
    for name in ("query", "key", "value", "query_rope", "key_rope", "sinks"):
        if f"d_{name}" not in gradients:
            continue
        if name not in inputs:
            assert gradients[f"d_{name}"].shape == (0,)
            continue
        for place, slope in differences(loss, inputs, name, rng):
            np.testing.assert_allclose(gradients[f"d_{name}"][place], slope, rtol=1e-5, atol=1e-7)


def ended(inputs: Any, attrs: Any) -> Any:
    """The lists, each ended by -1 where the forward pass stops reading: the gradient has no such bound."""
    names = ("actual_seq_lengths_query", "actual_seq_lengths_kv")
    indices = inputs["sparse_indices"].copy()
    for q_at, k_at in sequences(inputs, attrs["layout_query"], *names, counted=False):
        rows, keys = len(inputs["query"][q_at]), len(inputs["key"][k_at])
        for i in range(rows):
            limit = keys if attrs["sparse_mode"] == 0 else max(0, keys - rows + i + 1)
            indices[q_at][i, :, -(-limit // attrs["sparse_block_size"]) :] = -1
    return indices


@pytest.mark.parametrize("seed", SEEDS)
def test_the_indexer_lists_the_best_keys(seed: int) -> None:
    inputs, attrs = problems.indexer(seed, np.float64)
    if attrs["layout_key"] == "PA_BSND":
        return
    attrs["return_values"] = True
    result = run("LightningIndexer", inputs, attrs)
    names = ("actual_seq_lengths_query", "actual_seq_lengths_key")
    seen = np.zeros(inputs["query"].shape[:-2], bool)
    for q_at, k_at in sequences(inputs, attrs["layout_query"], *names, counted=True):
        q, k, w = inputs["query"][q_at], inputs["key"][k_at][:, 0], inputs["weights"][q_at]
        scores = np.einsum("th,thj->tj", w, np.clip(np.einsum("thd,jd->thj", q, k), 0, None))
        for i in range(len(q)):
            limit = len(k) if attrs["sparse_mode"] == 0 else max(0, min(len(k), len(k) - len(q) + i + 1))
            order = sorted(range(limit), key=lambda j, i=i: (-scores[i, j], j))[: attrs["sparse_count"]]
            listed = result["sparse_indices"][q_at][i, 0]
            assert listed[: len(order)].tolist() == order
            assert (listed[len(order) :] == -1).all()
            values = result["sparse_values"][q_at][i, 0]
            np.testing.assert_allclose(values[: len(order)], scores[i, order], atol=1e-12)
            assert (values[len(order) :] == -np.inf).all()
            seen[q_at][i] = True
    assert (result["sparse_indices"][~seen] == -1).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_index_gradients_are_derivatives(seed: int) -> None:
    inputs, attrs = problems.indexer_grad(seed, np.float64)
    rng = np.random.default_rng(seed)
    ends = ("actual_seq_lengths_query", "actual_seq_lengths_key")

    def loss(changed: Any) -> float:
        total = 0.0
        for q_at, k_at in sequences(changed, attrs["layout"], *ends, counted=False):
            q, k, w = changed["query"][q_at], changed["key"][k_at][:, 0], changed["weights"][q_at]
            scores = np.einsum("th,thj->tj", w, np.clip(np.einsum("thd,jd->thj", q, k), 0, None))
            dy, listed = changed["dy"][q_at], changed["sparse_indices"][q_at][:, 0]
            total += sum(
                float(scores[i, j] * d) for i in range(len(q)) for j, d in zip(listed[i], dy[i], strict=True) if j >= 0
            )
        return total

    gradients = run("LightningIndexerGrad", inputs, attrs)
    for name, gradient in (("query", "dq"), ("key", "dk"), ("weights", "dweights")):
        for place, slope in differences(loss, inputs, name, rng):
            np.testing.assert_allclose(gradients[gradient][place], slope, rtol=1e-5, atol=1e-7)


ENDS = ("actual_seq_lengths_query", "actual_seq_lengths_kv")


@pytest.mark.parametrize("seed", SEEDS)
def test_loss_gradients_are_derivatives(seed: int) -> None:
    inputs, attrs = problems.indexer_loss(seed, np.float64)
    rng = np.random.default_rng(seed)
    # Small scores, so that no probability comes near the floor of the loss, where dI is no derivative.
    inputs |= {name: 0.2 * inputs[name] for name in ("query", "weight")}
    # In float64, for the target must add up to 1 for dI = y - p to be the derivative.
    keys = inputs.get("actual_seq_lengths_key")
    ends = {}
    if keys is not None:
        queries = inputs["actual_seq_lengths_query"]
        ends = {name: given.astype(np.int32) for name, given in zip(ENDS, (queries, keys), strict=True)}
    layouts = {"layout_query": attrs["layout"], "layout_kv": attrs["layout"]}
    forward = {name: value for name, value in inputs.items() if "softmax" not in name and "index" not in name}
    forward = {name: value for name, value in forward.items() if name not in ("weight", "actual_seq_lengths_key")}
    forward |= {"value": inputs["key"], "sparse_indices": inputs["sparse_indices"], **ends}
    settings = {"scale_value": attrs["scale_value"], "attention_mode": 2, "return_softmax_lse": True}
    result = run("SparseFlashAttention", forward, layouts | settings)
    inputs |= {name: result[name] for name in ("softmax_max", "softmax_sum")}
    op = "SparseLightningIndexerGradKLLoss"
    gradients = run(op, inputs, attrs)
    for name in ("query_index", "key_index", "weight"):
        for place, slope in differences(lambda x: float(run(op, x, attrs, ("loss",))["loss"][0]), inputs, name, rng):
            np.testing.assert_allclose(gradients[f"d_{name}"][place], slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("floor", [None, 0.0, 0.01])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_loss_is_a_divergence(seed: int, floor: float | None) -> None:
    """The same sums by dense matrices; a distribution compared with itself gives 0."""
    inputs, attrs = problems.indexer_loss(seed, np.float64)
    ends = ("actual_seq_lengths_query", "actual_seq_lengths_key")
    expected = 0.0
    for q_at, k_at in sequences(inputs, attrs["layout"], *ends, counted=False):
        q, k = inputs["query"][q_at], inputs["key"][k_at][:, 0]
        scores = np.einsum("tgd,jd->tgj", q, k)
        if "query_rope" in inputs:
            scores += np.einsum("tgd,jd->tgj", inputs["query_rope"][q_at], inputs["key_rope"][k_at][:, 0])
        relu = np.clip(np.einsum("thd,jd->thj", inputs["query_index"][q_at], inputs["key_index"][k_at][:, 0]), 0, None)
        index_scores = np.einsum("th,thj->tj", inputs["weight"][q_at], relu)
        listed = inputs["sparse_indices"][q_at][:, 0]
        for i in range(len(q)):
            at = listed[i][listed[i] >= 0]
            # A sink takes its share of a head's probability, and what is left of all heads is made 1 again.
            p = np.exp(attrs["scale_value"] * scores[i][:, at])
            sinks = np.exp(inputs.get("sinks", np.full(len(p), -np.inf)).astype(np.float64))[:, None]
            p = (p / (p.sum(axis=1, keepdims=True) + sinks)).sum(axis=0)
            p /= p.sum()
            y = np.exp(index_scores[i, at])
            y /= y.sum()
            least = 1e-8 if floor is None else floor
            expected += float(np.sum(np.maximum(p, least) * np.log(np.maximum(p, least) / np.maximum(y, least))))
    settings = attrs if floor is None else attrs | {"cpu_loss_floor": floor}
    loss = run("SparseLightningIndexerGradKLLoss", inputs, settings, ("loss",))["loss"]
    np.testing.assert_allclose(loss, [expected], rtol=1e-5, atol=1e-5)
