"""The routes from a softmax to products with values.

An attention that shares nothing has one, and nothing else reads its scores or probabilities. The probabilities of an
attention whose gradient is in the model, and those that several attentions share, have other readers. A route then
names the nodes of the path to one product, and says who answers for the other readers: nothing is fused unless each of
them is a part of what is fused as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import AxisSpace
from fa_compiler.passes.ir.nodes import data_readers, distinct_consumers, is_op
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
"""Probabilities that more products read than this are no attention with its gradient, and no group that shares them."""
PASSING = (*LAYOUT_OPS, "Cast", "Dropout", "Where", "IsNaN")


@dataclass(frozen=True)
class Route:
    """Which of several products with values is meant, and which other readers of inner values are fused as well.

    `path` are the nodes from the softmax to the product; none where there is but one product. `accounted_for` are nodes
    of other attentions that are fused as well (shared.py). With `gradient` the attention's gradient is fused with it,
    which accounts for all that read the probabilities (backward).
    """

    path: tuple[ir.Node, ...] = ()
    accounted_for: frozenset[ir.Node] = frozenset()
    gradient: bool = False


ONLY = Route()
"""The route of an attention with one product and no other readers."""


def paths(anchor: SoftmaxAnchor, facts: Facts) -> list[tuple[ir.Node, ...]]:
    """The paths from a softmax to the products that read its probabilities. Empty if there is a single product and
    nothing else reads a value on its path, or if there are more than MAX_PRODUCTS."""
    viewer = Viewer(facts, AxisSpace())
    parents: dict[ir.Node, list[ir.Node]] = {}
    products: list[ir.Node] = []
    pending, others = [anchor.output], False
    while pending and len(parents) < MAX_STEPS and len(products) <= MAX_PRODUCTS:
        value = pending.pop(0)
        maker = value.producer()
        for node in data_readers(value):
            known = node in parents
            parents.setdefault(node, []).extend([maker] if maker is not None else [])
            if known:
                continue
            if contraction(node, facts.info) is not None:
                products.append(node)
            elif _passes(node, viewer):
                pending.extend(node.outputs)
            else:
                others = True
    if len(products) > MAX_PRODUCTS:
        return []
    inner = (output for node in anchor.nodes[:-1] for output in node.outputs)
    others |= any(reader not in anchor.nodes for output in inner for reader in distinct_consumers(output))
    if len(products) < 2 and not others:
        return []
    return [_path_to(product, parents) for product in products]


def _passes(node: ir.Node, viewer: Viewer) -> bool:
    """May a node stand between probabilities and their product?"""
    known = is_op(node, *PASSING) or keeps_everything(node, viewer.info)
    return known or viewer.factor(node) is not None or drop_mask(node, viewer) is not None


def _path_to(product: ir.Node, parents: dict[ir.Node, list[ir.Node]]) -> tuple[ir.Node, ...]:
    path, pending = dict.fromkeys([product]), [product]
    while pending:
        for node in parents.get(pending.pop(), []):
            if node not in path and node in parents:
                path[node] = None
                pending.append(node)
    return tuple(path)
