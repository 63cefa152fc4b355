"""A softmax over the output of a linear layer, told apart from attention.

A router, a pooling layer or a classifier is a product with weights and a softmax over the axis the weights make. It
is declined with the code of a softmax that is no attention. Where the layer takes the scores of an attention (talking
heads) the attention is what cannot be fused, and its own code says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import onnx_ir as ir

from fa_compiler.passes.decline import Decline
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.matching.scores import ScorePath, find_scores
from fa_compiler.passes.nodes import is_weight
from fa_compiler.passes.report import Code


@contextmanager
def layers_apart(before: ScorePath, viewer: Viewer) -> Iterator[None]:
    """Turns a decline about an axis into one about a linear layer, if an operand of the first product is a weight."""
    try:
        yield
    except Decline as decline:
        if decline.code == Code.AXIS and any(holds_weights(value, viewer) for value in before.product.operands):
            _check_mixed(before, viewer)
            reason = "the softmax of a linear layer's output, over another axis than keys would have"
            raise Decline(Code.NOT_ATTENTION, reason, decline.culprit) from decline
        raise


def holds_weights(value: ir.Value, viewer: Viewer) -> bool:
    """Does a value hold weights, rearranged or not?"""
    view = viewer.view(value)
    return is_weight(value if view is None else view.base)


def _check_mixed(before: ScorePath, viewer: Viewer) -> None:
    """Decline with a code of attention where a linear layer takes scores: talking heads."""
    for value in before.product.operands:
        try:
            inner = None if holds_weights(value, viewer) else find_scores(value, viewer, inner=True).product
        except Decline:
            continue
        if inner is not None and not any(holds_weights(each, viewer) for each in inner.operands):
            reason = "a linear layer mixes the scores of several heads"
            raise Decline(Code.SCORE_TERM, reason, before.product.node, "")
