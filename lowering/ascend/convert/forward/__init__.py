"""From ONNX to GE: one row (`one_to_one`) or one small function (the other modules) for every ONNX
operator.

A function takes an `OnnxCall`, emits GE operators and returns the tensors of the node's outputs. It
raises CannotMapError if the node has no counterpart. It must not approximate.
"""

from __future__ import annotations

from fa_compiler.lowering.ascend.convert.forward import (  # noqa: F401  imported for the functions they register
    contractions,
    elementwise,
    fused,
    generate,
    hcom,
    indexing,
    movement,
    norms,
    one_to_one,
    quantized,
    reductions,
    training,
    windows,
)
from fa_compiler.lowering.ascend.convert.forward.onnx_call import HANDLERS, OnnxCall

__all__ = ["HANDLERS", "OnnxCall"]
