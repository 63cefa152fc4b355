"""GE operators that are one ONNX operator. All their attributes must have their defaults."""

from __future__ import annotations

from fa_compiler.lowering.ascend.convert.backward.ge_call import HANDLERS, GeCall

ROWS = {
    "Abs": ("Abs", "x"),
    "Acos": ("Acos", "x"),
    "Acosh": ("Acosh", "x"),
    "Add": ("Add", "x1 x2"),
    "Asin": ("Asin", "x"),
    "Asinh": ("Asinh", "x"),
    "Atan": ("Atan", "x"),
    "Atanh": ("Atanh", "x"),
    "BitwiseAnd": ("BitwiseAnd", "x1 x2"),
    "BitwiseOr": ("BitwiseOr", "x1 x2"),
    "BitwiseXor": ("BitwiseXor", "x1 x2"),
    "Ceil": ("Ceil", "x"),
    "Cos": ("Cos", "x"),
    "Cosh": ("Cosh", "x"),
    "Equal": ("Equal", "x1 x2"),
    "Erf": ("Erf", "x"),
    "Exp": ("Exp", "x"),
    "Floor": ("Floor", "x"),
    "Greater": ("Greater", "x1 x2"),
    "GreaterEqual": ("GreaterOrEqual", "x1 x2"),
    "HardSwish": ("HardSwish", "x"),
    "Identity": ("Identity", "x"),
    "Invert": ("BitwiseNot", "x"),
    "IsInf": ("IsInf", "x"),
    "IsNan": ("IsNaN", "x"),
    "Less": ("Less", "x1 x2"),
    "LessEqual": ("LessOrEqual", "x1 x2"),
    "Log": ("Log", "x"),
    "LogicalAnd": ("And", "x1 x2"),
    "LogicalNot": ("Not", "x"),
    "LogicalOr": ("Or", "x1 x2"),
    "Maximum": ("Max", "x1 x2"),
    "Minimum": ("Min", "x1 x2"),
    "Mish": ("Mish", "x"),
    "Mul": ("Mul", "x1 x2"),
    "Neg": ("Neg", "x"),
    "Pow": ("Pow", "x1 x2"),
    "Range": ("Range", "start limit delta"),
    "Reciprocal": ("Reciprocal", "x"),
    "Relu": ("Relu", "x"),
    "Round": ("Round", "x"),
    "SelectV2": ("Where", "condition then else"),
    "Sigmoid": ("Sigmoid", "x"),
    "Sign": ("Sign", "x"),
    "Sin": ("Sin", "x"),
    "Sinh": ("Sinh", "x"),
    "Softplus": ("Softplus", "x"),
    "Softsign": ("Softsign", "x"),
    "Sqrt": ("Sqrt", "x"),
    "Sub": ("Sub", "x1 x2"),
    "Tan": ("Tan", "x"),
    "Tanh": ("Tanh", "x"),
    "TensorScatterUpdate": ("ScatterND", "x indices updates"),
    "Tile": ("Tile", "x multiples"),
}
"""By GE operator: the ONNX operator, and GE's names of the inputs in ONNX's order."""


def _row(call: GeCall) -> str:
    op_type, names = ROWS[call.op.type]
    return call.node(op_type, *(call.x(name) for name in names.split()))


HANDLERS.update(dict.fromkeys(ROWS, _row))
