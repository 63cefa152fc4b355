"""Attention in odd spellings and near misses, from the grammar of tools/fuzz/grammar.py."""

from __future__ import annotations

import numpy as np
from onnx import numpy_helper

from tools.fuzz.feeds import feeds
from tools.fuzz.grammar import compose
from tools.fuzz.oracle import Judge
from tools.fuzz.reduction import GraphKind


class Compose(GraphKind):
    """One attention of the grammar, fed in several ways."""

    def judge(self, seed: int) -> Judge:
        case = compose(seed)
        note = f"{' '.join(case.words)} {' '.join(case.assume)} open {''.join(sorted(case.open))} {dict(case.sizes)}"
        group = f"{case.inputs[0].dtype}, " + ("a factor is NaN or infinite, " if case.undefined else "")
        made = Judge(case.model, lambda: feeds(case, seed), case.assume, seed % 32 == 0, note, group)
        # NaN of an infinity that is added to a key which another mask excludes is not read (recognised.md).
        numbers = map(numpy_helper.to_array, case.model.graph.initializer)
        made.undefined = case.undefined or any(each.dtype.kind == "f" and np.isposinf(each).any() for each in numbers)
        return made
