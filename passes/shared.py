"""Attentions that share scores or probabilities: each is fused by itself, or none.

Accepted, where the ordinary matcher refuses because something else reads the scores or the probabilities:

    scores read by several softmaxes          attention in both directions: softmax(S) V and softmax(S^T) W
    probabilities read by several products    P V and P W

Every such reader has to belong to another attention that is matched as well. Each attention is a function of query,
key, value and mask alone, so it may be computed by itself. The shared products are then computed again, in blocks, and
the score matrices are not stored any more.

Refused: a group with an attention that cannot be fused, because the shared tensor is then needed anyway; a division
that lies after the product with the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from fa_compiler.passes.decline import Decline
from fa_compiler.passes.layout.axes import AxisSpace
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.matching.attention import Matcher
from fa_compiler.passes.matching.routes import Route, paths
from fa_compiler.passes.matching.scores import ScorePath, find_scores
from fa_compiler.passes.matching.softmax import SoftmaxAnchor

MAX_SHARING = 8
"""Groups of more attentions than this are left alone, because each computes again what they share."""


@dataclass(frozen=True)
class Sharer:
    """One attention of a group: its softmax and the route to its values."""

    anchor: SoftmaxAnchor
    route: Route


@dataclass(frozen=True)
class Sharing:
    """The softmaxes of one graph, and the score paths of those that were looked at so far."""

    anchors: Sequence[SoftmaxAnchor]
    found: dict[ir.Node, ScorePath | None] = field(default_factory=dict)

    def group(self, anchor: SoftmaxAnchor, matcher: Matcher) -> list[Sharer]:
        """All attentions that share scores or probabilities with this one; empty unless all of them match."""
        own = self._scoring(anchor, matcher)
        if own is None:
            return []
        scoring = [(each, self._scoring(each, matcher)) for each in self.anchors]
        group = [(each, path) for each, path in scoring if path is not None and path.product.node is own.product.node]
        found = [(each, path) for each, _ in group for path in paths(each, matcher.facts) or [()]]
        nodes = [node for each, path in group for node in (*path.nodes, *each.nodes)]
        accounted_for = frozenset((*nodes, *(node for _, path in found for node in path)))
        if not 2 <= len(found) <= MAX_SHARING:
            return []
        shared = [Sharer(each, Route(path, accounted_for)) for each, path in found]
        try:
            for sharer in shared:
                matcher.match(sharer.anchor, sharer.route)
        except Decline:
            return []
        return shared

    def _scoring(self, anchor: SoftmaxAnchor, matcher: Matcher) -> ScorePath | None:
        if anchor.late is not None:
            return None
        if anchor.node not in self.found:
            try:
                self.found[anchor.node] = find_scores(anchor.scores, Viewer(matcher.facts, AxisSpace()))
            except Decline:
                self.found[anchor.node] = None
        return self.found[anchor.node]
