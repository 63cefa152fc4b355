"""Trains a small lightning indexer to rank the keys by attention, with the fused operators and without them.

    python examples/train_indexer.py --steps 300

The teacher is a fixed causal multi-query attention. The student scores keys with a few heads and selects the best ones.
It learns from the divergence of its distribution over the selected keys from the teacher's. One run uses
LightningIndexer (to select keys), SparseFlashAttention (for the teacher's statistics over these keys) and
SparseLightningIndexerGradKLLoss (for the loss and its gradients). The other run computes the same in NumPy with dense
matrices and masks of rows times keys. Both losses are printed. They agree up to rounding, unless two scores at the end
of a list are so close that rounding changes their order.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_compiler import ops

Array = npt.NDArray[np.float32]
Gradients = dict[str, Array]


@dataclass(frozen=True)
class Setup:
    """The sizes. A token is a vector of `hidden` numbers; every step draws new tokens."""

    tokens: int = 48
    hidden: int = 24
    heads: int = 4
    width: int = 16
    index_heads: int = 3
    index_width: int = 8
    selected: int = 12
    scale: float = 0.6

    def weights(self, rng: np.random.Generator) -> dict[str, Array]:
        """The trained weights: projections to the index queries, keys and head weights."""
        shapes = {
            "query": (self.hidden, self.index_heads * self.index_width),
            "key": (self.hidden, self.index_width),
            "weight": (self.hidden, self.index_heads),
        }
        return {name: normal(rng, shape, shape[0] ** -0.5) for name, shape in shapes.items()}

    def teacher(self, rng: np.random.Generator) -> dict[str, Array]:
        """The teacher's projections."""
        shapes = {"query": (self.hidden, self.heads * self.width), "key": (self.hidden, self.width)}
        return {name: normal(rng, shape, shape[0] ** -0.5) for name, shape in shapes.items()}


def normal(rng: np.random.Generator, shape: tuple[int, ...], deviation: float) -> Array:
    """Normal numbers."""
    return (deviation * rng.standard_normal(shape)).astype(np.float32)


def projected(setup: Setup, x: Array, teacher: dict[str, Array], weights: dict[str, Array]) -> dict[str, Array]:
    """Queries and keys of teacher and student for one sequence, batch 1, in BSND."""
    s, t = setup, len(x)
    return {
        "query": (x @ teacher["query"]).reshape(1, t, s.heads, s.width),
        "key": (x @ teacher["key"]).reshape(1, t, 1, s.width),
        "query_index": (x @ weights["query"]).reshape(1, t, s.index_heads, s.index_width),
        "key_index": (x @ weights["key"]).reshape(1, t, 1, s.index_width),
        "weight": (x @ weights["weight"]).reshape(1, t, s.index_heads),
    }


def fused(setup: Setup, given: dict[str, Array]) -> tuple[float, Gradients]:
    """The loss of a step and its gradients, with the operators."""
    index = {"query": given["query_index"], "key": given["key_index"], "weights": given["weight"]}
    listed = ops.run("LightningIndexer", index, {"sparse_count": setup.selected}, ["sparse_indices"])
    attention = {"query": given["query"], "key": given["key"], "value": given["key"]} | listed
    attrs = {"scale_value": setup.scale, "attention_mode": 2, "return_softmax_lse": True}
    statistics = ops.run("SparseFlashAttention", attention, attrs, ["softmax_max", "softmax_sum"])
    attrs = {"scale_value": setup.scale, "layout": "BSND"}
    found = ops.run("SparseLightningIndexerGradKLLoss", given | listed | statistics, attrs)
    return float(found.pop("loss")[0]), {name.removeprefix("d_"): value for name, value in found.items()}


def dense(setup: Setup, given: dict[str, Array]) -> tuple[float, Gradients]:
    """The same with matrices of rows times keys: a mask of the best keys, a softmax, and the chain rule."""
    query, key = given["query"][0], given["key"][0, :, 0]
    query_index, key_index, weight = given["query_index"][0], given["key_index"][0, :, 0], given["weight"][0]
    tokens = len(query)
    products = np.einsum("thd,jd->thj", query_index, key_index)
    relu = np.maximum(products, 0)
    scores = np.where(np.tri(tokens, dtype=bool), np.einsum("th,thj->tj", weight, relu), -np.inf)
    best = np.argsort(-scores, axis=1, kind="stable")[:, : setup.selected]
    kept = np.zeros((tokens, tokens), bool)
    np.put_along_axis(kept, best, True, axis=1)
    kept &= np.tri(tokens, dtype=bool)
    teacher = softmax(np.where(kept[:, None], setup.scale * np.einsum("tgd,jd->tgj", query, key), -np.inf)).mean(axis=1)
    student = softmax(np.where(kept, scores, -np.inf))
    floors = np.maximum(teacher, 1e-8), np.maximum(student, 1e-8)
    loss = float(np.sum(np.where(kept, floors[0] * (np.log(floors[0]) - np.log(floors[1])), 0)))
    back = np.where(kept, student - teacher, 0)
    back_products = back[:, None] * weight[:, :, None] * (products > 0)
    return loss, {
        "query_index": np.einsum("thj,jd->thd", back_products, key_index)[None],
        "key_index": np.einsum("thj,thd->jd", back_products, query_index)[None, :, None],
        "weight": np.einsum("tj,thj->th", back, relu)[None],
    }


def softmax(scores: Array) -> Array:
    """The softmax over the last axis."""
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


Step = Callable[[Setup, dict[str, Array]], tuple[float, Gradients]]


def train(step: Step, steps: int, rate: float = 0.002) -> list[float]:
    """The losses of plain gradient descent, as means over the tokens. Every run has the same tokens."""
    setup, rng = Setup(), np.random.default_rng(0)
    teacher, weights = setup.teacher(rng), setup.weights(rng)
    losses = []
    for _ in range(steps):
        x = normal(rng, (setup.tokens, setup.hidden), 1.0)
        loss, gradients = step(setup, projected(setup, x, teacher, weights))
        losses.append(loss / setup.tokens)
        for name, source in (("query", "query_index"), ("key", "key_index"), ("weight", "weight")):
            weights[name] -= rate * (x.T @ gradients[source].reshape(setup.tokens, -1))
    return losses


def main() -> None:
    """Prints every twentieth loss of both runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    if steps < 1:
        parser.error("--steps has to be at least 1")
    curves: list[Any] = [train(fused, steps), train(dense, steps)]
    print("step     fused     dense")
    for step in sorted({*range(0, steps, 20), steps - 1}):
        print(f"{step:4}  {curves[0][step]:8.5f}  {curves[1][step]:8.5f}")
    print(f"largest difference {np.abs(np.subtract(*curves)).max():.2g}")


if __name__ == "__main__":
    main()
