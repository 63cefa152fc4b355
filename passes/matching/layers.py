"""A softmax of what layers make, told apart from attention.

    experts = torch.nn.Linear(d, n)(x).softmax(-1)

A router, a pooling layer, a classifier, the bins of a distribution and linear attention have no
scores of rows and keys. Their softmax takes the product of a tensor with weights, or weights alone.
One rule declines all of them, with the code of a softmax that is no attention:

    made :=                                                what the softmax takes, where it is no
                                                           product of query and key that is followed
                                                           to its end, or not over the keys' axis
      1     layer(x)                                       Conv, or a product with a matrix of
                                                           weights
      2   | weights                                        initializers and constants alone
      3   | between(made, ...)                             elementwise operators, normalisations,
                                                           layout, parts; what else they take may be
                                                           given, but made by nothing else

A layer that takes the scores of an attention is none of these (talking heads): the attention is
what cannot be fused, and its own code says so. Nor is a product of two tensors that are no weights,
wherever it stands.
"""

from __future__ import annotations

from functools import partial

import onnx_ir as ir

from fa_compiler.passes.answer.decline import Decline, if_possible, reworded
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.nodes import (
    distinct_consumers,
    inputs_of,
    is_op,
    is_weight,
    nodes_of_type,
    operands,
    outputs_of,
    reached,
    readers_of,
    source_through,
    without_none,
)
from fa_compiler.passes.layout.contraction import Contraction
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.matching.probability_path import ProbabilityPath
from fa_compiler.passes.matching.scores import ScorePath, find_scores, product_at, takes_scores
from fa_compiler.passes.matching.weights import holds_weights, is_matrix
from fa_compiler.passes.ops.elementwise import POINTWISE
from fa_compiler.passes.ops.movers import MOVES
from fa_compiler.passes.ops.numbers import PASSING

BETWEEN = (
    *(*POINTWISE, *PASSING, "Pad", "Dropout", "QuantizeLinear", "DequantizeLinear"),
    *("BatchNormalization", "InstanceNormalization", "LayerNormalization", "GroupNormalization"),
)
"""3: the operators between a layer and the softmax."""
LINEAR, WEIGHTS = "a linear layer makes", "weights make"
SCALING = (*MOVES, "Mul", "Div", "Cast", "Dropout")
LIMIT = 64
"""So many values are looked at."""


def decline_of_layers(
    decline: Decline, before: ScorePath, after: ProbabilityPath, viewer: Viewer
) -> Decline:
    """A decline about a layer instead of one about an axis, if an operand of the first product is a
    weight."""
    if decline.code != Code.AXIS or not any(
        holds_weights(value, viewer) for value in before.product.operands
    ):
        return decline
    if (mixed := _talking_heads(before, viewer)) is not None:
        return mixed
    return Decline(Code.NOT_ATTENTION, _what_it_is(LINEAR, after, viewer), decline.culprit)


def scores_of_attention(value: ir.Value, after: ProbabilityPath, viewer: Viewer) -> ScorePath:
    """The path of the scores that a softmax takes. Raises Decline; it has the code of a softmax
    that is no attention if layers make what the softmax takes."""

    def words(decline: Decline) -> Decline:
        if decline.code not in (Code.NO_SCORES_MATMUL, Code.SCORE_TERM, Code.SCALE):
            return decline
        maker = _maker(value, viewer)
        if maker is None:
            return decline
        return Decline(Code.NOT_ATTENTION, _what_it_is(maker, after, viewer), decline.culprit)

    return reworded(lambda: find_scores(value, viewer), words)


def _maker(value: ir.Value, viewer: Viewer) -> str | None:
    """What makes a softmax's input, in words, if layers do, or it is made of weights; else None."""
    layer, given = None, False

    def sources(made: ir.Value) -> list[ir.Value]:
        node = made.producer()
        return inputs_of(node, *BETWEEN)

    for made in reached([value], sources):
        node = made.producer()
        if node is None or _is_other_than_scores(made, viewer):
            given |= not is_weight(made)
        elif is_op(node, "Conv") and not takes_scores(node, viewer):  # 1
            layer = "a convolution makes"
        elif is_op(node, "MatMul", "Gemm") and any(
            is_matrix(operand, viewer) for operand in operands(node)[:2]
        ):
            layer = LINEAR
        elif not is_op(node, *BETWEEN, "Constant"):
            return None
    if layer is not None or given:
        return layer
    return WEIGHTS  # 2


def _is_other_than_scores(value: ir.Value, viewer: Viewer) -> bool:
    """Is it a condition, a size or a position? Whatever makes it, it is no scores."""
    return viewer.info.dtype(value) in (ir.DataType.BOOL, ir.DataType.INT32, ir.DataType.INT64)


def _what_it_is(maker: str, after: ProbabilityPath, viewer: Viewer) -> str:
    """What a softmax that layers make is for, by the product that follows."""
    made = f"{maker} what the softmax takes, not a product of query and key"
    if maker == WEIGHTS:
        return f"a learned mixture: {made}"
    if holds_weights(after.value, viewer):
        return f"the mean of weights, as of the bins of a distribution: {made}"
    if _is_of_linear_attention(after.product, after.value, viewer):
        return f"linear attention, whose softmax is of keys or queries alone: {made}"
    return f"pooling, a choice of experts or a dynamic convolution: {made}"


def _is_of_linear_attention(product: Contraction, value: ir.Value, viewer: Viewer) -> bool:
    """Is the product multiplied by queries, or the value a product of keys and values?"""

    def following(scaled: ir.Value) -> list[ir.Value]:
        return outputs_of(nodes_of_type(distinct_consumers(scaled), *SCALING))

    values = reached([product.output], following, LIMIT)
    readers = (product_at(node, viewer.info) for node in readers_of(values))
    inner = product_at(source_through(value, *SCALING).producer(), viewer.info)
    products = without_none((inner, *readers))
    return any(
        not any(holds_weights(operand, viewer) for operand in multiplied.operands)
        for multiplied in products
    )


def _talking_heads(before: ScorePath, viewer: Viewer) -> Decline | None:
    """A Decline with a code of attention where a linear layer takes scores."""
    for value in before.product.operands:
        if holds_weights(value, viewer):
            continue
        inner = if_possible(partial(find_scores, value, viewer, inner=True))
        if inner is not None and not any(
            holds_weights(operand, viewer) for operand in inner.product.operands
        ):
            reason = "talking heads: a linear layer mixes the scores of several heads"
            return Decline(Code.SCORE_TERM, reason, before.product.node, "")
    return None
