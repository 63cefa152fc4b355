"""Exponentials to any base, and the softmax that is written as the exponential of a logarithm.

    p = x.log_softmax(-1).exp()
    p = (x - x.exp().sum(-1, keepdim=True).log()).exp()
    p = 2 ** (y - (2 ** y).sum(-1, keepdim=True).log2())          y = x * math.log2(math.e)

Grammar; `a` are the axes of the softmax, and exp(y) stands for one exponential, to the base b
everywhere:

    exp(y) :=
      1     Exp(y) | Pow(b, y)                             b > 0 one number
      2   | exp(Mul(y, c)) | exp(Div(y, 1/c))              c > 0 one number, which counts as part of
                                                           the base
    softmax :=
      3     exp(LogSoftmax(x))                             to the base e
      4   | exp(Sub(x, logsumexp)) | exp(Add(x, Neg(logsumexp)))
      5   | exp(Sub(d, log_total))                         d = Sub(x, row_max), log_total of exp(d)
    logsumexp :=                                           a per_row of row_reductions.py
      6     times(ReduceLogSumExp(y, a))                   y = x times log(b), also x itself for the
                                                           base e
      7   | log_total                                      of exp(x): it overflows, as row_max is
                                                           missing
      8   | Add(log_total, row_max)                        of exp(Sub(x, row_max))
    log_total :=
      9     times(Log(ReduceSum(e, a))) | times(ReduceLogSum(e, a))
                                                           e = exp(.) as said in 5, 7 and 8; Abs of
                                                           the sum changes nothing, and jax writes
                                                           it there
    times(l) :=                                            the logarithm to the base b
     10     l | Mul(l, 1/log(b)) | Div(l, log(b))          none for the base e
    row_max :=
     11     ReduceMax(x, a), or that where it is finite and else 0, see row_max.py; the same one
            everywhere

Layout may stand between all of these, as in a row of row_reductions.py. Where row_max is something
else than the maximum, the exponentials may overflow.

Sound because exp(x - log(sum(exp(x)))) is exp(x) / sum(exp(x)), the softmax of log(b) * x, in every
base. The logarithm of the total is between 0 and that of the number of keys, so that (5) rounds
like the softmax itself. In 4 the difference rounds like x itself, so that a row of numbers such as
-1e9 is rounded away. It is marked, and the matcher takes it only where no such number can be added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import any_op, is_op, operand_at
from fa_compiler.passes.matching.row_max import finite_row_max
from fa_compiler.passes.matching.row_reductions import (
    SHIFTED,
    SUMS,
    Reduction,
    cast_reduced_by,
    is_per_row,
    reduction_of,
    row_source,
    shifted_by,
    unrepeated,
)
from fa_compiler.passes.values.patterns import Bind, Match, OneOf, Op, match, matches
from fa_compiler.passes.values.shapes import ShapeInfo

ROUNDING = 2.0**-22
"""How far a product of rounded float32 constants may be from 1, relatively, to count as 1: no more
than a score's own rounding."""
X = Bind("x")
EXPONENTIAL = OneOf((Op("Exp", X), Op("Pow", Bind("base"), X)))  # 1
TIMES = OneOf((Op("Mul", X, Bind("factor")), Op("Div", X, Bind("divisor"))))  # 2 and 10
ADDED = Op("Add", Bind("log"), Bind("row_max"))  # 8
LESS = OneOf((Op("Sub", X, Bind("less")), Op("Add", X, Op("Neg", Bind("less")))))  # 4 and 5


@dataclass(frozen=True)
class Exponential:
    """exp(log_base * exponent); `nodes` compute it from the exponent, in order."""

    exponent: ir.Value
    log_base: float
    nodes: tuple[ir.Node, ...]


@dataclass(frozen=True)
class OfLogarithm:
    """A softmax of log_base * scores, written as an exponential of a logarithm; the fields are
    those of SoftmaxAnchor."""

    scores: ir.Value
    axes: tuple[int, ...]
    nodes: tuple[ir.Node, ...]
    overflows: bool
    rounds: bool
    log_base: float


@dataclass(frozen=True)
class _Logarithm:
    """The logarithm of a sum of exponentials over some axes of their exponent; `summed` is the
    exponent."""

    summed: ir.Value
    axes: tuple[int, ...]
    nodes: tuple[ir.Node, ...]


def log_base_of(exponential: Match, info: ShapeInfo) -> float | None:
    """Case 1: the logarithm of the base; None where the base is not one positive number, or
    enlarges or casts x."""
    base, scores = exponential.get("base"), exponential["x"]
    if base is None:
        return 1.0
    number, power = info.scalar(base), exponential.nodes[0].outputs[0]
    alike = info.shape(power) == info.shape(scores) is not None and info.dtype(power) == info.dtype(
        scores
    )
    if not alike or number is None or not 0.0 < number < math.inf:
        return None
    return math.log(number)


def times(value: ir.Value, info: ShapeInfo) -> tuple[ir.Value, float, ir.Node] | None:
    """Cases 2 and 10: for x * c or x / c with a number c > 0: x, the factor and the node."""
    for product in matches(TIMES, value, info):
        divisor = product.get("divisor")
        number = info.scalar(divisor or product["factor"])
        alike = info.shape(product["x"]) == info.shape(value) is not None
        if alike and number is not None and 0.0 < number < math.inf:
            return product["x"], 1.0 / number if divisor else number, product.nodes[0]
    return None


def exponentials(value: ir.Value, info: ShapeInfo) -> Iterator[Exponential]:
    """Cases 1 and 2: how a value may be read as an exponential to a base above 1."""
    for power in matches(EXPONENTIAL, value, info):
        log_base = log_base_of(power, info)
        if log_base is None or log_base <= 0.0:
            continue
        yield Exponential(power["x"], log_base, power.nodes)
        if (scaled := times(power["x"], info)) is not None:
            yield Exponential(scaled[0], log_base * scaled[1], (scaled[2], *power.nodes))


def of_logarithm(value: ir.Value, info: ShapeInfo) -> OfLogarithm | None:
    """Cases 4 and 5: the softmax that a value is as an exponential of a logarithm; None where it is
    none."""
    for outer in exponentials(value, info):
        for less in matches(LESS, outer.exponent, info):
            x, row = less["x"], less["less"]
            unrepeated_row, repeating = unrepeated(row)
            start, moving = row_source(unrepeated_row, info)
            softmax = _less_logarithm(x, start, outer.log_base, info) or _less_maximum(
                x, start, outer.log_base, info
            )
            if softmax is not None and is_per_row(row, softmax.axes, x, info):
                return replace(
                    softmax, nodes=(*softmax.nodes, *moving, *repeating, *less.nodes, *outer.nodes)
                )
    return None


def _less_logarithm(
    x: ir.Value, start: ir.Value, log_base: float, info: ShapeInfo
) -> OfLogarithm | None:
    """Cases 5 to 7: `start` is the logarithm of the sum of exp(x)."""
    own = shifted_by(x, "ReduceMax", info)  # 11
    for log in (*_logsumexps(start, x, log_base, info), *_log_totals(start, log_base, info)):
        again = _difference_again(log.summed, x)
        if own is not None and own[0] == log.axes and again is not None:
            return OfLogarithm(
                own[1], own[0], (*own[2], *again, *log.nodes), False, False, log_base
            )
        if log.summed is x:
            overflows = not any_op(log.nodes, "ReduceLogSumExp")
            return OfLogarithm(x, log.axes, log.nodes, overflows, True, log_base)
    return None


def _less_maximum(
    x: ir.Value, start: ir.Value, log_base: float, info: ShapeInfo
) -> OfLogarithm | None:
    """Case 8: `start` is the logarithm of the sum of exp(x - row_max), and row_max is added to
    it."""
    for added in matches(ADDED, start, info):
        if info.shape(added["log"]) != info.shape(start) is not None:
            continue
        log, logs_layout = row_source(added["log"], info)
        row_max, layout = row_source(added["row_max"], info)
        maximum = _maximum_of(row_max, x, info)
        for total in _log_totals(log, log_base, info):
            if (subtraction := _subtraction(total, added, x, start, info)) is None:
                continue
            subtracting, per_row = subtraction
            axes, computing = maximum or (None, ())
            stable = per_row and axes == total.axes
            nodes = (*computing, *subtracting, *total.nodes, *logs_layout, *layout, *added.nodes)
            return OfLogarithm(
                x, total.axes, tuple(dict.fromkeys(nodes)), not stable, True, log_base
            )
    return None


def _subtraction(
    total: _Logarithm, added: Match, x: ir.Value, start: ir.Value, info: ShapeInfo
) -> tuple[tuple[ir.Node, ...], bool] | None:
    """Case 8: the exponents of a total are x less a row_max, and the same row_max is added to the
    logarithm: the nodes that subtract, and whether row_max is one number for each row. None where
    something else is subtracted."""
    shift = match(SHIFTED, total.summed, info, {"x": x})
    if shift is None or info.shape(total.summed) != info.shape(x):
        return None
    subtracted, row_max = shift["row_max"], added["row_max"]
    start_of_row, layout = row_source(subtracted, info)
    per_row = is_per_row(subtracted, total.axes, x, info)
    alike = subtracted is row_max or (per_row and info.shape(row_max) == info.shape(start))
    if not alike or start_of_row is not row_source(row_max, info)[0]:
        return None
    return (*layout, *shift.nodes), per_row


def _maximum_of(row_max: ir.Value, x: ir.Value, info: ShapeInfo) -> Reduction | None:
    """Case 11: the axes along which a row_max is the maximum of x, and the nodes that compute it;
    None where it is something else."""
    highest, holding = finite_row_max(row_max, info)
    maximum, layout = row_source(highest, info)
    largest = reduction_of(maximum, ("ReduceMax",), x, info)
    return None if largest is None else (largest[0], (*largest[1], *layout, *holding))


def _logsumexps(
    value: ir.Value, x: ir.Value, log_base: float, info: ShapeInfo
) -> Iterator[_Logarithm]:
    """Case 6: a ReduceLogSumExp of x to this base."""
    for logarithm, factor, scaling in _factored(value, info):
        if abs(factor * log_base - 1.0) > ROUNDING:
            continue
        for exponent, before in _exponents(logarithm, x, log_base, info):
            if (sums := reduction_of(logarithm, ("ReduceLogSumExp",), exponent, info)) is not None:
                yield _Logarithm(x, sums[0], (*before, *sums[1], *scaling))


def _exponents(
    logarithm: ir.Value, x: ir.Value, log_base: float, info: ShapeInfo
) -> Iterator[tuple[ir.Value, tuple[ir.Node, ...]]]:
    """Case 6: what may be x times the logarithm of the base, and the nodes that multiply."""
    if abs(log_base - 1.0) <= ROUNDING:
        yield x, ()
    node = logarithm.producer()
    scaled = times(operand_at(node, 0), info) if is_op(node, "ReduceLogSumExp") else None
    if scaled is not None and scaled[0] is x and abs(scaled[1] / log_base - 1.0) <= ROUNDING:
        yield operand_at(node, 0), (scaled[2],)


def _log_totals(value: ir.Value, log_base: float, info: ShapeInfo) -> Iterator[_Logarithm]:
    """Case 9: a logarithm of a sum of exponentials to this base, whatever is summed up."""
    for logarithm, factor, scaling in _factored(value, info):
        node = logarithm.producer()
        if abs(factor * log_base - 1.0) > ROUNDING or not is_op(node, "Log", "ReduceLogSum"):
            continue
        total, last = logarithm, tuple[ir.Node, ...]()
        reductions: tuple[str, ...] = ("ReduceLogSum",)
        if is_op(node, "Log"):
            total, last = _total_of(node, info)
            reductions = SUMS
        summed = _reduced_value(total, info)
        sums = reduction_of(total, reductions, summed, info)
        for exponential in exponentials(summed, info):
            if sums is not None and abs(exponential.log_base / log_base - 1.0) <= ROUNDING:
                yield _Logarithm(
                    exponential.exponent, sums[0], (*exponential.nodes, *sums[1], *last, *scaling)
                )


def _factored(
    value: ir.Value, info: ShapeInfo
) -> Iterator[tuple[ir.Value, float, tuple[ir.Node, ...]]]:
    """Case 10: how a value may be read as a logarithm times a number: the logarithm, the number and
    the nodes."""
    yield value, 1.0, ()
    if (scaled := times(value, info)) is not None:
        logarithm, layout = row_source(scaled[0], info)
        yield logarithm, scaled[1], (*layout, scaled[2])


def _total_of(log: ir.Node, info: ShapeInfo) -> tuple[ir.Value, tuple[ir.Node, ...]]:
    """Case 9: the total that a Log takes, and the nodes from it to the logarithm."""
    total, layout = row_source(operand_at(log, 0), info)
    nodes = (*layout, log)
    while is_op(node := total.producer(), "Abs"):
        total, layout = row_source(operand_at(node, 0), info)
        nodes = (*layout, node, *nodes)
    return total, nodes


def _reduced_value(total: ir.Value, info: ShapeInfo) -> ir.Value:
    """What a reduction reduces, also one between two casts."""
    inner = operand_at(total.producer(), 0)
    if not is_op(total.producer(), "Cast"):
        return inner
    return operand_at(cast_reduced_by(row_source(inner, info)[0]), 0)


def _difference_again(one: ir.Value, other: ir.Value) -> tuple[ir.Node, ...] | None:
    """The node that computes a difference once more, where `one` is the same difference as `other`;
    () where they are one value, None where they are not the same."""
    if one is other:
        return ()
    left, right = one.producer(), other.producer()
    if not is_op(left, "Sub") or not is_op(right, "Sub") or list(left.inputs) != list(right.inputs):
        return None
    return (left,)
