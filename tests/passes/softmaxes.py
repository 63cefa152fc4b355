"""The ways to write a softmax: one function each, which takes the scores, the axis (negative) and their rank."""

from __future__ import annotations

from collections.abc import Callable

from tests.passes.writer import Writer

Softmax = Callable[[Writer, str, int, int], str]


def _op(writer: Writer, scores: str, axis: int, rank: int) -> str:
    # Negative axes are younger than the operator.
    return writer.op("Softmax", scores, axis=axis if writer.opset >= 11 else axis + rank)


def _op_positive(writer: Writer, scores: str, axis: int, rank: int) -> str:
    return writer.op("Softmax", scores, axis=axis + rank)


def _less_peak(writer: Writer, scores: str, axis: int, rank: int) -> str:
    return writer.op("Sub", scores, writer.reduce("ReduceMax", scores, axis, rank))


def _shifted(writer: Writer, scores: str, axis: int, rank: int) -> str:
    """Of the scores less their own maximum."""
    return _op(writer, _less_peak(writer, scores, axis, rank), axis, rank)


def _decomposed(writer: Writer, scores: str, axis: int, rank: int) -> str:
    exponential = writer.op("Exp", _less_peak(writer, scores, axis, rank))
    return writer.op("Div", exponential, writer.reduce("ReduceSum", exponential, axis, rank))


def _reciprocal(writer: Writer, scores: str, axis: int, rank: int) -> str:
    exponential = writer.op("Exp", _less_peak(writer, scores, axis, rank))
    total = writer.op("Reciprocal", writer.reduce("ReduceSum", exponential, axis, rank))
    return writer.op("Mul", exponential, total)


def _logarithm(writer: Writer, scores: str, axis: int, rank: int) -> str:
    return writer.op("Exp", writer.op("LogSoftmax", scores, axis=axis if writer.opset >= 11 else axis + rank))


def _logarithm_written_out(writer: Writer, scores: str, axis: int, rank: int) -> str:
    shifted = _less_peak(writer, scores, axis, rank)
    total = writer.reduce("ReduceSum", writer.op("Exp", shifted), axis, rank)
    return writer.op("Exp", writer.op("Sub", shifted, writer.op("Log", total)))


SOFTMAXES: dict[str, Softmax] = {
    "op": _op,
    "op_positive": _op_positive,
    "shifted": _shifted,
    "decomposed": _decomposed,
    "reciprocal": _reciprocal,
    "logarithm": _logarithm,
    "logarithm_written_out": _logarithm_written_out,
}
