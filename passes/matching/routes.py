"""The routes from a softmax to products with values.

An attention that shares nothing has one route, and nothing else reads its scores or probabilities.
There are further readers of the probabilities where several attentions share them, and where the
gradient of the attention is in the model. A route then names the nodes of the path to one product,
and says who answers for the other readers: nothing is fused unless every reader is fused, too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import AxisSpace
from fa_compiler.passes.ir.nodes import data_readers, is_op, outputs_of, reached, readers_of
from fa_compiler.passes.layout.contraction import contraction
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.matching.dropout import drop_mask
from fa_compiler.passes.matching.softmax import SoftmaxAnchor
from fa_compiler.passes.ops.movers import LAYOUT_OPS
from fa_compiler.passes.ops.moves import keeps_everything
from fa_compiler.passes.values.facts import Facts

MAX_STEPS = 64
"""More nodes than this between a softmax and its products are no attention."""
MAX_PRODUCTS = 32
"""Probabilities that more products read than this are no attention with its gradient, and no group
that shares them."""
PASSING = (*LAYOUT_OPS, "Cast", "Dropout", "Where", "IsNaN")


@dataclass(frozen=True)
class Route:
    """Which of several products with values is meant, and which other readers of inner values are
    fused as well.

    `path` are the nodes from the softmax to the product; none where there is but one product.
    `accounted_for` are nodes of other attentions that are fused as well (shared.py). With
    `gradient` the attention's gradient is fused with it, which accounts for all that read the
    probabilities (backward).
    """

    path: tuple[ir.Node, ...] = ()
    accounted_for: frozenset[ir.Node] = frozenset()
    gradient: bool = False


ONLY = Route()
"""The route of an attention with one product and no other readers."""


@dataclass
class _Readers:
    """What reads the probabilities, on the way to their products.

    `parents` has the nodes in front of each node that was reached. `others` says whether a node was
    reached that is no product and does not pass the probabilities on.
    """

    viewer: Viewer
    parents: dict[ir.Node, list[ir.Node]] = field(default_factory=dict)
    products: list[ir.Node] = field(default_factory=list)
    others: bool = False

    def follow(self, probabilities: ir.Value) -> None:
        """Go down to all products, or until too many nodes or products are known."""
        pending = deque([probabilities])
        while pending and len(self.parents) < MAX_STEPS and len(self.products) <= MAX_PRODUCTS:
            value = pending.popleft()
            maker = value.producer()
            for node in data_readers(value):
                is_new = node not in self.parents
                self.parents.setdefault(node, []).extend([] if maker is None else [maker])
                if is_new and self._passes_on(node):
                    pending.extend(node.outputs)

    def _passes_on(self, node: ir.Node) -> bool:
        """Does a reader pass the probabilities on? It is noted if not."""
        if contraction(node, self.viewer.info) is not None:
            self.products.append(node)
            return False
        passes = _passes(node, self.viewer)
        self.others |= not passes
        return passes

    def path_to(self, product: ir.Node) -> tuple[ir.Node, ...]:
        """The nodes that lead to a product, the product first."""
        makers = reached(
            [product], lambda node: [maker for maker in self.parents[node] if maker in self.parents]
        )
        return tuple(makers)


def paths(anchor: SoftmaxAnchor, facts: Facts) -> list[tuple[ir.Node, ...]]:
    """The paths from a softmax to the products that read its probabilities. Empty if there is a
    single product and nothing else reads a value on its path, or if there are more than
    MAX_PRODUCTS."""
    readers = _Readers(Viewer(facts, AxisSpace()))
    readers.follow(anchor.output)
    if len(readers.products) > MAX_PRODUCTS:
        return []
    shared = any(reader not in anchor.nodes for reader in readers_of(outputs_of(anchor.nodes[:-1])))
    if len(readers.products) < 2 and not readers.others and not shared:
        return []
    return [readers.path_to(product) for product in readers.products]


def _passes(node: ir.Node, viewer: Viewer) -> bool:
    """May a node stand between probabilities and their product?"""
    known = is_op(node, *PASSING) or keeps_everything(node, viewer.info)
    return known or viewer.factor(node) is not None or drop_mask(node, viewer) is not None
