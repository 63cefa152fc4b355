"""Masks that follow from positions alone: which keys a row attends, and the ways exporters compute that.

A pattern keeps key j of row i where lower <= j - i - offset <= upper; the offset is 0, or T - S for rows that are the
last of all positions (cached keys). Each writer gives a boolean tensor [S, T] or [1, 1, S, T], true where kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto, helper

from tests.passes.writer import Array, Writer


@dataclass(frozen=True)
class Pattern:
    """A band of the scores."""

    upper: int | None
    lower: int | None = None
    at_end: bool = False

    def kept(self, rows: int, columns: int, moved: int = 0) -> Array:
        """The band as a boolean matrix, its upper bound moved."""
        offset = columns - rows if self.at_end else 0
        distance = np.arange(columns)[None, :] - np.arange(rows)[:, None] - offset
        keep = np.ones((rows, columns), np.bool_)
        if self.upper is not None:
            keep &= distance <= self.upper + moved
        if self.lower is not None:
            keep &= distance >= self.lower
        return keep


PATTERNS: dict[str, Pattern] = {
    "causal": Pattern(0),
    "cached": Pattern(0, at_end=True),
    "window": Pattern(0, -2),
    "cached_window": Pattern(0, -2, at_end=True),
    "band": Pattern(1, -1),
    "ahead": Pattern(1),
    "strict": Pattern(-1),
    "future": Pattern(None, 0),
}
BUFFER = 24
"""Rows and columns of a triangle that is kept in the model and cut to size."""

Written = Callable[[Writer, Pattern, str], str]
"""The third is what moves the upper bound, an input of one element, or nothing."""


def _positions(writer: Writer, letter: str, kind: str) -> str:
    """0, 1, ... as a vector."""
    if kind == "range":
        return writer.range(letter)
    if kind == "cumsum":
        one = helper.make_tensor("one", TensorProto.INT64, [1], [1])
        ones = writer.op("ConstantOfShape", writer.shape([letter]), value=one)
        counted = writer.op("CumSum", ones, writer.const(0, "int64"))
        return writer.op("Sub", counted, writer.const(1, "int64"))
    buffer = writer.const(np.arange(BUFFER), "int64")
    return writer.slice(buffer, [(0, writer.const([0], "int64"), writer.measured(letter))])


def _rows_and_columns(writer: Writer, pattern: Pattern, kind: str) -> tuple[str, str]:
    rows, columns = _positions(writer, "S", kind), _positions(writer, "T", kind)
    if pattern.at_end:
        rows = writer.op("Add", rows, _offset(writer))
    return writer.unsqueeze(rows, 1), writer.unsqueeze(columns, 0)


def _offset(writer: Writer) -> str:
    """T - S as a vector of one element; where there is a cache, its length."""
    if "P" in writer.where:
        return writer.measured("P")
    return writer.op("Sub", writer.measured("T"), writer.measured("S"))


def _compared(kind: str) -> Written:
    """Columns against rows."""

    def write(writer: Writer, pattern: Pattern, bound: str) -> str:
        rows, columns = _rows_and_columns(writer, pattern, kind)
        tests = []
        if pattern.upper is not None:
            last = writer.op("Add", rows, writer.const(pattern.upper, "int64")) if pattern.upper else rows
            last = writer.op("Add", last, bound) if bound else last
            tests.append(writer.at_most(columns, last))
        if pattern.lower is not None:
            before = writer.op("Add", rows, writer.const(pattern.lower - 1, "int64"))
            tests.append(writer.op("Greater", columns, before))
        return tests[0] if len(tests) == 1 else writer.op("And", *tests)

    return write


def _subtracted(writer: Writer, pattern: Pattern, bound: str) -> str:
    """The distance against numbers."""
    rows, columns = _rows_and_columns(writer, pattern, "range")
    distance = writer.op("Sub", rows, columns)
    tests = []
    if pattern.upper is not None:
        tests.append(writer.op("Greater", distance, writer.const(-pattern.upper - 1, "int64")))
    if pattern.lower is not None:
        tests.append(writer.op("Less", distance, writer.const([-pattern.lower + 1], "int64")))
    return tests[0] if len(tests) == 1 else writer.op("And", *tests)


def _ones(writer: Writer, filled: bool) -> str:
    shape = writer.shape(["S", "T"])
    if filled:
        return writer.op("ConstantOfShape", shape, value=helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0]))
    return writer.op("Expand", writer.const(1, "float32"), shape)


def _diagonal(writer: Writer, pattern: Pattern, number: int) -> list[str]:
    """Trilu's second input, none where it is 0."""
    if not pattern.at_end:
        return [writer.const(number, "int64")] if number else []
    offset = writer.op("Squeeze", _offset(writer), writer.const([0], "int64"))
    return [writer.op("Add", offset, writer.const(number, "int64")) if number else offset]


def _triangle(filled: bool) -> Written:
    """The lower part of the upper part of a matrix of ones."""

    def write(writer: Writer, pattern: Pattern, bound: str) -> str:
        keep = _ones(writer, filled)
        if pattern.lower is not None:
            keep = writer.op("Trilu", keep, *_diagonal(writer, pattern, pattern.lower), upper=1)
        if pattern.upper is not None:
            keep = writer.op("Trilu", keep, *_diagonal(writer, pattern, pattern.upper), upper=0)
        return writer.op("Cast", keep, to=TensorProto.BOOL)

    return write


def _inverted_triangle(writer: Writer, pattern: Pattern, bound: str) -> str:
    """Not the part above the band, and not the part below."""
    parts = []
    for number, upper in ((pattern.upper, 1), (pattern.lower, 0)):
        if number is not None:
            beyond = _diagonal(writer, pattern, number + 1 if upper else number - 1)
            parts.append(writer.op("Trilu", _ones(writer, True), *beyond, upper=upper))
    drop = parts[0] if len(parts) == 1 else writer.op("Max", *parts)
    return writer.op("Not", writer.op("Cast", drop, to=TensorProto.BOOL))


def _cut(rank: int) -> Written:
    """A constant square cut to size, rows from the offset on."""

    def write(writer: Writer, pattern: Pattern, bound: str) -> str:
        square = Pattern(pattern.upper, pattern.lower).kept(BUFFER, BUFFER)
        buffer = writer.const(square.reshape([1] * (rank - 2) + [BUFFER, BUFFER]))
        zero = writer.const([0], "int64")
        first, last = zero, writer.measured("S")
        if pattern.at_end:
            first, last = _offset(writer), writer.measured("T")
        return writer.slice(buffer, [(rank - 2, first, last), (rank - 1, zero, writer.measured("T"))])

    return write


def filled_triangle(writer: Writer, pattern: Pattern, fill: float, dtype: str) -> str:
    """0 where the pattern keeps, a number above: torch's triu of full."""
    shape = writer.shape(["S", "T"])
    if len(writer.nodes) % 2 and dtype != "bfloat16":
        number = helper.make_tensor("fill", helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), [1], [fill])
        full = writer.op("ConstantOfShape", shape, value=number)
    else:
        full = writer.op("Expand", writer.const(fill, dtype), shape)
    return writer.op("Trilu", full, *_diagonal(writer, pattern, (pattern.upper or 0) + 1), upper=1)


WRITTEN: dict[str, Written] = {
    "range": _compared("range"),
    "cumsum": _compared("cumsum"),
    "positions": _compared("buffer"),
    "difference": _subtracted,
    "trilu": _triangle(filled=False),
    "trilu_filled": _triangle(filled=True),
    "triu_not": _inverted_triangle,
    "slice": _cut(2),
    "slice_lifted": _cut(4),
}
BOUNDED = ("range", "cumsum", "positions")
"""Those whose bound can come from an input."""
SINCE = {"range": 11, "cumsum": 11, "positions": 10, "difference": 11, "slice": 10, "slice_lifted": 10}
"""The first opset in which a writer works, 14 where it is not listed."""
