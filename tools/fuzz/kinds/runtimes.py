"""The models of other kinds, fused into the operators of ONNX and ONNX Runtime, which ONNX Runtime runs.

Not all inputs count. Query, key and value are taken to be finite, because a NaN guard stands behind the operator. The
kernels refuse sizes of 0, and add up products of the largest numbers before they divide. Nobody vouches for it that no
row is empty, because some inputs have such rows.
"""

from __future__ import annotations

import random

import numpy as np
import onnx

from fa_compiler.passes.answer.options import NO_EMPTY_ROWS
from tools.fuzz.difference import Feed
from tools.fuzz.file_parts import operator_beside
from tools.fuzz.oracle import Judge
from tools.fuzz.reduction import GraphKind, judge_of_others

KINDS = ("compose", "spellings", "ready_made", "tested", "steps")
RUNTIME = "ort-cpu"
LARGEST = 1e35
BESIDE = 0.15
"""Share of the models with an operator of any type beside the attention: in a newer opset it may have no kernel."""


class Runtimes(GraphKind):
    """A model of another kind, for one of the two targets."""

    def judge(self, seed: int) -> Judge | None:
        made = judge_of_others(KINDS, seed)
        if made is None:
            return None
        rng = random.Random(seed)
        if rng.random() < BESIDE:
            made.model = onnx.ModelProto.FromString(made.model.SerializeToString())
            operator_beside(made.model, rng)
        given = made.feeds
        made.feeds = lambda: [feed for feed in (given() if callable(given) else given) if _counts(feed)]
        made.target = "contrib" if seed // len(KINDS) % 2 else "onnx"
        made.runtime = RUNTIME
        made.assume = [word for word in made.assume if word != NO_EMPTY_ROWS]
        made.group = f"{made.target}, {made.group}"
        return made


def _counts(feed: Feed) -> bool:
    floats = [array for array in feed.arrays.values() if array.dtype.kind == "f"]
    return not feed.spoiled and not feed.empty and all(np.abs(array).max() < LARGEST for array in floats)
