"""Constants of any size: which numbers they hold, and in which pattern.

A constant that is too large to be held in memory is read once, from its first element to its last
one, in pieces of whole rows. Each reading answers every question about the constant: the few
numbers it holds, if they are few, the band of diagonals on which one of two numbers lies, whether a
row holds 0 everywhere or nowhere, and whether all rows are the same. Every element counts for every
answer. The reading ends early, when it has shown that there is nothing to tell.

    file      external data, and weights that were left in the model's file: read piece by piece
    memory    other tensors: pieces of what is there

Tensors that share the same bytes of a file are read once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.ir.nodes import FOLD_LIMIT, constant_tensor
from fa_compiler.passes.values.constant_patterns import (
    CHANGES_PER_ROW,
    Diagonals,
    TwoNumbers,
    bits,
    diagonals,
)

MAX_NUMBERS = 6
"""More different numbers than this are not remembered."""
EXACT = 2**53
"""Integers beyond this one are not told apart as floats, so they are not remembered."""
PIECE = 1 << 18
"""The number of elements that are read at a time; more where a row is longer. What is computed of a
piece stays in a core's cache: four times as many elements take three times as long each."""

WIDEST = 1 << 24
"""Matrices with longer rows are not read: no mask has so many keys."""

_READ = {
    ir.DataType.BOOL: np.uint8,
    ir.DataType.FLOAT: np.float32,
    ir.DataType.FLOAT16: np.float16,
    ir.DataType.BFLOAT16: np.uint16,
    ir.DataType.DOUBLE: np.float64,
    ir.DataType.INT8: np.int8,
    ir.DataType.INT16: np.int16,
    ir.DataType.INT32: np.int32,
    ir.DataType.INT64: np.int64,
    ir.DataType.UINT8: np.uint8,
    ir.DataType.UINT16: np.uint16,
    ir.DataType.UINT32: np.uint32,
    ir.DataType.UINT64: np.uint64,
}
"""The types that are read, and the NumPy type of their bytes."""


@dataclass(frozen=True)
class LargeContent:
    """What is known of the elements of a large constant.

    `numbers` are all numbers that it holds, None where they are more than MAX_NUMBERS or where one
    is NaN. `pattern` is the band of diagonals in its last two dimensions that are longer than 1,
    the same one for all other indices; None where there is none. `zeros_only` and `no_zeros` say
    that a row, along the last dimension, holds 0 everywhere or nowhere; both are true where
    `numbers` is None, because the reading ended before. `repeated` is the tensor with one row in
    place of all rows, of the same rank, if these are the same.
    """

    numbers: frozenset[float] | None
    pattern: Diagonals | None = None
    zeros_only: bool = True
    no_zeros: bool = True
    repeated: np.ndarray | None = field(default=None, compare=False)


@dataclass
class LargeConstants:
    """The contents of the large constants of one model, each read on the first question about
    it."""

    _known: dict[object, LargeContent | None] = field(default_factory=dict)

    def of(self, value: ir.Value | None) -> LargeContent | None:
        """What is known of a constant that `nodes.constant` does not read; None for all other
        values."""
        tensor = constant_tensor(value)
        if tensor is None or tensor.size <= FOLD_LIMIT or tensor.dtype not in _READ:
            return None
        key = _identity(tensor)
        if key not in self._known:
            self._known[key] = content_of(tensor)
        return self._known[key]


def _identity(tensor: ir.TensorProtocol) -> object:
    """A key that tensors have in common if they share their bytes, type and shape."""
    if isinstance(tensor, ir.ExternalTensor):
        return Path(tensor.path), tensor.offset or 0, tensor.dtype, tuple(tensor.shape.numpy())
    return tensor


def content_of(tensor: ir.TensorProtocol, piece: int = PIECE) -> LargeContent | None:
    """Read a tensor; None where it cannot be read."""
    shape = tuple(tensor.shape.numpy())
    long = [size for size in shape if size != 1]
    if len(long) < 2 or long[-1] > WIDEST:
        return None
    rows, columns = long[-2:]
    reading = _Reading(rows, columns, shape[-1], tensor.size // (rows * columns))
    try:
        for part in _pieces(tensor, rows, columns, piece):
            if not reading.take(part):
                break
    except (
        OSError,
        ValueError,
    ):  # external data is missing or cut short: whoever runs the model is told so
        return None
    content, same = reading.result(), reading.same_rows
    if same is None:
        return content
    row = [axis for axis, size in enumerate(shape) if size != 1][-2]
    single = same.astype(tensor.dtype.numpy()).reshape(*shape[:row], 1, *shape[row + 1 :])
    return replace(content, repeated=single)


def _pieces(tensor: ir.TensorProtocol, rows: int, columns: int, piece: int) -> Iterator[np.ndarray]:
    """The elements in order, in arrays of whole rows, of which none goes beyond a matrix of `rows`
    rows."""
    read, count = _reader(tensor), tensor.size
    step = max(1, piece // columns) * columns
    start = 0
    while start < count:
        end = min(start + step, (start // (rows * columns) + 1) * rows * columns)
        part = read(start, end)
        if tensor.dtype == ir.DataType.BFLOAT16:
            part = (part.astype(np.uint32) << 16).view(np.float32)
        elif tensor.dtype == ir.DataType.FLOAT16:
            part = part.astype(np.float32)
        elif tensor.dtype == ir.DataType.BOOL and part.max(initial=0) > 1:
            raise ValueError("a boolean that is neither 0 nor 1")
        yield part
        start = end


def _reader(tensor: ir.TensorProtocol) -> Callable[[int, int], np.ndarray]:
    """A function that gives the elements of a tensor from one flat position up to another one."""
    kind = np.dtype(_READ[tensor.dtype]).newbyteorder("<")
    if isinstance(tensor, ir.ExternalTensor):
        offset = tensor.offset or 0

        def from_file(start: int, end: int) -> np.ndarray:
            part = np.fromfile(
                tensor.path, kind, end - start, offset=offset + start * kind.itemsize
            )
            if part.size < end - start:
                raise OSError(f"{tensor.path} is too short")
            return part

        return from_file
    flat = tensor.numpy().reshape(-1).view(kind)
    return lambda start, end: flat[start:end]


@dataclass
class _Reading:
    """The reading of `matrices` matrices of `rows` times `columns` elements, one after the other. A
    row of the tensor has `width` elements, which is `columns` or 1."""

    rows: int
    columns: int
    width: int
    matrices: int
    _numbers: list[float | int] = field(default_factory=list)
    _taken: int = 0
    _last: bool = True
    _first: list[np.ndarray] = field(default_factory=list)
    _current: list[np.ndarray] = field(default_factory=list)
    _has_pattern: bool = True
    _zeros_only: bool = False
    _no_zeros: bool = False
    _rows: list[np.ndarray] = field(default_factory=list)
    _has_same_rows: bool = True

    def take(self, part: np.ndarray) -> bool:
        """Take the next elements into account. False when the rest need not be read."""
        numbers = self._numbers
        if not numbers:
            numbers.append(part[0].item())
        first = part == numbers[0]
        if len(numbers) == 1 and not first.all():
            numbers.append(part[int(np.argmin(first))].item())
        known = first
        for number in numbers[1:]:
            known = known | (part == number)
        if not known.all():
            # A NaN is equal to no number, so it is among these.
            numbers.extend(np.unique(part[~known])[: MAX_NUMBERS + 1].tolist())
        if len(numbers) > MAX_NUMBERS or not all(map(_is_exact, numbers)):
            numbers.clear()
            return False
        self._has_same_rows = self._has_same_rows and self._take_rows(
            part.reshape(-1, self.columns)
        )
        self._has_pattern = self._has_pattern and len(numbers) <= 2 and self._take_changes(first)
        zero = (part == 0).reshape(-1, self.width)
        self._zeros_only = self._zeros_only or bool(zero.all(axis=1).any())
        self._no_zeros = self._no_zeros or not bool(zero.any(axis=1).all())
        self._taken += part.size
        self._last = bool(first[-1])
        return True

    def _take_rows(self, rows: np.ndarray) -> bool:
        """Remember the row that a matrix repeats. False when these rows are not the same as those
        before."""
        if self._taken % (self.rows * self.columns) == 0:
            self._rows.append(rows[0].copy())
        return bool((bits(rows) == bits(self._rows[-1])).all())

    @property
    def same_rows(self) -> np.ndarray | None:
        """The row that each matrix repeats, [matrices, columns]; None where the rows differ."""
        if self._numbers and self._has_same_rows:
            return np.stack(self._rows)
        return None

    def _take_changes(self, first: np.ndarray) -> bool:
        """Remember where the first number begins and ends. False when this is no band, or not the
        same in all matrices."""
        size = self.rows * self.columns
        base = self._taken % size
        steps = first[1:] != first[:-1]
        if np.count_nonzero(steps) > CHANGES_PER_ROW * (first.size // self.columns):
            return False
        if base == 0:
            if not first[0]:
                return False
        elif bool(first[0]) != self._last:
            self._current.append(np.array([base]))
        self._current.append(np.flatnonzero(steps) + (base + 1))
        if base + first.size == size:
            changes, self._current = np.concatenate(self._current), []
            if self._first and not np.array_equal(self._first[0], changes):
                return False
            self._first[:] = [changes]
        return True

    def result(self) -> LargeContent:
        """The content, after the last element or after the one that made `take` end."""
        if not self._numbers:
            return LargeContent(None)
        pattern = None
        if len(self._numbers) == 1:
            pattern = Diagonals(None, None, 0, self._numbers[0], self._numbers[0])
        elif self._has_pattern:
            pair = self._numbers[0], self._numbers[1]
            pattern = diagonals(TwoNumbers((self.rows, self.columns), pair, self._first[0]))
        numbers = frozenset(float(number) + 0.0 for number in self._numbers)
        return LargeContent(numbers, pattern, self._zeros_only, self._no_zeros)


def _is_exact(number: float | int) -> bool:
    """Is it a number, and one that a float holds?"""
    return abs(number) <= EXACT if isinstance(number, int) else not math.isnan(number)
