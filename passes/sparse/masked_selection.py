"""Attention under a mask that admits selected keys: it becomes SparseFlashAttention with the list of these keys.

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

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Axes
from fa_compiler.passes.ir.nodes import is_op, producer, reached
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.matching.roles import shared_heads
from fa_compiler.passes.rewrite.layout_plan import OutputCandidate, output_candidates
from fa_compiler.passes.rewrite.rewriter import Fused, Rewriter
from fa_compiler.passes.sparse.builder import SparseCompanion, SparseFlashBuilder, is_plain, taken
from fa_compiler.passes.sparse.emit import Sizes
from fa_compiler.passes.sparse.selection import MAX_PARTS, Selection, selection
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
    if (
        not is_plain(match)
        or match.mask.empty_rows not in EMPTY_ROWS
        or not any(_may_select(part.view.base) for part in match.mask.masked)
    ):
        return None
    rewriter.begin(match)
    plain, candidates = output_candidates(match, rewriter.facts)
    return rewriter.if_possible(lambda: _emit(_heads_apart(plain), candidates, rewriter, companion))


def _may_select(mask: ir.Value) -> bool:
    """Is there a ScatterElements among the nearest nodes that a mask is made from?"""

    def above(value: ir.Value) -> list[ir.Value]:
        node = producer(value)
        return [] if node is None else [each for each in node.inputs if each is not None]

    return any(is_op(producer(value), "ScatterElements") for value in reached([mask], above, 4 * MAX_PARTS))


def _heads_apart(match: AttentionMatch) -> AttentionMatch:
    """The match with the batch and the rows of the lists.

    An axis of the batch or of the rows that no mask has becomes a head: a product had counted this head among its batch
    or rows. Any such choice is right, because attention does the same for every index of each of these axes.
    """
    roles, space = match.roles, match.space
    known = {axis for part in match.mask.masked for dim in part.view.base_dims for axis in dim}

    def apart(axes: Axes) -> tuple[Axes, Axes]:
        others = tuple(axis for axis in axes if axis not in known)
        found = len(others) < len(axes) or axes == roles.batch
        movable = found and space.size(others).const is not None
        return (tuple(axis for axis in axes if axis in known), others) if movable else (axes, ())

    (batch, outer), (rows, inner) = apart(roles.batch), apart(roles.q_seq)
    if not outer and not inner:
        return match
    heads = (*outer, *roles.heads, *inner)
    kv_heads = shared_heads(match.key, match.value, heads, space)
    return replace(match, roles=replace(roles, batch=batch, heads=heads, kv_heads=kv_heads, q_seq=rows))


def _emit(
    match: AttentionMatch, candidates: Sequence[OutputCandidate], rewriter: Rewriter, companion: SparseCompanion | None
) -> Selected | None:
    builder = rewriter.builder
    if companion is not None:
        match = companion.adapted(match)
    sources = (match.key, match.value, *(() if match.rope is None else (match.rope.key,)))
    sparse = SparseFlashBuilder.of(
        match, sources, match.roles.kv_seq, rewriter, () if companion is None else companion.views
    )
    mask = sparse.mask(match)
    found = None if mask is None else selection(mask, rewriter.facts)
    if found is None:
        return None
    inputs = sparse.inputs()
    query, key = builder.info.shape(inputs["query"]), builder.info.shape(inputs["key"])
    if query is None or key is None:
        return None
    sizes = Sizes(query[0], query[1], key[1])
    if not _fits(found, sizes, rewriter):
        return None
    if companion is not None:
        kept = taken(match, companion, lambda: selects_in_every_row(found, sizes, rewriter.facts))
        if kept is None:
            return None
        sparse = replace(sparse, match=kept)
    entries = SparseIndices.of((inputs["query"], inputs["key"]), found, sizes, builder, rewriter.facts)
    if entries is None:
        return None
    if entries.indexer is not None:
        rewriter.made.append(entries.indexer)
    inputs["sparse_indices"] = entries.indices
    beside = None if companion is None else (companion, found)
    fused = sparse.emit(inputs, candidates, "selected", entries.mode, entries.block, beside)
    return None if fused is None else Selected(fused, entries.indexer)


def _fits(found: Selection, sizes: Sizes, rewriter: Rewriter) -> bool:
    """Is there one list for each row of each batch entry, of at most half of the keys?"""
    info = rewriter.builder.info
    shape, listed = info.shape(found.scattered), info.shape(found.indices)
    if shape is None or listed is None or (*shape[:2], shape[2] * found.block) != sizes.mask_shape:
        return False
    count, keys = listed[2].upper, sizes.kv_seq.const
    return count is not None and (keys is None or 2 * count * found.block <= keys)
