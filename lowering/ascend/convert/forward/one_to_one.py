"""ONNX operators without attributes that are one GE operator with the same inputs in the same order.

The attributes of the GE operator keep their defaults, which give ONNX's meaning: Exp and Log have base -1 (e), scale 1
and shift 0; Round has decimals 0, and rounds ties to even as in ONNX.
"""

from __future__ import annotations

from fa_compiler.lowering.ascend.convert.emit import Tensor
from fa_compiler.lowering.ascend.convert.forward.onnx_call import HANDLERS, STANDARD, OnnxCall

ROWS = {
    "Abs": "Abs",
    "Acos": "Acos",
    "Acosh": "Acosh",
    "Add": "Add",
    "And": "LogicalAnd",
    "Asin": "Asin",
    "Asinh": "Asinh",
    "Atan": "Atan",
    "Atanh": "Atanh",
    "BitwiseAnd": "BitwiseAnd",
    "BitwiseNot": "Invert",
    "BitwiseOr": "BitwiseOr",
    "BitwiseXor": "BitwiseXor",
    "Ceil": "Ceil",
    "Cos": "Cos",
    "Cosh": "Cosh",
    "Equal": "Equal",
    "Erf": "Erf",
    "Exp": "Exp",
    "Floor": "Floor",
    "Greater": "Greater",
    "GreaterOrEqual": "GreaterEqual",
    "HardSwish": "HardSwish",
    "IsNaN": "IsNan",
    "Less": "Less",
    "LessOrEqual": "LessEqual",
    "Log": "Log",
    "Mish": "Mish",
    "Mul": "Mul",
    "Neg": "Neg",
    "Not": "LogicalNot",
    "Or": "LogicalOr",
    "Range": "Range",
    "Reciprocal": "Reciprocal",
    "Relu": "Relu",
    "Round": "Round",
    "Sigmoid": "Sigmoid",
    "Sign": "Sign",
    "Sin": "Sin",
    "Sinh": "Sinh",
    "Softplus": "Softplus",
    "Softsign": "Softsign",
    "Sqrt": "Sqrt",
    "Sub": "Sub",
    "Tan": "Tan",
    "Tanh": "Tanh",
    "Tile": "Tile",
    "Where": "SelectV2",
}
"""The GE operator of each ONNX operator."""


def _row(call: OnnxCall) -> Tensor:
    return call.emitter.op(ROWS[call.node.op_type], *call.inputs, out=call.out())


HANDLERS.update({(STANDARD, op_type): _row for op_type in ROWS})
