"""Attention under a mask that admits selected keys: it becomes SparseFlashAttention with the list
of these keys.

    mask = torch.full(shape, -inf).scatter(-1, scores.topk(K).indices, 0.0)
    out = softmax(query @ key.mT * scale + mask) @ value

    accepted    an attention with a boolean mask in which selection.py finds a list of keys (or of
                blocks of keys) for each row, the same for all heads; scores that may be the sum of
                two products; nothing that SparseFlashAttention does not have (`what_is_beyond`)
    emitted     SparseFlashAttention in BSND with these lists as sparse_indices, without the entries
                that the rest of the mask excludes (sparse_indices.py)
    left        (the attention becomes a FlashAttentionScore, and the report says why:
                unread_list.py) a mask for each head; lists of another batch or length than query
                and key; lists of more than half of the keys, which take longer than the mask; what
                the target forbids: the products take only a few sizes in 16 bits, and give 0 for a
                row without a key

Sound because both operators compute the same softmax over the same keys. A key that the mask
excludes takes no part in it, and neither does a key that is not listed. ONNX's TopK lists no key
twice. A row without a key gives what cpu_empty_rows says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Axes
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import NO_EMPTY_ROWS_HINT
from fa_compiler.passes.answer.report import Missed, MissedCode
from fa_compiler.passes.ir.nodes import certain, first
from fa_compiler.passes.layout.views import View
from fa_compiler.passes.masks.structure import ONE_NAME
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.matching.roles import shared_heads
from fa_compiler.passes.rewrite.layout_plan import OutputCandidate, output_candidates
from fa_compiler.passes.rewrite.rewriter import Fused, Rewriter
from fa_compiler.passes.sparse.builder import SparseCompanion, SparseFlashBuilder, key_views, taken
from fa_compiler.passes.sparse.emit import Sizes
from fa_compiler.passes.sparse.selection import Selection, selection
from fa_compiler.passes.sparse.sparse_indices import SparseIndices, selects_in_every_row
from fa_compiler.passes.sparse.unread_list import (
    check_bias,
    check_plain,
    list_scatter,
    unlisted,
    why_unread,
)
from fa_compiler.passes.values.shapes import ShapeInfo

EMPTY_ROWS = ("", "zero", "mean", "nan")
"""What a row without a key may give."""
ON_ASCEND = "use float16 or bfloat16, one key head, and a latent of 512 with 64 for positions"
ONE_MASK = "use the same mask for all heads"


@dataclass(frozen=True)
class Selected:
    """The fused attention, and the LightningIndexer that makes its list, if one does."""

    fused: Fused
    indexer: ir.Node | None


def fuse_masked_selection(
    match: AttentionMatch,
    rewriter: Rewriter,
    missed: list[Missed],
    companion: SparseCompanion | None = None,
) -> Selected | None:
    """Replace an attention to selected keys by a SparseFlashAttention, together with its companion
    if there is one.

    Returns None where the attention is not accepted (see above); nothing is replaced then. The
    reason is added to `missed`, unless there is a companion, which does that itself.
    """
    scatter = first(list_scatter(part.view.base) for part in match.mask.masked)
    if scatter is not None:
        rewriter.begin(match)
    made = rewriter.attempt(lambda: _checked(match, scatter, rewriter, companion))
    if not isinstance(made, Decline):
        return made
    if companion is None:
        missed.append(made.as_missed(MissedCode.NOT_SELECTED, match.node))
    return None


def _checked(
    match: AttentionMatch,
    scatter: ir.Node | None,
    rewriter: Rewriter,
    companion: SparseCompanion | None,
) -> Selected | None:
    """The SparseFlashAttention of a mask that is made from this Scatter; None where no mask selects
    keys. Raises Decline."""
    if scatter is None:
        check_bias(match, rewriter.facts)
        return None
    check_plain(match, scatter)
    if match.mask.empty_rows not in EMPTY_ROWS:
        reason = "what a row gives whose every key is masked has no name in the operator"
        raise unlisted(reason, scatter, NO_EMPTY_ROWS_HINT)
    plain, candidates = output_candidates(match, rewriter.facts)
    return _emit(_with_unmasked_heads(plain), scatter, candidates, rewriter, companion)


def _with_unmasked_heads(match: AttentionMatch) -> AttentionMatch:
    """The match with the batch and the rows of the lists.

    An axis of the batch or of the rows that no mask has becomes a head: a product had counted this
    head among its batch or rows. Any such choice is right, because attention does the same for
    every index of each of these axes.
    """
    roles, space = match.roles, match.space
    known = set(chain(*(chain(*part.view.base_dims) for part in match.mask.masked)))

    def divided(axes: Axes) -> tuple[Axes, Axes]:
        """The axes of the lists, and the heads among them."""
        heads = tuple(axis for axis in axes if axis not in known)
        listed = tuple(axis for axis in axes if axis in known)
        if space.size(heads).const is None or not (listed or axes == roles.batch):
            return axes, ()
        return listed, heads

    (batch, outer), (rows, inner) = divided(roles.batch), divided(roles.q_seq)
    if not outer and not inner:
        return match
    heads = (*outer, *roles.heads, *inner)
    kv_heads = shared_heads(match.key, match.value, heads, space)
    return replace(
        match, roles=replace(roles, batch=batch, heads=heads, kv_heads=kv_heads, q_seq=rows)
    )


def _emit(
    match: AttentionMatch,
    scatter: ir.Node,
    candidates: Sequence[OutputCandidate],
    rewriter: Rewriter,
    companion: SparseCompanion | None,
) -> Selected:
    """The SparseFlashAttention, with its companion and the LightningIndexer of its list if there
    are such. Raises Decline where one of them cannot be made."""
    builder = rewriter.builder
    others: tuple[View, ...] = ()
    if companion is not None:
        match = companion.adapted(match)
        others = companion.views
    sparse = SparseFlashBuilder.of(match, key_views(match), match.roles.kv_seq, rewriter, others)
    mask = certain(sparse.mask(match))
    if (selected := selection(mask, rewriter.facts)) is None:
        raise why_unread(mask, scatter, rewriter.facts)
    inputs = sparse.inputs()
    query, key = builder.info.shape(inputs["query"]), builder.info.shape(inputs["key"])
    if query is None or key is None:
        raise unlisted("the sizes of query or key are unknown", scatter)
    sizes = Sizes(query[0], query[1], key[1])
    _check_lists(selected, sizes, builder.info)
    beside = None
    if companion is not None:
        kept = taken(
            match, companion, lambda: selects_in_every_row(selected, sizes, rewriter.facts)
        )
        if kept is None:
            raise unlisted("the gradient cannot give what rows without a key give", scatter)
        sparse, beside = replace(sparse, match=kept), (companion, selected)
    entries = SparseIndices.of(
        (inputs["query"], inputs["key"]), selected, sizes, builder, rewriter.facts
    )
    if entries is None:
        raise unlisted(
            "another mask beside the list cannot be looked up at its entries",
            selected.scatter,
            ONE_MASK,
        )
    if entries.indexer is not None:
        rewriter.made.append(entries.indexer)
    inputs["sparse_indices"] = entries.indices
    fused = sparse.emit(inputs, candidates, "selected", entries.mode, entries.block, beside)
    if fused is None:
        raise _not_emitted(selected, rewriter)
    return Selected(fused, entries.indexer)


def _not_emitted(selected: Selection, rewriter: Rewriter) -> Decline:
    """The answer that a SparseFlashAttention with this list cannot be made."""
    if rewriter.options.target == "ascend":
        reason = "the product has no SparseFlashAttention of these sizes and types, or for such rows without a key"
        return unlisted(reason, selected.scatter, ON_ASCEND)
    reason = "query, keys and lists are not proven to have the same batch and rows"
    return unlisted(reason, selected.scatter, ONE_NAME)


def _check_lists(selected: Selection, sizes: Sizes, info: ShapeInfo) -> None:
    """Decline other lists than one for each row of each batch entry, of at most half of the
    keys."""
    shape, entries, scatter = selected.shape(info), selected.count(info), selected.scatter
    if (
        shape is None
        or entries is None
        or (*shape[:2], shape[2] * selected.block) != sizes.mask_shape
    ):
        raise unlisted(
            "the lists are not proven to be those of the query's batch and rows", scatter, ONE_NAME
        )
    count, keys = entries.upper, sizes.kv_seq.const
    if count is None:
        raise unlisted(
            "a list may be as long as there are keys",
            scatter,
            "make k a constant, or the least of one",
        )
    if keys is not None and 2 * count * selected.block > keys:
        listed = count * selected.block
        raise unlisted(
            f"to read {listed} of {keys} keys by a list takes longer than to read all of them",
            scatter,
        )
