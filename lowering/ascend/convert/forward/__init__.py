"""From ONNX to GE: one row (`rows`) or one small function (the other files) for every ONNX operator.

A function gets a `OnnxCall` (`call.py`), emits GE operators and returns the tensors of the node's outputs. It raises
CannotMapError where the node has no counterpart, and may not approximate.
"""

from __future__ import annotations

from fa_compiler.lowering.ascend.convert.forward import (  # noqa: F401  imported for the functions they register
    contractions,
    elementwise,
    fused,
    generate,
    indexing,
    layout,
    norms,
    quantized,
    reductions,
    rows,
    training,
    windows,
)
from fa_compiler.lowering.ascend.convert.forward.call import HANDLERS, OnnxCall

__all__ = ["HANDLERS", "OnnxCall"]
