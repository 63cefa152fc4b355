"""Writing a graph whose sizes are named by letters: B batch, N query heads, S rows, "BN" their product and so on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

Array = npt.NDArray[Any]
SYMBOLS = "BSTP"
"""The sizes that are symbols in a model that is not static."""


class Writer:
    """Nodes of one graph under composition."""

    def __init__(self, opset: int, sizes: Mapping[str, int], symbolic: bool, target: str) -> None:
        self.opset, self.sizes, self.symbolic, self.target = opset, sizes, symbolic, target
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.makers: dict[str, Callable[[np.random.Generator], Array]] = {}
        self.where: dict[str, tuple[str, int]] = {}
        """An input and axis that has the size of a letter."""
        self.equal: dict[str, str] = {}
        """Letters that are the same size by construction, under the letter they are declared as."""

    def op(self, op_type: str, *inputs: str, domain: str = "", count: int = 1, **attrs: Any) -> str:
        """Add a node and return its first output."""
        name = f"n{len(self.nodes)}"
        outputs = [f"{name}_{op_type}"] + [f"{name}_{op_type}_{index}" for index in range(1, count)]
        self.nodes.append(helper.make_node(op_type, inputs, outputs, name=name, domain=domain, **attrs))
        return outputs[0]

    def const(self, array: Any, dtype: str | None = None) -> str:
        """An initializer, or now and then a Constant node."""
        array = np.asarray(array, dtype=dtype)
        name = f"c{len(self.initializers) + len(self.nodes)}_{len(self.initializers)}"
        if len(self.nodes) % 3 == 1:
            return self.op("Constant", value=numpy_helper.from_array(array))
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def input(
        self, name: str, dtype: int, dims: str, maker: Callable[[np.random.Generator], Array], anonymous: bool = False
    ) -> str:
        """A graph input whose dimensions are named by letters."""
        letters = split(dims)
        shape = [None if anonymous and letter in SYMBOLS else self.declared(letter) for letter in letters]
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        self.makers[name] = maker
        for axis, letter in enumerate(letters):
            self.where.setdefault(letter, (name, axis))
        return name

    def declared(self, letter: str) -> int | str:
        return self.equal.get(letter, letter) if self.symbolic and letter in SYMBOLS else self.size(letter)

    def size(self, letter: str) -> int:
        return math.prod(int(each) if each.isdigit() else self.sizes[each] for each in letter)

    def shape(self, dims: Sequence[str]) -> str:
        """The sizes as a vector: constant where all are static, else computed from the inputs."""
        known = [not (self.symbolic and set(letter) & set(SYMBOLS)) for letter in dims]
        if all(known) and self.target != "computed":
            return self.const([self.size(letter) for letter in dims], "int64")
        return self.op("Concat", *(self.measured(letter) for letter in dims), axis=0)

    def measured(self, letter: str) -> str:
        """A vector with one size, as the product of its letters."""
        total: str | None = None
        for each in letter:
            if each in SYMBOLS:
                name, axis = self.where[each]
                one = self.op("Gather", self.op("Shape", name), self.const([axis], "int64"), axis=0)
            else:
                one = self.const([self.size(each)], "int64")
            total = one if total is None else self.op("Mul", total, one)
        assert total is not None
        return total

    def scalar(self, letter: str) -> str:
        """One size, of rank 0."""
        if not (self.symbolic and letter in SYMBOLS):
            return self.const(self.size(letter), "int64")
        name, axis = self.where[letter]
        return self.op("Gather", self.op("Shape", name), self.const(axis, "int64"), axis=0)

    def range(self, letter: str) -> str:
        """0, 1, ... as a vector."""
        return self.op("Range", self.const(0, "int64"), self.scalar(letter), self.const(1, "int64"))

    def reshape(self, value: str, dims: Sequence[str], source: Sequence[str]) -> str:
        """Reshape to these dimensions; `source` are those it has."""
        if self.target == "inferred":
            numbers = [
                0 if index < len(source) and source[index] == each else self.size(each)
                for index, each in enumerate(dims)
            ]
            open_ = [i for i, each in enumerate(dims) if numbers[i] and self.symbolic and set(each) & set(SYMBOLS)]
            if len(open_) <= 1:
                # One -1 even where nothing is open: exporters like it.
                numbers[open_[0] if open_ else len(dims) - 1] = -1
                return self.op("Reshape", value, self.const(numbers, "int64"))
        return self.op("Reshape", value, self.shape(dims))

    def unsqueeze(self, value: str, *axes: int) -> str:
        if self.opset >= 13:
            return self.op("Unsqueeze", value, self.const(list(axes), "int64"))
        return self.op("Unsqueeze", value, axes=list(axes))

    def slice(self, value: str, cuts: Sequence[tuple[int, str, str]]) -> str:
        """Cut axes from a start to an end, each a vector of one element."""
        for axis, first, last in cuts:
            value = self.op("Slice", value, first, last, self.const([axis], "int64"))
        return value

    def split(self, value: str, widths: Sequence[int], axis: int) -> list[str]:
        """Parts of these widths along an axis."""
        attrs = {} if self.opset >= 13 else {"split": list(widths)}
        more = [self.const(list(widths), "int64")] if self.opset >= 13 else []
        first = self.op("Split", value, *more, count=len(widths), axis=axis, **attrs)
        return [first, *(f"{first}_{index}" for index in range(1, len(widths)))]

    def last_dropped(self, value: str, axis: int) -> str:
        """All but the last element of an axis."""
        first, last = ([0], [-1])
        if self.opset < 10:
            return self.op("Slice", value, axes=[axis], starts=first, ends=last)
        return self.slice(value, [(axis, self.const(first, "int64"), self.const(last, "int64"))])

    def at_most(self, left: str, right: str) -> str:
        """Integers compared by <=, in the opsets without that by not >."""
        if self.opset >= 12 and len(self.nodes) % 2:
            return self.op("LessOrEqual", left, right)
        return self.op("Not", self.op("Greater", left, right))

    def reduce(self, op_type: str, value: str, axis: int, rank: int) -> str:
        if self.opset < 11:
            # Negative axes are younger.
            axis %= rank
        as_input = self.opset >= (13 if op_type == "ReduceSum" else 18)
        if as_input:
            return self.op(op_type, value, self.const([axis], "int64"), keepdims=1)
        return self.op(op_type, value, axes=[axis], keepdims=1)

    def model(self, output: str, dtype: int, rank: int) -> onnx.ModelProto:
        """The finished model, output named y."""
        self.nodes.append(helper.make_node("Identity", [output], ["y"], name="last"))
        graph = helper.make_graph(
            self.nodes,
            "attention",
            self.inputs,
            [helper.make_tensor_value_info("y", dtype, [None] * rank)],
            self.initializers,
        )
        imports = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=imports, ir_version=8)


def split(dims: str) -> list[str]:
    """Letters of a word; letters in brackets belong together."""
    result: list[str] = []
    inside = False
    for letter in dims:
        if letter in "()":
            inside = letter == "("
            if inside:
                result.append("")
        elif inside:
            result[-1] += letter
        else:
            result.append(letter)
    return result
