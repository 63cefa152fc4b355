"""Builds a SparseFlashAttention: its operands in BSND, its node, and its result, which replaces the
attention's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes, AxisSpace
from fa_compiler.passes.answer.budget import building
from fa_compiler.passes.answer.decline import Decline, first_reason
from fa_compiler.passes.answer.options import Options
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.emit.build import Builder, LayoutEmitter
from fa_compiler.passes.layout.views import View
from fa_compiler.passes.matching.factors import multiplied, scaled
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.rewrite.layout_plan import (
    OutputCandidate,
    best_destination,
    cheapest_source,
)
from fa_compiler.passes.rewrite.mask_builder import MaskBuilder
from fa_compiler.passes.rewrite.rewriter import Companion, Fused, Rewriter
from fa_compiler.passes.sparse.emit import EmptyRowPolicy, attention
from fa_compiler.passes.sparse.gathers import GatheredOperand
from fa_compiler.passes.sparse.selection import Selection


def is_plain(match: AttentionMatch) -> bool:
    """Does the attention use nothing that the sparse operator does not have?"""
    return what_is_beyond(match) is None


def what_is_beyond(match: AttentionMatch) -> str | None:
    """What the attention uses that the sparse operator does not have; None where there is no such
    thing."""
    mask = match.mask
    return first_reason(
        {
            "a soft cap on the scores": match.softcap != 0.0,
            "a sink beside the scores": match.sink is not None,
            "dropout": match.dropout is not None,
            "packed sequences": mask.packed is not None,
            "a band beside a list": mask.mode is not None,
            "a bias that is added to the scores": bool(mask.bias),
            "masked keys with a number as their score": mask.masked_score is not None,
            "a guard that tests the scores": mask.nan_rows not in ("", "zero"),
        }
    )


class SparseCompanion(Companion, Protocol):
    """A companion of a SparseFlashAttention: its gradient (backward/sparse_gradient.py)."""

    every_row: bool
    """Must every row be proven to have a key?"""

    def move_after_scatter(
        self, match: AttentionMatch, read: Sequence[GatheredOperand], space: AxisSpace
    ) -> bool:
        """Is this the attention over the tensors that keys and values were gathered from, as `read`
        says?

        In the match, key and value are the gathered tensors. Axes may be split, in a branch of the
        match's space.
        """

    def check_rows(self, match: AttentionMatch, full: bool) -> bool:
        """Can the operator give what rows without a key or a defined softmax give? `full`: every
        row has a key."""

    def build(
        self,
        node: ir.Node,
        inputs: dict[str, ir.Value],
        sparse: SparseFlashBuilder,
        selection: Selection | None,
    ) -> Callable[[], None] | None:
        """Add the companion's nodes and return a function that puts their results in place.

        `selection` is that in the mask, or None where keys are gathered. Returns None where the
        target forbids the companion. Raises Decline.
        """


def taken(
    match: AttentionMatch, companion: SparseCompanion, in_every_row: Callable[[], bool]
) -> AttentionMatch | None:
    """The match as the companion takes it; None where the companion cannot express what rows
    without a key give.

    Where every row is proven to have a key, the match need not say what other rows give.
    """
    full = companion.every_row and in_every_row()
    if not companion.check_rows(match, full):
        return None
    if full:
        return replace(match, mask=replace(match.mask, empty_rows=""))
    return match


def key_views(match: AttentionMatch) -> tuple[View, ...]:
    """The views of key, value and, if there is an added product, its key."""
    return match.key, match.value, *match.views[4:]


@dataclass(frozen=True)
class SparseFlashBuilder:
    """One SparseFlashAttention that is being built. The match has the roles of the operator.

    `sources` are key, value and, if there is an added product, its key, each with all keys on the
    axes `tokens`.
    """

    match: AttentionMatch
    sources: tuple[View, ...]
    tokens: Axes
    rewriter: Rewriter
    emitter: LayoutEmitter

    @staticmethod
    def of(
        match: AttentionMatch,
        sources: tuple[View, ...],
        tokens: Axes,
        rewriter: Rewriter,
        others: tuple[View, ...] = (),
    ) -> SparseFlashBuilder:
        """A builder that takes its sizes at run time from its operands and the `others`."""
        size_sources = [
            stop for view in (*match.views, *sources, *others) for stop in view.equivalent_values
        ]
        return SparseFlashBuilder(
            match,
            sources,
            tokens,
            rewriter,
            LayoutEmitter(rewriter.builder, match.space, size_sources),
        )

    @property
    def builder(self) -> Builder:
        """The builder of the graph."""
        return self.rewriter.builder

    def inputs(self) -> dict[str, ir.Value]:
        """All inputs except the list. Raises Decline."""
        match, roles, rope = self.match, self.match.roles, self.match.rope
        query = self._of_rows(match.query, roles.head_dim)
        whole = (roles.batch, roles.q_seq, roles.heads, roles.head_dim)
        inputs = {
            "query": multiplied(query, whole, match.query_factors, self.builder, self.emitter),
            "key": self._of_tokens(0, roles.head_dim),
            "value": self._of_tokens(1, roles.value_head_dim),
        }
        if rope is not None:
            inputs["query_rope"] = scaled(
                self._of_rows(rope.query, rope.head_dim), rope.ratio, self.builder
            )
            inputs["key_rope"] = self._of_tokens(2, rope.head_dim)
        return inputs

    def arranged(self, view: View, dims: Arrangement, dtype: ir.DataType | None = None) -> ir.Value:
        """The viewed value, arranged as `dims` and of type `dtype`, if one is given. Raises
        Decline."""
        source = cheapest_source(view, dims, self.emitter.space, self.builder.info)
        if source is None:
            raise Decline(Code.SHAPE, f"{view.base.name!r} could not be arranged for the operator")
        value = source.value
        if dtype is not None:
            value = self.builder.cast(value, dtype)
        return self.emitter.apply(value, source.dims, source.plan)

    def mask(self, match: AttentionMatch) -> ir.Value | None:
        """The atten_mask of a match, true where a key or slot is excluded; its dimensions may be 1.
        Raises Decline."""
        return MaskBuilder(match, self.builder, self.emitter, Options(), []).atten_mask()

    @building()
    def emit(
        self,
        inputs: dict[str, ir.Value],
        candidates: Sequence[OutputCandidate],
        mask_label: str,
        mode: int = 0,
        block: int = 1,
        beside: tuple[SparseCompanion, Selection | None] | None = None,
    ) -> Fused | None:
        """Build the node, and the companion if there is one, and replace the attention's results by
        theirs.

        `mask_label` is the report's word for what excludes keys, `mode` the sparse_mode, `block`
        the sparse_block_size, and `beside` the companion with the selection in the mask. Returns
        None where the target forbids the node, or where a batch or row might be broadcast in some
        run. Raises Decline before any use of a value is changed.
        """
        match, roles, space = self.match, self.match.roles, self.match.space
        output = (roles.batch, roles.q_seq, roles.heads, roles.value_head_dim)
        destination = best_destination(output, candidates)
        if destination is None or self._may_broadcast(inputs):
            return None
        rows = EmptyRowPolicy(match.mask.empty_rows, match.mask.nan_rows == "zero")
        made = attention(
            inputs,
            match.scale,
            mode,
            rows,
            self.builder,
            self.rewriter.options,
            block,
            beside is not None,
        )
        if made is None:
            return None
        node, result = made
        self.rewriter.made.append(node)
        result = self.rewriter.result(match, result, output, destination, self.emitter)
        place_beside = None
        if beside is not None:
            companion, selection = beside
            place_beside = companion.build(node, inputs, self, selection)
            if place_beside is None:
                return None
        self.rewriter.substitute(self.rewriter.substitutes(match, destination, self.emitter))
        self.rewriter.replace_destination(destination, result)
        if place_beside is not None:
            place_beside()
        self.rewriter.trace(match)
        heads, kv_heads = (space.size(axes).const or 1 for axes in (roles.heads, roles.kv_heads))
        scores = space.size(roles.q_seq).const or 0, space.size(roles.kv_seq).const or 0
        return Fused(
            node, "BSND", (heads, kv_heads), scores, match.mask, match.mask.assumed, (), mask_label
        )

    def _may_broadcast(self, inputs: dict[str, ir.Value]) -> bool:
        """May the inputs have several batch sizes, or the query and the lists several numbers of
        rows, in some run?"""
        shapes = {name: self.builder.info.sizes(value) for name, value in inputs.items()}
        batches = {shape[:1] for shape in shapes.values()}
        of_rows = {shape[1] for name in ("query", "sparse_indices") if (shape := shapes[name])}
        return len(batches) > 1 or len(of_rows) > 1

    def _of_rows(self, view: View, depth: Axes) -> ir.Value:
        roles = self.match.roles
        return self.arranged(view, (roles.batch, roles.q_seq, roles.heads, depth), self.match.dtype)

    def _of_tokens(self, place: int, depth: Axes) -> ir.Value:
        roles = self.match.roles
        return self.arranged(
            self.sources[place], (roles.batch, self.tokens, roles.kv_heads, depth), self.match.dtype
        )
