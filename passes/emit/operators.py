"""The standard operators that the passes write, a method for each.

A method has the name of its operator, with underscores; a word of Python has one behind it. The
type of a result is what shape inference (passes/ops) makes of the operands.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.ir.nodes import attribute_values, graph_opset
from fa_compiler.passes.ops.reduce import axes_as_input
from fa_compiler.passes.values.shapes import ShapeInfo

AttrValue: TypeAlias = int | float | str | Sequence[int]
"""What an attribute of a node can be."""
Ints: TypeAlias = ir.Value | Sequence[int]
"""A vector of integers: a value, int64 [n], or the numbers of a constant."""


def content_key(array: np.ndarray) -> tuple[object, ...]:
    """What is equal for constants of equal content.

    Read-only arrays are large and shared, so they are compared by identity. A single number of
    NumPy is read-only, too, but no array: nothing keeps it, and the next one may be at the same
    place.
    """
    shared = isinstance(array, np.ndarray) and not array.flags.writeable
    return array.dtype.str, array.shape, id(array) if shared else array.tobytes()


class Operators(ABC):
    """What writes nodes for a graph. `info` knows the values that they read and make."""

    graph: ir.Graph
    info: ShapeInfo

    @property
    def opset(self) -> int:
        """The standard opset of the graph."""
        return graph_opset(self.graph)

    @abstractmethod
    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attrs: Mapping[str, AttrValue] | None = None,
    ) -> ir.Value:
        """The first output of a new node of the standard domain."""

    @abstractmethod
    def ints(self, numbers: Sequence[int]) -> ir.Value:
        """A constant vector of int64."""

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        """x in another type; as it is where it has this one."""
        return x if self.info.dtype(x) == dtype else self.op("Cast", [x], {"to": int(dtype)})

    def again(self, node: ir.Node, inputs: Sequence[ir.Value | None]) -> ir.Value:
        """The first output of the operator of a standard node, with its attributes, on other
        inputs."""
        return self.op(node.op_type, inputs, attribute_values(node))

    def _vector(self, numbers: Ints) -> ir.Value:
        return numbers if isinstance(numbers, ir.Value) else self.ints(numbers)

    # -- element by element, operands broadcast to each other -----------------------------------

    def add(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """x + y."""
        return self.op("Add", [x, y])

    def sub(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """x - y."""
        return self.op("Sub", [x, y])

    def mul(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """x * y."""
        return self.op("Mul", [x, y])

    def div(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """x / y; of integers, cut towards 0."""
        return self.op("Div", [x, y])

    def mod(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """The rest of x / y, with the sign of y."""
        return self.op("Mod", [x, y])

    def min(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """The smaller one of x and y."""
        return self.op("Min", [x, y])

    def max(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """The larger one of x and y."""
        return self.op("Max", [x, y])

    def neg(self, x: ir.Value) -> ir.Value:
        """-x."""
        return self.op("Neg", [x])

    def sqrt(self, x: ir.Value) -> ir.Value:
        """The square root of x."""
        return self.op("Sqrt", [x])

    def exp(self, x: ir.Value) -> ir.Value:
        """e to the power x."""
        return self.op("Exp", [x])

    def sigmoid(self, x: ir.Value) -> ir.Value:
        """1 / (1 + exp(-x))."""
        return self.op("Sigmoid", [x])

    def equal(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """x == y, booleans."""
        return self.op("Equal", [x, y])

    def less(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """x < y, booleans."""
        return self.op("Less", [x, y])

    def greater(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """x > y, booleans."""
        return self.op("Greater", [x, y])

    def greater_or_equal(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """x >= y, booleans, from opset 12 on."""
        return self.op("GreaterOrEqual", [x, y])

    def and_(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """x and y, booleans."""
        return self.op("And", [x, y])

    def or_(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """x or y, booleans."""
        return self.op("Or", [x, y])

    def not_(self, x: ir.Value) -> ir.Value:
        """Not x, booleans."""
        return self.op("Not", [x])

    def where(self, condition: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
        """x where the condition holds, and y elsewhere."""
        return self.op("Where", [condition, x, y])

    # -- products and sums ----------------------------------------------------------------------

    def matmul(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """The product of the matrices in the last two axes."""
        return self.op("MatMul", [x, y])

    def cum_sum(self, x: ir.Value, axis: ir.Value) -> ir.Value:
        """The running sum along an axis, which is a value of one integer."""
        return self.op("CumSum", [x, axis])

    def reduce(self, op_type: str, x: ir.Value, axes: Sequence[int], **attrs: int) -> ir.Value:
        """x reduced along some axes by an operator such as ReduceMin, with these attributes beside
        the axes."""
        if self.opset >= axes_as_input(op_type):
            return self.op(op_type, [x, self.ints(axes)], attrs)
        return self.op(op_type, [x], {"axes": tuple(axes), **attrs})

    # -- moves ----------------------------------------------------------------------------------

    def reshape(self, x: ir.Value, shape: Ints) -> ir.Value:
        """The elements of x in another shape, in which 0 stands for the size of x and -1 for what
        is left."""
        return self.op("Reshape", [x, self._vector(shape)])

    def expand(self, x: ir.Value, shape: Ints) -> ir.Value:
        """x broadcast to a shape."""
        return self.op("Expand", [x, self._vector(shape)])

    def transpose(self, x: ir.Value, perm: Sequence[int]) -> ir.Value:
        """x with its axes in another order; as it is where they stay."""
        return x if list(perm) == sorted(perm) else self.op("Transpose", [x], {"perm": tuple(perm)})

    def concat(self, parts: Sequence[ir.Value], axis: int) -> ir.Value:
        """Tensors joined along an axis; a single one as it is."""
        return parts[0] if len(parts) == 1 else self.op("Concat", parts, {"axis": axis})

    def slice(
        self, x: ir.Value, starts: Ints, ends: Ints, axes: Ints, steps: Ints | None = None
    ) -> ir.Value:
        """x from starts to ends along some axes, from opset 10 on."""
        bounds = (starts, ends, axes) if steps is None else (starts, ends, axes, steps)
        return self.op("Slice", [x, *map(self._vector, bounds)])

    def gather(self, x: ir.Value, indices: Ints, axis: int) -> ir.Value:
        """The parts of x at these indices along an axis."""
        return self.op("Gather", [x, self._vector(indices)], {"axis": axis})

    def scatter_nd(self, x: ir.Value, indices: ir.Value, updates: ir.Value) -> ir.Value:
        """x with updates at the points of the indices, int64 [..., leading axes]."""
        return self.op("ScatterND", [x, indices, updates])

    def shape_of(self, x: ir.Value) -> ir.Value:
        """The shape of x, int64 [rank]."""
        return self.op("Shape", [x])

    def dimension(self, x: ir.Value, axis: int) -> ir.Value:
        """The size of one dimension of x, int64 [1]."""
        return self.gather(self.shape_of(x), [axis], 0)
