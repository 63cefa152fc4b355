"""What operators make of the numbers at many lengths at once (walk.py).

The rules are those of operators.py, which know one length. An operator is computed at all lengths in one go:

    1  where what it reads is the same at all of them
    2  where it works element by element (`BY_ELEMENT`): the numbers of each length are one row of an array, and the
       rule broadcasts
    3  where it only moves elements (`MOVING`), by integers that are the same at all lengths: the rule moves the numbers
       of the places, and each row is read at these places
    4  Shape and Size, from the formulas of the sizes

Everything else is computed at each length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.ir.nodes import all_known, is_op, without_none
from fa_compiler.passes.linear.operators import EXACT, evaluated
from fa_compiler.passes.linear.tensors import Tensor, UnknownError, exact
from fa_compiler.passes.ops.movers import ARRAY_MOVES
from fa_compiler.passes.values.shapes import ShapeInfo

BY_ELEMENT = frozenset({*EXACT, "Cast", "Mod"} - {"MatMul"})
"""The operators whose rule broadcasts its operands."""
MOVING = frozenset({*ARRAY_MOVES, "Identity", "Concat", "Split", "Pad", "Trilu"})
"""Those that give elements of what they read, and zeros."""


@dataclass(frozen=True)
class Column:
    """The numbers of a value at all lengths."""

    array: np.ndarray | None = None
    """The numbers, or those of all lengths one below the other; None where their shapes differ."""
    varies: bool = False
    """Has each length numbers of its own in `array`?"""
    each: Sequence[np.ndarray] = ()
    """The numbers at each length, where their shapes differ."""

    def at(self, place: int) -> np.ndarray:
        """The numbers at one length."""
        if self.array is None:
            return self.each[place]
        return self.array[place] if self.varies else self.array

    def as_one(self) -> Column:
        """The column, where all lengths have the same numbers as numbers that do not vary."""
        if self.array is not None and self.varies and (self.array == self.array[:1]).all():
            return Column(self.array[0])
        return self

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape at each length; None where it differs."""
        return None if self.array is None else self.array.shape[self.varies :]

    @property
    def count(self) -> int:
        """The most elements at a length."""
        if self.shape is None:
            return max(array.size for array in self.each)
        return math.prod(self.shape)


def of_lengths(arrays: Sequence[np.ndarray]) -> Column:
    """The numbers at each length as a column."""
    if len({array.shape for array in arrays}) > 1:
        return Column(each=arrays)
    return Column(np.stack(arrays), True)


def exact_results(node: ir.Node, operands: Sequence[Tensor | None], info: ShapeInfo) -> list[np.ndarray] | None:
    """The numbers that a node gives; None where they are not known. Raises FailedError where it fails."""
    dtype = info.dtype(node.inputs[0]) if node.inputs else None
    try:
        results = evaluated(node, operands, dtype, False)
    except UnknownError:
        return None
    return all_known(result.exact for result in results or ()) or None


def at_once(node: ir.Node, operands: Sequence[Column | None], info: ShapeInfo) -> list[Column] | None:
    """What a node makes of known operands at all lengths in one go; None where it has to be computed at each, or is not
    known. Raises FailedError where it fails at all of them."""
    given = without_none(operands)
    if any(column.array is None for column in given):  # a shape of its own at each length
        return None
    if not any(column.varies for column in given):  # 1: the same at all lengths
        return [*map(Column, exact_results(node, [*map(_tensor, operands)], info) or ())]
    if node.op_type in BY_ELEMENT:  # 2: rows
        return _by_element(node, operands, info)
    return _moved(node, operands, info) if node.op_type in MOVING else None  # 3


def _tensor(column: Column | None) -> Tensor | None:
    return None if column is None else if_known(exact, column.array)


def _by_element(node: ir.Node, operands: Sequence[Column | None], info: ShapeInfo) -> list[Column] | None:
    """Arithmetic of rows, which get as many dimensions as the operand that has most."""
    rank = max(len(column.shape or ()) for column in without_none(operands))

    def tensor(column: Column | None) -> Tensor | None:
        if column is None or column.array is None or not column.varies:
            return _tensor(column)
        lengths, *shape = column.array.shape
        return exact(column.array.reshape(lengths, *[1] * (rank - len(shape)), *shape))

    results = exact_results(node, [tensor(column) for column in operands], info)
    return None if results is None else [Column(array, True) for array in results]


def _moved(node: ir.Node, operands: Sequence[Column | None], info: ShapeInfo) -> list[Column] | None:
    """Rows that are read at places."""  # 3
    count_of_sources = len(operands) if is_op(node, "Concat") else 1
    sources, others = without_none(operands[:count_of_sources]), operands[count_of_sources:]
    if any(column.varies for column in without_none(others)):
        return None
    lengths = next(len(column.array) for column in sources if column.array is not None and column.varies)
    places, rows, count = list[Tensor | None](), list[np.ndarray](), 0
    for column in sources:
        assert column.array is not None and column.shape is not None
        places.append(exact(1 + count + np.arange(column.count).reshape(column.shape)))
        flat = column.array.reshape(lengths if column.varies else 1, column.count)
        rows.append(np.broadcast_to(flat, (lengths, column.count)))
        count += column.count
    results = exact_results(node, [*places, *map(_tensor, others)], info)
    if results is None:
        return None
    elements = np.concatenate([np.zeros((lengths, 1), rows[0].dtype), *rows], 1)
    return [Column(elements[:, place.reshape(-1)].reshape(lengths, *place.shape), True) for place in results]


def of_sizes(node: ir.Node, info: ShapeInfo, sizes: Mapping[str, np.ndarray]) -> list[Column] | None:
    """What Shape or Size gives, where the sizes of these names are known at all lengths; None where another one is
    needed."""  # 4
    dims = info.shape(node.inputs[0])
    arrays = all_known(dim.evaluate_all(sizes) for dim in dims or ())
    if dims is None or arrays is None:
        return None
    (lengths,) = np.broadcast_shapes(*(size.shape for size in sizes.values()))
    columns = np.empty((lengths, len(arrays)), np.int64)
    for axis, array in enumerate(arrays):
        columns[:, axis] = array
    if is_op(node, "Size"):
        return [Column(columns.prod(1), True)]
    axes = exact_results(node, [Tensor(tuple(range(len(dims))))], info)
    return None if axes is None else [Column(columns[:, axes[0]], True)]
