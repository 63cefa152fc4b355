"""Attention sinks as a gate on the result: attention without a sink, times the share that a sink
would leave it.

    output = (scores.softmax(-1) @ v) * torch.sigmoid(scores.logsumexp(-1, keepdim=True) - sink)

Grammar, after the product with the values, which nothing else reads:

    output := Mul(product, gate)
    gate   := layout(Sigmoid(layout(Sub(lse, t))))     layout only puts the keys' axis back, casts
                                                       change nothing; t one number for each head,
                                                       or for all
    lse    := ReduceLogSumExp(x, keys)          x the softmax's input

Sound because sigmoid(log(sum) - t) = sum / (sum + exp(t)), so that the product of softmax and gate
is exp(x) over sum + exp(t): the softmax beside one more score t (sinks.py). It differs in rows
whose scores are all -inf: here they are NaN, beside a sink they are 0. So no term may make such a
row, unless a guard makes it 0 here, too. A row with a NaN is NaN in both, because the gate is NaN,
too. A row with +inf is NaN in both without a guard; with a guard it is 0 here. So beside a guard no
term may be +inf. A guard that selects leaves a row NaN that another term than its mask makes -inf,
and a factor of 0 leaves NaN in any case. A row of a mask's finite number is 0 in both, for its
logarithm is that number. A sink of +inf gives 0 here and NaN there, so it has to be proven less.
The softmax has to be one of exponentials, because the gate sums exponentials, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.nodes import (
    certain,
    distinct_consumers,
    int_attr,
    is_op,
    operand_at,
    places_of,
)
from fa_compiler.passes.layout.contraction import Contraction
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.matching.sinks import FoundSink, SinkSource, beside_total, sink_of
from fa_compiler.passes.ops.movers import RESHAPES
from fa_compiler.passes.values.patterns import Bind, Op, Through, match
from fa_compiler.passes.values.shapes import ShapeInfo

TOTAL = Op("ReduceLogSumExp", Bind("scores"), open_end=True, name="total")


@dataclass(frozen=True)
class SinkGate:
    """A gate: `sink` is t, `difference` the Sub, `layout` the operators that only move elements,
    `nodes` all of its nodes, the Mul last."""

    sink: ir.Value
    difference: ir.Node
    layout: tuple[ir.Node, ...]
    nodes: tuple[ir.Node, ...]
    kept: bool
    """Does the logarithm of the sum keep the keys' axis?"""

    @property
    def output(self) -> ir.Value:
        """The gated result."""
        return self.nodes[-1].outputs[0]


def sink_gate(scores: ir.Value, product: Contraction, info: ShapeInfo) -> SinkGate | None:
    """The gate on a product, where there is one that depends on these scores."""
    readers = distinct_consumers(product.output)
    if len(readers) != 1 or info.dtype(product.output) != ir.DataType.FLOAT:
        return None

    def plain(node: ir.Node) -> ir.Value | None:
        source = operand_at(node, 0)
        if (
            is_op(node, "Cast")
            and not info.dtype(source) == info.dtype(node.outputs[0]) == ir.DataType.FLOAT
        ):
            return None
        return source if is_op(node, "Identity", *RESHAPES, "Cast") else None

    difference = Op("Sub", TOTAL, Bind("sink"), name="difference")
    gate = Through(plain, Op("Sigmoid", Through(plain, difference)))
    known = {"product": product.output, "scores": scores}
    gated_product = match(Op("Mul", Bind("product"), gate), readers[0].outputs[0], info, known)
    if gated_product is None:
        return None
    reduction, sub = (
        certain(gated_product["total"].producer()),
        certain(gated_product["difference"].producer()),
    )
    rank = len(info.sizes(scores))
    if places_of(reduction, rank) != [rank - 1]:
        return None
    layout = tuple(node for node in gated_product.nodes if plain(node) is not None)
    return SinkGate(
        gated_product["sink"],
        sub,
        layout,
        gated_product.nodes,
        bool(int_attr(reduction, "keepdims", 1)),
    )


def gated(
    gate: SinkGate, dims: Arrangement, out: Arrangement, kv_seq: Axes, viewer: Viewer
) -> FoundSink:
    """The scores of this arrangement with the gate's sink; `out` is the product's. Raises
    Decline."""
    interval = viewer.facts.bounds.unless_nan(gate.sink)
    if interval is None or interval[1] == math.inf:
        reason = "a sink that may be +inf gives 0 behind the product, and NaN beside the scores"
        raise Decline(Code.SCORE_TERM, reason, gate.difference)
    resolve = viewer.space.resolve
    if resolve(dims[-1]) != resolve(kv_seq):
        raise Decline(
            Code.SCORE_TERM,
            "the sum of a gate runs over another axis than the keys'",
            gate.nodes[0],
        )
    current = (*dims[:-1], ()) if gate.kept else dims[:-1]
    sink = sink_of(gate.sink, current, gate.difference, viewer)
    for node in gate.layout:
        moved = viewer.rearranged(node, current)
        if moved is None:
            raise Decline(Code.SHAPE, f"what {node.op_type} does to a gate was not proven", node)
        current = moved
    rows = viewer.space.resolve_all((*out[:-1], ()))
    if viewer.space.resolve_all(current) != rows:
        raise Decline(Code.SHAPE, "a gate that is not one number for each row", gate.nodes[-1])
    return beside_total(
        SinkSource(gate.difference, len(dims) - 1, False, gate.sink), sink, kv_seq, viewer
    )
