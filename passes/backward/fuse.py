"""An attention and its gradient, fused at once or not at all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from fa_compiler.passes.answer.decline import Decline, attempt, label, reworded
from fa_compiler.passes.answer.report import Code, Missed, MissedCode
from fa_compiler.passes.backward.dense_gradient import Backward
from fa_compiler.passes.backward.empty_rows import keep_empty_rows
from fa_compiler.passes.backward.match import Pair, PairDecline, match_pair
from fa_compiler.passes.backward.sparse_gradient import ListedBackward
from fa_compiler.passes.matching.attention import Matcher
from fa_compiler.passes.matching.softmax import SoftmaxAnchor
from fa_compiler.passes.rewrite.rewriter import Fused, Rewriter
from fa_compiler.passes.sparse import fuse_gathered_keys, fuse_masked_selection


@dataclass(frozen=True)
class FusedPair:
    """What was matched and built, for the report; `node` is the gradient, `indexer` what lists the
    keys, if it is a node of its own, `losses` an indexer's loss beside the gradient."""

    match: Pair
    fused: Fused
    node: ir.Node
    indexer: ir.Node | None = None
    losses: tuple[ir.Node, ...] = ()


def fuse_pair(
    anchor: SoftmaxAnchor, matcher: Matcher, rewriter: Rewriter, has_top_k: bool
) -> FusedPair | None:
    """Fuse an attention together with its gradient; None when there is no gradient.

    For ONNX Runtime, or if the graph has a TopK (`has_top_k`), which may rank keys, a product that
    is added to the scores is first tried as a part of them, as in fusion.py.

    Raises PairDecline, before any use is changed, when there is one that cannot be fused.
    """
    joined: FusedPair | Decline | None = None
    if matcher.facts.options.target == "ort" or has_top_k:
        joining = replace(matcher, joins_added_product=True)
        joined = rewriter.attempt(
            lambda: _matched_and_fused(anchor, joining, rewriter, only_joined=True)
        )
    if isinstance(joined, FusedPair):
        return joined
    first_reason = joined
    return reworded(
        lambda: _matched_and_fused(anchor, matcher, rewriter),
        lambda decline: first_reason or decline,
    )


def _matched_and_fused(
    anchor: SoftmaxAnchor, matcher: Matcher, rewriter: Rewriter, only_joined: bool = False
) -> FusedPair | None:
    """The pair; None where there is no gradient, or, with `only_joined`, where no product is added
    to the scores. Raises Decline."""
    pair = match_pair(anchor, matcher)
    if pair is None or (only_joined and pair.forward.rope is None):
        return None
    return reworded(
        lambda: _fused(pair, matcher, rewriter),
        lambda decline: PairDecline.about(pair.backward.node, decline),
    )


def _fused(pair: Pair, matcher: Matcher, rewriter: Rewriter) -> FusedPair:
    missed: list[Missed] = []
    listed = _fused_with_list(pair, matcher, rewriter, missed)
    if listed is not None:
        return listed
    if (loss := pair.backward.divergence) is not None:
        reason = "an indexer learns from the probabilities of an attention that has no list of keys in every row"
        raise Decline(Code.TRAINING, reason, loss.node)
    pair = keep_empty_rows(pair, matcher.facts.options)
    backward = Backward(pair.backward, rewriter)
    fused = rewriter.emit(pair.forward, backward)
    return FusedPair(pair, replace(fused, missed=(*fused.missed, *missed)), backward.nodes[-1])


def _fused_with_list(
    pair: Pair, matcher: Matcher, rewriter: Rewriter, missed: list[Missed]
) -> FusedPair | None:
    """The pair as attention to selected keys; None where the keys are not selected.

    Where they are, and the pair is not fused as such, the reason is appended to `missed`.
    """
    # Where every row has a key, what the others would give does not matter.
    fused = _attempt(pair, True, matcher, rewriter, missed)
    if fused is not None:
        return fused
    kept = attempt(lambda: keep_empty_rows(pair, matcher.facts.options))
    if isinstance(kept, PairDecline):
        return None
    if isinstance(kept, Decline):
        raise kept
    return _attempt(kept, False, matcher, rewriter, missed)


def _attempt(
    pair: Pair, every_row: bool, matcher: Matcher, rewriter: Rewriter, missed: list[Missed]
) -> FusedPair | None:
    backward = ListedBackward(pair.backward, rewriter, every_row=every_row)
    selected = fuse_masked_selection(pair.forward, rewriter, missed, backward)
    selected = selected or fuse_gathered_keys(pair.forward, rewriter, missed, backward)
    if selected is not None:
        return FusedPair(
            pair, selected.fused, backward.nodes[0], selected.indexer, tuple(backward.nodes[1:])
        )
    if backward.failure is not None:
        raise backward.failure
    if backward.refused:
        reason = f"the pair stays dense: {backward.refused}"
        line = Missed(MissedCode.NOT_SELECTED, reason, label(pair.forward.node))
        if line not in missed:
            missed.append(line)
    return None
