"""Attention in any spelling: a model, inputs for it, and the float64 formula it stands for.

`Spelling` says how attention is written down; `build` composes the model and, side by side with every node
that computes something, the step of the formula it stands for. The formula is never derived from the model.

Sizes are named by letters: B batch, N query heads, K key heads, G = N / K, S rows, T columns, D depth, E value depth,
H = N * D and so on for products. A mask's `dims` is a word such as "B11T": its dimensions from left to right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto

from tests.passes.feeds import Maker, bias, kept, normal, random_keep, small_bound, triangle
from tests.passes.formula import Formula, Scores
from tests.passes.operands import Operand, Operands
from tests.passes.patterns import PATTERNS, WRITTEN, filled_triangle
from tests.passes.repeats import EXPLICIT, IN_TURNS, REPEATS
from tests.passes.softmaxes import SOFTMAXES
from tests.passes.spelling import CONSTANT, FLOAT16_MIN, FLOAT32_MIN, Mask, Spelling, wider
from tests.passes.writer import Array, Writer

NAMES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "float64": TensorProto.DOUBLE,
}


@dataclass(frozen=True)
class Case:
    """A model with its formula."""

    spelling: Spelling
    model: onnx.ModelProto
    makers: Mapping[str, Maker]
    formula: Callable[[Mapping[str, Array]], tuple[Scores, Scores]]
    marks: Mapping[str, str]
    """Names of values on the way: scores (what the product gives), masked (what the softmax takes), probabilities."""
    rank: int
    """Of the scores, before a reshape to rank 3 where heads are folded."""

    def feeds(self, seed: int) -> dict[str, Array]:
        """Inputs for one run."""
        rng = np.random.default_rng(seed)
        return {name: make(rng) for name, make in self.makers.items()}


def build(spelling: Spelling) -> Case:
    """Compose the model of a spelling."""
    return _Composer(spelling).case()


class _Composer:
    def __init__(self, spelling: Spelling) -> None:
        self.spelling = spelling
        self.sizes = dict(spelling.sizes)
        self.sizes["G"] = self.sizes["N"] // self.sizes["K"]
        self.sizes["W"] = self.sizes["N"] * self.sizes["D"] + self.sizes["K"] * (self.sizes["D"] + self.sizes["E"])
        self.writer = Writer(spelling.opset, self.sizes, spelling.symbolic, spelling.target)
        self.steps: list[Callable[[Formula, Mapping[str, Array]], None]] = []
        self.operands = Operands(spelling, self.writer, NAMES[spelling.dtype])
        self.rank = {"SD": 2, "BSD": 3}.get(spelling.layout, 5 if spelling.gqa == "grouped" else 4)
        self.score_type = wider(spelling)
        self.addend = self.condition = ""
        self.keep = True

    # -- the model ------------------------------------------------------------------------------

    def case(self) -> Case:
        spelling, writer = self.spelling, self.writer
        query, key, value = self.operands.written()
        scores = self._product(self._query(query), self._key(key))
        masked = self._terms(scores)
        probabilities = self._softmax(masked)
        marks = {"scores": scores, "masked": masked, "probabilities": probabilities}
        result = self._values(probabilities, value.value)
        result, rank = self._output(result)
        model = writer.model(result, NAMES[spelling.dtype], rank)
        return Case(spelling, model, writer.makers, self._formula, marks, self.rank)

    def _scaled(self, value: str, factor: float, divide: bool = False) -> str:
        number = self.writer.const(1 / factor if divide else factor, self.spelling.dtype)
        if divide:
            return self.writer.op("Div", value, number)
        # Both orders, and a scale of rank 1 now and then.
        return self.writer.op("Mul", *((value, number) if len(self.writer.nodes) % 2 else (number, value)))

    def _depth(self, dtype: str) -> str:
        """The square root of the head size, computed from a shape."""
        writer = self.writer
        depth = writer.op("Shape", "q")
        last = {"SD": 1, "BSD": 2, "BSH": 2, "SBH": 2}.get(self.spelling.layout, 3)
        depth = writer.op("Gather", depth, writer.const(last if writer.opset < 11 else -1, "int64"), axis=0)
        if self.spelling.layout in ("BSH", "SBH"):
            depth = writer.op("Div", depth, writer.const(self.sizes["N"], "int64"))
        root = writer.op("Sqrt", writer.op("Cast", depth, to=TensorProto.FLOAT))
        return root if dtype == "float32" else writer.op("Cast", root, to=NAMES[dtype])

    def _computed_root(self) -> str:
        """The square root of one over the root of the head size, as older exports of torch's sdpa have it."""
        writer, dtype = self.writer, self.spelling.dtype
        return writer.op("Sqrt", writer.op("Div", writer.const([1], dtype), self._depth(dtype)))

    def _query(self, operand: Operand) -> str:
        spelling, query = self.spelling, operand.value
        match spelling.scale:
            case "query" | "query_div":
                query = self._scaled(query, spelling.factor, divide=spelling.scale == "query_div")
            case "both":
                query = self._scaled(query, math.sqrt(spelling.factor))
            case "computed_both":
                query = self.writer.op("Mul", query, self._computed_root())
        if spelling.gqa == "grouped":
            query = self.writer.reshape(query, ["B", "K", "G", "S", "D"], ["B", "N", "S", "D"])
        return query

    def _key(self, operand: Operand) -> Operand:
        """The key scaled and with as many heads as the query; one that is transposed at once is so already."""
        spelling, writer = self.spelling, self.writer
        key = operand.before if spelling.key == "0231" else operand.value
        match spelling.scale:
            case "key":
                key = self._scaled(key, spelling.factor, divide=True)
            case "both":
                key = self._scaled(key, math.sqrt(spelling.factor), divide=True)
            case "computed_both":
                key = writer.op("Mul", key, self._computed_root())
        if spelling.key == "0231":
            return Operand(writer.op("Transpose", key, perm=list(operand.perm or ())), key, operand.perm)
        return Operand(REPEATS[spelling.gqa](writer, key, "T", "D"), key, None)

    def _product(self, query: str, operand: Operand) -> str:
        """[B, N, S, T], or [B, N, T, S] when transposed."""
        spelling, writer, key = self.spelling, self.writer, operand.value
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
        if spelling.key == "0231":
            result = key
        elif spelling.key == "rank3" and spelling.gqa in ("none", *EXPLICIT):
            folded = writer.reshape(key, ["BN", "T", "D"], ["B", "N", "T", "D"])
            folded = writer.op("Transpose", folded, perm=[0, 2, 1])
            result = writer.reshape(folded, ["B", "N", "D", "T"], ["BN", "D", "T"])
        else:
            result = self._swapped(key)
        return self._scaled(result, spelling.factor) if spelling.scale == "transposed_key" else result

    def _swapped(self, value: str) -> str:
        """The last two dimensions exchanged."""
        return self.writer.op("Transpose", value, perm=[*range(self.rank - 2), self.rank - 1, self.rank - 2])

    # -- the terms ------------------------------------------------------------------------------

    def _terms(self, scores: str) -> str:
        spelling, writer = self.spelling, self.writer
        if spelling.upcast:
            scores = writer.op("Cast", scores, to=NAMES[self.score_type])
        match spelling.scale:
            case "mul":
                scores = writer.op("Mul", scores, writer.const(spelling.factor, self.score_type))
            case "div":
                scores = writer.op("Div", scores, writer.const([1 / spelling.factor], self.score_type))
            case "root":
                square = writer.const(spelling.factor**-2, self.score_type)
                scores = writer.op("Div", scores, writer.op("Sqrt", square))
            case "computed":
                scores = writer.op("Div", scores, self._depth(self.score_type))
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
            maker = bias(sizes, self.score_type, mask.infinite)
            shift = writer.input(name, NAMES[self.score_type], mask.dims, maker, mask.anonymous)
            self.steps.append(lambda formula, feeds: formula.add(feeds[name].astype(np.float64)))
            self.addend = self._turned(shift, mask)
            return writer.op("Add", scores, self.addend)
        keep = "" if mask.form == "add_triangle" else self._keep(mask, name, sizes)
        kind = self.score_type
        fill = max(mask.fill, FLOAT16_MIN) if kind == "float16" and math.isfinite(mask.fill) else mask.fill
        low = writer.const(fill, kind)
        flag = writer.op("Cast", keep, to=TensorProto.BOOL) if mask.source == "int" else keep
        if mask.selects:
            self.steps.append(
                lambda formula, feeds: formula.select(kept(mask, name, feeds, sizes), float(np.dtype(kind).type(fill)))
            )
        if mask.form.startswith("select"):
            self.keep = mask.form == "select"
            self.condition = self._turned(flag if self.keep else writer.op("Not", flag), mask)
            return writer.op("Where", self.condition, *((scores, low) if self.keep else (low, scores)))
        if mask.form == "least":
            high = writer.const(math.inf, kind)
            limit = writer.op("Where", self._turned(flag, mask), high, low)
            return writer.op("Min", *((scores, limit) if len(writer.nodes) % 2 else (limit, scores)))
        if mask.form == "mul_add":
            number = self._turned(writer.op("Cast", keep, to=NAMES[kind]), mask)
            rest = writer.op("Mul", writer.op("Sub", writer.const(1, kind), number), low)
            return writer.op("Add", writer.op("Mul", scores, number), rest)
        value = float(np.dtype(kind).type(fill))
        # 0 * -inf is NaN, for the formula as for the model.
        zero = math.nan if mask.form == "add_mul" and math.isinf(value) else 0.0
        self.steps.append(lambda formula, feeds: formula.add(np.where(kept(mask, name, feeds, sizes), zero, value)))
        if mask.form == "add_triangle":
            pattern = PATTERNS[mask.pattern]
            addend = self._lifted(filled_triangle(writer, pattern, fill, kind), 2, mask)
        elif mask.form == "add_where":
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
        if mask.computed:
            bound = ""
            if mask.bound:
                bound = writer.input(f"{name}_bound", TensorProto.INT64, "1", small_bound)
            keep = WRITTEN[mask.source](writer, PATTERNS[mask.pattern], bound)
            keep = self._lifted(keep, 4 if mask.source == "slice_lifted" else 2, mask)
            return self._padded(keep, mask, name) if mask.padding else keep
        if mask.source in CONSTANT:
            return writer.const(triangle(sizes, mask.source == "const_empty"))
        kind = TensorProto.BOOL if mask.source == "input" else TensorProto.INT64
        letters = mask.dims.replace("1", "") if mask.source == "int" else mask.dims
        short = [writer.size(letter) for letter in letters]
        maker = random_keep(short, np.bool_ if mask.source == "input" else np.int64)
        keep = writer.input(name, kind, letters, maker, mask.anonymous)
        if letters != mask.dims:
            keep = writer.unsqueeze(keep, *[index for index, letter in enumerate(mask.dims) if letter == "1"])
        return keep

    def _lifted(self, keep: str, rank: int, mask: Mask) -> str:
        """With leading dimensions of 1, as many as the mask has."""
        missing = len(mask.dims) - rank
        return self.writer.unsqueeze(keep, *range(missing)) if missing > 0 else keep

    def _padded(self, keep: str, mask: Mask, name: str) -> str:
        """A computed mask where a padding mask keeps the key as well."""
        writer = self.writer
        ones = "1" * (len(mask.dims) - 2)
        dims = "BT" if mask.padding == "gather" else f"B{ones}T"
        maker = random_keep([writer.size(letter) for letter in dims], np.bool_)
        padding = writer.input(name, TensorProto.BOOL, dims, maker, mask.anonymous)
        match mask.padding:
            case "gather":
                batch = writer.unsqueeze(writer.range("B"), *range(1, len(mask.dims)))
                columns = writer.unsqueeze(writer.range("T"), *range(len(mask.dims) - 1))
                full = writer.shape(["B", *ones, "T"])
                spread = [
                    writer.unsqueeze(writer.op("Expand", each, full), len(mask.dims)) for each in (batch, columns)
                ]
                padding = writer.op("GatherND", padding, writer.op("Concat", *spread, axis=len(mask.dims)))
            case "times":
                both = [writer.op("Cast", each, to=TensorProto.INT64) for each in (keep, padding)]
                return writer.op("Cast", writer.op("Mul", *both), to=TensorProto.BOOL)
        # As dynamo writes it: anything that could have been another condition is true.
        first = writer.op("And", writer.const(True), keep) if len(writer.nodes) % 2 else keep
        return writer.op("And", first, padding)

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
        rank = self.rank
        axis = -2 if spelling.transposed else -1
        if spelling.product == "folded":
            scores = writer.reshape(scores, ["BN", "S", "T"], ["B", "N", "S", "T"])
            rank = 3
        if spelling.identity:
            scores = writer.op("Identity", scores)
        sunk = self._sunk(scores, axis) if spelling.sink else scores
        result = SOFTMAXES[spelling.softmax](writer, sunk, axis, rank)
        if spelling.sink:
            result = writer.last_dropped(result, axis + rank)
        if spelling.upcast:
            result = writer.op("Cast", result, to=NAMES[spelling.dtype])
        if spelling.guard == "product":
            kept = self.condition if self.keep else writer.op("Not", self.condition)
            result = writer.op("Mul", result, writer.op("Cast", kept, to=NAMES[spelling.dtype]))
        elif spelling.guard != "none":
            zero = writer.const(0, spelling.dtype)
            condition, where = (
                (self.condition, self.keep) if spelling.guard == "selection" else (self._guard(result, scores), False)
            )
            result = writer.op("Where", condition, *((result, zero) if where else (zero, result)))
        if spelling.dropout:
            if spelling.opset >= 12:
                result = writer.op("Dropout", result, writer.const(0.25, "float32"), count=2)
            else:
                result = writer.op("Dropout", result, ratio=0.25)
        return result

    def _sunk(self, scores: str, axis: int) -> str:
        """The scores with one number for each head beside them."""
        writer = self.writer
        writer.input("sink", NAMES[self.score_type], "N", normal([self.sizes["N"]], self.score_type))
        apart = ["K", "G"] if self.rank == 5 else ["N"]
        tail = ["1", "1"]
        ones = writer.reshape("sink", ["1"] * (self.rank - len(apart) - 2) + apart + tail, ["N"])
        rows = ["S", "1"] if axis == -1 else ["1", "S"]
        full = writer.shape(["B"] * (self.rank > 2) + (apart if self.rank > 3 else []) + rows)
        if self.rank < 4:
            ones = writer.reshape("sink", ["1"] * self.rank, ["N"])
        return writer.op("Concat", scores, writer.op("Expand", ones, full), axis=axis + self.rank)

    def _guard(self, probabilities: str, scores: str) -> str:
        """The condition of a guard."""
        writer = self.writer
        if self.spelling.guard == "selection":
            return self.condition
        if self.spelling.guard == "nan":
            return writer.op("IsNaN", probabilities)
        if self.spelling.guard == "cast_nan":
            return writer.op("IsNaN", writer.op("Cast", probabilities, to=TensorProto.FLOAT16))
        if self.spelling.guard == "scores":
            infinite = writer.op("Equal", scores, writer.const(-math.inf, self.score_type))
            kept = writer.op("Cast", writer.op("Not", infinite), to=TensorProto.INT32)
            any_kept = writer.op("Cast", writer.reduce("ReduceMax", kept, -1, 4), to=TensorProto.BOOL)
            return writer.op("Not", any_kept)
        peak = writer.reduce("ReduceMax", self.addend, -1, 4)
        return writer.op("Equal", peak, writer.const(-math.inf, self.score_type))

    def _values(self, probabilities: str, value: str) -> str:
        """[B, N, S, E]."""
        spelling, writer = self.spelling, self.writer
        value = REPEATS[spelling.gqa_values or spelling.gqa](writer, value, "T", "E")
        if spelling.product == "folded":
            value = writer.reshape(value, ["BN", "T", "E"], ["B", "N", "T", "E"])
            result = writer.op("MatMul", probabilities, value)
            return writer.reshape(result, ["B", "N", "S", "E"], ["BN", "S", "E"])
        if spelling.values == "einsum" and self.rank == 4:
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
        if self.rank < 4:
            return result, self.rank
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
        query, key, value = (self._repeated(self.operands.natural(feeds, name), name) for name in "qkv")
        root = 1 / math.sqrt(self.sizes["D"])
        plain = {"none": 1.0, "after_mask": 1.0, "computed": root, "computed_both": root}
        factor = plain.get(spelling.scale, spelling.factor)
        scores = factor * np.einsum("bnsd,bntd->bnst", query, key)
        magnitude = abs(factor) * np.einsum("bnsd,bntd->bnst", np.abs(query), np.abs(key))
        formula = Formula(
            scores.astype(np.float32).astype(np.float64),
            magnitude,
            np.float64 if self.score_type == "float64" else np.float32,
        )
        for step in self.steps:
            step(formula, feeds)
        sink = None
        if spelling.sink:
            sink = feeds["sink"].astype(np.float64)[:, None, None]
        probabilities = formula.probabilities(sink)
        match spelling.guard:
            case "nan" | "cast_nan":
                probabilities = np.where(np.isnan(probabilities), 0, probabilities)
            case "product":
                probabilities = probabilities * formula.kept
            case "selection":
                probabilities = np.where(formula.kept, probabilities, 0)
            case "scores":
                probabilities = np.where((formula.scores == -math.inf).all(axis=-1, keepdims=True), 0, probabilities)
            case "bias":
                empty = (formula.addend == -math.inf).all(axis=-1, keepdims=True)
                probabilities = np.where(empty, 0, probabilities)
        result = np.einsum("bnst,bnte->bnse", probabilities, value)
        tolerance = np.broadcast_to(formula.tolerance(spelling.dtype), result.shape)
        return self._arranged(result), self._arranged(tolerance)

    def _repeated(self, value: Scores, name: str) -> Scores:
        """An operand with heads repeated as the spelling repeats them."""
        group = self.sizes["G"]
        if name == "q" or group == 1:
            return value
        gqa = (name == "v" and self.spelling.gqa_values) or self.spelling.gqa
        return np.tile(value, (1, group, 1, 1)) if gqa in IN_TURNS else np.repeat(value, group, axis=1)

    def _arranged(self, result: Scores) -> Scores:
        """[B, N, S, E] as the output is laid out."""
        if self.rank < 4:
            return result[0, 0] if self.rank == 2 else result[0]
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
