"""The cost of a layout: where its operands are read from, which value the result replaces, and the
copies between.

Every layout gives the same result, because the arrangements of operands and result are known. The
cheapest is taken. The result may replace a value further down than the output of the product with
the values: Transposes and Reshapes after it are absorbed as long as nothing else reads the elements
of the values between. Exporters that reshape to computed sizes read the shapes of these values,
too; the shapes are then computed from the operands.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, KnownAxes
from fa_compiler.passes.ir.nodes import all_known, distinct_consumers, is_op, reads_shape, sole
from fa_compiler.passes.layout.plan import COPY_COST, Move, arrangement, cost, plan_moves
from fa_compiler.passes.layout.views import View, Viewer
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.ops.movers import COPIES, LAYOUT_OPS
from fa_compiler.passes.values.facts import Facts
from fa_compiler.passes.values.shapes import ShapeInfo

ShapeReaders = tuple[tuple[ir.Node, Arrangement], ...]
"""Shape nodes, each with the arrangement of the value that it reads."""


MOVER_COSTS = {"Transpose": COPY_COST}
"""What the operators that move a result cost; the others cost 1."""


@dataclass(frozen=True)
class OutputCandidate:
    """A value the fused result may replace, its arrangement, and the cost of the nodes that are
    then not needed.

    `shapes` are the Shape nodes that read a value which is then not computed.
    """

    value: ir.Value
    dims: Arrangement
    saved: int
    shapes: ShapeReaders = ()


@dataclass(frozen=True)
class Destination:
    """A value the fused result can replace, and the moves from the operator's output to it.

    `saved` is the cost of the existing nodes that are then not needed, `shapes` are the Shape nodes
    that read a value which is then not computed.
    """

    value: ir.Value
    dims: Arrangement
    plan: tuple[Move, ...]
    saved: int
    shapes: ShapeReaders = ()

    @property
    def cost(self) -> int:
        """The cost of the moves minus that of the nodes that are then not needed."""
        return cost(self.plan) - self.saved


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

    `key_layout` is the layout of key and value, that of query and result is `name`. If `paged`, key
    and value are read from pages.
    """

    name: str
    key_layout: str
    operands: tuple[OperandSource, ...]
    query: Arrangement
    output: Arrangement
    destination: Destination
    paged: bool = False

    @property
    def cost(self) -> int:
        """The cost of the copies needed minus that of the copies saved. Pages are read in place and
        cost nothing."""
        read = self.operands
        if self.paged:
            read = read[:1]
        return sum(source.cost for source in read) + self.destination.cost


def output_candidates(
    match: AttentionMatch, facts: Facts
) -> tuple[AttentionMatch, tuple[OutputCandidate, ...]]:
    """The match, and the places where its result can go: the output of the product with the values,
    and the values after it that only rearrange it. The axes of the returned match are split as far
    as these values need it.
    """
    viewer = Viewer(facts, match.space.branch())
    last = OutputCandidate(match.output, match.output_dims, 0)
    candidates = [last]
    while (after := _mover_after(last.value)) is not None:
        mover, shape_readers = after
        dims = viewer.rearranged(mover, last.dims)
        if dims is None:
            break
        saved = last.saved + MOVER_COSTS.get(mover.op_type, 1)
        if shape_readers:
            saved -= 1  # other nodes compute them
        shapes = (*last.shapes, *((reader, last.dims) for reader in shape_readers))
        last = OutputCandidate(mover.outputs[0], dims, saved, shapes)
        candidates.append(last)
    if viewer.space.knows_no_more(match.space):
        return match.with_heads(), tuple(candidates)
    return match.within(viewer.space).with_heads(), viewer.space.settle(tuple(candidates))


def _mover_after(value: ir.Value) -> tuple[ir.Node, list[ir.Node]] | None:
    """The node that rearranges a value and is the only one that reads its elements, and the nodes
    that read its shape; None where something else reads it, or where it is an output or read in a
    subgraph."""
    maker, readers = value.producer(), distinct_consumers(value)
    if (
        value.is_graph_output()
        or maker is None
        or any(node.graph is not maker.graph for node in readers)
    ):
        return None
    mover = sole([node for node in readers if not reads_shape(node)])
    if mover is None or len(list(value.uses())) != len(readers):
        return None
    if mover.inputs[0] is not value or not is_op(mover, *LAYOUT_OPS):
        return None
    return mover, [node for node in readers if reads_shape(node)]


def layout_plan(
    match: AttentionMatch,
    name: str,
    candidates: Sequence[OutputCandidate],
    info: ShapeInfo,
    key_layout: str | None = None,
) -> LayoutPlan | None:
    """The layout `name` with its cheapest sources and destination; key and value may have another
    layout.

    None where an operand or the result cannot be brought into this layout.
    """
    roles, space, key_layout = match.roles, match.space, key_layout or name
    targets: tuple[tuple[View, Arrangement], ...] = (
        (match.query, arrangement(name, roles.batch, roles.heads, roles.q_seq, roles.head_dim)),
        (
            match.key,
            arrangement(key_layout, roles.batch, roles.kv_heads, roles.kv_seq, roles.head_dim),
        ),
        (
            match.value,
            arrangement(
                key_layout, roles.batch, roles.kv_heads, roles.kv_seq, roles.value_head_dim
            ),
        ),
    )
    if (rope := match.rope) is not None:
        targets += (
            (rope.query, arrangement(name, roles.batch, roles.heads, roles.q_seq, rope.head_dim)),
            (
                rope.key,
                arrangement(key_layout, roles.batch, roles.kv_heads, roles.kv_seq, rope.head_dim),
            ),
        )
    operands = all_known(cheapest_source(view, target, space, info) for view, target in targets)
    output = arrangement(name, roles.batch, roles.heads, roles.q_seq, roles.value_head_dim)
    best = best_destination(output, candidates)
    if operands is None or best is None:
        return None
    return LayoutPlan(name, key_layout, tuple(operands), targets[0][1], output, best)


class Costing(Protocol):
    """What has a cost."""

    @property
    def cost(self) -> int: ...


Choice = TypeVar("Choice", bound=Costing)


def cheapest(choices: Iterable[Choice]) -> Choice | None:
    """The last of the choices that cost least; None where there is none."""
    return min(reversed(list(choices)), key=lambda choice: choice.cost, default=None)


def best_destination(
    output: Arrangement, candidates: Sequence[OutputCandidate]
) -> Destination | None:
    """The place that costs least for a result arranged as `output`, after the saved cost is
    subtracted.

    None where the result can be brought to none of the places.
    """
    plans = ((candidate, plan_moves(output, candidate.dims)) for candidate in candidates)
    return cheapest(
        Destination(candidate.value, candidate.dims, plan, candidate.saved, candidate.shapes)
        for candidate, plan in plans
        if plan is not None
    )


def cheapest_source(
    view: View, target: Arrangement, space: KnownAxes, info: ShapeInfo
) -> OperandSource | None:
    """The equivalent value of a view from which the target costs least; None where it can be
    reached from none.

    Of values of equal cost the last is taken, which needs the fewest new nodes. A value that may
    lack an axis in some run (`AxisSpace.short_dims`) is not taken.
    """
    return cheapest(_sources(view, target, space, info))


def _sources(
    view: View, target: Arrangement, space: KnownAxes, info: ShapeInfo
) -> Iterator[OperandSource]:
    """The equivalent values of a view from which the target can be reached."""
    kept = 0
    for index, (value, dims) in enumerate(view.equivalent_values):
        if index:
            maker = value.producer()
            kept += 1 if maker is None or maker.op_type not in COPIES else COPY_COST
        plan = plan_moves(dims, target)
        if plan is not None and not space.short_dims(dims, info.shape(value)):
            yield OperandSource(value, dims, plan, kept)
