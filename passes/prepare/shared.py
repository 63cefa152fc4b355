"""Attentions that share scores or probabilities: each is fused by itself, or none.

Accepted, where the ordinary matcher refuses because something else reads the scores or the
probabilities:

    scores read by several softmaxes          attention in both directions: softmax(S) V and
                                              softmax(S^T) W
    probabilities read by several products    P V and P W

Every such reader has to belong to another attention that is matched as well. Each attention is a
function of query, key, value and mask alone, so it may be computed by itself. The shared products
are then computed again, in blocks, and the score matrices are not stored any more.

Refused: a group with an attention that cannot be fused, because the shared tensor is then needed
anyway; a division that lies after the product with the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import AxisSpace
from fa_compiler.passes.answer.budget import limited_attempt
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.ir.nodes import without_absent
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.matching.attention import Matcher
from fa_compiler.passes.matching.routes import Route, paths
from fa_compiler.passes.matching.scores import ScorePath, find_scores
from fa_compiler.passes.matching.softmax import SoftmaxAnchor
from fa_compiler.passes.prepare.substitutions import is_match

MAX_SHARING = 8
"""Groups of more attentions than this are left alone, because each computes again what they
share."""


@dataclass(frozen=True)
class Sharer:
    """One attention of a group: its softmax and the route to its values."""

    anchor: SoftmaxAnchor
    route: Route


@dataclass
class Sharing:
    """The softmaxes of one graph, and their score paths, which are followed when the first group is
    asked for."""

    anchors: Sequence[SoftmaxAnchor]
    matcher: Matcher

    def group(self, anchor: SoftmaxAnchor) -> list[Sharer]:
        """All attentions that share scores or probabilities with this one; empty unless all of them
        match."""
        own = self._paths.get(anchor.node)
        if own is None or len(group := self._by_product[own.product.node]) > MAX_SHARING:
            return []
        routes = [
            (sharing, path)
            for sharing, _ in group
            for path in paths(sharing, self.matcher.facts) or [()]
        ]
        inner = ((*path.nodes, *sharing.nodes) for sharing, path in group)
        accounted_for = frozenset(chain(*inner, *(path for _, path in routes)))
        if not 2 <= len(routes) <= MAX_SHARING:
            return []
        shared = [Sharer(sharing, Route(path, accounted_for)) for sharing, path in routes]
        if not all(is_match(sharer.anchor, self.matcher, sharer.route) for sharer in shared):
            return []
        return shared

    @cached_property
    def _paths(self) -> dict[ir.Node, ScorePath]:
        """The score paths of the softmaxes that have one."""
        scoring = {anchor.node: self._scoring(anchor) for anchor in self.anchors}
        return without_absent(scoring)

    @cached_property
    def _by_product(self) -> dict[ir.Node, list[tuple[SoftmaxAnchor, ScorePath]]]:
        """The softmaxes of each product of query and key, in the order of the graph."""
        groups: dict[ir.Node, list[tuple[SoftmaxAnchor, ScorePath]]] = {}
        for anchor in self.anchors:
            if (path := self._paths.get(anchor.node)) is not None:
                groups.setdefault(path.product.node, []).append((anchor, path))
        return groups

    def _scoring(self, anchor: SoftmaxAnchor) -> ScorePath | None:
        if anchor.late is not None:
            return None
        viewer = Viewer(self.matcher.facts, AxisSpace())
        path = limited_attempt(anchor.node, lambda: find_scores(anchor.scores, viewer))
        return None if isinstance(path, Decline) else path
