"""Operators that move elements, which are inserted behind a DequantizeLinear.

    f(DequantizeLinear(x, scale, zero point)) = DequantizeLinear(f(x), scale, zero point)

`scale` and `zero point` are one number, and f moves elements:

    f      := MOVING | f, then f | gone
    gone   := Identity | Dropout (inference) | Cast(T -> T) | Mul and Div by 1 | Add and Sub of 0

Both sides are equal, because DequantizeLinear treats each element alone. They differ in what ONNX
Runtime makes of them. Its optimiser copies the quantisation behind each Reshape, Transpose,
Squeeze, Unsqueeze and Slice that follows a DequantizeLinear (QDQPropagationTransformer), as if
these operators ran on integers:

    DequantizeLinear(x) -> f    becomes    DequantizeLinear(x) -> f -> QuantizeLinear ->
                                           DequantizeLinear

    integers                     opset      what comes out
    ---------------------------  ---------  -------------------------------------------------------------------
    int8, int32, no zero point   up to 20   wrong: the new QuantizeLinear gives uint8, and negative numbers become 0
    int8, a zero point           21 on      no session: its int8 is changed to uint8, but not its output_dtype
    int32                        any        wrong, or no session: no QuantizeLinear gives int32

So an operator that is inserted is put in front of the DequantizeLinear, where nothing is copied. It
also moves fewer bytes there. Operators in `gone` are removed before the quantisation is copied, so
they do not separate the two.

What stays behind the DequantizeLinear: integers without kernels for these operators (4 bits,
float8), for which the copy is right, and more than one scale (by axis or by block), which are not
copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ir.nodes import inputs_of, is_op, operand_at
from fa_compiler.passes.ops.elementwise import unchanged_operand
from fa_compiler.passes.ops.movers import LAYOUT_OPS, REPEATS
from fa_compiler.passes.ops.moves import (
    Converted,
    Cut,
    Picked,
    Same,
    Unpadded,
    move_of,
    operators_of,
)
from fa_compiler.passes.values.shapes import ShapeInfo

COPIED_BEHIND = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice")
"""The operators that ONNX Runtime copies a quantisation behind."""
LONGEST = 64
"""The most operators between that are looked through."""
MOVING = (*LAYOUT_OPS, *REPEATS, *operators_of(Cut, Picked))
"""The operators that are put in front: those of COPIED_BEHIND, and those that ONNX Runtime may
remove or turn into one of them."""
INTEGERS = tuple(
    getattr(ir.DataType, name) for name in ("INT8", "UINT8", "INT16", "UINT16", "INT32")
)
"""The integers that all operators of MOVING take."""
DOMAINS = ("", "ai.onnx", "com.microsoft")
"""The domains that have a DequantizeLinear."""
PLACES = ("axis", "block_size")
"""Attributes of DequantizeLinear that mean nothing where there is one scale."""


@dataclass(frozen=True)
class Dequantised:
    """A value that is `moves`, the first one first, of what `node`, a DequantizeLinear, makes of
    `integers`."""

    integers: ir.Value
    node: ir.Node
    moves: tuple[ir.Node, ...]

    @property
    def attributes(self) -> Mapping[str, int | float | str]:
        """The attributes of a DequantizeLinear in another place."""
        return {
            name: attr.value for name, attr in self.node.attributes.items() if name not in PLACES
        }


def dequantised(value: ir.Value | None, info: ShapeInfo) -> Dequantised | None:
    """What a value is made of, if the operators in front of it only move elements behind a
    DequantizeLinear with one scale; else None."""
    moves: list[ir.Node] = []
    for _ in range(LONGEST):
        if value is None or (node := value.producer()) is None:
            return None
        if node.op_type == "DequantizeLinear" and node.domain in DOMAINS:
            integers = operand_at(node, 0)
            if info.dtype(integers) not in INTEGERS or not _has_one_scale(node, info):
                return None
            return Dequantised(integers, node, tuple(reversed(moves)))
        passed_on = _operand_passed_on(node, value, info)
        if passed_on is None and is_op(node, *MOVING):
            moves.append(node)
            passed_on = node.inputs[0]
        value = passed_on
    return None


def _has_one_scale(node: ir.Node, info: ShapeInfo) -> bool:
    """Are scale and zero point one number each?"""
    return all(info.shape(value) in ((), (Dim(1),)) for value in inputs_of(node)[1:])


def _operand_passed_on(node: ir.Node, value: ir.Value, info: ShapeInfo) -> ir.Value | None:
    """The operand of an operator that ONNX Runtime removes, because it changes nothing; None for
    other operators."""
    if value is not node.outputs[0]:
        return None
    move = move_of(node, info)
    if isinstance(move, Converted) and info.dtype(move.source) != info.dtype(value):
        return None
    if isinstance(move, Same) and not isinstance(move, Unpadded):
        return move.source
    return unchanged_operand(node, info)
