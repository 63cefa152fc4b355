"""Where the two operands of a gated activation come from, and whether an operator gets them as one
tensor.

Grammar; the code cites the numbers of the cases:

    gate, up :=
      1     Split(x) -> gate, up           two halves of equal size
      2   | Slice(x), Slice(x)             the same, by their bounds
      3   | the halves of x in the other order
      4   | products by weights            MatMul, Gemm, or one of them and a bias: two tensors,
                                           which a Concat joins

Nothing else reads the halves: an operator that reads x would compute them again. Other gated
products (a state-space model's gate, a channel's scale) are left alone: a Concat of what other
operators compute would cost what the operator saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.around.halves import halves_of
from fa_compiler.passes.ir.nodes import (
    distinct_consumers,
    is_op,
    is_weight,
    only_reader,
    operand_beside,
    operand_orders,
)
from fa_compiler.passes.values.shapes import ShapeInfo

PRODUCTS = ("MatMul", "Gemm")


@dataclass(frozen=True)
class Source:
    """The tensor whose halves along the axis `dim`, counted from the back, the two operands are,
    and the nodes that cut it; without one, they are two tensors, to be joined along their last
    axis. `gate_first` tells the order of the halves."""

    whole: ir.Value | None = None
    dim: int = -1
    gate_first: bool = True
    nodes: tuple[ir.Node, ...] = ()


def source(
    gate: ir.Value, up: ir.Value, nodes: Sequence[ir.Node], info: ShapeInfo
) -> Source | None:
    """Where the operands come from that only `nodes` read; None for other places."""
    for gate_first in (True, False):
        # 1, 2 and 3
        halves = halves_of(gate, up, info) if gate_first else halves_of(up, gate, info)
        if halves is not None:
            alone = all(is_read_by(value, nodes) for value in (gate, up))
            return Source(halves.whole, halves.axis, gate_first, halves.nodes) if alone else None
    return Source() if _is_product(gate) and _is_product(up) else None  # 4


def multiplied(value: ir.Value, gate: ir.Value, info: ShapeInfo) -> tuple[ir.Node, ir.Value] | None:
    """The product of what is made of the gate with another tensor of its shape, which is all that
    reads it, and this tensor; None where there is none."""
    product, shape = only_reader(value), info.shape(gate)
    up = operand_beside(product, value, "Mul")
    if product is None or up is None or up is gate or not shape or info.shape(up) != shape:
        return None
    return product, up


def is_read_by(value: ir.Value, nodes: Sequence[ir.Node]) -> bool:
    """Do only these nodes read a value, which is no output?"""
    return {*distinct_consumers(value)} <= {*nodes} and not value.is_graph_output()


def _is_product(value: ir.Value) -> bool:
    """Is this a product by a weight, with or without a bias?"""
    node = value.producer()
    biases = [one for one, other in operand_orders(node, "Add") if is_weight(other)]
    if biases:
        node = biases[0].producer()
    return is_op(node, *PRODUCTS)
