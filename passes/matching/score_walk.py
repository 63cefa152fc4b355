"""Scores on their way from the product of query and key to the softmax, as arrangements of axes.

ScoreWalk carries out the operations that a bias has as well (score_ops.py), and steps that only
move elements. Every other step is a class in scores.py whose `walk` uses the methods here: a new
kind of step needs no change in this file.

Refused: a step whose effect on the axes was not proven; a factor on a mask or bias that is no
number; masks in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.masks.score_ops import (
    Add,
    AlignedTensor,
    Floor,
    Scale,
    ScoreOp,
    Select,
    Term,
)
from fa_compiler.passes.matching.factors import Factor, on_scores
from fa_compiler.passes.matching.sinks import FoundSink


@dataclass(frozen=True)
class Rearrange:
    """A layout operator or an exact cast on the scores."""

    node: ir.Node


@dataclass(frozen=True)
class OwnStep:
    """A step that only scores have; `walk` says what it does.

    `ScoreWalk.scores` is the value that the next operand may not enlarge. After this step it is the
    step's output if `sets_shape`; otherwise it stays the value before.
    """

    node: ir.Node
    sets_shape: ClassVar[bool] = True

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        """All nodes of the step, its own the last."""
        return (self.node,)

    def walk(self, walk: ScoreWalk) -> None:
        """Do to the scores what the step does. Raises Decline."""
        raise NotImplementedError


Step = ScoreOp[ir.Value] | Rearrange | OwnStep


@dataclass
class ScoreWalk:
    """Scores on their way to the softmax: `scores` is the value that was reached, of the
    arrangement `dims`.

    `scale` and `factors` are what their product is multiplied by, and `terms` what was done to them
    besides. `softcap` is the number c of a soft cap, c * tanh(scores / c), with the factors after
    it; 0 if there is none. `shifted` are the nodes that subtract a maximum, each with the axis it
    runs along; `found_sink` is a sink beside the scores. `rounded` are casts that round the scores,
    which the kernels do not do.
    `take_product` takes an addend as a part of the scores and returns whether it did.
    """

    viewer: Viewer
    seen: dict[ir.Value, Arrangement]
    scores: ir.Value
    dims: Arrangement
    scale: float
    take_product: Callable[[Add[ir.Value], ScoreWalk], bool]
    terms: list[Term] = field(default_factory=list)
    factors: list[Factor] = field(default_factory=list)
    shifted: list[tuple[ir.Node, Axes]] = field(default_factory=list)
    found_sink: FoundSink | None = None
    softcap: float = 0.0
    rounded: list[ir.Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.product = self.scores
        self.seen[self.scores] = self.dims

    def take(self, step: Step) -> None:
        """Go one step on. Raises Decline."""
        if isinstance(step, Rearrange):
            self._rearrange(step.node)
        else:
            self._check_type(step.node)
            self._add_dimensions(step.node)
        match step:
            case Scale():
                self.multiply(step)
            case Add():
                self.add(step)
            case Select():
                self.select(step)
            case Floor():
                if self.terms or self.is_unbounded:
                    self.terms.append(step)
            case OwnStep():
                step.walk(self)
        output = step.node.outputs[0]
        self.seen[output] = self.dims
        if not isinstance(step, OwnStep) or step.sets_shape:
            self.scores = output

    def multiply(self, step: Scale) -> None:
        """Multiply by a number. Raises Decline."""
        self._check_sign(step.node, step.factor)
        if abs(step.factor) < 1.0 or self.shifted:
            self._check_overflow(step.node)
        self.scale *= step.factor
        self.softcap *= abs(step.factor)
        if self.terms:
            self.terms.append(step)

    def multiply_by(self, node: ir.Node, value: ir.Value, divides: bool) -> None:
        """Multiply by a tensor, or divide by it. Raises Decline."""
        if self.terms:
            reason = "a mask or bias is multiplied by something that is not one known number"
            raise Decline(Code.SCALE, reason, node)
        if self.softcap != 0.0:
            reason = "capped scores are multiplied by something that is not one known number"
            raise Decline(Code.SCALE, reason, node)
        if self.shifted:
            least, _ = self.viewer.facts.bounds.unless_nan(value) or (-math.inf, math.inf)
            self._check_sign(node, least)
        self._check_overflow(node)
        self.factors.append(on_scores(node, value, divides, self.dims, self.viewer))

    def add(self, step: Add[ir.Value]) -> None:
        """Add a tensor. Raises Decline."""
        if not self.take_product(step, self):
            self.terms.append(Add(step.node, self._aligned(step.operand, step.node), step.sign))

    def select(self, step: Select[ir.Value]) -> None:
        """Put a number in place of some scores. Raises Decline."""
        self.terms.append(
            Select(step.node, self._aligned(step.operand, step.node), step.keep, step.fill)
        )

    def _aligned(self, value: ir.Value, node: ir.Node) -> AlignedTensor:
        """What a step combines with the scores. It fits if the result has the shape of what the
        step is done to, apart from added dimensions."""
        own, result = self.viewer.info.shape(self.scores), self.viewer.info.shape(node.outputs[0])
        fits = (
            own is not None
            and result is not None
            and own == result[max(len(result) - len(own), 0) :]
        )
        return AlignedTensor(value, self.viewer.alignment(value, self.dims, node), fits)

    def _add_dimensions(self, node: ir.Node) -> None:
        """An operand of more dimensions gives the scores these dimensions, each of size 1
        (scores.py, 16)."""
        rank = len(self.viewer.info.sizes(node.outputs[0]))
        self.dims = ((),) * (rank - len(self.dims)) + self.dims

    def _rearrange(self, node: ir.Node) -> None:
        moved = self.viewer.rearranged(node, self.dims)
        if moved is None:
            raise Decline(
                Code.SHAPE, f"what {node.op_type} does to the scores was not proven", node
            )
        self.dims = moved

    def _check_type(self, node: ir.Node) -> None:
        info = self.viewer.info
        if info.dtype(node.outputs[0]) == ir.DataType.DOUBLE:
            own = info.dtype(self.product) == ir.DataType.DOUBLE
            reason = "the scores are computed in float64, which rounds masks otherwise"
            raise Decline(Code.DTYPE if own else Code.CAST, reason, node)

    @property
    def is_unbounded(self) -> bool:
        """May a factor of unknown size have made scores infinite?"""
        return any(factor.unbounded for factor in self.factors)

    def _check_overflow(self, node: ir.Node) -> None:
        """Decline a further factor if one of unknown size may have made scores infinite.

        The kernels apply all factors together: after a factor below 1 they may have a finite score
        where the graph has an infinite one. After the subtraction of the maximum, the graph
        multiplies 0 for the largest score, but the kernels multiply the score itself.
        """
        if self.is_unbounded:
            reason = "scores times a factor of unknown size, which may be infinite, are multiplied once more"
            raise Decline(Code.SCALE, reason, node)

    def _check_sign(self, node: ir.Node, factor: float) -> None:
        if self.shifted and factor < 0:
            reason = "the scores are or may be subtracted from their maximum, so that one of +inf makes its row NaN"
            raise Decline(Code.SCORE_TERM, reason, node)
