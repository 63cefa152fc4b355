"""Attention sinks: one more score in each row, which takes part in the softmax and has no value.

    p = torch.cat([scores, sink.expand(b, h, rows, 1)], -1).softmax(-1)
    output = p[..., :-1] @ v

Grammar, directly after the last term of the scores, and again after the softmax; the code cites the
numbers of the cases:

    scores_with_sink :=
      1     Concat(scores, t) | Concat(t, scores)       along the keys; t has size 1 there: one
                                                        number for each head,
                                                        or for all of them, also with copies for
                                                        batches and rows
      2   | Pad(scores, 1 in front or after, c)         along the keys; the number c
    dropped :=
      3     Slice(probabilities) | Split(probabilities)    that leaves out exactly that column

This is the definition of the operator's input `sink`: exp(sink - max) is added to a row's sum. A
row whose scores are all masked gives zeros, for the sink then has all of the probability.

Refused: a sink that differs between rows or batch entries; a term or factor after it; a column that
is kept, or another one that is left out; the same along another axis, which adds a row or a head to
leave it out again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.nodes import (
    is_op,
    is_read,
    operand_at,
    sole,
)
from fa_compiler.passes.layout.views import View, Viewer
from fa_compiler.passes.masks.narrow import is_constant_along
from fa_compiler.passes.matching.sink_totals import SinkTotal
from fa_compiler.passes.matching.softmax import SoftmaxAnchor
from fa_compiler.passes.ops.cuts import NO_PADS, filler_of, pads_along
from fa_compiler.passes.ops.parts import concat_of, start_along
from fa_compiler.passes.values.facts import Facts
from fa_compiler.passes.values.shapes import ShapeInfo


@dataclass(frozen=True)
class SinkSource:
    """One more score along `axis`, in front of the others or after them: `value`, or `number` where
    there is none."""

    node: ir.Node
    axis: int
    first: bool
    value: ir.Value | None
    number: float | None = None


@dataclass(frozen=True)
class Sink:
    """What becomes the operator's input: a view whose own axes are those of the heads, or a number
    for all of them."""

    view: View | None = None
    number: float = 0.0

    def varies_along(self, info: ShapeInfo) -> Arrangement:
        """The dimensions of the view's base, without those along which it is a copy: a simplifier
        stores a sink with one for each batch entry and row, where their sizes are known."""
        if self.view is None:
            return ()
        base, dims = self.view.base, self.view.base_dims
        return tuple(
            () if dim and is_constant_along(base, axis, info) else dim
            for axis, dim in enumerate(dims)
        )


@dataclass(frozen=True)
class FoundSink:
    """Scores with a sink: `kv_seq` are the axes of the keys, `length` their size, `axes_with_sink`
    the axis of keys and sink together."""

    step: SinkSource
    sink: Sink
    kv_seq: Axes
    axes_with_sink: Axes
    length: Dim


def sinks(node: ir.Node, info: ShapeInfo) -> Iterator[tuple[SinkSource, ir.Value]]:
    """How a node may be read as scores with a sink."""
    shape = info.shape(node.outputs[0])
    if shape is None:
        return
    rank, joined = len(shape), concat_of(node, info)
    if joined is not None and len(joined.parts) == 2:  # 1
        for index, (value, scores) in enumerate((joined.parts, joined.parts[::-1])):
            if joined.size(value, info) == Dim(1):
                yield SinkSource(node, joined.axis, index == 0, value), scores
    elif is_op(node, "Pad"):  # 2
        place, number = _padded_column(node, rank, info), filler_of(node, info)
        if place is not None and number is not None:
            yield SinkSource(node, *place, None, number), operand_at(node, 0)


def _padded_column(node: ir.Node, rank: int, info: ShapeInfo) -> tuple[int, bool] | None:
    """Case 2: the axis along which a Pad puts one element, and nothing elsewhere, and whether this
    is the first one."""
    widths = pads_along(node, info, rank) or {}
    axis = sole(axis for axis, pair in widths.items() if pair != NO_PADS)
    in_front, behind = (Dim(1), Dim(0)), (Dim(0), Dim(1))
    if axis is None or widths[axis] not in (in_front, behind):
        return None
    return axis, widths[axis] == in_front


def append_sink(
    step: SinkSource, number: float | None, dims: Arrangement, viewer: Viewer
) -> tuple[Arrangement, FoundSink]:
    """What a sink makes of the scores' arrangement; `number` is its value where that is known to be
    the same in every row."""
    shape = viewer.info.sizes(step.node.outputs[0])
    if len(shape) != len(dims):
        raise Decline(Code.RANK, "the rank of the scores with their sink is unknown", step.node)
    axes_with_sink = viewer.space.new(shape[step.axis])
    if not axes_with_sink:
        raise Decline(Code.SHAPE, "a sink without a key beside it", step.node)
    sink = _column(step, dims, viewer) if number is None else Sink(number=number)
    with_sink = (*dims[: step.axis], axes_with_sink, *dims[step.axis + 1 :])
    return with_sink, FoundSink(step, sink, dims[step.axis], axes_with_sink, shape[step.axis] - 1)


def _column(step: SinkSource, dims: Arrangement, viewer: Viewer) -> Sink:
    """The sink that is a column beside scores of this arrangement. Raises Decline."""
    assert step.value is not None
    view = viewer.view(step.value, factors=False)
    if view is None or len(view.dims) != len(dims):
        raise Decline(Code.RANK, f"the rank of {step.value.name!r} is unknown", step.node)
    for index, (own, wanted) in enumerate(zip(view.dims, dims, strict=True)):
        if index != step.axis and not viewer.space.unify(own, wanted):
            raise Decline(
                Code.SHAPE,
                f"the shape of {step.value.name!r} was not proven to fit the scores",
                step.node,
            )
    return Sink(view)


def without_sink(
    node: ir.Node, dims: Arrangement, found_sink: FoundSink | None, viewer: Viewer
) -> Arrangement:
    """Case 3: the arrangement without the sink's column; declines where the node leaves out
    anything else."""
    axis = None
    if found_sink is not None:
        axis = next(
            (
                axis
                for axis, dim in enumerate(dims)
                if viewer.space.resolve(dim) == found_sink.axes_with_sink
            ),
            None,
        )
    if found_sink is None or axis is None or not _drops_column(node, axis, found_sink, viewer.info):
        reason = f"{node.op_type} on the probabilities has no counterpart in the operator"
        raise Decline(Code.PROBABILITY_TERM, reason, node)
    return (*dims[:axis], found_sink.kv_seq, *dims[axis + 1 :])


def _drops_column(node: ir.Node, axis: int, found_sink: FoundSink, info: ShapeInfo) -> bool:
    """Case 3: does a Slice or Split leave out the sink's column along an axis, and nothing else?"""
    output = next(value for value in node.outputs if is_read(value))
    before, after = info.sizes(operand_at(node, 0)), info.shape(output)
    if after != (*before[:axis], found_sink.length, *before[axis + 1 :]):
        return False
    return start_along(output, axis, info) == int(found_sink.step.first)


def sink_lower_bound(found_sink: FoundSink, facts: Facts, guarded: bool) -> float:
    """A number that every sink is proven to be above. Raises Decline where a sink may be +inf.

    A sink that is unknown, or may be NaN, is declined only beside a guard by the mask: with a sink
    of +inf or NaN a row without a key would be NaN, and the guard makes it 0, which the operator
    cannot tell apart. Without a guard the answer is -inf: the mask then stays a bias, and a row
    without a key is NaN beside a sink that is NaN.
    """
    value, number = found_sink.step.value, found_sink.sink.number
    if found_sink.sink.view is not None:
        unless_nan, always = facts.bounds.unless_nan(value), facts.bounds.always(value)
    else:
        unless_nan = always = (number, number)
    if always is None and guarded:
        reason = "a sink that may be +inf or NaN turns every row into NaN, but for those that the guard makes 0"
        raise Decline(
            Code.PROBABILITY_TERM, reason, found_sink.step.node, "make the sink a constant"
        )
    if unless_nan is not None and unless_nan[1] == math.inf:
        raise Decline(
            Code.SCORE_TERM,
            "a sink that may be +inf turns every row into NaN",
            found_sink.step.node,
        )
    return -math.inf if always is None else always[0]


def beside_total(step: SinkSource, sink: Sink, kv_seq: Axes, viewer: Viewer) -> FoundSink:
    """A sink that never was a column of the scores. The axis of keys and sink together is one of
    its own, which nothing in the graph has."""
    length = viewer.space.size(kv_seq)
    return FoundSink(step, sink, kv_seq, viewer.space.new(Dim(2) * length), length)


def sink_in_total(
    anchor: SoftmaxAnchor, total: SinkTotal, dims: Arrangement, kv_seq: Axes, viewer: Viewer
) -> FoundSink:
    """The sink in the total of exponentials of this arrangement. Raises Decline."""
    axis = anchor.axis
    if axis is None:
        raise Decline(Code.AXIS, "a sink in a total over several axes", anchor.node)
    add, difference = total.nodes[-1], total.nodes[0]
    if viewer.info.dtype(add.outputs[0]) != ir.DataType.FLOAT:
        raise Decline(Code.DTYPE, "a sink in a total that is not float32 may overflow", add)
    if total.value is None:
        step = SinkSource(difference, axis, False, None, total.number)
        return beside_total(step, Sink(number=total.number), kv_seq, viewer)
    across = (*dims[:axis], (), *dims[axis + 1 :])
    sink = sink_of(total.value, across, difference, viewer)
    return beside_total(SinkSource(difference, axis, False, total.value), sink, kv_seq, viewer)


def sink_of(value: ir.Value, dims: Arrangement, node: ir.Node, viewer: Viewer) -> Sink:
    """The sink that `node` reads beside something of this arrangement: a number where it is known
    to be one for all."""
    number = viewer.facts.sets.only(value)
    if number is None:
        return Sink(viewer.broadcast_view(value, dims, node))
    viewer.alignment(value, dims, node)
    return Sink(number=number)
