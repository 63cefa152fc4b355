"""The first half of a match: from a softmax up to the product of query and key, and down to the
product with values.

    anchor -> probability path, sink gate -> score path -> who else reads inner values -> scores,
    term by term

What is known then suffices to say whether a product that is added to the scores is a second one of
query and key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, AxisSpace
from fa_compiler.passes.answer.decline import Decline, reworded
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.nodes import (
    distinct_consumers,
    is_op,
    nodes_of_type,
    operands,
    outputs_of,
    reads_shape,
)
from fa_compiler.passes.layout.operands import Operands
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.masks.score_ops import Add, Scale, Select, Term
from fa_compiler.passes.matching.bounded import BoundedScores
from fa_compiler.passes.matching.exponentials import ROUNDING
from fa_compiler.passes.matching.final_scores import FinalScores
from fa_compiler.passes.matching.interior import check_private, feeds_backward
from fa_compiler.passes.matching.layers import decline_of_layers, scores_of_attention
from fa_compiler.passes.matching.probability_path import (
    RENORMALISED_ADVICE,
    ProbabilityPath,
    find_values,
    reaches_product,
)
from fa_compiler.passes.matching.routes import Route
from fa_compiler.passes.matching.scores import Cap, ScorePath
from fa_compiler.passes.matching.sink_gates import SinkGate, sink_gate
from fa_compiler.passes.matching.softmax import SoftmaxAnchor
from fa_compiler.passes.values.facts import Facts


@dataclass(frozen=True)
class AttentionPaths:
    """What is known of an attention after the first stage: the paths from the softmax to both
    products, and the scores carried out term by term.

    `before` leads from the first product to the softmax, `after` from the softmax to the product
    with the values, and `gate` is a sink's gate behind it. `qk` is the first product, and `scores`
    is what `before` makes of it. `shape_readers` are readers of a mere shape or type, each with
    what it reads. `dims` has the arrangement of the scores and of every value that is made of them
    before the softmax, and of the probabilities.
    """

    anchor: SoftmaxAnchor
    route: Route
    before: ScorePath
    after: ProbabilityPath
    gate: SinkGate | None
    shape_readers: tuple[tuple[ir.Node, ir.Value], ...]
    qk: Operands
    scores: FinalScores
    dims: Mapping[ir.Value, Arrangement]
    viewer: Viewer

    @property
    def finite(self) -> Term | None:
        """The first term that may give a score another finite number, other than by scaling all of
        them."""
        return next(
            (term for term in self.scores.terms if not _leaves_scores(term, self.viewer.facts)),
            None,
        )

    @property
    def cap(self) -> ir.Value | None:
        """The tanh of a soft cap, which its gradient reads; None where the scores are not
        capped."""
        return _capped_scores(self.before)

    @property
    def values_from_softmax_on(self) -> tuple[ir.Value, ...]:
        """What the softmax and the nodes after it make."""
        return _values_from_softmax_on(self.anchor, self.after)

    @property
    def output(self) -> ir.Value:
        """The result: that of the late division, of the gate, or of the product with the values."""
        for last in (self.anchor.late, self.gate):
            if last is not None:
                return last.output
        return self.after.product.output

    @staticmethod
    def of(
        anchor: SoftmaxAnchor, route: Route, facts: Facts, joins_added_product: bool
    ) -> AttentionPaths:
        """The paths around an anchor on a route; with `joins_added_product` an added product is a
        part of the scores. Raises Decline."""
        viewer = Viewer(facts, AxisSpace())
        after, gate = _with_tail(anchor, _probability_path(anchor, route, viewer), facts)
        before = scores_of_attention(anchor.scores, after, viewer)
        BoundedScores(facts).check_exponentials(anchor)
        _check_total(anchor)

        def joined() -> AttentionPaths:
            shape_readers = check_private(
                anchor, before, after, _accounting(anchor, before, after, route)
            )
            narrow = facts.info.dtype(after.product.output) != ir.DataType.FLOAT
            qk = Operands.of(before.product, viewer, widening=narrow)
            dims: dict[ir.Value, Arrangement] = {}
            scores = FinalScores.of(
                before, qk, viewer, dims, joins_added_product, _exponent(anchor)
            )
            dims[anchor.output] = scores.dims
            return AttentionPaths(
                anchor, route, before, after, gate, tuple(shape_readers), qk, scores, dims, viewer
            )

        return reworded(joined, lambda decline: decline_of_layers(decline, before, after, viewer))


def _with_tail(
    anchor: SoftmaxAnchor, after: ProbabilityPath, facts: Facts
) -> tuple[ProbabilityPath, SinkGate | None]:
    """The path to the values with what follows the product: a late division, or a sink's gate,
    which is told, too."""
    if (late := anchor.late) is not None:
        return replace(after, tail=(*late.summing, *late.dividing)), None
    if (gate := sink_gate(anchor.scores, after.product, facts.info)) is not None:
        return replace(after, tail=gate.nodes), gate
    return after, None


def _exponent(anchor: SoftmaxAnchor) -> Scale | None:
    """What powers multiply the scores by. That of 2^(x log2(e)) is 1 but for the rounding of its
    constant."""
    if abs(anchor.log_base - 1.0) <= ROUNDING:
        return None
    node = next(nodes_of_type(anchor.nodes, "Exp", "Pow"), anchor.node)
    return Scale(node, anchor.log_base)


def _check_total(anchor: SoftmaxAnchor) -> None:
    """Decline exponentials that are masked after the maximum, and a total with more in it than a
    sink."""
    if anchor.masked:
        reason = "the exponentials are masked behind the maximum, which may be that of a masked key and leave nothing"
        raise Decline(Code.PROBABILITY_TERM, reason, anchor.node, RENORMALISED_ADVICE)
    if anchor.sink is not None and anchor.sink.other is not None:
        reason = f"the sum of a row's exponentials is increased by {anchor.sink.other.name!r}, which is no sink's"
        raise Decline(Code.PROBABILITY_TERM, reason, anchor.sink.nodes[-1], "")


def _leaves_scores(term: Term, facts: Facts) -> bool:
    """Does a term only scale scores, leave them, or make them -inf?"""
    if isinstance(term, Add):
        values = facts.sets.of(term.operand.value)
        return values is not None and values <= {0.0, -math.inf * term.sign}
    return isinstance(term, Scale) or (isinstance(term, Select) and term.fill == -math.inf)


def _values_from_softmax_on(anchor: SoftmaxAnchor, after: ProbabilityPath) -> tuple[ir.Value, ...]:
    return tuple(outputs_of((*anchor.nodes, *after.nodes)))


def _capped_scores(before: ScorePath) -> ir.Value | None:
    return next((step.node.outputs[0] for step in before.steps if isinstance(step, Cap)), None)


def _accounting(
    anchor: SoftmaxAnchor, before: ScorePath, after: ProbabilityPath, route: Route
) -> Callable[[ir.Value, ir.Node], bool]:
    """The predicate for `check_private`: is this reader of an inner value accounted for by the
    attention's gradient, or by another attention that is fused as well?"""
    read_by_gradient: set[ir.Value | None] = set()
    if route.gradient:
        read_by_gradient.update((*_values_from_softmax_on(anchor, after), _capped_scores(before)))

    def accounted_for(output: ir.Value, reader: ir.Node) -> bool:
        by_gradient = output in read_by_gradient and not reads_shape(reader)
        return by_gradient or reader in route.accounted_for

    return accounted_for


def _probability_path(anchor: SoftmaxAnchor, route: Route, viewer: Viewer) -> ProbabilityPath:
    """The path from a softmax to values on a route, or the reason why there is none."""

    def words(decline: Decline) -> Decline:
        if not reaches_product(anchor.output, viewer):
            return Decline(
                Code.NOT_ATTENTION, "no product with values follows this softmax", decline.culprit
            )
        if _logarithm_is_read(anchor):
            reason = "the softmax of a loss: the logarithm of its probabilities is read, too"
            return Decline(Code.NOT_ATTENTION, reason, decline.culprit)
        if decline.code == Code.PROBABILITIES_ARE_OUTPUT and feeds_backward(anchor):
            return Decline(Code.TRAINING, decline.reason, decline.culprit)
        return decline

    if route.path:
        return find_values(anchor.output, viewer, route.path)
    path = None if anchor.late is None else anchor.late.path
    return reworded(lambda: find_values(anchor.output, viewer, path), words)


def _logarithm_is_read(anchor: SoftmaxAnchor) -> bool:
    """Is the softmax an exponential of a logarithm that something else reads, too?"""
    if anchor.late is not None or not is_op(anchor.node, "Exp", "Pow"):
        return False
    return len(distinct_consumers(operands(anchor.node)[-1])) > 1
