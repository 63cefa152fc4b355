"""Attention with its gradient, composed by automatic differentiation over the composer's own operators.

Every operator of the forward part is recorded with the rule that makes the gradients of its inputs from that of its
output; walking the records backwards writes the backward part, in one of several spellings. So the answer is known
without the fusion: the model is its own truth.

Sizes are named by letters as in writer.py; the model's outputs are y and the wanted ones of dq, dk and dv.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.passes.writer import Array, Writer, split

FLOAT32_MIN = float(np.finfo(np.float32).min)
Rule = Callable[[str], Mapping[str, str]]


@dataclass(frozen=True)
class Training:
    """How an attention and its gradient are written down."""

    sizes: Mapping[str, int] = field(default_factory=lambda: {"B": 2, "N": 4, "K": 4, "S": 5, "T": 6, "D": 8, "E": 8})
    symbolic: bool = True
    layout: str = "BNSD"
    """Of inputs and output: BNSD, BSND, BSH."""
    product: str = "matmul"
    """matmul, folded (rank 3), einsum, fused (FusedMatMul)."""
    flipped: bool = False
    """Gradients of right operands as (g^T a)^T."""
    scale: str = "mul"
    """none, mul, div, query, both."""
    softcap: str = "none"
    """none, or how the derivative of tanh is written: 1 - t*t, 1 - t^2, (1 + t)*(1 - t)."""
    mask: str = "none"
    """none, select (input), select_const (a triangle), select_twice, select_bias (a bias behind it), add (input of 0
    and fill), bias (input), packed (sequences end to end by cumulative lengths), packed_causal, listed (the two keys
    that rank highest), listed_causal (of those that the row sees)."""
    second: bool = False
    """A second product, of qr and kr, is added to the scores."""
    fill: float = -math.inf
    guard: str = "none"
    """none, nan: Where(IsNaN(p), 0, p), with the gradient of the guarded or of the plain probabilities; safe."""
    masked_gradient: bool = True
    """Where(keep, dS, 0) behind a selection; without it dS is used as it is."""
    blended: bool = False
    """Selections of a finite number as x * b + number * (1 - b), and their gradient as dS * b."""
    softmax: str = "op"
    """op, decomposed, logsumexp (the exponential of what is left of the scores without it, as in jax)."""
    form: str = "t - p*sum(t)"
    """t - p*sum(t), p*(g - sum), (g - sum)*p, negated, einsum, result (the sums from the attention's result),
    of a decomposed softmax: quotient, power, and of one by logsumexp: through logsumexp."""
    gqa: str = "none"
    """none, expand, broadcast (one key head)."""
    wanted: str = "qkv"


class Tape:
    """The composer."""

    def __init__(self, case: Training) -> None:
        sizes = dict(case.sizes)
        if case.mask.startswith("packed") or case.mask == "listed_causal":
            sizes["T"] = sizes["S"]
        sizes["R"] = 3
        sizes["G"] = sizes["N"] // sizes["K"]
        self.case, self.writer = case, Writer(17, sizes, case.symbolic, "computed")
        if case.mask.startswith("packed") or case.mask == "listed_causal":
            self.writer.equal["T"] = "S"
        self.records: list[tuple[str, Rule]] = []
        self.gradients: dict[str, str] = {}
        self.result = ""
        """The attention's result, [B,N,S,E]."""
        self.dims: dict[str, list[str]] = {}

    # -- recorded operators ---------------------------------------------------------------------

    def made(self, value: str, dims: Sequence[str], rule: Rule) -> str:
        self.dims[value] = list(dims)
        self.records.append((value, rule))
        return value

    def input(self, name: str, dims: str) -> str:
        letters = split(dims)
        shape = [self.writer.size(letter) for letter in letters]
        value = self.writer.input(name, TensorProto.FLOAT, dims, lambda rng: rng.standard_normal(shape, np.float32))
        self.dims[value] = letters
        return value

    def transpose(self, x: str, perm: Sequence[int]) -> str:
        back = [list(perm).index(axis) for axis in range(len(perm))]
        dims = [self.dims[x][axis] for axis in perm]
        out = self.writer.op("Transpose", x, perm=list(perm))
        return self.made(out, dims, lambda g: {x: self.writer.op("Transpose", g, perm=back)})

    def reshape(self, x: str, dims: Sequence[str]) -> str:
        source = self.dims[x]
        out = self.writer.reshape(x, dims, source)
        return self.made(out, dims, lambda g: {x: self.writer.reshape(g, source, dims)})

    def scaled(self, x: str, factor: float, divide: bool = False) -> str:
        number = self.writer.const(np.float32(1 / factor if divide else factor))
        op = "Div" if divide else "Mul"
        return self.made(self.writer.op(op, x, number), self.dims[x], lambda g: {x: self.writer.op(op, g, number)})

    def capped(self, x: str, cap: float) -> str:
        """cap * tanh(x / cap)."""
        share = self.scaled(x, 1 / cap, divide=True)
        out = self.writer.op("Tanh", share)
        return self.scaled(self.made(out, self.dims[x], lambda g: {share: self._tanh_gradient(out, g)}), cap)

    def _tanh_gradient(self, tanh: str, g: str) -> str:
        op, one = self.writer.op, self.writer.const(np.float32(1))
        if self.case.softcap == "(1 + t)*(1 - t)":
            return op("Mul", op("Add", g, op("Mul", g, tanh)), op("Sub", one, tanh))
        power = self.case.softcap == "1 - t^2"
        square = op("Pow", tanh, self.writer.const(np.float32(2))) if power else op("Mul", tanh, tanh)
        return op("Mul", g, op("Sub", one, square))

    def repeated(self, x: str) -> str:
        """Key or value heads, each for its group of query heads."""
        batch, heads, *rest = self.dims[x]
        apart = self.reshape(x, [batch, heads, "1", *rest])
        whole = [batch, heads, "G", *rest]
        out = self.writer.op("Expand", apart, self.writer.shape(whole))
        self.made(out, whole, lambda g: {apart: self.writer.reduce("ReduceSum", g, 2, len(whole))})
        return self.reshape(out, [batch, "N", *rest])

    def matmul(self, a: str, b: str) -> str:
        dims = [*self.dims[a][:-1], self.dims[b][-1]]
        return self.made(self._product(a, b), dims, lambda g: self._product_gradients(a, b, g))

    def _product(self, a: str, b: str) -> str:
        if self.case.product == "einsum":
            return self.writer.op("Einsum", a, b, equation="bnij,bnjk->bnik")
        if self.case.product == "fused":
            return self.writer.op("FusedMatMul", a, b, domain="com.microsoft")
        return self.writer.op("MatMul", a, b)

    def _product_gradients(self, a: str, b: str, g: str) -> Mapping[str, str]:
        op = self.writer.op
        if self.case.product == "einsum":
            da = op("Einsum", g, b, equation="bnik,bnjk->bnij")
            db = op("Einsum", a, g, equation="bnij,bnik->bnjk")
        elif self.case.product == "fused":
            da = op("FusedMatMul", g, b, domain="com.microsoft", transB=1)
            db = op("FusedMatMul", a, g, domain="com.microsoft", transA=1)
        else:
            da = op("MatMul", g, self._swapped(b))
            db = op("MatMul", self._swapped(a), g)
            if self.case.flipped:
                db = self._swapped(op("MatMul", self._swapped(g), a))
        result = {a: da, b: db}
        if self.case.gqa == "broadcast":
            # One key head for all: its gradient is the sum over theirs.
            result[b] = self.writer.reduce("ReduceSum", db, 1, 4)
        return result

    def _swapped(self, x: str) -> str:
        rank = 3 if self.case.product == "folded" else 4
        return self.writer.op("Transpose", x, perm=[*range(rank - 2), rank - 1, rank - 2])

    def selected(self, x: str, keep: str, fill: float) -> str:
        low, zero = self.writer.const(np.float32(fill)), self.writer.const(np.float32(0))
        if self.case.blended and math.isfinite(fill):
            return self._blended(x, keep, low)
        out = self.writer.op("Where", keep, x, low)
        if not self.case.masked_gradient:
            return self.made(out, self.dims[x], lambda g: {x: g})
        return self.made(out, self.dims[x], lambda g: {x: self.writer.op("Where", keep, g, zero)})

    def _blended(self, x: str, keep: str, low: str) -> str:
        op = self.writer.op
        weight = op("Cast", keep, to=TensorProto.FLOAT)
        rest = op("Mul", low, op("Sub", self.writer.const(np.float32(1)), weight))
        out = op("Add", op("Mul", x, weight), rest)
        masked = self.case.masked_gradient
        return self.made(out, self.dims[x], lambda g: {x: op("Mul", g, weight) if masked else g})

    def added(self, x: str, term: str) -> str:
        return self.made(self.writer.op("Add", x, term), self.dims[x], lambda g: {x: g})

    def sum(self, a: str, b: str) -> str:
        return self.made(self.writer.op("Add", a, b), self.dims[a], lambda g: {a: g, b: g})

    def softmax(self, x: str) -> str:
        """The probabilities, guarded if the case says so."""
        w, case = self.writer, self.case
        exp = total = ""
        if case.softmax == "op":
            p = w.op("Softmax", x, axis=-1)
        else:
            peak = w.reduce("ReduceMax", x, -1, 4)
            exp = w.op("Exp", w.op("Sub", x, peak))
            total = w.reduce("ReduceSum", exp, -1, 4)
            if case.softmax == "decomposed":
                p = w.op("Div", exp, total)
            else:
                p = w.op("Exp", w.op("Sub", x, w.op("Add", w.op("Log", total), peak)))
        zero = w.const(np.float32(0))
        guarded, flag = p, ""
        if case.guard != "none":
            flag = w.op("IsNaN", p)
            guarded = w.op("Where", flag, zero, p)
        if case.guard == "safe":
            # As torch does it: the gradient of a softmax whose result is the guarded one.
            return self.made(guarded, self.dims[x], lambda g: {x: self._softmax_gradient(g, guarded, exp, total)})

        def rule(g: str) -> Mapping[str, str]:
            if flag:
                g = w.op("Where", flag, zero, g)
            return {x: self._softmax_gradient(g, p, exp, total)}

        return self.made(guarded, self.dims[x], rule)

    def _softmax_gradient(self, g: str, p: str, exp: str, total: str) -> str:
        w = self.writer
        form = self.case.form
        if exp and form in ("quotient", "power"):
            square = w.op("Mul", total, total) if form == "quotient" else w.op("Pow", total, w.const(np.float32(2)))
            inner = w.reduce("ReduceSum", w.op("Div", w.op("Mul", g, exp), square), -1, 4)
            return w.op("Mul", w.op("Sub", w.op("Div", g, total), inner), exp)
        t = w.op("Mul", g, p)
        if form == "through logsumexp":
            rows = w.op("Neg", w.reduce("ReduceSum", t, -1, 4))
            return w.op("Add", t, w.op("Mul", w.op("Div", rows, total), exp))
        if form == "einsum":
            rows = w.op("Einsum", g, p, equation="bnst,bnst->bns")
            rows = w.unsqueeze(rows, -1)
        elif form == "result":
            rows = w.reduce("ReduceSum", w.op("Mul", self.result, self.gradients[self.result]), -1, 4)
        else:
            rows = w.reduce("ReduceSum", t, -1, 4)
        match form:
            case "p*(g - sum)":
                return w.op("Mul", p, w.op("Sub", g, rows))
            case "(g - sum)*p" | "einsum" | "result":
                return w.op("Mul", w.op("Sub", g, rows), p)
            case "negated":
                return w.op("Add", t, w.op("Mul", w.op("Neg", rows), p))
        return w.op("Sub", t, w.op("Mul", p, rows))

    # -- the model ------------------------------------------------------------------------------

    def backward(self, result: str, gradient: str) -> dict[str, str]:
        """The gradient of every recorded value, in the order automatic differentiation finds them."""
        gradients = self.gradients
        gradients[result] = gradient
        for value, rule in reversed(self.records):
            if value in gradients:
                for source, each in rule(gradients[value]).items():
                    known = gradients.get(source)
                    gradients[source] = each if known is None else self.writer.op("Add", known, each)
        return gradients


@dataclass(frozen=True)
class Composed:
    """A model with inputs for it."""

    model: onnx.ModelProto
    makers: Mapping[str, Callable[[np.random.Generator], Array]]

    def feeds(self, seed: int) -> dict[str, Array]:
        """Inputs for one run."""
        rng = np.random.default_rng(seed)
        return {name: make(rng) for name, make in self.makers.items()}


def compose(case: Training) -> Composed:
    """The model of a case."""
    tape = Tape(case)
    w = tape.writer
    layouts = {"BNSD": "B{n}{s}{d}", "BSND": "B{s}{n}{d}", "BSH": "B{s}({n}{d})"}
    inputs = [("q", "N", "S", "D"), ("k", "K", "T", "D"), ("v", "K", "T", "E")]
    inputs += [("qr", "N", "S", "R"), ("kr", "K", "T", "R")] if case.second else []
    leaves = {name: tape.input(name, layouts[case.layout].format(n=n, s=s, d=d)) for name, n, s, d in inputs}
    query, key, value, *parts = (_heads_apart(tape, leaves[name], n, s, d) for name, n, s, d in inputs)
    scores = _product(tape, query, key, "D")
    if case.second:
        scores = tape.sum(scores, _product(tape, *parts, "R"))
    if case.gqa == "expand":
        value = tape.repeated(value)
    if case.product == "folded":
        value = tape.reshape(value, ["BN", "T", "E"])
    if case.scale in ("mul", "div"):
        scores = tape.scaled(scores, 0.4, case.scale == "div")
    if case.softcap != "none":
        scores = tape.capped(scores, 1.5)
    scores = _masked(tape, scores)
    probabilities = tape.softmax(scores)
    if case.product == "folded":
        probabilities = tape.reshape(probabilities, ["BN", "S", "T"])
    result = tape.matmul(probabilities, value)
    if case.product == "folded":
        result = tape.reshape(result, ["B", "N", "S", "E"])
    tape.result = result
    if case.layout != "BNSD":
        result = tape.transpose(result, [0, 2, 1, 3])
    if case.layout == "BSH":
        result = tape.reshape(result, ["B", "S", "NE"])
    dy = tape.input("dy", layouts[case.layout].format(n="N", s="S", d="E"))
    gradients = tape.backward(result, dy)
    wanted = [*case.wanted, *(("qr", "kr") if case.second else ())]
    outputs = {"y": result} | {f"d{name}": gradients[leaves[name]] for name in wanted}
    nodes = [helper.make_node("Identity", [value], [name], name=f"last_{name}") for name, value in outputs.items()]
    rank = 3 if case.layout == "BSH" else 4
    graph = helper.make_graph(
        _needed([*w.nodes, *nodes], list(outputs)),
        "training",
        w.inputs,
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * rank) for name in outputs],
        w.initializers,
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return Composed(helper.make_model(graph, opset_imports=imports, ir_version=8), w.makers)


def _heads_apart(tape: Tape, value: str, heads: str, length: str, depth: str) -> str:
    if tape.case.layout == "BSH":
        value = tape.reshape(value, ["B", length, heads, depth])
    return value if tape.case.layout == "BNSD" else tape.transpose(value, [0, 2, 1, 3])


def _product(tape: Tape, query: str, key: str, depth: str) -> str:
    """Query times key over this depth, [B,N,S,T], scaled where the case has that on the operands."""
    case, root = tape.case, math.sqrt(0.4)
    if case.scale in ("query", "both"):
        query = tape.scaled(query, 0.4 if case.scale == "query" else root)
    if case.gqa == "expand":
        key = tape.repeated(key)
    key = tape.transpose(key, [0, 1, 3, 2])
    if case.scale == "both":
        key = tape.scaled(key, root)
    if case.product == "folded":
        query, key = tape.reshape(query, ["BN", "S", depth]), tape.reshape(key, ["BN", depth, "T"])
    scores = tape.matmul(query, key)
    return tape.reshape(scores, ["B", "N", "S", "T"]) if case.product == "folded" else scores


def _masked(tape: Tape, scores: str) -> str:
    case, w = tape.case, tape.writer
    rows, columns = w.size("S"), w.size("T")
    if case.mask == "select_const":
        keep = w.const(np.tri(rows, columns, dtype=np.bool_))
        return tape.selected(scores, keep, case.fill)
    if case.mask.startswith("packed"):
        return tape.selected(scores, _own_sequence(tape, case.mask == "packed_causal"), case.fill)
    if case.mask.startswith("listed"):
        return tape.selected(scores, _listed(tape, case.mask == "listed_causal"), case.fill)
    padding = [w.size("B"), 1, 1, columns]
    if case.mask.startswith("select"):
        for index in range(2 if case.mask == "select_twice" else 1):
            keep = w.input(f"m{index}", TensorProto.BOOL, "B11T", lambda rng: _some_rows_empty(rng, padding))
            scores = tape.selected(scores, keep, case.fill)
    elif case.mask == "add":
        keep = w.input("m0", TensorProto.BOOL, "B11T", lambda rng: _some_rows_empty(rng, padding))
        pair = w.const(np.float32(0)), w.const(np.float32(case.fill))
        scores = tape.added(scores, w.op("Where", keep, *pair))
    if case.mask.endswith("bias"):
        shape = [1, w.size("N"), rows, columns]
        scores = tape.added(
            scores, w.input("bias", TensorProto.FLOAT, "1NST", lambda rng: rng.standard_normal(shape, np.float32))
        )
    return scores


def _own_sequence(tape: Tape, causal: bool) -> str:
    """True within a sequence: as many cumulative lengths, in any order, are reached by the row as by the key."""
    w = tape.writer
    length = w.size("S")
    ends = w.input("ends", TensorProto.INT64, "3", lambda rng: rng.integers(0, length + 1, 3))
    places = w.op("Range", w.const(0, "int64"), w.scalar("S"), w.const(1, "int64"))
    reached = w.op("Cast", w.op("GreaterOrEqual", w.unsqueeze(places, 1), ends), to=TensorProto.INT64)
    labels = w.op("ReduceSum", reached, w.const([1], "int64"), keepdims=0)
    rows, columns = w.unsqueeze(labels, 1), w.unsqueeze(labels, 0)
    same = w.op("Equal", rows, columns)
    if not causal:
        return same
    return w.op("And", same, w.op("LessOrEqual", w.unsqueeze(places, 0), w.unsqueeze(places, 1)))


def _listed(tape: Tape, causal: bool) -> str:
    """True at the keys that rank highest, of those a row sees; ranks often tie."""
    w = tape.writer
    shape = [w.size(letter) for letter in "BST"]
    ranks = w.input("i", TensorProto.FLOAT, "BST", lambda rng: rng.integers(0, 4, shape).astype(np.float32))
    seen = w.op("LessOrEqual", w.unsqueeze(w.range("T"), 0), w.unsqueeze(w.range("S"), 1))
    if causal:
        ranks = w.op("Where", seen, ranks, w.const(np.float32(FLOAT32_MIN)))
    indices = w.op("TopK", ranks, w.const([2], "int64"), axis=-1, count=2) + "_1"
    empty = w.op("ConstantOfShape", w.op("Shape", ranks), value=helper.make_tensor("no", TensorProto.BOOL, [1], [0]))
    true = helper.make_tensor("yes", TensorProto.BOOL, [1], [1])
    updates = w.op("ConstantOfShape", w.op("Shape", indices), value=true)
    listed = w.unsqueeze(w.op("ScatterElements", empty, indices, updates, axis=-1), 1)
    return w.op("And", listed, seen) if causal else listed


def _some_rows_empty(rng: np.random.Generator, shape: Sequence[int]) -> Array:
    keep = rng.random(shape) < 0.6
    keep[0] = rng.random() < 0.5
    keep[0, ..., -1] |= rng.random() < 0.5
    return keep


def _needed(nodes: Sequence[onnx.NodeProto], outputs: Sequence[str]) -> list[onnx.NodeProto]:
    """The nodes without those that only unwanted gradients need; half of the exporters leave these in."""
    needed, kept = set(outputs), []
    for node in reversed(nodes):
        if needed & set(node.output):
            kept.append(node)
            needed.update(node.input)
    return kept[::-1]
