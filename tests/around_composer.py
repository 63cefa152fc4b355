"""Models of blocks around attention: norms, gated activations and rotary positions in many spellings, and near misses.

A `Composer` draws a few blocks into one graph. Each place of a block where models differ is drawn from what means the
same and, in some blocks, now and then from what does not. Nothing here knows what a matcher accepts: the graph itself
says what it computes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = npt.NDArray[Any]
T = TypeVar("T")
Size = int | str
Shape = tuple[Size, ...]

TYPES: Mapping[str, int] = {
    "float": TensorProto.FLOAT,
    "half": TensorProto.FLOAT16,
    "bfloat": TensorProto.BFLOAT16,
    "double": TensorProto.DOUBLE,
    "int": TensorProto.INT64,
}
NUMPY: Mapping[str, Any] = {
    "float": np.float32,
    "half": np.float16,
    "bfloat": ml_dtypes.bfloat16,
    "double": np.float64,
    "int": np.int64,
}
MICROSOFT = "com.microsoft"


class Misfit(Exception):
    """A near miss that is no model: its shapes or types do not fit."""


@dataclass(frozen=True)
class Tensor:
    """A value of the graph."""

    name: str
    dtype: str
    shape: Shape


@dataclass
class Composer:
    """Draws the nodes of one graph."""

    rng: random.Random
    opset: int
    batch: Size
    tokens: Size
    width: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    pool: list[Tensor] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    wrong: float = 0.0
    """How often a place has a near miss, as long as the block has some `misses` left."""
    misses: int = 0
    made: int = 0

    # -- choices ------------------------------------------------------------------------------------

    def choice(self, right: Sequence[T], wrong: Sequence[T] = ()) -> T:
        """One of what means the same, or in a block with near misses one of what does not."""
        if wrong and self.misses and self.rng.random() < self.wrong:
            self.misses -= 1
            found = self.rng.choice(wrong)
            self.words.append(str(found)[:40])
            return found
        return self.rng.choice(right)

    def goes_wrong(self, word: str) -> bool:
        """Is there a near miss at this place?"""
        return self.choice([False], [word]) is not False

    def maybe(self, chance: float = 0.5) -> bool:
        """Yes or no, both of which are right."""
        return self.rng.random() < chance

    # -- values -------------------------------------------------------------------------------------

    def name(self, stem: str) -> str:
        """A new name."""
        self.made += 1
        return f"{stem}_{self.made}"

    def op(self, op_type: str, *inputs: Tensor | None, like: Tensor, domain: str = "", **attrs: Any) -> Tensor:
        """The first output of an operator, of a type and a shape."""
        return self.several(op_type, 1, inputs, like, domain, **attrs)[0]

    def several(
        self,
        op_type: str,
        count: int,
        inputs: Sequence[Tensor | None],
        like: Tensor,
        domain: str = "",
        skipped: Sequence[int] = (),
        **attrs: Any,
    ) -> list[Tensor]:
        """The outputs of an operator, all of one type and shape; those at the skipped places have no name."""
        names = ["" if place in skipped else self.name(op_type) for place in range(count)]
        given = ["" if one is None else one.name for one in inputs]
        self.nodes.append(helper.make_node(op_type, given, names, domain=domain, **attrs))
        found = [Tensor(name, like.dtype, like.shape) for name in names]
        self._show(found[0])
        return found

    def _show(self, inner: Tensor) -> None:
        """Now and then what a node gives is an output, or is read by a node that does not belong here."""
        if self.misses and self.rng.random() < self.wrong / 8 and inner.dtype != "bfloat":
            self.misses -= 1
            self.words.append("read elsewhere")
            if self.maybe():
                self.outputs.append(inner)
            else:
                self.nodes.append(helper.make_node("Abs", [inner.name], [self.name("Abs")]))
                self.outputs.append(Tensor(self.nodes[-1].output[0], inner.dtype, inner.shape))

    def broadcast(self, one: Shape, other: Shape) -> Shape:
        """The shape of what two tensors are combined to."""
        longest = max(len(one), len(other))
        padded = [(1,) * (longest - len(shape)) + shape for shape in (one, other)]
        found: list[Size] = []
        for left, right in zip(*padded, strict=True):
            if left != right and 1 not in (left, right):
                raise Misfit
            found.append(right if left == 1 else left)
        return tuple(found)

    def both(self, op_type: str, one: Tensor, other: Tensor) -> Tensor:
        """The result of an operator on two operands of one type."""
        if one.dtype != other.dtype:
            raise Misfit
        return self.op(op_type, one, other, like=Tensor("", one.dtype, self.broadcast(one.shape, other.shape)))

    def any_order(self, op_type: str, one: Tensor, other: Tensor) -> Tensor:
        """The same, where the order does not matter."""
        return self.both(op_type, one, other) if self.maybe() else self.both(op_type, other, one)

    def cast(self, value: Tensor, dtype: str) -> Tensor:
        """A value in another type."""
        return self.op("Cast", value, like=Tensor("", dtype, value.shape), to=TYPES[dtype])

    def stored(self, array: Array, stem: str = "weight") -> Tensor:
        """A constant: an initializer or what a node gives."""
        name = self.name(stem)
        dtype = next(each for each, kind in NUMPY.items() if array.dtype == kind)
        tensor = numpy_helper.from_array(array, name)
        if self.maybe():
            self.weights.append(tensor)
        else:
            self.nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        return Tensor(name, dtype, array.shape)

    def ints(self, *numbers: int) -> Tensor:
        """A list of integers."""
        return self.stored(np.array(numbers, np.int64), "ints")

    def number(self, number: float, like: Tensor) -> Tensor:
        """A number that is combined with a tensor: of any shape that leaves that of the tensor, or a near miss."""
        rank = len(like.shape)
        fitting = [(), (), (1,), (1,) * rank]
        whole: list[Shape] = [like.shape[-1:], like.shape[-2:]]
        larger = [tuple(int(dim) for dim in each) for each in whole if all(isinstance(dim, int) for dim in each)]
        shape = self.choice(fitting if rank else [()], [(1,) * (rank + 1), *larger])
        value = self.choice([number], [number * 1.25, -number, number + 1.0, number * 1.001])
        array = np.full(shape, value).astype(NUMPY[like.dtype])
        if shape and array.size > 1 and self.maybe():
            array = array * np.arange(1, array.size + 1).astype(array.dtype).reshape(shape)
        if self.goes_wrong("a number of the run"):
            return self.input(Tensor("", like.dtype, shape), "number", again=False)
        wide = self.maybe(0.1) and like.dtype == "half"
        return self.cast(self.stored(array.astype(np.float32)), "half") if wide else self.stored(array)

    def input(self, like: Tensor, role: str, again: bool = True) -> Tensor:
        """An input of the model, or one that is there already."""
        found = [one for one in self.inputs if one.name.startswith(role) and _is_like(one, like)]
        if again and found and self.maybe(0.4):
            return self.rng.choice(found)
        given = "float" if like.dtype == "bfloat" else like.dtype
        value = Tensor(self.name(role), given, like.shape)
        self.inputs.append(value)
        return value if given == like.dtype else self.cast(value, like.dtype)

    def hidden(self, dtype: str, shape: Shape | None = None) -> Tensor:
        """A tensor to compute with: what an earlier block gave, or an input."""
        like = Tensor("", dtype, self.shape() if shape is None else shape)
        found = [one for one in self.pool if _is_like(one, like)]
        if found and self.maybe(0.6):
            return self.rng.choice(found)
        return self.input(like, "x")

    def shape(self) -> Shape:
        """The shape of a tensor of hidden numbers."""
        shapes: list[Shape] = [(self.batch, self.tokens, self.width)] * 4
        shapes += [(self.tokens, self.width), (self.batch, 2, self.tokens, self.width), (self.width,)]
        return self.rng.choice(shapes)

    def vector(self, size: Size, dtype: str, rank: int, wrong: bool = True) -> Tensor:
        """A weight as long as the last axis, in any of its forms, or a near miss."""
        if not isinstance(size, int):
            raise Misfit
        shapes: list[Shape] = [(size,), (size,), (size,), (1, size), (1,) * (rank - 1) + (size,)]
        shapes = [each for each in shapes if len(each) <= rank]
        others: list[Shape] = [(1,), (), (1,) * rank + (size,), (size, 1), (self.tokens, size)]
        others += [(self.batch, 1, size)]
        shape = self.choice(shapes, others if wrong else ())
        if any(isinstance(dim, str) for dim in shape) or self.maybe(0.15):
            return self.input(Tensor("", dtype, shape), "weight")
        whole = tuple(dim for dim in shape if isinstance(dim, int))
        array = self.array(whole).astype(NUMPY[dtype])
        return self._reshaped(self._computed(array), whole)

    def array(self, shape: Sequence[int]) -> Array:
        """Random numbers, none of them next to 0."""
        draws = np.random.default_rng(self.rng.getrandbits(32))
        return np.asarray(draws.choice([-1.0, 1.0], shape) * draws.uniform(0.25, 2.0, shape))

    def _computed(self, array: Array) -> Tensor:
        """A constant, or what is computed from one."""
        dtype = next(each for each, kind in NUMPY.items() if array.dtype == kind)
        way = self.choice(["", "", "", "", "plus", "cast", "identity"], ["minus", "double", "shared"])
        if way == "plus" and dtype == "float":
            one = self.stored(np.ones(self.rng.choice([(), (1,)]), array.dtype))
            return self.any_order("Add", self.stored(array), one)
        if way == "cast" and dtype != "double":
            return self.cast(self.stored(array.astype(NUMPY[self.rng.choice(["half", "float"])])), dtype)
        if way == "identity":
            stored = self.stored(array)
            return self.op("Identity", stored, like=stored)
        if way in ("minus", "double") and dtype == "float":
            one = self.stored(np.ones((), array.dtype))
            return self.both("Sub" if way == "minus" else "Mul", self.stored(array), one)
        return self.stored(array)

    def _reshaped(self, value: Tensor, shape: Sequence[int]) -> Tensor:
        """The value, or what a Reshape of another form of it gives."""
        if not self.maybe(0.1) or not shape:
            return value
        return self.op("Reshape", value, self.ints(*shape), like=value)

    def reduced(self, value: Tensor, axis: int, op_type: str = "ReduceMean") -> Tensor:
        """A reduction of a value along an axis, which stays with size 1."""
        rank = len(value.shape)
        axes = self.choice([[axis], [axis % rank]], [[0], [-1, -2], [rank - 2]])
        if any(not -rank <= each < rank for each in axes):
            raise Misfit
        places = {each % rank for each in axes}
        shape = tuple(1 if place in places else dim for place, dim in enumerate(value.shape))
        keeps = self.choice([True, True, False])
        dropped = tuple(dim for place, dim in enumerate(value.shape) if place not in places)
        like = Tensor("", value.dtype, shape if keeps else dropped)
        pooled = rank == 3 and axes in ([-1], [2]) and keeps and op_type == "ReduceMean"
        if pooled and self.maybe(0.2):
            return self.op("GlobalAveragePool", value, like=like)
        more: Mapping[str, Any] = {"keepdims": int(keeps)} if not keeps or self.maybe() else {}
        if self.opset >= 18:
            made = self.op(op_type, value, self.ints(*axes), like=like, **more)
        else:
            made = self.op(op_type, value, like=like, axes=axes, **more)
        if keeps or self.goes_wrong("the axis is dropped"):
            return made
        return self.op("Unsqueeze", made, self.ints(*sorted(places)), like=Tensor("", value.dtype, shape))

    def cut(self, value: Tensor, start: int, end: int, step: int = 1, axis: int = -1) -> Tensor:
        """A Slice of a value along an axis."""
        rank, size = len(value.shape), value.shape[axis]
        if not isinstance(size, int):
            raise Misfit
        ends = [end, end] if end < size else [end, size + 3, np.iinfo(np.int64).max]
        starts = [start] if not start else [start, start - size]
        bounds = [self.ints(self.rng.choice(starts)), self.ints(self.rng.choice(ends)), self.ints(axis % rank)]
        if step != 1 or self.maybe(0.2):
            bounds.append(self.ints(step))
        shape = list(value.shape)
        shape[axis] = len(range(start, min(end, size), step))
        return self.op("Slice", value, *bounds, like=Tensor("", value.dtype, tuple(shape)))

    def halves(self, value: Tensor, axis: int = -1) -> list[Tensor]:
        """The halves of a value along an axis, or parts that are none."""
        size = value.shape[axis]
        if not isinstance(size, int) or size < 2:
            raise Misfit
        middle = self.choice([size // 2], [size // 2 + 1, 1])
        if middle >= size:
            raise Misfit
        if self.maybe():
            found = self._split(value, middle, axis)
        else:
            where = self.choice([axis], [0, -1, -2])
            found = [self.cut(value, 0, middle, axis=where), self.cut(value, middle, size, axis=where)]
        if self.goes_wrong("the halves change places"):
            found.reverse()
        if self.goes_wrong("the halves overlap"):
            found[1] = self.cut(value, 0, size // 2, axis=axis)
        return found

    def _split(self, value: Tensor, middle: int, axis: int) -> list[Tensor]:
        size = value.shape[axis]
        assert isinstance(size, int)
        shapes = [
            tuple(part if place == axis % len(value.shape) else dim for place, dim in enumerate(value.shape))
            for part in (middle, size - middle)
        ]
        even = 2 * middle == size
        by_size = not even or self.maybe()
        given: list[Tensor | None] = [value]
        attrs: dict[str, Any] = {"axis": self.rng.choice([axis, axis % len(value.shape)])}
        if by_size:
            given.append(self.ints(middle, size - middle))
        elif self.opset >= 18:
            attrs["num_outputs"] = 2
        parts = self.several("Split", 2, given, value, **attrs)
        return [Tensor(part.name, value.dtype, shape) for part, shape in zip(parts, shapes, strict=True)]

    def pairs(self, value: Tensor) -> list[Tensor]:
        """The elements of even and of odd places of a value along the last axis."""
        size = value.shape[-1]
        if not isinstance(size, int) or size % 2:
            raise Misfit
        found = [self.cut(value, self.choice([place], [0, 1]), size, 2) for place in (0, 1)]
        if self.goes_wrong("the pairs change places"):
            found.reverse()
        return found

    def joined(self, values: Sequence[Tensor], axis: int = -1) -> Tensor:
        """Values behind each other along an axis."""
        rank = len(values[0].shape)
        if len({one.dtype for one in values}) > 1 or any(len(one.shape) != rank for one in values):
            raise Misfit
        shape = list(values[0].shape)
        sizes = [one.shape[axis] for one in values]
        if not all(isinstance(size, int) for size in sizes):
            raise Misfit
        for one in values[1:]:
            others = list(one.shape)
            others[axis] = shape[axis]
            if others != shape:
                raise Misfit
        shape[axis] = sum(size for size in sizes if isinstance(size, int))
        like = Tensor("", values[0].dtype, tuple(shape))
        return self.op("Concat", *values, like=like, axis=self.rng.choice([axis, axis % rank]))

    # -- graphs -------------------------------------------------------------------------------------

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Where a near miss turns out to be no model, nothing of it stays."""
        kept = (self.nodes, self.inputs, self.weights, self.outputs, self.pool, self.words)
        counts = [len(each) for each in kept]
        try:
            yield
        except Misfit:
            for made, count in zip(kept, counts, strict=True):
                del made[count:]

    def model(self) -> onnx.ModelProto:
        """The graph as a model: what nothing reads is an output, and so is now and then what an end of a block is."""
        read = {name for node in self.nodes for name in node.input}
        shown = dict.fromkeys([*self.outputs, *(one for one in self.pool if one.name not in read or self.maybe(0.1))])
        ends = [self.cast(one, "float") if one.dtype == "bfloat" else one for one in shown]
        graph = helper.make_graph(
            self.nodes,
            "blocks",
            [helper.make_tensor_value_info(one.name, TYPES[one.dtype], one.shape) for one in self.inputs],
            [helper.make_tensor_value_info(one.name, TYPES[one.dtype], None) for one in ends],
            self.weights,
        )
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _is_like(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape)
