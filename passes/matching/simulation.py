"""What the nodes between the two products do to scores and probabilities, step by step, as arrangements of axes.

Refused: a step whose effect on the axes was not proven; a factor on a mask or bias that is no number; a scale that
rounds to 0 or infinity; masks in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import onnx_ir as ir

from fa_compiler.passes.decline import Decline
from fa_compiler.passes.layout.axes import Arrangement, Axes
from fa_compiler.passes.layout.operands import Operands
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.masks.magnitudes import FLOAT32_MAX, LARGEST_SCALE, SMALLEST_SCALE
from fa_compiler.passes.matching.factors import Factor, moderate, operand
from fa_compiler.passes.matching.probabilities import ProbabilityPath, passed_on
from fa_compiler.passes.matching.scores import (
    Multiply,
    Rearrange,
    ScorePath,
    Step,
    SubtractFrom,
    SubtractMaximum,
    ZeroSelected,
)
from fa_compiler.passes.matching.second_product import SecondProduct, second_product
from fa_compiler.passes.matching.sinks import AddSink, ScoresWithSink, dropped, with_sink
from fa_compiler.passes.nodes import is_op
from fa_compiler.passes.report import Code
from fa_compiler.passes.score_ops import Add, Floor, Placed, Scale, Select, Term
from fa_compiler.passes.values.slices import keeps_everything

LARGEST_RATIO = 1024.0
"""How far the scales of two products may be apart: the operator has one scale, so that one of the queries is multiplied
by the ratio, and what is multiplied by more may overflow where the product with the keys does not."""


@dataclass(frozen=True)
class Simulated:
    """The scores at the softmax: their arrangement, and what was done to them."""

    dims: Arrangement
    scale: float
    terms: tuple[Term, ...]
    factors: tuple[Factor, ...]
    shifted: tuple[tuple[ir.Node, Axes], ...]
    sunk: ScoresWithSink | None
    second: SecondProduct | None = None


@dataclass(frozen=True)
class Simulation:
    """Walks the paths that were found around a softmax. `seen` gets the arrangement of every value on the way. With
    `ropes` a product that is added to the scores is a part of them, no bias."""

    viewer: Viewer
    seen: dict[ir.Value, Arrangement]
    ropes: bool = False

    def before(self, path: ScorePath, qk: Operands) -> Simulated:
        """Walk the scores down to the softmax."""
        second = self.ropes and not any(isinstance(step, Multiply) for step in path.steps)
        walk = _Walk(self.viewer, self.seen, path.product.output, qk.out, path.product.factor * qk.scale, second)
        for step in path.steps:
            walk.take(step)
        if not SMALLEST_SCALE <= abs(walk.scale) <= LARGEST_SCALE:
            raise Decline(Code.SCALE, f"the scale {walk.scale:g} overflows or vanishes", path.product.node)
        return walk.result()

    def after(self, start: ir.Value, path: ProbabilityPath, found: Simulated) -> tuple[Arrangement, tuple[Factor, ...]]:
        """Walk the probabilities from `start` down to the product: their arrangement, and the factors on them."""
        viewer = self.viewer
        dims, sunk, value = found.dims, found.sunk, start
        factors: list[Factor] = []
        again = () if path.divided is None else path.divided.nodes
        for node in path.nodes:
            if node in again:
                value = node.outputs[0]
                self.seen[value] = dims
                continue
            if is_op(node, "Slice", "Split") and not keeps_everything(node, viewer.info):
                dims = dropped(node, dims, sunk, viewer)
            elif (other := operand(node, value)) is not None:
                factors.append(moderate(node, *other, dims, viewer, Code.PROBABILITY_TERM))
            elif node.op_type not in ("IsNaN", "Where", "Add"):
                moved = viewer.rearranged(node, dims)
                if moved is None:
                    raise Decline(Code.SHAPE, f"what {node.op_type} does to the probabilities was not proven", node)
                dims = moved
            value = value if node.op_type == "IsNaN" else passed_on(node)
            self.seen.update((output, dims) for output in node.outputs)
        if sunk is not None and any(viewer.space.resolve(dim) == sunk.whole for dim in dims):
            raise Decline(Code.PROBABILITY_TERM, "the sink's probability is not left out", sunk.step.node)
        return dims, tuple(factors)


@dataclass
class _Walk:
    """Scores on their way to the softmax: `scores` is the value that was reached, of the arrangement `dims`; the others
    are what Simulated holds. `may_join` says whether a product that is added may be a part of the scores."""

    viewer: Viewer
    seen: dict[ir.Value, Arrangement]
    scores: ir.Value
    dims: Arrangement
    scale: float
    may_join: bool
    terms: list[Term] = field(default_factory=list)
    factors: list[Factor] = field(default_factory=list)
    shifted: list[tuple[ir.Node, Axes]] = field(default_factory=list)
    sunk: ScoresWithSink | None = None
    second: SecondProduct | None = None

    def __post_init__(self) -> None:
        self.product = self.scores
        self.seen[self.scores] = self.dims

    def result(self) -> Simulated:
        """The scores that were reached."""
        terms, factors, shifted = tuple(self.terms), tuple(self.factors), tuple(self.shifted)
        return Simulated(self.dims, self.scale, terms, factors, shifted, self.sunk, self.second)

    def take(self, step: Step) -> None:
        """Go one step on. Raises Decline."""
        self._check_type(step)
        match step:
            case Rearrange():
                self._rearrange(step)
            case SubtractMaximum(node, axis):
                self.shifted.append((node, self.dims[axis]))
            case Scale():
                self._scale(step)
            case ZeroSelected():
                self._check_zeros(step)
            case Multiply():
                self._multiply(step)
            case Add():
                self._add(step)
            case SubtractFrom(node, value):
                self._scale(Scale(node, -1.0))
                self._add(Add(node, value))
            case Select(node, condition, keep, fill):
                self.terms.append(Select(node, self._placed(condition, node), keep, fill))
            case Floor():
                self.terms.extend([step] if self.terms else [])
            case AddSink():
                number = step.number if step.value is None else self.viewer.facts.sets.only(step.value)
                self.dims, self.sunk = with_sink(step, number, self.dims, self.viewer)
        self.seen[step.node.outputs[0]] = self.dims
        # What this product may enlarge the selection behind it has to answer for.
        self.scores = self.scores if isinstance(step, ZeroSelected) else step.node.outputs[0]

    def _check_type(self, step: Step) -> None:
        info = self.viewer.info
        if isinstance(step, Rearrange) or info.dtype(step.node.outputs[0]) != ir.DataType.DOUBLE:
            return
        own = info.dtype(self.product) == ir.DataType.DOUBLE
        reason = "the scores are computed in float64, which rounds masks otherwise"
        raise Decline(Code.DTYPE if own else Code.CAST, reason, step.node)

    def _placed(self, value: ir.Value, node: ir.Node) -> Placed:
        """What a step combines with the scores. It fits if the result has the shape of what the step is done to."""
        fits = self.viewer.info.shape(self.scores) == self.viewer.info.shape(node.outputs[0])
        return Placed(value, self.viewer.alignment(value, self.dims, node), fits)

    def _rearrange(self, step: Rearrange) -> None:
        moved = self.viewer.rearranged(step.node, self.dims)
        if moved is None:
            raise Decline(Code.SHAPE, f"what {step.node.op_type} does to the scores was not proven", step.node)
        self.dims = moved

    def _scale(self, step: Scale) -> None:
        if self.shifted and step.factor < 0:
            raise _turned(step.node)
        self.scale *= step.factor
        self.terms.extend([step] if self.terms else [])

    def _check_zeros(self, step: ZeroSelected) -> None:
        if (endless := self._infinite()) is not None:
            reason = f"{endless.node.op_type} may make scores infinite, and 0 times infinity is NaN"
            raise Decline(Code.SCORE_TERM, reason, step.node)
        if not (self.viewer.facts.sets.of(step.value) or {math.nan}) <= {0.0, 1.0}:
            raise Decline(Code.SCALE, f"the factor {step.value.name!r} is not proven to be 0 or 1", step.node)

    def _infinite(self) -> Term | None:
        """The first term behind which scores may be infinite, by itself or as a sum or product with those before it.
        What a term holds has to be known for a no; a finite score is lost beside the largest number."""
        size = 0.0
        for term in self.terms:
            match term:
                case Add():
                    size += self.viewer.facts.largest(term.operand.value)
                case Select():
                    size = max(size, abs(term.fill))
                case Scale():
                    size *= abs(term.factor)
                case Floor():
                    size = max(size, abs(term.floor))
            if not size <= FLOAT32_MAX:
                return term
        return None

    def _multiply(self, step: Multiply) -> None:
        if self.terms:
            reason = "a mask or bias is multiplied by something that is not one known number"
            raise Decline(Code.SCALE, reason, step.node)
        known = self.viewer.facts.bounds.of(step.value) if self.shifted else (0.0, math.inf)
        if known is None or known[0] < 0:
            raise _turned(step.node)
        factor = moderate(step.node, step.value, step.divides, self.dims, self.viewer, Code.SCALE)
        self.factors.append(factor)

    def _add(self, step: Add[ir.Value]) -> None:
        if self.may_join and self.second is None and not self.terms and self.scale != 0.0:
            self.second = self._second(step)
            if self.second is not None:
                return
        self.terms.append(Add(step.node, self._placed(step.operand, step.node), step.sign))

    def _second(self, step: Add[ir.Value]) -> SecondProduct | None:
        found = second_product(step.operand, step.sign / self.scale, self.dims, step.node, self.viewer)
        return found if found is not None and 1 / LARGEST_RATIO <= abs(found.ratio) <= LARGEST_RATIO else None


def _turned(node: ir.Node) -> Decline:
    reason = "the scores are or may be subtracted from their maximum, so that one of +inf makes its row NaN"
    return Decline(Code.SCORE_TERM, reason, node)
