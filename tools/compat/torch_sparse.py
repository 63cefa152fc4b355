"""Compares the reference gradients of the sparse operators with torch's autograd in float64.

    python -m tools.compat.torch_sparse --problems 40

The tests compare these gradients with finite differences only.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

try:
    import torch
except ImportError:
    raise SystemExit("error: this needs torch: run it with an interpreter that has it") from None

from fa_compiler import reference
from tests import sparse_problems as problems


def sequences(inputs: dict[str, Any], layout: str, queries: str, keys: str) -> list[tuple[Any, Any]]:
    """The positions of the rows of each sequence in the query's tensors, and of its keys in the key's tensors."""
    if layout == "BSND":
        return [(b, b) for b in range(len(inputs["query"]))]
    ends = [np.concatenate([[0], inputs[name]]) for name in (queries, keys)]
    return [tuple(slice(end[b], end[b + 1]) for end in ends) for b in range(len(ends[0]) - 1)]  # type: ignore[misc]


def attention(seed: int) -> float:
    """The largest difference of the gradients of attention to selected keys."""
    inputs, attrs = problems.attention_grad(seed, np.float64)
    forward = {"layout_query": attrs["layout"], "layout_kv": attrs["layout"], "attention_mode": 2}
    names = ("scale_value", "sparse_block_size", "sparse_mode")
    settings = forward | {name: attrs[name] for name in names} | {"return_softmax_lse": True}
    backward_only = ("d_out", "out", "softmax_max", "softmax_sum")
    result = reference.run(
        "SparseFlashAttention", {k: v for k, v in inputs.items() if k not in backward_only}, settings, dtype="float64"
    )
    exact = inputs | {"out": result["attention_out"]} | {name: result[name] for name in backward_only[2:]}
    found = reference.run("SparseFlashAttentionGrad", exact, attrs, dtype="float64")
    leaves = {
        name: torch.tensor(inputs[name], requires_grad=True)
        for name in ("query", "key", "value", "query_rope", "key_rope")
        if name in inputs
    }
    total = torch.zeros((), dtype=torch.float64)
    block, mode = attrs["sparse_block_size"], attrs["sparse_mode"]
    for q_at, k_at in sequences(inputs, attrs["layout"], "actual_seq_lengths_query", "actual_seq_lengths_kv"):
        query, key, value = leaves["query"][q_at], leaves["key"][k_at], leaves["value"][k_at]
        if "query_rope" in leaves:
            query = torch.cat([query, leaves["query_rope"][q_at]], -1)
            key = torch.cat([key, leaves["key_rope"][k_at]], -1)
        rows, heads, kv_heads = len(query), query.shape[1], key.shape[1]
        for i in range(rows):
            visible = len(key) if mode == 0 else len(key) - rows + i + 1
            for head in range(heads):
                kv = head * kv_heads // heads
                lists = inputs["sparse_indices"][q_at][i]
                entries = lists[kv if len(lists) == kv_heads else 0]
                end = np.flatnonzero(entries < 0)
                entries = entries[: end[0]] if end.size else entries
                tokens = (entries[:, None] * block + np.arange(block)).reshape(-1)
                at = torch.from_numpy(tokens[tokens < visible].astype(np.int64))
                if len(at):
                    p = (attrs["scale_value"] * key[at, kv] @ query[i, head]).softmax(0)
                    total = total + (p @ value[at, kv]) @ torch.from_numpy(inputs["d_out"][q_at][i, head])
    if total.requires_grad:
        total.backward()
    return max(difference(found[f"d_{name}"], leaf.grad) for name, leaf in leaves.items())


def indexer(seed: int) -> float:
    """The largest difference of the gradients of the listed keys' index scores."""
    inputs, attrs = problems.indexer_grad(seed, np.float64)
    found = reference.run("LightningIndexerGrad", inputs, attrs, dtype="float64")
    leaves = {name: torch.tensor(inputs[name], requires_grad=True) for name in ("query", "key", "weights")}
    total = torch.zeros((), dtype=torch.float64)
    for q_at, k_at in sequences(inputs, attrs["layout"], "actual_seq_lengths_query", "actual_seq_lengths_key"):
        relu = torch.einsum("thd,jd->thj", leaves["query"][q_at], leaves["key"][k_at][:, 0]).relu()
        scores = torch.einsum("th,thj->tj", leaves["weights"][q_at], relu)
        lists = torch.from_numpy(inputs["sparse_indices"][q_at][:, 0].astype(np.int64))
        dy = torch.from_numpy(inputs["dy"][q_at]) * (lists >= 0)
        total = total + (scores.gather(1, lists.clamp(min=0)) * dy).sum()
    total.backward()
    pairs = (("dq", "query"), ("dk", "key"), ("dweights", "weights"))
    return max(difference(found[gradient], leaves[name].grad) for gradient, name in pairs)


def difference(found: Any, wanted: torch.Tensor | None) -> float:
    """The largest difference, relative to the largest number."""
    right = np.zeros_like(found) if wanted is None else wanted.numpy()
    return float(np.abs(found - right).max(initial=0.0) / max(np.abs(right).max(initial=0.0), 1.0))


def main() -> None:
    """Prints the largest difference of each operator; fails above 1e-9."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--problems", type=int, default=40)
    # In problems with odd seeds no list has entries after the visible blocks. The forward pass and the gradient read
    # such entries differently.
    seeds = range(1, 2 * parser.parse_args().problems, 2)
    for name, check in (("SparseFlashAttentionGrad", attention), ("LightningIndexerGrad", indexer)):
        worst = max(check(seed) for seed in seeds)
        print(f"{name}: {worst:.2g}")
        if not worst < 1e-9:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
