"""The models that the ordinary tests of the fusion are about (tests/fuzz/corpus.py), as they are and changed."""

from __future__ import annotations

import random

import onnx

from tests.fuzz.changed import judged
from tests.fuzz.corpus import corpus
from tests.fuzz.oracle import Judge
from tests.fuzz.reduction import GraphKind
from tests.fuzz.snippets import case_of

SHARED = "shared-caches"
"""Is about runs in which an output lies in the memory of an input; here none does."""
GRADIENTS = ("test_backward", "test_index_loss")
ATTENTION_OPS = ("test_attention_ops", "test_group_cache")


class Tested(GraphKind):
    """One model of the tests after changes of mutations.py; the first cases of a seed are all of them as they are."""

    def __init__(self) -> None:
        self.models = [each for each in corpus() if SHARED not in each.assume]

    def judge(self, seed: int) -> Judge | None:
        rng = random.Random(seed)
        number = seed & 0xFFFFFFFF
        kept = self.models[number % len(self.models)]
        test = kept.test.rpartition("/")[2]
        case = case_of(onnx.ModelProto.FromString(kept.model), kept.feeds(), [test])
        case.assume = kept.assume
        changes = 0 if number < len(self.models) else None
        made = judged(case, rng, seed, gradient=test.startswith(GRADIENTS), changes=changes)
        if made is not None:
            made.hides_nan = test.startswith(ATTENTION_OPS)
        return made
