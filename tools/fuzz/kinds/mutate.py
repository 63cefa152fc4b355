"""Attentions of the kept graphs, and of the composers, with one or a few things changed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import onnx

from tests.passes.builder import build
from tests.passes.strategies import even
from tools.fuzz.changed import judged
from tools.fuzz.feeds import feeds
from tools.fuzz.grammar import compose
from tools.fuzz.graph import Case
from tools.fuzz.operators import operator
from tools.fuzz.oracle import Judge
from tools.fuzz.reduction import GraphKind
from tools.fuzz.snippets import Snippet, case_of, names, snippets, training, whole

OPERATOR, TRAINING = "operator", "training"


class Mutate(GraphKind):
    """A kept graph's attention (tools/fuzz/snippets.py), or a composed one, after changes of mutations.py."""

    innocent = (*GraphKind.innocent, "_made")

    def __init__(self) -> None:
        self.names, self.training = names(), training()
        self.read: dict[str, list[Snippet]] = {}

    def judge(self, seed: int) -> Judge | None:
        rng = random.Random(seed)
        case = self._base(rng)
        if case is None:
            return None
        made = judged(case, rng, seed, gradient=case.words[0] == TRAINING)
        if made is not None:
            made.hides_nan = case.words[0] == OPERATOR
        return made

    def _base(self, rng: random.Random) -> Case | None:
        """A model to change, with numbers for its inputs."""
        kind = rng.random()
        if kind < 0.15:
            return _fed(operator(rng.getrandbits(32)), rng, [OPERATOR])
        if kind < 0.25:
            snippet = whole(rng.choice(self.training))
            return case_of(onnx.ModelProto.FromString(snippet.model), snippet.arrays, [TRAINING])
        if kind < 0.5:
            return _fed(compose(rng.getrandbits(32)), rng, ["composed"])
        if kind < 0.65:
            spelt = build(even(rng.getrandbits(32)))
            return case_of(spelt.model, spelt.feeds(rng.getrandbits(32)), ["spelt"])
        name = rng.choice(self.names)
        if name not in self.read:
            self.read[name] = snippets(name)
        if not self.read[name]:
            return None
        snippet = rng.choice(self.read[name])
        return case_of(onnx.ModelProto.FromString(snippet.model), snippet.arrays, [name])


def _fed(case: Case, rng: random.Random, words: Sequence[str]) -> Case:
    """A composed case with numbers for a plain run."""
    arrays = feeds(case, rng.getrandbits(32), 1)[0].arrays
    made = case_of(case.model, arrays, [*words, *case.words])
    made.inputs, made.undefined, made.assume = case.inputs, case.undefined, case.assume
    return made
