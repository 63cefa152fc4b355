"""Behind the softmax: the probabilities as the product with the values takes them.

arrangement    what the layout operators between the two make of the scores' arrangement
factors        what the probabilities are multiplied by; a number is a part of a dropout, where there is one
dropout        the one drop mask, where the gradient is fused, too; else it is one of the factors
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from fa_compiler.passes.layout.axes import Arrangement
from fa_compiler.passes.layout.operands import Operands
from fa_compiler.passes.matching.dropout import Dropout, drop_mask, dropped, kept_by
from fa_compiler.passes.matching.factors import Factor
from fa_compiler.passes.matching.simulation import Simulation
from fa_compiler.passes.matching.steps import Steps


@dataclass(frozen=True)
class Probabilities:
    """The probabilities at the product with the values. `seen` has the arrangement of every value between the two
    products."""

    dims: Arrangement
    factors: tuple[Factor, ...]
    dropout: Dropout | None
    seen: Mapping[ir.Value, Arrangement]

    @staticmethod
    def of(steps: Steps) -> Probabilities:
        """Walk down to the product. Raises Decline."""
        anchor, after, scores, viewer = steps.anchor, steps.after, steps.scores, steps.viewer
        seen = dict(steps.dims)
        walk = Simulation(viewer, seen)
        drops = [node for node in after.nodes if drop_mask(node, viewer) is not None] if steps.route.gradient else []
        if len(drops) != 1:
            return Probabilities(*walk.after(anchor.output, after, scores), None, seen)
        (drop,) = drops
        index = after.nodes.index(drop)
        before, behind = replace(after, nodes=after.nodes[:index]), replace(after, nodes=after.nodes[index + 1 :])
        dims, factors = walk.after(anchor.output, before, scores)
        dropout, scale = dropped(drop, dims, viewer)
        seen[drop.outputs[0]] = dims
        dims, more = walk.after(drop.outputs[0], behind, replace(scores, dims=dims))
        return Probabilities(dims, (), kept_by(dropout, scale, (*factors, *more)), seen)

    def product(self, steps: Steps) -> Operands:
        """The product with the values, whose other operand these are. Raises Decline."""
        after = steps.after
        return Operands.of(after.product, steps.viewer, given=(after.side, self.dims), factors=False)
