"""SwiGLU: Swish of one tensor times another one, in the spellings of exporters.

    y = torch.nn.functional.silu(gate) * up

Grammar; the code cites the numbers of the cases, and gates.py says where gate and up come from:

    swish :=
      1     Mul(gate, Sigmoid(gate))
      2   | Swish(gate)                    alpha is 1, as it is without the attribute
    gated :=
      3     Mul(swish, up)                 of one shape and one type: nothing is broadcast
    the operator gets :=
      4     x                              gate and up are its halves
      5   | Concat(gate, up)               they are two tensors, or halves in the other order

The operator computes in float32 and rounds once. In 16 bits the model rounds the sigmoid and Swish
as well. The result then differs by these roundings, and the report says so. Swish is not larger
than its gate, so nothing overflows in the model that does not overflow in the operator. What
underflows to 0 in 16 bits makes NaN of an infinite `up`. That all numbers are finite is assumed for
Ascend; without this assumption 16 bits are declined.

Left alone is x * sigmoid(1.702 x), which is another function, and a Swish that anything else reads.
"""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import Options
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.around.gates import multiplied, source
from fa_compiler.passes.around.records import Activation, expect_finite, is_float
from fa_compiler.passes.ir.nodes import (
    SIXTEEN_BITS,
    float_attr,
    is_op,
    only_reader,
    operand_at,
    operand_orders,
)
from fa_compiler.passes.values.shapes import ShapeInfo


def is_anchor(node: ir.Node) -> bool:
    """May this be the gate of a gated activation?"""
    return is_op(node, "Sigmoid", "Swish")


def activations(node: ir.Node, info: ShapeInfo, options: Options) -> list[Activation]:
    """The gated activation around a Sigmoid or a Swish; none where there is none. Raises
    Decline."""
    gate = operand_at(node, 0)
    swish = _swish(node, gate)
    product = None if swish is None else multiplied(swish.outputs[0], gate, info)  # 3
    if swish is None or product is None:
        return []
    last, up = product
    nodes = tuple(dict.fromkeys((node, swish, last)))
    found = source(gate, up, nodes, info)
    if found is None:
        return []
    dtype = is_float(gate, info, node)
    if info.dtype(up) != dtype:
        raise Decline(Code.DTYPE, "the two operands have different types", last)
    expect_finite(dtype, options, node)
    rounded, result = dtype in SIXTEEN_BITS, last.outputs[0]
    if found.whole is not None and found.gate_first:  # 4
        attrs = {"dim": found.dim}
        return [
            Activation(
                node, "SwiGlu", attrs, (found.whole,), result, (*found.nodes, *nodes), rounded
            )
        ]
    return [Activation(node, "SwiGlu", {"dim": -1}, (gate, up), result, nodes, rounded)]  # 5


def _swish(node: ir.Node, gate: ir.Value) -> ir.Node | None:
    """The node that gives Swish of the gate; None where the node computes something else, or others
    read it."""
    if is_op(node, "Swish"):  # 2
        return node if float_attr(node, "alpha", 1.0) == 1.0 else None
    product = only_reader(node.outputs[0])
    return product if (gate, node.outputs[0]) in operand_orders(product, "Mul") else None  # 1
