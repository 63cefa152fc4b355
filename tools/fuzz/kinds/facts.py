"""What the matcher proves of each value of a model, compared with runs.

A program computes vectors and matrices of integers, floats and truth values from positions, sizes, constants and
inputs, which hold NaN and infinities, too. For each value of it and for all sizes at which ONNX Runtime runs it,

    the shape and the content     are those of the run (values/shapes.py)
    the formula                   gives every element (values/positions.py)
    the set and the bounds        contain every element (values/value_sets.py, values/bounds.py)
    a dimension along which the   has equal elements (masks/narrow.py)
    value is constant
    the view                      gives every element of an earlier value (layout/views.py)
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from fa_compiler.passes.algebra.axes import Arrangement, Axis, AxisSpace
from fa_compiler.passes.algebra.cases import Case, Number
from fa_compiler.passes.algebra.formula import (
    Affine,
    All,
    AtLeastZero,
    BooleanLiteral,
    BooleanTensor,
    ElementComparison,
    Formula,
    IndexLessThanElement,
    Some,
)
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.options import Options
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.masks.narrow import is_constant_along
from fa_compiler.passes.values.facts import Facts
from fa_compiler.passes.values.shapes import analyse
from tools.fuzz.difference import Array, session
from tools.fuzz.kind import Finding, Kind, Outcome

SIZES = ((1, 1), (2, 3), (3, 2), (4, 4), (1, 4), (4, 1), (3, 5))
"""S and T of the runs."""
INT, SHORT, FLOAT, HALF, BOOL = (
    *(TensorProto.INT64, TensorProto.INT32, TensorProto.FLOAT, TensorProto.FLOAT16),
    TensorProto.BOOL,
)
NUMBERS = (INT, INT, INT, SHORT, FLOAT, FLOAT, HALF)
FLOATS = (FLOAT, HALF)
COMPARISONS = ("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal")
OF_FLOATS = (
    *("Abs", "Neg", "Exp", "Log", "Sqrt", "Reciprocal", "Sigmoid", "Tanh", "Relu", "Softplus", "Sin", "Cos", "Erf"),
    *("Floor", "Ceil", "Round", "Sign", "Elu", "Selu", "Gelu", "HardSigmoid", "LeakyRelu", "Softsign", "Atan"),
)
"""Operators with one operand, most of which bound their numbers."""
ODD = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 0.5, 3.0, -65504.0, 1e38, 1e-40)
"""What the given floats hold."""

MOST_DIMENSIONS = 4

Length = tuple[str, int]
"""The length of a dimension: S, T or nothing, and a number that is added."""
S, T, ONE = ("S", 0), ("T", 0), ("", 1)
Sizes = Mapping[str, int]
Run = Mapping[str, Array]
Claim = tuple[str, str, Callable[[Array, Sizes, Run], bool]]
"""What is said of a value: by which analysis, in words, and whether it is true of what a run gives."""


@dataclass(frozen=True)
class Tensor:
    """A value of a program."""

    name: str
    dtype: int
    shape: tuple[Length, ...]


class ProvenFacts(Kind):
    """One program, all of its values."""

    innocent = ("results_of",)

    def check(self, seed: int) -> Outcome:
        program = Program(random.Random(seed))
        proto = program.proto()
        claims = dict(_claims(ir.from_proto(proto)))
        word = "no run"
        for sizes, run in results_of(proto, seed):
            word = "held"
            for name, of_value in claims.items():
                for analysis, words, is_true in of_value:
                    if not is_true(run[name], sizes, run):
                        return Outcome(word, _finding(proto, name, f"{analysis}: {words}", sizes, run))
        return Outcome(word)


def _finding(proto: onnx.ModelProto, name: str, words: str, sizes: Sizes, run: Run) -> Finding:
    maker = next(node for node in proto.graph.node if name in node.output)
    analysis = words.partition(":")[0]
    detail = f"{name} at {dict(sizes)}\n{run[name]}\n{words}\n{onnx.printer.to_text(proto)}"
    return Finding(f"a wrong {analysis} of {maker.op_type}", detail, proto.SerializeToString())


def results_of(proto: onnx.ModelProto, seed: int) -> Iterator[tuple[Sizes, Run]]:
    """The sizes and all values of the runs that succeed."""
    try:
        made = session(proto, custom=False)
    except Exception:  # of ONNX Runtime: they share no class
        return
    names = [item.name for item in made.get_outputs()]
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    for s, t in SIZES:
        random_ = np.random.default_rng((seed, s, t))
        feeds: dict[str, Array] = {
            "grid": np.zeros((s, t), np.float32),
            "flags": random_.random((s, t)) < 0.5,
            "rows": random_.integers(-1, 4, (s, 1)),
            "columns": random_.integers(-1, 4, (1, t)),
            "odd": random_.choice(np.array(ODD, np.float32), (s, t)),
        }
        try:
            results = made.run(None, feeds)
        except Exception:  # such as a place that a short vector lacks
            continue
        yield {"S": s, "T": t}, constants | feeds | dict(zip(names, results, strict=True))


# -- claims -----------------------------------------------------------------------------------------


def _claims(model: ir.Model) -> Iterable[tuple[str, list[Claim]]]:
    """What is said of each value, by its name."""
    facts = Facts.of(analyse(model), Options())
    for value in (output for node in model.graph for output in node.outputs):
        yield value.name or "", [claim for of in CLAIMS for claim in of(value, facts)]


def _of_shape(value: ir.Value, facts: Facts) -> Iterator[Claim]:
    shape = facts.info.shape(value)
    if shape is not None:
        yield (
            "shape",
            str(list(map(str, shape))),
            lambda array, sizes, _: len(shape) == array.ndim and _agree(shape, np.array(array.shape), sizes),
        )


def _of_content(value: ir.Value, facts: Facts) -> Iterator[Claim]:
    content = facts.info.fact(value).content
    if content is not None:
        yield (
            "content",
            str(content),
            lambda array, sizes, _: array.shape == content.shape and _agree(content.flat, array.reshape(-1), sizes),
        )


def _agree(known: Iterable[object], given: Array, sizes: Sizes) -> bool:
    """Are the numbers of a vector those of a run, where they are known? A Dim depends on other sizes where it has no
    number."""
    numbers = [number.evaluate(sizes) if isinstance(number, Dim) else number for number in known]
    places = [place for place, number in enumerate(numbers) if number is not None]
    return _alike(given[places], np.array([numbers[place] for place in places]))


def _alike(array: Array, other: Array) -> bool:
    """Are two arrays of one shape equal, and NaN in the same places? The last bits of floats may differ: an exponential
    is computed otherwise, and kernels may compute the last elements of an array by other instructions."""
    if array.dtype.kind != "f":
        return np.array_equal(array, other)
    return np.allclose(array, other, rtol=4 * float(np.finfo(array.dtype).eps), atol=0.0, equal_nan=True)


def _of_formula(value: ir.Value, facts: Facts) -> Iterator[Claim]:
    """A value that is read as it is says nothing."""
    shape = facts.info.shape(value)
    if shape is None:
        return
    positions = facts.positions(shape)
    index = positions.identity_index
    is_truth = facts.info.dtype(value) == ir.DataType.BOOL
    what = positions.truth(value, index) if is_truth else positions.number(value, index)
    if what is not None and not isinstance(what, BooleanTensor):
        yield "formula", str(what), lambda array, sizes, run: _gives(what, array, sizes, run)


def _of_set(value: ir.Value, facts: Facts) -> Iterator[Claim]:
    numbers = facts.sets.of(value)
    if numbers is not None:
        yield "set", str(sorted(numbers)), lambda array, *_: all(float(number) in numbers for number in array.flat)


def _of_bounds(value: ir.Value, facts: Facts) -> Iterator[Claim]:
    always, unless_nan = facts.bounds.always(value), facts.bounds.unless_nan(value)
    if always is not None:
        yield "bound", str(always), lambda array, *_: not np.isnan(array.astype(np.float64)).any()
    if unless_nan is not None:
        low, high = unless_nan
        yield (
            "bound",
            str(unless_nan),
            lambda array, *_: not ((array.astype(np.float64) < low) | (array.astype(np.float64) > high)).any(),
        )


def _of_dimensions(value: ir.Value, facts: Facts) -> Iterator[Claim]:
    for axis, size in enumerate(facts.info.shape(value) or ()):
        if size != Dim(1) and is_constant_along(value, axis, facts.info):
            yield "constant dimension", str(axis), lambda array, *_, axis=axis: _is_constant(array, axis)


def _is_constant(array: Array, axis: int) -> bool:
    return not array.size or _alike(array, np.broadcast_to(array.take([0], axis), array.shape))


def _of_view(value: ir.Value, facts: Facts) -> Iterator[Claim]:
    """Without factors, which round."""
    space = AxisSpace()
    view = Viewer(facts, space).view(value, factors=False)
    if view is not None and view.base is not value:
        base, dims = space.resolve_all(view.base_dims), space.resolve_all(view.dims)
        yield (
            "view",
            f"{dims} of {view.base.name} as {base}",
            lambda array, sizes, run: _same(array, _rearranged(run[view.base.name or ""], base, dims, sizes)),
        )


def _rearranged(array: Array, base: Arrangement, dims: Arrangement, sizes: Sizes) -> Array | None:
    """A tensor, with the axes `base`, as one with the axes `dims`. None where axes are lost that are longer than 1."""

    def size(axis: Axis) -> int:
        number = axis.size.evaluate(sizes)
        assert number is not None
        return number

    own, wanted = list(itertools.chain(*base)), list(itertools.chain(*dims))
    lost, kept = [axis for axis in own if axis not in wanted], [axis for axis in wanted if axis in own]
    if any(size(axis) != 1 for axis in lost):
        return None
    apart = array.reshape([size(axis) for axis in own])
    turned = apart.transpose([own.index(axis) for axis in [*kept, *lost]])
    beside = turned.reshape([size(axis) if axis in own else 1 for axis in wanted])
    whole = np.broadcast_to(beside, [size(axis) for axis in wanted])
    return whole.reshape([math.prod(map(size, dim)) for dim in dims])


def _same(array: Array, other: Array | None) -> bool:
    return other is not None and np.array_equal(array, other, equal_nan=array.dtype.kind == "f")


CLAIMS: Sequence[Callable[[ir.Value, Facts], Iterator[Claim]]] = (
    *(_of_shape, _of_content, _of_formula, _of_set, _of_bounds),
    *(_of_dimensions, _of_view),
)


def _gives(what: Formula | Number, wanted: Array, sizes: Sizes, run: Run) -> bool:
    """Does a formula give every element?"""
    for place in itertools.product(*map(range, wanted.shape)):
        own = number_at(what, place, sizes, run) if is_number(what) else holds(what, place, sizes, run)
        if own != wanted[place]:
            return False
    return True


# -- formulas ---------------------------------------------------------------------------------------


def is_number(what: Formula | Number) -> bool:
    """Is this a number, and no truth value?"""
    return isinstance(what, float | Affine | Case)


def number_at(number: Any, index: Sequence[int], sizes: Sizes, run: Run) -> float:
    """The number at an index."""
    match number:
        case Case(condition, chosen, other):
            return number_at(chosen if holds(condition, index, sizes, run) else other, index, sizes, run)
        case Affine():
            return place_at(number, index, sizes)
    return float(number)


def place_at(affine: Affine, index: Sequence[int], sizes: Sizes) -> int:
    """The integer at an index."""
    offset = affine.offset.evaluate(sizes)
    assert offset is not None
    return offset + sum(step * own for step, own in zip(affine.steps, index, strict=True))


def holds(formula: Any, index: Sequence[int], sizes: Sizes, run: Run) -> bool:
    """Does a formula hold at an index, in a run with these values?"""

    def element(value: ir.Value, places: tuple[Affine, ...]) -> int:
        return int(run[value.name or ""][tuple(place_at(place, index, sizes) for place in places)])

    match formula:
        case BooleanLiteral(value):
            return value
        case AtLeastZero(affine):
            return place_at(affine, index, sizes) >= 0
        case BooleanTensor(value, axes, when):
            own = tuple(0 if axis is None else index[axis] for axis in axes)
            return bool(run[value.name or ""][own]) == when
        case ElementComparison(value, one, other, relation, when):
            left, right = element(value, one), element(value, other)
            return (left == right if relation == "Equal" else left <= right) == when
        case IndexLessThanElement(affine, value, at, when):
            return (place_at(affine, index, sizes) < element(value, at)) == when
        case All(parts):
            return all(holds(part, index, sizes, run) for part in parts)
        case Some(parts):
            return any(holds(part, index, sizes, run) for part in parts)
    raise TypeError(f"no formula: {formula}")


# -- programs ---------------------------------------------------------------------------------------


@dataclass
class Program:
    """A random program. `made` are its values, in the order in which they are computed."""

    rng: random.Random
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    made: list[Tensor] = field(default_factory=list)
    sizes: dict[str, str] = field(default_factory=dict)
    """Scalars with the sizes S and T."""

    def __post_init__(self) -> None:
        shape = self._op("Shape", "grid")
        for place, letter in enumerate("ST"):
            self.sizes[letter] = self._op("Gather", shape, self._const(place))
        given = (("rows", INT, (S, ONE)), ("columns", INT, (ONE, T)), ("flags", BOOL, (S, T)), ("odd", FLOAT, (S, T)))
        self.made = [Tensor(*words) for words in given]
        for length in (S, T):
            line = self._kept(self._line(length), INT, (length,))
            self._lifted(line)
        for _ in range(self.rng.randint(4, 14)):
            step = self.rng.choice(STEPS)
            step(self)

    def proto(self) -> onnx.ModelProto:
        """The model, every value of which is an output."""
        inputs = [
            helper.make_tensor_value_info("grid", FLOAT, ["S", "T"]),
            helper.make_tensor_value_info("flags", BOOL, ["S", "T"]),
            helper.make_tensor_value_info("rows", INT, ["S", 1]),
            helper.make_tensor_value_info("columns", INT, [1, "T"]),
            helper.make_tensor_value_info("odd", FLOAT, ["S", "T"]),
        ]
        outputs = [onnx.ValueInfoProto(name=name) for node in self.nodes for name in node.output]
        graph = helper.make_graph(self.nodes, "positions", inputs, outputs, self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=8)

    def _op(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        name = f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], **attributes))
        return name

    def _const(self, number: Any, dtype: Any = np.int64) -> str:
        with np.errstate(over="ignore"):
            tensor = numpy_helper.from_array(np.array(number, dtype), f"c{len(self.constants)}")
        self.constants.append(tensor)
        return tensor.name

    def _kept(self, name: str, dtype: int, shape: tuple[Length, ...]) -> Tensor:
        tensor = Tensor(name, dtype, shape)
        self.made.append(tensor)
        return tensor

    def _size(self, length: Length) -> str:
        """A scalar with a length."""
        letter, added = length
        if not letter:
            return self._const(added)
        return self._op("Add", self.sizes[letter], self._const(added)) if added else self.sizes[letter]

    def _extent(self, shape: Sequence[Length]) -> str:
        """A vector with the lengths of a shape."""
        parts = [self._op("Unsqueeze", self._size(length), self._const([0])) for length in shape]
        return self._op("Concat", *parts, axis=0)

    def _one(self, fits: Callable[[Tensor], bool]) -> Tensor | None:
        """One of the values of which this is true, a late one more likely than an early one; None where there is
        none."""
        known = [tensor for tensor in self.made if fits(tensor)]
        if not known:
            return None
        return max(self.rng.choices(known, k=2), key=self.made.index)

    def _number(self, shape: tuple[Length, ...] | None = None, dtype: int | None = None) -> Tensor | None:
        """A tensor of numbers, of this shape and type where they are given."""
        return self._one(
            lambda tensor: (
                tensor.dtype != BOOL
                and (shape is None or tensor.shape == shape)
                and (dtype is None or tensor.dtype == dtype)
            )
        )

    def _lifted(self, vector: Tensor) -> Tensor:
        """A vector as a column where it has the length S, else as a row."""
        if vector.shape == (S,):
            return self._kept(self._op("Unsqueeze", vector.name, self._const([1])), vector.dtype, (S, ONE))
        return self._kept(self._op("Unsqueeze", vector.name, self._const([0])), vector.dtype, (ONE, *vector.shape))

    def _line(self, length: Length) -> str:
        """A Range of this length, from any start and by any step."""
        rng, size = self.rng, self._size(length)
        start, step = rng.choice([(0, 1), (0, 1), (0, 1), (1, 1), (-2, 1), (0, 2), (3, -1)])
        if step == 1 and start == 0:
            return self._op("Range", self._const(0), size, self._const(1))
        limit = self._op("Add", self._op("Mul", size, self._const(step)), self._const(start))
        return self._op("Range", self._const(start), limit, self._const(step))

    # Each step makes one value, or none where what it needs is not there.

    def step_line(self) -> None:
        length = self.rng.choice([S, T, ("S", 1), ("T", 2), ("", 3)])
        self._kept(self._line(length), INT, (length,))

    def step_filled(self) -> None:
        length, dtype = self.rng.choice([S, T, ("T", 1), ("", 4)]), self.rng.choice(NUMBERS)
        number = self.rng.choice([0, 1, 1, 2, -1])
        tensor = helper.make_tensor("", dtype, [1], [number])
        if self.rng.random() < 0.6:
            name = self._op("ConstantOfShape", self._extent([length]), value=tensor)
        else:
            name = self._op(
                "Expand", self._const([number], helper.tensor_dtype_to_np_dtype(dtype)), self._extent([length])
            )
        self._kept(name, dtype, (length,))

    def step_table(self) -> None:
        numbers = [self.rng.randint(-2, 4) for _ in range(self.rng.choice([1, 1, 2, 3]))]
        self._kept(self._const(numbers), INT, (("", len(numbers)),))

    def step_cast(self) -> None:
        source, dtype = self._one(lambda _: True), self.rng.choice([*NUMBERS, BOOL])
        if source is not None:
            self._kept(self._op("Cast", source.name, to=dtype), dtype, source.shape)

    def _pair(self) -> tuple[Tensor, Tensor, tuple[Length, ...]] | None:
        """Two tensors of numbers of one type that can be broadcast, and the shape of the result."""
        one = self._number()
        if one is None:
            return None
        other = self._one(lambda tensor: tensor.dtype == one.dtype and _broadcast(one.shape, tensor.shape) is not None)
        assert other is not None
        shape = _broadcast(one.shape, other.shape)
        assert shape is not None
        return one, other, shape

    def step_arithmetic(self) -> None:
        if (pair := self._pair()) is not None:
            one, other, shape = pair
            name = self._op(self.rng.choice(["Add", "Sub", "Mul", "Min", "Max"]), one.name, other.name)
            self._kept(name, one.dtype, shape)

    def step_with_constant(self) -> None:
        one = self._number(dtype=INT)
        if one is not None:
            number, op = (
                self._const(self.rng.choice([-2, -1, 0, 1, 2, 3])),
                self.rng.choice(["Add", "Sub", "Mul", "Max", "Min", "BitwiseAnd", "BitwiseOr"]),
            )
            pair = (one.name, number) if self.rng.random() < 0.7 else (number, one.name)
            self._kept(self._op(op, *pair), INT, one.shape)

    def step_with_size(self) -> None:
        one = self._number(dtype=INT)
        if one is not None:
            size = self.sizes[self.rng.choice("ST")]
            pair = (one.name, size) if self.rng.random() < 0.5 else (size, one.name)
            self._kept(self._op(self.rng.choice(["Add", "Sub", "Sub", "Min", "Max", "Mul"]), *pair), INT, one.shape)

    def step_divided(self) -> None:
        one = self._number(dtype=INT)
        if one is not None:
            by = self.rng.choice([self._const(2), self._const(1), self._const(3), self.sizes["S"], self.sizes["T"]])
            self._kept(self._op(self.rng.choice(["Mod", "Div"]), one.name, by), INT, one.shape)

    def step_signed(self) -> None:
        if (one := self._number()) is not None:
            self._kept(self._op(self.rng.choice(["Neg", "Abs"]), one.name), one.dtype, one.shape)

    def step_of_floats(self) -> None:
        one = self._one(lambda tensor: tensor.dtype in FLOATS)
        if one is not None:
            self._kept(self._op(self.rng.choice(OF_FLOATS), one.name), one.dtype, one.shape)

    def step_clipped(self) -> None:
        one = self._one(lambda tensor: tensor.dtype in FLOATS)
        if one is not None:
            kind = helper.tensor_dtype_to_np_dtype(one.dtype)
            ends = [self._const(end, kind) for end in self.rng.choice([(-1, 1), (0, 3), (-1e4, 0), (-np.inf, np.inf)])]
            if self.rng.random() < 0.3:
                ends[self.rng.randrange(2)] = ""
            self._kept(self._op("Clip", one.name, *ends), one.dtype, one.shape)

    def step_scaled(self) -> None:
        one = self._one(lambda tensor: tensor.dtype in FLOATS)
        if one is not None:
            number = self._const(
                self.rng.choice([0, 1, 2, 0.5, -1e4, 3e38, -np.inf]), helper.tensor_dtype_to_np_dtype(one.dtype)
            )
            pair = (one.name, number) if self.rng.random() < 0.6 else (number, one.name)
            op = self.rng.choice(["Add", "Sub", "Mul", "Div", "Min", "Max", "Pow"])
            self._kept(self._op(op, *pair), one.dtype, one.shape)

    def step_softmax(self) -> None:
        one = self._one(lambda tensor: tensor.dtype in FLOATS and bool(tensor.shape))
        if one is not None:
            self._kept(self._op("Softmax", one.name, axis=self.rng.choice([0, -1])), one.dtype, one.shape)

    def step_reduced(self) -> None:
        one = self._one(lambda tensor: tensor.dtype != BOOL and bool(tensor.shape))
        if one is not None:
            axis = self.rng.randrange(len(one.shape))
            op = self.rng.choice(["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin"])
            name = self._op(op, one.name, self._const([axis]), keepdims=1)
            self._kept(name, one.dtype, (*one.shape[:axis], ONE, *one.shape[axis + 1 :]))

    def step_asked(self) -> None:
        one = self._one(lambda tensor: tensor.dtype in FLOATS)
        if one is not None:
            self._kept(self._op(self.rng.choice(["IsNaN", "IsInf"]), one.name), BOOL, one.shape)

    def step_taken_one_by_one(self) -> None:
        one = self._one(lambda tensor: bool(tensor.shape))
        places = None if one is None else self._number(one.shape, INT)
        if one is not None and places is not None:
            axis = self.rng.randrange(len(one.shape))
            self._kept(self._op("GatherElements", one.name, places.name, axis=axis), one.dtype, one.shape)

    def step_compared(self) -> None:
        if (pair := self._pair()) is not None:
            one, other, shape = pair
            self._kept(self._op(self.rng.choice(COMPARISONS), one.name, other.name), BOOL, shape)

    def step_logic(self) -> None:
        one = self._one(lambda tensor: tensor.dtype == BOOL)
        if one is None:
            return
        if self.rng.random() < 0.25:
            self._kept(self._op("Not", one.name), BOOL, one.shape)
            return
        other = self._one(lambda tensor: tensor.dtype == BOOL and _broadcast(one.shape, tensor.shape) is not None)
        shape = _broadcast(one.shape, other.shape) if other is not None else None
        if other is not None and shape is not None:
            self._kept(self._op(self.rng.choice(["And", "Or", "Xor"]), one.name, other.name), BOOL, shape)

    def step_chosen(self) -> None:
        pair = self._pair()
        if pair is None:
            return
        one, other, shape = pair
        condition = self._one(lambda tensor: tensor.dtype == BOOL and _broadcast(shape, tensor.shape) is not None)
        whole = _broadcast(shape, condition.shape) if condition is not None else None
        if condition is not None and whole is not None:
            self._kept(self._op("Where", condition.name, one.name, other.name), one.dtype, whole)

    def step_sum(self) -> None:
        one = self._number()
        if one is not None and one.shape:
            words = {"exclusive": int(self.rng.random() < 0.3), "reverse": int(self.rng.random() < 0.3)}
            axis = self._const(self.rng.choice([-1, 0, len(one.shape) - 1]))
            self._kept(self._op("CumSum", one.name, axis, **words), one.dtype, one.shape)

    def step_joined(self) -> None:
        one = self._one(lambda tensor: bool(tensor.shape))
        if one is None:
            return
        axis = self.rng.randrange(len(one.shape))
        beside = one.shape[:axis] + one.shape[axis + 1 :]
        other = self._one(
            lambda tensor: (
                tensor.dtype == one.dtype
                and len(tensor.shape) == len(one.shape)
                and tensor.shape[:axis] + tensor.shape[axis + 1 :] == beside
            )
        )
        assert other is not None
        length = _added(one.shape[axis], other.shape[axis])
        name = self._op("Concat", one.name, other.name, axis=axis)
        if length is not None:
            self._kept(name, one.dtype, (*one.shape[:axis], length, *one.shape[axis + 1 :]))
            return
        # Two open lengths: a part of the length of one of them.
        letter = self.rng.choice([one, other]).shape[axis]
        start = self.rng.choice([0, 0, 1])
        end = self._op("Unsqueeze", self._op("Add", self._size(letter), self._const(start)), self._const([0]))
        part = self._op("Slice", name, self._const([start]), end, self._const([axis]))
        self._kept(part, one.dtype, (*one.shape[:axis], letter, *one.shape[axis + 1 :]))

    def step_cut(self) -> None:
        one = self._one(lambda tensor: bool(tensor.shape))
        if one is None:
            return
        axis = self.rng.randrange(len(one.shape))
        letter, added = one.shape[axis]
        drop = self.rng.choice([1, 1, 2])
        if added - drop < int(not letter):  # without an element
            return
        words = self.rng.choice([([drop], [2**62], [1]), ([0], [-drop], [1]), ([-1 - drop], [-(2**62)], [-1])])
        starts, ends, steps = map(self._const, words)
        name = self._op("Slice", one.name, starts, ends, self._const([axis]), steps)
        self._kept(name, one.dtype, (*one.shape[:axis], (letter, added - drop), *one.shape[axis + 1 :]))

    def step_turned(self) -> None:
        one = self._one(lambda tensor: bool(tensor.shape))
        if one is not None:
            axis = self.rng.randrange(len(one.shape))
            words = self._const([-1]), self._const([-(2**62)]), self._const([axis]), self._const([-1])
            self._kept(self._op("Slice", one.name, *words), one.dtype, one.shape)

    def step_taken(self) -> None:
        """The elements of a tensor at the places that a vector holds, or at one place."""
        one = self._one(lambda tensor: bool(tensor.shape))
        if one is None:
            return
        axis = self.rng.randrange(len(one.shape))
        beside = one.shape[:axis], one.shape[axis + 1 :]
        if self.rng.random() < 0.5:
            place = self.rng.choice([0, 1, 2, -1])
            if self.rng.random() < 0.5:
                self._kept(
                    self._op("Gather", one.name, self._const(place), axis=axis), one.dtype, beside[0] + beside[1]
                )
            else:
                taken = self._op("Gather", one.name, self._const([place]), axis=axis)
                self._kept(taken, one.dtype, (*beside[0], ONE, *beside[1]))
            return
        places = self._one(lambda tensor: tensor.dtype in (INT, SHORT) and len(tensor.shape) == 1)
        if places is not None:
            taken = self._op("Gather", one.name, places.name, axis=axis)
            self._kept(taken, one.dtype, (*beside[0], *places.shape, *beside[1]))

    def step_lifted(self) -> None:
        one = self._one(lambda tensor: len(tensor.shape) < MOST_DIMENSIONS)
        if one is not None:
            axis = self.rng.randint(0, len(one.shape))
            shape = (*one.shape[:axis], ONE, *one.shape[axis:])
            self._kept(self._op("Unsqueeze", one.name, self._const([axis])), one.dtype, shape)

    def step_lowered(self) -> None:
        one = self._one(lambda tensor: ONE in tensor.shape)
        if one is not None:
            axis = one.shape.index(ONE)
            shape = one.shape[:axis] + one.shape[axis + 1 :]
            self._kept(self._op("Squeeze", one.name, self._const([axis])), one.dtype, shape)

    def step_expanded(self) -> None:
        one = self._one(lambda tensor: len(tensor.shape) <= 2)
        shape = (S, T) if one is None else _broadcast(one.shape, (S, T))
        if one is not None and shape == (S, T):
            self._kept(self._op("Expand", one.name, self._extent(shape)), one.dtype, shape)

    def step_tiled(self) -> None:
        one = self._one(lambda tensor: len(tensor.shape) == 2 and ONE in tensor.shape)
        if one is not None:
            times = tuple(length if own == ONE else ONE for own, length in zip(one.shape, (S, T), strict=True))
            shape = tuple(length if own == ONE else own for own, length in zip(one.shape, (S, T), strict=True))
            self._kept(self._op("Tile", one.name, self._extent(times)), one.dtype, shape)

    def step_transposed(self) -> None:
        one = self._one(lambda tensor: len(tensor.shape) > 1)
        if one is not None:
            perm = self.rng.sample(range(len(one.shape)), len(one.shape))
            shape = tuple(one.shape[axis] for axis in perm)
            self._kept(self._op("Transpose", one.name, perm=perm), one.dtype, shape)

    def step_regrouped(self) -> None:
        """Two neighbouring dimensions as one, in another place, and apart again."""
        one = self._one(lambda tensor: len(tensor.shape) > 1)
        if one is None:
            return
        axis = self.rng.randrange(len(one.shape) - 1)
        sizes = [self._extent([length]) for length in one.shape]
        pair = sizes[axis : axis + 2]
        groups = [[size] for size in sizes]
        groups[axis : axis + 2] = [pair]
        lengths: list[tuple[Length, ...]] = [(length,) for length in one.shape]
        lengths[axis : axis + 2] = [one.shape[axis : axis + 2]]
        merged = [group[0] if len(group) == 1 else self._op("Mul", *group) for group in groups]
        name = self._op("Reshape", one.name, self._op("Concat", *merged, axis=0))
        perm = self.rng.sample(range(len(groups)), len(groups))
        if self.rng.random() < 0.7:
            name = self._op("Transpose", name, perm=perm)
        else:
            perm = list(range(len(groups)))
        if self.rng.random() < 0.3:  # the pair in the other order: another tensor
            groups[axis], lengths[axis] = groups[axis][::-1], lengths[axis][::-1]
        apart = self._op("Concat", *(size for place in perm for size in groups[place]), axis=0)
        shape = tuple(length for place in perm for length in lengths[place])
        self._kept(self._op("Reshape", name, apart), one.dtype, shape)

    def step_parted(self) -> None:
        """Both parts of a Split into parts of known sizes."""
        one = self._one(lambda tensor: any(not letter and size > 1 for letter, size in tensor.shape))
        if one is None:
            return
        axis = next(axis for axis, (letter, size) in enumerate(one.shape) if not letter and size > 1)
        first = self.rng.randint(1, one.shape[axis][1] - 1)
        sizes = (first, one.shape[axis][1] - first)
        name = self._op("Split", one.name, self._const(sizes), axis=axis)
        self.nodes[-1].output.append(f"{name}_1")
        for part, size in zip((name, f"{name}_1"), sizes, strict=True):
            self._kept(part, one.dtype, (*one.shape[:axis], ("", size), *one.shape[axis + 1 :]))

    def step_put(self) -> None:
        """A tensor with some elements of another one of its shape, at places along an axis."""
        one = self._one(lambda tensor: bool(tensor.shape))
        if one is None:
            return
        places = self._number(one.shape, INT)
        other = self._one(lambda tensor: tensor.shape == one.shape and tensor.dtype == one.dtype)
        if places is not None and other is not None:
            axis = self.rng.randrange(len(one.shape))
            name = self._op("ScatterElements", one.name, places.name, other.name, axis=axis)
            self._kept(name, one.dtype, one.shape)

    def step_taken_at_places(self) -> None:
        """The rows of a tensor at the places of a column."""
        one = self._one(lambda tensor: bool(tensor.shape))
        places = self._one(lambda tensor: tensor.dtype == INT and len(tensor.shape) == 2 and tensor.shape[1] == ONE)
        if one is not None and places is not None:
            name = self._op("GatherND", one.name, places.name)
            self._kept(name, one.dtype, (places.shape[0], *one.shape[1:]))

    def step_repeated(self) -> None:
        """The last element of an axis once or twice more, or the first one."""
        one = self._one(lambda tensor: bool(tensor.shape) and tensor.dtype in NUMBERS)
        if one is None:
            return
        axis, pads = self.rng.randrange(len(one.shape)), [0] * 2 * len(one.shape)
        pads[axis], pads[axis + len(one.shape)] = self.rng.choice([(0, 1), (0, 2), (1, 0)])
        letter, added = one.shape[axis]
        name = self._op("Pad", one.name, self._const(pads), mode=self.rng.choice(["edge", "edge", "wrap"]))
        self._kept(name, one.dtype, (*one.shape[:axis], (letter, added + sum(pads)), *one.shape[axis + 1 :]))

    def step_triangle(self) -> None:
        one = self._one(lambda tensor: len(tensor.shape) > 1)
        if one is not None:
            offset = self.rng.choice(
                [self._const(self.rng.randint(-2, 2)), self.sizes["S"], self._op("Sub", *self._both())]
            )
            name = self._op("Trilu", one.name, offset, upper=self.rng.randint(0, 1))
            self._kept(name, one.dtype, one.shape)

    def _both(self) -> tuple[str, str]:
        return self.sizes["T"], self.sizes["S"]

    def step_padded(self) -> None:
        one = self._one(lambda tensor: bool(tensor.shape) and tensor.dtype in NUMBERS)
        if one is None:
            return
        axis, before, after = self.rng.randrange(len(one.shape)), self.rng.choice([0, 1]), self.rng.choice([0, 1, 2])
        letter, added = one.shape[axis]
        pads = [0] * 2 * len(one.shape)
        pads[axis], pads[axis + len(one.shape)] = before, after
        number = self._const(self.rng.choice([0, 1, -1]), helper.tensor_dtype_to_np_dtype(one.dtype))
        name = self._op("Pad", one.name, self._const(pads), number)
        shape = (*one.shape[:axis], (letter, added + before + after), *one.shape[axis + 1 :])
        self._kept(name, one.dtype, shape)

    def step_flat(self) -> None:
        """0, 1, 2, ... through the rows of a matrix, or a matrix as one of the other shape."""
        if self.rng.random() < 0.5:
            count = self._op("Mul", *self._both())
            line = self._op("Range", self._const(0), count, self._const(1))
            flat = self._op("Reshape", line, self._extent((S, T)))
            by = self.sizes[self.rng.choice("STT")]
            self._kept(self._op(self.rng.choice(["Mod", "Div"]), flat, by), INT, (S, T))
            return
        one = self._one(lambda tensor: sorted(tensor.shape) == [S, T])
        if one is not None:
            self._kept(self._op("Reshape", one.name, self._extent(one.shape[::-1])), one.dtype, one.shape[::-1])

    def step_written(self) -> None:
        """A tensor whose elements are all written by the updates of another one, at places along the first axis."""
        one = self._one(lambda tensor: tensor.shape in ((S,), (T,), (S, T)))
        if one is None:
            return
        other = self._one(lambda tensor: tensor.shape == one.shape and tensor.dtype == one.dtype)
        places = self._number((one.shape[0],), INT)
        if other is not None and places is not None:
            lifted = self._op("Unsqueeze", places.name, self._const([1]))
            self._kept(self._op("ScatterND", one.name, lifted, other.name), one.dtype, one.shape)


_ALL = {name: step for name, step in vars(Program).items() if name.startswith("step_")}
_OFTEN = (
    *("step_arithmetic", "step_with_constant", "step_compared", "step_compared", "step_joined", "step_taken"),
    *("step_filled", "step_sum", "step_sum", "step_table", "step_regrouped", "step_regrouped", "step_expanded"),
)
STEPS: Sequence[Callable[[Program], None]] = [*_ALL.values(), *(_ALL[name] for name in _OFTEN)]
"""Each step, some of them several times."""


def _broadcast(one: Sequence[Length], other: Sequence[Length]) -> tuple[Length, ...] | None:
    """The shape of two broadcast shapes; None where they do not fit for all sizes."""
    rank = max(len(one), len(other))
    shape: list[Length] = []
    for left, right in zip(_filled(one, rank), _filled(other, rank), strict=True):
        if left != right and ONE not in (left, right):
            return None
        shape.append(right if left == ONE else left)
    return tuple(shape)


def _filled(shape: Sequence[Length], rank: int) -> tuple[Length, ...]:
    return (ONE,) * (rank - len(shape)) + tuple(shape)


def _added(one: Length, other: Length) -> Length | None:
    """The sum of two lengths; None where both are open."""
    if one[0] and other[0]:
        return None
    return one[0] or other[0], one[1] + other[1]
