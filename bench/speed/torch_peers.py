"""torch's attention: the forward part and its autograd. It runs in the interpreter that has torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional

from bench.speed.peer import MASKED, Factory, NotOffered, Peer, Problem
from bench.speed.truth import Array, visible

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def tensor(array: Array, dtype: str) -> torch.Tensor:
    """The array's memory as a tensor."""
    if dtype == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def computed(problem: Problem, attend: Attention) -> Peer:
    """A peer for a function of query, key and value, which are all [batch, heads, rows or keys, size]."""
    case = problem.case
    if case.dtype == "float16" and case.flops > 1e9:
        raise NotOffered("float16 products are not vectorised")
    names: list[str] = [name for name in ("q", "k", "v", "dy") if name in problem.data]
    data: dict[str, torch.Tensor] = {name: tensor(problem.data[name], case.dtype) for name in names}
    box: dict[str, Any] = {}

    def split(name: str, value: torch.Tensor) -> torch.Tensor:
        if value.ndim == 4:
            return value
        return value.unflatten(-1, (case.heads if name == "q" else case.kv_heads, case.size)).transpose(1, 2)

    def forward() -> torch.Tensor:
        return attend(*(split(name, data[name]) for name in "qkv")).transpose(1, 2).flatten(2)

    def inference() -> None:
        with torch.inference_mode():
            box["results"] = [forward()]

    if not case.gradient:
        return Peer(inference, lambda: [box["results"][0].float().numpy()])
    leaves = [data[name].requires_grad_() for name in "qkv"]
    kept = forward() if case.kind == "backward" else None

    def training() -> None:
        out = forward() if kept is None else kept
        gradients = torch.autograd.grad(out, leaves, data["dy"], retain_graph=kept is not None)
        box["results"] = [*gradients] if kept is not None else [out.detach(), *gradients]

    return Peer(training, lambda: [value.float().numpy() for value in box["results"]])


def _mask(problem: Problem) -> torch.Tensor | None:
    """The mask: boolean for a window, numbers for padding and bias. A causal mask is an argument instead."""
    case, data = problem.case, problem.data
    if case.mask == "window":
        left = visible(case, np.arange(case.rows))
        assert left is not None
        return torch.from_numpy(left)[None, None]
    if case.mask == "pad":
        return torch.where(torch.from_numpy(data["valid"]), 0.0, MASKED).to(_type(problem))[:, None, None]
    return tensor(data["bias"], case.dtype) if case.mask == "bias" else None


def _type(problem: Problem) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, problem.case.dtype)
    return dtype


def sdpa(problem: Problem) -> Peer:
    """scaled_dot_product_attention, with the kernel that torch chooses."""
    case, mask = problem.case, _mask(problem)
    if case.mask == "causal" and case.rows != case.keys:
        raise NotOffered("its causal mask begins at the first key")
    attend = functools.partial(functional.scaled_dot_product_attention, attn_mask=mask,
                               is_causal=case.mask == "causal", enable_gqa=case.heads != case.kv_heads)  # fmt: skip
    return computed(problem, attend)


def eager(problem: Problem) -> Peer:
    """Separate products and softmax."""
    case, mask = problem.case, _mask(problem)
    if case.score_bytes > 1 << 30:
        raise NotOffered("far too slow")
    left = visible(case, np.arange(case.rows)) if case.mask == "causal" else None
    allowed = None if left is None else torch.from_numpy(left)
    repeats = case.heads // case.kv_heads

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = torch.matmul(q, k.transpose(-1, -2)) * case.size**-0.5
        if allowed is not None:
            scores = torch.where(allowed, scores, -math.inf)
        elif mask is not None:
            scores = torch.where(mask, scores, -math.inf) if mask.dtype == torch.bool else scores + mask
        return torch.matmul(scores.softmax(-1), v)

    return computed(problem, attend)


@functools.cache
def _compiled() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., torch.Tensor] = torch.compile(flex_attention, dynamic=False)
    return compiled


def flex(problem: Problem) -> Peer:
    """Compiled flex_attention, for masks whose structure lets it skip blocks."""
    from torch.nn.attention.flex_attention import create_block_mask

    case = problem.case
    if case.kind != "forward" or case.mask not in ("causal", "window") or case.dtype == "float16":
        raise NotOffered("forward, causal or window, not float16")
    window = case.window if case.mask == "window" else case.keys

    def inside(batch: object, head: object, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= row) & (key > row - window)

    blocks = create_block_mask(inside, None, None, case.rows, case.keys, device="cpu")
    attend = functools.partial(_compiled(), block_mask=blocks, enable_gqa=case.heads != case.kv_heads)
    return computed(problem, attend)


def prepare(threads: int) -> None:
    """Prepare a process once: set the number of threads."""
    torch.set_num_threads(threads)


PEERS: dict[str, Factory] = {"torch-sdpa": sdpa, "torch-eager": eager, "torch-flex": flex}
VERSION = f"torch {torch.__version__}"
