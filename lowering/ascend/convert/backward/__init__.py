"""From GE to ONNX: what each GE operator computes, said in operators of ONNX opset 20.

Written from the definitions of GE's operators and not from the forward table, so that a wrong attribute or a wrong
order of inputs there gives another result here. An attribute that a function does not read must have its default.
"""

from __future__ import annotations

from fa_compiler.lowering.ascend.convert.backward import (  # noqa: F401  imported for the functions they register
    elements,
    fused,
    gradients,
    linear,
    movement,
    places,
    reductions,
    same,
    windows,
)
from fa_compiler.lowering.ascend.convert.backward.reading import MEANINGS, Reading

__all__ = ["MEANINGS", "Reading"]
