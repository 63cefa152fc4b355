"""Following a value up to one whose axes are known already.

The gradient reads query, key, values and masks in its own layouts, often branching off in the
middle of the forward part's. A value is *known* when it is reached through layout operators,
factors and casts from one that has an arrangement; then its own arrangement follows, in the same
axes, and no new ones are invented but by Expand.

Casts between float types are looked through in both directions: they only round a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes
from fa_compiler.passes.ir.nodes import FLOATS, input_of, int_attr, is_op
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.ops.elementwise import drops_nothing
from fa_compiler.passes.ops.movers import LAYOUT_OPS, REPEATS

MAX_STEPS = 64
ANY_FLOAT = (*FLOATS, ir.DataType.DOUBLE)


@dataclass(frozen=True)
class Known:
    """A traced value: it is `factor` times a rearranged seed, and `dims` is its arrangement."""

    dims: Arrangement
    factor: float


@dataclass(frozen=True)
class Tracer:
    """Traces values of one match."""

    match: AttentionMatch
    viewer: Viewer

    def trace(self, value: ir.Value | None, seeds: Mapping[ir.Value, Arrangement]) -> Known | None:
        """The value as one of the seeds; None when it is made from none of them alone."""
        chain: list[tuple[ir.Node, float]] = []
        while value is not None and value not in seeds:
            node = value.producer()
            if node is None or len(chain) >= MAX_STEPS:
                return None
            step = self.look_through(node)
            if step is None:
                return None
            chain.append((node, step[1]))
            value = step[0]
        if value is None:
            return None
        dims = self.viewer.space.resolve_all(seeds[value])
        for node, _ in reversed(chain):
            if self.viewer.factor(node) is not None:
                continue
            if (moved := self.viewer.rearranged(node, dims)) is None:
                return None
            dims = moved
        return Known(dims, math.prod(factor for _, factor in chain))

    def look_through(self, node: ir.Node) -> tuple[ir.Value, float] | None:
        """What a layout operator, a cast or a factor was applied to, and the factor."""
        factor = self.viewer.factor(node)
        if factor is not None:
            return factor
        if (source := input_of(node, 0)) is None:
            return None
        if is_op(node, *LAYOUT_OPS, *REPEATS) or drops_nothing(node):
            return source, 1.0
        if is_op(node, "Cast") and self.is_float(source) and self.is_float(node.outputs[0]):
            return source, 1.0
        return None

    def is_float(self, value: ir.Value) -> bool:
        """Is this a tensor of floating point numbers?"""
        return self.viewer.info.dtype(value) in ANY_FLOAT

    def same(self, one: Axes, other: Axes) -> bool:
        """Are two dimensions that an operator walks together the same axes?

        Axes of neither role are named after those they walk with; two that both have a role have to
        be equal.
        """
        space = self.viewer.space
        mine, theirs = space.resolve(one), space.resolve(other)
        if mine == theirs:
            return True
        roles, rope = space.settle(self.match.roles), self.match.rope
        bound = {
            *(() if rope is None else space.resolve(rope.head_dim)),
            *(*roles.batch, *roles.heads, *roles.kv_heads, *roles.q_seq),
            *(*roles.kv_seq, *roles.head_dim, *roles.value_head_dim),
        }
        if bound.isdisjoint(mine) or bound.isdisjoint(theirs):
            return space.unify(mine, theirs)
        return False

    def aligned(self, one: Arrangement, other: Arrangement) -> Arrangement | None:
        """The arrangement of two operands that broadcast together; None when their axes do not
        match, or when one axis would run along two dimensions: they are walked apart then, and not
        together."""
        rank = max(len(one), len(other))
        pairs = zip(
            ((),) * (rank - len(one)) + one, ((),) * (rank - len(other)) + other, strict=True
        )
        result: list[Axes] = []
        for mine, theirs in pairs:
            if mine and theirs and not self.same(mine, theirs):
                return None
            result.append(mine or theirs)
        dims = self.viewer.space.resolve_all(result)
        every = list(chain.from_iterable(dims))
        return dims if len(every) == len(set(every)) else None


def seeds(
    equivalent_values: tuple[tuple[ir.Value, Arrangement], ...],
) -> dict[ir.Value, Arrangement]:
    """The equivalent values of a view (views.py): the arrangement of each value between its base
    and the viewed value."""
    return dict(equivalent_values)


def left_by(node: ir.Node, dims: Arrangement, chosen: Collection[int]) -> Arrangement:
    """What a reduction over the `chosen` dimensions leaves of an arrangement."""
    keep = int_attr(node, "keepdims", 1) == 1
    return tuple(
        () if place in chosen else dim
        for place, dim in enumerate(dims)
        if keep or place not in chosen
    )
