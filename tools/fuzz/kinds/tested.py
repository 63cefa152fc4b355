"""The models that the ordinary tests of the fusion are about (tools/fuzz/corpus.py), as they are and changed."""

from __future__ import annotations

import random

import onnx

from fa_compiler.passes.answer.options import DROP_ROUNDINGS, NO_EMPTY_ROWS, SHARED_CACHES
from tools.fuzz.changed import judged
from tools.fuzz.corpus import Kept, corpus
from tools.fuzz.oracle import Judge
from tools.fuzz.reduction import GraphKind
from tools.fuzz.snippets import case_of

LEFT_OUT = frozenset((SHARED_CACHES, DROP_ROUNDINGS))
"""Words about runs in which an output lies in the memory of an input, which none does here, and about roundings that
are left out on purpose."""
FOLDER = "tests/passes/"
GRADIENTS = f"{FOLDER}backward/"
ATTENTION_OPS = f"{FOLDER}attention_ops/"


class Tested(GraphKind):
    """One model of the tests after changes of mutations.py; the first cases of a seed are all of them as they are."""

    def __init__(self) -> None:
        self.models = [each for each in corpus() if LEFT_OUT.isdisjoint(each.assume) and not _may_be_empty(each)]

    def judge(self, seed: int) -> Judge | None:
        rng = random.Random(seed)
        number = seed & 0xFFFFFFFF
        kept = self.models[number % len(self.models)]
        case = case_of(onnx.ModelProto.FromString(kept.model), kept.feeds(), [kept.test.removeprefix(FOLDER)])
        case.assume = kept.assume
        changes = 0 if number < len(self.models) else None
        made = judged(case, rng, seed, gradient=kept.test.startswith(GRADIENTS), changes=changes)
        if made is not None:
            made.hides_nan = kept.test.startswith(ATTENTION_OPS)
        return made


def _may_be_empty(kept: Kept) -> bool:
    """May a row be masked everywhere, although the user rules that out? The lengths that are drawn may be 0."""
    inputs = onnx.ModelProto.FromString(kept.model).graph.input if NO_EMPTY_ROWS in kept.assume else ()
    tensors = [each.type.tensor_type for each in inputs]
    return any(each.elem_type == onnx.TensorProto.INT64 and len(each.shape.dim) == 1 for each in tensors)
