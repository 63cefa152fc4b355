"""ONNX operators without attributes that are one GE operator with the same inputs in the same
order.

The attributes of the GE operator keep their defaults, which give ONNX's meaning: Exp and Log have
base -1 (e), scale 1 and shift 0; Round has decimals 0, and rounds ties to even as in ONNX.
"""

from __future__ import annotations

from fa_compiler.lowering.ascend.convert.emit import Tensor
from fa_compiler.lowering.ascend.convert.forward.onnx_call import HANDLERS, STANDARD, OnnxCall
from fa_compiler.lowering.ascend.convert.same import SAME

ROWS = {
    **dict(zip(SAME, SAME, strict=True)),
    "And": "LogicalAnd",
    "BitwiseNot": "Invert",
    "GreaterOrEqual": "GreaterEqual",
    "IsNaN": "IsNan",
    "LessOrEqual": "LessEqual",
    "Not": "LogicalNot",
    "Or": "LogicalOr",
    "Where": "SelectV2",
}
"""The GE operator of each ONNX operator."""


def _row(call: OnnxCall) -> Tensor:
    return call.emitter.op(ROWS[call.node.op_type], *call.inputs, out=call.out())


HANDLERS.update({(STANDARD, op_type): _row for op_type in ROWS})
