"""After the softmax: the probabilities as the product with the values takes them.

arrangement    what the layout operators between the two make of the scores' arrangement
factors        what the probabilities are multiplied by; a number is a part of a dropout, where
               there is one
dropout        the one drop mask, where the gradient is fused, too; else it is one of the factors
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.nodes import is_op
from fa_compiler.passes.layout.operands import Operands
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.matching.attention_paths import AttentionPaths
from fa_compiler.passes.matching.dropout import Dropout, drop_mask, dropped, kept_by
from fa_compiler.passes.matching.factors import Factor, on_probabilities, operand
from fa_compiler.passes.matching.final_scores import FinalScores
from fa_compiler.passes.matching.probability_path import ProbabilityPath, carried_output
from fa_compiler.passes.matching.sinks import without_sink
from fa_compiler.passes.ops.moves import keeps_everything

KEEPING = ("IsNaN", "Where", "Add", "QuantizeLinear", "DequantizeLinear")
"""Operators of the path that move no element."""


@dataclass(frozen=True)
class Probabilities:
    """The probabilities at the product with the values. `seen` has the arrangement of every value
    between the two products."""

    dims: Arrangement
    factors: tuple[Factor, ...]
    dropout: Dropout | None
    seen: Mapping[ir.Value, Arrangement]

    @staticmethod
    def of(paths: AttentionPaths) -> Probabilities:
        """Walk down to the product. Raises Decline."""
        anchor, after, scores, viewer = paths.anchor, paths.after, paths.scores, paths.viewer
        seen, in_front = dict(paths.dims), after.in_front_of_guard
        drops = (
            [node for node in after.nodes if drop_mask(node, viewer) is not None]
            if paths.route.gradient
            else []
        )
        if len(drops) != 1:
            return Probabilities(
                *_arrangement_and_factors(anchor.output, after, scores, viewer, seen, in_front),
                None,
                seen,
            )
        (drop,) = drops
        index = after.nodes.index(drop)
        before, following = (
            replace(after, nodes=after.nodes[:index]),
            replace(after, nodes=after.nodes[index + 1 :]),
        )
        dims, factors = _arrangement_and_factors(
            anchor.output, before, scores, viewer, seen, in_front
        )
        dropout, scale = dropped(drop, dims, viewer)
        seen[drop.outputs[0]] = dims
        dims, more = _arrangement_and_factors(
            drop.outputs[0], following, replace(scores, dims=dims), viewer, seen, in_front
        )
        return Probabilities(dims, (), kept_by(dropout, scale, (*factors, *more)), seen)

    def product(self, paths: AttentionPaths) -> Operands:
        """The product with the values, whose other operand these are. Raises Decline."""
        after = paths.after
        return Operands.of(
            after.product, paths.viewer, given=(after.side, self.dims), factors=False
        )


def _arrangement_and_factors(
    start: ir.Value,
    path: ProbabilityPath,
    scores: FinalScores,
    viewer: Viewer,
    seen: dict[ir.Value, Arrangement],
    in_front: Collection[ir.Node],
) -> tuple[Arrangement, tuple[Factor, ...]]:
    """Walk the probabilities from `start` down to the product: their arrangement, and the factors
    on them. The nodes `in_front` are in front of a guard."""
    dims, found_sink, value = scores.dims, scores.found_sink, start
    factors: list[Factor] = []
    again = () if path.divided is None else path.divided.nodes
    for node in path.nodes:
        if node in again:
            value = node.outputs[0]
            seen[value] = dims
            continue
        if is_op(node, "Slice", "Split") and not keeps_everything(node, viewer.info):
            dims = without_sink(node, dims, found_sink, viewer)
        elif (other := operand(node, value)) is not None:
            factors.append(on_probabilities(node, *other, dims, viewer, guarded=node in in_front))
        elif node.op_type not in KEEPING:
            moved = viewer.rearranged(node, dims)
            if moved is None:
                raise Decline(
                    Code.SHAPE,
                    f"what {node.op_type} does to the probabilities was not proven",
                    node,
                )
            dims = moved
        value = value if node.op_type == "IsNaN" else carried_output(node)
        seen.update((output, dims) for output in node.outputs)
    if found_sink is not None and any(
        viewer.space.resolve(dim) == found_sink.axes_with_sink for dim in dims
    ):
        raise Decline(
            Code.PROBABILITY_TERM, "the sink's probability is not left out", found_sink.step.node
        )
    return dims, tuple(factors)
