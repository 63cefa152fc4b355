"""The scale, terms, factors and sink that the steps from the product of query and key to the
softmax add up to.

The exponent of powers (softmax.py, case 15) is the last scale. A factor up to 1 shrinks the number
of a mask as it does the scores. A larger one may make it infinite, while the graph subtracts the
maximum first and has 0 there.

Refused: a scale that rounds to 0 or infinity; a mask or bias before an exponent above 1; a sink, or
a factor of unknown size, before any exponent; what score_walk.py and the steps of scores.py refuse.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes
from fa_compiler.passes.answer.decline import OTHER_SCALE, Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.layout.operands import Operands
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.masks.magnitudes import LARGEST_SCALE, SMALLEST_SCALE
from fa_compiler.passes.masks.score_ops import Add, Scale, Term
from fa_compiler.passes.matching.added_product import AddedProduct, added_product
from fa_compiler.passes.matching.factors import RESERVE, Factor
from fa_compiler.passes.matching.score_walk import ScoreWalk
from fa_compiler.passes.matching.scores import Multiply, ScorePath
from fa_compiler.passes.matching.sinks import FoundSink

EXPONENTIALS_ADVICE = "write it as a Softmax of the scores times the logarithm of the base"
LARGEST_RATIO = 1024.0
"""How far the scales of two products may be apart: the operator has one scale, so that one of the
queries is multiplied by the ratio, and what is multiplied by more may overflow where the product
with the keys does not."""


@dataclass(frozen=True)
class FinalScores:
    """The scores at the softmax: their arrangement, and what was done to them."""

    dims: Arrangement
    scale: float
    terms: tuple[Term, ...]
    factors: tuple[Factor, ...]
    shifted: tuple[tuple[ir.Node, Axes], ...]
    found_sink: FoundSink | None
    added_product: AddedProduct | None = None
    softcap: float = 0.0
    rounded: tuple[ir.Node, ...] = ()

    @property
    def unbounded(self) -> Factor | None:
        """The first factor of unknown size."""
        return next((factor for factor in self.factors if factor.unbounded), None)

    @staticmethod
    def of(
        path: ScorePath,
        qk: Operands,
        viewer: Viewer,
        seen: dict[ir.Value, Arrangement],
        joins_added_product: bool,
        exponent: Scale | None = None,
    ) -> FinalScores:
        """Walk the scores down to the softmax. `seen` gets the arrangement of every value on the
        way. With `joins_added_product` a product that is added to the scores is a part of them, no
        bias. `exponent` is what powers multiply the scores by. Raises Decline."""
        may_join = joins_added_product and not any(
            isinstance(step, Multiply) for step in path.steps
        )
        added: list[AddedProduct] = []

        def take_product(step: Add[ir.Value], walk: ScoreWalk) -> bool:
            if not may_join or added or walk.terms or walk.scale == 0.0 or walk.softcap != 0.0:
                return False
            product = added_product(
                step.operand, step.sign / walk.scale, walk.dims, step.node, viewer
            )
            if product is None or not 1 / LARGEST_RATIO <= abs(product.ratio) <= LARGEST_RATIO:
                return False
            added.append(product)
            return True

        walk = ScoreWalk(
            viewer, seen, path.product.output, qk.out, path.product.factor * qk.scale, take_product
        )
        for step in path.steps:
            walk.take(step)
        if exponent is not None:
            _raise_to(exponent, walk)
        scale = walk.scale * (RESERVE if walk.is_unbounded else 1.0)
        if not (abs(walk.scale) >= SMALLEST_SCALE and abs(scale) <= LARGEST_SCALE):
            raise Decline(
                Code.SCALE,
                f"the scale {walk.scale:g} overflows or vanishes",
                path.product.node,
                OTHER_SCALE,
            )
        if walk.softcap != 0.0 and not SMALLEST_SCALE <= walk.softcap <= LARGEST_SCALE:
            raise Decline(
                Code.SOFTCAP,
                f"the soft cap {walk.softcap:g} overflows or vanishes",
                path.product.node,
            )
        return FinalScores(
            walk.dims,
            scale,
            tuple(walk.terms),
            tuple(walk.factors),
            tuple(walk.shifted),
            walk.found_sink,
            added[0] if added else None,
            walk.softcap,
            tuple(walk.rounded),
        )


def _raise_to(exponent: Scale, walk: ScoreWalk) -> None:
    """Multiply by what powers multiply the scores by. Raises Decline."""
    if walk.found_sink is not None:
        reason = "beside the scores is a sink, and their softmax is one of powers"
        raise Decline(Code.SCORE_TERM, reason, exponent.node, EXPONENTIALS_ADVICE)
    if walk.is_unbounded:
        reason = "scores times a factor of unknown size are multiplied once more, which may make them infinite"
        raise Decline(Code.SCALE, reason, exponent.node, EXPONENTIALS_ADVICE)
    if exponent.factor > 1.0 and walk.terms:
        reason = f"a mask or bias less the maximum is multiplied by {exponent.factor:g}, which may make it infinite"
        raise Decline(Code.SCORE_TERM, reason, exponent.node, EXPONENTIALS_ADVICE)
    walk.take(exponent)
