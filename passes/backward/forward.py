"""The forward part of an attention whose probabilities the gradient reads, too.

The ordinary matcher wants the probabilities to be read by the product with the values alone. Here it is told the way to
one product, and every other reader of the probabilities, or of the exponentials and their sums in a decomposed softmax,
is left to gradient.py, which declines unless all of them belong to the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from fa_compiler.passes.attention import Matcher, Simulated
from fa_compiler.passes.axes import Arrangement, Axes
from fa_compiler.passes.contraction import contraction
from fa_compiler.passes.decline import Decline
from fa_compiler.passes.mask import MaskPlan, MaskPlanner
from fa_compiler.passes.match import AttentionMatch
from fa_compiler.passes.nodes import is_op
from fa_compiler.passes.operands import Operands
from fa_compiler.passes.probabilities import (
    ProbabilityPath,
    data_readers,
    distinct_consumers,
    find_values,
    reads_shape,
    reads_type,
)
from fa_compiler.passes.report import Code
from fa_compiler.passes.scores import LAYOUT_OPS, ScorePath
from fa_compiler.passes.softmax import SoftmaxAnchor
from fa_compiler.passes.terms import RowGuard, Term
from fa_compiler.passes.views import Viewer

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
    late: set[ir.Value] = field(default_factory=set)
    planner: MaskPlanner | None = None


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
        self.findings.late = {output for node in (*anchor.nodes, *after.nodes) for output in node.outputs}
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
        self.findings.planner = planner
        return super()._plan(planner, terms, guard)


def paths(anchor: SoftmaxAnchor, matcher: Matcher) -> list[tuple[ir.Node, ...]]:
    """The ways from a softmax to products that read its probabilities, each as the nodes on it; none when there is
    nothing but one such way, which is the ordinary matcher's."""
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
            if contraction(node, matcher.info) is not None:
                products.append(node)
            elif is_op(node, *PASSING):
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
        matcher.info, matcher.sets, matcher.bounds, matcher.options, path=path, positions=matcher.positions
    )
    match = training.match(anchor)
    if match.sink is not None or match.query_factors or match.output_factors:
        raise Decline(Code.TRAINING, "the gradient of a sink or of a factor is not matched", anchor.node)
    return match, training.findings
