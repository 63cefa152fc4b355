"""Attention in any spelling: a model, inputs for it, and the float64 formula it stands for.

`Spelling` says how attention is written down; `build` composes the model and, side by side with every node
that computes something, the step of the formula it stands for. The formula is never derived from the model.

Sizes are named by letters: B batch, N query heads, K key heads, G = N / K, S rows, T columns, D depth, E value depth,
H = N * D and so on for products. A mask's `dims` is a word such as "B11T": its dimensions from left to right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from tests.passes.spelling import CONSTANT, FLOAT16_MIN, FLOAT32_MIN, Mask, Spelling, wider
from tests.passes.writer import Array, Writer, split

Scores = npt.NDArray[np.float64]
NAMES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "float64": TensorProto.DOUBLE}


@dataclass(frozen=True)
class Case:
    """A model with its formula."""

    spelling: Spelling
    model: onnx.ModelProto
    makers: Mapping[str, Callable[[np.random.Generator], Array]]
    formula: Callable[[Mapping[str, Array]], tuple[Scores, Scores]]

    def feeds(self, seed: int) -> dict[str, Array]:
        """Inputs for one run."""
        rng = np.random.default_rng(seed)
        return {name: make(rng) for name, make in self.makers.items()}


@dataclass
class Formula:
    """Scores in float64, rounded as the model rounds where a term is added: that decides what a masked row gives.

    `magnitude` is the sum of the absolute values that made up each score: float32 knows a score to
    half an ulp of it.
    """

    scores: Scores
    magnitude: Scores
    kind: type[np.floating[Any]] = np.float32
    addend: Array = field(default_factory=lambda: np.zeros(1))
    """The last term added."""
    kept: Array = field(default_factory=lambda: np.ones(1, np.bool_))
    """What the last selection kept."""

    def multiply(self, factor: float) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            self.scores = (self.scores * factor).astype(self.kind).astype(np.float64)
        self.magnitude = self.magnitude * abs(factor)

    def add(self, term: Array) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            self.scores = (self.scores + term).astype(self.kind).astype(np.float64)
        # Masks are added in float32 whatever the model's type (see `_formula`).
        self.magnitude = self.magnitude + np.where(np.abs(term) < 1e3, np.abs(term), 0)
        self.addend = term

    def raise_to(self, floor: float) -> None:
        self.scores = np.maximum(self.scores, floor)

    def select(self, keep: Array, fill: float) -> None:
        self.scores = np.where(keep, self.scores, fill)
        self.kept = keep


OPERAND_DIMS = {
    "BNSD": "B{n}{s}{d}",
    "BSND": "B{s}{n}{d}",
    "BSH": "B{s}({n}{d})",
    "SBH": "{s}B({n}{d})",
    "SD": "{s}{d}",
}


def build(spelling: Spelling) -> Case:
    """Compose the model of a spelling."""
    return _Composer(spelling).case()


class _Composer:
    def __init__(self, spelling: Spelling) -> None:
        self.spelling = spelling
        self.sizes = dict(spelling.sizes)
        self.sizes["G"] = self.sizes["N"] // self.sizes["K"]
        self.writer = Writer(spelling.opset, self.sizes, spelling.symbolic, spelling.target)
        self.steps: list[Callable[[Formula, Mapping[str, Array]], None]] = []
        self.flat = spelling.layout == "SD"
        self.score_type = wider(spelling)
        self.addend = self.condition = ""
        self.keep = True

    # -- the model ------------------------------------------------------------------------------

    def case(self) -> Case:
        spelling, writer = self.spelling, self.writer
        query, key, value = self._operands()
        scores = self._scores(query, key)
        probabilities = self._softmax(self._terms(scores))
        result = self._values(probabilities, value)
        result, rank = self._output(result)
        model = writer.model(result, NAMES[spelling.dtype], rank)
        return Case(spelling, model, writer.makers, self._formula)

    def _operands(self) -> tuple[str, str, str]:
        """Query, key and value as [B, N, S, D] ([S, D] for layout SD), heads of key and value not repeated."""
        spelling, writer = self.spelling, self.writer
        kind = NAMES[spelling.dtype]
        found = []
        for name, heads, length, depth in (("q", "N", "S", "D"), ("k", "K", "T", "D"), ("v", "K", "T", "E")):
            dims = OPERAND_DIMS[spelling.layout].format(n=heads, s=length, d=depth)
            sizes = [writer.size(letter) for letter in split(dims)]
            maker = _normal(sizes, spelling.dtype)
            value = writer.input(name, kind, dims, maker)
            if spelling.identity:
                value = writer.op("Identity", value)
            found.append((value, split(dims), heads, length, depth))
        query, key, value = (self._heads_apart(*each) for each in found)
        if spelling.key == "0231" and spelling.layout == "BSND":
            key = found[1][0]
        return query, key, value

    def _heads_apart(self, value: str, dims: list[str], heads: str, length: str, depth: str) -> str:
        writer = self.writer
        match self.spelling.layout:
            case "BSND":
                return writer.op("Transpose", value, perm=[0, 2, 1, 3])
            case "BSH":
                apart = writer.reshape(value, ["B", length, heads, depth], dims)
                return writer.op("Transpose", apart, perm=[0, 2, 1, 3])
            case "SBH":
                apart = writer.reshape(value, [length, "B", heads, depth], dims)
                return writer.op("Transpose", apart, perm=[1, 2, 0, 3])
        return value

    def _scaled(self, value: str, factor: float, divide: bool = False) -> str:
        number = self.writer.const(1 / factor if divide else factor, self.spelling.dtype)
        if divide:
            return self.writer.op("Div", value, number)
        # Both orders, and a scale of rank 1 now and then.
        return self.writer.op("Mul", *((value, number) if len(self.writer.nodes) % 2 else (number, value)))

    def _repeated(self, value: str, length: str, depth: str) -> str:
        """Key or value with as many heads as the query."""
        writer = self.writer
        match self.spelling.gqa:
            case "expand":
                apart = writer.unsqueeze(value, 2)
                full = writer.op("Expand", apart, writer.shape(["B", "K", "G", length, depth]))
                return writer.reshape(full, ["B", "N", length, depth], ["B", "K", "G", length, depth])
            case "interleave":
                apart = writer.unsqueeze(value, 1)
                full = writer.op("Expand", apart, writer.shape(["B", "G", "K", length, depth]))
                return writer.reshape(full, ["B", "N", length, depth], ["B", "G", "K", length, depth])
            case "tile":
                return writer.op("Tile", value, writer.const([1, self.sizes["G"], 1, 1], "int64"))
            case "grouped":
                return writer.unsqueeze(value, 2)
        return value

    def _scores(self, query: str, key: str) -> str:
        spelling, writer = self.spelling, self.writer
        root = math.sqrt(spelling.factor)
        if spelling.scale in ("query", "both"):
            query = self._scaled(query, spelling.factor if spelling.scale == "query" else root)
        if spelling.scale in ("key", "both"):
            key = self._scaled(key, spelling.factor if spelling.scale == "key" else root, divide=True)
        if spelling.gqa == "grouped":
            query = writer.reshape(query, ["B", "K", "G", "S", "D"], ["B", "N", "S", "D"])
        if not (spelling.key == "0231" and spelling.layout == "BSND"):
            key = self._repeated(key, "T", "D")
        return self._product(query, key)

    def _product(self, query: str, key: str) -> str:
        """[B, N, S, T], or [B, N, T, S] when transposed."""
        spelling, writer = self.spelling, self.writer
        alpha = {"alpha": spelling.factor} if spelling.scale == "alpha" else {}
        match spelling.product:
            case "einsum":
                batch = "bkg" if spelling.gqa == "grouped" else "bn"
                out = batch + ("ts" if spelling.transposed else "st")
                return writer.op("Einsum", query, key, equation=f"{batch}sd,{batch}td->{out}")
            case "fused":
                left, right = (key, query) if spelling.transposed else (query, key)
                return writer.op("FusedMatMul", left, right, domain="com.microsoft", transB=1, **alpha)
            case "gemm":
                left, right = (key, query) if spelling.transposed else (query, key)
                return writer.op("Gemm", left, right, transB=1, **alpha)
            case "folded":
                query = writer.reshape(query, ["BN", "S", "D"], ["B", "N", "S", "D"])
                key = writer.reshape(key, ["BN", "T", "D"], ["B", "N", "T", "D"])
                key = writer.op("Transpose", key, perm=[0, 2, 1])
                scores = writer.op("MatMul", query, key)
                return writer.reshape(scores, ["B", "N", "S", "T"], ["BN", "S", "T"])
        if spelling.transposed:
            return writer.op("MatMul", key, self._swapped(query))
        return writer.op("MatMul", query, self._transposed_key(key))

    def _transposed_key(self, key: str) -> str:
        spelling, writer = self.spelling, self.writer
        if spelling.key == "0231" and spelling.layout == "BSND":
            result = writer.op("Transpose", key, perm=[0, 2, 3, 1])
        elif (
            spelling.key == "rank3"
            and spelling.layout != "SD"
            and spelling.gqa in ("none", "expand", "interleave", "tile")
        ):
            folded = writer.reshape(key, ["BN", "T", "D"], ["B", "N", "T", "D"])
            folded = writer.op("Transpose", folded, perm=[0, 2, 1])
            result = writer.reshape(folded, ["B", "N", "D", "T"], ["BN", "D", "T"])
        else:
            result = self._swapped(key)
        return self._scaled(result, spelling.factor) if spelling.scale == "transposed_key" else result

    def _swapped(self, value: str) -> str:
        """The last two dimensions exchanged."""
        rank = 2 if self.flat else 5 if self.spelling.gqa == "grouped" else 4
        return self.writer.op("Transpose", value, perm=[*range(rank - 2), rank - 1, rank - 2])

    # -- the terms ------------------------------------------------------------------------------

    def _terms(self, scores: str) -> str:
        spelling, writer = self.spelling, self.writer
        if spelling.upcast:
            scores = writer.op("Cast", scores, to=NAMES[self.score_type])
        number = np.dtype(self.score_type)
        match spelling.scale:
            case "mul":
                scores = writer.op("Mul", scores, writer.const(spelling.factor, self.score_type))
            case "div":
                scores = writer.op("Div", scores, writer.const([1 / spelling.factor], self.score_type))
            case "computed":
                depth = writer.op("Gather", writer.op("Shape", "q"), writer.const(-1, "int64"), axis=0)
                if spelling.layout in ("BSH", "SBH"):
                    depth = writer.op("Div", depth, writer.const(self.sizes["N"], "int64"))
                root = writer.op("Sqrt", writer.op("Cast", depth, to=TensorProto.FLOAT))
                if number != np.float32:
                    root = writer.op("Cast", root, to=NAMES[self.score_type])
                scores = writer.op("Div", scores, root)
        for index, mask in enumerate(spelling.masks):
            scores = self._masked(scores, mask, f"m{index}")
        if spelling.floor:
            scores = writer.op("Max", scores, writer.const(FLOAT32_MIN, self.score_type))
            self.steps.append(lambda formula, feeds: formula.raise_to(FLOAT32_MIN))
        if spelling.scale == "after_mask":
            scores = writer.op("Mul", writer.const(spelling.factor, self.score_type), scores)
            self.steps.append(lambda formula, feeds: formula.multiply(spelling.factor))
        return scores

    def _masked(self, scores: str, mask: Mask, name: str) -> str:
        writer = self.writer
        sizes = [writer.size(letter) for letter in mask.dims]
        if mask.form == "bias":
            maker = _bias(sizes, self.score_type, mask.infinite)
            bias = writer.input(name, NAMES[self.score_type], mask.dims, maker, mask.anonymous)
            self.steps.append(lambda formula, feeds: formula.add(feeds[name].astype(np.float64)))
            self.addend = self._turned(bias, mask)
            return writer.op("Add", scores, self.addend)
        keep = self._keep(mask, name, sizes)
        kind = self.score_type
        fill = max(mask.fill, FLOAT16_MIN) if kind == "float16" and math.isfinite(mask.fill) else mask.fill
        low = writer.const(fill, kind)
        flag = self._bool(keep, mask)
        if mask.form.startswith("select"):
            self.steps.append(
                lambda formula, feeds: formula.select(kept(mask, name, feeds, sizes), float(np.dtype(kind).type(fill)))
            )
            self.keep = mask.form == "select"
            self.condition = self._turned(flag if self.keep else writer.op("Not", flag), mask)
            return writer.op("Where", self.condition, *((scores, low) if self.keep else (low, scores)))
        value = float(np.dtype(kind).type(fill))
        # 0 * -inf is NaN, for the formula as for the model.
        zero = math.nan if mask.form == "add_mul" and math.isinf(value) else 0.0
        self.steps.append(lambda formula, feeds: formula.add(np.where(kept(mask, name, feeds, sizes), zero, value)))
        if mask.form == "add_where":
            addend = writer.op("Where", flag, writer.const(0, kind), low)
        else:
            number = writer.op("Cast", keep, to=NAMES[kind])
            addend = writer.op("Sub", writer.const(1, kind), number)
            if mask.form == "add_mul":
                addend = writer.op("Mul", addend, low)
            else:
                addend = writer.op("Where", writer.op("Cast", addend, to=TensorProto.BOOL), low, addend)
        self.addend = addend = self._turned(addend, mask)
        return writer.op("Add", *((scores, addend) if len(writer.nodes) % 2 else (addend, scores)))

    def _keep(self, mask: Mask, name: str, sizes: list[int]) -> str:
        """What is kept, as a bool or int64 tensor of the mask's dimensions."""
        writer = self.writer
        if mask.source in CONSTANT:
            return writer.const(_pattern(sizes, mask.source == "const_empty"))
        kind = TensorProto.BOOL if mask.source == "input" else TensorProto.INT64
        letters = mask.dims.replace("1", "") if mask.source == "int" else mask.dims
        short = [writer.size(letter) for letter in letters]
        maker = _random_keep(short, np.bool_ if mask.source == "input" else np.int64)
        keep = writer.input(name, kind, letters, maker, mask.anonymous)
        if letters != mask.dims:
            keep = writer.unsqueeze(keep, *[index for index, letter in enumerate(mask.dims) if letter == "1"])
        return keep

    def _bool(self, keep: str, mask: Mask) -> str:
        return self.writer.op("Cast", keep, to=TensorProto.BOOL) if mask.source == "int" else keep

    def _turned(self, value: str, mask: Mask) -> str:
        """The mask as the scores are laid out: transposed, or of rank 5."""
        writer, spelling = self.writer, self.spelling
        rank = len(mask.dims)
        if spelling.gqa == "grouped" and rank == 4:
            if mask.dims[1] == "N":
                value = writer.reshape(value, [mask.dims[0], "K", "G", *mask.dims[2:]], list(mask.dims))
            else:
                value = writer.unsqueeze(value, 2)
            rank = 5
        if not spelling.transposed:
            return value
        if rank == 1:
            return writer.unsqueeze(value, 1)
        return writer.op("Transpose", value, perm=[*range(rank - 2), rank - 1, rank - 2])

    # -- softmax and values ---------------------------------------------------------------------

    def _softmax(self, scores: str) -> str:
        spelling, writer = self.spelling, self.writer
        rank = 2 if self.flat else 5 if spelling.gqa == "grouped" else 4
        axis = -2 if spelling.transposed else -1
        if spelling.product == "folded":
            scores = writer.reshape(scores, ["BN", "S", "T"], ["B", "N", "S", "T"])
            rank = 3
        if spelling.identity:
            scores = writer.op("Identity", scores)
        if spelling.softmax == "decomposed":
            shifted = writer.op("Sub", scores, writer.reduce("ReduceMax", scores, axis))
            exponential = writer.op("Exp", shifted)
            result = writer.op("Div", exponential, writer.reduce("ReduceSum", exponential, axis))
        else:
            if spelling.softmax == "shifted":
                scores = writer.op("Sub", scores, writer.reduce("ReduceMax", scores, axis))
            axis += rank if spelling.softmax == "op_positive" else 0
            result = writer.op("Softmax", scores, axis=axis)
        if spelling.upcast:
            result = writer.op("Cast", result, to=NAMES[spelling.dtype])
        if spelling.guard != "none":
            zero = writer.const(0, spelling.dtype)
            condition, where = (
                (self.condition, self.keep) if spelling.guard == "selection" else (self._guard(result), False)
            )
            result = writer.op("Where", condition, *((result, zero) if where else (zero, result)))
        if spelling.dropout:
            if spelling.opset >= 12:
                result = writer.op("Dropout", result, writer.const(0.25, "float32"), count=2)
            else:
                result = writer.op("Dropout", result, ratio=0.25)
        return result

    def _guard(self, probabilities: str) -> str:
        """The condition of a guard."""
        writer = self.writer
        if self.spelling.guard == "selection":
            return self.condition
        if self.spelling.guard == "nan":
            return writer.op("IsNaN", probabilities)
        peak = writer.reduce("ReduceMax", self.addend, -1)
        return writer.op("Equal", peak, writer.const(-math.inf, self.score_type))

    def _values(self, probabilities: str, value: str) -> str:
        """[B, N, S, E]."""
        spelling, writer = self.spelling, self.writer
        value = self._repeated(value, "T", "E")
        if spelling.product == "folded":
            value = writer.reshape(value, ["BN", "T", "E"], ["B", "N", "T", "E"])
            result = writer.op("MatMul", probabilities, value)
            return writer.reshape(result, ["B", "N", "S", "E"], ["BN", "S", "E"])
        if spelling.values == "einsum" and not self.flat and spelling.gqa != "grouped":
            order = "ts" if spelling.transposed else "st"
            result = writer.op("Einsum", probabilities, value, equation=f"bn{order},bnte->bnse")
        elif spelling.transposed or spelling.values == "flipped":
            p = probabilities if spelling.transposed else self._swapped(probabilities)
            result = self._swapped(writer.op("MatMul", self._swapped(value), p))
        else:
            result = writer.op("MatMul", probabilities, value)
        if spelling.gqa == "grouped":
            return writer.reshape(result, ["B", "N", "S", "E"], ["B", "K", "G", "S", "E"])
        return result

    def _output(self, result: str) -> tuple[str, int]:
        writer = self.writer
        if self.flat:
            return result, 2
        match self.spelling.output:
            case "BSND":
                return writer.op("Transpose", result, perm=[0, 2, 1, 3]), 4
            case "BSH":
                moved = writer.op("Transpose", result, perm=[0, 2, 1, 3])
                return writer.reshape(moved, ["B", "S", "NE"], ["B", "S", "N", "E"]), 3
            case "SBH":
                moved = writer.op("Transpose", result, perm=[2, 0, 1, 3])
                return writer.reshape(moved, ["S", "B", "NE"], ["S", "B", "N", "E"]), 3
        return result, 4

    # -- the formula ----------------------------------------------------------------------------

    def _formula(self, feeds: Mapping[str, Array]) -> tuple[Scores, Scores]:
        """The output in float64, and a tolerance for each element relative to the largest."""
        spelling = self.spelling
        query, key, value = (self._natural(feeds[name].astype(np.float64), name) for name in "qkv")
        factor = {"none": 1.0, "after_mask": 1.0, "computed": 1 / math.sqrt(self.sizes["D"])}.get(
            spelling.scale, spelling.factor
        )
        scores = factor * np.einsum("bnsd,bntd->bnst", query, key)
        magnitude = abs(factor) * np.einsum("bnsd,bntd->bnst", np.abs(query), np.abs(key))
        kind = np.float64 if self.score_type == "float64" else np.float32
        formula = Formula(scores.astype(np.float32).astype(np.float64), magnitude, kind)
        for step in self.steps:
            step(formula, feeds)
        with np.errstate(invalid="ignore"):
            peak = formula.scores.max(axis=-1, keepdims=True)
            exponential = np.exp(formula.scores - peak)
            probabilities = exponential / exponential.sum(axis=-1, keepdims=True)
        if spelling.guard == "nan":
            probabilities = np.where(np.isnan(probabilities), 0, probabilities)
        if spelling.guard == "selection":
            probabilities = np.where(formula.kept, probabilities, 0)
        if spelling.guard == "bias":
            empty = (formula.addend == -math.inf).all(axis=-1, keepdims=True)
            probabilities = np.where(empty, 0, probabilities)
        result = np.einsum("bnst,bnte->bnse", probabilities, value)
        # The float type knows a score to half an ulp of what made it up, and a probability is off by as much. Sums with
        # masks are known to half an ulp of float32, unless they swallow the score: then it does not matter.
        ulp, base = (2.0**-11, 2e-3) if spelling.dtype == "float16" else (2.0**-24, 1e-5)
        known = ulp * formula.magnitude + 2.0**-24 * np.where(np.abs(formula.scores) < 1e7, np.abs(formula.scores), 0)
        near = formula.scores > peak - 100
        off = 4 * np.where(near, known, 0).max(axis=-1, keepdims=True)
        # A number such as -1e9 leaves of a score what its rounding makes of it: chance, unless it swallows all of it.
        with np.errstate(all="ignore"):
            step = np.spacing(np.abs(peak).astype(np.float32)).astype(np.float64)
        blurred = (np.abs(peak) >= 1e7) & (formula.magnitude.max(axis=-1, keepdims=True) > step / 8)
        tolerance = np.broadcast_to(base + np.where(blurred, math.inf, off), result.shape)
        return self._arranged(result), self._arranged(tolerance)

    def _natural(self, value: Scores, name: str) -> Scores:
        """An input as [B, N, S, D], heads repeated as the spelling repeats them."""
        heads, depth = ("N" if name == "q" else "K"), ("E" if name == "v" else "D")
        n, d = self.sizes[heads], self.sizes[depth]
        match self.spelling.layout:
            case "SD":
                value = value[None, None]
            case "BSND":
                value = value.transpose(0, 2, 1, 3)
            case "BSH":
                value = value.reshape(*value.shape[:2], n, d).transpose(0, 2, 1, 3)
            case "SBH":
                value = value.reshape(*value.shape[:2], n, d).transpose(1, 2, 0, 3)
        if name == "q" or self.sizes["G"] == 1:
            return value
        if self.spelling.gqa in ("tile", "interleave"):
            return np.tile(value, (1, self.sizes["G"], 1, 1))
        return np.repeat(value, self.sizes["G"], axis=1)

    def _arranged(self, result: Scores) -> Scores:
        """[B, N, S, E] as the output is laid out."""
        if self.flat:
            return result[0, 0]
        match self.spelling.output:
            case "BSND":
                return result.transpose(0, 2, 1, 3)
            case "BSH":
                moved = result.transpose(0, 2, 1, 3)
                return moved.reshape(*moved.shape[:2], -1)
            case "SBH":
                moved = result.transpose(2, 0, 1, 3)
                return moved.reshape(*moved.shape[:2], -1)
        return result


# -- inputs -------------------------------------------------------------------------------------


def _normal(shape: Sequence[int], dtype: str) -> Callable[[np.random.Generator], Array]:
    def make(rng: np.random.Generator) -> Array:
        # Now and then scores of some hundreds: one key wins, the others underflow.
        size = 1.0 if dtype == "float16" else float(rng.choice([1.0, 1.0, 5.0]))
        return (rng.standard_normal(shape) * size).astype(dtype)

    return make


def _bias(shape: Sequence[int], dtype: str, infinite: bool) -> Callable[[np.random.Generator], Array]:
    def make(rng: np.random.Generator) -> Array:
        bias = rng.standard_normal(shape)
        if infinite:
            bias = np.where(_random_keep(shape, np.bool_)(rng), bias, -np.inf)
        return bias.astype(dtype)

    return make


def _random_keep(shape: Sequence[int], dtype: npt.DTypeLike) -> Callable[[np.random.Generator], Array]:
    def make(rng: np.random.Generator) -> Array:
        keep = rng.random(shape) < rng.choice([0.2, 0.6, 0.9])
        # Whole rows without any key: where most fusers go wrong.
        empty = rng.random((*shape[:-1], 1)) < 0.3
        return (keep & ~empty).astype(dtype)

    return make


def _pattern(shape: Sequence[int], empty: bool) -> Array:
    """A triangle, with one row masked everywhere if it is to have an empty row."""
    keep = np.tril(np.ones(shape, np.bool_)) if len(shape) > 1 else np.arange(shape[0]) % 3 != 1
    if empty:
        keep[(..., shape[-2] // 2, slice(None)) if len(shape) > 1 else ...] = False
    return keep


def kept(mask: Mask, name: str, feeds: Mapping[str, Array], sizes: Sequence[int]) -> Array:
    """The mask as a boolean array that broadcasts to [B, N, S, T]."""
    if mask.source in CONSTANT:
        return _pattern(sizes, mask.source == "const_empty")
    return feeds[name].reshape(sizes) != 0
