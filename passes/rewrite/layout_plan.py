"""The cost of a layout: where its operands are read from, which value the result replaces, and the copies between.

Every layout gives the same result, because the arrangements of operands and result are known. The cheapest is taken.
The result may replace a value further down than the output of the second product: Transposes and Reshapes after it are
absorbed as long as nothing else reads the values between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.facts import Facts
from fa_compiler.passes.layout.axes import Arrangement, KnownAxes
from fa_compiler.passes.layout.plan import COPY_COST, Move, arrangement, cost, plan_moves
from fa_compiler.passes.layout.views import View, Viewer
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.movers import COPIES, LAYOUT_OPS
from fa_compiler.passes.nodes import is_op, only_reader
from fa_compiler.passes.values.shapes import ShapeInfo

OutputCandidate = tuple[ir.Value, Arrangement, int]
"""A value the fused result may replace, its arrangement, and the cost of the nodes that are then not needed."""


@dataclass(frozen=True)
class Destination:
    """A value the fused result can replace, and the moves from the operator's output to it.

    `saved` is the cost of the existing nodes that are then not needed.
    """

    value: ir.Value
    dims: Arrangement
    plan: tuple[Move, ...]
    saved: int


@dataclass(frozen=True)
class OperandSource:
    """A value an operand is read from, and the moves from it to the layout.

    `kept` is the cost of the existing nodes between the view's base and this value.
    """

    value: ir.Value
    dims: Arrangement
    plan: tuple[Move, ...]
    kept: int

    @property
    def cost(self) -> int:
        """The cost of the nodes that make the operand, existing ones and new ones."""
        return self.kept + cost(self.plan)


@dataclass(frozen=True)
class LayoutPlan:
    """One layout with the sources of its operands and the destination of its result.

    If `paged`, key and value are read from pages.
    """

    name: str
    operands: tuple[OperandSource, ...]
    query: Arrangement
    output: Arrangement
    destination: Destination
    paged: bool = False

    @property
    def cost(self) -> int:
        """The cost of the copies needed minus that of the copies saved. Pages are read in place and cost nothing."""
        read = self.operands[:1] if self.paged else self.operands
        return sum(source.cost for source in read) + cost(self.destination.plan) - self.destination.saved


def output_candidates(match: AttentionMatch, facts: Facts) -> tuple[AttentionMatch, tuple[OutputCandidate, ...]]:
    """The match, and the places where its result can go: the output of the second product, and the values after it
    that only rearrange it. The axes of the returned match are split as far as these values need it.
    """
    viewer = Viewer(facts, match.space.branch())
    value, dims, saved = match.output, match.output_dims, 0
    candidates = [(value, dims, saved)]
    while (reader := only_reader(value)) is not None and reader.inputs[0] is value and is_op(reader, *LAYOUT_OPS):
        moved = viewer.rearranged(reader, dims)
        if moved is None:
            break
        saved += COPY_COST if reader.op_type == "Transpose" else 1
        value, dims = reader.outputs[0], moved
        candidates.append((value, dims, saved))
    if viewer.space.knows_no_more(match.space):
        return match.with_heads(), tuple(candidates)
    return match.within(viewer.space).with_heads(), viewer.space.settle(tuple(candidates))


def layout_plan(
    match: AttentionMatch, name: str, candidates: Sequence[OutputCandidate], info: ShapeInfo
) -> LayoutPlan | None:
    """The layout `name` with its cheapest sources and destination.

    None where an operand or the result cannot be brought into this layout.
    """
    roles, space = match.roles, match.space
    targets: tuple[tuple[View, Arrangement], ...] = (
        (match.query, arrangement(name, roles.batch, roles.heads, roles.q_seq, roles.head_dim)),
        (match.key, arrangement(name, roles.batch, roles.kv_heads, roles.kv_seq, roles.head_dim)),
        (match.value, arrangement(name, roles.batch, roles.kv_heads, roles.kv_seq, roles.value_head_dim)),
    )
    if (rope := match.rope) is not None:
        targets += (
            (rope.query, arrangement(name, roles.batch, roles.heads, roles.q_seq, rope.head_dim)),
            (rope.key, arrangement(name, roles.batch, roles.kv_heads, roles.kv_seq, rope.head_dim)),
        )
    operands = []
    for view, target in targets:
        source = cheapest_source(view, target, space, info)
        if source is None:
            return None
        operands.append(source)
    output = arrangement(name, roles.batch, roles.heads, roles.q_seq, roles.value_head_dim)
    best = best_destination(output, candidates)
    return None if best is None else LayoutPlan(name, tuple(operands), targets[0][1], output, best)


def best_destination(output: Arrangement, candidates: Sequence[OutputCandidate]) -> Destination | None:
    """The place that costs least for a result arranged as `output`, after the saved cost is subtracted.

    None where the result can be brought to none of the places.
    """
    best: Destination | None = None
    for value, dims, saved in candidates:
        plan = plan_moves(output, dims)
        if plan is None:
            continue
        destination = Destination(value, dims, plan, saved)
        if best is None or cost(plan) - saved <= cost(best.plan) - best.saved:
            best = destination
    return best


def cheapest_source(view: View, target: Arrangement, space: KnownAxes, info: ShapeInfo) -> OperandSource | None:
    """The equivalent value of a view from which the target costs least; None where it can be reached from none.

    Of values of equal cost the last is taken, which needs the fewest new nodes. A value that may lack an axis in some
    run (`AxisSpace.short_dims`) is not taken.
    """
    best: OperandSource | None = None
    kept = 0
    for index, (value, dims) in enumerate(view.equivalent_values):
        if index:
            maker = value.producer()
            kept += 1 if maker is None or maker.op_type not in COPIES else COPY_COST
        plan = plan_moves(dims, target)
        if plan is None or space.short_dims(dims, info.shape(value)):
            continue
        source = OperandSource(value, dims, plan, kept)
        if best is None or source.cost <= best.cost:
            best = source
    return best
