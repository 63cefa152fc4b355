"""Rotary positions: pairs of numbers are rotated by an angle that grows with the token, in the spellings of exporters.

    x1, x2 = x[..., : d // 2], x[..., d // 2 :];  y = x * cos + torch.cat((-x2, x1), -1) * sin

Grammar; the code cites the numbers of the cases:

    rotated :=
      1     Concat(Neg(x2), x1)            along the last axis; x1 and x2 are the halves of x, by Split or by Slices
    result :=
      2     Add(Mul(x, cos), Mul(rotated, sin))
    x, cos and sin :=
      3     [B, N, S, D] and [1 or B, 1, S, D]         heads in front of the tokens
      4   | [B, S, N, D] and [1 or B, S, 1, D]         tokens in front of the heads
    x, where heads stand in front :=
      5     Transpose(z)                   of these two axes, and read here only: the operator reads z
      6   | x                              it is transposed

The operator tells the tokens from the heads by the shape of cos. Where heads stand in front, A2 and A3 take few of them
for each token. Open sizes do not prove this, and a decoder of one token breaks it. So the operator always gets the
tokens in front. A Transpose that is made for this moves the tensor once; the nodes that it replaces do so six times.

The sizes of cos are those of x, or 1: this is proven, because the operator does not broadcast in other ways. What is
computed is the same, operation by operation. In 16 bits the operator may compute in float32 and round once, where the
model rounds three times; the report says so. That all numbers are finite is assumed for Ascend.

The parts of a partial rotation (rotation of the first dimensions of a head) are matched as any other tensor. Pairs of
neighbours (interleaved) and the operators RotaryEmbedding of ONNX and ONNX Runtime stay as they are.
"""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.around.halves import halves_of
from fa_compiler.passes.around.records import Rotary, is_float, known_shape
from fa_compiler.passes.ir.nodes import (
    data_readers,
    int_attr,
    is_op,
    only_reader,
    operand_at,
    permutation,
)
from fa_compiler.passes.ops.context import Shape
from fa_compiler.passes.values.patterns import Bind, Op, matches
from fa_compiler.passes.values.shapes import ShapeInfo

_ROTATED = Op("Concat", Op("Neg", Bind("second")), Bind("first"))
_RESULT = Op("Add", Op("Mul", Bind("x"), Bind("cos")), Op("Mul", _ROTATED, Bind("sin")))
SWAP = (0, 2, 1, 3)
"""The Transpose between tokens in front of heads and heads in front of tokens."""


def is_anchor(node: ir.Node) -> bool:
    """May this be the rotated tensor?"""
    return is_op(node, "Concat") and len(node.inputs) == 2 and is_op(operand_at(node, 0).producer(), "Neg")


def rotary(node: ir.Node, info: ShapeInfo) -> Rotary | None:
    """The rotary positions around a Concat; None where there are none.

    Raises:
        Decline: they are positions that the operator does not compute.
    """
    product = only_reader(node.outputs[0])
    total = None if product is None else only_reader(product.outputs[0])
    if total is None:
        return None
    for found in matches(_RESULT, total.outputs[0], info):  # 2
        halves = halves_of(found["first"], found["second"], info)  # 1
        last = len(info.shape(found["x"]) or ()) - 1
        if (
            halves is None
            or (halves.whole, halves.axis) != (found["x"], last)
            or int_attr(node, "axis", 0) not in (-1, last)
        ):
            continue
        nodes = (*halves.nodes, *found.nodes)
        return _checked(Rotary(node, found["x"], found["cos"], found["sin"], total.outputs[0], nodes, True), info)
    return None


def _checked(found: Rotary, info: ShapeInfo) -> Rotary:
    """The rotary positions with the order of their axes. Raises Decline."""
    node, shape = found.anchor, known_shape(found.x, info, found.anchor)
    dtype = is_float(found.x, info, node)
    if info.dtype(found.cos) != dtype or info.dtype(found.sin) != dtype:
        raise Decline(Code.DTYPE, "the tables of cosines and sines have another type than what is rotated", node)
    if any(_is_read_elsewhere(inner, found.nodes) for inner in found.nodes[:-1]):
        raise Decline(Code.READ_INSIDE, "a number inside of the rotation is read elsewhere, or is an output", node)
    tables = [info.shape(value) for value in (found.cos, found.sin)]
    orders = [heads_first for heads_first in (False, True) if all(_fits(shape, own, heads_first) for own in tables)]
    if not orders or tables[0] != tables[1]:
        raise Decline(Code.SHAPE, "the sizes of the tables are not proven to be those of what is rotated", node, "")
    return Rotary(
        node,
        found.x,
        found.cos,
        found.sin,
        found.result,
        found.nodes,
        orders[0],
        _behind(found, info) if orders[0] else None,
    )


def _is_read_elsewhere(node: ir.Node, nodes: tuple[ir.Node, ...]) -> bool:
    return any(
        value.is_graph_output() or any(reader not in nodes for reader in data_readers(value)) for value in node.outputs
    )


def _fits(x: Shape, table: Shape | None, heads_first: bool) -> bool:
    """Do the axes of a table have the sizes of x, or 1 where they are to be repeated?"""
    if table is None or len(x) != 4 or len(table) != 4:
        return False
    tokens, heads = (2, 1) if heads_first else (1, 2)  # 3 and 4
    one = Dim(1)
    return table[0] in (one, x[0]) and table[heads] == one and table[tokens] == x[tokens] and table[3] == x[3]


def _behind(found: Rotary, info: ShapeInfo) -> ir.Value | None:
    """What the Transpose of tokens and heads makes x from, where only the rotation reads x."""
    node = found.x.producer()
    if not is_op(node, "Transpose") or permutation(node, 4) != list(SWAP):  # 5
        return None
    alone = not found.x.is_graph_output() and all(reader in found.nodes for reader in data_readers(found.x))
    return operand_at(node, 0) if alone else None  # 6 where it is not
