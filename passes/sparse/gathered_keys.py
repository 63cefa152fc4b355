"""Attention to gathered keys: it becomes SparseFlashAttention on the tensors they are gathered
from, with the list.

    key, value = (source.gather(1, top[..., None].expand(-1, -1, D)) for source in (keys, values))
    out = softmax(query @ key.mT * scale + slot_mask) @ value

A slot is one position of the list.

    accepted    an attention whose keys and values are gathered (gathers.py) by one list [.., K]
                from the same number of tokens; boolean masks of the slots that are the same for all
                heads; factors on query and result; scores that are the sum of two products, if the
                keys of both are gathered by the list
    emitted     SparseFlashAttention in BSND. A masked slot gets an index beyond all tokens. Of two
                products the second becomes query_rope and key_rope. The gradient, if there is one,
                is emitted with it (backward/sparse_gradient.py).
                With `--assume close-ranks` a LightningIndexer makes the list, where the mask of the
                slots excludes the same keys as the mask under which they are ranked (slots.py,
                index_scores.py)
    left        (the attention is then fused on the gathered keys) a bias on the slots, a sink,
                dropout, masked slots with a score of their own; a mask whose empty rows give the
                mean of the gathered values, which the operator cannot give:
                `--assume no-empty-rows`; a list that may have more entries than there are tokens,
                some of which the operator would leave out; what the target forbids

The role of an axis of the query follows from whether the source and the list have it:

    source  list
    yes     yes     batch; or a key head, where the matcher has it as a head
    yes     no      a key head
    no      yes     a row
    no      no      one of the query heads that share a key head

Sound because the operator itself gathers and multiplies, slot by slot. An entry that is listed
twice counts twice in both. A negative entry counts from the end in ONNX, but ends the list in the
operator. So negative entries are made positive, unless the list comes from a TopK, which gives
none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes, AxisSpace
from fa_compiler.passes.answer.decline import label
from fa_compiler.passes.answer.options import CLOSE_RANKS, NO_EMPTY_ROWS
from fa_compiler.passes.answer.report import Missed, MissedCode
from fa_compiler.passes.ir.nodes import certain, int_attr
from fa_compiler.passes.layout.views import View, Viewer
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.matching.roles import Roles
from fa_compiler.passes.rewrite.layout_plan import OutputCandidate, output_candidates
from fa_compiler.passes.rewrite.rewriter import Rewriter
from fa_compiler.passes.sparse.builder import (
    SparseCompanion,
    SparseFlashBuilder,
    is_plain,
    key_views,
    taken,
)
from fa_compiler.passes.sparse.emit import Sizes
from fa_compiler.passes.sparse.gathers import GatheredOperand, gathered
from fa_compiler.passes.sparse.key_mask import KeyMask
from fa_compiler.passes.sparse.masked_selection import Selected
from fa_compiler.passes.sparse.selection import Selection
from fa_compiler.passes.sparse.slots import slot_key_mask
from fa_compiler.passes.sparse.sparse_indices import BEYOND, SparseIndices, ranks_causally
from fa_compiler.passes.values.facts import Facts

INT32 = ir.DataType.INT32
EMPTY_ROWS = ("", "zero", "nan")


@dataclass(frozen=True)
class GatheredMatch:
    """A match with the roles of the sparse operator, whose columns are the slots.

    `read` says how key, value and, if there is an added product, its key are gathered. `tokens` are
    the axes of the tokens they are gathered from.
    """

    match: AttentionMatch
    read: tuple[GatheredOperand, ...]
    tokens: Axes

    @property
    def sources(self) -> tuple[View, ...]:
        """The views of the tensors that are gathered from."""
        return tuple(operand.source for operand in self.read)

    @property
    def indices(self) -> View:
        """The view of the list."""
        return self.read[0].indices

    @property
    def top(self) -> ir.Node | None:
        """The TopK that makes the list, if one does."""
        return self.read[0].top

    @property
    def wraps(self) -> bool:
        """May entries be negative?"""
        return self.top is None

    def within(self, space: AxisSpace) -> GatheredMatch:
        """The same in a branch of its space, where axes may have been split further."""
        return GatheredMatch(
            self.match.within(space), space.settle(self.read), space.resolve(self.tokens)
        )

    @property
    def lists(self) -> Arrangement:
        """The arrangement of sparse_indices, [B,S1,N2 or 1,K]."""
        roles = self.match.roles
        heads = roles.kv_heads
        if set(_axes(self.indices)).isdisjoint(heads):
            heads = ()
        return roles.batch, roles.q_seq, heads, roles.kv_seq


def fuse_gathered_keys(
    match: AttentionMatch,
    rewriter: Rewriter,
    missed: list[Missed],
    companion: SparseCompanion | None = None,
) -> Selected | None:
    """Replace an attention to gathered keys by a SparseFlashAttention, together with its companion
    if there is one.

    Returns None where the attention is not accepted (see above); nothing is replaced then. What the
    user could vouch for is added to `missed`, unless there is a companion, which does that itself.
    """
    if not is_plain(match):
        return None
    rewriter.begin(match)
    return rewriter.built(lambda: _fused(match, rewriter, missed, companion))


def _fused(
    match: AttentionMatch,
    rewriter: Rewriter,
    missed: list[Missed],
    companion: SparseCompanion | None,
) -> Selected | None:
    match, candidates = output_candidates(match, rewriter.facts)
    listed = _gathered_match(match, rewriter)
    if listed is None:
        return None
    if companion is None and match.mask.empty_rows not in EMPTY_ROWS:
        reason = "what a row gives whose slots are all masked has no name in the operator"
        hint = f"--assume {NO_EMPTY_ROWS} if there is no such row"
        missed.append(Missed(MissedCode.NOT_SELECTED, reason, label(match.node), hint))
        return None
    return rewriter.if_possible(lambda: _emit(listed, candidates, rewriter, companion))


def _gathered_match(match: AttentionMatch, rewriter: Rewriter) -> GatheredMatch | None:
    """The attention with the list and the sources of its keys; None where they are not gathered, or
    an axis of the query has no role in the operator."""
    space = match.space.branch()
    operands = _gathered_alike(match, Viewer(rewriter.facts, space), rewriter)
    if operands is None:
        return None
    match, operands = match.within(space).with_heads(), space.settle(operands)
    columns, tokens = match.roles.kv_seq, operands[0].tokens
    indices = {_axes(operand.indices) for operand in operands}
    if len(indices) > 1 or not _has_no_more_entries(operands[0], columns, space):
        return None
    (listed,) = indices
    depths = [match.roles.head_dim, match.roles.value_head_dim]
    if match.rope is not None:
        depths.append(match.rope.head_dim)
    shared = [
        _without(_axes(operand.source), (*tokens, *space.resolve(depth)))
        for operand, depth in zip(operands, depths, strict=True)
    ]
    if any(set(axes) != set(shared[0]) for axes in shared):
        return None
    roles = _roles(match, shared[0], _without(listed, columns))
    if roles is None:
        return None
    return GatheredMatch(replace(match, roles=roles), operands, tokens)


def _gathered_alike(
    match: AttentionMatch, viewer: Viewer, rewriter: Rewriter
) -> tuple[GatheredOperand, ...] | None:
    """How key, value and the key of an added product are gathered, by one list from the same number
    of tokens; None where one of them is not."""
    space = viewer.space
    operands: list[GatheredOperand] = []
    for view in key_views(match):
        operand = gathered(view.base, space.resolve_all(view.base_dims), viewer, rewriter.builder)
        if operand is None:
            return None
        operands.append(operand)
    key, *others = operands
    for other in others:
        same = key.indices.base is other.indices.base and key.top is other.top
        if not same or space.size(key.tokens) != space.size(other.tokens):
            return None
        if not space.unify(key.tokens, other.tokens):
            return None
    return tuple(operands)


def _axes(view: View) -> Axes:
    """The axes of a view's base, in order."""
    return tuple(chain(*view.base_dims))


def _without(axes: Axes, others: Axes) -> Axes:
    """Those of the axes that are none of the others, in order."""
    return tuple(axis for axis in axes if axis not in others)


def _has_no_more_entries(key: GatheredOperand, columns: Axes, space: AxisSpace) -> bool:
    """Is the list proven to have at most as many entries as there are tokens? A TopK lists no key
    twice."""
    if key.top is not None:
        return key.indices.base_dims[int_attr(key.top, "axis", -1)] == columns
    count, tokens = space.size(columns).const, space.size(key.tokens).const
    return count is not None and tokens is not None and count <= tokens


def _roles(match: AttentionMatch, shared: Axes, listed: Axes) -> Roles | None:
    """The roles of the query's axes, by the table above; None where an axis has none.

    `shared` are the axes of the sources without tokens and head size, `listed` those of the list
    without its slots.
    """
    roles, space = match.roles, match.space
    outer = (*roles.batch, *roles.heads, *roles.q_seq)
    if not {*shared, *listed} <= set(outer):
        return None
    kv_heads = tuple(axis for axis in shared if axis not in listed or axis in roles.heads)
    heads = kv_heads + _without(outer, (*shared, *listed))
    if space.size(heads).const is None:
        return None
    return replace(
        roles,
        batch=_without(shared, kv_heads),
        heads=heads,
        kv_heads=kv_heads,
        q_seq=_without(listed, shared),
    )


def _emit(
    listed: GatheredMatch,
    candidates: Sequence[OutputCandidate],
    rewriter: Rewriter,
    companion: SparseCompanion | None,
) -> Selected | None:
    """The SparseFlashAttention, with its companion and the LightningIndexer of its list if there
    are such; None where one of them cannot be made. Raises Decline."""
    whole, close = None, CLOSE_RANKS in rewriter.options.assume
    if listed.top is not None and (companion is not None or close):
        space = listed.match.space.branch()
        size = space.size(listed.tokens)
        whole = slot_key_mask(listed.match, listed.indices, size, Viewer(rewriter.facts, space))
        listed = listed.within(space)  # reading the slots may have found axes to be the same
    others: tuple[View, ...] = (listed.indices,)
    beside: tuple[SparseCompanion, None] | None = None
    if companion is not None:
        slots = listed
        match = taken(slots.match, companion, lambda: _in_every_row(slots, whole, rewriter.facts))
        if match is None or not companion.move_after_scatter(
            match, slots.read, space := match.space.branch()
        ):
            return None
        listed = replace(listed, match=match).within(space)
        others, beside = (*others, *companion.views), (companion, None)
    sparse = SparseFlashBuilder.of(listed.match, listed.sources, listed.tokens, rewriter, others)
    candidates = listed.match.space.settle(candidates)
    inputs = sparse.inputs()
    entries = None
    if whole is not None and close:
        entries = _ranked(listed, whole, sparse, inputs)
    if entries is None:
        entries = SparseIndices(_entries(listed, sparse, inputs["key"]), mode=0)
    inputs["sparse_indices"] = entries.indices
    fused = sparse.emit(inputs, candidates, "gathered", entries.mode, beside=beside)
    if fused is None:
        return None
    if entries.indexer is not None:
        rewriter.made.append(entries.indexer)
    return Selected(fused, entries.indexer)


def _in_every_row(listed: GatheredMatch, whole: KeyMask | None, facts: Facts) -> bool:
    """Is every row proven to have a slot that nothing masks?

    It is so without masks, and where they are the causal mask under which the keys are ranked
    (sparse_indices.py). `whole` is what the masks leave visible of the keys.
    """
    match, space = listed.match, listed.match.space
    if not space.size(match.roles.kv_seq).is_at_least(1):
        return False
    if not match.mask.masked:
        return True
    roles, top = match.roles, listed.top
    if top is None or whole != KeyMask(causal=True):
        return False
    wanted = (roles.batch, roles.q_seq, roles.kv_seq)
    sizes = Sizes(*map(space.size, (roles.batch, roles.q_seq, listed.tokens)))
    return listed.indices.base_dims == wanted and ranks_causally(top, sizes, facts)


def _ranked(
    listed: GatheredMatch, whole: KeyMask, sparse: SparseFlashBuilder, inputs: dict[str, ir.Value]
) -> SparseIndices | None:
    """The list made by a LightningIndexer under the mask `whole`; None where it is not known to be
    the model's."""
    builder, roles, facts = sparse.builder, listed.match.roles, sparse.rewriter.facts
    wanted = (roles.batch, roles.q_seq, roles.kv_seq)
    if listed.top is None or listed.indices.base_dims != wanted:
        return None
    query, key = builder.info.shape(inputs["query"]), builder.info.shape(inputs["key"])
    if query is None or key is None:
        return None
    selection = Selection(listed.top, listed.indices.base, listed.indices.base, ())
    sizes = Sizes(query[0], query[1], key[1])
    return SparseIndices.ranked(
        (inputs["query"], inputs["key"]), selection, sizes, whole, builder, facts
    )


def _entries(listed: GatheredMatch, sparse: SparseFlashBuilder, key: ir.Value) -> ir.Value:
    """sparse_indices: the list, with an index beyond all tokens in masked slots."""
    match, builder, lists = listed.match, sparse.builder, listed.lists
    indices = sparse.arranged(listed.indices, lists)
    if listed.wraps:
        dtype = certain(builder.info.dtype(indices))
        tokens = certain(builder.info.sizes(key)[1].const)
        zero, length = (
            builder.constant(np.array(number, dtype.numpy()), "number") for number in (0, tokens)
        )
        negative = builder.less(indices, zero)
        indices = builder.where(negative, builder.add(indices, length), indices)
    indices = builder.cast(indices, INT32)
    # The mask may run along those heads only that have lists of their own.
    masked = sparse.mask(replace(match, roles=replace(match.roles, heads=lists[2])))
    if masked is None:
        return indices
    masked = builder.transpose(masked, (0, 2, 1, 3))
    beyond = builder.constant(np.array(BEYOND, np.int32), "beyond")
    return builder.where(masked, beyond, indices)
