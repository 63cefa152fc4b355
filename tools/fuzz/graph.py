"""Writing a random graph: nodes, constants, and inputs that know what they are for.

Sizes are letters (B batch, N query heads, K key heads, V those of values where they are open, S rows, T keys, D and E
depths) or numbers. A letter of `open` is a symbol of the model; the others are written down as their size.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = npt.NDArray[Any]

TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "float64": TensorProto.DOUBLE,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
    "int16": TensorProto.INT16,
    "int8": TensorProto.INT8,
    "uint16": TensorProto.UINT16,
    "uint8": TensorProto.UINT8,
    "bool": TensorProto.BOOL,
}
Size = str | int


@dataclass(frozen=True)
class Input:
    """One input of a model. `role` says what its numbers mean (tools/fuzz/feeds.py); `number` is what a mask of it
    puts in; `dims` are letters and numbers."""

    name: str
    role: str
    dtype: str
    dims: tuple[Size, ...]
    number: float = 0.0


@dataclass
class Case:
    """A model, what its inputs are for, and the sizes it was made for. `open` are the letters that other runs may
    change; `equal` says which letters have one size in all runs; `words` are what it is made of."""

    model: onnx.ModelProto
    inputs: Sequence[Input]
    sizes: Mapping[str, int]
    open: frozenset[str]
    words: Sequence[str]
    assume: tuple[str, ...] = ()
    undefined: bool = False
    """Is a factor of the scores NaN or infinite?"""
    loose: bool = False
    """May sizes have been told apart that belong together?"""
    base: Mapping[str, Array] = field(default_factory=dict)
    """What inputs hold in a plain run, where that is known."""


@dataclass
class Graph:
    """A graph under composition."""

    rng: random.Random
    sizes: dict[str, int]
    open: frozenset[str] = frozenset()
    opset: int = 17
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    undefined: bool = False
    mask_batch: str = "B"
    """The letter of the batch of masks: "M" where a model gives it a symbol of its own."""
    names: dict[str, str] = field(default_factory=dict)
    """Letters that are written as another symbol."""

    def op(self, op_type: str, *inputs: str, domain: str = "", outputs: int = 1, **attributes: Any) -> str:
        """Add a node, and return its first output; the others have its name and their number."""
        name = f"n{len(self.nodes)}_{op_type}"
        made = [name, *(f"{name}_{index}" for index in range(1, outputs))]
        self.nodes.append(helper.make_node(op_type, inputs, made, name=name, domain=domain, **attributes))
        return name

    def const(self, array: Any, dtype: str | None = None) -> str:
        """An initializer, or a Constant node."""
        with np.errstate(all="ignore"):
            tensor = numpy_helper.from_array(np.asarray(array, dtype=dtype))
        if self.rng.random() < 0.3:
            return self.op("Constant", value=tensor)
        tensor.name = f"c{len(self.initializers)}"
        self.initializers.append(tensor)
        return tensor.name

    def number(self, value: float, dtype: str) -> str:
        """One number, of rank 0 or more."""
        shape = self.rng.choice([(), (), (1,), (1, 1, 1, 1)])
        return self.const(np.full(shape, value), dtype)

    def input(self, role: str, dtype: str, dims: Sequence[Size], number: float = 0.0, name: str | None = None) -> str:
        """A model input."""
        name = name or f"{role}{len(self.inputs)}"
        if role in ("bool", "int01", "scale01", "fmask"):
            dims = [self.mask_batch if each == "B" else each for each in dims]
        self.inputs.append(Input(name, role, dtype, tuple(dims), number))
        return name

    def size(self, letter: Size) -> int:
        return letter if isinstance(letter, int) else self.sizes[letter]

    def measured(self, letter: Size) -> str:
        """A vector with one size; read from an input where the size is open."""
        if isinstance(letter, str) and letter in self.open:
            for each in self.inputs:
                if letter in each.dims:
                    shape = self.op("Shape", each.name)
                    return self.op("Gather", shape, self.const([each.dims.index(letter)], "int64"), axis=0)
        return self.const([self.size(letter)], "int64")

    def shape(self, dims: Sequence[Size]) -> str:
        """The sizes as a vector: a constant, where none is open."""
        if not self.open & {each for each in dims if isinstance(each, str)}:
            return self.const([self.size(each) for each in dims], "int64")
        return self.op("Concat", *(self.measured(each) for each in dims), axis=0)

    def reshape(self, value: str, dims: Sequence[Size]) -> str:
        opened = [index for index, each in enumerate(dims) if each in self.open]
        if len(opened) <= 1 and self.rng.random() < 0.5 and 0 not in (self.size(each) for each in dims):
            numbers = [-1 if index in opened else self.size(each) for index, each in enumerate(dims)]
            return self.op("Reshape", value, self.const(numbers, "int64"))
        return self.op("Reshape", value, self.shape(dims))

    def unsqueeze(self, value: str, axes: Sequence[int]) -> str:
        return self.op("Unsqueeze", value, self.const(list(axes), "int64"))

    def range(self, letter: Size) -> str:
        """0, 1, ... as a vector."""
        end = self.op("Squeeze", self.measured(letter), self.const([0], "int64"))
        return self.op("Range", self.const(0, "int64"), end, self.const(1, "int64"))

    def cast(self, value: str, dtype: str) -> str:
        return self.op("Cast", value, to=TYPES[dtype])

    def case(self, outputs: Sequence[tuple[str, str, Sequence[Size | None]]], assume: tuple[str, ...] = ()) -> Case:
        """The model with these outputs: name, dtype and dimensions."""

        def declared(letter: Size | None) -> Any:
            if isinstance(letter, str) and letter in self.open:
                return self.names.get(letter, letter)
            return None if letter is None else self.size(letter)

        made = [
            helper.make_tensor_value_info(each.name, TYPES[each.dtype], [declared(dim) for dim in each.dims])
            for each in self.inputs
        ]
        results = [
            helper.make_tensor_value_info(name, TYPES[dtype], [declared(dim) for dim in dims])
            for name, dtype, dims in outputs
        ]
        graph = helper.make_graph(self.nodes, "g", made, results, self.initializers)
        domains = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=domains, ir_version=11 if self.opset > 23 else 9)
        return Case(model, self.inputs, dict(self.sizes), self.open, self.words, assume, self.undefined)


def elements(sizes: Sequence[int]) -> int:
    """The number of elements."""
    return math.prod(sizes)
