"""Attention under a mask that admits selected keys: it becomes SparseFlashAttention with the list of these keys.

    mask = torch.full(shape, -inf).scatter(-1, scores.topk(K).indices, 0.0)
    out = softmax(query @ key.mT * scale + mask) @ value

    accepted    an attention with a boolean mask in which selection.py finds a list of keys (or of blocks of keys) for
                each row, the same for all heads; scores that may be the sum of two products; nothing that
                SparseFlashAttention does not have (`is_plain`)
    emitted     SparseFlashAttention in BSND with these lists as sparse_indices, without the entries that the rest of
                the mask excludes (sparse_indices.py)
    left        (the attention becomes a FlashAttentionScore)
                a mask for each head; lists of another batch or length than query and key; lists of more than half of
                the keys, which take longer than the mask; what the target forbids: the products take only a few sizes
                in 16 bits, and give 0 for a row without a key

Sound because both operators compute the same softmax over the same keys. A key that the mask excludes takes no part in
it, and neither does a key that is not listed. ONNX's TopK lists no key twice. A row without a key gives what
cpu_empty_rows says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Axes
from fa_compiler.passes.ir.nodes import inputs_of, is_op, producer, reached
from fa_compiler.passes.layout.views import View
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.matching.roles import shared_heads
from fa_compiler.passes.rewrite.layout_plan import OutputCandidate, output_candidates
from fa_compiler.passes.rewrite.rewriter import Fused, Rewriter
from fa_compiler.passes.sparse.builder import SparseCompanion, SparseFlashBuilder, is_plain, key_views, taken
from fa_compiler.passes.sparse.conditions import MAX_PARTS
from fa_compiler.passes.sparse.emit import Sizes
from fa_compiler.passes.sparse.selection import SCATTERS, Selection, selection
from fa_compiler.passes.sparse.sparse_indices import SparseIndices, selects_in_every_row

EMPTY_ROWS = ("", "zero", "mean", "nan")
"""What a row without a key may give."""


@dataclass(frozen=True)
class Selected:
    """The fused attention, and the LightningIndexer that makes its list, if one does."""

    fused: Fused
    indexer: ir.Node | None


def fuse_masked_selection(
    match: AttentionMatch, rewriter: Rewriter, companion: SparseCompanion | None = None
) -> Selected | None:
    """Replace an attention to selected keys by a SparseFlashAttention, together with its companion if there is one.

    Returns None where the attention is not accepted (see above); nothing is replaced then.
    """
    if not is_plain(match) or match.mask.empty_rows not in EMPTY_ROWS:
        return None
    if not any(_may_select(part.view.base) for part in match.mask.masked):
        return None
    rewriter.begin(match)
    plain, candidates = output_candidates(match, rewriter.facts)
    return rewriter.if_possible(lambda: _emit(_with_unmasked_heads(plain), candidates, rewriter, companion))


def _may_select(mask: ir.Value) -> bool:
    """Is there a Scatter among the nearest nodes that a mask is made from?"""
    sources = reached([mask], lambda value: inputs_of(producer(value)), 4 * MAX_PARTS)
    return any(is_op(producer(value), *SCATTERS) for value in sources)


def _with_unmasked_heads(match: AttentionMatch) -> AttentionMatch:
    """The match with the batch and the rows of the lists.

    An axis of the batch or of the rows that no mask has becomes a head: a product had counted this head among its batch
    or rows. Any such choice is right, because attention does the same for every index of each of these axes.
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
    return replace(match, roles=replace(roles, batch=batch, heads=heads, kv_heads=kv_heads, q_seq=rows))


def _emit(
    match: AttentionMatch, candidates: Sequence[OutputCandidate], rewriter: Rewriter, companion: SparseCompanion | None
) -> Selected | None:
    """The SparseFlashAttention, with its companion and the LightningIndexer of its list if there are such; None where
    one of them cannot be made. Raises Decline."""
    builder = rewriter.builder
    others: tuple[View, ...] = ()
    if companion is not None:
        match = companion.adapted(match)
        others = companion.views
    sparse = SparseFlashBuilder.of(match, key_views(match), match.roles.kv_seq, rewriter, others)
    mask = sparse.mask(match)
    if mask is None or (selected := selection(mask, rewriter.facts)) is None:
        return None
    inputs = sparse.inputs()
    query, key = builder.info.shape(inputs["query"]), builder.info.shape(inputs["key"])
    if query is None or key is None:
        return None
    sizes = Sizes(query[0], query[1], key[1])
    if not _lists_few_keys(selected, sizes, rewriter):
        return None
    beside = None
    if companion is not None:
        kept = taken(match, companion, lambda: selects_in_every_row(selected, sizes, rewriter.facts))
        if kept is None:
            return None
        sparse, beside = replace(sparse, match=kept), (companion, selected)
    entries = SparseIndices.of((inputs["query"], inputs["key"]), selected, sizes, builder, rewriter.facts)
    if entries is None:
        return None
    if entries.indexer is not None:
        rewriter.made.append(entries.indexer)
    inputs["sparse_indices"] = entries.indices
    fused = sparse.emit(inputs, candidates, "selected", entries.mode, entries.block, beside)
    if fused is None:
        return None
    return Selected(fused, entries.indexer)


def _lists_few_keys(selected: Selection, sizes: Sizes, rewriter: Rewriter) -> bool:
    """Is there one list for each row of each batch entry, of at most half of the keys?"""
    info = rewriter.builder.info
    shape, entries = selected.shape(info), selected.count(info)
    if shape is None or entries is None or (*shape[:2], shape[2] * selected.block) != sizes.mask_shape:
        return False
    count, keys = entries.upper, sizes.kv_seq.const
    return count is not None and (keys is None or 2 * count * selected.block <= keys)
