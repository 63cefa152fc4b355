"""A product that is added to the scores and counts as a part of them: query and key may have a part
for positions.

    added := product | layout(added) | added times or over one number known before the run

Accepted where it runs along the same axes as the scores, in sizes that are proven to be theirs, and
is made of what scores are made of (score_like.py): a mask outweighs the sum as it does the scores.
The scales of the two are at most LARGEST_RATIO (final_scores.py) apart. Anything else stays a bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes
from fa_compiler.passes.answer.decline import Decline, if_possible
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.layout.operands import Operands
from fa_compiler.passes.layout.views import View, Viewer
from fa_compiler.passes.masks.score_like import is_score_like
from fa_compiler.passes.masks.score_ops import Scale
from fa_compiler.passes.matching.score_walk import Rearrange
from fa_compiler.passes.matching.scores import find_scores


@dataclass(frozen=True)
class Rope:
    """The product that is added to that of query and key: `query` and `key` contracted over
    `head_dim`, with a scale `ratio` times that of the other product.

    Exporters write attention like this if rotary positions have a part of the head for themselves.
    """

    query: View
    key: View
    head_dim: Axes
    ratio: float


@dataclass(frozen=True)
class AddedProduct:
    """A product that was added to the scores, and its scale as a part of theirs."""

    product: Operands
    ratio: float

    def rope(self, kv_seq: Axes, viewer: Viewer) -> Rope:
        """Its operands as query and key over these columns. Raises Decline where it has no keys of
        its own."""
        operands, resolve = self.product, viewer.space.resolve
        for side in (1, 0):
            free = operands.free(side)
            query, key = operands.views[1 - side], operands.views[side]
            if len(free) == 1 and resolve(operands.dims[side][free[0]]) == kv_seq and query and key:
                return Rope(
                    query, key, resolve(operands.dims[0][operands.product.summed[0]]), self.ratio
                )
        raise Decline(
            Code.AXIS,
            "a product is added to the scores that has no keys of its own",
            operands.product.node,
        )


def added_product(
    value: ir.Value,
    share: float,
    dims: Arrangement,
    node: ir.Node,
    viewer: Viewer,
) -> AddedProduct | None:
    """What `node` adds to scores of this arrangement as a product; None where it is none. `share`
    is what its scale is multiplied by."""
    if not is_score_like(value, viewer):
        return None
    read = if_possible(lambda: _aligned_product(value, dims, node, viewer))
    if read is None:
        return None
    product, own, scale, aligned = read
    missing, space = len(own) - len(aligned), viewer.space
    if missing < 0:
        return None
    for one, other in zip(own[missing:], aligned, strict=True):
        if space.size(one) != space.size(other) or not space.unify(one, other):
            return None
    return AddedProduct(product, scale * share)


def _aligned_product(
    value: ir.Value, dims: Arrangement, node: ir.Node, viewer: Viewer
) -> tuple[Operands, Arrangement, float, Arrangement] | None:
    """A product that is added to the scores: the operands, the arrangement behind the steps after
    the product, the scale, and the arrangement as a part of the scores. None where a step does more
    than scale and rearrange. Raises Decline."""
    path = find_scores(value, viewer, True)
    product = Operands.of(
        path.product, viewer, widening=viewer.info.dtype(value) != ir.DataType.FLOAT
    )
    own, scale = product.out, path.product.factor * product.scale
    for step in path.steps:
        if isinstance(step, Scale):
            scale *= step.factor
        elif (
            isinstance(step, Rearrange) and (moved := viewer.rearranged(step.node, own)) is not None
        ):
            own = moved
        else:
            return None
    return product, own, scale, viewer.alignment(value, dims, node)
