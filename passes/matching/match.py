"""The record of one matched attention: what is emitted from it needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import onnx_ir as ir

from fa_compiler.passes.layout.axes import Arrangement, Axes, Axis, AxisSpace
from fa_compiler.passes.layout.views import View
from fa_compiler.passes.masks.mask import MaskPlan, MaskPlanner
from fa_compiler.passes.masks.terms import RowGuard, Term
from fa_compiler.passes.matching.dropout import Dropout
from fa_compiler.passes.matching.factors import Factor
from fa_compiler.passes.matching.probabilities import ProbabilityPath
from fa_compiler.passes.matching.scores import ScorePath
from fa_compiler.passes.matching.sinks import Sink
from fa_compiler.passes.matching.softmax import SoftmaxAnchor


@dataclass(frozen=True)
class Roles:
    """The axes of one attention by what they mean; each may be empty (size 1) or several axes in order."""

    batch: Axes
    heads: Axes
    kv_heads: Axes
    rows: Axes
    columns: Axes
    depth: Axes
    value_depth: Axes

    def refined(self, space: AxisSpace) -> Roles:
        """The same roles in the finest parts known by now."""
        return Roles(**{role.name: space.resolve(getattr(self, role.name)) for role in fields(self)})


@dataclass(frozen=True)
class Rope:
    """A second product that is added to the scores: of `query` and `key` over the axes `depth`, whose scale is `ratio`
    times that of the first. What exporters make of attention whose query and key have a part with rotary positions."""

    query: View
    key: View
    depth: Axes
    ratio: float


@dataclass(frozen=True)
class Derivation:
    """How a match was found: the ways to and from its softmax, what is done to the scores and what the guard behind the
    softmax tests, the arrangement of every value on the way, and who planned the mask."""

    before: ScorePath
    after: ProbabilityPath
    terms: tuple[Term, ...]
    guard: RowGuard
    dims: Mapping[ir.Value, Arrangement]
    planner: MaskPlanner


def late_values(anchor: SoftmaxAnchor, after: ProbabilityPath) -> tuple[ir.Value, ...]:
    """What the softmax and the nodes behind it make."""
    return tuple(output for node in (*anchor.nodes, *after.nodes) for output in node.outputs)


@dataclass(frozen=True)
class AttentionMatch:
    """All that is needed to replace one attention; nothing in the graph has been changed.

    The views' dimensions are those of the product's operands. `output` is the product's value with the arrangement
    `output_dims`; `dtype` is the type to compute in. `shapes` are Shape nodes outside the match that read an inner
    value, with that value's arrangement, and `types` CastLike nodes that take their type from one: their results are
    computed without it. An operator that is attention already has no `derivation`.
    """

    anchor: SoftmaxAnchor
    space: AxisSpace
    query: View
    key: View
    value: View
    roles: Roles
    scale: float
    mask: MaskPlan
    dtype: ir.DataType
    output: ir.Value
    output_dims: Arrangement
    sink: Sink | None = None
    dropout: Dropout | None = None
    query_factors: tuple[Factor, ...] = ()
    output_factors: tuple[Factor, ...] = ()
    shapes: tuple[tuple[ir.Node, Arrangement], ...] = ()
    types: tuple[tuple[ir.Node, ir.DataType], ...] = ()
    rope: Rope | None = None
    derivation: Derivation | None = None

    def with_second_last(self) -> AttentionMatch:
        """The same match, of its two products that with the longer sum as the first.

        In float16 it is that with the larger scale: the other query is multiplied by the ratio of the two, which would
        overflow at 65504.
        """
        rope = self.rope
        if rope is None:
            return self
        width, other = self.space.size(self.roles.depth).const, self.space.size(rope.depth).const
        wider = width is not None and other is not None and width < other
        turns = wider if abs(rope.ratio) == 1.0 or self.dtype != ir.DataType.FLOAT16 else abs(rope.ratio) > 1.0
        if not turns:
            return self
        return replace(
            self,
            query=rope.query,
            key=rope.key,
            roles=replace(self.roles, depth=rope.depth),
            scale=self.scale * rope.ratio,
            rope=Rope(self.query, self.key, self.roles.depth, 1 / rope.ratio),
        )

    @property
    def views(self) -> tuple[View, ...]:
        """Query, key and value, and the parts of the second product."""
        rope = () if self.rope is None else (self.rope.query, self.rope.key)
        return (self.query, self.key, self.value, *rope)

    def refined(self) -> AttentionMatch:
        """The same match after axes may have been split further, which may tell heads from batch."""
        roles = self.roles.refined(self.space)
        if not roles.heads:
            batch, heads = batch_and_heads([roles.batch])
            roles = replace(
                roles, batch=batch, heads=heads, kv_heads=shared_heads(self.key, self.value, heads, self.space)
            )
        rope = None if self.rope is None else replace(self.rope, depth=self.space.resolve(self.rope.depth))
        return replace(
            self,
            roles=roles,
            rope=rope,
            output_dims=self.space.resolve_all(self.output_dims),
            shapes=tuple((reader, self.space.resolve_all(dims)) for reader, dims in self.shapes),
        )

    @property
    def node(self) -> ir.Node:
        """The softmax, which the report names."""
        return self.anchor.node


def batch_and_heads(dims: list[Axes], needed: Axes = ()) -> tuple[Axes, Axes]:
    """Batch and head axes of the dimensions before rows and columns.

    With two or more dimensions the last one of constant size counts heads. A single dimension holds both when it was
    merged from a batch and a constant number of heads; else it is the batch. Any choice is right, for attention does
    the same for every index of either; only the number of heads has to be known before the run. Dimensions with a part
    in `needed` are heads.
    """
    if len(dims) >= 2 and any(axis in needed for dim in dims for axis in dim):
        parts: tuple[list[Axis], list[Axis]] = [], []
        for dim in dims:
            parts[any(axis in needed for axis in dim)].extend(dim)
        return tuple(parts[0]), tuple(parts[1])
    if len(dims) >= 2:
        known = [index for index, dim in enumerate(dims) if all(axis.size.is_const for axis in dim)]
        chosen = known[-1] if known else len(dims)
        batch = tuple(axis for index, dim in enumerate(dims) for axis in dim if index != chosen)
        return batch, dims[chosen] if known else ()
    merged = dims[0] if dims else ()
    if len(merged) > 1 and all(axis.size.is_const for axis in merged[1:]):
        return merged[:1], merged[1:]
    return merged, ()


def shared_heads(key: View, value: View, heads: Axes, space: AxisSpace) -> Axes:
    """The head axes that key and value do not merely repeat.

    Query head n reads kv head n // group, so the repeated axes must be the fastest ones of the head dimension;
    when they are not, key and value are expanded.
    """
    owned = {axis for view in (key, value) for dim in view.base_dims for axis in space.resolve(dim)}
    kept = tuple(axis for axis in heads if axis in owned)
    return kept if heads[: len(kept)] == kept else heads
