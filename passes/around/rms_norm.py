"""RMSNorm: what divides rows by their root mean square, in the spellings of exporters.

    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon);  y = weight * y

Grammar; the code cites the numbers of the cases, and rows.py has those of the rows and the weights:

    norm :=
      1     the rows of x divided by the root of the mean of their squares, with or without a weight
      2   | RMSNormalization(x, gamma) | SimplifiedLayerNormalization(x, gamma)
                                                                   axis is the last one
      3   | SkipSimplifiedLayerNormalization(a, b, gamma, bias)    x is the sum of a and b of equal
                                                                    shapes, and of a bias if there
                                                                    is one: an Add adds it to a
    x, where a norm is computed :=
      4     Add(a, b)                      of equal shapes: AddRmsNorm gives the sum, too. Of 16
                                           bits only where the model rounds the normalised rows, as
                                           the operator does on A2 and A3
      5   | any tensor

Where x is a difference from a mean, this is LayerNorm (layer_norm.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import onnx_ir as ir

from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.around import layer_norm, rows
from fa_compiler.passes.around.records import FLOAT, Norm, SummedNorm, known_shape
from fa_compiler.passes.ir.nodes import SIXTEEN_BITS, float_attr, int_attr, is_op, operand_at
from fa_compiler.passes.values.shapes import ShapeInfo

READY_MADE = ("RMSNormalization", "SimplifiedLayerNormalization")
SKIP = ("com.microsoft", "SkipSimplifiedLayerNormalization")
SKIP_EPSILON = 1e-12
"""What SKIP has for epsilon where it is not given."""


def is_anchor(node: ir.Node, info: ShapeInfo) -> bool:
    """May a norm be computed here: is this the mean of a square, or a norm that the model has ready
    made?"""
    if (node.domain, node.op_type) == SKIP or is_op(node, *READY_MADE):
        return True
    return rows.squared(node, info) is not None and not layer_norm.is_anchor(node, info)


def norms(node: ir.Node, info: ShapeInfo) -> Iterator[Norm | SummedNorm]:
    """The norms that the operator at an anchor may be part of, the best first; none where it is no
    norm.

    Raises:
        Decline: it is a norm that the operator does not compute.
    """
    if (node.domain, node.op_type) == SKIP:  # 3
        yield _skipping(node, info)
        return
    for norm in _alone(node, info):
        whole = rows.sum_before(norm, info)
        if whole is not None and (info.dtype(norm.x) not in SIXTEEN_BITS or norm.rounded):  # 4
            yield whole
        yield norm  # 5


def _alone(node: ir.Node, info: ShapeInfo) -> Iterator[Norm]:
    """The norms without the sum in front of them."""
    if is_op(node, *READY_MADE):  # 2
        yield _ready_made(node, info)
        return
    norm = rows.normalised(node, info)
    if norm is None:
        return
    rows.expect_norm(norm, norm.x, info)
    source = rows.before_idle_casts(norm.x, info)
    yield from rows.with_ends(replace(norm, x=source), rows.narrow_source(source, info), info)  # 1


def _ready_made(node: ir.Node, info: ShapeInfo) -> Norm:
    x, gamma = operand_at(node, 0), operand_at(node, 1)
    shape = known_shape(x, info, node)
    dtype = rows.of_one_type(node, (x, gamma), info)
    if int_attr(node, "axis", -1) % len(shape) != len(shape) - 1:
        raise Decline(Code.SHAPE, "the norm runs over more than the last axis", node, "")
    if int_attr(node, "stash_type", 1) != FLOAT:
        raise Decline(Code.DTYPE, "the norm is not computed in float32", node)
    rows.expect_unread(node, node.outputs[1:])
    weight = rows.weight_of(gamma, rows.last_size(shape, x, node), info, node)
    epsilon = rows.expect_epsilon(float_attr(node, "epsilon", 1e-5), node)
    return Norm(node, x, weight, epsilon, node.outputs[0], (node,), dtype in SIXTEEN_BITS)


def _skipping(node: ir.Node, info: ShapeInfo) -> SummedNorm:
    one, other, gamma = (operand_at(node, place) for place in range(3))
    shape = known_shape(one, info, node)
    dtype = rows.of_one_type(node, (one, other, gamma), info)
    rows.expect_equal_shapes(one, other, info, node)
    size = rows.last_size(shape, one, node)
    bias = operand_at(node, 3) if operand_at(node, 3).name else None
    if bias is not None and not (info.dtype(bias) == dtype and rows.is_vector(bias, size, info)):
        raise Decline(
            Code.SHAPE, f"the bias {bias.name!r} is not a vector as long as the last axis", node, ""
        )
    rows.expect_unread(node, node.outputs[1:3])
    weight = rows.weight_of(gamma, size, info, node)
    total = node.outputs[3] if len(node.outputs) > 3 else ir.Value(name="")
    epsilon = rows.expect_epsilon(float_attr(node, "epsilon", SKIP_EPSILON), node)
    norm = Norm(node, total, weight, epsilon, node.outputs[0], (node,), dtype in SIXTEEN_BITS)
    return SummedNorm(norm, (one, other), total, (node,), bias)
