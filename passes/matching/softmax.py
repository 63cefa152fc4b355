"""The anchors: every softmax of a graph, in any spelling.

    softmax := Softmax(x), axis a                          opset >= 13: over axis a
                                                           opset < 13: over axes a.. flattened; taken when all of them
                                                           but one are of size 1
             | Exp(LogSoftmax(x)), axis a
             | Exp(Sub(x, ReduceLogSumExp(x, axis a, keepdims=1)))
             | Exp(Sub(x, Add(Log(ReduceSum(e, axis a, keepdims=1)), peak)))
                                                           e = Exp(Sub(x, peak)), peak the maximum, or that where it
                                                           is finite and else 0, see peaks.py
             | Div(e, total) | Mul(e, Reciprocal(total)) | Mul(e, Div(1, total))
                                                           e = Exp(Sub(x, ReduceMax(x, axis a, keepdims=1)))
             | Softmax(Sub(x, ReduceMax(x, axis a, keepdims=1))), axis a
             | e, where product(layout(e), values) / total follows: the division is late
    Written out, it may run over several axes, as of keys along height and width: the same axes everywhere.
    The reductions may drop the axis and put it back by Unsqueeze or Reshape, and repeat their result by Expand;
    Identity and Max(., -inf), which jax writes there, change nothing.
    total   := ReduceSum(e, axis a, keepdims=1) | ReduceL1(e, axis a, keepdims=1)    no exponential is negative
             | Add(total, c) | Max(total, c) | Clip(total, c)                        0 <= c <= 1e-7; Max, Clip up to 1
             | Expand(total), as e is
             | a sum beside a sink, see sink_totals.py

Subtracting a row's maximum changes no softmax: where it is infinite both are NaN. The decomposed form is the operator's
own definition; its total is at least 1, so that a number that small is lost in it. A row's total may as well divide its
sum of values, for that is linear; in 16 bits such a sum may overflow. The difference to ReduceLogSumExp rounds like the
scores themselves, so that a row of numbers such as -1e9 is rounded away: it is marked, and the matcher takes it only
where no such number can be added.
Without the subtraction of the maximum, Div(e, ReduceSum(e)) with e = Exp(x), the value overflows where Softmax does
not: that form is an anchor only to be declined. So is one whose exponentials are masked, e = Mul(Exp(.), t) or
Where(c, Exp(.), 0): where the maximum is that of a masked key, and far above the others, nothing is left to divide by.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.layout.contraction import contraction
from fa_compiler.passes.matching.peaks import finite_peak
from fa_compiler.passes.matching.sink_totals import SinkTotal, sink_total, summands
from fa_compiler.passes.movers import LAYOUT_OPS, RESHAPES
from fa_compiler.passes.nodes import int_attr, is_dead, is_op, opset, passed_on, producer, reduced_axes
from fa_compiler.passes.values.shapes import ShapeInfo
from fa_compiler.passes.values.symbolic import Dim

SUMS = ("ReduceSum", "ReduceL1")
LATE_LAYOUT = (*LAYOUT_OPS, "Mul", "Dropout")
"""What may lie between exponentials and a product that is divided late."""
SMALLEST = 1e-7
"""A number up to this is lost in a float32 total of 1 or more, but for its last bit."""


@dataclass(frozen=True)
class LateDivision:
    """A division behind the product with the values: by `total`, which `summing` computes. `path` leads from the
    exponentials to the product, its own node the last."""

    total: ir.Value
    summing: tuple[ir.Node, ...]
    dividing: tuple[ir.Node, ...]
    path: tuple[ir.Node, ...]

    @property
    def output(self) -> ir.Value:
        """The quotient."""
        return self.dividing[-1].outputs[0]


@dataclass(frozen=True)
class SoftmaxAnchor:
    """A softmax. `nodes` are all nodes that compute it, the last of them gives `output`.

    `axes` are those it runs over, in order, none of them negative; none when that could not be told. `overflows` marks
    the form without the maximum subtracted, `rounds` the one that subtracts the logarithm of the sum, `masked`
    exponentials that are masked before they are summed up, `guarded` a total that something keeps from being 0. With a
    `late` division `output` is the exponentials. `sink` is one in the total.
    """

    scores: ir.Value
    output: ir.Value
    axes: tuple[int, ...]
    nodes: tuple[ir.Node, ...]
    overflows: bool = False
    rounds: bool = False
    late: LateDivision | None = None
    masked: bool = False
    guarded: bool = False
    sink: SinkTotal | None = None

    @property
    def axis(self) -> int | None:
        """The one axis it runs over."""
        return self.axes[0] if len(self.axes) == 1 else None

    @property
    def node(self) -> ir.Node:
        """The node the report names."""
        return self.nodes[-1]


def anchors(graph: ir.Graph, info: ShapeInfo) -> Iterator[SoftmaxAnchor]:
    """All anchors of one graph in its order, those of subgraphs not included.

    Exponentials that are divided by their total both behind the product and before it, as where the probabilities are
    an output, too, are one softmax: that of the late division.
    """
    found = list(_every_anchor(graph, info))
    late = {each.output for each in found if each.late is not None and not is_dead(each.late.dividing[-1])}
    for each in found:
        if each.late is not None or not any(output in late for node in each.nodes for output in node.outputs):
            yield each


def _every_anchor(graph: ir.Graph, info: ShapeInfo) -> Iterator[SoftmaxAnchor]:
    for node in list(graph):
        if is_op(node, "Softmax") and node.inputs[0] is not None:
            axes = _axes(node, node.inputs[0], info)
            shift = shifted_by(node.inputs[0], "ReduceMax", info)
            if shift is not None and shift[0] == axes:
                yield SoftmaxAnchor(shift[1], node.outputs[0], axes, (*shift[2], node))
            else:
                yield SoftmaxAnchor(node.inputs[0], node.outputs[0], axes, (node,))
        else:
            found = _of_logarithm(node, info) if is_op(node, "Exp") else None
            found = _decomposed(node, info) if is_op(node, "Div", "Mul") else found
            if found is not None:
                yield found


def _axes(node: ir.Node, scores: ir.Value, info: ShapeInfo) -> tuple[int, ...]:
    axis = _axis(node, scores, info)
    return () if axis is None else (axis,)


def _axis(node: ir.Node, scores: ir.Value, info: ShapeInfo) -> int | None:
    shape = info.shape(scores)
    if shape is None:
        return None
    rank = len(shape)
    modern = opset(node) >= 13
    axis = int_attr(node, "axis", -1 if modern else 1)
    axis += rank if axis < 0 else 0
    if modern:
        return axis if 0 <= axis < rank else None
    if not 0 <= axis < rank:
        return None
    longer = [index for index in range(axis, rank) if shape[index].const != 1]
    if len(longer) > 1:
        return None
    return longer[0] if longer else rank - 1


def _of_logarithm(exp: ir.Node, info: ShapeInfo) -> SoftmaxAnchor | None:
    logarithm = exp.inputs[0]
    node = None if logarithm is None else logarithm.producer()
    if node is None or logarithm is None:
        return None
    if is_op(node, "LogSoftmax") and node.inputs[0] is not None:
        return SoftmaxAnchor(node.inputs[0], exp.outputs[0], _axes(node, node.inputs[0], info), (node, exp))
    shift = shifted_by(logarithm, "ReduceLogSumExp", info)
    if shift is not None:
        return SoftmaxAnchor(shift[1], exp.outputs[0], shift[0], (*shift[2], exp), rounds=True)
    return _of_written_logarithm(node, exp, info)


def _of_written_logarithm(sub: ir.Node, exp: ir.Node, info: ShapeInfo) -> SoftmaxAnchor | None:
    """The difference to log(sum(exp(x - peak))) + peak."""
    scores, subtracted = (sub.inputs[0], sub.inputs[1]) if is_op(sub, "Sub") else (None, None)
    add = producer(subtracted)
    if add is None or scores is None or not is_op(add, "Add"):
        return None
    for logarithm, peak in (add.inputs, add.inputs[::-1]):
        log = producer(logarithm)
        total = log.inputs[0] if log is not None and is_op(log, "Log") else None
        reduction = producer(total)
        given = reduction.inputs[0] if reduction is not None and is_op(reduction, *SUMS) else None
        inner = producer(given)
        difference = producer(inner.inputs[0]) if inner is not None and is_op(inner, "Exp") else None
        if log is None or total is None or given is None or peak is None or inner is None or difference is None:
            continue
        sums = _reduced(total, SUMS, given, info)
        if sums is None or not is_op(difference, "Sub") or list(difference.inputs) != [scores, peak]:
            continue
        highest, holding = finite_peak(peak, info)
        found = _reduced(highest, ("ReduceMax",), scores, info)
        largest = () if found is None or found[0] != sums[0] else (*found[1], *holding)
        nodes = (*largest, difference, inner, *sums[1], log, add, sub, exp)
        return SoftmaxAnchor(scores, exp.outputs[0], sums[0], nodes, overflows=not largest, rounds=True)
    return None


def _decomposed(node: ir.Node, info: ShapeInfo) -> SoftmaxAnchor | None:
    """Exponentials over their total, however the division is spelt."""
    for exponential, total, dividing in _quotients(node, info):
        found = _ratio(node, exponential, total, dividing, info)
        if found is not None:
            return found
    return None


def _quotients(node: ir.Node, info: ShapeInfo) -> Iterator[tuple[ir.Value, ir.Value, tuple[ir.Node, ...]]]:
    """Dividend, divisor and the nodes that divide."""
    left, right = node.inputs[0], node.inputs[1]
    if left is None or right is None:
        return
    if node.op_type == "Div":
        yield left, right, (node,)
        return
    for value, inverse in ((left, right), (right, left)):
        maker = inverse.producer()
        if maker is None:
            continue
        divisor = maker.inputs[-1] if maker.inputs else None
        one = maker.inputs[0] if is_op(maker, "Div") else None
        inverts = is_op(maker, "Reciprocal") or (one is not None and info.scalar(one) == 1.0)
        if inverts and divisor is not None:
            yield value, divisor, (maker, node)


def _ratio(
    last: ir.Node, exponential: ir.Value, total: ir.Value, dividing: tuple[ir.Node, ...], info: ShapeInfo
) -> SoftmaxAnchor | None:
    guarded, guards = _unguarded(total, exponential, info)
    for plain, more in ((guarded, None), *summands(guarded)):
        given, path = _behind_product(exponential, plain, info)
        exp, masking = _unmasked(given.producer(), info)
        scores = exp.inputs[0] if is_op(exp, "Exp") and exp is not None else None
        sums = None if exp is None or scores is None else _reduced(plain, SUMS, given, info)
        if exp is None or scores is None or sums is None:
            continue
        sink = None if more is None else sink_total(guarded, more, _subtracted(scores), info)
        summing = (*sums[1], *(() if sink is None else sink.nodes), *guards)
        late = LateDivision(total, summing, dividing, path) if path else None
        nodes = (exp, *masking) if late is not None else (exp, *masking, *summing, *dividing)
        output = given if late is not None else last.outputs[0]
        shift = shifted_by(scores, "ReduceMax", info, None if sink is None else sink.held)
        if shift is None:
            return SoftmaxAnchor(
                scores, output, sums[0], nodes, True, late=late, masked=bool(masking), guarded=bool(guards), sink=sink
            )
        if shift[0] != sums[0]:
            return None
        return SoftmaxAnchor(shift[1], output, sums[0], (*shift[2], *nodes), late=late, masked=bool(masking), sink=sink)
    return None


def _subtracted(scores: ir.Value) -> ir.Value | None:
    sub = scores.producer()
    return sub.inputs[1] if sub is not None and is_op(sub, "Sub") else None


def _unmasked(node: ir.Node | None, info: ShapeInfo) -> tuple[ir.Node | None, tuple[ir.Node, ...]]:
    """The Exp behind a mask on exponentials, and the node that masks; else the node and none."""
    if node is None or not is_op(node, "Mul", "Where"):
        return node, ()
    operands = [each for each in (node.inputs if node.op_type == "Mul" else node.inputs[1:]) if each is not None]
    if node.op_type == "Mul" and any(info.scalar(each) is not None for each in operands):
        return node, ()
    exp = next((each.producer() for each in operands if is_op(each.producer(), "Exp")), None)
    return (node, ()) if exp is None else (exp, (node,))


def _behind_product(value: ir.Value, total: ir.Value, info: ShapeInfo) -> tuple[ir.Value, tuple[ir.Node, ...]]:
    """Of a product with exponentials, whose total this is, the exponentials and the way to the product; else the value
    and no way."""
    node, summed = value.producer(), passed_on(total, "Identity", *RESHAPES).producer()
    exponential = summed.inputs[0] if is_op(summed, *SUMS) and summed is not None else None
    if exponential is None or node is None or contraction(node, info) is None:
        return value, ()
    for operand in node.inputs:
        path = [node]
        while operand is not None and operand is not exponential and is_op(operand.producer(), *LATE_LAYOUT):
            maker = operand.producer()
            assert maker is not None
            path.insert(0, maker)
            operand = maker.inputs[0]
        if operand is exponential:
            return exponential, tuple(path)
    return value, ()


def _unguarded(total: ir.Value, exponential: ir.Value, info: ShapeInfo) -> tuple[ir.Value, tuple[ir.Node, ...]]:
    """A total without what keeps it from being 0, and the nodes that do, in order; first what repeats it as the
    exponentials, where it is so guarded."""
    expand = total.producer()
    alike = info.shape(total) == info.shape(exponential) is not None
    repeated = expand.inputs[0] if expand is not None and is_op(expand, "Expand") and alike else None
    current = total if repeated is None else repeated
    guards: list[ir.Node] = []
    while (kept := _floored(node := current.producer(), info)) is not None:
        assert node is not None
        guards.insert(0, node)
        current = kept
    if not guards:
        return total, ()
    if repeated is not None and expand is not None:
        guards.append(expand)
    return current, tuple(guards)


def _floored(node: ir.Node | None, info: ShapeInfo) -> ir.Value | None:
    """What a node keeps from being 0, where that changes no sum of exponentials."""
    if not is_op(node, "Add", "Max", "Clip") or node is None or len(node.inputs) != 2 or node.attributes:
        return None
    largest = SMALLEST if node.op_type == "Add" else 1.0
    numbers = [None if value is None else info.scalar(value) for value in node.inputs]
    small = [index for index, number in enumerate(numbers) if number is not None and 0.0 <= number <= largest]
    return node.inputs[1 - small[0]] if small and (node.op_type != "Clip" or small[0] == 1) else None


def shifted_by(
    value: ir.Value, reduction: str, info: ShapeInfo, held: tuple[ir.Value, ir.Node] | None = None
) -> tuple[tuple[int, ...], ir.Value, tuple[ir.Node, ...]] | None:
    """For `x - reduction(x, axes)`: the axes, x and the nodes. With `held` the reduction goes through a node first."""
    sub = value.producer()
    if not is_op(sub, "Sub"):
        return None
    assert sub is not None
    scores, peak = sub.inputs[0], sub.inputs[1]
    peak, holding = (peak, ()) if held is None else (held[0], held[1:])
    found = None if scores is None or peak is None else _reduced(peak, (reduction,), scores, info)
    return None if found is None or scores is None else (found[0], scores, (*found[1], *holding, sub))


def _reduced(
    value: ir.Value, reductions: Sequence[str], source: ir.Value, info: ShapeInfo
) -> tuple[tuple[int, ...], tuple[ir.Node, ...]] | None:
    """The axes of `source` over which `value` is a reduction, of size 1 or repeated there, and the
    nodes."""
    shape, own = info.shape(source), info.shape(value)
    nodes: list[ir.Node] = []
    current = value
    while is_op(node := current.producer(), "Identity", *RESHAPES, "Expand", "Max") and node is not None:
        inner = _above_nothing(node, info) if node.op_type == "Max" else node.inputs[0]
        if inner is None or (node.op_type == "Expand" and not all(is_op(behind, "Identity") for behind in nodes)):
            return None
        nodes.append(node)
        current = inner
    if node is None or not is_op(node, *reductions) or node.inputs[0] is not source or shape is None or own is None:
        return None
    listed = reduced_axes(node)
    axes = tuple(sorted({axis % len(shape) for axis in listed or ()}))
    if not axes:
        return None
    kept = tuple(Dim(1) if place in axes else size for place, size in enumerate(shape))
    last = next((each for each in nodes if each.op_type != "Identity"), None)
    repeated = last.inputs[0] if last is not None and last.op_type == "Expand" else None
    before = own if repeated is None else info.shape(repeated)
    if before != kept or own not in (kept, shape):
        return None
    return axes, (node, *reversed(nodes))


def _above_nothing(node: ir.Node, info: ShapeInfo) -> ir.Value | None:
    """The x of Max(x, -inf), which is x: jax starts a maximum so."""
    operands = [value for value in node.inputs if value is not None]
    kept = [value for value in operands if info.scalar(value) != -math.inf]
    return kept[0] if len(operands) == 2 and len(kept) == 1 else None
