"""The operations on the scores between their product and the softmax: one set of them, from the
graph to the plan.

    operations          their tensors are                made by
    ------------------  -------------------------------  ---------------------------------------------------------
    of a score path     values of the graph              matching/scores.py, with the steps that only a path has
    terms               AlignedTensor: with their axes   matching/score_walk.py
    of a bias           BiasOperand: as emitted          masks/mask.py and attention_ops/, for rewrite/mask_builder.py

On a path and as terms, the operations change the scores, in order. A bias starts as 0, and its
operations change it in the same way. "The result so far" below is the scores or the bias.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement
from fa_compiler.passes.layout.views import View

Tensor = TypeVar("Tensor")


@dataclass(frozen=True)
class Add(Generic[Tensor]):
    """Add `sign * operand` to the result so far."""

    node: ir.Node
    operand: Tensor
    sign: float = 1.0


@dataclass(frozen=True)
class Select(Generic[Tensor]):
    """Keep the result so far where the boolean `operand` equals `keep`, and put `fill`
    elsewhere."""

    node: ir.Node
    operand: Tensor
    keep: bool
    fill: float


@dataclass(frozen=True)
class Scale:
    """Multiply the result so far by `factor`."""

    node: ir.Node
    factor: float

    @property
    def rounds(self) -> bool:
        """May the product round? That by a power of 2 does not."""
        return abs(math.frexp(self.factor)[0]) != 0.5


@dataclass(frozen=True)
class Floor:
    """Raise the result so far to at least `floor`, a number as low as that of a mask."""

    node: ir.Node
    floor: float


ScoreOp = Add[Tensor] | Select[Tensor] | Scale | Floor


@dataclass(frozen=True)
class AlignedTensor:
    """A tensor along the axes of the scores. `dims` has the axes of each dimension, () for a
    dimension of 1.

    `never_enlarges` says that the tensor is proven not to enlarge the scores in any run. A tensor
    that may enlarge them, for example by another batch size, has to reach the operator with all of
    its dimensions, because the operator refuses such a run.
    """

    value: ir.Value
    dims: Arrangement
    never_enlarges: bool = True


@dataclass(frozen=True)
class BiasOperand:
    """An operand of a bias as the rewriter reads it.

    If `unrounded`, 16-bit numbers that ONNX Runtime computes in float32 are not rounded. If
    `moved`, this holds also after a single operator that moves them. `summands` are given where the
    base of the view is the sum of two tensors, one of which is only repeated along some of its
    axes.
    """

    view: View
    unrounded: bool = False
    moved: bool = False
    summands: tuple[View, ...] = ()


Term = ScoreOp[AlignedTensor]
MaskTerm = Add[AlignedTensor] | Select[AlignedTensor]
"""A term that may exclude keys."""
BiasOp = ScoreOp[BiasOperand]


def tensors_of(operations: Iterable[ScoreOp[Tensor]]) -> list[Tensor]:
    """The tensors that operations add, or select by."""
    return [step.operand for step in operations if isinstance(step, Add | Select)]


@dataclass(frozen=True)
class ExcludedPositions:
    """Excluded positions: those where `view`, as a truth value, equals `when`. A float is true when
    it is not 0.

    The base of the view may be longer than the scores in its dimension `cut`, where there is one:
    its first elements count.
    """

    view: View
    when: bool = True
    cut: int | None = None

    @staticmethod
    def by(select: Select[BiasOperand]) -> ExcludedPositions:
        """The positions that a selection fills."""
        return ExcludedPositions(select.operand.view, not select.keep)

    def filled(self, node: ir.Node, fill: float) -> Select[BiasOperand]:
        """The selection that puts a number at these positions. The base of the view is not cut."""
        assert self.cut is None
        return Select(node, BiasOperand(self.view), not self.when, fill)
