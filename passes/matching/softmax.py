"""The anchors: every softmax of a graph, in any spelling.

Grammar; the code cites the numbers of the cases:

    softmax, over the axis a :=
      1     Softmax(x)                                     opset >= 13: over axis a
                                                           opset < 13: over axes a.. flattened; taken when all of them
                                                           but one are of size 1
      2   | Softmax(Sub(x, ReduceMax(x, a)))
      3   | exp(LogSoftmax(x))
      4   | exp(Sub(x, logsumexp(x)))                      in many spellings, see exponentials.py
      5   | Div(e, total)
      6   | Mul(e, Reciprocal(total)) | Mul(e, Div(1, total)) | Mul(e, Pow(total, -1))
      7   | e, where product(layout(e), values) / total follows: the division is late
    e :=
      8     exp(Sub(x, ReduceMax(x, a)))                   also times one number c > 0
      9   | exp(x)                                         declined: it overflows, as do powers of a b below 1
     10   | Mul(exp(.), t) | Where(c, exp(.), 0) | Where(c, 0, exp(.))         declined: masked exponentials
    exp(x) :=
     15     Exp(x) | Pow(b, x)                             b > 0 one number, see exponentials.py
    total :=
     11     ReduceSum(e, a) | ReduceL1(e, a)               no exponential is negative; also summed up in a wider type
     12   | Add(total, c) | Max(total, c) | Clip(total, c)                     0 <= c <= 1e-7; Max, Clip up to 1
     13   | Expand(total), as e is
     14   | a sum beside a sink, see sink_totals.py

    All reductions keep the axis, with size 1. They may also drop it and put it back by Unsqueeze or Reshape, and repeat
    their result by Expand, see row_reductions.py. A softmax that is written out may run over several axes, as of keys
    along height and width: the same axes everywhere. What is written in another way is named by other_softmaxes.py.

Subtracting a row's maximum changes no softmax: where it is infinite both are NaN. The decomposed form (5 and 6) is the
operator's own definition; its total is at least 1, so that a number as small as that of 12 is lost in it. A row's total
may as well divide its sum of values (7), for that is linear; in 16 bits such a sum may overflow.
A power b^y (15) is exp(log(b) y), and a factor c behind the maximum (8) multiplies that exponent, too: such an anchor
is the softmax of log_base * x, where log_base is c log(b). attention_paths.py makes it the last scale of the scores.
In a sink of the total (14) only Exp is read, for its exponentials are to one base.
Without the subtraction of the maximum (9) the value overflows where Softmax does not: that form is an anchor only to be
declined. So is one whose exponentials are masked (10): where the maximum is that of a masked key, and far above the
others, nothing is left to divide by.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import int_attr, is_dead, is_op, opset, source_through
from fa_compiler.passes.layout.contraction import contraction
from fa_compiler.passes.matching.exponentials import (
    EXPONENTIAL,
    ROUNDING,
    exponentials,
    log_base_of,
    of_logarithm,
    times,
)
from fa_compiler.passes.matching.row_reductions import SHIFTED, SUMS, reduced, shifted_by
from fa_compiler.passes.matching.sink_totals import SinkTotal, sink_total, summands
from fa_compiler.passes.ops.movers import LAYOUT_OPS, RESHAPES
from fa_compiler.passes.values.patterns import Bind, Match, Number, OneOf, Op, match, matches
from fa_compiler.passes.values.shapes import ShapeInfo

LATE_LAYOUT = (*LAYOUT_OPS, "Mul", "Dropout")
"""What may lie between exponentials and a product that is divided late."""
SMALLEST = 1e-7
"""A number up to this is lost in a float32 total of 1 or more, but for its last bit."""

E, TOTAL, OTHER = Bind("e"), Bind("total"), Bind("other")
INVERSE = OneOf((Op("Reciprocal", TOTAL), Op("Div", Number(1.0), TOTAL), Op("Pow", TOTAL, Number(-1.0))))
QUOTIENT = OneOf((Op("Div", E, TOTAL), Op("Mul", E, INVERSE)))  # 5 and 6
EXPONENTIALS = OneOf(
    (
        EXPONENTIAL,  # 8 and 9
        Op("Mul", EXPONENTIAL, Bind("factor")),  # 10
        Op("Where", Bind("condition"), EXPONENTIAL, OTHER),
        Op("Where", Bind("condition"), OTHER, EXPONENTIAL),
    )
)
SUM = Op(SUMS, E, open_end=True)  # 11
FLOORED = OneOf(  # 12
    (
        Op("Add", TOTAL, Number(0.0, SMALLEST), plain=True),
        Op(("Max", "Clip"), TOTAL, Number(0.0, 1.0), plain=True),
    )
)


@dataclass(frozen=True)
class LateDivision:
    """A division by `total` that follows the product with the values.

    `summing` are the nodes that compute the total, `dividing` those that divide. `path` leads from the exponentials to
    the product, whose node is the last.
    """

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
    """A softmax. `nodes` are all nodes that compute it; the last one gives `output`.

    `axes` are the axes it runs over, sorted and not negative; empty if they are unknown. Further fields:

    overflows   no maximum is subtracted
    rounds      the logarithm of the sum is subtracted from the scores (case 4)
    masked      the exponentials are masked before they are summed
    floored     set only with `overflows`: something keeps the total from being 0
    late        the division comes after the product with the values, and `output` is then the exponentials
    sink        the sink that the total includes
    log_base    the softmax is that of `log_base` times the scores
    """

    scores: ir.Value
    output: ir.Value
    axes: tuple[int, ...]
    nodes: tuple[ir.Node, ...]
    overflows: bool = False
    rounds: bool = False
    late: LateDivision | None = None
    masked: bool = False
    floored: bool = False
    sink: SinkTotal | None = None
    log_base: float = 1.0

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

    If exponentials are divided by their total before the product and also after it, as where the probabilities are an
    output, both are one softmax: that of the late division.
    """
    found = [anchor for node in list(graph) if (anchor := anchor_at(node, info)) is not None]
    late = {each.output for each in found if each.late is not None and not is_dead(each.late.dividing[-1])}
    for each in found:
        if each.late is not None or not any(output in late for node in each.nodes for output in node.outputs):
            yield each


def anchor_at(node: ir.Node, info: ShapeInfo) -> SoftmaxAnchor | None:
    """The softmax whose last node this is; None where there is none."""
    if is_op(node, "Softmax"):
        return _of_softmax(node, info)
    if is_op(node, "Exp", "Pow"):
        return _of_logarithm(node, info)
    return _decomposed(node, info) if is_op(node, "Div", "Mul") else None


def _of_softmax(node: ir.Node, info: ShapeInfo) -> SoftmaxAnchor | None:
    """Cases 1 and 2."""
    scores = node.inputs[0]
    if scores is None:
        return None
    axes, shift = _axes(node, scores, info), shifted_by(scores, "ReduceMax", info)
    if shift is not None and shift[0] == axes:  # 2
        return SoftmaxAnchor(shift[1], node.outputs[0], axes, (*shift[2], node))
    return SoftmaxAnchor(scores, node.outputs[0], axes, (node,))


def _axes(node: ir.Node, scores: ir.Value, info: ShapeInfo) -> tuple[int, ...]:
    """Case 1: the axis of a Softmax or LogSoftmax; none when that could not be told."""
    shape, modern = info.shape(scores), opset(node) >= 13
    rank = len(shape or ())
    axis = int_attr(node, "axis", -1 if modern else 1)
    axis += rank if axis < 0 else 0
    if shape is None or not 0 <= axis < rank:
        return ()
    if modern:
        return (axis,)
    longer = tuple(index for index in range(axis, rank) if shape[index].const != 1)
    return () if len(longer) > 1 else longer or (rank - 1,)


def _of_logarithm(node: ir.Node, info: ShapeInfo) -> SoftmaxAnchor | None:
    """Cases 3 and 4: the exponential of a logarithm."""
    output = node.outputs[0]
    for each in exponentials(output, info):
        logarithm = each.exponent.producer()
        scores = None if not is_op(logarithm, "LogSoftmax") else logarithm.inputs[0]
        # 3 (exponentials.py, 3)
        if logarithm is not None and scores is not None and abs(each.log_base - 1.0) <= ROUNDING:
            return SoftmaxAnchor(scores, output, _axes(logarithm, scores, info), (logarithm, *each.nodes))
    found = of_logarithm(output, info)  # 4
    if found is None:
        return None
    return SoftmaxAnchor(
        found.scores,
        output,
        found.axes,
        found.nodes,
        found.overflows,
        rounds=found.rounds,
        log_base=found.log_base,
    )


def _decomposed(node: ir.Node, info: ShapeInfo) -> SoftmaxAnchor | None:
    """Cases 5 to 7: a quotient."""
    ratios = (_ratio(found, info) for found in matches(QUOTIENT, node.outputs[0], info))
    return next((anchor for anchor in ratios if anchor is not None), None)


def _ratio(quotient: Match, info: ShapeInfo) -> SoftmaxAnchor | None:
    """The softmax that a quotient is, if these are exponentials and their total."""
    total, dividing = quotient["total"], quotient.nodes
    unfloored, floors = _without_floors(total, quotient["e"], info)
    for own_total, sink_part in ((unfloored, None), *summands(unfloored)):
        exponentials_value, path = _exponentials_of(quotient["e"], own_total, info)
        found = match(EXPONENTIALS, exponentials_value, info)
        sums = None if found is None else reduced(own_total, SUMS, exponentials_value, info)  # 11, 13
        log_base = None if found is None else log_base_of(found, info)  # 15
        if found is None or sums is None or log_base is None or _is_number(found.get("factor"), info):
            continue
        scores, masked = found["x"], len(found.nodes) > 1
        subtracted = _subtracted(scores, info) if log_base == 1.0 else None
        sink = None if sink_part is None else sink_total(unfloored, sink_part, subtracted, info)  # 14
        summing = (*sums[1], *(() if sink is None else sink.nodes), *floors)
        late = LateDivision(total, summing, dividing, path) if path else None
        nodes = found.nodes if late is not None else (*found.nodes, *summing, *dividing)
        output = exponentials_value if late is not None else dividing[-1].outputs[0]
        shift = shifted_by(scores, "ReduceMax", info, None if sink is None else sink.clamped_max)
        if shift is None and (scaled := times(scores, info)) is not None:
            shift = shifted_by(scaled[0], "ReduceMax", info)
            if shift is not None:
                log_base, nodes = log_base * scaled[1], (scaled[2], *nodes)
        if shift is not None and shift[0] != sums[0]:
            return None
        axes, shifted, shifting = (sums[0], scores, ()) if shift is None else shift
        overflows = shift is None or log_base <= 0.0  # 9
        return SoftmaxAnchor(
            shifted,
            output,
            axes,
            (*shifting, *nodes),
            overflows,
            late=late,
            masked=masked,
            floored=overflows and bool(floors),
            sink=sink,
            log_base=log_base,
        )
    return None


def _subtracted(scores: ir.Value, info: ShapeInfo) -> ir.Value | None:
    found = match(SHIFTED, scores, info)
    return None if found is None else found["row_max"]


def _is_number(value: ir.Value | None, info: ShapeInfo) -> bool:
    return value is not None and info.scalar(value) is not None


def _exponentials_of(value: ir.Value, total: ir.Value, info: ShapeInfo) -> tuple[ir.Value, tuple[ir.Node, ...]]:
    """The exponentials that a product with values reads, and the nodes from them to the product, if `total` is their
    sum. Otherwise the value itself and ()."""
    node, summed = value.producer(), match(SUM, source_through(total, "Identity", *RESHAPES), info)
    if summed is None or node is None or contraction(node, info) is None:
        return value, ()
    exponential = summed["e"]
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


def _without_floors(total: ir.Value, exponential: ir.Value, info: ShapeInfo) -> tuple[ir.Value, tuple[ir.Node, ...]]:
    """The total without its floors, and the nodes that keep it from being 0, in order. If there are any, an Expand that
    repeats the total to the exponentials' shape is one of them."""
    expand = total.producer()
    alike = info.shape(total) == info.shape(exponential) is not None
    repeated = expand.inputs[0] if is_op(expand, "Expand") and alike else None
    current = total if repeated is None else repeated
    floors: list[ir.Node] = []
    while (floored := match(FLOORED, current, info)) is not None:
        floors.insert(0, floored.nodes[0])
        current = floored["total"]
    if not floors:
        return total, ()
    if repeated is not None and expand is not None:
        floors.append(expand)
    return current, tuple(floors)
