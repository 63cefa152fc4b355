"""The forward part of an attention whose probabilities the gradient reads, too.

The ordinary matcher wants the probabilities to be read by the product with the values alone. Here it is told the way to
one product, and every other reader of the probabilities, or of the exponentials and their sums in a decomposed softmax,
is left to gradient.py, which declines unless all of them belong to the gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from fa_compiler.passes.decline import Decline
from fa_compiler.passes.layout.axes import Arrangement, Axes, AxisSpace
from fa_compiler.passes.layout.contraction import contraction
from fa_compiler.passes.layout.operands import Operands
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.masks.mask import MaskPlan, MaskPlanner
from fa_compiler.passes.masks.terms import RowGuard, Term
from fa_compiler.passes.matching.attention import Matcher
from fa_compiler.passes.matching.dropout import Dropout, keep_mask
from fa_compiler.passes.matching.factors import Factor
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.matching.probabilities import (
    ProbabilityPath,
    data_readers,
    distinct_consumers,
    find_values,
    reads_shape,
    reads_type,
)
from fa_compiler.passes.matching.scores import LAYOUT_OPS, ScorePath
from fa_compiler.passes.matching.simulation import Simulated
from fa_compiler.passes.matching.softmax import SoftmaxAnchor
from fa_compiler.passes.nodes import is_op
from fa_compiler.passes.report import Code

MAX_STEPS = 64
"""More nodes than this between a softmax and its products are no attention."""
PASSING = (*LAYOUT_OPS, "Cast", "CastLike", "Dropout", "Where", "IsNaN")


@dataclass
class Findings:
    """What the matcher came across, for the gradient to use: see `ForwardMatcher`."""

    before: ScorePath | None = None
    after: ProbabilityPath | None = None
    terms: tuple[Term, ...] = ()
    guard: RowGuard = RowGuard.NONE
    seen: dict[ir.Value, Arrangement] = field(default_factory=dict)
    late: tuple[ir.Value, ...] = ()
    planner: MaskPlanner | None = None
    dropout: Dropout | None = None


@dataclass(frozen=True)
class ForwardMatcher(Matcher):
    """Matches the attention whose product with the values is reached through the nodes of `path`."""

    path: tuple[ir.Node, ...] = ()
    findings: Findings = field(default_factory=Findings)

    def _after(self, anchor: SoftmaxAnchor, viewer: Viewer) -> ProbabilityPath:
        self.findings.after = find_values(anchor.output, viewer, self.path)
        return self.findings.after

    def _interior(
        self, anchor: SoftmaxAnchor, before: ScorePath, after: ProbabilityPath
    ) -> list[tuple[ir.Node, ir.Value]]:
        self.findings.before = before
        self.findings.late = tuple(output for node in (*anchor.nodes, *after.nodes) for output in node.outputs)
        return super()._interior(anchor, before, after)

    def _accounted_for(self, output: ir.Value, reader: ir.Node) -> bool:
        return output in self.findings.late and not reads_shape(reader) and not reads_type(reader, output)

    def _simulate(
        self, before: ScorePath, qk: Operands, viewer: Viewer, seen: dict[ir.Value, Arrangement]
    ) -> Simulated:
        result = super()._simulate(before, qk, viewer, seen)
        self.findings.seen, self.findings.terms = seen, result.terms
        return result

    def _guard(
        self,
        after: ProbabilityPath,
        terms: tuple[Term, ...],
        columns: Axes,
        viewer: Viewer,
        seen: dict[ir.Value, Arrangement],
    ) -> RowGuard:
        self.findings.guard = super()._guard(after, terms, columns, viewer, seen)
        return self.findings.guard

    def _plan(self, planner: MaskPlanner, terms: tuple[Term, ...], guard: RowGuard) -> MaskPlan:
        planner = replace(planner, packing=self.findings.dropout is None, gradient=True)
        self.findings.planner = planner
        return super()._plan(planner, terms, guard)

    def _simulate_after(
        self,
        start: ir.Value,
        after: ProbabilityPath,
        found: Simulated,
        viewer: Viewer,
        seen: dict[ir.Value, Arrangement],
    ) -> tuple[Arrangement, tuple[Factor, ...]]:
        """As the ordinary matcher, but for one dropout, which takes the numbers on the probabilities with it."""
        drops = [node for node in after.nodes if _drop_mask(node, viewer) is not None]
        if len(drops) != 1:
            return super()._simulate_after(start, after, found, viewer, seen)
        (drop,) = drops
        index = after.nodes.index(drop)
        before, behind = replace(after, nodes=after.nodes[:index]), replace(after, nodes=after.nodes[index + 1 :])
        dims, factors = super()._simulate_after(start, before, found, viewer, seen)
        other = _drop_mask(drop, viewer)
        assert other is not None
        mask, scale = self._mask(drop, other, dims, viewer)
        seen[drop.outputs[0]] = dims
        dims, more = super()._simulate_after(drop.outputs[0], behind, replace(found, dims=dims), viewer, seen)
        for factor in (*factors, *more):
            if factor.view is not None:
                raise Decline(Code.PROBABILITY_TERM, "a factor beside dropout that is no number", factor.node)
            scale = scale / factor.number if factor.divides else scale * factor.number
        if not scale > 1.0 or not math.isfinite(scale):
            reason = f"dropout that multiplies what it keeps by {scale:g} and not by more than 1"
            raise Decline(Code.PROBABILITY_TERM, reason, drop)
        self.findings.dropout = replace(mask, keep=1.0 / scale)
        return dims, ()

    def _mask(self, drop: ir.Node, other: ir.Value, dims: Arrangement, viewer: Viewer) -> tuple[Dropout, float]:
        """The mask along the axes of the scores, and the factor that comes with it."""
        mask = keep_mask(other, viewer)
        view = None if mask is None else viewer.base_view(mask)
        if mask is None or view is None:
            raise Decline(Code.RANK, "the rank of a drop mask is unknown", drop)
        chain, value, scale = [], other, 1.0
        while value is not mask:
            node = value.producer()
            assert node is not None
            factor = viewer.factor(node)
            source = node.inputs[0] if factor is None else factor[0]
            assert source is not None
            scale *= 1.0 if factor is None else factor[1]
            chain.extend([node] if factor is None else [])
            value = source
        own: Arrangement | None = view.dims
        for node in reversed(chain):
            own = None if own is None else viewer.rearranged(node, own)
        wanted = viewer.alignment(other, dims, drop)
        if own is None or any(a and not viewer.space.unify(a, b) for a, b in zip(own, wanted, strict=True)):
            raise Decline(Code.SHAPE, "the shape of a drop mask was not proven to fit the probabilities", drop)
        return Dropout(drop, mask, view.base_dims, 1.0), scale


def _drop_mask(node: ir.Node, viewer: Viewer) -> ir.Value | None:
    """The operand of a Mul that is a drop mask."""
    operands = node.inputs if is_op(node, "Mul") else ()
    return next((each for each in operands if keep_mask(each, viewer) is not None), None)


def paths(anchor: SoftmaxAnchor, matcher: Matcher) -> list[tuple[ir.Node, ...]]:
    """The ways from a softmax to products that read its probabilities, each as the nodes on it; none when there is
    nothing but one such way, which is the ordinary matcher's."""
    viewer = Viewer(matcher.facts, AxisSpace())
    parents: dict[ir.Node, list[ir.Node]] = {}
    products: list[ir.Node] = []
    pending, others = [anchor.output], False
    while pending and len(parents) < MAX_STEPS:
        value = pending.pop(0)
        maker = value.producer()
        for node in data_readers(value):
            known = node in parents
            parents.setdefault(node, []).extend([maker] if maker is not None else [])
            if known:
                continue
            if contraction(node, matcher.facts.info) is not None:
                products.append(node)
            elif is_op(node, *PASSING) or viewer.factor(node) is not None or _drop_mask(node, viewer) is not None:
                pending.extend(node.outputs)
            else:
                others = True
    inner = (output for node in anchor.nodes[:-1] for output in node.outputs)
    others |= any(reader not in anchor.nodes for output in inner for reader in distinct_consumers(output))
    if len(products) < 2 and not others:
        return []
    return [_way_back(product, parents) for product in products]


def _way_back(product: ir.Node, parents: dict[ir.Node, list[ir.Node]]) -> tuple[ir.Node, ...]:
    way, pending = dict.fromkeys([product]), [product]
    while pending:
        for node in parents.get(pending.pop(), []):
            if node not in way and node in parents:
                way[node] = None
                pending.append(node)
    return tuple(way)


def match_forward(
    anchor: SoftmaxAnchor, matcher: Matcher, path: tuple[ir.Node, ...]
) -> tuple[AttentionMatch, Findings]:
    """The attention along one path, and what was found on the way; raises Decline."""
    training = ForwardMatcher(
        matcher.facts,
        matcher.ropes,
        matcher.seconds,
        path,
    )
    match = training.match(anchor)
    return replace(match, dropout=training.findings.dropout), training.findings
