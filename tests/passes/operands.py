"""The three operands as models hand them in: layouts, one packed input, a cache of earlier steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tests.passes.feeds import normal
from tests.passes.formula import Scores
from tests.passes.spelling import Spelling
from tests.passes.writer import Array, Writer, split

DIMS = {
    "BNSD": "B{n}{s}{d}",
    "BSND": "B{s}{n}{d}",
    "BSH": "B{s}({n}{d})",
    "SBH": "{s}B({n}{d})",
    "BSD": "B{s}{d}",
    "SD": "{s}{d}",
}
LETTERS = {"q": ("N", "S", "D"), "k": ("K", "T", "D"), "v": ("K", "T", "E")}
"""Heads, rows and depth of each operand."""


@dataclass(frozen=True)
class Operand:
    """One operand as [B, N, S, D] or of the low rank of its layout, and before its heads and rows changed places."""

    value: str
    before: str
    perm: tuple[int, ...] | None
    """What makes the transposed operand of `before` at once."""


class Operands:
    """Writes the inputs of one spelling and knows them in float64."""

    def __init__(self, spelling: Spelling, writer: Writer, kind: int) -> None:
        self.spelling, self.writer, self.kind = spelling, writer, kind
        self.sizes = writer.sizes

    def written(self) -> list[Operand]:
        """Query, key and value, heads not repeated."""
        spelling = self.spelling
        given = self._packed() if spelling.packed != "none" else [self._given(name) for name in LETTERS]
        if spelling.identity:
            given = [self.writer.op("Identity", value) for value in given]
        return [self._heads_apart(value, name) for name, value in zip(LETTERS, given, strict=True)]

    def _dims(self, name: str, rows: str) -> str:
        heads, _, depth = LETTERS[name]
        return DIMS[self.spelling.layout].format(n=heads, s=rows, d=depth)

    def _input(self, name: str, dims: str) -> str:
        sizes = [self.writer.size(letter) for letter in split(dims)]
        return self.writer.input(name, self.kind, dims, normal(sizes, self.spelling.dtype))

    def _given(self, name: str) -> str:
        if name == "q" or not self.spelling.cache:
            return self._input(name, self._dims(name, LETTERS[name][1]))
        past = self._input(f"past_{name}", self._dims(name, "P"))
        axis = split(self._dims(name, "P")).index("P")
        value = self.writer.op("Concat", past, self._input(name, self._dims(name, "S")), axis=axis)
        self.writer.where.setdefault("T", (value, axis))
        return value

    def _packed(self) -> list[str]:
        """Query, key and value out of one input."""
        writer, sizes = self.writer, self.sizes
        widths = [sizes[heads] * sizes[depth] for heads, _, depth in LETTERS.values()]
        writer.equal["T"] = "S"
        packed = self._input("h", "BSW")
        writer.where["T"] = writer.where["S"]
        match self.spelling.packed:
            case "split":
                return writer.split(packed, widths, 2)
            case "slice":
                ends = np.cumsum([0, *widths])
                if writer.opset >= 10:
                    edges = pairwise([writer.const([end], "int64") for end in ends])
                    return [writer.slice(packed, [(2, *pair)]) for pair in edges]
                numbers = pairwise(ends.tolist())
                return [writer.op("Slice", packed, axes=[2], starts=[low], ends=[high]) for low, high in numbers]
        apart = writer.reshape(packed, ["B", "S", "3", "N", "D"], ["B", "S", "W"])
        axis = 2
        if self.spelling.packed == "gather_first":
            apart, axis = writer.op("Transpose", apart, perm=[2, 0, 3, 1, 4]), 0
        return [writer.op("Gather", apart, writer.const(index, "int64"), axis=axis) for index in range(3)]

    def _heads_apart(self, value: str, name: str) -> Operand:
        writer = self.writer
        heads, rows, depth = LETTERS[name]
        source = split(self._dims(name, rows))
        match self.spelling.layout:
            case "BSND":
                before, perm, turned = value, (0, 2, 1, 3), (0, 2, 3, 1)
            case "BSH":
                before = writer.reshape(value, ["B", rows, heads, depth], source)
                perm, turned = (0, 2, 1, 3), (0, 2, 3, 1)
            case "SBH":
                before = writer.reshape(value, [rows, "B", heads, depth], source)
                perm, turned = (1, 2, 0, 3), (1, 2, 3, 0)
            case _:
                return Operand(value, value, None)
        if name == "k" and self.spelling.key == "0231":
            return Operand(before, before, turned)
        return Operand(writer.op("Transpose", before, perm=list(perm)), before, turned)

    # -- in float64 -----------------------------------------------------------------------------

    def natural(self, feeds: Mapping[str, Array], name: str) -> Scores:
        """An operand as [B, N, S, D], heads not repeated."""
        value = self._fed(feeds, name).astype(np.float64)
        heads, _, depth = LETTERS[name]
        n, d = self.sizes[heads], self.sizes[depth]
        match self.spelling.layout:
            case "SD":
                return value[None, None]
            case "BSD":
                return value[None]
            case "BSND":
                return value.transpose(0, 2, 1, 3)
            case "BSH":
                return value.reshape(*value.shape[:2], n, d).transpose(0, 2, 1, 3)
            case "SBH":
                return value.reshape(*value.shape[:2], n, d).transpose(1, 2, 0, 3)
        return value

    def _fed(self, feeds: Mapping[str, Array], name: str) -> Array:
        if self.spelling.cache and name != "q":
            rows = split(self._dims(name, "P")).index("P")
            return np.concatenate([feeds[f"past_{name}"], feeds[name]], axis=rows)
        if self.spelling.packed == "none":
            return feeds[name]
        widths = [self.sizes[heads] * self.sizes[depth] for heads, _, depth in LETTERS.values()]
        part = np.split(feeds["h"], np.cumsum(widths)[:2], axis=2)["qkv".index(name)]
        if not self.spelling.packed.startswith("gather"):
            return part
        apart = part.reshape(*part.shape[:2], self.sizes["N"], self.sizes["D"])
        return apart if self.spelling.layout == "BSND" else apart.transpose(0, 2, 1, 3)
