"""GE operators that are one ONNX operator. All their attributes must have their defaults."""

from __future__ import annotations

from fa_compiler.lowering.ascend.convert.backward.ge_call import HANDLERS, GeCall
from fa_compiler.lowering.ascend.convert.same import SAME

ROWS = {
    **dict(zip(SAME, SAME, strict=True)),
    "GreaterEqual": "GreaterOrEqual",
    "Identity": "Identity",
    "Invert": "BitwiseNot",
    "IsInf": "IsInf",
    "IsNan": "IsNaN",
    "LessEqual": "LessOrEqual",
    "LogicalAnd": "And",
    "LogicalNot": "Not",
    "LogicalOr": "Or",
    "Maximum": "Max",
    "Minimum": "Min",
    "Pow": "Pow",
    "SelectV2": "Where",
    "TensorScatterUpdate": "ScatterND",
}
"""The ONNX operator of each GE operator. Its inputs are those of the prototype, in the same
order."""


def _row(call: GeCall) -> str:
    return call.node(ROWS[call.op.type], *map(call.x, call.spec.input_names))


HANDLERS.update(dict.fromkeys(ROWS, _row))
