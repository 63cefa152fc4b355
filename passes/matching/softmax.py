"""The anchors: every softmax of a graph, in any spelling.

    p = x.softmax(-1)
    e = (x - x.amax(-1, keepdim=True)).exp();  p = e / e.sum(-1, keepdim=True)
    p = (x - x.logsumexp(-1, keepdim=True)).exp()
    output = (e @ v) / e.sum(-1, keepdim=True)

Grammar; the code cites the numbers of the cases:

    softmax, over the axis a :=
      1     Softmax(x)                                     opset >= 13: over axis a opset < 13: over
                                                           axes a.. flattened; taken when all of
                                                           them but one are of size 1
      2   | Softmax(Sub(x, ReduceMax(x, a)))
      3   | exp(LogSoftmax(x))
      4   | exp(Sub(x, logsumexp(x)))                      in many spellings, see exponentials.py
      5   | Div(e, total)
      6   | Mul(e, Reciprocal(total)) | Mul(e, Div(1, total)) | Mul(e, Pow(total, -1))
      7   | e, where product(layout(e), values) / total follows: the division is late
    e :=
      8     exp(Sub(x, ReduceMax(x, a)))                   also times one number c > 0
      9   | exp(x)                                         declined: it overflows, as do powers of a
          b below 1
     10   | Mul(exp(.), t) | Where(c, exp(.), 0) | Where(c, 0, exp(.))
          declined: masked exponentials
    exp(x) :=
     15     Exp(x) | Pow(b, x)                             b > 0 one number, see exponentials.py
    total :=
     11     ReduceSum(e, a) | ReduceL1(e, a)               no exponential is negative; also summed
          up in a wider type
     12   | Add(total, c) | Max(total, c) | Clip(total, c)
          0 <= c <= 1e-7; Max, Clip up to 1
     13   | Expand(total), as e is
     14   | a sum beside a sink, see sink_totals.py

    All reductions keep the axis, with size 1. They may also drop it and put it back by Unsqueeze or
    Reshape, and repeat their result by Expand, see row_reductions.py. A softmax that is written out
    may run over several axes, as of keys along height and width: the same axes everywhere. What is
    written in another way is named by other_softmaxes.py.

Subtracting a row's maximum changes no softmax: where it is infinite both are NaN. The decomposed
form (5 and 6) is the operator's own definition; its total is at least 1, so that a number as small
as that of 12 is lost in it. A row's total may as well divide its sum of values (7), for that is
linear; in 16 bits such a sum may overflow. A power b^y (15) is exp(log(b) y), and a factor c behind
the maximum (8) multiplies that exponent, too: such an anchor is the softmax of log_base * x, where
log_base is c log(b). attention_paths.py makes it the last scale of the scores. In a sink of the
total (14) only Exp is read, for its exponentials are to one base. Without the subtraction of the
maximum (9) the value overflows where Softmax does not: that form is an anchor only to be declined.
So is one whose exponentials are masked (10): where the maximum is that of a masked key, and far
above the others, nothing is left to divide by.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import (
    first,
    inputs_of,
    is_dead,
    is_op,
    operand_at,
    opset,
    outputs_of,
    sole,
    source_through,
    without_none,
)
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
from fa_compiler.passes.ops.reduce import axes_combined
from fa_compiler.passes.values.patterns import Bind, Match, Number, OneOf, Op, match, matches
from fa_compiler.passes.values.shapes import ShapeInfo

LATE_LAYOUT = (*LAYOUT_OPS, "Mul", "Dropout")
"""What may lie between exponentials and a product that is divided late."""
SMALLEST = 1e-7
"""A number up to this is lost in a float32 total of 1 or more, but for its last bit."""

E, TOTAL, OTHER = Bind("e"), Bind("total"), Bind("other")
INVERSE = OneOf(
    (Op("Reciprocal", TOTAL), Op("Div", Number(1.0), TOTAL), Op("Pow", TOTAL, Number(-1.0)))
)
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

    The nodes `summing` compute the total, and the nodes `dividing` divide. `path` leads from the
    exponentials to the product, whose node is the last.
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

    `axes` are the axes it runs over, sorted and not negative; empty if they are unknown. Further
    fields:

    overflows   no maximum is subtracted
    rounds      the logarithm of the sum is subtracted from the scores (case 4)
    masked      the exponentials are masked before they are summed
    floored     set only with `overflows`: something keeps the total from being 0
    late        the division comes after the product with the values, and `output` is then the
                exponentials
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
        return sole(self.axes)

    @property
    def node(self) -> ir.Node:
        """The node the report names."""
        return self.nodes[-1]


def anchors(graph: ir.Graph, info: ShapeInfo) -> Iterator[SoftmaxAnchor]:
    """All anchors of one graph in its order, those of subgraphs not included.

    If exponentials are divided by their total before the product and also after it, as where the
    probabilities are an output, both are one softmax: that of the late division.
    """
    listed = without_none(anchor_at(node, info) for node in list(graph))
    divisions = ((anchor.output, anchor.late) for anchor in listed if anchor.late is not None)
    late = {output for output, division in divisions if not is_dead(division.dividing[-1])}
    for anchor in listed:
        if anchor.late is not None or late.isdisjoint(outputs_of(anchor.nodes)):
            yield anchor


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
    shape = info.sizes(scores)
    axes = axes_combined(node, len(shape), opset(node), info)
    if axes is None or len(axes) == 1:
        return tuple(axes or ())
    longer = tuple(axis for axis in axes if shape[axis].const != 1)
    return () if len(longer) > 1 else longer or (axes[-1],)


def _of_logarithm(node: ir.Node, info: ShapeInfo) -> SoftmaxAnchor | None:
    """Cases 3 and 4: the exponential of a logarithm."""
    output = node.outputs[0]
    for exponential in exponentials(output, info):
        logarithm = exponential.exponent.producer()
        # 3 (exponentials.py, 3)
        if is_op(logarithm, "LogSoftmax") and abs(exponential.log_base - 1.0) <= ROUNDING:
            scores = operand_at(logarithm, 0)
            return SoftmaxAnchor(
                scores, output, _axes(logarithm, scores, info), (logarithm, *exponential.nodes)
            )
    softmax = of_logarithm(output, info)  # 4
    if softmax is None:
        return None
    return SoftmaxAnchor(
        softmax.scores,
        output,
        softmax.axes,
        softmax.nodes,
        softmax.overflows,
        rounds=softmax.rounds,
        log_base=softmax.log_base,
    )


def _decomposed(node: ir.Node, info: ShapeInfo) -> SoftmaxAnchor | None:
    """Cases 5 to 7: a quotient."""
    return first(_ratio(quotient, info) for quotient in matches(QUOTIENT, node.outputs[0], info))


@dataclass(frozen=True)
class _Shift:
    """What is subtracted from the scores before their exponentials: the axes of a maximum, the
    scores without it, and the nodes that subtract it. `factor` is a number behind the subtraction.
    Without `axes` nothing is subtracted."""

    axes: tuple[int, ...] | None
    scores: ir.Value
    nodes: tuple[ir.Node, ...] = ()
    factor: float = 1.0

    @staticmethod
    def of(exponent: ir.Value, sink: SinkTotal | None, info: ShapeInfo) -> _Shift:
        """The shift in an exponent, beside this sink."""
        clamped_max = None if sink is None else sink.clamped_max
        if (shift := shifted_by(exponent, "ReduceMax", info, clamped_max)) is not None:
            return _Shift(*shift)
        if (scaled := times(exponent, info)) is not None:
            difference, factor, scaling = scaled
            if (shift := shifted_by(difference, "ReduceMax", info)) is not None:
                axes, scores, nodes = shift
                return _Shift(axes, scores, (*nodes, scaling), factor)
        return _Shift(None, exponent)


@dataclass(frozen=True)
class _Weights:
    """Exponentials and their sum: what a quotient divides, and by what. `path` leads from the
    exponentials to a product with values that the quotient divides late; it is empty in front of
    the product."""

    output: ir.Value
    path: tuple[ir.Node, ...]
    exponentials: Match
    axes: tuple[int, ...]
    summing: tuple[ir.Node, ...]
    log_base: float

    @staticmethod
    def of(divided: ir.Value, total: ir.Value, info: ShapeInfo) -> _Weights | None:
        """The weights where `total` is their sum; None where these are no exponentials, or it is no
        sum of them."""
        output, path = _exponentials_of(divided, total, info)
        exponentials = match(EXPONENTIALS, output, info)
        if exponentials is None or _is_number(exponentials.get("factor"), info):
            return None
        # 11, 13 and 15
        sums, log_base = reduced(total, SUMS, output, info), log_base_of(exponentials, info)
        if sums is None or log_base is None:
            return None
        return _Weights(output, path, exponentials, *sums, log_base)


def _ratio(quotient: Match, info: ShapeInfo) -> SoftmaxAnchor | None:
    """The softmax that a quotient is, if these are exponentials and their total."""
    total, floors = _without_floors(quotient["total"], quotient["e"], info)
    for own_total, added in ((total, None), *summands(total)):
        weights = _Weights.of(quotient["e"], own_total, info)
        if weights is not None:
            sink = None if added is None else _sink_beside(weights, total, added, info)
            return _anchor(quotient, weights, sink, floors, info)
    return None


def _sink_beside(weights: _Weights, total: ir.Value, added: ir.Value, info: ShapeInfo) -> SinkTotal:
    """Case 14: the sink that is added to a sum of exponentials to the base e."""
    difference = match(SHIFTED, weights.exponentials["x"], info)
    subtracted = (
        difference["row_max"] if difference is not None and weights.log_base == 1.0 else None
    )
    return sink_total(total, added, subtracted, info)


def _anchor(
    quotient: Match,
    weights: _Weights,
    sink: SinkTotal | None,
    floors: tuple[ir.Node, ...],
    info: ShapeInfo,
) -> SoftmaxAnchor | None:
    """The softmax of these weights; None where a maximum along other axes is subtracted than those
    of the sum."""
    shift = _Shift.of(weights.exponentials["x"], sink, info)
    if shift.axes not in (None, weights.axes):
        return None
    log_base = weights.log_base * shift.factor
    overflows = shift.axes is None or log_base <= 0.0  # 9
    sinks = () if sink is None else sink.nodes
    summing, dividing = (*weights.summing, *sinks, *floors), quotient.nodes
    nodes = (*shift.nodes, *weights.exponentials.nodes)
    whole = SoftmaxAnchor(
        shift.scores,
        dividing[-1].outputs[0],
        weights.axes,
        (*nodes, *summing, *dividing),
        overflows,
        masked=len(weights.exponentials.nodes) > 1,
        floored=overflows and bool(floors),
        sink=sink,
        log_base=log_base,
    )
    if not weights.path:
        return whole
    late = LateDivision(quotient["total"], summing, dividing, weights.path)
    return replace(whole, output=weights.output, nodes=nodes, late=late)


def _is_number(value: ir.Value | None, info: ShapeInfo) -> bool:
    return value is not None and info.scalar(value) is not None


def _exponentials_of(
    value: ir.Value, total: ir.Value, info: ShapeInfo
) -> tuple[ir.Value, tuple[ir.Node, ...]]:
    """The exponentials that a product with values reads, and the nodes from them to the product, if
    `total` is their sum. Otherwise the value itself and ()."""
    product, sums = value.producer(), match(SUM, source_through(total, "Identity", *RESHAPES), info)
    if sums is None or product is None or contraction(product, info) is None:
        return value, ()
    for operand in inputs_of(product):
        path = _layout_between(sums["e"], operand)
        if path is not None:
            return sums["e"], (*path, product)
    return value, ()


def _layout_between(source: ir.Value, value: ir.Value) -> tuple[ir.Node, ...] | None:
    """Case 7: the nodes that lay out one value as another; None where they do something else."""
    path: list[ir.Node] = []
    while value is not source:
        node = value.producer()
        if not is_op(node, *LATE_LAYOUT):
            return None
        path.insert(0, node)
        value = operand_at(node, 0)
    return tuple(path)


def _without_floors(
    total: ir.Value, exponential: ir.Value, info: ShapeInfo
) -> tuple[ir.Value, tuple[ir.Node, ...]]:
    """The total without its floors, and the nodes that keep it from being 0, in order. If there are
    any, an Expand that repeats the total to the exponentials' shape is one of them."""
    current, repeating = total, tuple[ir.Node, ...]()
    expand = total.producer()
    if is_op(expand, "Expand") and info.shape(total) == info.shape(exponential) is not None:
        current, repeating = operand_at(expand, 0), (expand,)
    floors: list[ir.Node] = []
    while (floored := match(FLOORED, current, info)) is not None:
        floors.insert(0, floored.nodes[0])
        current = floored["total"]
    return (current, (*floors, *repeating)) if floors else (total, ())
