"""What the nodes between the two products do to scores and probabilities, step by step, as arrangements of axes.

Refused: a step whose effect on the axes was not proven; a factor on a mask or bias that is no number; a scale that
rounds to 0 or infinity; masks in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.decline import Decline
from fa_compiler.passes.layout.axes import Arrangement, Axes
from fa_compiler.passes.layout.operands import Operands
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.masks.mask_values import FLOAT32_MAX
from fa_compiler.passes.masks.terms import AddTerm, FloorTerm, ScaleTerm, SelectTerm, Term
from fa_compiler.passes.matching.factors import Factor, moderate, operand
from fa_compiler.passes.matching.probabilities import ProbabilityPath, passed_on
from fa_compiler.passes.matching.scores import (
    Addend,
    Floor,
    Gate,
    Multiplier,
    Rearrange,
    Scale,
    ScorePath,
    Select,
    Shift,
)
from fa_compiler.passes.matching.second_product import SecondProduct, second_product
from fa_compiler.passes.matching.sinks import AddSink, Sunk, dropped, with_sink
from fa_compiler.passes.nodes import is_op
from fa_compiler.passes.report import Code
from fa_compiler.passes.values.slices import keeps_everything

SMALLEST_SCALE, LARGEST_SCALE = 1e-30, 1e30
"""Beyond these one factor after another rounds to 0 or infinity where their product does not, or the reverse."""
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
    sunk: Sunk | None
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
        viewer = self.viewer
        dims, scale = qk.out, path.product.factor * qk.scale
        scores = path.product.output
        self.seen[scores] = dims
        terms: list[Term] = []
        factors: list[Factor] = []
        shifted: list[tuple[ir.Node, Axes]] = []
        found: Sunk | None = None
        second: SecondProduct | None = None
        alone = self.ropes and not any(isinstance(step, Multiplier) for step in path.steps)
        for step in path.steps:
            if not isinstance(step, Rearrange) and viewer.info.dtype(step.node.outputs[0]) == ir.DataType.DOUBLE:
                own = viewer.info.dtype(path.product.output) == ir.DataType.DOUBLE
                reason = "the scores are computed in float64, which rounds masks otherwise"
                raise Decline(Code.DTYPE if own else Code.CAST, reason, step.node)
            fits = viewer.info.shape(scores) == viewer.info.shape(step.node.outputs[0])
            match step:
                case Rearrange(node):
                    moved = viewer.rearranged(node, dims)
                    if moved is None:
                        raise Decline(Code.SHAPE, f"what {node.op_type} does to the scores was not proven", node)
                    dims = moved
                case Shift(node, axis):
                    shifted.append((node, dims[axis]))
                case Scale(node, factor):
                    if shifted and factor < 0:
                        raise _turned(node)
                    scale *= factor
                    if terms:
                        terms.append(ScaleTerm(node, factor))
                case Gate(node, value):
                    if (endless := self._infinite(terms)) is not None:
                        reason = f"{endless.node.op_type} may make scores infinite, and 0 times infinity is NaN"
                        raise Decline(Code.SCORE_TERM, reason, node)
                    if not (self.viewer.facts.sets.of(value) or {math.nan}) <= {0.0, 1.0}:
                        raise Decline(Code.SCALE, f"the factor {value.name!r} is not proven to be 0 or 1", node)
                case Multiplier(node, value, divides):
                    if terms:
                        reason = "a mask or bias is multiplied by something that is not one known number"
                        raise Decline(Code.SCALE, reason, node)
                    if shifted and ((known := self.viewer.facts.bounds.of(value)) is None or known[0] < 0):
                        raise _turned(node)
                    factors.append(moderate(node, value, divides, dims, viewer, Code.SCALE))
                case Addend(node, value, sign, negated):
                    if negated:
                        scale = -scale
                        terms.extend([ScaleTerm(node, -1.0)] if terms else [])
                    if (
                        alone
                        and second is None
                        and not terms
                        and scale != 0.0
                        and (second := self._second(value, sign / scale, dims, node))
                    ):
                        scores = node.outputs[0]
                        self.seen[scores] = dims
                        continue
                    terms.append(AddTerm(node, value, sign, viewer.alignment(value, dims, node), fits))
                case Select(node, condition, keep, fill):
                    along = viewer.alignment(condition, dims, node)
                    terms.append(SelectTerm(node, condition, keep, fill, along, fits))
                case Floor(node, floor):
                    if terms:
                        terms.append(FloorTerm(node, floor))
                case AddSink():
                    dims, found = with_sink(step, self._sink_number(step), dims, viewer)
            self.seen[step.node.outputs[0]] = dims
            # What a Gate may enlarge the selection behind it has to answer for.
            scores = scores if isinstance(step, Gate) else step.node.outputs[0]
        if not SMALLEST_SCALE <= abs(scale) <= LARGEST_SCALE:
            raise Decline(Code.SCALE, f"the scale {scale:g} overflows or vanishes", path.product.node)
        return Simulated(dims, scale, tuple(terms), tuple(factors), tuple(shifted), found, second)

    def _infinite(self, terms: list[Term]) -> Term | None:
        """The first term behind which scores may be infinite, by itself or as a sum or product with those before it.
        What a term holds has to be known for a no; a finite score is lost beside the largest number."""
        size = 0.0
        for term in terms:
            match term:
                case AddTerm():
                    size += self.viewer.facts.largest(term.value)
                case SelectTerm():
                    size = max(size, abs(term.fill))
                case ScaleTerm():
                    size *= abs(term.factor)
                case FloorTerm():
                    size = max(size, abs(term.floor))
            if not size <= FLOAT32_MAX:
                return term
        return None

    def _second(self, value: ir.Value, share: float, dims: Arrangement, node: ir.Node) -> SecondProduct | None:
        found = second_product(value, share, dims, node, self.viewer)
        return found if found is not None and 1 / LARGEST_RATIO <= abs(found.ratio) <= LARGEST_RATIO else None

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

    def _sink_number(self, step: AddSink) -> float | None:
        """The one number a sink holds, where there is just one in all runs."""
        return step.number if step.value is None else self.viewer.facts.sets.only(step.value)


def _turned(node: ir.Node) -> Decline:
    reason = "the scores are or may be subtracted from their maximum, so that one of +inf makes its row NaN"
    return Decline(Code.SCORE_TERM, reason, node)
