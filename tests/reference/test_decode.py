"""IncreFlashAttention, RingAttentionUpdate and AttentionUpdate against loops over scalars."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fa_compiler import reference

EXACT = {"rtol": 1e-12, "atol": 1e-12}
B, N1, N2, S, D = 3, 6, 2, 23, 5
SCALE = 0.4


def naive(
    q: Any,
    key: Callable[[int, int, int, int], float],
    value: Callable[[int, int, int, int], float],
    valid: list[tuple[int, int]],
    masked: Callable[[int, int], bool] = lambda b, j: False,
    pse: Callable[[int, int, int], float] = lambda b, n, j: 0.0,
) -> Any:
    """[B,N1,D]; key and value give a number by batch entry, key head, position and place in the head."""
    out = np.zeros(q.shape)
    for b, (first, count) in enumerate(valid):
        for n in range(q.shape[1]):
            scores = []
            for j in range(first, first + count):
                dot = sum(float(q[b, n, d]) * key(b, n * N2 // N1, j, d) for d in range(D))
                scores.append(-1e12 if masked(b, j) else SCALE * dot + pse(b, n, j))
            if not scores:
                continue
            weights = [math.exp(score - max(scores)) for score in scores]
            for d in range(D):
                total = sum(w * value(b, n * N2 // N1, first + j, d) for j, w in enumerate(weights) if w)
                out[b, n, d] = total / sum(weights)
    return out


def data(seed: int = 0) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(B, N1, D)), rng.normal(size=(B, S, N2, D)), rng.normal(size=(B, S, N2, D))


def run(inputs: dict[str, Any], layout: str, **attrs: Any) -> Any:
    chosen = {"num_heads": N1, "num_key_value_heads": N2, "scale_value": SCALE, "input_layout": layout, **attrs}
    out = reference.run("IncreFlashAttention", inputs, chosen, dtype="float64")["attention_out"]
    return out.reshape(B, N1, D)


def in_layout(layout: str, q: Any, *caches: Any) -> list[Any]:
    if layout == "BSH":
        return [q.reshape(B, 1, -1), *(x.reshape(*x.shape[:2], N2 * D) for x in caches)]
    if layout == "BSND":
        return [q[:, None], *caches]
    return [q[:, :, None], *(x.transpose(0, 2, 1, 3) for x in caches)]


def at(x: Any) -> Callable[[int, int, int, int], float]:
    return lambda b, h, j, d: float(x[b, j, h, d])


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
def test_layouts_lengths_mask_and_bias(layout: str) -> None:
    q, k, v = data()
    rng = np.random.default_rng(1)
    mask, pse = rng.integers(0, 2, (B, 1, S + 2)), rng.normal(size=(1, N1, 1, S + 1))
    mask[2] = 1
    query, key, value = in_layout(layout, q, k, v)
    inputs = {
        "query": query,
        "key": [key],
        "value": value,
        "atten_mask": mask.astype(np.int8),
        "pse_shift": pse,
        "actual_seq_lengths": np.array([S, 0, 7]),
    }
    expected = naive(
        q, at(k), at(v), [(0, S), (0, 0), (0, 7)], lambda b, j: mask[b, 0, j] != 0, lambda b, n, j: pse[0, n, 0, j]
    )
    np.testing.assert_allclose(run(inputs, layout), expected, **EXACT)
    # Entry 2 is masked throughout: the mean of its 7 values.
    np.testing.assert_allclose(expected[2, 0], v[2, :7, 0].mean(axis=0), **EXACT)


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
def test_left_padding_moves_keys_mask_and_bias(layout: str) -> None:
    q, k, v = data(2)
    rng = np.random.default_rng(3)
    mask, pse = rng.integers(0, 2, (B, S)), rng.normal(size=(B, N1, 1, S))
    query, key, value = in_layout(layout, q, k, v)
    inputs = {
        "query": query,
        "key": key,
        "value": value,
        "atten_mask": mask != 0,
        "pse_shift": pse,
        "actual_seq_lengths": np.array([10, S, S - 4]),
        "kv_padding_size": np.array([4]),
    }
    # Entry 1 does not fit in front of the padding: it is left out.
    expected = naive(
        q,
        at(k),
        at(v),
        [(S - 14, 10), (0, 0), (0, S - 4)],
        lambda b, j: mask[b, j] != 0,
        lambda b, n, j: pse[b, n, 0, j],
    )
    np.testing.assert_allclose(run(inputs, layout), expected, **EXACT)
    inputs["kv_padding_size"] = np.array([-3])
    expected = naive(
        q,
        at(k),
        at(v),
        [(S - 10, 10), (0, S), (4, S - 4)],
        lambda b, j: mask[b, j] != 0,
        lambda b, n, j: pse[b, n, 0, j],
    )
    np.testing.assert_allclose(run(inputs, layout), expected, **EXACT)


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
def test_lists_have_lengths_of_their_own(layout: str) -> None:
    q, k, v = data(4)
    lengths = [S, 9, 0]
    pairs = [in_layout(layout, q, k[b : b + 1, :n], v[b : b + 1, :n])[1:] for b, n in enumerate(lengths)]
    query = in_layout(layout, q)[0]
    inputs = {"query": query, "key": [key for key, _ in pairs], "value": [value for _, value in pairs]}
    expected = naive(q, at(k), at(v), [(0, n) for n in lengths])
    np.testing.assert_allclose(run(inputs, layout), expected, **EXACT)
    inputs |= {"actual_seq_lengths": np.array([4, 5, 0]), "kv_padding_size": np.array([2])}
    expected = naive(q, at(k), at(v), [(0, 4), (0, 5), (0, 0)])
    np.testing.assert_allclose(run(inputs, layout), expected, **EXACT)


@pytest.mark.parametrize(("layout", "heads_first"), [("BSH", False), ("BSND", False), ("BNSD", False), ("BNSD", True)])
def test_pages(layout: str, heads_first: bool) -> None:
    q, *_ = data(5)
    rng = np.random.default_rng(6)
    size, blocks = 16, 9
    pools = rng.normal(size=(2, blocks, size, N2, D))
    table = np.array([[7, 2], [3, -1], [0, 8]], np.int32)
    stored = [x.transpose(0, 2, 1, 3) if heads_first else x.reshape(blocks, size, -1) for x in pools]
    inputs = {
        "query": in_layout(layout, q)[0],
        "key": stored[0],
        "value": stored[1],
        "block_table": table,
        "actual_seq_lengths": np.array([23, 16, 17]),
    }
    number = [lambda b, h, j, d, x=x: float(x[table[b, j // size], j % size, h, d]) for x in pools]
    expected = naive(q, number[0], number[1], [(0, 23), (0, 16), (0, 17)])
    np.testing.assert_allclose(run(inputs, layout, block_size=size), expected, **EXACT)
    with pytest.raises(reference.ReferenceInputError, match="block_table"):
        run({**inputs, "actual_seq_lengths": np.array([17])}, layout, block_size=size)


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("offset", [False, True])
def test_int8_caches(layout: str, per_channel: bool, offset: bool) -> None:
    q, *_ = data(7)
    rng = np.random.default_rng(8)
    k, v = rng.integers(-128, 128, (2, B, S, N2, D)).astype(np.int8)
    form = (2, N2, D) if per_channel else (2, 1, 1)
    shape = {"BSH": (2, N2 * D), "BSND": (2, N2, D), "BNSD": (2, N2, 1, D)}[layout] if per_channel else (2,)
    scale, shift = rng.uniform(0.01, 0.1, form), rng.normal(size=form) * offset
    query, key, value = in_layout(layout, q, k, v)
    inputs = {"query": query, "key": key, "value": value, "antiquant_scale": scale.reshape(shape)}
    if offset:
        inputs["antiquant_offset"] = shift.reshape(shape)

    def number(which: int, x: Any) -> Callable[[int, int, int, int], float]:
        def of(b: int, h: int, j: int, d: int) -> float:
            place = (which, h, d) if per_channel else (which, 0, 0)
            return (float(x[b, j, h, d]) + shift[place]) * scale[place]

        return of

    expected = naive(q, number(0, k), number(1, v), [(0, S)] * B)
    np.testing.assert_allclose(run(inputs, layout), expected, **EXACT)


@pytest.mark.parametrize("per_channel", [False, True])
def test_int8_results_multiply_round_to_even_and_saturate(per_channel: bool) -> None:
    q, k, v = data(9)
    rng = np.random.default_rng(10)
    scale = rng.uniform(5, 300, (1, N1, 1, D) if per_channel else (1,)).astype(np.float32)
    offset = rng.normal(size=scale.shape).astype(np.float32)
    query, key, value = in_layout("BNSD", q, k, v)
    inputs = {"query": query, "key": key, "value": value, "quant_scale2": scale, "quant_offset2": offset}
    attrs = {"num_heads": N1, "num_key_value_heads": N2, "scale_value": SCALE, "input_layout": "BNSD"}
    out = reference.run("IncreFlashAttention", inputs, attrs)["attention_out"]
    assert out.dtype == np.int8
    plain = naive(q, at(k), at(v), [(0, S)] * B)
    factor, shift = (x.reshape(N1, D) if per_channel else x for x in (scale, offset))
    expected = np.clip(np.round(plain * factor + shift), -128, 127)
    np.testing.assert_array_equal(out.reshape(B, N1, D), expected)
    assert {-128, 127} & set(out.reshape(-1).tolist())


def test_an_int8_query_computes_with_integers() -> None:
    rng = np.random.default_rng(11)
    q = rng.integers(-128, 128, (B, N1, D)).astype(np.int8)
    k, v = rng.integers(-128, 128, (2, B, S, N2, D)).astype(np.int8)
    query, key, value = in_layout("BSND", q, k, v)
    inputs = {
        "query": query,
        "key": key,
        "value": value,
        "dequant_scale1": np.array([int(np.array(2e-4, np.float32).view(np.uint32)) | 5 << 40], np.uint64),
        "quant_scale1": np.array([100.0], np.float32),
        "dequant_scale2": np.array([0.03], np.float32),
    }
    result = reference.run(
        "IncreFlashAttention",
        inputs,
        {"num_heads": N1, "num_key_value_heads": N2, "scale_value": SCALE, "input_layout": "BSND"},
    )["attention_out"]
    assert result.dtype == np.float16
    out = run(inputs, "BSND")
    for b in range(B):
        for n in range(N1):
            h = n * N2 // N1
            products = [sum(int(q[b, n, d]) * int(k[b, j, h, d]) for d in range(D)) for j in range(S)]
            scores = [product * float(np.float32(2e-4)) * SCALE for product in products]
            exponentials = [math.exp(score - max(scores)) for score in scores]
            integers = [min(127, round(e * 100.0)) for e in exponentials]
            for d in range(D):
                total = sum(p * int(v[b, j, h, d]) for j, p in enumerate(integers)) * float(np.float32(0.03))
                assert math.isclose(out[b, n, d], total / sum(exponentials), rel_tol=1e-12, abs_tol=1e-12)


def test_masked_values_are_not_read_and_types_are_kept() -> None:
    q, k, v = data(12)
    mask = np.zeros((B, S), np.uint8)
    mask[:, 3] = 1
    k[:, 3], v[:, 3] = np.inf, np.nan
    query, key, value = (x.astype(ml_dtypes.bfloat16) for x in in_layout("BSH", q, k, v))
    inputs = {"query": query, "key": key, "value": value, "atten_mask": mask}
    out = reference.run("IncreFlashAttention", inputs, {"num_heads": N1, "num_key_value_heads": N2})["attention_out"]
    assert out.dtype == ml_dtypes.bfloat16
    assert np.isfinite(out.astype(np.float64)).all()


@pytest.mark.parametrize("order", ["", "TND"])
@pytest.mark.parametrize("layout", ["SBH", "TND"])
def test_two_halves_of_the_keys_make_the_whole(layout: str, order: str) -> None:
    """FlashAttentionScore over half of the keys each, merged, is FlashAttentionScore over all of them."""
    rng = np.random.default_rng(13)
    heads, width, lengths = 2, 64, [3, 0, 4]
    ends = np.array([3, 3, 7])
    if layout == "TND":
        q, k, v = (rng.normal(size=(7, heads, width)) for _ in range(3))
        more = {"actual_seq_qlen": ends, "actual_seq_kvlen": ends}
    else:
        q, k, v = (rng.normal(size=(4, 3, heads * width)) for _ in range(3))
        more = {}
    attrs = {"head_num": heads, "input_layout": layout, "scale_value": 0.2}
    if layout == "TND":
        attrs["softmax_out_layout"] = "same_as_input" if order else ""

    def attend(part: slice) -> Any:
        inputs = {"query": q, "key": k[part], "value": v[part], **more}
        if layout == "TND":
            inner = np.concatenate([np.arange(7)[s : s + n][part] for s, n in zip([0, 3, 3], lengths, strict=True)])
            counts = [len(range(n)[part]) for n in lengths]
            inputs |= {"key": k[inner], "value": v[inner], "actual_seq_kvlen": np.cumsum(counts)}
        return reference.run("FlashAttentionScore", inputs, attrs, dtype="float64")

    whole, left, right = attend(slice(None)), attend(slice(0, 1)), attend(slice(1, None))
    inputs = {
        f"{name}_{kind}": result[source]
        for name, result in (("prev", left), ("cur", right))
        for kind, source in (
            ("attn_out", "attention_out"),
            ("softmax_max", "softmax_max"),
            ("softmax_sum", "softmax_sum"),
        )
    }
    if layout == "TND":
        inputs["actual_seq_qlen"] = np.array([0, *ends])
    merged = reference.run(
        "RingAttentionUpdate",
        inputs,
        {"input_layout": layout, "input_softmax_layout": order if layout == "TND" else ""},
        dtype="float64",
    )
    np.testing.assert_allclose(merged["attn_out"], whole["attention_out"], **EXACT)
    np.testing.assert_allclose(merged["softmax_max"], whole["softmax_max"], **EXACT)
    np.testing.assert_allclose(merged["softmax_sum"], whole["softmax_sum"], **EXACT)


def test_ranks_are_merged_by_their_logarithms() -> None:
    rng = np.random.default_rng(14)
    lse, go = rng.normal(size=(3, 5)), rng.normal(size=(3, 5, 4))
    lse[1, 2], go[1, 2] = np.inf, np.nan  # a rank without keys for the row
    results = reference.run(
        "AttentionUpdate",
        {"lse": [*lse.astype(np.float32)], "go": [*go]},
        {"update_type": 1, "sp": 3},
        dtype="float64",
    )
    for row in range(5):
        ranks = [i for i in range(3) if lse[i, row] != np.inf]
        weights = [math.exp(float(np.float32(lse[i, row]))) for i in ranks]
        assert math.isclose(results["lse_m"][row], math.log(sum(weights)), rel_tol=1e-12)
        for d in range(4):
            mean = sum(w * go[i, row, d] for w, i in zip(weights, ranks, strict=True)) / sum(weights)
            assert math.isclose(results["output"][row, d], mean, rel_tol=1e-12)
