"""Attention between quantised tensors: DequantizeLinear, QuantizeLinear and casts at random places around it.

    tensor    := an input of floats or integers, then `moves`; somewhere among them what makes real numbers of it
    moves     := Transpose | Reshape | Unsqueeze | Slice | gone       in front of the DequantizeLinear and behind it
    gone      := Identity | Cast(T -> T) | Mul(x, 1) | Dropout | Expand to the same sizes
    attention := output(values(rounded(softmax(terms(rounded(product(query, key)))))))
    output    := moves, with a QuantizeLinear somewhere, and a DequantizeLinear behind it

Query, key, value, a bias and a past are such tensors. Integers are of 4 to 32 bits, with one scale, a scale by axis or
by block, with and without a zero point, of ai.onnx and com.microsoft. Beside the attention lies at times what another
part of the model does with such a tensor. Each fused model runs at every level of ONNX Runtime's optimisations.

Rounded scores and probabilities are declined. Where the user vouches that they need not be rounded, the truth is the
model without these roundings.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from fa_compiler.passes.answer.options import DROP_ROUNDINGS
from tools.fuzz.difference import BASE, LEVELS, Feed
from tools.fuzz.feeds import feeds
from tools.fuzz.grammar import drawn_sizes
from tools.fuzz.graph import TYPES, Case, Graph, Size
from tools.fuzz.kinds.runtimes import RUNTIME, _counts
from tools.fuzz.oracle import Judge
from tools.fuzz.reduction import GraphKind

OPSETS = (13, 14, 15, 17, 17, 18, 19, 20, 21, 21, 22, 23, 24)
TYPED = 21
"""From this opset on QuantizeLinear has an `output_dtype`, and DequantizeLinear takes 4 and 16 bits, and blocks."""
HALVES = 19
"""From this opset on DequantizeLinear takes scales of 16 bits."""
NARROW = {"int4": ("int8", -8, 7), "uint4": ("uint8", 0, 15)}
"""Types that no input of NumPy has: the type it has instead, and the numbers."""
STEPS = {"int4": 0.3, "uint4": 0.2, "int8": 0.02, "uint8": 0.02}
LOW = 1e4
"""A mask subtracts this number."""
STEP = 0.01
"""The scale of wider integers, which are fed with small numbers."""
Move = Callable[[str, list[Size]], tuple[str, list[Size]]]


class Quantised(GraphKind):
    """One attention between quantised tensors, for one target, at every level."""

    def judge(self, seed: int) -> Judge:
        made = _Composer(random.Random(seed))
        case, plain = made.case()
        target = ("ort", "onnx", "contrib")[seed % 3]
        assume = (DROP_ROUNDINGS,) if plain is not None else ()
        note = f"{target} {' '.join(case.words)} opset {made.g.opset} {dict(case.sizes)}"

        def fed() -> list[Feed]:
            return [each for each in feeds(case, seed) if not each.spoiled and (target == "ort" or _counts(each))]

        judge = Judge(case.model, fed, assume, seed % 32 == 0, note, f"{target}, ")
        judge.target, judge.truth, judge.levels = target, plain, LEVELS
        if made.adds_low:  # scores of a row without a key are rounded to the last bit of that number, in any order
            judge.rough = float(np.spacing(np.float32(LOW))) / BASE["float32"]
        judge.runtime = None if target == "ort" else RUNTIME
        judge.terms = lambda _, name: made.steps.get(name, 0.0) / BASE["float32"]
        return judge


@dataclass(frozen=True)
class _Form:
    """How real numbers are made of integers."""

    kind: str
    scale: Any
    point: Any
    domain: str
    attributes: dict[str, int]


class _Composer:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        sizes = drawn_sizes(rng)
        opened = frozenset(letter for letter in "BST" if rng.random() < 0.35)
        self.g = Graph(rng, sizes, opened, rng.choice(OPSETS))
        self.dtype = "float16" if self.g.opset >= HALVES and rng.random() < 0.12 else "float32"
        self.adds_low = False
        """Is `LOW` added to the scores?"""
        self.steps: dict[str, float] = {}
        """How far an output may be off: by the step between two integers that it was rounded to."""
        self.roundings: list[onnx.NodeProto] = []
        """The DequantizeLinear of each rounding of scores and probabilities."""

    def case(self) -> tuple[Case, onnx.ModelProto | None]:
        """The case, and the model without the roundings of scores and probabilities if nobody needs these."""
        rng, g = self.rng, self.g
        past = rng.random() < 0.2
        if past:
            g.open -= {"T"}
        query = self._tensor("q", ("B", "N", "S", "D"))
        key_first = rng.random() < 0.4
        key = self._tensor("k", ("B", "K", "D", "T") if key_first else ("B", "K", "T", "D"), past)
        value = self._tensor("v", ("B", "K", "T", "E"), past)
        total: Size = g.sizes["T"] + 3 if past else "T"
        if not key_first:
            key = g.op("Transpose", key, perm=[0, 1, 3, 2])
        if g.sizes["K"] != g.sizes["N"]:
            key = self._repeated(key, ["D", total] if True else [], 4)
            value = self._repeated(value, [total, "E"], 4)
        scores = g.op("MatMul", query, key)
        if rng.random() < 0.8:
            word = rng.choice(["Mul", "Div"])
            scores = g.op(word, scores, g.number(0.4 if word == "Mul" else 2.5, self.dtype))
        scores = self._rounded(scores, 0.06)
        scores = self._terms(scores, total)
        scores = self._rounded(scores, 0.06)
        weights = g.op("Softmax", scores, axis=-1)
        weights = self._rounded(weights, 0.06)
        result = g.op("MatMul", weights, value)
        outputs = [self._output(result)]
        if rng.random() < 0.25:
            outputs.append(self._elsewhere())
        plain = None
        if self.roundings and rng.random() < 0.6:
            plain = self._without_roundings(outputs)
        return g.case(outputs), plain

    # -- tensors ------------------------------------------------------------------------------------

    def _tensor(self, name: str, dims: tuple[Size, ...], past: bool = False) -> str:
        """A value of these dimensions; with a past in front of it along T."""
        value = self._real(name, dims)
        if not past:
            return value
        place = dims.index("T")
        before = self._real(f"past_{name}", tuple(3 if each == "T" else each for each in dims))
        return self.g.op("Concat", before, value, axis=place)

    def _real(self, name: str, dims: Sequence[Size]) -> str:
        """Real numbers of these dimensions: an input, what makes real numbers of it, and moves around that."""
        rng = self.rng
        moves, start = self._moves(list(dims))
        how = rng.choice(["plain", "integers", "integers", "integers", "rounded", "product"])
        if how == "product" and self.dtype != "float32":
            how = "integers"
        place = rng.randint(0, len(moves))
        self.g.words.append(f"{name} {how} {place}/{len(moves)}")
        if how == "plain":
            value = self.g.input("value", self.dtype, start, name=name)
            return self._moved(value, start, moves)[0]
        at = self._dims_at(start, moves, place)
        form = self._form(at, how not in ("product", "rounded"), first=place == 0)
        if how == "rounded":
            early = rng.randint(0, place) if not form.attributes else place
            value, now = self._moved(self.g.input("value", self.dtype, start, name=name), start, moves[:early])
            value = self._quantised(value, form)
            value, now = self._moved(value, now, moves[early:place])
        else:
            value, now = self._moved(self._integers(name, start, form), start, moves[:place])
        if how == "product":
            value = self.g.op("Mul", self.g.cast(value, self.dtype), self.g.number(STEP, self.dtype))
        else:
            value = self._dequantised(value, form)
        value = self._gone(value, now)
        return self._moved(value, now, moves[place:])[0]

    def _integers(self, name: str, dims: Sequence[Size], form: _Form) -> str:
        if form.kind in NARROW:
            held, low, high = NARROW[form.kind]
            value = self.g.input(f"integers {low} {high}", held, dims, name=name)
            return self.g.op("Cast", value, to=onnx.TensorProto.DataType.Value(form.kind.upper()))
        low, high = (-128, 127) if form.kind == "int8" else (0, 255) if form.kind == "uint8" else (-300, 300)
        return self.g.input(
            f"integers {max(low, 0) if form.kind[0] == 'u' else low} {high}", form.kind, dims, name=name
        )

    def _form(self, dims: Sequence[Size], integers: bool, first: bool) -> _Form:
        """A form for a tensor of these dimensions; for one that is an input of `integers` a type that is only read.

        Blocks only where it is `first`: ONNX Runtime's optimiser pushes a Transpose through a quantisation by block and
        leaves the scales as they were, in the original as in the fused model.
        """
        rng, g = self.rng, self.g
        domain = "com.microsoft" if rng.random() < 0.12 and self.dtype == "float32" else ""
        kinds = ["int8", "int8", "int8", "uint8", "uint8"]
        if integers:
            kinds.append("int32")
        if domain or g.opset >= TYPED:
            kinds += ["int16", "uint16"]
        whole = all(each not in g.open for each in dims)
        if not domain and g.opset >= TYPED and integers and self.dtype == "float32":
            kinds += ["int4", "uint4"]
        kind = rng.choice(kinds)
        step = STEPS.get(kind, STEP)
        fixed = [index for index, each in enumerate(dims) if each not in g.open and g.size(each) > 1]
        attributes: dict[str, int] = {}
        shape: tuple[int, ...] = ()
        style = rng.choice(["one", "one", "one", "vector", "axis", "blocks"])
        if style == "vector":
            shape = (1,)
        elif style == "axis" and fixed and kind != "int32":
            axis = rng.choice(fixed)
            attributes, shape = {"axis": axis}, (g.size(dims[axis]),)
        elif style == "blocks" and first and fixed and whole and g.opset >= TYPED and not domain and kind != "int32":
            axis = rng.choice(fixed)
            size = g.size(dims[axis])
            block = rng.choice([each for each in (1, 2, 4, 8) if size % each == 0])
            attributes = {"axis": axis, "block_size": block}
            shape = tuple(size // block if index == axis else g.size(each) for index, each in enumerate(dims))
        numbers = np.random.default_rng(rng.getrandbits(32))
        scale = numbers.uniform(0.5, 1.5, shape) * step
        point = None
        if rng.random() < 0.5:
            zero = 0 if kind == "int32" else {"uint8": 128, "uint16": 150, "uint4": 7}.get(kind, 1)
            point = np.full(shape, zero)
        return _Form(kind, scale, point, domain, attributes)

    def _scales(self, form: _Form) -> list[str]:
        names = [self.g.const(form.scale, self.dtype)]
        if form.point is None:
            return names
        if form.kind not in NARROW:
            return [*names, self.g.const(form.point, form.kind)]
        kind = onnx.TensorProto.DataType.Value(form.kind.upper())
        tensor = onnx.helper.make_tensor(f"z{len(self.g.initializers)}", kind, form.point.shape, form.point.reshape(-1))
        self.g.initializers.append(tensor)
        return [*names, tensor.name]

    def _dequantised(self, value: str, form: _Form) -> str:
        return self.g.op("DequantizeLinear", value, *self._scales(form), domain=form.domain, **form.attributes)

    def _quantised(self, value: str, form: _Form) -> str:
        """The integers of a value. Without a zero point they are uint8, or what an attribute says."""
        attributes: dict[str, Any] = dict(form.attributes)
        if form.point is None and form.kind != "uint8":
            if form.domain or self.g.opset < TYPED:
                zero = self.g.const(np.zeros(form.scale.shape), form.kind)
                scale = self.g.const(form.scale, self.dtype)
                return self.g.op("QuantizeLinear", value, scale, zero, domain=form.domain, **attributes)
            attributes["output_dtype"] = TYPES[form.kind]
        return self.g.op("QuantizeLinear", value, *self._scales(form), domain=form.domain, **attributes)

    # -- moves --------------------------------------------------------------------------------------

    def _moves(self, dims: list[Size]) -> tuple[list[Move], list[Size]]:
        """Moves that lead to these dimensions, and the dimensions in front of them."""
        rng, g = self.rng, self.g
        moves: list[Move] = []
        while rng.random() < 0.6 and len(moves) < 3:
            kind = rng.choice(["Transpose", "Transpose", "Reshape", "Unsqueeze", "Slice"])
            places = list(range(len(dims)))
            if kind == "Transpose":
                rng.shuffle(places)
                moves.insert(0, self._transposed(places))
                before: list[Size] = [0] * len(dims)
                for index, place in enumerate(places):
                    before[place] = dims[index]
                dims = before
            elif kind == "Reshape" and len(dims) > 2:
                at = rng.randrange(len(dims) - 1)
                if any(each in g.open for each in dims[at : at + 2]):
                    continue
                moves.insert(0, self._reshaped(list(dims)))
                dims = [*dims[:at], g.size(dims[at]) * g.size(dims[at + 1]), *dims[at + 2 :]]
            elif kind == "Unsqueeze" and 1 in dims:
                at = dims.index(1)
                moves.insert(0, self._unsqueezed(at))
                dims = [*dims[:at], *dims[at + 1 :]]
            elif kind == "Slice":
                fixed = [place for place in places if dims[place] not in g.open]
                at = rng.choice(fixed) if fixed else None
                if at is None:
                    continue
                moves.insert(0, self._sliced(at))
                dims = [*dims[:at], g.size(dims[at]) + 2, *dims[at + 1 :]]
        return moves, dims

    def _transposed(self, perm: list[int]) -> Move:
        return lambda value, dims: (self.g.op("Transpose", value, perm=perm), [dims[each] for each in perm])

    def _reshaped(self, target: list[Size]) -> Move:
        return lambda value, dims: (self.g.reshape(value, target), target)

    def _unsqueezed(self, axis: int) -> Move:
        return lambda value, dims: (self.g.unsqueeze(value, [axis]), [*dims[:axis], 1, *dims[axis:]])

    def _sliced(self, axis: int) -> Move:
        def move(value: str, dims: list[Size]) -> tuple[str, list[Size]]:
            ends = [self.g.const([number], "int64") for number in (1, self.g.size(dims[axis]) - 1, axis)]
            rest = [*dims[:axis], self.g.size(dims[axis]) - 2, *dims[axis + 1 :]]
            return self.g.op("Slice", value, *ends), rest

        return move

    def _dims_at(self, dims: list[Size], moves: Sequence[Move], place: int) -> list[Size]:
        """The dimensions in front of a move; nothing is added to the graph."""
        g = self.g
        kept = len(g.nodes), len(g.initializers), g.rng.getstate()
        for move in moves[:place]:
            _, dims = move("", dims)
        del g.nodes[kept[0] :], g.initializers[kept[1] :]
        g.rng.setstate(kept[2])
        return dims

    def _moved(self, value: str, dims: list[Size], moves: Sequence[Move]) -> tuple[str, list[Size]]:
        for move in moves:
            value, dims = move(value, dims)
        return value, dims

    def _gone(self, value: str, dims: Sequence[Size]) -> str:
        """The value behind something that ONNX Runtime removes."""
        g = self.g
        match self.rng.choice(["nothing"] * 5 + ["Identity", "Cast", "Mul", "Dropout", "Expand"]):
            case "Identity":
                return g.op("Identity", value)
            case "Cast":
                return g.cast(value, self.dtype)
            case "Mul":
                return g.op("Mul", value, g.const(1.0, self.dtype))
            case "Dropout":
                return g.op("Dropout", value)
            case "Expand":
                return g.op("Expand", value, g.shape(dims))
        return value

    # -- attention ----------------------------------------------------------------------------------

    def _repeated(self, value: str, tail: Sequence[Size], rank: int) -> str:
        """The heads of a key or value, each for its group of query heads."""
        g = self.g
        heads, groups = g.sizes["K"], g.sizes["N"] // g.sizes["K"]
        apart = g.unsqueeze(value, [2])
        wide = g.op("Expand", apart, g.shape(["B", heads, groups, *tail]))
        return g.reshape(wide, ["B", "N", *tail])

    def _terms(self, scores: str, total: Size) -> str:
        rng, g = self.rng, self.g
        for _ in range(rng.choice([0, 0, 1, 1, 2])):
            dims = list(
                rng.choice([("S", "T"), ("B", 1, 1, "T"), (1, "N", "S", "T"), ("B", 1, "S", "T"), ("N", "S", "T")])
            )
            dims = [total if each == "T" else each for each in dims]
            match rng.choice(["bias", "bias", "bool", "padding"]):
                case "bias":
                    scores = g.op("Add", scores, self._real(f"b{len(g.inputs)}", dims))
                case "bool":
                    low = g.number(-LOW, self.dtype)
                    scores = g.op("Where", g.input("bool", "bool", dims), scores, low)
                case _:
                    kept = g.cast(g.input("int01", "int64", dims), self.dtype)
                    self.adds_low = True
                    low = g.const(-LOW, self.dtype)
                    scores = g.op("Add", scores, g.op("Mul", g.op("Sub", g.const(1.0, self.dtype), kept), low))
        return scores

    def _rounded(self, value: str, chance: float) -> str:
        """The value, at times rounded to 8 bits and back."""
        if self.rng.random() >= chance or self.dtype != "float32":
            return value
        scale, point = self.g.const(0.05, self.dtype), self.g.const(100, "uint8")
        back = self.g.op("DequantizeLinear", self.g.op("QuantizeLinear", value, scale, point), scale, point)
        self.roundings.append(self.g.nodes[-1])
        self.g.words.append("rounded inside")
        return back

    def _without_roundings(self, outputs: Any) -> onnx.ModelProto:
        plain: onnx.ModelProto = onnx.ModelProto.FromString(self.g.case(outputs).model.SerializeToString())
        makers = {node.output[0]: node for node in plain.graph.node}
        for node in plain.graph.node:
            if any(node.name == each.name for each in self.roundings):
                given = makers[node.input[0]].input[0]
                node.CopyFrom(onnx.helper.make_node("Identity", [given], list(node.output), name=node.name))
        return plain

    def _output(self, value: str) -> tuple[str, str, Sequence[Size | None]]:
        rng, g = self.rng, self.g
        dims: list[Size] = ["B", "N", "S", "E"]
        moves: list[Move] = []
        if rng.random() < 0.6:
            moves.append(self._transposed([0, 2, 1, 3]))
            if rng.random() < 0.6:
                moves.append(self._reshaped(["B", "S", g.sizes["N"] * g.sizes["E"]]))
        place = rng.randint(0, len(moves))
        if rng.random() < 0.5:
            return (*self._named(*self._moved(value, dims, moves), self.dtype),)
        at = self._dims_at(dims, moves, place)
        value, dims = self._moved(value, dims, moves[:place])
        form = self._form(at, integers=False, first=False)
        value = self._quantised(value, form)
        step = float(np.max(form.scale)) * 1.01
        if rng.random() < 0.4 and not form.attributes and form.kind in ("int8", "uint8"):
            g.words.append("integers out")
            value, dims = self._moved(value, dims, moves[place:])
            return self._named(value, dims, form.kind)
        value, dims = self._moved(self._dequantised(value, form), dims, moves[place:])
        g.words.append("rounded out")
        self.steps[value] = step
        return self._named(value, dims, self.dtype)

    def _named(self, value: str, dims: Sequence[Size], kind: str) -> tuple[str, str, Sequence[Size | None]]:
        return value, kind, tuple(dims)

    def _elsewhere(self) -> tuple[str, str, Sequence[Size | None]]:
        """What another part of the model does with such a tensor."""
        value = self.g.op("Sin", self._real("w", [3, 1, 4]))
        return self._named(value, [3, 1, 4], self.dtype)
