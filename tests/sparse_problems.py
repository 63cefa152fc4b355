"""Random problems of the sparse family, for the tests of the reference and of the kernels.

Lengths and sizes lie around the edges of vectors and tiles; lists are shuffled, have duplicates, end early by -1 with
rubbish behind it, and some rows have none.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fa_compiler import reference

Rng = np.random.Generator
Inputs = dict[str, Any]
Problem = tuple[Inputs, dict[str, Any]]

WIDTHS = (1, 3, 8, 15, 16, 24, 33)


class Sizes:
    """Drawn sizes: sequences, their lengths, and where their tokens lie."""

    def __init__(self, rng: Rng, layout: str, square: bool = False, full: bool = False) -> None:
        self.rng, self.layout = rng, layout
        batch = int(rng.integers(1, 4))
        self.q_lens = rng.integers(1, 8, batch)
        self.k_lens = self.q_lens + rng.integers(0, 40, batch) if square else rng.integers(1, 60, batch)
        if layout == "TND":
            self.queries, self.keys = (int(self.q_lens.sum()),), (int(self.k_lens.sum()),)
        else:
            self.queries = (batch, int(self.q_lens.max()))
            self.keys = (batch, int(self.k_lens.max()))
            if full:
                self.q_lens, self.k_lens = np.full(batch, self.queries[1]), np.full(batch, self.keys[1])
        self.mode = int(rng.choice([0, 3]))

    def visible(self, mode: int) -> list[tuple[tuple[int, ...], int]]:
        """The place of each computed row in the query's leading dimensions, and the keys it sees."""
        found: list[tuple[tuple[int, ...], int]] = []
        start = 0
        for b, (q, k) in enumerate(zip(self.q_lens, self.k_lens, strict=True)):
            for i in range(q):
                place = (start + i,) if self.layout == "TND" else (b, i)
                found.append((place, int(k) if mode == 0 else max(0, min(int(k), int(k - q + i + 1)))))
            start += int(q)
        return found

    def lengths(self, names: tuple[str, str], dtype: Any = np.int32) -> Inputs:
        """Cumulative in TND, else one length for each sequence."""
        given = (self.q_lens, self.k_lens)
        return {
            name: (np.cumsum(lens) if self.layout == "TND" else lens).astype(dtype)
            for name, lens in zip(names, given, strict=True)
        }


def normal(rng: Rng, shape: tuple[int, ...], dtype: Any) -> Any:
    return rng.standard_normal(shape).astype(dtype)


def sink(rng: Rng, heads: int) -> Any:
    """A score for each head, as large as those of the keys; now and then so large that it has all of the mass, or so
    small that it has none."""
    return (rng.choice([1.0, 1.0, 30.0, 300.0]) * normal(rng, (heads,), np.float32)).astype(np.float32)


def lists(rng: Rng, sizes: Sizes, mode: int, heads: int, count: int, block: int, capped: bool) -> Any:
    """sparse_indices: visible blocks in any order, some of them twice, ended by -1 with rubbish behind."""
    indices = np.full((*sizes.queries, heads, count), -1, np.int32)
    for place, visible in sizes.visible(mode):
        blocks = -(-visible // block)
        for head in range(heads):
            most = min(count, blocks) if capped else count
            n = int(rng.integers(0, most + 1)) if blocks else 0
            chosen = rng.permutation(blocks)[:n]
            if n > 1 and rng.integers(0, 3) == 0:
                chosen = rng.integers(0, blocks, n)
            row = indices[(*place, head)]
            row[: len(chosen)] = chosen
            if rng.integers(0, 3) == 0 and len(chosen) + 1 < count:
                row[len(chosen) + 1 :] = rng.integers(-3, 90, count - len(chosen) - 1)
    return indices


def paged(rng: Rng, inputs: Inputs, names: tuple[str, ...], sizes: Sizes, lengths: str, page: int) -> Inputs:
    """The same keys in pages that lie in any order."""
    pages = -(-int(sizes.k_lens.max()) // page)
    batch = len(sizes.k_lens)
    total = batch * pages + 2
    table = rng.permutation(total)[: batch * pages].reshape(batch, pages).astype(np.int32)
    found = dict(inputs)
    starts = np.concatenate([[0], np.cumsum(sizes.k_lens)[:-1]])
    for name in names:
        tensor = inputs[name]
        out = np.full((total, page, *tensor.shape[-2:]), np.nan).astype(tensor.dtype)
        for b, length in enumerate(sizes.k_lens):
            rows = tensor[starts[b] : starts[b] + length] if sizes.layout == "TND" else tensor[b, :length]
            for j in range(int(length)):
                out[table[b, j // page], j % page] = rows[j]
        found[name] = out
    unused = -(-sizes.k_lens // page)
    for b in range(batch):
        table[b, unused[b] :] = -1
    return found | {"block_table": table, lengths: sizes.k_lens.astype(np.int32)}


def unpaged(inputs: Inputs, attrs: dict[str, Any], layout: str) -> Problem:
    """The same problem without pages, the keys in the query's layout; `layout` is the attribute that says theirs."""
    lengths = next(name for name in inputs if name.startswith("actual_seq_lengths_k"))
    found = {name: value for name, value in inputs.items() if name != "block_table"}
    table = inputs["block_table"]
    for name in [name for name in ("key", "value", "key_rope") if name in inputs]:
        rows = inputs[name][np.maximum(table, 0)].reshape(len(table), -1, *inputs[name].shape[2:])
        if attrs["layout_query"] == "TND":
            rows = np.concatenate([row[:count] for row, count in zip(rows, inputs[lengths], strict=True)])
        found[name] = rows
    if attrs["layout_query"] == "TND":
        found[lengths] = np.cumsum(inputs[lengths], dtype=np.int32)
    return found, attrs | {layout: attrs["layout_query"]}


def attention(seed: int, dtype: Any = np.float32, plain: bool = False, sinks: bool = False) -> Problem:
    """A SparseFlashAttention. `plain` leaves out what its gradient does not have: lengths in BSND, pages, and
    sinks unless they are asked for."""
    rng = np.random.default_rng(seed)
    layout = str(rng.choice(["BSND", "TND"]))
    sizes = Sizes(rng, layout, full=plain)
    kv_heads = int(rng.choice([1, 1, 2, 3]))
    heads = kv_heads * int(rng.choice([1, 2, 3, 4, 7, 8, 13, 16, 20, 33]))
    width, value_width, rope = (int(rng.choice(WIDTHS)) for _ in range(3))
    block = int(rng.choice([1, 1, 8, 16, 32, 64]))
    count = int(rng.integers(1, 70 if block == 1 else 6))
    inputs: Inputs = {
        "query": normal(rng, (*sizes.queries, heads, width), dtype),
        "key": normal(rng, (*sizes.keys, kv_heads, width), dtype),
        "value": normal(rng, (*sizes.keys, kv_heads, value_width), dtype),
        "sparse_indices": lists(
            rng, sizes, sizes.mode, int(rng.choice([1, kv_heads])), count, block, capped=not plain or bool(seed % 2)
        ),
    }
    if rng.integers(0, 4) == 0:
        inputs["value"] = inputs["key"]
    if rng.integers(0, 2):
        inputs["query_rope"] = normal(rng, (*sizes.queries, heads, rope), dtype)
        inputs["key_rope"] = normal(rng, (*sizes.keys, kv_heads, rope), dtype)
    attrs: dict[str, Any] = {
        "scale_value": float(rng.uniform(0.1, 0.6)),
        "sparse_block_size": block,
        "layout_query": layout,
        "layout_kv": layout,
        "sparse_mode": sizes.mode,
        "attention_mode": 2,
        "return_softmax_lse": plain or bool(rng.integers(0, 2)),
    }
    names = ("actual_seq_lengths_query", "actual_seq_lengths_kv")
    if layout == "TND" or (not plain and rng.integers(0, 2)):
        inputs |= sizes.lengths(names)
    else:
        sizes.q_lens, sizes.k_lens = (
            np.full_like(sizes.q_lens, sizes.queries[1]),
            np.full_like(sizes.k_lens, sizes.keys[1]),
        )
    if sinks or (not plain and rng.integers(0, 3) == 0):
        inputs["sinks"] = sink(rng, heads)
    if plain:
        return inputs, attrs
    if rng.integers(0, 3) == 0:
        keys = tuple(name for name in ("key", "value", "key_rope") if name in inputs)
        inputs = paged(rng, inputs, keys, sizes, names[1], int(rng.choice([3, 16])))
        attrs |= {"layout_kv": "PA_BSND", "return_softmax_lse": False}
    if "sinks" not in inputs:
        attrs["cpu_empty_rows"] = str(rng.choice(["", "zero", "mean", "nan"]))
    return inputs, attrs


REORDERED = "opdef_2026_reordered"


def attention_grad(seed: int, dtype: Any = np.float32, reordered: bool = False) -> Problem:
    """A SparseFlashAttentionGrad, with what its forward pass gives. `reordered` for what the variant of 2026 has
    besides: sinks, and key in place of value."""
    rng = np.random.default_rng(seed + 1)
    inputs, attrs = attention(seed, dtype, plain=True, sinks=reordered and bool(rng.integers(0, 3)))
    merged = reordered and bool(rng.integers(0, 3))
    if merged:
        inputs["value"] = inputs["key"]
    result = reference.run("SparseFlashAttention", inputs, attrs)
    if merged:
        del inputs["value"]
    inputs |= {
        "d_out": normal(rng, result["attention_out"].shape, dtype),
        "out": result["attention_out"],
        "softmax_max": result["softmax_max"],
        "softmax_sum": result["softmax_sum"],
    }
    kept = ("scale_value", "sparse_block_size", "sparse_mode")
    return inputs, {**{name: attrs[name] for name in kept}, "layout": attrs["layout_query"]}


def indexer(seed: int, dtype: Any = np.float32) -> Problem:
    """A LightningIndexer."""
    rng = np.random.default_rng(seed)
    layout = str(rng.choice(["BSND", "TND"]))
    sizes = Sizes(rng, layout)
    heads, width = int(rng.choice([1, 2, 3, 4, 8, 13, 16, 33])), int(rng.choice(WIDTHS))
    inputs: Inputs = {
        "query": normal(rng, (*sizes.queries, heads, width), dtype),
        "key": normal(rng, (*sizes.keys, 1, width), dtype),
        "weights": normal(rng, (*sizes.queries, heads), dtype),
    }
    attrs: dict[str, Any] = {
        "layout_query": layout,
        "layout_key": layout,
        "sparse_count": int(rng.integers(1, 70)),
        "sparse_mode": sizes.mode,
        "return_values": bool(rng.integers(0, 2)),
    }
    names = ("actual_seq_lengths_query", "actual_seq_lengths_key")
    if layout == "TND" or rng.integers(0, 2):
        inputs |= sizes.lengths(names)
    else:
        sizes.q_lens, sizes.k_lens = (
            np.full_like(sizes.q_lens, sizes.queries[1]),
            np.full_like(sizes.k_lens, sizes.keys[1]),
        )
    if rng.integers(0, 3) == 0:
        inputs = paged(rng, inputs, ("key",), sizes, names[1], int(rng.choice([3, 16])))
        attrs |= {"layout_key": "PA_BSND", "return_values": False}
    return inputs, attrs


def _best(rng: Rng, sizes: Sizes, mode: int, count: int) -> Any:
    """Lists as an indexer makes them: distinct visible keys in any order, then -1."""
    indices = np.full((*sizes.queries, 1, count), -1, np.int32)
    for place, visible in sizes.visible(mode):
        chosen = rng.permutation(visible)[:count]
        indices[(*place, 0)][: len(chosen)] = chosen
    return indices


def indexer_grad(seed: int, dtype: Any = np.float32) -> Problem:
    """A LightningIndexerGrad."""
    rng = np.random.default_rng(seed)
    layout = str(rng.choice(["BSND", "TND"]))
    sizes = Sizes(rng, layout, full=True)
    heads, width = int(rng.choice([1, 2, 3, 4, 8, 13, 16, 33])), int(rng.choice(WIDTHS))
    most = int(sizes.k_lens.min()) if sizes.mode == 0 else 50
    count = int(rng.integers(1, most + 1))
    inputs: Inputs = {
        "query": normal(rng, (*sizes.queries, heads, width), dtype),
        "key": normal(rng, (*sizes.keys, 1, width), dtype),
        "dy": normal(rng, (*sizes.queries, count), dtype),
        "sparse_indices": _best(rng, sizes, sizes.mode, count),
        "weights": normal(rng, (*sizes.queries, heads), dtype),
    }
    if layout == "TND":
        inputs |= sizes.lengths(("actual_seq_lengths_query", "actual_seq_lengths_key"))
    return inputs, {"headNum": heads, "layout": layout, "sparseMode": sizes.mode}


def indexer_loss(seed: int, dtype: Any = np.float32) -> Problem:
    """A SparseLightningIndexerGradKLLoss, with the statistics of attention to the same keys."""
    rng = np.random.default_rng(seed)
    layout = str(rng.choice(["BSND", "TND"]))
    sizes = Sizes(rng, layout, square=True, full=True)
    if layout == "BSND" and sizes.queries[1] > sizes.keys[1]:
        raise AssertionError("no sequence may have more queries than keys")
    heads, index_heads = int(rng.choice([1, 3, 8, 16, 20])), int(rng.choice([1, 3, 8, 16, 17]))
    width, rope, index_width = (int(rng.choice(WIDTHS)) for _ in range(3))
    count = int(rng.integers(1, 50))
    inputs: Inputs = {
        "query": normal(rng, (*sizes.queries, heads, width), dtype),
        "key": normal(rng, (*sizes.keys, 1, width), dtype),
        "sparse_indices": _best(rng, sizes, 3, count),
    }
    if rng.integers(0, 2):
        inputs["query_rope"] = normal(rng, (*sizes.queries, heads, rope), dtype)
        inputs["key_rope"] = normal(rng, (*sizes.keys, 1, rope), dtype)
    if rng.integers(0, 2):
        inputs["sinks"] = sink(rng, heads)
    scale = float(rng.uniform(0.1, 0.4))
    ends = ("actual_seq_lengths_query", "actual_seq_lengths_kv")
    forward = inputs | {"value": inputs["key"]} | (sizes.lengths(ends) if layout == "TND" else {})
    attrs = {"scale_value": scale, "layout_query": layout, "layout_kv": layout, "attention_mode": 2}
    result = reference.run("SparseFlashAttention", forward, attrs | {"sparse_mode": 3, "return_softmax_lse": True})
    inputs |= {
        "query_index": normal(rng, (*sizes.queries, index_heads, index_width), dtype),
        "key_index": normal(rng, (*sizes.keys, 1, index_width), dtype),
        "weight": (rng.standard_normal((*sizes.queries, index_heads)) / index_heads).astype(dtype),
        "softmax_max": result["softmax_max"],
        "softmax_sum": result["softmax_sum"],
    }
    if layout == "TND":
        inputs |= sizes.lengths(("actual_seq_lengths_query", "actual_seq_lengths_key"), np.int64)
    return inputs, {"scale_value": scale, "layout": layout}
