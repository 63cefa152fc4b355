"""Exponentials to any base, and the softmax that is written as the exponential of a logarithm.

Grammar; `a` are the axes of the softmax, and exp(y) stands for one exponential, to the base b everywhere:

    exp(y) :=
      1     Exp(y) | Pow(b, y)                             b > 0 one number
      2   | exp(Mul(y, c)) | exp(Div(y, 1/c))              c > 0 one number, which counts as part of the base
    softmax :=
      3     exp(LogSoftmax(x))                             to the base e
      4   | exp(Sub(x, logsumexp)) | exp(Add(x, Neg(logsumexp)))
      5   | exp(Sub(d, log_total))                         d = Sub(x, row_max), log_total of exp(d)
    logsumexp :=                                           a per_row of row_reductions.py
      6     times(ReduceLogSumExp(y, a))                   y = x times log(b), also x itself for the base e
      7   | log_total                                      of exp(x): it overflows, as row_max is missing
      8   | Add(log_total, row_max)                        of exp(Sub(x, row_max))
    log_total :=
      9     times(Log(ReduceSum(e, a))) | times(ReduceLogSum(e, a))           e = exp(.) as said in 5, 7 and 8; Abs of
                                                           the sum changes nothing, and jax writes it there
    times(l) :=                                            the logarithm to the base b
     10     l | Mul(l, 1/log(b)) | Div(l, log(b))          none for the base e
    row_max :=
     11     ReduceMax(x, a), or that where it is finite and else 0, see row_max.py; the same one everywhere

Layout may stand between all of these, as in a row of row_reductions.py. Where row_max is something else than the
maximum, the exponentials may overflow.

Sound because exp(x - log(sum(exp(x)))) is exp(x) / sum(exp(x)), the softmax of log(b) * x, in every base. The
logarithm of the total is between 0 and that of the number of keys, so that (5) rounds like the softmax itself. In 4 the
difference rounds like x itself, so that a row of numbers such as -1e9 is rounded away. It is marked, and the matcher
takes it only where no such number can be added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import is_op
from fa_compiler.passes.matching.row_max import finite_row_max
from fa_compiler.passes.matching.row_reductions import (
    SUMS,
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
"""How far a product of rounded float32 constants may be from 1, relatively, to count as 1: no more than a score's own
rounding."""
X = Bind("x")
EXPONENTIAL = OneOf((Op("Exp", X), Op("Pow", Bind("base"), X)))  # 1
TIMES = OneOf((Op("Mul", X, Bind("factor")), Op("Div", X, Bind("divisor"))))  # 2 and 10
SHIFTED = Op("Sub", X, Bind("row_max"))
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
    """A softmax of log_base * scores, written as an exponential of a logarithm; the fields are those of
    SoftmaxAnchor."""

    scores: ir.Value
    axes: tuple[int, ...]
    nodes: tuple[ir.Node, ...]
    overflows: bool
    rounds: bool
    log_base: float


@dataclass(frozen=True)
class _Logarithm:
    """The logarithm of a sum of exponentials over some axes of their exponent; `summed` is the exponent."""

    summed: ir.Value
    axes: tuple[int, ...]
    nodes: tuple[ir.Node, ...]


def log_base_of(exponential: Match, info: ShapeInfo) -> float | None:
    """Case 1: the logarithm of the base; None where the base is not one positive number, or enlarges or casts x."""
    base, scores = exponential.get("base"), exponential["x"]
    if base is None:
        return 1.0
    number, power = info.scalar(base), exponential.nodes[0].outputs[0]
    alike = info.shape(power) == info.shape(scores) is not None and info.dtype(power) == info.dtype(scores)
    return math.log(number) if alike and number is not None and 0.0 < number < math.inf else None


def times(value: ir.Value, info: ShapeInfo) -> tuple[ir.Value, float, ir.Node] | None:
    """Cases 2 and 10: for x * c or x / c with a number c > 0: x, the factor and the node."""
    for found in matches(TIMES, value, info):
        number = info.scalar(found.get("factor") or found["divisor"])
        alike = info.shape(found["x"]) == info.shape(value) is not None
        if alike and number is not None and 0.0 < number < math.inf:
            return found["x"], number if found.get("divisor") is None else 1.0 / number, found.nodes[0]
    return None


def exponentials(value: ir.Value, info: ShapeInfo) -> Iterator[Exponential]:
    """Cases 1 and 2: how a value may be read as an exponential to a base above 1."""
    for found in matches(EXPONENTIAL, value, info):
        log_base = log_base_of(found, info)
        if log_base is None or log_base <= 0.0:
            continue
        yield Exponential(found["x"], log_base, found.nodes)
        if (scaled := times(found["x"], info)) is not None:
            yield Exponential(scaled[0], log_base * scaled[1], (scaled[2], *found.nodes))


def of_logarithm(value: ir.Value, info: ShapeInfo) -> OfLogarithm | None:
    """Cases 4 and 5: the softmax that a value is as an exponential of a logarithm; None where it is none."""
    for outer in exponentials(value, info):
        for less in matches(LESS, outer.exponent, info):
            x, row = less["x"], less["less"]
            unrepeated_row, repeating = unrepeated(row)
            start, moving = row_source(unrepeated_row, info)
            found = _whole(x, start, outer.log_base, info) or _less_maximum(x, start, outer.log_base, info)
            if found is not None and is_per_row(row, found.axes, x, info):
                return replace(found, nodes=(*found.nodes, *moving, *repeating, *less.nodes, *outer.nodes))
    return None


def _whole(x: ir.Value, start: ir.Value, log_base: float, info: ShapeInfo) -> OfLogarithm | None:
    """Cases 5 to 7: `start` is the logarithm of the sum of exp(x)."""
    own = shifted_by(x, "ReduceMax", info)  # 11
    for found in (*_logsumexps(start, x, log_base, info), *_log_totals(start, log_base, info)):
        again = _difference_again(found.summed, x)
        if own is not None and own[0] == found.axes and again is not None:
            return OfLogarithm(own[1], own[0], (*own[2], *again, *found.nodes), False, False, log_base)
        if found.summed is x:
            overflows = not any(is_op(node, "ReduceLogSumExp") for node in found.nodes)
            return OfLogarithm(x, found.axes, found.nodes, overflows, True, log_base)
    return None


def _less_maximum(x: ir.Value, start: ir.Value, log_base: float, info: ShapeInfo) -> OfLogarithm | None:
    """Case 8: `start` is the logarithm of the sum of exp(x - row_max), and row_max is added to it."""
    for added in matches(ADDED, start, info):
        log, logs_layout = row_source(added["log"], info)
        row_max, layout = row_source(added["row_max"], info)
        if info.shape(added["log"]) != info.shape(start) is not None:
            continue
        for found in _log_totals(log, log_base, info):
            shift = match(SHIFTED, found.summed, info, {"x": x})
            inner, inner_layout = (None, ()) if shift is None else row_source(shift["row_max"], info)
            if shift is None or inner is not row_max or info.shape(found.summed) != info.shape(x):
                continue
            per_row = is_per_row(shift["row_max"], found.axes, x, info)
            alike = per_row and info.shape(added["row_max"]) == info.shape(start)
            if shift["row_max"] is not added["row_max"] and not alike:
                continue
            highest, holding = finite_row_max(row_max, info)
            maximum, layout_of_maximum = row_source(highest, info)
            largest = reduction_of(maximum, ("ReduceMax",), x, info)  # 11
            first: tuple[ir.Node, ...] = ()
            if largest is not None:
                first = (*largest[1], *layout_of_maximum, *holding)
            stable = per_row and largest is not None and largest[0] == found.axes
            nodes = (*first, *inner_layout, *shift.nodes, *found.nodes, *logs_layout, *layout, *added.nodes)
            return OfLogarithm(x, found.axes, tuple(dict.fromkeys(nodes)), not stable, True, log_base)
    return None


def _logsumexps(value: ir.Value, x: ir.Value, log_base: float, info: ShapeInfo) -> Iterator[_Logarithm]:
    """Case 6: a ReduceLogSumExp of x to this base."""
    for logarithm, factor, scaling in _factored(value, info):
        if abs(factor * log_base - 1.0) > ROUNDING:
            continue
        scaled: list[tuple[ir.Value, tuple[ir.Node, ...]]] = [(x, ())] if abs(log_base - 1.0) <= ROUNDING else []
        node = logarithm.producer()
        inner = None if not is_op(node, "ReduceLogSumExp") else node.inputs[0]
        if inner is not None and (found := times(inner, info)) is not None and found[0] is x:
            scaled += [(inner, (found[2],))] if abs(found[1] / log_base - 1.0) <= ROUNDING else []
        for source, before in scaled:
            if (sums := reduction_of(logarithm, ("ReduceLogSumExp",), source, info)) is not None:
                yield _Logarithm(x, sums[0], (*before, *sums[1], *scaling))


def _log_totals(value: ir.Value, log_base: float, info: ShapeInfo) -> Iterator[_Logarithm]:
    """Case 9: a logarithm of a sum of exponentials to this base, whatever is summed up."""
    for logarithm, factor, scaling in _factored(value, info):
        node = logarithm.producer()
        if node is None or abs(factor * log_base - 1.0) > ROUNDING or not is_op(node, "Log", "ReduceLogSum"):
            continue
        total, last = logarithm, tuple[ir.Node, ...]()
        reductions: tuple[str, ...] = ("ReduceLogSum",)
        if is_op(node, "Log") and node.inputs[0] is not None:
            total, last = _total_of(node, info)
            reductions = SUMS
        summed = _reduced_value(total, info)
        sums = None if summed is None else reduction_of(total, reductions, summed, info)
        if summed is None or sums is None:
            continue
        for each in exponentials(summed, info):
            if abs(each.log_base / log_base - 1.0) <= ROUNDING:
                yield _Logarithm(each.exponent, sums[0], (*each.nodes, *sums[1], *last, *scaling))


def _factored(value: ir.Value, info: ShapeInfo) -> Iterator[tuple[ir.Value, float, tuple[ir.Node, ...]]]:
    """Case 10: how a value may be read as a logarithm times a number: the logarithm, the number and the nodes."""
    yield value, 1.0, ()
    if (found := times(value, info)) is not None:
        logarithm, layout = row_source(found[0], info)
        yield logarithm, found[1], (*layout, found[2])


def _total_of(log: ir.Node, info: ShapeInfo) -> tuple[ir.Value, tuple[ir.Node, ...]]:
    """Case 9: the total that a Log takes, and the nodes from it to the logarithm."""
    total, nodes = log.outputs[0], tuple[ir.Node, ...]()
    while is_op(node := total.producer(), "Log" if not nodes else "Abs"):
        if node.inputs[0] is None:
            break
        total, layout = row_source(node.inputs[0], info)
        nodes = (*layout, node, *nodes)
    return total, nodes


def _reduced_value(total: ir.Value, info: ShapeInfo) -> ir.Value | None:
    """What a reduction reduces, also one between two casts."""
    node = total.producer()
    inner = node.inputs[0] if node is not None and node.inputs else None
    if inner is None or not is_op(node, "Cast"):
        return inner
    widening = cast_reduced_by(row_source(inner, info)[0])
    return None if widening is None else widening.inputs[0]


def _difference_again(one: ir.Value, other: ir.Value) -> tuple[ir.Node, ...] | None:
    """The node that computes a difference once more, where `one` is the same difference as `other`; () where they are
    one value, None where they are not the same."""
    if one is other:
        return ()
    left, right = one.producer(), other.producer()
    if left is None or right is None or not (is_op(left, "Sub") and is_op(right, "Sub")):
        return None
    return (left,) if list(left.inputs) == list(right.inputs) else None
