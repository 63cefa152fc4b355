"""SwiGLU: Swish of one tensor times another one, in the spellings of exporters.

    y = torch.nn.functional.silu(gate) * up

Grammar; the code cites the numbers of the cases:

    swish :=
      1     Mul(gate, Sigmoid(gate))
      2   | Swish(gate)                    alpha is 1, as it is without the attribute
    gated :=
      3     Mul(swish, up)                 of one shape and one type: nothing is broadcast
    gate, up :=
      4     Split(x) -> gate, up           two halves of equal size
      5   | Slice(x), Slice(x)             the same, by their bounds
      6   | products by weights            MatMul, Gemm, or one of them and a bias: two tensors, which a Concat joins
      7   | Split(x) -> up, gate           the halves in the other order: a Concat joins them

The operator computes in float32 and rounds once. In 16 bits the model rounds the sigmoid and Swish as well. The result
then differs by these roundings, and the report says so. Swish is not larger than its gate, so nothing overflows in the
model that does not overflow in the operator. What underflows to 0 in 16 bits makes NaN of an infinite `up`. That all
numbers are finite is assumed for Ascend; without this assumption 16 bits are declined.

Other gated products (a state-space model's gate, a channel's scale) are left alone: a Concat of what other operators
compute would cost what the operator saves. So are x * sigmoid(1.702 x), which is another function, and a Swish that
anything else reads.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import Options
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.around.records import Gated, expect_finite, is_float, known_shape
from fa_compiler.passes.ir.nodes import (
    distinct_consumers,
    float_attr,
    int_attr,
    is_op,
    is_weight,
    only_reader,
    operand_at,
    operand_orders,
)
from fa_compiler.passes.values.shapes import ShapeInfo

PRODUCTS = ("MatMul", "Gemm")


def is_anchor(node: ir.Node) -> bool:
    """May this be the gate of a gated activation?"""
    return is_op(node, "Sigmoid", "Swish")


def gated(node: ir.Node, info: ShapeInfo, options: Options) -> Gated | None:
    """The gated activation around a Sigmoid or a Swish; None where there is none. Raises Decline."""
    gate = operand_at(node, 0)
    swish = _swish(node, gate)
    last = None if swish is None else only_reader(swish.outputs[0])
    if swish is None or not is_op(last, "Mul"):
        return None
    value = swish.outputs[0]
    up = next((other for one, other in operand_orders(last, "Mul") if one is value), None)
    shape = info.shape(gate)
    if up is None or up is gate or not shape or info.shape(up) != shape:  # 3
        return None
    nodes = tuple(dict.fromkeys((node, swish, last)))
    found = _source(node, gate, up, last.outputs[0], nodes, info)
    if found is None:
        return None
    dtype = is_float(gate, info, node)
    if info.dtype(up) != dtype:
        raise Decline(Code.DTYPE, "the two operands have different types", last)
    expect_finite(dtype, options, node)
    return found


def _swish(node: ir.Node, gate: ir.Value) -> ir.Node | None:
    """The node that gives Swish of the gate; None where the node computes something else, or others read it."""
    if is_op(node, "Swish"):  # 2
        return node if float_attr(node, "alpha", 1.0) == 1.0 else None
    product = only_reader(node.outputs[0])
    return product if (gate, node.outputs[0]) in operand_orders(product, "Mul") else None  # 1


def _source(
    anchor: ir.Node, gate: ir.Value, up: ir.Value, result: ir.Value, nodes: tuple[ir.Node, ...], info: ShapeInfo
) -> Gated | None:
    """The gated activation with the place that the gate and what it multiplies come from; None for other places."""
    apart = Gated(anchor, gate, up, result, nodes)
    one, other = gate.producer(), up.producer()
    if one is None or other is None:
        return None
    alone = all({*distinct_consumers(value)} <= {*nodes} and not value.is_graph_output() for value in (gate, up))
    if one is other:
        if not is_op(one, "Split") or len(one.outputs) != 2:
            return None
        if one.outputs[0] is not gate:  # 7
            return apart
        whole, axis = operand_at(one, 0), int_attr(one, "axis", 0)
        return replace(apart, nodes=(one, *nodes), whole=whole, dim=axis) if alone else None  # 4
    if alone and (halves := _sliced(gate, up, info)) is not None:  # 5
        return replace(apart, nodes=(one, other, *nodes), whole=halves[0], dim=halves[1])
    return apart if _is_product(gate) and _is_product(up) else None  # 6


def _is_product(value: ir.Value) -> bool:
    """Is this a product by a weight, with or without a bias?"""
    node = value.producer()
    biases = [one for one, other in operand_orders(node, "Add") if is_weight(other)]
    if biases:
        node = biases[0].producer()
    return is_op(node, *PRODUCTS)


def _sliced(gate: ir.Value, up: ir.Value, info: ShapeInfo) -> tuple[ir.Value, int] | None:
    """The tensor whose first half is the gate and whose second half is the other operand, and the axis; None where
    they are no halves of one tensor."""
    first, second = _slice_bounds(gate, info), _slice_bounds(up, info)
    if first is None or second is None:
        return None
    (whole, axis, start, end, size), (source, place, middle, stop, _) = first, second
    is_half = (start, end) == (0, size // 2) and (middle, stop) == (size // 2, size) and size % 2 == 0
    return (whole, axis) if whole is source and axis == place and is_half else None


def _slice_bounds(value: ir.Value, info: ShapeInfo) -> tuple[ir.Value, int, int, int, int] | None:
    """The tensor that a Slice along one axis cuts, the axis, the bounds, and the size of the axis; None for others."""
    node = value.producer()
    if not is_op(node, "Slice"):
        return None
    whole = operand_at(node, 0)
    shape = known_shape(whole, info, node)
    numbers = [_slice_number(node, place, name, info) for place, name in enumerate(("starts", "ends", "axes"), 1)]
    start, end, axis = numbers
    step = 1 if len(node.inputs) < 5 or not operand_at(node, 4).name else _slice_number(node, 4, "steps", info)
    if start is None or end is None or axis is None or step != 1 or not -len(shape) <= axis < len(shape):
        return None
    size = shape[axis].const
    if size is None:
        return None
    first, last = (max(0, min(size, place + size if place < 0 else place)) for place in (start, end))
    return whole, axis % len(shape), first, last, size


def _slice_number(node: ir.Node, place: int, name: str, info: ShapeInfo) -> int | None:
    """The only start, end, axis or step of a Slice; None where there are several, or where it is not known."""
    if (attr := node.attributes.get(name)) is not None:
        numbers = list(attr.as_ints())
        return numbers[0] if len(numbers) == 1 else None
    number = info.integer(operand_at(node, place))
    return None if number is None else number.const
