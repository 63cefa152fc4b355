"""Rows divided by the root of the mean of their squares, in the spellings of exporters: RMSNorm and
LayerNorm share it.

Grammar; the code cites the numbers of the cases:

    square :=
      1     Mul(x, x)
      2   | Pow(x, 2)
    mean :=
      3     ReduceMean(square)              along the last axis, which stays with size 1; of three
                                            axes also as GlobalAveragePool
    floor :=
      4     Add(mean, epsilon)              one number, at least 0 and the same in every run
      5   | mean                            epsilon is 0
    root :=
      6     Sqrt(floor) | Pow(floor, 0.5)
    rate :=
      7     Reciprocal(root) | Div(1, root)
      8   | Pow(floor, -0.5)
    normalised :=
      9     Mul(x, rate)
     10   | Div(x, root)

All of it is float32, as in the operators. An overflow of the square makes the rate 0 in both, and a
row of zeros without epsilon is NaN in both. A square in 16 bits is declined: in float16 it
overflows from 256 on, where the operator does not. What follows are the weights: a vector as long
as the last axis, or with axes of 1 in front of it. Neither they nor the numbers above make the
result larger than x, or give it more axes.

     11     Mul(normalised, gamma)          in either order; 1 everywhere without it
     12     Add(scaled, beta)               in either order, for LayerNorm; 0 everywhere without it.
                                            What else has this shape may be added in a model of one
                                            token, so beta is constant
x in 16 bits is cast to float32, and there are two kinds of places for the cast back:

     13   | x = Cast(h), the rows cast to h's type, then weights of 16 bits
                                            the model rounds in between, and the operator does not;
                                            the report says so
     14   | x = Cast(h), the result cast to h's type      the weights are float32, or Cast(w) of h's
                                            type: the operator rounds once, too

Without a cast back, the norm is one of float32. Where x stands twice, it may be computed twice. A
Cast to the type that a value has already is looked through.

Weights that are computed from constants (1 + weight in Gemma) are computed here, with the roundings
of the model.

What the nodes in between give is read by nobody else; else the norm would be computed twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import ml_dtypes  # noqa: F401  makes NumPy know bfloat16
import numpy as np
import onnx_ir as ir

from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.around.records import FLOAT, Norm, SummedNorm, Weight, is_float, known_shape
from fa_compiler.passes.ir.nodes import (
    ABSENT,
    SIXTEEN_BITS,
    certain,
    constant,
    distinct_consumers,
    equal_values,
    int_attr,
    is_op,
    is_read,
    is_weight,
    nodes_of_type,
    only_reader,
    operand_at,
    operand_beside,
    operand_orders,
    operands,
    others_of,
    places_of,
)
from fa_compiler.passes.ops.context import Shape
from fa_compiler.passes.ops.movers import LAYOUT_OPS
from fa_compiler.passes.ops.moves import moved_array, plain_move
from fa_compiler.passes.values.patterns import Bind, Match, Number, OneOf, Op, is_closed, match
from fa_compiler.passes.values.shapes import ShapeInfo

MEANS = ("ReduceMean", "GlobalAveragePool")
_X = Bind("x")
_SQUARE = OneOf((Op("Mul", _X, _X), Op("Pow", _X, Number(2.0))))  # 1 and 2
_MOVING = (*LAYOUT_OPS, "Cast")
"""The operators that move the constants of which a weight is the sum."""


def squared(node: ir.Node, info: ShapeInfo) -> Match | None:
    """What a node takes the mean of the squares of, as `x`; None for another node."""
    return match(_SQUARE, node.inputs[0], info) if is_op(node, *MEANS) else None


def normalised(mean: ir.Node, info: ShapeInfo) -> Norm | None:
    """The rows divided by the root of the mean of their squares, around this mean; None where there
    are none."""
    found = certain(squared(mean, info))
    floor = floor_of(mean, info)
    last = next(_to_normalised(floor.value, found["x"], info), None)
    if last is None:
        return None
    nodes = (*found.nodes, mean, *floor.nodes, *last)
    return Norm(mean, found["x"], Weight(None), floor.epsilon, last[-1].outputs[0], nodes)


@dataclass(frozen=True)
class Floor:
    """A mean plus a number that is never negative, and the node that adds it."""

    value: ir.Value
    epsilon: float
    nodes: tuple[ir.Node, ...]


def floor_of(mean: ir.Node, info: ShapeInfo) -> Floor:
    """What the root is taken of."""
    value = mean.outputs[0]
    for reader in distinct_consumers(value):
        if is_op(reader, "Add") and (number := _other_number(reader, value, info)) is not None:  # 4
            return Floor(reader.outputs[0], number, (reader,))
    return Floor(value, 0.0, ())  # 5


def expect_norm(norm: Norm, x: ir.Value, info: ShapeInfo) -> None:
    """Raises Decline where the operators do not compute a norm of x that is written out."""
    mean, shape = norm.anchor, known_shape(x, info, norm.anchor)
    expect_last_axis(mean, shape)  # 3
    if (dtype := is_float(x, info, mean)) != FLOAT:
        reason = f"the squares are {dtype.name}: they overflow or are rounded where the operator's are not"
        raise Decline(Code.DTYPE, reason, mean, "export again with norms in float32")
    last_size(shape, x, mean)
    if info.shape(norm.result) != shape:
        reason = "a number inside of the norm has more axes than what is normalised, or larger ones"
        raise Decline(Code.SHAPE, reason, norm.nodes[-1], "")
    if not is_closed(norm.nodes):
        raise Decline(
            Code.READ_INSIDE, "a number inside of the norm is read elsewhere, or is an output", mean
        )
    expect_epsilon(norm.epsilon, mean)


def expect_last_axis(mean: ir.Node, shape: Shape) -> None:
    """Raises Decline for a mean that is not along the last axis alone, or that drops it."""
    pooled = is_op(mean, "GlobalAveragePool") and len(shape) == 3
    reduced = is_op(mean, "ReduceMean") and places_of(mean, len(shape)) == [len(shape) - 1]
    if not pooled and not (reduced and int_attr(mean, "keepdims", 1)):
        raise Decline(Code.SHAPE, "the mean is not along the last axis alone", mean, "")


def _to_normalised(floor: ir.Value, x: ir.Value, info: ShapeInfo) -> Iterator[list[ir.Node]]:
    """The ways from the mean square to what divides x by its root, as the nodes on them."""
    for rate, nodes in rates(floor, info):
        yield from ([*nodes, last] for last in _multiplying(rate, x))
    for root in _roots(floor, info):
        for node in nodes_of_type(distinct_consumers(root.outputs[0]), "Div"):  # 10
            divided, divisor = operands(node)
            if divisor is root.outputs[0] and equal_values(divided, x):
                yield [root, node]


def rates(floor: ir.Value, info: ShapeInfo) -> Iterator[tuple[ir.Value, list[ir.Node]]]:
    """The reciprocals of the root, and the nodes that compute them."""
    for root in _roots(floor, info):
        for node in distinct_consumers(root.outputs[0]):
            # 7
            if is_op(node, "Reciprocal") or (
                is_op(node, "Div") and info.scalar(operand_at(node, 0)) == 1.0
            ):
                yield node.outputs[0], [root, node]
    for node in distinct_consumers(floor):
        if _is_power(node, -0.5, info):  # 8
            yield node.outputs[0], [node]


def _roots(floor: ir.Value, info: ShapeInfo) -> Iterator[ir.Node]:
    """The nodes that take the root."""  # 6
    return (
        node
        for node in distinct_consumers(floor)
        if is_op(node, "Sqrt") or _is_power(node, 0.5, info)
    )


def _is_power(node: ir.Node, exponent: float, info: ShapeInfo) -> bool:
    """Does a node raise something to this power?"""
    return is_op(node, "Pow") and info.scalar(operand_at(node, 1)) == exponent


def _multiplying(rate: ir.Value, x: ir.Value) -> Iterator[ir.Node]:
    """The products of x and its rate."""
    for node in distinct_consumers(rate):
        # 9
        if any(
            other is rate and equal_values(one, x) for one, other in operand_orders(node, "Mul")
        ):
            yield node


# What follows the normalised rows.


def with_ends(norm: Norm, narrow: ir.Value | None, info: ShapeInfo) -> Iterator[Norm]:
    """A norm of float32 with what follows it, the most first: the casts of 16 bits, and the
    weights. `narrow` is what is cast to x."""
    wide = [*_with_weights(norm, info)]
    if narrow is not None:
        yield from _of_narrow(wide, narrow, info)
    yield from reversed(wide)


def cast_back(norm: Norm, narrow: ir.Value, info: ShapeInfo) -> Iterator[Norm]:
    """The same, as far as it ends in 16 bits."""
    return _of_narrow([*_with_weights(norm, info)], narrow, info)


def _of_narrow(wide: Sequence[Norm], narrow: ir.Value, info: ShapeInfo) -> Iterator[Norm]:
    """The norms of a tensor of 16 bits that is cast to float32 and back."""
    dtype = info.dtype(narrow)
    for norm in reversed(wide):
        if (cast := _cast_behind(norm, dtype, info)) is None:
            continue
        ending = _of_type(norm, dtype, info)  # 14
        ending = replace(ending, x=narrow, result=cast.outputs[0], nodes=(*norm.nodes, cast))
        for longer in reversed([*_with_weights(ending, info)]):
            yield longer if longer is ending else replace(longer, rounded=True)  # 13


def _with_weights(norm: Norm, info: ShapeInfo) -> Iterator[Norm]:
    """A norm alone, with the weight that follows it, and with the bias behind that, as far as there
    are such, of one type."""
    yield norm
    if norm.beta.is_given:
        return
    if not norm.gamma.is_given and (weighted := _times_weight(norm, info)) is not None:
        yield (norm := weighted)
    if norm.centred and (whole := _plus_bias(norm, info)) is not None:
        yield whole


def _of_type(norm: Norm, dtype: ir.DataType | None, info: ShapeInfo) -> Norm:
    """A norm with the weights before their casts to float32, if all of them are cast from vectors
    of this type."""
    gamma, beta = (_before_cast(weight, dtype, info) for weight in (norm.gamma, norm.beta))
    return norm if gamma is None or beta is None else replace(norm, gamma=gamma, beta=beta)


def _before_cast(weight: Weight, dtype: ir.DataType | None, info: ShapeInfo) -> Weight | None:
    """A weight before its cast to float32; None for one that is not cast from a vector of this
    type."""
    if not weight.is_given:
        return weight
    source = narrow_source(weight.value or ABSENT, info)
    fits = source is not None and info.dtype(source) == dtype and len(info.sizes(source)) == 1
    return Weight(source) if fits else None


def _cast_behind(norm: Norm, dtype: ir.DataType | None, info: ShapeInfo) -> ir.Node | None:
    """The Cast to a type that is all that reads a norm; None where something else does."""
    reader = only_reader(_behind_idle_casts(norm.result, info))
    return reader if is_op(reader, "Cast") and info.dtype(reader.outputs[0]) == dtype else None


def _times_weight(norm: Norm, info: ShapeInfo) -> Norm | None:
    """A norm with the product by a weight that is all that reads it; None where there is none."""
    found = _other_operand(norm, "Mul", info)  # 11
    if found is None:
        return None
    reader, other = found
    gamma = weight_of(other, _size(norm, info), info, norm.anchor)
    return replace(norm, gamma=gamma, result=reader.outputs[0], nodes=(*norm.nodes, reader))


def _plus_bias(norm: Norm, info: ShapeInfo) -> Norm | None:
    """A norm with the sum with a bias that is all that reads it; None where there is none."""
    found = _other_operand(norm, "Add", info)  # 12
    if found is None:
        return None
    reader, other = found
    if not is_weight(other) and _computed(other) is None:
        return None
    beta = weight_of(other, _size(norm, info), info, norm.anchor)
    if norm.gamma.is_given and type_of(norm.gamma, info) != type_of(beta, info):
        return None
    return replace(norm, beta=beta, result=reader.outputs[0], nodes=(*norm.nodes, reader))


def type_of(weight: Weight, info: ShapeInfo) -> ir.DataType | None:
    """The type of a weight; None where there is no weight."""
    if weight.numbers is not None:
        return ir.DataType.from_numpy(weight.numbers.dtype)
    return info.dtype(weight.value)


def _other_operand(norm: Norm, op_type: str, info: ShapeInfo) -> tuple[ir.Node, ir.Value] | None:
    """The operator that is all that reads a norm, and the vector that it combines with it; None for
    others."""
    result = _behind_idle_casts(norm.result, info)
    reader = only_reader(result)
    if not is_op(reader, op_type):
        return None
    other = next(iter(others_of(reader, result)), ABSENT)
    if info.dtype(other) != info.dtype(result):
        return None
    keeps_shape = info.shape(reader.outputs[0]) == info.shape(result)
    fits = keeps_shape and is_vector(other, _size(norm, info), info)
    return (reader, other) if fits else None


def _size(norm: Norm, info: ShapeInfo) -> int:
    return last_size(known_shape(norm.x, info, norm.anchor), norm.x, norm.anchor)


def _behind_idle_casts(value: ir.Value, info: ShapeInfo) -> ir.Value:
    """What follows the Casts to the type that a value has already, as long as nothing else reads
    it."""
    while is_op(node := only_reader(value), "Cast") and info.dtype(node.outputs[0]) == info.dtype(
        value
    ):
        value = node.outputs[0]
    return value


def before_idle_casts(value: ir.Value, info: ShapeInfo) -> ir.Value:
    """What is cast to the type that it has already, where that makes a value."""
    while is_op(node := value.producer(), "Cast") and info.dtype(node.inputs[0]) == info.dtype(
        value
    ):
        value = operand_at(node, 0)
    return value


def narrow_source(value: ir.Value, info: ShapeInfo) -> ir.Value | None:
    """The tensor of 16 bits that is cast to a value of float32; None where there is none."""
    node = value.producer()
    if not is_op(node, "Cast") or info.dtype(value) != FLOAT:
        return None
    source = operand_at(node, 0)
    return source if info.dtype(source) in SIXTEEN_BITS else None


def sum_before(norm: Norm, info: ShapeInfo) -> SummedNorm | None:
    """A norm together with the sum that it normalises; None where it normalises something else."""
    add = norm.x.producer()
    known = all(weight.is_constant or not weight.is_given for weight in (norm.gamma, norm.beta))
    if not is_op(add, "Add") or add.graph is not norm.anchor.graph or not known:
        return None
    one, other = operands(add)
    alike = info.shape(one) == info.shape(other) is not None
    if not alike or one is other:
        return None
    return SummedNorm(norm, (one, other), norm.x, (add, *norm.nodes))


# Norms that the model has ready made.


def of_one_type(node: ir.Node, values: Sequence[ir.Value], info: ShapeInfo) -> ir.DataType:
    """The type of operands that all have one. Raises Decline."""
    dtype, *others = (is_float(value, info, node) for value in values)
    if any(other != dtype for other in others):
        raise Decline(Code.DTYPE, "the weight has another type than what is normalised", node)
    return dtype


def expect_unread(node: ir.Node, values: Sequence[ir.Value]) -> None:
    """Raises Decline where one of the values, which the operators do not give, is read."""
    if any(map(is_read, values)):
        raise Decline(Code.READ_INSIDE, "the mean or the deviation of the norm is read", node)


def expect_equal_shapes(one: ir.Value, other: ir.Value, info: ShapeInfo, node: ir.Node) -> Shape:
    """The shape of the operands of a sum. Raises Decline where it is not proven that they have
    one."""
    shape = known_shape(one, info, node)
    if info.shape(other) != shape:
        raise Decline(
            Code.SHAPE, "the operands of the sum have different shapes, or unknown ones", node, ""
        )
    return shape


# Weights and numbers.


def is_vector(value: ir.Value, size: int, info: ShapeInfo) -> bool:
    """Is this a vector of that size? Axes of 1 may stand in front of it."""
    shape = info.sizes(value)
    return len(shape) > 0 and shape[-1] == size and all(dim == 1 for dim in shape[:-1])


def weight_of(value: ir.Value, size: int, info: ShapeInfo, node: ir.Node) -> Weight:
    """The weight of a norm. Raises Decline for one of another shape."""
    if not is_vector(value, size, info):
        raise Decline(
            Code.SHAPE, f"the weight {value.name!r} is not a vector of {size} numbers", node, ""
        )
    if is_weight(value) and len(info.sizes(value)) == 1:
        return Weight(value)
    numbers = _computed(value)
    if numbers is not None:
        return Weight(None, np.ascontiguousarray(numbers.reshape(-1)))
    if len(info.sizes(value)) > 1:
        raise Decline(
            Code.SHAPE, f"the weight {value.name!r} is computed, and is not a vector", node, ""
        )
    return Weight(value)


def _computed(value: ir.Value, depth: int = 4) -> np.ndarray | None:
    """The numbers of a weight that is computed from constants, rounded as in the model; None for
    another one."""
    known = constant(value)
    node = value.producer()
    if known is not None or depth == 0:
        return known
    if is_op(node, *_MOVING):
        source = _computed(operand_at(node, 0), depth - 1)
        return None if source is None else moved_array(plain_move(node), source)
    if not is_op(node, "Add"):
        return None
    one, other = (_computed(part, depth - 1) for part in operands(node))
    if one is None or other is None or one.dtype != other.dtype:
        return None
    return np.asarray(one + other)


def _other_number(node: ir.Node, value: ir.Value, info: ShapeInfo) -> float | None:
    """The number that is added to a value; None where it is not known."""
    return info.scalar(operand_beside(node, value, "Add"))


def expect_epsilon(number: float, node: ir.Node) -> float:
    """The number that is added to the mean square. Raises Decline for one that the operators do not
    take."""
    if not 0 <= number < float("inf"):
        raise Decline(Code.ILLEGAL, f"epsilon is {number}", node, "")
    return number


def last_size(shape: Shape, x: ir.Value, node: ir.Node) -> int:
    """The size of the last axis. Raises Decline where it is open."""
    size = shape[-1].const
    if size is None:
        raise Decline(Code.SHAPE, f"the size of the last axis of {x.name!r} is not known", node, "")
    return size
