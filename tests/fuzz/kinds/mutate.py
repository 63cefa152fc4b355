"""Attentions of the kept graphs, and of the composers, with one or a few things changed."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping

import numpy as np
import onnx

from tests.fuzz.difference import Array
from tests.fuzz.feeds import feeds
from tests.fuzz.grammar import compose
from tests.fuzz.graph import Case
from tests.fuzz.mutations import change, forget
from tests.fuzz.oracle import Judge
from tests.fuzz.reduction import GraphKind
from tests.fuzz.snippets import Snippet, case_of, names, snippets
from tests.passes.builder import build
from tests.passes.strategies import even

UNDEFINED = re.compile(r"is -?(nan|inf)|(Mul|Add|Sub|Max|Min) -?(nan|inf)")
"""Changes that put in what is no number."""


class Mutate(GraphKind):
    """A kept graph's attention (tests/fuzz/snippets.py), or a composed one, after changes of mutations.py."""

    innocent = ("run_original", "_made")

    def __init__(self) -> None:
        self.names = names()
        self.read: dict[str, list[Snippet]] = {}

    def judge(self, seed: int) -> Judge | None:
        rng = random.Random(seed)
        case = self._base(rng)
        if case is None:
            return None
        model = onnx.ModelProto()
        model.CopyFrom(case.model)
        words = list(case.words)
        for _ in range(rng.choice([0, 1, 1, 1, 1, 2, 2, 3])):
            try:
                words.append(change(model, rng) or "")
            except Exception:  # of onnx: the model is none any more, and cannot be changed again
                return None
        if rng.random() < 0.9:
            forget(model)
        arrays = _fitting(case.base, model)
        if arrays is None:
            return None
        changed = case_of(model, arrays, words)
        made = Judge(model, lambda: feeds(changed, seed, 3), again=seed % 32 == 0, note="; ".join(words))
        made.loose = any(dim.dim_param for each in model.graph.input for dim in each.type.tensor_type.shape.dim)
        made.undefined = case.undefined or any(UNDEFINED.search(word) for word in words)
        made.group = "a factor is NaN or infinite, " if made.undefined else ""
        return made

    def _base(self, rng: random.Random) -> Case | None:
        """A model to change, with numbers for its inputs."""
        kind = rng.random()
        if kind < 0.2:
            case = compose(rng.getrandbits(32))
            arrays = feeds(case, rng.getrandbits(32), 1)[0].arrays
            made = case_of(case.model, arrays, ["composed", *case.words])
            made.undefined = case.undefined
            return made
        if kind < 0.4:
            spelt = build(even(rng.getrandbits(32)))
            return case_of(spelt.model, spelt.feeds(rng.getrandbits(32)), ["spelt"])
        name = rng.choice(self.names)
        if name not in self.read:
            self.read[name] = snippets(name)
        if not self.read[name]:
            return None
        snippet = rng.choice(self.read[name])
        return case_of(onnx.ModelProto.FromString(snippet.model), snippet.arrays, [name])


def _fitting(arrays: Mapping[str, Array], model: onnx.ModelProto) -> dict[str, Array] | None:
    """The numbers as the changed model takes them: another type at most."""
    fitting = {}
    for info in model.graph.input:
        if info.name not in arrays:
            return None
        dtype = onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        with np.errstate(all="ignore"):
            fitting[info.name] = np.asarray(arrays[info.name]).astype(dtype)
    return fitting
