"""torch's dense masked and gathered formulations of the sparse operators: a helper process of sparse.py, in the
interpreter that has torch.

It answers as peers.py says. The question for a case is

    {"case": name, "inputs": path, "selected": n, "scale": s, "threads": n, "bfloat16": flag}

The inputs are an .npz of float32 and int32; they are converted before any run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.torch_peers import Peers, Run
from tools.processes import serve

Tensors = dict[str, Tensor]


def attention(given: Tensors, scale: float, selected: int) -> dict[str, Run]:
    """The result, [rows, heads, D]."""
    query, key = _whole(given)
    value, index = given["value"][:, 0], _lists(given)
    return {
        "torch, masked": lambda: _masked(query, key, value, index, scale),
        "torch, gathered": lambda: _gathered(query, key, value, index, scale),
    }


def gradient(given: Tensors, scale: float, selected: int) -> dict[str, Run]:
    """The gradient of the query without its rope part; all other gradients are computed, too. The forward part is
    included, because autograd needs what it saves."""
    (query, key), value, index = _whole(given), given["value"][:, 0].clone(), _lists(given)
    leaves = [each.requires_grad_() for each in (query, key, value)]

    def both(form: Callable[..., Tensor]) -> Tensor:
        out = form(*leaves, index, scale)
        return torch.autograd.grad(out, leaves, given["d_out"])[0][..., : value.shape[-1]]

    return {"torch, masked, both ways": lambda: both(_masked), "torch, gathered, both ways": lambda: both(_gathered)}


def indexer(given: Tensors, scale: float, selected: int) -> dict[str, Run]:
    """The best scores of each row."""
    query, key, weights = given["query"], given["key"], given["weights"]

    def dense() -> Tensor:
        scores = torch.einsum("bshd,btnd->bsht", query, key).relu_()
        return torch.einsum("bsh,bsht->bst", weights, scores).topk(selected).values

    return {"torch": dense}


def index_gradient(given: Tensors, scale: float, selected: int) -> dict[str, Run]:
    """The gradient of the queries of the index heads; those of keys and weights are computed, too."""
    leaves = [given[name][0].clone().requires_grad_() for name in ("query", "key", "weights")]
    index, back = _lists({"sparse_indices": given["sparse_indices"][0]}), given["dy"][0]

    def gathered() -> Tensor:
        query, key, weights = leaves
        products = (query @ key[:, 0][index].transpose(1, 2)).relu()
        return torch.autograd.grad((products * weights[..., None]).sum(1), leaves, back)[0][None]

    return {"torch, gathered, both ways": gathered}


def _masked(query: Tensor, key: Tensor, value: Tensor, index: Tensor, scale: float) -> Tensor:
    hidden = torch.ones(len(query), len(key), dtype=torch.bool).scatter_(1, index, False)
    scores = (query @ key.T * scale).masked_fill(hidden[:, None], float("-inf"))
    return scores.softmax(-1) @ value


def _gathered(query: Tensor, key: Tensor, value: Tensor, index: Tensor, scale: float) -> Tensor:
    scores = query @ key[index].transpose(1, 2) * scale
    return scores.softmax(-1) @ value[index]


def _whole(given: Tensors) -> tuple[Tensor, Tensor]:
    return torch.cat([given["query"], given["query_rope"]], -1), torch.cat([given["key"], given["key_rope"]], -1)[:, 0]


def _lists(given: Tensors) -> Tensor:
    return given["sparse_indices"][:, 0].long()


CASES = {"attention": attention, "gradient": gradient, "indexer": indexer, "index-grad": index_gradient}


def prepared(question: dict[str, Any]) -> dict[str, Run]:
    """The peers of a case."""
    wide = torch.bfloat16 if question["bfloat16"] else torch.float32
    with np.load(question["inputs"]) as file:
        given = {name: torch.from_numpy(file[name]) for name in file}
    given = {name: each.to(wide) if each.is_floating_point() else each for name, each in given.items()}
    return CASES[question["case"]](given, question["scale"], question["selected"])


if __name__ == "__main__":
    serve(Peers(prepared).answer, {})
