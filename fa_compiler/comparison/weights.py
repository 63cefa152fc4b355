"""Which floating-point inputs are weights, and how large their random numbers have to be.

Training graphs take their weights as inputs. Random numbers around 1 in all of them make a model
whose values grow from layer to layer until its own roundings are larger than any tolerance. So
weights are drawn as layers are initialised:

    matrix    := an input of two fixed sizes, also transposed, that a MatMul or Gemm multiplies a
              value with which
                 depends on another input             deviation 1 / sqrt(k), for products that add
                                                      up k terms each
    kernel    := the second operand of Conv, of fixed sizes                       the same
    variance  := that of a BatchNormalization         around 1, as it is no square below 0

Keys and values of an attention are no matrix: those are an operand of a product that moves, scales
and sums lead to a Softmax, and these are multiplied with what comes from a Softmax. Of several
readers the one that adds up most decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from fa_compiler.comparison.masks import FLOATS
from fa_compiler.passes.ops.movers import MOVES
from fa_compiler.protos.subgraphs import graph_inputs

ON_SCORES = frozenset(
    (*MOVES, *("Cast", "Mul", "Div", "Add", "Sub", "Where", "Max", "Min", "Clip", "Tanh"))
)
"""What may lie between the product of query and key and its Softmax."""
ON_PROBABILITIES = frozenset((*MOVES, *("Cast", "Mul", "Div", "Where", "Dropout")))
"""What may lie between a Softmax and the product with the values."""


@dataclass(frozen=True)
class Spread:
    """The mean and the standard deviation of random numbers."""

    mean: float
    deviation: float

    def of(self, numbers: np.ndarray) -> np.ndarray:
        """Numbers of the mean 0 and the deviation 1 with this mean and deviation."""
        return self.mean + self.deviation * numbers


VARIANCE = Spread(1.0, 0.1)


def weights_of(model: onnx.ModelProto) -> Mapping[str, Spread]:
    """The inputs that are weights, with the spread of their random numbers."""
    graph = _Graph(model)
    sizes = {
        info.name: [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        for info in graph_inputs(model)
        if info.type.tensor_type.elem_type in FLOATS and info.type.tensor_type.HasField("shape")
    }
    found = {
        name: graph.spread(name, shape)
        for name, shape in sizes.items()
        if all(size > 0 for size in shape)
    }
    return {name: spread for name, spread in found.items() if spread is not None}


class _Graph:
    """The nodes of a main graph, by the values that they read and make."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        self._makers: dict[str, onnx.NodeProto] = {}
        self._depends = {info.name for info in graph_inputs(model)}
        for node in model.graph.node:
            for name in dict.fromkeys(node.input):
                self._readers.setdefault(name, []).append(node)
            self._makers.update(dict.fromkeys(node.output, node))
            if not self._depends.isdisjoint(node.input):
                self._depends.update(node.output)

    def spread(self, name: str, sizes: Sequence[int]) -> Spread | None:
        """How the numbers of an input of these sizes are spread, if it is a weight."""
        terms: list[int] = []
        for value, shape in self._transposed(name, sizes):
            for node in self._readers.get(value, ()):
                place = list(node.input).index(value)
                if (node.op_type, place) == ("BatchNormalization", 4):
                    return VARIANCE
                if place != 1:
                    continue
                if node.op_type == "Conv" and len(shape) > 2:
                    terms.append(math.prod(shape[1:]))
                elif (
                    node.op_type in ("MatMul", "Gemm")
                    and len(shape) == 2
                    and node.input[0] in self._depends
                ):
                    if self._is_attention(node):
                        return None
                    terms.append(shape[_flag(node, "transB")])
        return Spread(0.0, 1 / math.sqrt(max(terms))) if terms else None

    def _transposed(self, name: str, sizes: Sequence[int]) -> Iterator[tuple[str, Sequence[int]]]:
        """A value and what it is as another type or transposed, with the sizes."""
        pending = [(name, list(sizes))]
        while pending:
            value, shape = pending.pop()
            yield value, shape
            for node in self._readers.get(value, ()):
                if node.op_type in ("Cast", "Identity"):
                    pending.append((node.output[0], shape))
                elif node.op_type == "Transpose":
                    order = next(
                        (list(attr.ints) for attr in node.attribute if attr.name == "perm"), None
                    )
                    pending.append(
                        (node.output[0], [shape[axis] for axis in order] if order else shape[::-1])
                    )

    def _is_attention(self, product: onnx.NodeProto) -> bool:
        """Does a product make the scores of a Softmax, or multiply its probabilities with
        values?"""
        scores = self._reaches_softmax(product.output[0], ON_SCORES, self._read_by)
        return scores or self._reaches_softmax(product.input[0], ON_PROBABILITIES, self._made_by)

    def _reaches_softmax(self, start: str, through: frozenset[str], steps: _Steps) -> bool:
        known, pending = {start}, [start]
        while pending:
            for node, values in steps(pending.pop()):
                if node.op_type == "Softmax":
                    return True
                new = set(values) - known if node.op_type in through else set()
                known |= new
                pending.extend(new)
        return False

    def _read_by(self, value: str) -> Iterator[tuple[onnx.NodeProto, Sequence[str]]]:
        for node in self._readers.get(value, ()):
            yield node, node.output

    def _made_by(self, value: str) -> Iterator[tuple[onnx.NodeProto, Sequence[str]]]:
        if value in self._makers:
            yield self._makers[value], self._makers[value].input


_Steps = Callable[[str], Iterator[tuple[onnx.NodeProto, Sequence[str]]]]


def _flag(node: onnx.NodeProto, name: str) -> int:
    """1 if an attribute is set and not 0."""
    return int(any(attr.name == name and attr.i != 0 for attr in node.attribute))
