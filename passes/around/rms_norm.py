"""RMSNorm: what divides rows by their root mean square, in the spellings of exporters.

    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon);  y = weight * y

Grammar; the code cites the numbers of the cases:

    square :=
      1     Mul(x, x)
      2   | Pow(x, 2)
    mean :=
      3     ReduceMean(square)              along the last axis, which stays with size 1
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
    norm :=
     11     Mul(normalised, gamma)          a vector as long as the last axis, or with axes of 1 in front of it
     12   | normalised                      gamma is 1 everywhere
     13   | RMSNormalization(x, gamma) | SimplifiedLayerNormalization(x, gamma)     axis is the last one
     14   | SkipSimplifiedLayerNormalization(a, b, gamma)       x is the sum a + b, without a bias, of two equal shapes

All of it is float32, as in the operator. An overflow of the square makes the rate 0 in both, and a row of zeros without
epsilon is NaN in both. A square in 16 bits is declined: in float16 it overflows from 256 on, where the operator does
not. x in 16 bits is cast to float32, and there are three places for the cast back:

     15     x = Cast(h), Mul(Cast(normalised), gamma)   h and gamma of 16 bits: the model rounds normalised, and
                                                        RmsNorm does not; the report says so
     16   | x = Cast(h), Cast(Mul(normalised, gamma))   gamma is float32, or Cast(g) with g of h's type: the operator
                                                        rounds once, too
     17   | x = Cast(h), Cast(normalised)               gamma is 1

Without a cast back, the norm is one of float32. Where x stands twice, it may be computed twice. A Cast to the type that
a value has already is looked through.

Weights that are computed from constants (1 + weight in Gemma) are computed here, with the roundings of the model.

What the nodes in between give is read by nobody else; else the norm would be computed twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import ml_dtypes  # noqa: F401  makes NumPy know bfloat16
import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.around.records import FLOAT, Gamma, Norm, SummedNorm, is_float, known_shape
from fa_compiler.passes.ir.nodes import (
    SIXTEEN_BITS,
    constant,
    distinct_consumers,
    equal_values,
    float_attr,
    int_attr,
    is_op,
    is_weight,
    only_reader,
    operand_at,
    operand_orders,
    operands,
    places_of,
    source_through,
)
from fa_compiler.passes.ops.context import Shape
from fa_compiler.passes.values.patterns import Bind, Number, OneOf, Op, is_closed, match
from fa_compiler.passes.values.shapes import ShapeInfo

READY_MADE = ("RMSNormalization", "SimplifiedLayerNormalization")
SKIP = ("com.microsoft", "SkipSimplifiedLayerNormalization")
SKIP_EPSILON = 1e-12
"""What SKIP has for epsilon where it is not given."""
_X = Bind("x")
_SQUARE = OneOf((Op("Mul", _X, _X), Op("Pow", _X, Number(2.0))))  # 1 and 2
_PARTS = ("Cast", "Add", "Unsqueeze", "Identity")
"""The operators by which a weight is computed from constants."""


def is_anchor(node: ir.Node, info: ShapeInfo) -> bool:
    """May a norm be computed here: is this the mean of a square, or a norm that the model has ready made?"""
    if (node.domain, node.op_type) == SKIP or is_op(node, *READY_MADE):
        return True
    return is_op(node, "ReduceMean") and match(_SQUARE, node.inputs[0], info) is not None


def norms(node: ir.Node, info: ShapeInfo) -> list[Norm | SummedNorm]:
    """The norms that the operator at an anchor may be part of, the best first; none where it is no norm.

    Raises:
        Decline: it is a norm that the operator does not compute.
    """
    if (node.domain, node.op_type) == SKIP:  # 14
        return [_skipping(node, info)]
    if is_op(node, *READY_MADE):  # 13
        return [_ready_made(node, info)]
    plain = _written_out(node, info)
    return [] if plain is None else list(_with_ends(plain, info))


def summed(norm: Norm, info: ShapeInfo) -> SummedNorm | None:
    """A norm together with the sum that it normalises; None where it normalises something else.

    Of 16 bits only where the model rounds the normalised rows, too: so does the operator on A2 and A3.
    """
    add = norm.x.producer()
    if not is_op(add, "Add") or add.graph is not norm.anchor.graph or not norm.gamma.is_constant:
        return None
    one, other = operands(add)
    shapes = info.shape(one), info.shape(other)
    if shapes[0] is None or shapes[0] != shapes[1] or one is other:
        return None
    if info.dtype(norm.x) in SIXTEEN_BITS and not norm.rounded:
        return None
    return SummedNorm(norm, (one, other), norm.x, (add, *norm.nodes))


# Norms that the model has ready made.


def _ready_made(node: ir.Node, info: ShapeInfo) -> Norm:
    x, gamma = operand_at(node, 0), operand_at(node, 1)
    shape = known_shape(x, info, node)
    dtype = _of_one_type(node, (x, gamma), info)
    if int_attr(node, "axis", -1) % len(shape) != len(shape) - 1:
        raise Decline(Code.SHAPE, "the norm runs over more than the last axis", node, "")
    if int_attr(node, "stash_type", 1) != FLOAT:
        raise Decline(Code.DTYPE, "the norm is not computed in float32", node)
    _expect_unread(node, node.outputs[1:])
    weight = _weight(gamma, _last(shape, x, node), info, node)
    return Norm(
        node,
        x,
        weight,
        _epsilon(float_attr(node, "epsilon", 1e-5), node),
        node.outputs[0],
        (node,),
        dtype in SIXTEEN_BITS,
    )


def _skipping(node: ir.Node, info: ShapeInfo) -> SummedNorm:
    one, other, gamma = (operand_at(node, place) for place in range(3))
    shape = known_shape(one, info, node)
    dtype = _of_one_type(node, (one, other, gamma), info)
    if info.shape(other) != shape:
        raise Decline(Code.SHAPE, "the operands of the sum have different shapes, or unknown ones", node, "")
    if operand_at(node, 3).name:
        raise Decline(Code.SHAPE, "a bias is added to the sum", node, "")
    _expect_unread(node, node.outputs[1:3])
    weight = _weight(gamma, _last(shape, one, node), info, node)
    total = node.outputs[3] if len(node.outputs) > 3 else ir.Value(name="")
    epsilon = _epsilon(float_attr(node, "epsilon", SKIP_EPSILON), node)
    norm = Norm(node, total, weight, epsilon, node.outputs[0], (node,), dtype in SIXTEEN_BITS)
    return SummedNorm(norm, (one, other), total, (node,))


def _of_one_type(node: ir.Node, values: tuple[ir.Value, ...], info: ShapeInfo) -> ir.DataType:
    """The type of operands that all have one. Raises Decline."""
    dtype, *others = (is_float(value, info, node) for value in values)
    if any(other != dtype for other in others):
        raise Decline(Code.DTYPE, "the weight has another type than what is normalised", node)
    return dtype


def _expect_unread(node: ir.Node, values: Sequence[ir.Value]) -> None:
    if any(value.uses() or value.is_graph_output() for value in values):
        raise Decline(Code.READ_INSIDE, "the mean or the deviation of the norm is read", node)


# Norms that are written out.


def _written_out(mean: ir.Node, info: ShapeInfo) -> Norm | None:
    """The norm without a weight around the mean of a square; None where there is none. Raises Decline."""
    found = match(_SQUARE, mean.inputs[0], info)
    assert found is not None
    x, nodes = found["x"], [*found.nodes, mean]
    if _is_centred(x):
        return None
    epsilon, floor = 0.0, mean.outputs[0]  # 5
    for reader in distinct_consumers(floor):
        if is_op(reader, "Add") and (number := _other_number(reader, floor, info)) is not None:  # 4
            epsilon, floor = number, reader.outputs[0]
            nodes.append(reader)
            break
    last = next((steps for steps in _to_normalised(floor, x, info)), None)
    if last is None:
        return None
    nodes += last
    _check(mean, x, nodes, info)
    source = _before_idle_casts(x, info)
    return Norm(mean, source, Gamma(None), _epsilon(epsilon, mean), last[-1].outputs[0], tuple(nodes))


def _is_centred(x: ir.Value) -> bool:
    """Is x a difference from a mean? Then this is the variance of a LayerNorm, which is another operator."""
    node = source_through(x, "Cast").producer()
    return is_op(node, "Sub") and is_op(operand_at(node, 1).producer(), "ReduceMean")


def _to_normalised(floor: ir.Value, x: ir.Value, info: ShapeInfo) -> Iterator[list[ir.Node]]:
    """The ways from the mean square to what divides x by its root, as the nodes on them."""
    for node in distinct_consumers(floor):
        if is_op(node, "Sqrt") or (is_op(node, "Pow") and _number(operand_at(node, 1), info) == 0.5):  # 6
            yield from ([node, *rest] for rest in _from_root(node.outputs[0], x, info))
        elif is_op(node, "Pow") and _number(operand_at(node, 1), info) == -0.5:  # 8
            yield from ([node, last] for last in _multiplying(node.outputs[0], x))


def _from_root(root: ir.Value, x: ir.Value, info: ShapeInfo) -> Iterator[list[ir.Node]]:
    for node in distinct_consumers(root):
        if is_op(node, "Reciprocal") or (is_op(node, "Div") and _number(operand_at(node, 0), info) == 1.0):  # 7
            yield from ([node, last] for last in _multiplying(node.outputs[0], x))
        elif is_op(node, "Div") and operand_at(node, 1) is root and equal_values(operand_at(node, 0), x):  # 10
            yield [node]


def _multiplying(rate: ir.Value, x: ir.Value) -> Iterator[ir.Node]:
    """The products of x and its rate."""
    for node in distinct_consumers(rate):
        if any(other is rate and equal_values(one, x) for one, other in operand_orders(node, "Mul")):  # 9
            yield node


def _check(mean: ir.Node, x: ir.Value, nodes: list[ir.Node], info: ShapeInfo) -> None:
    """Raises Decline where the operator does not compute a norm that is written out."""
    shape = known_shape(x, info, mean)
    if places_of(mean, len(shape)) != [len(shape) - 1] or not int_attr(mean, "keepdims", 1):  # 3
        raise Decline(Code.SHAPE, "the mean is not along the last axis alone", mean, "")
    if (dtype := is_float(x, info, mean)) != FLOAT:
        reason = f"the squares are {dtype.name}: they overflow or are rounded where the operator's are not"
        raise Decline(Code.DTYPE, reason, mean, "export again with norms in float32")
    _last(shape, x, mean)
    if not is_closed(nodes):
        raise Decline(Code.READ_INSIDE, "a number inside of the norm is read elsewhere, or is an output", mean)


def _with_ends(norm: Norm, info: ShapeInfo) -> Iterator[Norm]:
    """A norm of float32 with what follows it, the most first: the casts of 16 bits, and the weight."""
    shape = known_shape(norm.x, info, norm.anchor)
    size = _last(shape, norm.x, norm.anchor)
    narrow = _narrow_source(norm.x, info)
    weighted = _times_weight(norm, size, info)
    if narrow is not None:
        yield from _of_narrow(norm, weighted, narrow, size, info)
    if weighted is not None:  # 11
        yield weighted
    yield norm  # 12


def _of_narrow(norm: Norm, weighted: Norm | None, narrow: ir.Value, size: int, info: ShapeInfo) -> Iterator[Norm]:
    """The norms of a tensor of 16 bits that is cast to float32 and back."""
    dtype = info.dtype(narrow)
    if weighted is not None and (cast := _cast_behind(weighted, dtype, info)) is not None:  # 16
        gamma = weighted.gamma
        source = None if gamma.value is None else _narrow_source(gamma.value, info)
        if source is not None and info.dtype(source) == dtype and info.shape(source) == (Dim(size),):
            gamma = Gamma(source)
        yield _ending(weighted, cast, x=narrow, gamma=gamma)
    if (cast := _cast_behind(norm, dtype, info)) is not None:
        ending = _ending(norm, cast, x=narrow)
        if (scaled := _times_weight(ending, size, info)) is not None:  # 15
            yield replace(scaled, rounded=True)
        yield ending  # 17


def _ending(norm: Norm, last: ir.Node, x: ir.Value, gamma: Gamma | None = None) -> Norm:
    """A norm that ends with one more node, and begins at another tensor."""
    nodes = (*norm.nodes, last)
    return replace(norm, x=x, gamma=gamma or norm.gamma, result=last.outputs[0], nodes=nodes)


def _cast_behind(norm: Norm, dtype: ir.DataType | None, info: ShapeInfo) -> ir.Node | None:
    """The Cast to a type that is all that reads a norm; None where something else does."""
    reader = only_reader(_behind_idle_casts(norm.result, info))
    return reader if is_op(reader, "Cast") and info.dtype(reader.outputs[0]) == dtype else None


def _times_weight(norm: Norm, size: int, info: ShapeInfo) -> Norm | None:
    """A norm with the product by a weight that is all that reads it; None where there is none."""
    result = _behind_idle_casts(norm.result, info)
    reader = only_reader(result)
    if not is_op(reader, "Mul"):
        return None
    weight = next(
        (other for one, other in operand_orders(reader, "Mul") if one is result and other is not result), None
    )
    if weight is None or info.dtype(weight) != info.dtype(result) or not _is_vector(weight, size, info):
        return None
    gamma = _weight(weight, size, info, norm.anchor)
    return replace(norm, gamma=gamma, result=reader.outputs[0], nodes=(*norm.nodes, reader))


def _behind_idle_casts(value: ir.Value, info: ShapeInfo) -> ir.Value:
    """What follows the Casts to the type that a value has already, as long as nothing else reads it."""
    while is_op(node := only_reader(value), "Cast") and info.dtype(node.outputs[0]) == info.dtype(value):
        value = node.outputs[0]
    return value


def _before_idle_casts(value: ir.Value, info: ShapeInfo) -> ir.Value:
    """What is cast to the type that it has already, where that makes a value."""
    while is_op(node := value.producer(), "Cast") and info.dtype(node.inputs[0]) == info.dtype(value):
        value = operand_at(node, 0)
    return value


def _narrow_source(value: ir.Value, info: ShapeInfo) -> ir.Value | None:
    """The tensor of 16 bits that is cast to a value of float32; None where there is none."""
    node = value.producer()
    if not is_op(node, "Cast") or info.dtype(value) != FLOAT:
        return None
    source = operand_at(node, 0)
    return source if info.dtype(source) in SIXTEEN_BITS else None


# Weights and numbers.


def _is_vector(value: ir.Value, size: int, info: ShapeInfo) -> bool:
    """Is this a vector of that size? Axes of 1 may stand in front of it."""
    shape = info.shape(value) or ()
    return len(shape) > 0 and shape[-1] == size and all(dim == 1 for dim in shape[:-1])


def _weight(value: ir.Value, size: int, info: ShapeInfo, node: ir.Node) -> Gamma:
    """The weight of a norm. Raises Decline for one of another shape."""
    if not _is_vector(value, size, info):
        raise Decline(Code.SHAPE, f"the weight {value.name!r} is not a vector of {size} numbers", node, "")
    if is_weight(value) and len(info.shape(value) or ()) == 1:
        return Gamma(value)
    numbers = _computed(value)
    if numbers is not None:
        return Gamma(None, np.ascontiguousarray(numbers.reshape(-1)))
    if len(info.shape(value) or ()) > 1:
        raise Decline(Code.SHAPE, f"the weight {value.name!r} is computed, and is not a vector", node, "")
    return Gamma(value)


def _computed(value: ir.Value, depth: int = 4) -> np.ndarray | None:
    """The numbers of a weight that is computed from constants, rounded as in the model; None for another one."""
    found = constant(value)
    node = value.producer()
    if found is not None or depth == 0 or not is_op(node, *_PARTS):
        return found
    parts = [_computed(part, depth - 1) for part in operands(node)[: 2 if node.op_type == "Add" else 1]]
    if any(part is None for part in parts):
        return None
    first = parts[0]
    assert first is not None
    if node.op_type == "Add":
        second = parts[1]
        assert second is not None
        return np.asarray(first + second) if first.dtype == second.dtype else None
    if node.op_type == "Cast":
        return first.astype(ir.DataType(int_attr(node, "to", 0)).numpy())
    return first


def _number(value: ir.Value, info: ShapeInfo) -> float | None:
    return info.scalar(value)


def _other_number(node: ir.Node, value: ir.Value, info: ShapeInfo) -> float | None:
    """The number that is added to a value; None where it is not known."""
    others = (_number(other, info) for one, other in operand_orders(node, "Add") if one is value)
    return next((number for number in others if number is not None), None)


def _epsilon(number: float, node: ir.Node) -> float:
    """The number that is added to the mean square. Raises Decline for one that the operator does not take."""
    if not 0 <= number < float("inf"):
        raise Decline(Code.ILLEGAL, f"epsilon is {number}", node, "")
    return number


def _last(shape: Shape, x: ir.Value, node: ir.Node) -> int:
    """The size of the last axis. Raises Decline where it is open."""
    size = shape[-1].const
    if size is None:
        raise Decline(Code.SHAPE, f"the size of the last axis of {x.name!r} is not known", node, "")
    return size
