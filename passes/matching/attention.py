"""The attention matcher: from a softmax to a frozen record, without touching the graph.

    attention := product(probabilities, value)             probabilities.py says what may lie between
    probabilities := softmax over the keys' axis           softmax.py
    softmax's input := terms(product(query, key))          scores.py, mask.py

What the steps on the way do to the axes is in simulation.py, what a guard behind the softmax means in row_guards.py,
who else may read the inner values in interior.py.

What is emitted from the record is in emit.py. Query, key and value are the operands of the two products,
whatever made them, so the record is right by construction: which operand is the key follows from the axis the
softmax runs over, which is the value from the axis the second product sums over. Head and batch
dimensions are the ones both products walk together.

Refused, because it could change the result: an inner value that something else reads or that is a model output; an
axis that cannot be proven to be the one it must be; scores that are rounded on the way; operands of several types.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import onnx_ir as ir

from fa_compiler.passes.decline import Decline
from fa_compiler.passes.facts import Facts
from fa_compiler.passes.layout.axes import Arrangement, Axes, AxisSpace
from fa_compiler.passes.layout.operands import Operands
from fa_compiler.passes.layout.views import View, Viewer
from fa_compiler.passes.masks.mask import MaskPlan, MaskPlanner
from fa_compiler.passes.masks.mask_values import TermValues
from fa_compiler.passes.masks.structure import Grid
from fa_compiler.passes.masks.terms import AddTerm, RowGuard, ScaleTerm, SelectTerm, Term
from fa_compiler.passes.matching.bounded import BoundedScores
from fa_compiler.passes.matching.dropout import Dropout, drop_mask, dropped, kept_by
from fa_compiler.passes.matching.factors import Factor, check_axes
from fa_compiler.passes.matching.interior import feeds_backward, readers_of_shapes
from fa_compiler.passes.matching.match import (
    AttentionMatch,
    Derivation,
    Roles,
    batch_and_heads,
    late_values,
    shared_heads,
)
from fa_compiler.passes.matching.probabilities import (
    FLOATS,
    RENORMALISED,
    ProbabilityPath,
    distinct_consumers,
    find_values,
    reaches_product,
    reads_shape,
    reads_type,
)
from fa_compiler.passes.matching.routes import ONLY, Route
from fa_compiler.passes.matching.row_guards import guard_of, only_mask, product_guard
from fa_compiler.passes.matching.scores import ScorePath, find_scores
from fa_compiler.passes.matching.simulation import Simulated, Simulation
from fa_compiler.passes.matching.sink_gates import SinkGate, gated, sink_gate
from fa_compiler.passes.matching.sink_totals import SinkTotal
from fa_compiler.passes.matching.sinks import Sunk, summed
from fa_compiler.passes.matching.softmax import LateDivision, SoftmaxAnchor
from fa_compiler.passes.nodes import is_op, is_weight, producer
from fa_compiler.passes.options import BOUNDED_SCORES, NO_EMPTY_ROWS
from fa_compiler.passes.report import Code
from fa_compiler.passes.values.symbolic import product

MAX_HEAD_SIZE = 768
LOGARITHM_ADVICE = "write it as a Softmax; or mask the scores with -inf, and add nothing else to them"


@dataclass(frozen=True)
class Steps:
    """An attention down to its softmax: the nodes around it, and what was done to the scores.

    `outside` are readers of a mere shape or type, each with what it reads. `dims` gets the arrangement of every value
    on the way.
    """

    anchor: SoftmaxAnchor
    route: Route
    before: ScorePath
    after: ProbabilityPath
    gate: SinkGate | None
    outside: tuple[tuple[ir.Node, ir.Value], ...]
    qk: Operands
    found: Simulated
    dims: dict[ir.Value, Arrangement]
    viewer: Viewer


@dataclass(frozen=True)
class Matcher:
    """Matches anchors of one model. With `ropes` a product that is added to the scores is a part of them, no bias."""

    facts: Facts
    ropes: bool = False

    def match(self, anchor: SoftmaxAnchor, route: Route = ONLY) -> AttentionMatch:
        """The record of the attention around an anchor; raises Decline."""
        return self.finish(self.begin(anchor, route))

    def begin(self, anchor: SoftmaxAnchor, route: Route = ONLY) -> Steps:
        """The first half of a match; raises Decline."""
        viewer = Viewer(self.facts, AxisSpace())
        after = find_values(anchor.output, viewer, route.path) if route.path else self._after(anchor, viewer)
        late = anchor.late
        gate = sink_gate(anchor.scores, after.product, self.facts.info) if late is None else None
        after = after if gate is None else replace(after, behind=gate.nodes)
        after = after if late is None else replace(after, behind=(*late.summing, *late.dividing))
        before = find_scores(anchor.scores, viewer)
        self._bounded.check_exponentials(anchor)
        if anchor.masked:
            reason = (
                "the exponentials are masked behind the maximum, which may be that of a masked key and leave nothing"
            )
            raise Decline(Code.PROBABILITY_TERM, reason, anchor.node, RENORMALISED)
        if anchor.sink is not None and anchor.sink.other is not None:
            reason = f"the sum of a row's exponentials is increased by {anchor.sink.other.name!r}, which is no sink's"
            raise Decline(Code.PROBABILITY_TERM, reason, anchor.sink.nodes[-1], "")
        with self._layers_apart(before, viewer):
            outside = readers_of_shapes(anchor, before, after, self._answers(anchor, after, route))
            narrow = self.facts.info.dtype(after.product.output) != ir.DataType.FLOAT
            qk = Operands.of(before.product, viewer, widening=narrow)
            dims: dict[ir.Value, Arrangement] = {}
            found = Simulation(viewer, dims, self.ropes).before(before, qk)
            dims[anchor.output] = found.dims
        return Steps(anchor, route, before, after, gate, tuple(outside), qk, found, dims, viewer)

    def finish(self, steps: Steps) -> AttentionMatch:
        """The second half of a match; raises Decline."""
        with self._layers_apart(steps.before, steps.viewer):
            return self._matched(steps)

    @contextmanager
    def _layers_apart(self, before: ScorePath, viewer: Viewer) -> Iterator[None]:
        """Declines that name a linear layer, where the softmax is of one."""
        try:
            yield
        except Decline as decline:
            if decline.code == Code.AXIS and any(_is_weight(value, viewer) for value in before.product.operands):
                self._check_mixed(before, viewer)
                reason = "the softmax of a linear layer's output, over another axis than keys would have"
                raise Decline(Code.NOT_ATTENTION, reason, decline.culprit) from decline
            raise

    def _answers(
        self, anchor: SoftmaxAnchor, after: ProbabilityPath, route: Route
    ) -> Callable[[ir.Value, ir.Node], bool]:
        """Does somebody else answer for this reader of an inner value?"""
        late = late_values(anchor, after) if route.gradient else ()

        def answered(output: ir.Value, reader: ir.Node) -> bool:
            by_gradient = output in late and not reads_shape(reader) and not reads_type(reader, output)
            return by_gradient or reader in route.answered

        return answered

    def _check_mixed(self, before: ScorePath, viewer: Viewer) -> None:
        """Decline with a code of attention where a linear layer takes scores: talking heads."""
        for value in before.product.operands:
            try:
                inner = None if _is_weight(value, viewer) else find_scores(value, viewer, inner=True).product
            except Decline:
                continue
            if inner is not None and not any(_is_weight(each, viewer) for each in inner.operands):
                reason = "a linear layer mixes the scores of several heads"
                raise Decline(Code.SCORE_TERM, reason, before.product.node, "")

    def _matched(self, steps: Steps) -> AttentionMatch:
        anchor, before, after, gate = steps.anchor, steps.before, steps.after, steps.gate
        viewer, qk, found, seen = steps.viewer, steps.qk, steps.found, steps.dims
        terms, sunk = found.terms, found.sunk
        finite = next((term for term in terms if not self._leaves_scores(term)), None)
        self._bounded.check_rows(anchor, finite)
        if anchor.rounds and finite is not None:
            reason = (
                "the softmax is spelt exp(scores - log(sum(exp(scores)))), and the logarithm is rounded away in a row "
                "whose scores are all as large as the numbers of a mask, which this term may bring about"
            )
            raise Decline(Code.SCORE_TERM, reason, finite.node, LOGARITHM_ADVICE)
        key_side, columns = self._key_side(anchor, qk, found.dims, sunk, viewer)
        rope = None if found.second is None else found.second.rope(columns, viewer)
        self._check_growth(found)
        for node, dim in found.shifted:
            if viewer.space.resolve(dim) != viewer.space.resolve(columns):
                raise Decline(Code.SCORE_TERM, "the maximum along another axis than the keys' is subtracted", node)
        dims, factors, dropout = self._behind(steps)
        if found.shifted and (gate is not None or anchor.sink is not None):
            reason = "a maximum is subtracted from the scores, and not from the sink beside them"
            raise Decline(Code.SCORE_TERM, reason, found.shifted[0][0])
        if gate is not None:
            pv = Operands.of(after.product, viewer, given=(after.side, dims), factors=False)
            sunk = self._gated(gate, found, pv, columns, viewer)
        if anchor.sink is not None:
            sunk = self._summed(anchor, anchor.sink, found, columns, viewer)
        guard = tested = guard_of(after, terms, columns, viewer, seen)
        if after.divided is not None:
            terms = (*terms, self._bounded.mask_of(after.divided, columns, viewer, seen))
            guard = RowGuard.NAN if after.divided.zeros else RowGuard.NONE
        masking = product_guard(factors, terms, viewer) if guard is RowGuard.NONE else None
        if masking is not None:
            guard, factors = RowGuard.PRODUCT, tuple(each for each in factors if each is not masking)
        row = self._row(qk, 1 - key_side, terms, viewer)
        rows = _along(qk, 1 - key_side, row, viewer)
        if sunk is not None and guard in (RowGuard.BIAS, RowGuard.SCORES):
            raise Decline(Code.PROBABILITY_TERM, "a guard that tests the scores, not the sink beside them", anchor.node)
        sink_above = None if sunk is None else self._sink_above(sunk)
        values = TermValues(viewer, sink_above)
        planner = MaskPlanner(values, Grid.of(rows, columns, viewer.space))
        bare = anchor.sink is not None and anchor.sink.held is None
        if (gate is not None or bare) and guard in (RowGuard.NONE, RowGuard.SELECTION, RowGuard.PRODUCT):
            _check_finite(values, terms, only_mask(terms) if guard is RowGuard.SELECTION else None)
        if steps.route.gradient:
            planner = replace(planner, packing=dropout is None, gradient=True)
        plan = planner.plan(terms, guard)
        if gate is not None and plan.nan_rows:
            _check_below_infinity(values, terms)
            plan = replace(plan, nan_rows="")
        if after.divided is not None or anchor.overflows:
            plan = plan.assuming(BOUNDED_SCORES)
        if anchor.overflows and finite is not None:
            plan = plan.assuming(NO_EMPTY_ROWS)
        if after.product.factor != 1.0:
            factors = (*factors, Factor(after.product.node, None, after.product.factor))
        pv = Operands.of(after.product, viewer, given=(after.side, dims), factors=False)
        self._check_sums_columns(after, pv, columns, viewer)
        if any(map(math.isinf, self.sets.of(after.value) or ())):
            reason = f"the values {after.value.name!r} hold infinities, as a mask does, and 0 times infinity is NaN"
            raise Decline(Code.NO_VALUE_MATMUL, reason, after.product.node)
        if anchor.late is not None:
            self._check_late(anchor.late, after, found.dims, columns, pv.out, viewer)
        match = self._record(anchor, before, after, qk, key_side, row, columns, pv, plan, found.scale, sunk, viewer)
        match = match if gate is None else replace(match, output=gate.output)
        match = match if anchor.late is None else replace(match, output=anchor.late.output)
        if found.factors or factors:
            allowed = match.roles.batch, match.roles.heads, match.roles.rows
            check_axes(found.factors, allowed, viewer.space, Code.SCALE)
            check_axes(factors, allowed, viewer.space, Code.PROBABILITY_TERM)
            match = replace(match, dtype=ir.DataType.FLOAT, query_factors=found.factors, output_factors=factors)
        shapes = tuple((node, self._seen(seen, value, viewer)) for node, value in steps.outside if reads_shape(node))
        types = tuple((node, self._type(value)) for node, value in steps.outside if not reads_shape(node))
        derivation = Derivation(before, after, found.terms, tested, seen, planner)
        match = replace(match, shapes=shapes, types=types, rope=rope, dropout=dropout, derivation=derivation)
        for view in match.views:
            if not _has_known_heads(view, match.roles.heads, viewer.space):
                reason = f"how many heads {view.base.name!r} has is not known before the model runs"
                raise Decline(Code.SHAPE, reason, before.product.node)
        return match.with_second_last()

    def _check_late(
        self,
        late: LateDivision,
        after: ProbabilityPath,
        dims: Arrangement,
        columns: Axes,
        out: Arrangement,
        viewer: Viewer,
    ) -> None:
        """Decline where a late divisor is not one number for each row: `dims` are the scores', `out` the product's."""
        divide = late.dividing[-1]
        if after.guard is not None:
            raise Decline(Code.PROBABILITY_TERM, "a guard on exponentials that are divided later", after.guard.where)
        if self.facts.info.dtype(after.product.output) != ir.DataType.FLOAT:
            raise Decline(Code.DTYPE, "exponentials in 16 bits are summed up before they are divided", divide)
        if self.facts.info.shape(late.output) != self.facts.info.shape(after.product.output):
            raise Decline(Code.SHAPE, "the divisor enlarges what it divides", divide)
        resolve = viewer.space.resolve
        rows = [() if resolve(dim) == resolve(columns) else resolve(dim) for dim in dims]
        aligned = viewer.space.resolve_all(out)[len(out) - len(rows) :] if len(rows) <= len(out) else ()
        if len(aligned) != len(rows) or any(row and row != own for row, own in zip(rows, aligned, strict=True)):
            raise Decline(Code.SHAPE, "the divisor is not one number for each row", divide)

    @property
    def _bounded(self) -> BoundedScores:
        return BoundedScores(self.facts)

    def _gated(self, gate: SinkGate, found: Simulated, pv: Operands, columns: Axes, viewer: Viewer) -> Sunk:
        if found.sunk is not None:
            raise Decline(
                Code.PROBABILITY_TERM, "a sink beside the scores, and another behind the product", gate.nodes[-1]
            )
        interval = self.facts.bounds.of(gate.sink)
        if interval is None or interval[1] == math.inf:
            reason = "a sink that may be +inf gives 0 behind the product, and NaN beside the scores"
            raise Decline(Code.SCORE_TERM, reason, gate.difference)
        return gated(gate, found.dims, pv.out, columns, self.facts.sets.only(gate.sink), viewer)

    def _summed(self, anchor: SoftmaxAnchor, total: SinkTotal, found: Simulated, columns: Axes, viewer: Viewer) -> Sunk:
        if found.sunk is not None:
            raise Decline(Code.PROBABILITY_TERM, "a sink beside the scores, and another in their total", anchor.node)
        if anchor.axis is None:
            raise Decline(Code.AXIS, "a sink in a total over several axes", anchor.node)
        number = None if total.value is None else self.facts.sets.only(total.value)
        return summed(total, number, found.dims, anchor.axis, columns, viewer)

    def _check_growth(self, found: Simulated) -> None:
        """A mask's number less a row's maximum never overflows, times a factor; alone it may, unless a factor before
        made it smaller by as much. A negative factor makes it the maximum, beside which scores are rounded away."""
        growth = 1.0
        for term in found.terms if found.shifted else ():
            growth *= term.factor if isinstance(term, ScaleTerm) else 1.0
            if not 0.0 < growth <= 1.0:
                reason = "a mask less its maximum is multiplied by more than 1, or by a negative number"
                raise Decline(Code.SCORE_TERM, reason, term.node)

    def _leaves_scores(self, term: Term) -> bool:
        """Does a term leave scores as they are, or make them -inf?"""
        if isinstance(term, AddTerm):
            values = self.facts.sets.of(term.value)
            return values is not None and values <= {0.0, -math.inf * term.sign}
        return isinstance(term, ScaleTerm) or (isinstance(term, SelectTerm) and term.fill == -math.inf)

    def _sink_above(self, sunk: Sunk) -> float:
        """A number no sink is below."""
        interval = self.facts.bounds.of(sunk.step.value)
        if sunk.sink.view is None:
            interval = sunk.sink.number, sunk.sink.number
        if interval is None:
            return -math.inf
        if interval[1] == math.inf:
            raise Decline(Code.SCORE_TERM, "a sink that may be +inf turns every row into NaN", sunk.step.node)
        return interval[0]

    def _type(self, value: ir.Value) -> ir.DataType:
        dtype = self.facts.info.dtype(value)
        if dtype is None:
            raise Decline(Code.DTYPE, f"the type of {value.name!r} is unknown but needed elsewhere", value.producer())
        return dtype

    def _seen(self, seen: dict[ir.Value, Arrangement], value: ir.Value, viewer: Viewer) -> Arrangement:
        if value not in seen:
            raise Decline(Code.SCORES_ARE_OUTPUT, f"the shape of {value.name!r} is needed elsewhere", value.producer())
        return viewer.space.resolve_all(seen[value])

    def _after(self, anchor: SoftmaxAnchor, viewer: Viewer) -> ProbabilityPath:
        try:
            return find_values(anchor.output, viewer, None if anchor.late is None else anchor.late.path)
        except Decline as decline:
            if not reaches_product(anchor.output, viewer):
                raise Decline(
                    Code.NOT_ATTENTION, "no product with values follows this softmax", decline.culprit
                ) from decline
            if is_op(anchor.nodes[0], "LogSoftmax") and len(distinct_consumers(anchor.nodes[0].outputs[0])) > 1:
                reason = "the softmax of a loss: the logarithm of its probabilities is read, too"
                raise Decline(Code.NOT_ATTENTION, reason, decline.culprit) from decline
            if decline.code == Code.PROBABILITIES_ARE_OUTPUT and feeds_backward(anchor.output):
                raise Decline(Code.TRAINING, decline.reason, decline.culprit) from decline
            raise

    def _key_side(
        self, anchor: SoftmaxAnchor, qk: Operands, dims: Arrangement, sunk: Sunk | None, viewer: Viewer
    ) -> tuple[int, Axes]:
        """Which operand of the first product is the key, and its sequence axes."""
        if not anchor.axes or max(anchor.axes) >= len(dims):
            raise Decline(Code.AXIS, "the softmax does not run over one known axis", anchor.node)
        columns = viewer.space.resolve(axis for place in anchor.axes for axis in dims[place])
        if sunk is not None:
            if columns != viewer.space.resolve(sunk.whole):
                reason = "the scores are made longer along another axis than the softmax runs over"
                raise Decline(Code.SCORE_TERM, reason, sunk.step.node)
            columns = viewer.space.resolve(sunk.columns)
        for side in (1, 0):
            # A key may have batch dimensions that the query lacks, but not beside a matrix of weights: that is a layer.
            layer = len(qk.free(side)) > 1 and len(qk.dims[1 - side]) > 1
            layer = layer and _is_weight(qk.product.operands[1 - side], viewer)
            if not layer and qk.own_labels(side, columns, viewer.space):
                return side, columns
        raise Decline(Code.AXIS, "the softmax runs over an axis that is not the keys' alone", anchor.node)

    def _row(self, qk: Operands, side: int, terms: tuple[Term, ...], viewer: Viewer) -> str | None:
        """Which dimension of its own counts the query's rows: of those that a mask runs along, or else of all, the last
        one of open size, or else the last. Any choice is right; the others are heads or batches, which masks know less
        often, and along a batch keys are repeated. None where it has none, as a vector."""
        free = qk.free(side)
        known = {
            axis
            for term in terms
            if isinstance(term, AddTerm | SelectTerm)
            for dim in term.dims
            for axis in viewer.space.resolve(dim)
        }
        axes = {label: viewer.space.resolve(qk.dims[side][label]) for label in free}
        likely = [label for label in free if known.intersection(axes[label])] or free
        open_size = [label for label in likely if viewer.space.size(axes[label]).const is None]
        return next(reversed(open_size or likely), None)

    def _behind(self, steps: Steps) -> tuple[Arrangement, tuple[Factor, ...], Dropout | None]:
        """The probabilities at the product: their arrangement, the factors on them, and what is dropped where the
        gradient is fused, too. A dropout takes the numbers on the probabilities with it."""
        anchor, after, found, viewer = steps.anchor, steps.after, steps.found, steps.viewer
        walk = Simulation(viewer, steps.dims)
        drops = [node for node in after.nodes if drop_mask(node, viewer) is not None] if steps.route.gradient else []
        if len(drops) != 1:
            return *walk.after(anchor.output, after, found), None
        (drop,) = drops
        index = after.nodes.index(drop)
        before, behind = replace(after, nodes=after.nodes[:index]), replace(after, nodes=after.nodes[index + 1 :])
        dims, factors = walk.after(anchor.output, before, found)
        dropout, scale = dropped(drop, dims, viewer)
        steps.dims[drop.outputs[0]] = dims
        dims, more = walk.after(drop.outputs[0], behind, replace(found, dims=dims))
        return dims, (), kept_by(dropout, scale, (*factors, *more))

    def _check_sums_columns(self, after: ProbabilityPath, pv: Operands, columns: Axes, viewer: Viewer) -> None:
        summed = [axis for label in after.product.summed for axis in viewer.space.resolve(pv.dims[after.side][label])]
        wanted = viewer.space.resolve(columns)
        if len(summed) != len(wanted) or set(summed) != set(wanted):
            if not set(summed) & set(wanted) and _is_weight(after.value, viewer):
                reason = "a linear layer mixes the probabilities of several heads or rows"
                raise Decline(Code.PROBABILITY_TERM, reason, after.product.node, "")
            raise Decline(
                Code.NO_VALUE_MATMUL,
                "the product after the softmax does not sum over the keys",
                after.product.node,
            )

    def _record(
        self,
        anchor: SoftmaxAnchor,
        before: ScorePath,
        after: ProbabilityPath,
        qk: Operands,
        key_side: int,
        row: str | None,
        columns: Axes,
        pv: Operands,
        plan: MaskPlan,
        scale: float,
        sunk: Sunk | None,
        viewer: Viewer,
    ) -> AttentionMatch:
        resolve = viewer.space.resolve
        product, node = before.product, before.product.node
        own = {row, *qk.own_labels(key_side, columns, viewer.space)}
        rows = _along(qk, 1 - key_side, row, viewer)
        shared = [label for label in product.out if label not in own]
        sunk_heads = () if sunk is None or sunk.sink.view is None else _own_axes(sunk.sink.view, viewer)
        batch, heads = batch_and_heads([resolve(qk.out_dim(label)) for label in shared], sunk_heads)
        if sunk is not None and not set(sunk_heads) <= set(heads):
            raise Decline(Code.SHAPE, "the sink is not one number for each head", sunk.step.node)
        depth = tuple(axis for label in product.summed for axis in resolve(qk.dims[0][label]))
        value_depth = tuple(axis for dim in pv.own_dims(1 - after.side) for axis in resolve(dim))
        expected = {*batch, *heads, *rows, *value_depth}
        output_dims = viewer.space.resolve_all(pv.out)
        if {axis for dim in output_dims for axis in dim} != expected:
            raise Decline(Code.SHAPE, "the output's axes are not those of query and value", after.product.node)
        groups = (batch, heads, rows, resolve(columns), depth, value_depth)
        if len({axis for group in groups for axis in group}) != sum(map(len, groups)):
            raise Decline(Code.SHAPE, "one axis would have to play two roles", node)
        dtype, query, key, value = self._operands(qk, key_side, pv, after)
        kv_heads = shared_heads(key, value, heads, viewer.space)
        size = viewer.space.size(depth).const
        if size is None:
            raise Decline(Code.SHAPE, "the head size is not known before the model runs", node)
        if size > MAX_HEAD_SIZE:
            raise Decline(Code.HEAD_SIZE_OVER_768, f"the head size is {size}", node)
        if viewer.space.size(heads).const is None or viewer.space.size(kv_heads).const is None:
            raise Decline(Code.SHAPE, "the number of heads is not known before the model runs", node)
        roles = Roles(batch, heads, kv_heads, rows, resolve(columns), depth, value_depth)
        return AttentionMatch(
            anchor,
            viewer.space,
            query,
            key,
            value,
            roles,
            scale,
            plan,
            dtype,
            after.product.output,
            output_dims,
            None if sunk is None else sunk.sink,
        )

    def _operands(
        self, qk: Operands, key_side: int, pv: Operands, after: ProbabilityPath
    ) -> tuple[ir.DataType, View, View, View]:
        """Query, key and value, and the type to compute in: that of the result, or float32 when they differ.

        Computing 16-bit operands in float32 only leaves roundings out.
        """
        node = after.product.node
        query, key, value = qk.views[1 - key_side], qk.views[key_side], pv.views[1 - after.side]
        assert query is not None and key is not None and value is not None
        wanted = self.facts.info.dtype(after.product.output)
        types = {self.facts.info.dtype(view.base) for view in (query, key, value)}
        if wanted not in FLOATS or not types <= set(FLOATS):
            raise Decline(Code.DTYPE, "query, key and value are not float32, float16 or bfloat16", node)
        assert wanted is not None
        return wanted if types == {wanted} else ir.DataType.FLOAT, query, key, value


def _check_finite(values: TermValues, terms: tuple[Term, ...], zeroed: Term | None) -> None:
    """Decline terms that may make a whole row -inf; where `zeroed` alone does so, a guard makes it 0."""
    masks = [
        index for index, term in enumerate(terms) if term is not zeroed and not values.is_harmless(terms, index)
    ]
    for index in masks:
        if len(masks) > 1 or values.may_be_infinite(terms, index):
            reason = "a row whose scores are all -inf gives NaN, and 0 beside a sink"
            raise Decline(Code.EMPTY_ROWS, reason, terms[index].node)


def _check_below_infinity(values: TermValues, terms: tuple[Term, ...]) -> None:
    """Decline terms that may make a score +inf; what a caller gives is taken for one that does not."""
    for index, term in enumerate(terms):
        numbers = values.of(terms, index)
        added = numbers is None and isinstance(term, AddTerm) and not _is_given(term.value, values.viewer)
        if math.inf in (numbers or ()) or (added and values.may_be_infinite(terms, index)):
            reason = "a guard makes a row with a score of +inf 0, where a sink beside the scores makes it NaN"
            raise Decline(Code.MASK_VALUE, reason, term.node)


def _is_given(value: ir.Value, viewer: Viewer) -> bool:
    """Is a value an input or initializer, rearranged or not?"""
    view = viewer.view(value)
    return producer(value if view is None else view.base) is None


def _is_weight(value: ir.Value, viewer: Viewer) -> bool:
    """Does a value hold weights, rearranged or not?"""
    view = viewer.view(value)
    return is_weight(value if view is None else view.base)


def _has_known_heads(view: View, heads: Axes, space: AxisSpace) -> bool:
    """Has each dimension that runs along heads as many of them by its own size? One that is left open may be 1 in a
    run, and be broadcast, while the operator takes a key and a value of as many heads."""
    for dim in view.base_dims:
        own = tuple(axis for axis in space.resolve(dim) if axis in heads)
        if own and product(axis.size for axis in dim).exact_div(space.size(own)) is None:
            return False
    return True


def _along(operands: Operands, side: int, label: str | None, viewer: Viewer) -> Axes:
    return () if label is None else viewer.space.resolve(operands.dims[side][label])


def _own_axes(view: View, viewer: Viewer) -> Axes:
    return tuple(axis for dim in view.base_dims for axis in viewer.space.resolve(dim))
