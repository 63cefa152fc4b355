"""Attention beside tensors whose numbers are bounded and that may be NaN all the same.

Each factor, sink and addend goes through operators that bound its numbers (Sigmoid, Clip, Min, ...), and most of them
leave NaN as it is. Their inputs hold NaN and infinities, the rest of the model plain numbers. So the judge is stricter
than that of the other kinds: a NaN has to stand where it stood in the original. Scores at masked keys are not read
(recognised.md), so where scores may be NaN no key is masked.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

import fa_compiler
from tools.fuzz.difference import LARGEST, Array, evaluated, run_original, session
from tools.fuzz.graph import Case, Graph, Input
from tools.fuzz.kind import Finding, Kind, Outcome
from tools.fuzz.oracle import run_fused

INF = float("inf")
SIDES: Sequence[tuple[str | int, ...]] = (
    (1,),
    (1, 1),
    ("N", 1, 1),
    ("B", 1, 1, 1),
    ("B", 1, "S", 1),
    ("B", "N", "S", 1),
)
KEYED: Sequence[tuple[str | int, ...]] = (("B", 1, 1, "T"), ("B", "N", "S", "T"), ("S", "T"), ("B", 1, "S", 1), (1, 1))
NUMBERS = (np.nan, np.nan, np.inf, -np.inf, 0.0, -1.0, 0.5, 3.0, 1e38)
ON_SCORES, BEHIND = "on scores", "behind"
"""The roles of the bounded tensors: those that make scores NaN, and the others."""
TOLERANCE = 1e-4


class Bounds(Kind):
    """One attention with one to three such tensors."""

    def check(self, seed: int) -> Outcome:
        rng = random.Random(seed)
        case = _Composer(rng).case()
        target = rng.choice(["ort", "ort", "ort", "contrib", "onnx"])
        runtime = None if target == "ort" else "ort-cpu"
        result = fa_compiler.optimize(case.model, target=target, runtime=runtime, assume=case.assume)
        if not result.report.count("fused"):
            return Outcome("declined")
        assumed = {word for block in result.report.blocks for word in block.assumed}
        if "finite-scores" in assumed - set(case.assume):
            return Outcome("assumed")
        title, detail = _difference(case, result.model, seed)
        if not title:
            return Outcome("fused")
        text = f"{target} {' '.join(case.words)}\n{detail}\n{result.report.blocks}"
        return Outcome("fused", Finding(f"{target}: {title}", text, case.model.SerializeToString()))


def _difference(case: Case, fused: object, seed: int) -> tuple[str, str]:
    """A title and a description of the first difference; empty where there is none."""
    rng = np.random.default_rng(seed)
    first, second = session(case.model, custom=False), session(fused, custom=True)  # type: ignore[arg-type]
    for round_ in range(6):
        feeds = {each.name: _array(case, each, rng, spoiled=round_ > 0) for each in case.inputs}
        wanted, got = run_original(first, feeds)[0].astype(np.float64), run_fused(second, feeds)[0].astype(np.float64)
        wrong = _wrong(wanted, got)
        if wrong.any() and (reference := evaluated(case.model, feeds)) is not None:
            # ONNX Runtime's Softmax turns NaN into numbers in some lanes of a vector.
            wrong &= _wrong(reference[0].astype(np.float64), got)
        if not wrong.any():
            continue
        place = tuple(map(int, np.argwhere(wrong)[0]))
        left, right = wanted[place], got[place]
        title = "other numbers" if np.isfinite([left, right]).all() else f"{_word(right)} instead of {_word(left)}"
        return title, f"{right} instead of {left} at {place}\n{feeds}"
    return "", ""


def _word(number: float) -> str:
    return "NaN" if np.isnan(number) else "infinity" if np.isinf(number) else "0" if number == 0.0 else "a number"


def _wrong(wanted: Array, got: Array) -> Array:
    """Where two results differ. Infinity times 0 is NaN, so the one stands for the other."""
    scale = float(np.abs(wanted, where=np.isfinite(wanted), out=np.zeros_like(wanted)).max(initial=0.0))
    with np.errstate(all="ignore"):
        near = np.abs(wanted - got) <= TOLERANCE * max(scale, 1e-3)
    return np.asarray(~near & (np.isfinite(wanted) | np.isfinite(got)))


def _array(case: Case, given: Input, rng: np.random.Generator, spoiled: bool) -> Array:
    shape = tuple(each if isinstance(each, int) else case.sizes[each] for each in given.dims)
    if given.role == "bool":
        keep = (rng.random(shape) < 0.6) & (rng.random((*shape[:-1], 1)) < 0.7)
        return np.asarray(keep | any(each.role == ON_SCORES for each in case.inputs))
    made = rng.standard_normal(shape)
    if given.role in (ON_SCORES, BEHIND) and spoiled:
        made = np.where(rng.random(shape) < 0.5, rng.choice(NUMBERS, shape), made)
    with np.errstate(over="ignore"):
        return np.asarray(made).astype(given.dtype)


class _Composer:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        heads = rng.choice([1, 2])
        sizes = {"B": 2, "N": heads, "S": rng.choice([1, 2, 3]), "T": rng.choice([2, 3, 4]), "D": 4}
        if rng.random() < 0.4:
            sizes["T"] = sizes["S"]
        self.g = Graph(rng, sizes, frozenset({"B"} if rng.random() < 0.5 else ()), 17)
        self.conditions: list[str] = []
        self.addends: list[str] = []

    def case(self) -> Case:
        g, rng = self.g, self.rng
        query, key, value = (
            g.input("value", "float32", ("B", "N", s, "D"), name=name) for name, s in ("qS", "kT", "vT")
        )
        scores = g.op("MatMul", query, g.op("Transpose", key, perm=[0, 1, 3, 2]))
        steps: list[Callable[[str], str]] = [
            self._factor,
            self._factor,
            self._mask,
            self._mask,
            self._addend,
            self._floor,
        ]
        for step in rng.sample(steps, rng.choice([0, 1, 1, 2, 2, 3])):
            scores = step(scores)
        sink = rng.random() < 0.2
        if sink:
            g.words.append("sink")
            column = g.op(
                "Expand", self._side((("N", 1, 1), (1, 1), ("B", "N", "S", 1)), BEHIND), g.shape(("B", "N", "S", 1))
            )
            scores = g.op("Concat", scores, column, axis=-1)
        probabilities = g.op("Softmax", scores, axis=-1)
        if sink:
            ends = [g.const([number], "int64") for number in (0, -1, 3)]
            probabilities = g.op("Slice", probabilities, *ends)
        for behind in rng.sample([self._factor, self._guard, self._guard], rng.choice([0, 1, 2, 2])):
            probabilities = behind(probabilities, scores)
        result = g.op("MatMul", probabilities, value)
        return g.case([(result, "float32", ("B", "N", "S", "D"))])

    def _side(self, shapes: Sequence[tuple[str | int, ...]], role: str) -> str:
        """A bounded tensor of one of these shapes."""
        g, rng = self.g, self.rng
        given = g.input(role, "float32", rng.choice(shapes), name=f"side{len(g.inputs)}")
        return self._bounded(given, rng.choice([0, 1, 1, 2]))

    def _bounded(self, given: str, depth: int) -> str:
        g, rng = self.g, self.rng
        made = given if depth == 0 else self._bounded(given, depth - 1)
        op = rng.choice(
            ["Sigmoid", "Tanh", "Clip", "Clip", "Exp", "Min", "Max", "Abs", "Sqrt", "Softplus", "Sin", "Cos", "Relu",
             "Where", "Reciprocal", "Add", "Sub", "Mul", "Div", "Neg", "Softmax", "Mean", "Sum", "Pow", "Cast"]
        )  # fmt: skip
        g.words.append(op)
        match op:
            case "Clip":
                low, high = rng.choice([(-2.0, 2.0), (0.5, 2.0), (-3.0, 0.0)])
                return g.op("Clip", made, g.const(low, "float32"), g.const(high, "float32"))
            case "Min" | "Max":
                return g.op(op, made, g.number(2.0 if op == "Min" else -2.0, "float32"))
            case "Where":
                return g.op("Where", g.op("IsNaN", made), g.number(rng.choice([0.0, 1.0]), "float32"), made)
            case "Add" | "Sub" | "Mul" | "Div":
                other = rng.choice([g.number(2.0, "float32"), g.op("Sigmoid", given), made])
                return g.op(op, *rng.choice([(made, other), (other, made)]))
            case "Softmax":
                return g.op("Softmax", made, axis=-1)
            case "Mean":
                return g.op("ReduceMean", made, axes=[-1], keepdims=1)
            case "Sum":
                return g.op("ReduceSum", made, g.const([-1], "int64"), keepdims=1)
            case "Pow":
                return g.op("Pow", made, g.number(rng.choice([0.5, 2.0, 3.0, -1.0, 0.0]), "float32"))
            case "Cast":
                return g.cast(g.cast(made, "int64"), "float32")
            case _:
                return g.op(op, made)

    def _factor(self, value: str, scores: str = "") -> str:
        self.g.words.append("factor")
        side = self._side(SIDES, BEHIND if scores else ON_SCORES)
        if self.rng.random() < 0.25:
            return self.g.op("Div", value, side)
        return self.g.op("Mul", *self.rng.choice([(value, side), (side, value)]))

    def _addend(self, value: str) -> str:
        self.g.words.append("addend")
        side = self._side(KEYED, ON_SCORES)
        self.addends.append(side)
        return self.g.op("Add", value, side)

    def _floor(self, value: str) -> str:
        self.g.words.append("floor")
        return self.g.op("Max", value, self.g.number(self.rng.choice([-LARGEST, -1e9, -100.0]), "float32"))

    def _mask(self, value: str) -> str:
        g, rng = self.g, self.rng
        dims = rng.choice((("B", 1, 1, "T"), ("B", 1, "S", "T")))
        fill = rng.choice([-INF, -INF, -LARGEST, -1e9])
        if rng.random() < 0.5:
            g.words.append(f"select {fill:g}")
            keep = g.input("bool", "bool", dims)
            self.conditions.append(keep)
            return g.op("Where", keep, value, g.number(fill, "float32"))
        g.words.append(f"add {fill:g}")
        keep = g.input("bool", "bool", dims)
        mask = g.op("Where", keep, g.number(0.0, "float32"), g.number(fill, "float32"))
        self.addends.append(mask)
        return g.op("Add", value, mask)

    def _guard(self, value: str, scores: str) -> str:
        g, rng = self.g, self.rng
        zero = g.number(0.0, "float32")
        kinds = ["nan", "nan", "scores"] + ["selection"] * bool(self.conditions) + ["bias"] * bool(self.addends)
        kind = rng.choice(kinds)
        g.words.append(f"guard {kind}")
        if kind == "nan":
            return g.op("Where", g.op("IsNaN", value), zero, value)
        if kind == "selection":
            return g.op("Where", rng.choice(self.conditions), value, zero)
        if kind == "bias":
            most = g.op("ReduceMax", rng.choice(self.addends), axes=[-1], keepdims=1)
            return g.op("Where", g.op("Equal", most, g.number(-INF, "float32")), zero, value)
        dropped = g.cast(g.op("Equal", scores, g.number(-INF, "float32")), "float32")
        return g.op("Where", g.cast(g.op("ReduceMin", dropped, axes=[-1], keepdims=1), "bool"), zero, value)
