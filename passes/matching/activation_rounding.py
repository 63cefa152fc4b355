"""Roundings of scores and probabilities to 8 or 16 bits and back, as quantisers write them around every operator (QDQ).

    rounded(x) := DequantizeLinear(QuantizeLinear(x, scale, zero_point), scale, zero_point)

Scale and zero point are constants of one number, equal in both nodes; the scale is finite and greater than 0.

A rounding moves a number by up to half of the scale, and one outside of the range of the integers by more. So it is
left out only if the user says that scores and probabilities need not be rounded, by
`--assume drop-activation-quantisation`. The fused model then computes what the model computed before these roundings
were put into it. A row that is masked everywhere by -inf is then NaN, as it was in that model; the integers have no
-inf.

The roundings of query, key, value and of the result stay where they are: no attention is declined for them.

Refused: a rounding of which something else reads the integers, and another scale or zero point on the way back, which
multiplies or shifts the numbers.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.nodes import constant, data_readers, input_of, is_op
from fa_compiler.passes.options import DROP_ROUNDINGS

HINT = (
    f"fuse the model before it is quantised; or --assume {DROP_ROUNDINGS}, if scores and probabilities need not be "
    "rounded to integers"
)


def rounding_ends(node: ir.Node) -> ir.Node | None:
    """The QuantizeLinear of the rounding that this DequantizeLinear ends; None for other nodes."""
    value = input_of(node, 0) if _is(node, "DequantizeLinear") else None
    start = None if value is None else value.producer()
    return start if start is not None and rounding_starts(start) is node else None


def rounding_starts(node: ir.Node) -> ir.Node | None:
    """The DequantizeLinear of the rounding that this QuantizeLinear begins; None for other nodes."""
    if not _is(node, "QuantizeLinear") or node.outputs[0].is_graph_output():
        return None
    readers = data_readers(node.outputs[0])
    end = readers[0] if len(readers) == 1 else None
    if end is None or not _is(end, "DequantizeLinear") or end.inputs[0] is not node.outputs[0]:
        return None
    scale = constant(input_of(node, 1))
    if scale is None or scale.size != 1 or not 0.0 < float(scale.reshape(-1)[0]) < np.inf:
        return None
    return end if all(_equal(input_of(node, index), input_of(end, index)) for index in (1, 2)) else None


def _is(node: ir.Node, op_type: str) -> bool:
    """Is this such an operator, of ONNX or of com.microsoft, which has it for 16 bits?"""
    return is_op(node, op_type) or (node.domain, node.op_type) == ("com.microsoft", op_type)


def _equal(one: ir.Value | None, other: ir.Value | None) -> bool:
    """Are these equal constants of one number, or both absent?"""
    left, right = constant(one), constant(other)
    if left is None or right is None:
        return one is other is None
    return left.size == right.size == 1 and left.dtype == right.dtype and bool(left.reshape(-1) == right.reshape(-1))
