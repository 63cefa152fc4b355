"""Attention with its gradient, composed by automatic differentiation (tests/passes/tape.py)."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from onnx import helper

from tests.passes.backward.test_pairs import SOFTCAPS, consistent
from tests.passes.tape import FLOAT32_MIN, Composed, Training, compose
from tools.fuzz.changed import allow_for, are_open, multiplied
from tools.fuzz.difference import Array, Feed
from tools.fuzz.mutations import change
from tools.fuzz.oracle import STEEP, Judge
from tools.fuzz.reduction import GraphKind

CHOICES: dict[str, tuple[Any, ...]] = {
    "symbolic": (False, True),
    "layout": ("BNSD", "BSND", "BSH"),
    "product": ("matmul", "matmul", "folded", "einsum", "fused"),
    "flipped": (False, True),
    "scale": ("none", "mul", "div", "query", "both"),
    "mask": (
        "none",
        "select",
        "select_const",
        "select_twice",
        "add",
        "bias",
        "select_bias",
        "packed",
        "packed_causal",
        "listed",
        "listed_causal",
    ),
    "fill": (-np.inf, FLOAT32_MIN, -1e4),
    "guard": ("none", "none", "none", "safe", "nan"),
    "masked_gradient": (False, True),
    "blended": (False, False, True),
    "softmax": ("op", "op", "decomposed"),
    "form": ("t - p*sum(t)", "p*(g - sum)", "(g - sum)*p", "negated", "einsum", "result", "quotient", "power"),
    "gqa": ("none", "none", "expand", "broadcast"),
    "second": (False, False, True),
    "softcap": SOFTCAPS,
    "wanted": ("qkv", "qkv", "q", "k", "v", "qv", "kv", "qk"),
}
SIZES = {"B": (1, 2, 3), "N": (1, 2, 4), "K": (1, 2), "S": (1, 3, 5), "T": (2, 6, 9), "D": (4, 8), "E": (4, 8, 3)}


class Gradients(GraphKind):
    """One training graph, fed with plain numbers, and with queries that make large scores."""

    def judge(self, seed: int) -> Judge | None:
        rng = random.Random(seed)
        sizes = {letter: rng.choice(each) for letter, each in SIZES.items()}
        fields = {name: rng.choice(each) for name, each in CHOICES.items()}
        case = Training(**consistent({**fields, "sizes": sizes}))
        composed = compose(case)
        changes: list[str] = []
        if rng.random() < 0.5:
            try:
                changes.append(str(change(composed.model, rng)))
            except Exception:  # of onnx: it is no model any more
                return None

        def fed() -> list[Feed]:
            return [replace(each, lenient=are_open(changes)) for each in _feeds(composed, seed, rng)]

        made = Judge(composed.model, fed, again=seed % 32 == 0, note="; ".join([*changes, repr(case)]))
        made.terms = multiplied(_terms, changes)
        if changes:
            made.loose, made.most = True, STEEP
            allow_for(made, changes)
        return made


def _terms(feed: Feed, output: str) -> float:
    """How large the terms of an output are: a gradient of the scores is a difference of sums of |g v|, and |g| is 1."""
    size = {name: float(np.abs(array).max(initial=0.0)) for name, array in feed.arrays.items()}
    others = {"dq": ("k", "v"), "dk": ("q", "v"), "dqr": ("kr", "v"), "dkr": ("qr", "v")}
    return float(np.prod([size[name] for name in others.get(output, ())]))


def _feeds(composed: Composed, seed: int, rng: random.Random) -> list[Feed]:
    fed = [
        ("plain", composed.feeds(seed)),
        ("large scores", _enlarged(composed.feeds(seed + 1), 10.0 ** rng.uniform(1.0, 7.0))),
    ]
    return [Feed(name, _typed(arrays, composed.model)) for name, arrays in fed]


def _typed(arrays: dict[str, Array], model: onnx.ModelProto) -> dict[str, Array]:
    """The numbers in the types of a model that was changed."""
    types = {each.name: helper.tensor_dtype_to_np_dtype(each.type.tensor_type.elem_type) for each in model.graph.input}
    with np.errstate(all="ignore"):
        return {name: array.astype(types[name]) for name, array in arrays.items()}


def _enlarged(arrays: dict[str, Array], factor: float) -> dict[str, Array]:
    """Queries enlarged, so that the scores are."""
    return {name: (array * np.float32(factor) if name == "q" else array) for name, array in arrays.items()}
