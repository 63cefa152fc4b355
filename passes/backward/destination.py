"""Where the gradients of an operator go: after the products they replace, at the place that costs
least."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes
from fa_compiler.passes.backward.gradient_targets import GradientTarget
from fa_compiler.passes.backward.match import Gradient, GradientMatch, Role
from fa_compiler.passes.backward.polynomials import TOLERANCE
from fa_compiler.passes.backward.quantities import LARGEST_FACTOR
from fa_compiler.passes.emit.build import Builder, LayoutEmitter
from fa_compiler.passes.ir.nodes import certain
from fa_compiler.passes.ir.surgery import replace_value
from fa_compiler.passes.layout.plan import COPY_COST, Move, arrangement, cost, plan_moves
from fa_compiler.passes.layout.views import View
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.rewrite.layout_plan import cheapest
from fa_compiler.passes.rewrite.rewriter import Rewriter


@dataclass(frozen=True)
class GradientDestination:
    """A target for a gradient, the axes to sum over first, and the moves to it from the operator's
    output with those axes in front."""

    target: GradientTarget
    summed: Axes
    plan: tuple[Move, ...]

    @property
    def cost(self) -> int:
        """The work added minus the work saved."""
        extra = COPY_COST * (bool(self.summed) + (not _is_one(self.target.factor)))
        return cost(self.plan) + extra - self.target.saved


@dataclass
class GradientCompanion:
    """A gradient that is emitted together with its attention. `found` is the gradient as it was
    matched, `record` the same in the axes of the match that is emitted."""

    found: GradientMatch
    rewriter: Rewriter
    nodes: list[ir.Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.record = self.found

    @property
    def views(self) -> tuple[View, ...]:
        """The gradient of the output."""
        return () if self.record.dy is None else (self.record.dy,)

    def adapted(self, match: AttentionMatch) -> AttentionMatch:
        """Move the gradient into the axes of `match`, and return the match to emit.

        Key and value heads are repeated where the graph reads their gradients one by one, because
        the operator adds up those of a group.
        """
        self.record = match.space.settle(self.found)
        roles = match.roles
        owned = {
            *roles.batch,
            *roles.kv_heads,
            *roles.kv_seq,
            *roles.head_dim,
            *roles.value_head_dim,
        }
        owned.update(() if match.rope is None else match.rope.head_dim)
        for gradient in self.record.gradients:
            summed = any(_axes(target.dims) <= owned for target in gradient.targets)
            if gradient.role not in ("query", "query_rope") and not summed:
                return replace(match, roles=replace(roles, kv_heads=roles.heads))
        return match


def gradient_dims(role: Role, match: AttentionMatch, layout: str) -> Arrangement:
    """The axes of a gradient: the axes of its query, key or value."""
    roles = match.roles
    rope = () if match.rope is None else match.rope.head_dim
    depth = {"value": roles.value_head_dim, "query_rope": rope, "key_rope": rope}.get(
        role, roles.head_dim
    )
    if role in ("query", "query_rope"):
        return arrangement(layout, roles.batch, roles.heads, roles.q_seq, depth)
    return arrangement(layout, roles.batch, roles.kv_heads, roles.kv_seq, depth)


def destination_of(
    gradient: Gradient, match: AttentionMatch, layout: str
) -> GradientDestination | None:
    """The cheapest target for a gradient; None where it cannot be brought to any."""
    return cheapest(_destinations(gradient, gradient_dims(gradient.role, match, layout)))


def _destinations(gradient: Gradient, dims: Arrangement) -> Iterator[GradientDestination]:
    """The targets that a gradient of this arrangement can be brought to."""
    for target in gradient.targets:
        wanted, left = target.dims, _axes(target.dims)
        summed = tuple(axis for dim in dims for axis in dim if axis not in left)
        plan = plan_moves(dims, (summed, *wanted) if summed else wanted)
        is_scaled = 1 / LARGEST_FACTOR < abs(target.factor) < LARGEST_FACTOR
        if plan is not None and left <= _axes(dims) and is_scaled:
            yield GradientDestination(target, summed, plan)


def moved_to(
    value: ir.Value,
    dims: Arrangement,
    destination: GradientDestination,
    dtype: ir.DataType,
    builder: Builder,
    emitter: LayoutEmitter,
) -> ir.Value:
    """An operator's output of this arrangement and type as the value whose place it takes. Sums and
    factors are computed in float32: the graph may have left 16 bits before it undoes the scale of a
    loss."""
    value = emitter.apply(value, dims, destination.plan)
    if destination.summed or not _is_one(destination.target.factor):
        dtype = ir.DataType.FLOAT
        value = builder.cast(value, dtype)
    if destination.summed:
        value = builder.reduce("ReduceSum", value, [0], keepdims=0)
    if not _is_one(destination.target.factor):
        number = builder.constant(
            np.array(destination.target.factor, dtype=dtype.numpy()), "number"
        )
        value = builder.mul(value, number)
    wanted = builder.info.dtype(destination.target.value)
    return value if wanted is None else builder.cast(value, wanted)


def replace_destinations(pairs: list[tuple[GradientTarget, ir.Value]], rewriter: Rewriter) -> None:
    """Let results take the place of the values they replace."""
    seen: set[ir.Value] = set()
    for target, result in pairs:
        maker = certain(target.value.producer())
        rewriter.replaced.append(maker)
        # The same gradient may be asked for twice: each target has its own name.
        replace_value(target.value, rewriter.builder.alias(result) if result in seen else result)
        seen.add(result)


def _axes(dims: Arrangement) -> set[object]:
    return set(chain.from_iterable(dims))


def _is_one(factor: float) -> bool:
    return abs(factor - 1.0) <= TOLERANCE
