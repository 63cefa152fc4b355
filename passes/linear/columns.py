"""What operators make of the numbers at many lengths at once (walk.py).

The rules are those of operators.py, which know one length. An operator is computed at all lengths
in one go:

    1  where what it reads is the same at all of them
    2  where it works element by element (`BY_ELEMENT`): the numbers of each length are one row of
       an array, and the rule broadcasts
    3  where it only moves elements (`MOVING`), by integers that are the same at all lengths: the
       rule moves the numbers of the places, and each row is read at these places
    4  Shape and Size, from the formulas of the sizes

Everything else is computed at each length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeGuard

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.ir.nodes import all_known, input_of, instances, is_op, without_none
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
    """The numbers of a value: the same ones at all lengths."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape at each length."""
        return self.array.shape

    @property
    def count(self) -> int:
        """The elements at a length."""
        return math.prod(self.shape)

    def at(self, place: int) -> np.ndarray:
        """The numbers at one length."""
        return self.array

    def as_one(self) -> Column:
        """The column in its simplest form."""
        return self

    def tensor(self, rank: int) -> Tensor:
        """The numbers of all lengths, which are broadcast with rows of so many dimensions."""
        return exact(self.array)

    def rows(self, lengths: int) -> np.ndarray:
        """The numbers of each length in one row."""
        return np.broadcast_to(self.array.reshape(1, self.count), (lengths, self.count))


class Rows(Column):
    """Numbers of its own at each length, those of all lengths one below the other."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape at each length."""
        return self.array.shape[1:]

    def at(self, place: int) -> np.ndarray:
        """The numbers at one length."""
        return np.asarray(self.array[place])

    def as_one(self) -> Column:
        """The column without rows, where these are all the same."""
        return Column(self.array[0]) if (self.array == self.array[:1]).all() else self

    def tensor(self, rank: int) -> Tensor:
        """The numbers of all lengths: rows of so many dimensions."""
        lengths, *shape = self.array.shape
        return exact(self.array.reshape(lengths, *[1] * (rank - len(shape)), *shape))

    def rows(self, lengths: int) -> np.ndarray:
        """The numbers of each length in one row."""
        return self.array.reshape(lengths, self.count)


@dataclass(frozen=True)
class Ragged:
    """The numbers of a value at each length, where their shapes differ."""

    each: Sequence[np.ndarray]

    @property
    def count(self) -> int:
        """The most elements at a length."""
        return max(array.size for array in self.each)

    def at(self, place: int) -> np.ndarray:
        """The numbers at one length."""
        return self.each[place]

    def as_one(self) -> Ragged:
        """The column in its simplest form."""
        return self


Operands: TypeAlias = Sequence[Column | None]
"""What a node reads, None where it is absent."""


def of_lengths(arrays: Sequence[np.ndarray]) -> Column | Ragged:
    """The numbers at each length as a column."""
    if len({array.shape for array in arrays}) > 1:
        return Ragged(arrays)
    return Rows(np.stack(arrays))


def exact_results(
    node: ir.Node, operands: Sequence[Tensor | None], info: ShapeInfo
) -> list[np.ndarray] | None:
    """The numbers that a node gives; None where they are not known. Raises FailedError where it
    fails."""
    try:
        results = evaluated(node, operands, info.dtype(input_of(node, 0)), False)
    except UnknownError:
        return None
    return all_known(result.exact for result in results) or None


def at_once(
    node: ir.Node, operands: Sequence[Column | Ragged | None], info: ShapeInfo
) -> list[Column] | None:
    """What a node makes of known operands at all lengths in one go; None where it has to be
    computed at each, or is not known. Raises FailedError where it fails at all of them."""
    if not _have_shapes(operands):
        return None
    if not instances(operands, Rows):  # 1: the same at all lengths
        return [*map(Column, exact_results(node, _tensors(operands), info) or ())]
    if node.op_type in BY_ELEMENT:  # 2: rows
        return _by_element(node, operands, info)
    return _moved(node, operands, info) if node.op_type in MOVING else None  # 3


def _have_shapes(operands: Sequence[Column | Ragged | None]) -> TypeGuard[Operands]:
    """Has each operand one shape at all lengths?"""
    return not instances(operands, Ragged)


def _tensors(operands: Operands, rank: int = 0) -> list[Tensor | None]:
    """The numbers of all lengths, rows of so many dimensions among them."""
    return [if_known(lambda known: known.tensor(rank), column) for column in operands]


def _by_element(node: ir.Node, operands: Operands, info: ShapeInfo) -> list[Column] | None:
    """Arithmetic of rows, which get as many dimensions as the operand that has most."""
    rank = max(len(column.shape) for column in without_none(operands))
    results = exact_results(node, _tensors(operands, rank), info)
    return None if results is None else [*map(Rows, results)]


def _moved(node: ir.Node, operands: Operands, info: ShapeInfo) -> list[Column] | None:
    """Rows that are read at places."""  # 3
    count_of_sources = len(operands) if is_op(node, "Concat") else 1
    sources, others = without_none(operands[:count_of_sources]), operands[count_of_sources:]
    if instances(others, Rows):
        return None
    lengths = len(instances(sources, Rows)[0].array)
    places, count = list[Tensor | None](), 0
    for column in sources:
        places.append(exact(1 + count + np.arange(column.count).reshape(column.shape)))
        count += column.count
    results = exact_results(node, [*places, *_tensors(others)], info)
    if results is None:
        return None
    rows = [column.rows(lengths) for column in sources]
    elements = np.concatenate([np.zeros((lengths, 1), rows[0].dtype), *rows], 1)
    return [
        Rows(elements[:, place.reshape(-1)].reshape(lengths, *place.shape)) for place in results
    ]


def of_sizes(
    node: ir.Node, info: ShapeInfo, sizes: Mapping[str, np.ndarray]
) -> list[Column] | None:
    """What Shape or Size gives, where the sizes of these names are known at all lengths; None where
    another one is needed."""  # 4
    dims = info.shape(node.inputs[0])
    arrays = if_known(lambda known: all_known(dim.evaluate_all(sizes) for dim in known), dims)
    if arrays is None:
        return None
    (lengths,) = np.broadcast_shapes(*(size.shape for size in sizes.values()))
    columns = np.empty((lengths, len(arrays)), np.int64)
    for axis, array in enumerate(arrays):
        columns[:, axis] = array
    if is_op(node, "Size"):
        return [Rows(columns.prod(1))]
    axes = exact_results(node, [Tensor(tuple(range(len(arrays))))], info)
    return None if axes is None else [Rows(columns[:, axes[0]])]
