"""Elements of tensors of known content, as numbers that depend on the index (for positions.py).

A tensor may hold one number everywhere, integers that step evenly along each dimension, or two
numbers of which one is on a band of diagonals, also together with a prefix of columns, or in blocks
on the diagonal. The elements of other tensors are unknown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.cases import Number, case
from fa_compiler.passes.algebra.formula import (
    Affine,
    ElementComparison,
    Formula,
    Index,
    at_least_zero,
    conjunction,
    disjunction,
)
from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.algebra.symbolic import consts
from fa_compiler.passes.ops.context import Shape
from fa_compiler.passes.values.constant_patterns import Diagonals, TwoNumbers, diagonals, even_steps
from fa_compiler.passes.values.large_constants import LargeContent


@dataclass
class BlockLabels:
    """Vectors of int64 that number the blocks on the diagonals of constant masks. They are in no
    graph: `is_loose`."""

    _made: dict[tuple[int, ...], ir.Value] = field(default_factory=dict)

    def of(self, ends: tuple[int, ...]) -> ir.Value:
        """The number of its block for each position; the same value for the same ends."""
        if ends not in self._made:
            labels = np.repeat(np.arange(len(ends), dtype=np.int64), np.diff(ends, prepend=0))
            tensor = ir.tensor(labels, name="blocks")
            shape, kind = ir.Shape(labels.shape), ir.TensorType(tensor.dtype)
            self._made[ends] = ir.Value(name="blocks", shape=shape, type=kind, const_value=tensor)
        return self._made[ends]

    def is_loose(self, value: ir.Value) -> bool:
        """Is this one of these vectors? Who reads it has to add its content to the graph."""
        return any(value is element for element in self._made.values())


def number_of_content(
    content: np.ndarray, index: Index, rank: int, labels: BlockLabels
) -> Number | None:
    """The element at `index` of a small tensor; None when it is unknown."""
    if content.dtype != object:
        return number_of_array(content, index, rank, labels)
    if content.size == 1:
        return Affine.number(content.reshape(-1)[0], rank)
    numbers = consts(content.reshape(-1))
    if None not in numbers:
        return number_of_array(
            np.array(numbers, dtype=np.int64).reshape(content.shape), index, rank, labels
        )
    return None


def number_of_array(
    array: np.ndarray, index: Index, rank: int, labels: BlockLabels
) -> Number | None:
    """The element at `index` of an array of one of the kinds above; None for other arrays."""
    if array.size == 0:
        return None
    flat = array.reshape(-1)
    if array.size == 1 or (flat == flat[0]).all():
        return scalar(array, rank)
    if np.issubdtype(array.dtype, np.integer) and (even := even_steps(array)) is not None:
        total = Affine.number(int(flat[0]), rank)
        for place, step in zip(index, even, strict=True):
            total = total + place.times(step)
        return total
    return _from_bands(array, index, rank, labels)


def _from_bands(array: np.ndarray, index: Index, rank: int, labels: BlockLabels) -> Number | None:
    """The element of an array of two numbers, one of them on a band of diagonals of the two
    dimensions along which the array varies; None for other arrays."""
    axes = [axis for axis, size in enumerate(array.shape) if size > 1 and _varies(array, axis)]
    if len(axes) != 2:
        return None
    matrix = TwoNumbers.of(
        array[tuple(slice(None) if axis in axes else 0 for axis in range(array.ndim))]
    )
    pattern = if_known(diagonals, matrix)
    if pattern is None:
        return None
    return _on_diagonals(pattern, index[axes[0]], index[axes[1]], rank, labels)


def number_of_large(
    content: LargeContent, shape: Shape, index: Index, rank: int, labels: BlockLabels
) -> Number | None:
    """The element at `index` of a large constant of this shape; None where no pattern is known."""
    if content.pattern is None:
        return None
    row, column = [axis for axis, size in enumerate(shape) if size.const != 1][-2:]
    return _on_diagonals(content.pattern, index[row], index[column], rank, labels)


def _on_diagonals(
    pattern: Diagonals, row: Affine, column: Affine, rank: int, labels: BlockLabels
) -> Number | None:
    """The element in this row and column of a matrix with bands of diagonals."""
    distance = column - row
    parts: list[Formula] = []
    if pattern.ends:
        parts.append(ElementComparison(labels.of(pattern.ends), (row,), (column,)))
    if pattern.lower is not None:
        parts.append(at_least_zero(distance + -pattern.lower))
    if pattern.upper is not None:
        parts.append(at_least_zero(Affine.number(pattern.upper, rank) - distance))
    condition = conjunction(parts)
    if pattern.prefix:
        condition = disjunction(
            (condition, at_least_zero(Affine.number(pattern.prefix - 1, rank) - column))
        )
    return case(condition, _number(pattern.inside, rank), _number(pattern.outside, rank))


def _number(item: float | int, rank: int) -> Number:
    return item if isinstance(item, float) else Affine.number(int(item), rank)


def scalar(array: np.ndarray, rank: int) -> Number | None:
    """The first element, as a number for masks of this rank; None for NaN."""
    item = array.reshape(-1)[0]
    if np.issubdtype(array.dtype, np.integer) or array.dtype == np.bool_:
        return Affine.number(int(item), rank)
    if math.isnan(float(item)):
        return None
    return float(item)


def _varies(array: np.ndarray, axis: int) -> bool:
    return bool((array != np.take(array, [0], axis=axis)).any())
