"""What is done to the scores between their product and the softmax: one set of operations, from the graph to the plan.

    operations          hold of a tensor           made by
    ------------------  -------------------------  ---------------------------------------------------------
    of a score path     the value in the graph     matching/scores.py, with the steps that only a path has
    terms               Placed: with its axes      matching/score_walk.py
    of a bias           Viewed: as it is emitted   masks/mask.py and ready_made/, for emission/mask_builder.py

On a path and as terms they change the scores, in order. A bias starts as 0, and they change it in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import onnx_ir as ir

from fa_compiler.passes.layout.axes import Arrangement
from fa_compiler.passes.layout.views import View

Tensor = TypeVar("Tensor")


@dataclass(frozen=True)
class Add(Generic[Tensor]):
    """`sign * operand` added to everything so far."""

    node: ir.Node
    operand: Tensor
    sign: float = 1.0


@dataclass(frozen=True)
class Select(Generic[Tensor]):
    """Everything so far where the boolean `operand` equals `keep`, else `fill`."""

    node: ir.Node
    operand: Tensor
    keep: bool
    fill: float


@dataclass(frozen=True)
class Scale:
    """Everything so far times `factor`."""

    node: ir.Node
    factor: float


@dataclass(frozen=True)
class Floor:
    """Everything so far, but at least `floor`, a number that dominates."""

    node: ir.Node
    floor: float


ScoreOp = Add[Tensor] | Select[Tensor] | Scale | Floor


@dataclass(frozen=True)
class Placed:
    """A tensor along the axes of the scores: `dims` are the axes each of its dimensions runs along, () where it is 1.

    `fits`: what it is combined with is proven to keep the size of the scores in every run. A tensor that may enlarge
    them, by another batch say, has to reach the operator with all of its dimensions, for that refuses such a run.
    """

    value: ir.Value
    dims: Arrangement
    fits: bool = True


@dataclass(frozen=True)
class Viewed:
    """An operand of a bias as the emitter reads it. If `unrounded`, computed 16-bit numbers go on as they were
    computed, and if `moved`, also behind the one operator that moves them."""

    view: View
    unrounded: bool = False
    moved: bool = False


Term = ScoreOp[Placed]
MaskTerm = Add[Placed] | Select[Placed]
"""A term that may exclude keys."""
BiasOp = ScoreOp[Viewed]


@dataclass(frozen=True)
class Masked:
    """Positions excluded: where `view`, as a truth value, equals `when`. A float is true when it is not 0."""

    view: View
    when: bool = True

    @staticmethod
    def by(select: Select[Viewed]) -> Masked:
        """The positions that a selection fills."""
        return Masked(select.operand.view, not select.keep)

    def filled(self, node: ir.Node, fill: float) -> Select[Viewed]:
        """What gives these positions a number instead."""
        return Select(node, Viewed(self.view), not self.when, fill)
