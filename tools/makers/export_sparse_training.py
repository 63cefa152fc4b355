"""Exports training graphs of sparse attention: the forward part and the gradients of torch's autograd in one graph.

    python -m tools.makers.export_sparse_training DIR

    train_dsa_latent      the query has two parts, a latent is both key and value, and the scores are the sum of two
                          products; an added mask of 0 and -inf selects the indexer's keys (as in DeepSeek's code)
    train_dsa_concat      the same with the two parts of query and key concatenated, and the selection by masked_fill
    train_dsa_heads       two key heads for four query heads, repeated
    train_dsa_gathered    keys and values gathered by the list; their gradients are scattered
    train_dsa_indexed     the same by indexing with positions, which becomes GatherND and ScatterND
    train_dsa_loss        attention's forward part, and the indexer's loss with its gradients: the divergence of its
                          distribution over the selected keys from the mean of attention's
    train_dsa_whole       both: attention's gradients from the gradient of its result, the indexer's from its loss

The selection itself has no gradient. This needs torch and onnxscript (the `export` extra), and downloads nothing. It
writes NAME.onnx, and NAME.npz with the inputs. `python -m tools.graphs.add` keeps them as regression tests.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

BATCH, TOKENS, HEADS, KEY_HEADS, WIDTH, ROPE = 2, 24, 4, 2, 16, 8
INDEX_HEADS, INDEX_WIDTH, SELECTED = 3, 8, 6
OPSET = 18
LOWEST = float(np.finfo(np.float32).min)

Tensors = dict[str, Tensor]


def causal() -> Tensor:
    """True where a key is visible to a row, [TOKENS, TOKENS]."""
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


def index_scores(given: Tensors) -> Tensor:
    """The indexer's score of each key, [B, S, T]: a weighted sum of rectified products, and LOWEST for later keys."""
    products = torch.einsum("bshd,btd->bsht", given["query_index"], given["key_index"]) * INDEX_WIDTH**-0.5
    scores = (products.relu() * given["weight"][..., None]).sum(2)
    return scores.masked_fill(~causal(), LOWEST)


def selection(given: Tensors) -> Tensor:
    """True at the keys that the indexer ranks highest, [B, S, T]; it has no gradient."""
    best = index_scores({name: value.detach() for name, value in given.items()}).topk(SELECTED, dim=-1).indices
    return torch.zeros(BATCH, TOKENS, TOKENS, dtype=torch.bool).scatter(-1, best, True)


def latent(given: Tensors) -> tuple[Tensor, Tensor]:
    """Probabilities [B, N, S, T] and result [B, S, N, D]."""
    scores = torch.einsum("bsnd,btd->bnst", given["query"], given["latent"])
    scores = scores + torch.einsum("bsnr,btr->bnst", given["query_rope"], given["key_rope"])
    mask = torch.full((BATCH, TOKENS, TOKENS), float("-inf")).masked_fill(selection(given), 0.0)
    mask = mask + torch.full((TOKENS, TOKENS), float("-inf")).triu(1)
    probabilities = (scores * WIDTH**-0.5 + mask[:, None]).softmax(-1)
    return probabilities, torch.einsum("bnst,btd->bsnd", probabilities, given["latent"])


def concat(given: Tensors) -> tuple[Tensor, Tensor]:
    """Probabilities and result [B, N, S, D]."""
    query = torch.cat((given["query"], given["query_rope"]), -1).transpose(1, 2)
    key = torch.cat((given["latent"], given["key_rope"]), -1)[:, None]
    scores = query @ key.transpose(-1, -2) * WIDTH**-0.5
    scores = scores.masked_fill(~(selection(given) & causal())[:, None], LOWEST)
    probabilities = scores.softmax(-1)
    return probabilities, probabilities @ given["latent"][:, None]


def heads(given: Tensors) -> tuple[Tensor, Tensor]:
    """Probabilities and result [B, N, S, D]."""
    key, value = (given[name].repeat_interleave(HEADS // KEY_HEADS, 1) for name in ("key", "value"))
    scores = given["query"] @ key.transpose(-1, -2) / WIDTH**0.5
    probabilities = scores.masked_fill(~(selection(given) & causal())[:, None], LOWEST).softmax(-1)
    return probabilities, probabilities @ value


def of_slots(given: Tensors, gather: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Probabilities [B, S, N, K] and result [B, S, N, D]; `gather` takes rows of [B, T, D] by a list [B, S, K]."""
    listed = index_scores({name: value.detach() for name, value in given.items()}).topk(SELECTED, dim=-1).indices
    key, value = (gather(given[name], listed) for name in ("key", "value"))
    scores = torch.einsum("bsnd,bskd->bsnk", given["query"], key) * WIDTH**-0.5
    later = listed > torch.arange(TOKENS)[None, :, None]
    probabilities = scores.masked_fill(later[:, :, None], float("-inf")).softmax(-1)
    return probabilities, torch.einsum("bsnk,bskd->bsnd", probabilities, value)


def gathered(given: Tensors) -> tuple[Tensor, Tensor]:
    """Attention to keys that torch.gather reads from tensors repeated for each row."""
    return of_slots(
        given,
        lambda rows, listed: torch.gather(
            rows[:, None].expand(BATCH, TOKENS, TOKENS, WIDTH), 2, listed[..., None].expand(-1, -1, -1, WIDTH)
        ),
    )


def indexed(given: Tensors) -> tuple[Tensor, Tensor]:
    """Attention to keys that are indexed by batch and position."""
    return of_slots(given, lambda rows, listed: rows[torch.arange(BATCH)[:, None, None], listed])


def divergence(given: Tensors, probabilities: Tensor) -> Tensor:
    """The indexer's loss, the divergence over the selected keys, summed over batch and rows."""
    target = probabilities.detach().sum(1)
    target = target / target.sum(-1, keepdim=True)
    scores = index_scores(given).masked_fill(~selection(given), LOWEST)
    return functional.kl_div(scores.log_softmax(-1), target, reduction="sum")


@dataclass(frozen=True)
class Export:
    """One export: the attention, the inputs whose gradients are exported, and whether the indexer's loss is, too."""

    attention: Callable[[Tensors], tuple[Tensor, Tensor]]
    wanted: tuple[str, ...] = ()
    loss: bool = False


PARTS = ("query", "query_rope", "latent", "key_rope")
INDEXER = ("query_index", "key_index", "weight")
EXPORTS = {
    "train_dsa_latent": Export(latent, PARTS),
    "train_dsa_concat": Export(concat, PARTS),
    "train_dsa_heads": Export(heads, ("query", "key", "value")),
    "train_dsa_gathered": Export(gathered, ("query", "key", "value")),
    "train_dsa_indexed": Export(indexed, ("query", "key", "value")),
    "train_dsa_loss": Export(concat, (), True),
    "train_dsa_whole": Export(latent, PARTS, True),
}


def arguments_of(chosen: Export) -> Tensors:
    """Random inputs of the attention and of the indexer, and a random gradient of the attention's result."""
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"query": (BATCH, TOKENS, HEADS, WIDTH)}
    if chosen.attention is heads:
        shapes["query"] = (BATCH, HEADS, TOKENS, WIDTH)
        shapes |= dict.fromkeys(("key", "value"), (BATCH, KEY_HEADS, TOKENS, WIDTH))
    elif chosen.attention in (gathered, indexed):
        shapes |= dict.fromkeys(("key", "value"), (BATCH, TOKENS, WIDTH))
    else:
        shapes |= {"query_rope": (BATCH, TOKENS, HEADS, ROPE), "latent": (BATCH, TOKENS, WIDTH)}
        shapes["key_rope"] = (BATCH, TOKENS, ROPE)
    shapes["query_index"] = (BATCH, TOKENS, INDEX_HEADS, INDEX_WIDTH)
    shapes["key_index"] = (BATCH, TOKENS, INDEX_WIDTH)
    shapes["weight"] = (BATCH, TOKENS, INDEX_HEADS)
    given = {name: torch.randn(shape) for name, shape in shapes.items()}
    if chosen.wanted:
        given["d_out"] = torch.randn(chosen.attention(given)[1].shape)
    return given


def export(name: str, folder: Path) -> None:
    """One graph with its inputs."""
    chosen = EXPORTS[name]
    given = arguments_of(chosen)
    names = list(given)
    learnt = INDEXER if chosen.loss else ()

    def step(*values: Tensor) -> tuple[Tensor, ...]:
        tensors = dict(zip(names, values, strict=True))
        for each in (*chosen.wanted, *learnt):
            tensors[each] = tensors[each].detach().requires_grad_()
        probabilities, out = chosen.attention(tensors)
        results: list[Tensor] = [out]
        if chosen.wanted:
            results.extend(torch.autograd.grad(out, [tensors[each] for each in chosen.wanted], tensors["d_out"]))
        if chosen.loss:
            loss = divergence(tensors, probabilities)
            results.extend((loss, *torch.autograd.grad(loss, [tensors[each] for each in learnt])))
        return tuple(results)

    graph = make_fx(step, decomposition_table=torch._decomp.core_aten_decompositions())(*given.values())
    outputs = ["out", *(f"d_{each}" for each in chosen.wanted)]
    outputs += ["loss", *(f"d_{each}" for each in learnt)] if chosen.loss else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            graph, tuple(given.values()), str(folder / f"{name}__fxjoint_op{OPSET}.onnx"), dynamo=True,
            opset_version=OPSET, input_names=names, output_names=outputs, external_data=False,
        )  # fmt: skip
    np.savez(folder / f"{name}__fxjoint_op{OPSET}.npz", **{each: value.numpy() for each, value in given.items()})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in EXPORTS:
        export(name, folder)


if __name__ == "__main__":
    main()
