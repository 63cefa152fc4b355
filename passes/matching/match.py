"""The record of one matched attention: what is emitted from it needs nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, KnownAxes
from fa_compiler.passes.answer.decline import label
from fa_compiler.passes.layout.views import View
from fa_compiler.passes.masks.mask import MaskPlan
from fa_compiler.passes.matching.activation_rounding import lost_scores, rounding_starts
from fa_compiler.passes.matching.added_product import Rope
from fa_compiler.passes.matching.attention_paths import AttentionPaths
from fa_compiler.passes.matching.dropout import Dropout
from fa_compiler.passes.matching.factors import Factor
from fa_compiler.passes.matching.masking import Masking
from fa_compiler.passes.matching.probabilities import Probabilities
from fa_compiler.passes.matching.roles import Roles, batch_and_heads, owned_heads, shared_heads
from fa_compiler.passes.matching.sinks import Sink
from fa_compiler.passes.matching.softmax import SoftmaxAnchor


@dataclass(frozen=True)
class Derivation:
    """How a match was found: the paths around its softmax, the probabilities at the product with
    the values, and the mask."""

    paths: AttentionPaths
    probabilities: Probabilities
    masking: Masking


@dataclass(frozen=True)
class AttentionMatch:
    """All that is needed to replace one attention; nothing in the graph has been changed.

    All axes are resolved to the finest parts that are known. `space` does not change after this. A
    later step that has to split axes further (a gradient, a list of keys, a place for the result)
    works in a branch of the space and converts the match with `within`.

    The views' dimensions are those of the product's operands. `output` is the product's value with
    the arrangement `output_dims`; `dtype` is the type to compute in. `shapes` are Shape nodes
    outside the match that read an inner value, with that value's arrangement: their results are
    computed without it. `softcap` is the c of c * tanh(scores / c), 0 where the scores are not
    capped. An operator that is attention already has no `derivation`.
    """

    anchor: SoftmaxAnchor
    space: KnownAxes
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
    rope: Rope | None = None
    softcap: float = 0.0
    derivation: Derivation | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What the report says of the match."""
        if self.derivation is None:
            return ()
        paths = self.derivation.paths
        lost = (
            (node, lost_scores(node, paths.viewer.facts))
            for node in paths.before.nodes
            if rounding_starts(node)
        )
        return (
            *(
                f"{label(node)}: the scores are not rounded to bfloat16 any more"
                for node in paths.scores.rounded
            ),
            *(
                f"{label(node)}: in the model {what}; they are not rounded any more"
                for node, what in lost
                if what
            ),
        )

    def with_larger_product_first(self) -> AttentionMatch:
        """The same match. The operands of its two score products are exchanged if the added product
        should be that of query and key, and the other one that of query_rope and key_rope.

        The product of query and key is the one that sums over more elements. In float16 it is the
        one with the larger scale: the query of the other product is multiplied by the ratio of the
        scales, and a ratio above 1 may overflow at 65504.
        """
        rope = self.rope
        if rope is None or not self._is_larger(rope):
            return self
        return replace(
            self,
            query=rope.query,
            key=rope.key,
            roles=replace(self.roles, head_dim=rope.head_dim),
            scale=self.scale * rope.ratio,
            rope=Rope(self.query, self.key, self.roles.head_dim, 1 / rope.ratio),
        )

    def _is_larger(self, rope: Rope) -> bool:
        """Should the added product be that of query and key?"""
        if abs(rope.ratio) != 1.0 and self.dtype == ir.DataType.FLOAT16:
            return abs(rope.ratio) > 1.0
        width, other = (
            self.space.size(self.roles.head_dim).const,
            self.space.size(rope.head_dim).const,
        )
        return width is not None and other is not None and width < other

    @property
    def views(self) -> tuple[View, ...]:
        """Query, key and value, and the query and key of the added product."""
        rope = () if self.rope is None else (self.rope.query, self.rope.key)
        return (self.query, self.key, self.value, *rope)

    @property
    def key_views(self) -> tuple[View, ...]:
        """Key and value, and the key of the added product."""
        return (
            (self.key, self.value) if self.rope is None else (self.key, self.value, self.rope.key)
        )

    def within(self, space: KnownAxes) -> AttentionMatch:
        """The same match in a branch of its space, where axes may have been split further."""
        return replace(space.settle(replace(self, derivation=None)), derivation=self.derivation)

    def with_heads(self) -> AttentionMatch:
        """The same match with heads told from batch, where there were none and axes are split
        now."""
        roles = self.roles
        if roles.heads:
            return self
        batch, heads = batch_and_heads([roles.batch])
        kv_heads = shared_heads(self.key, self.value, heads, self.space)
        return replace(self, roles=replace(roles, batch=batch, heads=heads, kv_heads=kv_heads))

    def with_neighbours(self) -> AttentionMatch:
        """The same match with the heads in another order, in which those that share a head of key
        and value are neighbours; itself where they are, or where none is shared. The order of heads
        is that of the operands alone."""
        heads = self.roles.heads
        shared = owned_heads(self.key_views, heads, self.space)
        if shared == heads[: len(shared)] or not shared:
            return self
        rest = tuple(axis for axis in heads if axis not in shared)
        return replace(self, roles=replace(self.roles, heads=(*shared, *rest), kv_heads=shared))

    @property
    def node(self) -> ir.Node:
        """The softmax, which the report names."""
        return self.anchor.node
