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
from fa_compiler.passes.around.halves import halves_of
from fa_compiler.passes.around.records import Gated, expect_finite, is_float
from fa_compiler.passes.ir.nodes import (
    distinct_consumers,
    float_attr,
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
    one = gate.producer()
    alone = all({*distinct_consumers(value)} <= {*nodes} and not value.is_graph_output() for value in (gate, up))
    if (found := halves_of(gate, up, info)) is not None:  # 4 and 5
        return replace(apart, nodes=(*found.nodes, *nodes), whole=found.whole, dim=found.axis) if alone else None
    swapped = is_op(one, "Split") and list(one.outputs) == [up, gate]  # 7
    return apart if swapped or (_is_product(gate) and _is_product(up)) else None  # 6


def _is_product(value: ir.Value) -> bool:
    """Is this a product by a weight, with or without a bias?"""
    node = value.producer()
    biases = [one for one, other in operand_orders(node, "Add") if is_weight(other)]
    if biases:
        node = biases[0].producer()
    return is_op(node, *PRODUCTS)
