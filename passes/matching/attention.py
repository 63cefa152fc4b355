"""The attention matcher: from a softmax to a frozen record, without touching the graph.

    attention := product(probabilities, value)             probability_path.py says what may lie
                                                           between
    probabilities := softmax over the keys' axis           softmax.py
    softmax's input := terms(product(query, key))          scores.py, masks/mask.py

A match goes through these stages. A stage is a record, which is made of the records before it:

    1. AttentionPaths   attention_paths.py   the nodes around the softmax, and what they do to the
                                             scores
    2. KeySide          roles.py             which operand is the key
    3. Probabilities    probabilities.py     what the nodes after the softmax do
    4. FoundSink        sinks.py             the sink, wherever it is written
    5. Masking          masking.py           what terms and guards come to
    6. Roles            roles.py             batch, heads, q_seq and kv_seq
    7. AttentionMatch   match.py             the record; the `_check_*` functions here stand between
                                             the stages

score_walk.py says what each step does to the scores. guards.py says what a guard after the softmax
means. interior.py says who else may read the inner values. rewrite/rewriter.py emits nodes from the
record.

Query, key and value are the operands of the two products, whatever made them. The key is the
operand of the first product that alone has the axes that the softmax runs over. The value is the
operand of the product with the values that is not the probabilities; that product has to sum over
the keys. Batch and head axes are those that both products share.

Refused, because it could change the result: an inner value that something else reads or that is a
model output; an axis that cannot be proven to be the one it must be; scores that are rounded on the
way; operands that are not float32, float16 or bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes
from fa_compiler.passes.answer.decline import Decline, reworded
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.nodes import FLOATS, certain, is_op, operand_at
from fa_compiler.passes.layout.operands import Operands
from fa_compiler.passes.layout.views import View, Viewer
from fa_compiler.passes.masks.row_guard import RowGuard
from fa_compiler.passes.masks.score_ops import Floor, Scale, Select
from fa_compiler.passes.matching.activation_rounding import with_lost_scores
from fa_compiler.passes.matching.attention_paths import AttentionPaths
from fa_compiler.passes.matching.bounded import BoundedScores
from fa_compiler.passes.matching.exponentials import ROUNDING
from fa_compiler.passes.matching.factors import Factor, check_axes
from fa_compiler.passes.matching.guards import ScoreGuard
from fa_compiler.passes.matching.layers import decline_of_layers
from fa_compiler.passes.matching.masking import Masking
from fa_compiler.passes.matching.match import AttentionMatch, Derivation
from fa_compiler.passes.matching.probabilities import Probabilities
from fa_compiler.passes.matching.roles import KeySide, Roles
from fa_compiler.passes.matching.routes import ONLY, Route
from fa_compiler.passes.matching.sink_gates import gated
from fa_compiler.passes.matching.sinks import FoundSink, sink_in_total
from fa_compiler.passes.matching.softmax import SoftmaxAnchor
from fa_compiler.passes.matching.weights import holds_weights
from fa_compiler.passes.matching.zeroed_rows import zeroed_rows
from fa_compiler.passes.ops.movers import LAYOUT_OPS
from fa_compiler.passes.values.facts import Facts


@dataclass(frozen=True)
class Matcher:
    """Matches anchors of one model. With `joins_added_product` a product that is added to the
    scores is a part of them, no bias."""

    facts: Facts
    joins_added_product: bool = False

    def match(self, anchor: SoftmaxAnchor, route: Route = ONLY) -> AttentionMatch:
        """The record of the attention around an anchor; raises Decline."""
        return self.finish(self.begin(anchor, route))

    def begin(self, anchor: SoftmaxAnchor, route: Route = ONLY) -> AttentionPaths:
        """The first stage of a match; raises Decline."""
        return reworded(
            lambda: AttentionPaths.of(anchor, route, self.facts, self.joins_added_product),
            lambda decline: with_lost_scores(decline, anchor.scores, self.facts),
        )

    @staticmethod
    def finish(paths: AttentionPaths) -> AttentionMatch:
        """The stages that follow; raises Decline."""
        return reworded(
            lambda: _match_of(paths),
            lambda decline: decline_of_layers(decline, paths.before, paths.after, paths.viewer),
        )


def _match_of(paths: AttentionPaths) -> AttentionMatch:
    anchor, after, scores, space = paths.anchor, paths.after, paths.scores, paths.viewer.space
    BoundedScores(paths.viewer.facts).check_rows(anchor, paths.finite)
    key = KeySide.of(paths)
    rope = None
    if scores.added_product is not None:
        rope = scores.added_product.rope(key.kv_seq, paths.viewer)
    _check_shifts(paths, key.kv_seq)
    probabilities = Probabilities.of(paths)
    found_sink = _found_sink(paths, key.kv_seq, probabilities)
    _check_unbounded(paths, _why_infinity_matters(paths, found_sink))
    masking, output = Masking.of(paths, key, probabilities, found_sink), paths.output
    if masking.guard is RowGuard.BIAS and masking.plan.nan_rows:
        _check_unbounded(
            paths, "the guard tests the bias, where the operator tests the scores with it"
        )
    if found_sink is None and (zeroed := zeroed_rows(paths, probabilities, masking)) is not None:
        masking, output = zeroed.masking, zeroed.where.outputs[0]
    pv = probabilities.product(paths)
    _check_sums_columns(paths, pv, key.kv_seq)
    _check_values(paths)
    _check_late(paths, pv.out, key.kv_seq)
    roles = Roles.of(paths, key, masking.row, pv, found_sink)
    views, dtype = _operands(paths, key.side, pv)
    roles.check_sizes(paths)
    factors = masking.factors
    if after.product.factor != 1.0:
        factors = (*factors, Factor(after.product.node, None, after.product.factor))
    if scores.factors or factors:
        dtype = ir.DataType.FLOAT
        allowed = roles.batch, roles.heads, roles.q_seq
        check_axes(scores.factors, allowed, space, Code.SCALE)
        check_axes(factors, allowed, space, Code.PROBABILITY_TERM)
    match = AttentionMatch(
        anchor,
        space,
        *views,
        roles,
        scores.scale,
        masking.plan,
        dtype,
        output,
        pv.out,
        sink=None if found_sink is None else found_sink.sink,
        dropout=probabilities.dropout,
        query_factors=scores.factors,
        output_factors=factors,
        shapes=_shapes(paths, probabilities),
        rope=rope,
        softcap=scores.softcap,
        derivation=Derivation(paths, probabilities, masking),
    )
    roles.check_heads(match.views, paths)
    return match.within(space.branch()).with_larger_product_first()


def _check_shifts(paths: AttentionPaths, kv_seq: Axes) -> None:
    """Decline a subtracted maximum that the plan cannot leave out.

    The plan subtracts nothing, which changes no softmax, with two exceptions. A maximum along
    another axis than the keys' is not one number for each row. And in a row that is masked
    everywhere by v, the graph has v - v = 0 whatever factor follows, while the plan has v times
    that factor: a product of factors above 1 may make it overflow to -inf, and a negative one makes
    v the row's largest score, beside which the others are rounded away.
    """
    scores, space, growth = paths.scores, paths.viewer.space, 1.0
    if not scores.shifted:
        return
    for term in scores.terms:
        if isinstance(term, Scale):
            growth *= term.factor
        if not 0.0 < growth <= 1.0:
            reason = "a mask less its maximum is multiplied by more than 1, or by a negative number"
            raise Decline(Code.SCORE_TERM, reason, term.node)
    for node, dim in scores.shifted:
        if space.resolve(dim) != space.resolve(kv_seq):
            raise Decline(
                Code.SCORE_TERM, "the maximum along another axis than the keys' is subtracted", node
            )


def _found_sink(
    paths: AttentionPaths, kv_seq: Axes, probabilities: Probabilities
) -> FoundSink | None:
    """The sink: a column of the scores, a gate after the product, or a part of the total of
    exponentials."""
    anchor, gate, scores, viewer = paths.anchor, paths.gate, paths.scores, paths.viewer
    if scores.shifted and (gate is not None or anchor.sink is not None):
        reason = "a maximum is subtracted from the scores, and not from the sink beside them"
        raise Decline(Code.SCORE_TERM, reason, scores.shifted[0][0])
    found_sink = scores.found_sink
    if gate is not None:
        if abs(anchor.log_base - 1.0) > ROUNDING:
            reason = "the gate has the sum of exponentials, and the softmax that of powers to another base"
            raise Decline(Code.PROBABILITY_TERM, reason, gate.nodes[-1])
        pv = probabilities.product(paths)
        if found_sink is not None:
            reason = "a sink beside the scores, and another behind the product"
            raise Decline(Code.PROBABILITY_TERM, reason, gate.nodes[-1])
        found_sink = gated(gate, scores.dims, pv.out, kv_seq, viewer)
    if anchor.sink is not None:
        if scores.found_sink is not None:
            raise Decline(
                Code.PROBABILITY_TERM,
                "a sink beside the scores, and another in their total",
                anchor.node,
            )
        found_sink = sink_in_total(anchor, anchor.sink, scores.dims, kv_seq, viewer)
    return found_sink


def _check_unbounded(paths: AttentionPaths, what: str | None) -> None:
    """Decline a factor of unknown size beside what gives another result for a score that is
    infinite or NaN, in words (factors.py, case 2); None where nothing does."""
    factor = paths.scores.unbounded
    if factor is None or what is None:
        return
    by = "divided by" if factor.divides else "multiplied by"
    name = "" if factor.value is None else factor.value.name
    reason = f"the scores are {by} {name!r}, which is not proven to leave them finite, and {what}"
    raise Decline(Code.SCALE, reason, factor.node)


def _why_infinity_matters(paths: AttentionPaths, found_sink: FoundSink | None) -> str | None:
    """What tells an infinite score from NaN, in words; None where nothing does."""
    if paths.scores.softcap != 0.0:
        return "the soft cap makes a number of an infinite score"
    if found_sink is not None:
        return "beside the sink a row whose scores are all -inf is 0, not NaN"
    if isinstance(paths.after.guard, ScoreGuard):
        return "the guard makes a row 0 whose scores are all -inf, and not one with NaN"
    fills = [term.fill for term in paths.scores.terms if isinstance(term, Select)]
    if any(isinstance(term, Floor) for term in paths.scores.terms) or any(
        fill != -math.inf for fill in fills
    ):
        return "the finite number of a mask outweighs scores of -inf, but not NaN"
    return None


def _check_sums_columns(paths: AttentionPaths, pv: Operands, kv_seq: Axes) -> None:
    """Decline a product with the values that sums over something else than the keys."""
    after, resolve = paths.after, paths.viewer.space.resolve
    sums = resolve(
        chain.from_iterable(pv.dims[after.side][label] for label in after.product.summed)
    )
    wanted = resolve(kv_seq)
    if len(sums) == len(wanted) and set(sums) == set(wanted):
        return
    node = after.product.node
    if not set(sums) & set(wanted) and holds_weights(after.value, paths.viewer):
        reason = "a linear layer mixes the probabilities of several heads (talking heads) or rows"
        raise Decline(Code.PROBABILITY_TERM, reason, node, "")
    raise Decline(
        Code.NO_VALUE_MATMUL, "the product after the softmax does not sum over the keys", node
    )


def _check_values(paths: AttentionPaths) -> None:
    """Decline values that hold infinities. For a masked key the graph computes 0 times infinity,
    which is NaN; the kernels skip it."""
    value = paths.after.value
    if any(map(math.isinf, paths.viewer.facts.sets.of(value) or ())):
        reason = f"the values {value.name!r} hold infinities, as a mask does, and 0 times infinity is NaN"
        raise Decline(Code.NO_VALUE_MATMUL, reason, paths.after.product.node)


def _check_late(paths: AttentionPaths, out: Arrangement, kv_seq: Axes) -> None:
    """Decline a late divisor that is not one number for each row; `out` is the product's
    arrangement."""
    late, after, info, space = paths.anchor.late, paths.after, paths.viewer.info, paths.viewer.space
    if late is None:
        return
    divide = late.dividing[-1]
    if after.guard is not None:
        raise Decline(
            Code.PROBABILITY_TERM,
            "a guard on exponentials that are divided later",
            after.guard.where,
        )
    if info.dtype(after.product.output) != ir.DataType.FLOAT:
        raise Decline(
            Code.DTYPE, "exponentials in 16 bits are summed up before they are divided", divide
        )
    if info.shape(late.output) != info.shape(after.product.output):
        raise Decline(Code.SHAPE, "the divisor enlarges what it divides", divide)
    keys, rows = space.resolve(kv_seq), space.resolve_all(paths.scores.dims)
    missing = len(out) - len(rows)
    pairs = zip(rows, space.resolve_all(out)[max(missing, 0) :], strict=False)
    if missing < 0 or any(row and row not in (keys, own) for row, own in pairs):
        raise Decline(Code.SHAPE, "the divisor is not one number for each row", divide)


def _operands(
    paths: AttentionPaths, key_side: int, pv: Operands
) -> tuple[tuple[View, View, View], ir.DataType]:
    """Query, key and value, and the type to compute in: that of the result, or float32 when they
    differ.

    Computing 16-bit operands in float32 only leaves roundings out.
    """
    qk, after, info = paths.qk, paths.after, paths.viewer.info
    query, key, value = (
        certain(qk.views[1 - key_side]),
        certain(qk.views[key_side]),
        certain(pv.views[1 - after.side]),
    )
    wanted = info.dtype(after.product.output)
    types = {info.dtype(view.base) for view in (query, key, value)}
    if wanted not in FLOATS or not types <= set(FLOATS):
        reason = "query, key and value are not float32, float16 or bfloat16"
        raise Decline(Code.DTYPE, reason, after.product.node)
    return (query, key, value), wanted if types == {wanted} else ir.DataType.FLOAT


def _shapes(
    paths: AttentionPaths, probabilities: Probabilities
) -> tuple[tuple[ir.Node, Arrangement], ...]:
    """Readers of a mere shape, each with the arrangement of what it reads."""
    viewer = Viewer(paths.viewer.facts, paths.viewer.space.branch())
    shapes = []
    for node, value in paths.shape_readers:
        dims = _arrangement_of(value, probabilities.seen, viewer)
        if dims is None or not viewer.space.knows_no_more(paths.viewer.space):
            reason = f"the shape of {value.name!r} is needed elsewhere"
            raise Decline(Code.SCORES_ARE_OUTPUT, reason, value.producer())
        shapes.append((node, viewer.space.resolve_all(dims)))
    return tuple(shapes)


def _arrangement_of(
    value: ir.Value, seen: Mapping[ir.Value, Arrangement], viewer: Viewer
) -> Arrangement | None:
    """The arrangement of a value: `seen` has it, or that of a value from which this value is moved.
    None where it is unknown."""
    moving: list[ir.Node] = []
    while value not in seen:
        node = value.producer()
        if not is_op(node, *LAYOUT_OPS):
            return None
        moving.append(node)
        value = operand_at(node, 0)
    dims = seen[value]
    for node in reversed(moving):
        if (moved := viewer.rearranged(node, dims)) is None:
            return None
        dims = moved
    return dims
