"""A grammar of attention in plain operators: odd spellings, and near misses of them.

    attention := output(values(guard(softmax(sink(terms(scale(product(query, key))))))))
    terms     := 0 to 3 of: an addend, a selection, a blend s * b + f * (1 - b), a factor, a floor, a number

It knows nothing of what the matcher accepts: every choice is independent of the others where the result is a model.
What is drawn is fused or declined; only a run tells whether that was right.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx
from onnx import numpy_helper

from tools.fuzz.difference import LARGEST
from tools.fuzz.graph import Case, Graph, Size
from tools.fuzz.rare import Rare

INF = math.inf
FILLS = (-INF, -INF, -LARGEST, -LARGEST, -LARGEST, -1e9, -1e9, -1e4, -1e4, -65504.0, -1e30, -LARGEST / 2, -32752.0)
FILLS += (-100.0, -1e3, -1e5, -30.0)
ODD = (0.0, 1.0, 1e4, 1e9, INF, math.nan, -1.0)
DIMS: Sequence[tuple[Size, ...]] = (
    ("B", 1, 1, "T"), ("B", 1, 1, "T"), ("B", 1, "S", "T"), ("B", "N", "S", "T"), (1, 1, "S", "T"), ("S", "T"), ("T",),
    (1, "N", "S", "T"), ("B", 1, "S", 1), (1, 1, 1, "T"), (1, "N", 1, 1), ("S", 1), ("B", 1, 1, 1), (),
)  # fmt: skip
ASSUMED = ("no-empty-rows", "masks-dominate", "bounded-scores", "unbroken-sequences")


def compose(seed: int) -> Case:
    """The attention of a seed."""
    return _Composer(random.Random(seed)).case()


def drawn_sizes(rng: random.Random) -> dict[str, int]:
    """Small sizes; all equal at times, so that no size tells one axis from another."""
    if rng.random() < 0.15:
        size = rng.choice([2, 3, 4])
        return dict.fromkeys("BNKSTDE", size)
    heads = rng.choice([1, 2, 2, 4])
    sizes = {"B": rng.choice([1, 2, 2, 3]), "N": heads, "K": heads, "S": rng.choice([1, 2, 3, 4, 5])}
    sizes["T"] = sizes["S"] if rng.random() < 0.6 else rng.choice([1, 2, 4, 6])
    sizes["D"] = rng.choice([1, 2, 4, 8])
    sizes["E"] = sizes["D"] if rng.random() < 0.8 else rng.choice([1, 3, 4])
    if rng.random() < 0.2:
        sizes["K"] = rng.choice([each for each in (1, 2, 4) if heads % each == 0])
    return sizes


class _Composer(Rare):
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        sizes = drawn_sizes(rng)
        if rng.random() < 0.22:  # a decoder's step
            sizes["S"] = 1
        opened = {letter for letter in "BST" if rng.random() < 0.45}
        if rng.random() < 0.06 and sizes["K"] == sizes["N"]:
            opened |= set(rng.choice(["N", "D", "K", "KV", "V"]))
            sizes["V"] = sizes["K"]
        if "S" in opened and sizes["S"] == sizes["T"] and rng.random() < 0.4:
            opened.add("T")
        self.g = Graph(rng, sizes, frozenset(opened), rng.choice([13, 14, 17, 17, 18, 20, 21]))
        if "B" in opened and rng.random() < 0.15:
            sizes["M"], self.g.mask_batch, self.g.open = sizes["B"], "M", self.g.open | {"M"}
        if {"S", "T"} <= opened and sizes["S"] == sizes["T"] and rng.random() < 0.5:
            self.g.names["T"] = "S"
            self.tied = True
        else:
            self.tied = False
        self.dtype = "float16" if rng.random() < 0.3 else "float32"
        self.assume: tuple[str, ...] = (rng.choice(ASSUMED),) if rng.random() < 0.12 else ()
        if self.dtype == "float16" and "masks-dominate" in self.assume:
            self.assume = ()  # sums of such masks are rounded to whole numbers, and differently
        self.score_type = self.dtype
        self.common = rng.choice(FILLS)
        """The number that most masks of the model put in."""
        self.conditions: list[str] = []
        """Booleans of the shape of a mask, true where a key is kept: guards reuse them."""
        self.addends: list[str] = []
        self.multiplied = "", ""
        """The operands of the product that makes the scores."""

    def case(self) -> Case:
        rng, g = self.rng, self.g
        query, key, value = self._operands()
        scores = self._product(query, key)
        self.multiplied = query, key
        upcast = self.dtype == "float16" and rng.random() < 0.6
        if upcast and rng.random() < 0.5:
            scores, self.score_type = g.cast(scores, "float32"), "float32"
        if rng.random() < 0.03:
            g.words.append("shifted")
            scores = self._shifted(scores)
        scores = self._terms(scores)
        if rng.random() < 0.03:
            g.words.append("shifted behind")
            scores = self._shifted(scores)
        if upcast and self.score_type == "float16":
            scores, self.score_type = g.cast(scores, "float32"), "float32"
        outputs: list[tuple[str, str, Sequence[Size | None]]] = []
        if rng.random() < 0.03:
            outputs.append((scores, self.score_type, ("B", "N", "S", "T")))
        result = self._softmax_and_product(scores, value, outputs)
        dims: tuple[Size, ...] = ("B", "N", "S", "E")
        if rng.random() < 0.3:
            result, dims = g.op("Transpose", result, perm=[0, 2, 1, 3]), ("B", "S", "N", "E")
        kind = self.dtype
        if rng.random() < (0.3 if {"int8", "paged"} & {*g.words} else 0.01) and kind == "float32":
            result, kind = self._quantised(result), "int8"
        declared = (*dims[:3], None) if rng.random() < 0.05 else dims
        outputs.insert(0, (result, kind, tuple(declared)))
        case = g.case(outputs, self.assume)
        if self.tied:  # one symbol, so that every run gives both one size
            inputs = [
                replace(each, dims=tuple("S" if dim == "T" else dim for dim in each.dims)) for each in case.inputs
            ]
            case.inputs, case.open = inputs, case.open - {"T"}
        return case

    # -- operands -----------------------------------------------------------------------------------

    def _operands(self) -> tuple[str, str, str]:
        rng, g, sizes = self.rng, self.g, self.g.sizes
        made = []
        held = rng.choice(["int8", "int8" if self.tied else "paged"])
        held = held if rng.random() < (0.55 if sizes["S"] == 1 else 0.05) else ""
        table = self._table() if held == "paged" else ""
        mixed = rng.random() < 0.15
        if held:
            g.words.append(held)
        owner = "V" if "V" in g.open else "K"
        for name, dims in (("q", ("B", "N", "S", "D")), ("k", ("B", "K", "T", "D")), ("v", ("B", owner, "T", "E"))):
            b, n, s, d = dims
            form = rng.choice(["BNSD", "BNSD", "BSND", "BSH"])
            if name != "q" and held and not (mixed and name == "v"):
                form = held
            if form == "int8":
                value = self._int8(name, dims)
            elif form == "paged":
                value = self._paged(name, n, d, table)
            elif form == "BNSD":
                value = g.input("value", self.dtype, dims, name=name)
            elif form == "BSND":
                value = g.op("Transpose", g.input("value", self.dtype, (b, s, n, d), name=name), perm=[0, 2, 1, 3])
            else:
                flat = g.input("value", self.dtype, (b, s, sizes[n] * sizes[d]), name=name)
                value = g.op("Transpose", g.reshape(flat, (b, s, n, d)), perm=[0, 2, 1, 3])
            if name != "q" and sizes["K"] != sizes["N"]:
                value = self._repeated(value, s, d)
            made.append(value)
        if rng.random() < 0.06:
            made[0] = g.op("Add", made[0], g.input("value", self.dtype, ("N", 1, "D")))
        return made[0], made[1], made[2]

    def _repeated(self, value: str, tokens: str, depth: str) -> str:
        rng, g = self.rng, self.g
        times = g.sizes["N"] // g.sizes["K"]
        match rng.choice(["expand", "expand", "tile", "concat", "blocks"]):
            case "expand":
                axis = rng.choice([2, 2, 2, 1])
                dims: list[Size] = ["B", "K", tokens, depth]
                dims.insert(axis, times)
                wide = g.op("Expand", g.unsqueeze(value, [axis]), g.shape(dims))
                return g.reshape(wide, ("B", "N", tokens, depth))
            case "tile":
                return g.op("Tile", value, g.const([1, times, 1, 1], "int64"))
            case "concat":
                return g.op("Concat", *([value] * times), axis=1)
            case _:
                order = [head // times for head in range(g.sizes["N"])]
                if rng.random() < 0.3:
                    rng.shuffle(order)
                return g.op("Gather", value, g.const(order, "int64"), axis=1)

    def _product(self, query: str, key: str) -> str:
        rng, g = self.rng, self.g
        factor = rng.choice([0.5, 0.35, 1.0, 2.0, 0.125])
        places = rng.choice([(), ("scores",), ("scores",), ("query",), ("key",), ("query", "key"), ("query", "scores")])
        if "query" in places:
            query = self._scaled(query, factor)
        if "key" in places:
            key = self._scaled(key, factor)
        if rng.random() < 0.06 and not g.open & {"N", "K", "V", "D"}:
            scores = self._folded(query, key)
        elif rng.random() < 0.12:
            scores = g.op("Einsum", query, key, equation="bnsd,bntd->bnst")
        elif rng.random() < 0.1 and self.dtype == "float32":
            scores = g.op("FusedMatMul", query, key, domain="com.microsoft", transB=1, alpha=factor)
        else:
            scores = g.op("MatMul", query, g.op("Transpose", key, perm=[0, 1, 3, 2]))
        scores = self._scaled(scores, factor) if "scores" in places else scores
        if rng.random() < 0.06:
            scores = self._second_product(scores)
        if rng.random() < 0.05 and not self.assume:
            g.words.append("factor")
            scores = self._shared(scores, self.dtype)
        return scores

    def _scaled(self, value: str, factor: float) -> str:
        rng, g, dtype = self.rng, self.g, self.dtype
        if rng.random() < 0.05 and not self.assume:
            g.words.append("scale of the run")
            dims: Sequence[Size] = rng.choice([(), (1,), ("N", 1, 1), ("B", 1, 1, 1), ("S", 1)])
            given = g.input("factor", dtype, dims, factor)
            return g.op("Mul", value, given) if rng.random() < 0.6 else g.op("Div", value, given)
        match rng.choice(["mul", "mul", "div", "computed", "power", "odd"] if rng.random() < 0.6 else ["mul"]):
            case "mul":
                number = g.number(factor, dtype)
                return g.op("Mul", *((value, number) if rng.random() < 0.7 else (number, value)))
            case "div":
                return g.op("Div", value, g.number(1 / factor, dtype))
            case "computed":
                root = g.op("Sqrt", g.cast(g.const(g.sizes["D"], "int64"), dtype))
                return g.op("Div", value, root)
            case "power":
                powers = [(4.0, -0.5), (4.0, 0.5), (2.0, -1.0), (-2.0, 2.0)]
                undefined = [] if self.assume else [(-8.0, 0.5), (0.0, -1.0)]
                base, power = rng.choice([*powers, *undefined])
                g.undefined |= (base, power) in undefined
                return g.op("Mul", value, g.op("Pow", g.const(base, dtype), g.const(power, dtype)))
            case _:
                odd = [0.0, -1.0, 1e-3, 30.0, INF, math.nan] if not self.assume else [0.0, -1.0, 1e-3]
                number = rng.choice(odd)
                g.undefined |= not math.isfinite(number)
                return g.op("Mul", value, g.number(number, dtype))

    # -- conditions ---------------------------------------------------------------------------------

    def _condition(self, depth: int = 0) -> str:
        """A boolean that is true where a key is kept; its shape broadcasts to the scores."""
        rng, g = self.rng, self.g
        if "no-empty-rows" in self.assume:  # of masks whose feeds keep a key in every row
            return g.input("bool", "bool", rng.choice([dims for dims in DIMS if dims and dims[-1] == "T"]))
        if depth < 2 and rng.random() < 0.25:
            first, second = self._condition(depth + 1), self._condition(depth + 1)
            return g.op(rng.choice(["And", "And", "And", "Or", "Xor"]), first, second)
        if rng.random() < 0.08:
            return g.op("Not", self._condition(depth + 1))
        kinds = ["input", "int", "int", "float", "triangle", "position", "position", "window", "labels", "constant"]
        kinds.append("counted")
        if depth < 2 and g.opset >= 12:
            kinds.append("least")
        match rng.choice(kinds):
            case "input":
                return g.input("bool", "bool", rng.choice(DIMS))
            case "int":
                dtype = rng.choice(["int64", "int32"])
                given = self._lifted("int01", dtype)
                if rng.random() < 0.4:
                    return g.cast(given, "bool")
                test, number = rng.choice([("Equal", 1), ("Greater", 0), ("Less", 1), ("GreaterOrEqual", 1)])
                return g.op(test, given, g.const(number, dtype))
            case "float":
                given = g.input("scale01", "float32", rng.choice(DIMS))
                if rng.random() < 0.5:
                    return g.cast(given, "bool")
                return g.op(rng.choice(["Greater", "Equal"]), given, g.const(rng.choice([0.0, 0.5, 1.0]), "float32"))
            case "triangle":
                return self._triangle()
            case "position":
                rows, keys = self._positions()
                return g.op(rng.choice(["LessOrEqual", "LessOrEqual", "Less", "GreaterOrEqual", "Greater"]), keys, rows)
            case "window":
                rows, keys = self._positions()
                if rng.random() < 0.1:  # a width that is computed in floats, and no number at times
                    root = g.op("Pow", g.const(rng.choice([4.0, 1.0, -8.0, 0.0]), "float32"), g.const(0.5, "float32"))
                    width = g.cast(root, "int64")
                elif rng.random() < 0.7:
                    width = g.const(rng.choice([0, 1, 2, 3]), "int64")
                else:
                    width = g.input("window", "int64", rng.choice([(), (1,)]))
                near = g.op(rng.choice(["Less", "LessOrEqual"]), g.op("Sub", rows, keys), width)
                return g.op("And", near, g.op("LessOrEqual", keys, rows)) if rng.random() < 0.7 else near
            case "labels":
                return self._labels()
            case "counted":
                return self._counted()
            case "least":
                return self._least(depth)
            case _:
                shape = [g.size(each) if each not in g.open else 1 for each in rng.choice(DIMS)]
                return g.const(np.random.default_rng(rng.getrandbits(32)).random(shape) < 0.6)

    def _lifted(self, role: str, dtype: str) -> str:
        """A mask of rank 2, as models take it, with two axes between; or one of any shape."""
        rng, g = self.rng, self.g
        if rng.random() < 0.6 or "no-empty-rows" in self.assume:
            return g.unsqueeze(g.input(role, dtype, ("B", "T")), [1, 2])
        return g.input(role, dtype, rng.choice(DIMS))

    def _triangle(self) -> str:
        rng, g = self.rng, self.g
        if g.open & {"S", "T"} or rng.random() < 0.5:
            ones = g.op("ConstantOfShape", g.shape(["S", "T"]), value=_tensor(1.0))
            if g.opset < 14:
                return g.op("Greater", ones, g.const(0.0, "float32"))
            offset = rng.choice([None, 0, 1, -1, 2])
            given = [ones] if offset is None else [ones, g.const(offset, "int64")]
            upper = int(rng.random() < 0.3)
            made = g.op("Trilu", *given, upper=upper)
            return g.op("Not", g.cast(made, "bool")) if upper or rng.random() < 0.1 else g.cast(made, "bool")
        keep = np.tril(np.ones((g.sizes["S"], g.sizes["T"]), np.bool_), rng.choice([0, 0, 1, -1]))
        if rng.random() < 0.2:
            keep[rng.randrange(g.sizes["S"])] = False
        if rng.random() < 0.2:
            keep[rng.randrange(g.sizes["S"]), rng.randrange(g.sizes["T"])] ^= True
        return g.const(keep[None, None] if rng.random() < 0.5 else keep)

    def _positions(self) -> tuple[str, str]:
        rng, g = self.rng, self.g
        rows, keys = g.unsqueeze(g.range("S"), [1]), g.unsqueeze(g.range("T"), [0])
        match rng.choice(["", "", "end", "moved", "clamped"]):
            case "end":
                rows = g.op("Add", rows, g.op("Sub", g.measured("T"), g.measured("S")))
            case "moved":
                rows = g.op("Add", rows, g.const(rng.choice([1, -1, 2]), "int64"))
            case "clamped":
                keys = g.op(rng.choice(["Min", "Max"]), keys, g.const(rng.choice([1, 2]), "int64"))
        return rows, keys

    def _counted(self) -> str:
        """Positions that are counted in floats, as KerasHub writes them: mostly one count of rows and keys."""
        rng, g = self.rng, self.g
        rows = self._count("S")
        keys = rows if self._is_square() and rng.random() < 0.8 else self._count("T")
        rows, keys = g.unsqueeze(rows, [1]), g.unsqueeze(keys, [0])
        return g.op(rng.choice(["GreaterOrEqual", "GreaterOrEqual", "Greater", "Less", "LessOrEqual"]), rows, keys)

    def _count(self, letter: str) -> str:
        """0.0, 1.0, ... up to a size, which ONNX Runtime takes as a vector of one number, too."""
        g, end = self.g, self.g.measured(letter)
        if self.rng.random() < 0.8:
            end = g.op("Squeeze", end, g.const([0], "int64"))
        return g.op("Range", g.const(0.0, "float32"), g.cast(end, "float32"), g.const(1.0, "float32"))

    def _is_square(self) -> bool:
        """Are there as many keys as rows in every run?"""
        g = self.g
        return g.sizes["S"] == g.sizes["T"] and (self.tied or not g.open & {"S", "T"})

    def _least(self, depth: int) -> str:
        """The least of several masks of integers, as KerasHub merges padding into a causal mask."""
        rng, g = self.rng, self.g
        dtype = rng.choice(["int32", "int64"])
        parts = [g.cast(self._condition(depth + 1), dtype) for _ in range(rng.choice([1, 2, 2, 3]))]
        if rng.random() < 0.4:
            parts.insert(rng.randrange(len(parts) + 1), self._lifted("int01", dtype))
        least = g.op("Min", *parts)
        if rng.random() < 0.4:
            dtype, least = "float32", g.cast(least, "float32")
        if rng.random() < 0.2:
            return g.cast(least, "bool")
        test, number = rng.choice([("Greater", 0), ("Greater", 0), ("GreaterOrEqual", 1), ("Greater", -1), ("Less", 1)])
        return g.op(test, least, g.const(number, dtype))

    def _labels(self) -> str:
        rng, g = self.rng, self.g
        one = g.input("labels", "int64", ("B", "T"))
        other = one if self._is_square() and rng.random() < 0.8 else g.input("labels", "int64", ("B", "S"))
        if rng.random() < 0.3 and other == one:
            starts = g.cast(g.op("Equal", one, g.const(rng.choice([0, 1]), "int64")), "int64")
            one = other = g.op("CumSum", starts, g.const(1, "int64"))
        return g.op("Equal", g.unsqueeze(other, [1, 3]), g.unsqueeze(one, [1, 2]))

    # -- terms --------------------------------------------------------------------------------------

    def _fill(self) -> float:
        odd = self.rng.random() < 0.05 and not self.assume
        number = self.rng.choice(ODD) if odd else self.rng.choice(FILLS)
        if self.rng.random() < 0.5:  # one number for all masks of a model is the rule
            number = self.common
        if "masks-dominate" in self.assume:
            number = min(number, -1e4)
        return max(-65504.0, number) if self.score_type == "float16" and math.isfinite(number) else number

    def _terms(self, scores: str) -> str:
        rng, g = self.rng, self.g
        kinds = ["add"] * 18 + ["where"] * 12 + ["blend", "scale", "floor", "shift"] * 3 + ["cap", "opposite", "chosen"]
        if self.assume:
            kinds.remove("opposite")
        others, shifts = ([-1.0], [30.0, 1e4, -1e9]) if not self.assume else ([], [])
        drawn = [rng.choice(kinds) for _ in range(rng.choice([0, 1, 1, 2, 2, 2, 3]))]
        if rng.random() < 0.15 and not self.assume:  # what most exporters write: a causal mask and padding
            drawn = ["causal", "padding"] if rng.random() < 0.7 else ["padding", "causal"]
        for kind in drawn:
            g.words.append(kind)
            match kind:
                case "add":
                    term = self._addend()
                    if rng.random() < 0.2:
                        term = g.op("Add", term, self._addend())
                    self.addends.append(term)
                    drawn_ = rng.random()
                    if rng.random() < 0.05:
                        first, second = (scores, term) if rng.random() < 0.7 else (term, scores)
                        more = [self._addend() for _ in range(rng.choice([1, 2]))]
                        scores = g.op("Sum", first, second, *more)
                    elif drawn_ < 0.03 and not self.assume:
                        scores = g.op("Sub", *((scores, term) if rng.random() < 0.8 else (term, scores)))
                    elif drawn_ < 0.12:
                        scores = g.op("Sub", scores, g.op("Neg", term))
                    else:
                        scores = g.op("Add", *((scores, term) if rng.random() < 0.7 else (term, scores)))
                case "causal":
                    low = g.number(self._fill(), self.score_type)
                    scores = g.op("Where", self._triangle(), scores, low)
                case "padding":
                    scores = g.op("Add", scores, self._addend("difference"))
                case "where":
                    condition, fill = self._condition(), g.number(self._fill(), self.score_type)
                    self.conditions.append(condition)
                    if rng.random() < 0.3:
                        drop = g.op("Not", condition)
                        scores = g.op("Where", drop, fill, scores)
                    else:
                        swapped = rng.random() < 0.05 and not self.assume
                        scores = g.op("Where", condition, *((fill, scores) if swapped else (scores, fill)))
                case "blend":
                    scores = self._blend(scores)
                case "scale":
                    scores = g.op("Mul", scores, g.number(rng.choice([0.5, 2.0, 3.0, 1.0, *others]), self.score_type))
                case "floor":
                    low = g.number(rng.choice([-LARGEST, -65504.0, -1e30, -1e4]), self.score_type)
                    scores = g.op("Max", scores, low)
                case "opposite":  # two masks whose numbers cancel where both put theirs in
                    low = self._fill()
                    for number in (low, -low):
                        pair = g.const(0.0, self.score_type), g.number(number, self.score_type)
                        scores = g.op("Add", scores, g.op("Where", self._condition(), *pair))
                case "chosen":
                    scores = self._chosen(scores)
                case "shift":
                    scores = g.op("Add", scores, g.number(rng.choice([1.0, -0.5, *shifts]), self.score_type))
                case _:
                    number = g.number(rng.choice([5.0, 50.0]), self.score_type)
                    scores = g.op("Mul", g.op("Tanh", g.op("Div", scores, number)), number)
        return scores

    def _chosen(self, scores: str) -> str:
        """The scores with a term or without it, as a condition says."""
        rng, g, dtype = self.rng, self.g, self.score_type
        condition = self._condition()
        if rng.random() < 0.5:
            changed = g.op("Sub", scores, g.number(-self._fill(), dtype))
        else:
            changed = g.op(rng.choice(["Add", "Sub"]), scores, self._addend())
        if rng.random() < 0.5:
            return g.op("Where", condition, *rng.choice([(changed, scores), (scores, changed)]))
        chosen = g.op("Mul", changed, g.cast(condition, dtype))
        return g.op("Add", chosen, g.op("Mul", scores, g.cast(g.op("Not", condition), dtype)))

    def _blend(self, scores: str) -> str:
        rng, g, dtype = self.rng, self.g, self.score_type
        boolean = rng.random() < 0.5
        condition = self._condition() if boolean else ""
        kept = g.cast(condition, dtype) if boolean else g.input("scale01", dtype, rng.choice(DIMS))
        form = rng.choice(["rest"] * 4 + ["less one", "where", "selected", "compared"])
        if form in ("selected", "compared"):
            return self._zeroed_and_selected(scores, kept, condition if form == "selected" else "")
        if form == "where" and boolean:
            masked = g.op("Where", condition, g.const(0.0, dtype), g.number(self._fill(), dtype))
        elif form == "less one":
            masked = g.op("Mul", g.op("Sub", kept, g.const(1.0, dtype)), g.number(-self._fill(), dtype))
        else:
            number = g.number(self._fill(), dtype)
            if rng.random() < 0.1:
                number = g.op("Expand", number, g.op("Shape", scores))
            masked = g.op("Mul", g.op("Sub", g.const(1.0, dtype), kept), number)
        if rng.random() < 0.15:
            return g.op("Sub", g.op("Mul", scores, kept), g.op("Neg", masked))
        return g.op("Add", g.op("Mul", scores, kept), masked)

    def _zeroed_and_selected(self, scores: str, kept: str, condition: str) -> str:
        """Scores times a mask, and a selection by its condition, or by a comparison of the mask with 0 or 1."""
        rng, g, dtype = self.rng, self.g, self.score_type
        zeroed, fill = g.op("Mul", *((scores, kept) if rng.random() < 0.7 else (kept, scores))), self._fill()
        if rng.random() < 0.3:
            zeroed = g.op("Mul", zeroed, g.number(rng.choice([0.5, 2.0, 1.0]), dtype))
        number = rng.choice([0.0, 1.0])
        keeps = bool(condition) or number == 1.0
        if not condition or rng.random() < 0.1:
            condition = g.op("Equal", kept, g.const(number, dtype))
        if rng.random() < 0.3:
            condition, keeps = g.op("Not", condition), not keeps
        self.conditions.append(condition)
        pair = zeroed, g.number(fill, dtype)
        return g.op("Where", condition, *(pair if keeps else pair[::-1]))

    def _addend(self, kind: str = "") -> str:
        """What is added to the scores: a mask as a float, or a bias; of a kind, where one is given."""
        rng, g, dtype = self.rng, self.g, self.score_type
        kinds = ["where", "where", "difference", "difference", "difference", "fmask", "fmask", "bias", "bias"]
        kinds += ["times", "alibi", "scatter", "trilu", "constant", "product", "affine"]
        if "no-empty-rows" in self.assume:
            kinds = ["where", "difference", "bias"]
        match kind or rng.choice(kinds):
            case "where":
                condition, fill = self._condition(), self._fill()
                self.conditions.append(condition)
                zero = g.const(rng.choice([0.0] * 9 + [1.0]), dtype)
                return g.op("Where", condition, zero, g.number(fill, dtype))
            case "difference":
                wide = rng.choice([dtype, "float32"])
                source = rng.choice(["int64", "int64", "int32", wide])
                given = self._lifted("scale01" if source == wide else "int01", source)
                whole = given if source == wide else g.cast(given, wide)
                gone = g.op("Sub", g.const(1.0, wide), whole)
                made = g.op("Mul", gone, g.number(self._fill(), wide))
                return made if wide == dtype else g.cast(made, dtype)
            case "fmask":
                fill = self._fill()
                return g.input("fmask", dtype, rng.choice(DIMS), number=fill)
            case "bias":
                return g.input("bias", dtype, rng.choice(DIMS))
            case "times":
                return g.op("Mul", g.input("scale01", dtype, rng.choice(DIMS)), g.number(self._fill(), dtype))
            case "alibi":
                slopes = g.const((-np.ones(g.sizes["N"]) / 2 ** np.arange(g.sizes["N"])).reshape(-1, 1, 1), dtype)
                keys = g.cast(g.range("T"), dtype)
                if not g.open & {"T"} and rng.random() < 0.1:
                    step = g.const(rng.choice([1.0, 1.0, 1.0, math.nan]), "float32")
                    end = g.const(float(g.sizes["T"]), "float32")
                    keys = g.cast(g.op("Range", g.const(0.0, "float32"), end, step), dtype)
                return g.op("Mul", slopes, keys)
            case "scatter":
                zeros = g.op("ConstantOfShape", g.shape(["B", 1, 1, "T"]), value=_tensor(0.0, dtype))
                index = g.input("index", "int64", ("B", 1, 1, 2), number=min(g.sizes["T"], 2))
                updates = g.input("bias", dtype, ("B", 1, 1, 2))
                if rng.random() < 0.5:
                    updates = g.op("Expand", g.const(self._fill(), dtype), g.shape(["B", 1, 1, 2]))
                more = {"reduction": "add"} if g.opset >= 16 and rng.random() < 0.5 else {}
                return g.op("ScatterElements", zeros, index, updates, axis=3, **more)
            case "trilu":
                if g.opset < 14:
                    return g.input("bias", dtype, ("S", "T"))
                full = g.op("Expand", g.const(self._fill(), dtype), g.shape(["S", "T"]))
                return g.op("Trilu", full, g.const(rng.choice([1, 1, 0, 2, -1]), "int64"), upper=rng.choice([1, 1, 0]))
            case "constant":
                shape = [1 if each in g.open else g.size(each) for each in rng.choice(DIMS)]
                random_ = np.random.default_rng(rng.getrandbits(32))
                if rng.random() < 0.5:
                    return g.const(np.where(random_.random(shape) < 0.6, 0.0, self._fill()), dtype)
                return g.const(random_.standard_normal(shape), dtype)
            case "product":
                if dtype != self.dtype:
                    return g.input("bias", dtype, ("B", 1, "S", "T"))
                left = g.input("value", dtype, ("B", "N", "S", 2))
                return g.op("MatMul", left, g.input("value", dtype, ("B", "N", 2, "T")))
            case _:
                number = abs(self._fill())
                number = number if math.isfinite(number) else 1e9
                kept = self._lifted("int01", "int64") if rng.random() < 0.5 else self._condition()
                made = g.op("Mul", g.cast(kept, dtype), g.const(number, dtype))
                return g.op("Sub", made, g.const(number, dtype))

    # -- behind the scores --------------------------------------------------------------------------

    def _power(self, scores: str) -> str:
        """Exponentials of the scores less their maximum, or other powers, perhaps times a factor."""
        rng, g, dtype = self.rng, self.g, self.score_type
        base = rng.choice([math.e] * 3 + [2.0, 2.0, 10.0, 0.5])
        if base != math.e and rng.random() < 0.3:
            scores = g.op("Mul", scores, g.const(1.442695, dtype))
        moved = g.op("Sub", scores, self._reduced("ReduceMax", scores))
        if rng.random() < 0.3:
            g.words.append("factor behind the maximum")
            moved = g.op("Mul", moved, g.const(rng.choice([1.442695, 0.5, 3.0, -1.0]), dtype))
        if base == math.e:
            return g.op("Exp", moved)
        g.words.append(f"powers of {base:g}")
        return g.op("Pow", g.const(base, dtype), moved)

    def _of_logarithm(self, scores: str) -> str:
        """The exponential of a logarithm: LogSoftmax, or the logarithm of the sum subtracted, to one base or nearly
        so."""
        rng, g, dtype = self.rng, self.g, self.score_type
        form = rng.choice(["operator"] * 3 + ["shifted", "shifted", "whole", "reduction"])
        g.words.append(f"logarithm {form}")
        if form == "operator":
            return g.op("Exp", g.op("LogSoftmax", scores, axis=-1))
        base = rng.choice([math.e, math.e, 2.0])
        two = g.const(2.0, dtype)
        peak = self._reduced("ReduceMax", scores)
        moved = g.op("Sub", scores, peak)
        if form == "reduction":
            less = self._reduced("ReduceLogSumExp", rng.choice([scores, scores, moved]))
        else:
            weights = g.op("Exp", moved) if base == math.e else g.op("Pow", two, moved)
            less = g.op("Log", self._reduced(rng.choice(["ReduceSum"] * 8 + ["ReduceMax"]), weights))
        if base != math.e:
            less = g.op("Mul", less, g.const(rng.choice([1.442695, 1.442695, 1.0]), dtype))
        if form == "whole":
            less = g.op("Add", less, peak)
        rest = g.op("Sub", moved if form == "shifted" else scores, less)
        return g.op("Exp", rest) if base == math.e else g.op("Pow", two, rest)

    def _softmax_and_product(
        self, scores: str, value: str, outputs: list[tuple[str, str, Sequence[Size | None]]]
    ) -> str:
        rng, g, dtype = self.rng, self.g, self.score_type
        form = rng.choice(["op"] * 12 + ["written", "written", "late", "late", "log", "log", "unshifted", "late sink"])
        sink = rng.choice(["concat", "total"]) if rng.random() < 0.12 else ""
        g.words.extend([form, sink] if sink else [form])
        if form.startswith("late"):
            weights = self._power(scores)
            total = self._reduced("ReduceSum", weights)
            if rng.random() < 0.15:  # a guard, or a total, of something else
                g.words.append("late guard")
                drawn = rng.choice(["condition", "nan", "more", "other"])
                if drawn == "condition":
                    weights = g.op("Where", self._condition(), weights, g.const(0.0, dtype))
                elif drawn == "nan":
                    weights = g.op("Where", g.op("IsNaN", weights), g.const(0.0, dtype), weights)
                elif drawn == "more":
                    total = g.op("Add", total, g.const(np.full((1,) * rng.choice([1, 4, 5]), 1e-9), dtype))
                else:
                    total = g.op("ReduceSum", weights, g.const([rng.choice([-2, 1])], "int64"), keepdims=1)
            if "sink" in form:
                total = g.op("Add", total, g.const(rng.choice([1.0, 0.5]), dtype))
            if dtype != self.dtype:
                weights, total = g.cast(weights, self.dtype), g.cast(total, self.dtype)
            return g.op("Div", g.op("MatMul", weights, value), total)
        plain = scores
        if sink == "concat" and rng.random() < 0.6:
            p, value = self._sunk(scores, value)
        elif sink == "concat":
            one = g.input("sink", dtype, (1, "N", 1, 1))
            wide = g.op("Expand", one, g.shape(["B", "N", "S", 1]))
            joined = g.op("Concat", scores, wide, axis=-1)
            p = g.op("Softmax", joined, axis=-1)
            p = g.op("Slice", p, g.const([0], "int64"), g.const([-1], "int64"), g.const([-1], "int64"))
        elif form == "op":
            p = g.op("Softmax", scores, axis=rng.choice([-1] * 30 + [3] * 8 + [2, -2]))
        elif form == "log":
            p = self._of_logarithm(scores)
        else:
            weights = g.op("Exp", scores) if form == "unshifted" else self._power(scores)
            total = self._reduced("ReduceSum", weights)
            if sink == "total":
                total = g.op("Add", total, g.const(rng.choice([1.0, 1e-9, 0.5]), dtype))
            p = g.op("Div", weights, total) if rng.random() < 0.8 else g.op("Mul", weights, g.op("Reciprocal", total))
        p = self._guarded(p, scores)
        if dtype != self.dtype:
            p = g.cast(p, self.dtype)
        elif rng.random() < 0.03:
            p = g.cast(g.cast(p, "float16"), self.dtype)
        if rng.random() < 0.04 and not self.assume:
            g.words.append("factor behind")
            p = self._shared(p, self.dtype)
        if rng.random() < 0.15:
            ratios = rng.choice([(), (g.const(0.1, "float32"),), (g.const(0.0, "float32"), g.const(True, "bool"))])
            p = g.op("Dropout", p, *ratios)
        if rng.random() < 0.04:
            outputs.append((p, self.dtype, ("B", "N", "S", "T")))
        if rng.random() < 0.03 and self.dtype == dtype:
            g.words.append("difference")
            other = scores if rng.random() < 0.3 else self._product(*self.multiplied)
            other = g.op("Softmax", other, axis=-1)
            p = g.op(rng.choice(["Sub", "Sub", "Add"]), p, g.op("Mul", other, g.const(rng.choice([0.5, INF]), dtype)))
        if rng.random() < 0.1:
            result = g.op("Einsum", p, value, equation="bnst,bnte->bnse")
        else:
            result = g.op("MatMul", p, value)
        if rng.random() < 0.05 and self.dtype == dtype == "float32":
            g.words.append("gate")
            result = self._gated(result, plain)
        return result

    def _guarded(self, p: str, scores: str) -> str:
        rng, g, dtype = self.rng, self.g, self.score_type
        if rng.random() < 0.7:
            return p
        kind = rng.choice(["nan", "nan", "condition", "product", "scores", "bias", "renormalised"])
        g.words.append(f"{kind} guard")
        zero = g.const(0.0, dtype)
        match kind:
            case "nan":
                swapped, tested = rng.random() < 0.1, p
                if rng.random() < 0.2:
                    tested = g.cast(p, rng.choice(["float16", "float32", "float64"]))
                return g.op("Where", g.op("IsNaN", tested), *((p, zero) if swapped else (zero, p)))
            case "condition" | "product" | "renormalised":
                condition = rng.choice(self.conditions) if self.conditions and rng.random() < 0.8 else self._condition()
                if kind == "condition":
                    return g.op("Where", condition, p, zero)
                kept = g.op("Mul", p, g.cast(condition, dtype))
                if kind == "product":
                    return kept
                return g.op("Div", kept, g.op("Add", self._reduced("ReduceSum", kept), g.const(1e-9, dtype)))
            case "scores":
                alive = g.op("Not", g.op("Equal", scores, g.const(-INF, dtype)))
                some = self._reduced("ReduceMax", g.cast(alive, "float32"))
                return g.op("Where", g.op("Greater", some, g.const(0.0, "float32")), p, zero)
            case _:
                bias = rng.choice(self.addends) if self.addends and rng.random() < 0.8 else scores
                dead = g.op("Equal", self._reduced("ReduceMax", bias), g.const(-INF, dtype))
                return g.op("Where", dead, zero, p)


def _tensor(number: float, dtype: str = "float32") -> onnx.TensorProto:
    return numpy_helper.from_array(np.array([number], dtype))
