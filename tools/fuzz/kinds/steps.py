"""Steps of a decoder in plain operators: new keys behind a past, few rows, grouped heads, rows without a key.

keys      := Concat(past, new), given as an output or not, repeated for the query's heads
scores    := terms(query keys^T scale)
terms     := 0 to 2 of: a selection, a mask that is added, a bias, the causal band
result    := guard(softmax(scores)) values
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from tools.fuzz.difference import LARGEST
from tools.fuzz.feeds import feeds
from tools.fuzz.graph import Case, Graph, Size
from tools.fuzz.oracle import Judge
from tools.fuzz.reduction import GraphKind

FILLS = (-np.inf, -np.inf, -LARGEST, -LARGEST, -1e9, -1e4)
Output = tuple[str, str, Sequence[Size | None]]


class Steps(GraphKind):
    """One step, fed in several ways."""

    def judge(self, seed: int) -> Judge:
        case = _Composer(random.Random(seed)).case()
        note = f"{' '.join(case.words)} open {''.join(sorted(case.open))} {dict(case.sizes)}"
        return Judge(case.model, lambda: feeds(case, seed), (), seed % 32 == 0, note, f"{case.inputs[0].dtype}, ")


class _Composer:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        heads = rng.choice([1, 2, 4])
        sizes = {"B": rng.choice([1, 2, 3]), "N": heads, "S": rng.choice([1, 1, 1, 3]), "D": rng.choice([4, 8])}
        sizes["K"] = rng.choice([each for each in (1, 2, 4) if heads % each == 0])
        sizes["P"] = rng.choice([1, 2, 4])
        sizes["T"] = sizes["P"] + sizes["S"]
        self.g = Graph(rng, sizes, frozenset({"B"} if rng.random() < 0.5 else ()), rng.choice([17, 17, 18, 21]))
        self.dtype = "float16" if rng.random() < 0.25 else "float32"

    def case(self) -> Case:
        rng, g = self.rng, self.g
        query = g.input("value", self.dtype, ("B", "N", "S", "D"), name="q")
        keys, values = self._joined("k"), self._joined("v")
        turned = g.op("Transpose", self._repeated(keys), perm=[0, 1, 3, 2])
        scores = g.op("Mul", g.op("MatMul", query, turned), g.number(0.5, self.dtype))
        for term in rng.sample([self._selected, self._masked, self._biased, self._banded], rng.choice([0, 1, 1, 2])):
            scores = term(scores)
        weights = g.op("Softmax", scores, axis=-1)
        if rng.random() < 0.2:
            g.words.append("guard")
            weights = g.op("Where", g.op("IsNaN", weights), g.number(0.0, self.dtype), weights)
        result = g.op("MatMul", weights, self._repeated(values))
        outputs: list[Output] = [(result, self.dtype, ("B", "N", "S", "D"))]
        if rng.random() < 0.7:
            outputs += [(joined, self.dtype, ("B", "K", "T", "D")) for joined in (keys, values)]
        return g.case(outputs)

    def _joined(self, name: str) -> str:
        """New keys or values behind those of the past."""
        new = self.g.input("value", self.dtype, ("B", "K", "S", "D"), name=name)
        past = self.g.input("value", self.dtype, ("B", "K", "P", "D"), name=f"past_{name}")
        return self.g.op("Concat", past, new, axis=2)

    def _repeated(self, value: str) -> str:
        g = self.g
        if g.sizes["K"] == g.sizes["N"]:
            return value
        groups = g.sizes["N"] // g.sizes["K"]
        wide = g.op("Expand", g.unsqueeze(value, [2]), g.shape(["B", "K", groups, "T", "D"]))
        return g.reshape(wide, ["B", "N", "T", "D"])

    def _dims(self) -> Sequence[Size]:
        return self.rng.choice([("B", 1, 1, "T"), ("B", 1, "S", "T"), (1, 1, "S", "T"), ("B", "N", "S", "T")])

    def _selected(self, scores: str) -> str:
        fill = self.rng.choice(FILLS)
        self.g.words.append(f"select {fill:g}")
        kept = self.g.input("bool", "bool", self._dims())
        return self.g.op("Where", kept, scores, self.g.number(fill, self.dtype))

    def _masked(self, scores: str) -> str:
        fill = self.rng.choice(FILLS)
        self.g.words.append(f"add {fill:g}")
        if self.rng.random() < 0.5:
            return self.g.op("Add", scores, self.g.input("fmask", self.dtype, self._dims(), fill))
        kept = self.g.input("bool", "bool", self._dims())
        zero, low = (self.g.number(number, self.dtype) for number in (0.0, fill))
        return self.g.op("Add", scores, self.g.op("Where", kept, zero, low))

    def _biased(self, scores: str) -> str:
        self.g.words.append("bias")
        return self.g.op("Add", scores, self.g.input("bias", self.dtype, self._dims()))

    def _banded(self, scores: str) -> str:
        sizes = self.g.sizes
        self.g.words.append("band")
        band = np.tril(np.ones((sizes["S"], sizes["T"]), np.bool_), sizes["P"])
        return self.g.op("Where", self.g.const(band, "bool"), scores, self.g.number(self.rng.choice(FILLS), self.dtype))
