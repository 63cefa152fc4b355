"""LayerNorm: subtracts the mean of each row, and divides by the deviation, in the spellings of
exporters.

    y = torch.nn.functional.layer_norm(x, (size,), weight, bias, epsilon)

Grammar; the code cites the numbers of the cases, and rows.py has those of the rows and the weights:

    mean :=
      1     ReduceMean(x)                  along the last axis, which stays with size 1, as in
                                           rows.py, 3
    centred :=
      2     Sub(x, mean)                   in float32
      3   | Cast(Sub(x, mean))             x of 16 bits: the model rounds the mean and the
                                           difference, and the operator does not; the report says
                                           so. What is cast back to 16 bits is the norm
    norm :=
      4     the rows of `centred` divided by the root of the mean of their squares, with or without
            weight and bias
      5   | LayerNormalization(x, gamma, beta)                    axis is the last one
      6   | SkipLayerNormalization(a, b, gamma, beta, bias)       x is the sum of a and b of equal
                                                                   shapes, and of a bias if there is
                                                                   one: an Add adds it to a. In 16
                                                                   bits this would round, so it is
                                                                   declined
      7   | Add(Mul(x, scale), Sub(beta, Mul(mean, scale)))       of TensorFlow; scale is Mul(rate,
                                                                   gamma), with the rate of rows.py
                                                                   and two vectors
    x, where a norm is computed :=
      8     Add(a, b)                      of equal shapes: AddLayerNorm gives the sum, too
      9   | any tensor                     LayerNormV4. A LayerNormalization with a beta stays as it
                                           is: it is one operator already

Only the last axis is normalised, and the mean is that of the same x. The epsilon stands under the
root, as in the operator. Case 7 is the same formula, multiplied out; where the mean is large, the
operator loses fewer bits.

AddLayerNorm computes the sum in float32, and does not round it before it normalises it. A model of
16 bits does; the report says so. In float16 its sum may overflow, and what it makes NaN of an
infinite sum are numbers of the operator. That all numbers are finite is assumed for Ascend; without
this assumption 16 bits are declined.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import onnx_ir as ir

from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import Options
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.around import rows
from fa_compiler.passes.around.records import (
    FLOAT,
    Norm,
    SummedNorm,
    Weight,
    expect_finite,
    is_float,
    known_shape,
)
from fa_compiler.passes.ir.nodes import (
    SIXTEEN_BITS,
    distinct_consumers,
    float_attr,
    int_attr,
    is_op,
    operand_at,
)
from fa_compiler.passes.values.patterns import Bind, Op, match
from fa_compiler.passes.values.shapes import ShapeInfo

_SCALE = Op("Mul", Bind("rate"), Bind("gamma"), name="scale")
_MULTIPLIED_OUT = Op(
    "Add",
    Op("Mul", Bind("x"), _SCALE),
    Op("Sub", Bind("beta"), Op("Mul", Bind("mean"), Bind("scale"))),
)
READY_MADE = "LayerNormalization"
SKIP = ("com.microsoft", "SkipLayerNormalization")
SKIP_EPSILON = 1e-12
"""What SKIP has for epsilon where it is not given."""


def is_anchor(node: ir.Node, info: ShapeInfo) -> bool:
    """May a norm be computed here: is this the mean of a squared difference from a mean, or a norm
    that the model has ready made?"""
    if (node.domain, node.op_type) == SKIP or is_op(node, READY_MADE):
        return True
    found = rows.squared(node, info)
    return found is not None and _difference(found["x"]) is not None


def norms(node: ir.Node, info: ShapeInfo, options: Options) -> Iterator[Norm | SummedNorm]:
    """The norms that the operator at an anchor may be part of, the best first; none where it is no
    norm.

    Raises:
        Decline: it is a norm that the operators do not compute.
    """
    if (node.domain, node.op_type) == SKIP:  # 6
        yield _unrounded(_skipping(node, info), info, options)
        return
    for norm in _alone(node, info):
        if (whole := rows.sum_before(norm, info)) is not None:  # 8
            yield _unrounded(whole, info, options)
        if not is_op(node, READY_MADE) or not norm.beta.is_given:  # 9
            yield norm


def _unrounded(whole: SummedNorm, info: ShapeInfo, options: Options) -> SummedNorm:
    """The norm of a sum that the operator does not round. Raises Decline."""
    dtype = is_float(whole.operands[0], info, whole.norm.anchor)
    expect_finite(dtype, options, whole.norm.anchor)
    rounded = whole.norm.rounded or dtype in SIXTEEN_BITS
    return replace(whole, norm=replace(whole.norm, rounded=rounded))


def _alone(node: ir.Node, info: ShapeInfo) -> Iterator[Norm]:
    """The norms without the sum in front of them."""
    if is_op(node, READY_MADE):  # 5
        yield _ready_made(node, info)
        return
    found = rows.squared(node, info)
    difference = None if found is None else _difference(found["x"])
    if found is None or difference is None:
        return
    mean, x = operand_at(difference, 1).producer(), operand_at(difference, 0)
    if mean is None or operand_at(mean, 0) is not x:
        return
    norm = rows.normalised(node, info) or _multiplied_out(node, x, mean, info)
    if norm is None:
        return
    casts = () if found["x"].producer() is difference else (found["x"].producer(),)
    nodes = tuple(dict.fromkeys(filter(None, (mean, difference, *casts, *norm.nodes))))
    norm = replace(norm, nodes=nodes, centred=True)  # 4
    rows.expect_last_axis(mean, known_shape(x, info, node))  # 1
    rows.expect_norm(norm, found["x"], info)
    if info.dtype(x) == FLOAT:  # 2
        source = rows.before_idle_casts(x, info)
        yield from rows.with_ends(replace(norm, x=source), rows.narrow_source(source, info), info)
    else:  # 3
        is_float(x, info, node)
        yield from (replace(ending, rounded=True) for ending in rows.cast_back(norm, x, info))


def _multiplied_out(variance: ir.Node, x: ir.Value, mean: ir.Node, info: ShapeInfo) -> Norm | None:
    """The norm in which x and the mean are multiplied by the weight and the rate; None where there
    is none."""
    found, floor = rows.squared(variance, info), rows.floor_of(variance, info)
    size = info.sizes(x)[-1:]
    if found is None or not size or size[0].const is None or info.dtype(x) != FLOAT:
        return None
    for rate, steps in rows.rates(floor.value, info):
        given = {"x": x, "mean": mean.outputs[0], "rate": rate}
        for whole in _sums(rate):
            parts = match(_MULTIPLIED_OUT, whole, info, given)  # 7
            if parts is None or not all(
                rows.is_vector(parts[name], size[0].const, info) for name in ("gamma", "beta")
            ):
                continue
            gamma, beta = (
                rows.weight_of(parts[name], size[0].const, info, variance)
                for name in ("gamma", "beta")
            )
            nodes = tuple(
                dict.fromkeys((*found.nodes, variance, *floor.nodes, *steps, *parts.nodes))
            )
            return Norm(variance, found["x"], gamma, floor.epsilon, whole, nodes, beta=beta)
    return None


def _sums(rate: ir.Value) -> Iterator[ir.Value]:
    """What is computed from a rate by two products and a sum, or by one more."""
    for scale in distinct_consumers(rate):
        for product in distinct_consumers(scale.outputs[0]):
            yield from (
                total.outputs[0]
                for total in distinct_consumers(product.outputs[0])
                if is_op(total, "Add")
            )


def _difference(x: ir.Value) -> ir.Node | None:
    """The node that subtracts a mean, if x is this difference, or cast from it; None for another
    tensor."""
    node = x.producer()
    if is_op(node, "Cast"):
        node = operand_at(node, 0).producer()
    return (
        node if is_op(node, "Sub") and is_op(operand_at(node, 1).producer(), *rows.MEANS) else None
    )


def _ready_made(node: ir.Node, info: ShapeInfo) -> Norm:
    x = operand_at(node, 0)
    shape = known_shape(x, info, node)
    if int_attr(node, "axis", -1) % len(shape) != len(shape) - 1:
        raise Decline(Code.SHAPE, "the norm runs over more than the last axis", node, "")
    if int_attr(node, "stash_type", 1) != FLOAT:
        raise Decline(Code.DTYPE, "the norm is not computed in float32", node)
    rows.expect_unread(node, node.outputs[1:])
    gamma, beta = _weights(node, x, 1, info)
    epsilon = rows.expect_epsilon(float_attr(node, "epsilon", 1e-5), node)
    narrow = info.dtype(x) in SIXTEEN_BITS
    return Norm(node, x, gamma, epsilon, node.outputs[0], (node,), narrow, centred=True, beta=beta)


def _skipping(node: ir.Node, info: ShapeInfo) -> SummedNorm:
    one, other = operand_at(node, 0), operand_at(node, 1)
    shape = rows.expect_equal_shapes(one, other, info, node)
    dtype = rows.of_one_type(node, (one, other), info)
    gamma, beta = _weights(node, one, 2, info)
    bias = operand_at(node, 4) if operand_at(node, 4).name else None
    if bias is not None and dtype in SIXTEEN_BITS:
        raise Decline(Code.DTYPE, "the sum with the bias would be rounded to 16 bits", node)
    if bias is not None and not rows.is_vector(bias, rows.last_size(shape, one, node), info):
        raise Decline(
            Code.SHAPE, f"the bias {bias.name!r} is not a vector as long as the last axis", node, ""
        )
    rows.expect_unread(node, node.outputs[1:3])
    total = node.outputs[3] if len(node.outputs) > 3 else ir.Value(name="")
    epsilon = rows.expect_epsilon(float_attr(node, "epsilon", SKIP_EPSILON), node)
    norm = Norm(node, total, gamma, epsilon, node.outputs[0], (node,), centred=True, beta=beta)
    return SummedNorm(norm, (one, other), total, (node,), bias)


def _weights(node: ir.Node, x: ir.Value, place: int, info: ShapeInfo) -> tuple[Weight, Weight]:
    """The weight of a norm, which stands at a place, and the bias behind it. Raises Decline."""
    given = [
        value for value in (operand_at(node, place), operand_at(node, place + 1)) if value.name
    ]
    rows.of_one_type(node, (x, *given), info)
    size = rows.last_size(known_shape(x, info, node), x, node)
    gamma, *rest = (rows.weight_of(value, size, info, node) for value in given)
    return gamma, next(iter(rest), Weight(None))
