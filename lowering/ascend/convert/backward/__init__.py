"""From GE to ONNX: the computation of each GE operator in operators of ONNX opset 20.

The functions follow the definitions of GE's operators and not the forward table. A wrong attribute
or a wrong order of inputs in that table then gives another result here. An attribute that a
function does not read must have its default. `HANDLERS` has the function of each operator whose
types and shapes are inferred from it. Those of the others are in `tools/ge_to_onnx/`, which makes
models of whole graphs, for tests.
"""

from __future__ import annotations

from fa_compiler.lowering.ascend.convert.backward import (  # noqa: F401  imported for the functions they register
    elementwise,
    fused,
    gradients,
    indexing,
    linear,
    movement,
    one_to_one,
    reductions,
    windows,
)
from fa_compiler.lowering.ascend.convert.backward.ge_call import HANDLERS, OPSET, GeCall

__all__ = ["HANDLERS", "OPSET", "GeCall"]
