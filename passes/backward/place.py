"""The value of the original graph that an output of a fused operator replaces."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.layout.axes import Arrangement


@dataclass(frozen=True)
class Place:
    """A value that is `factor` times the operator's output.

    `saved` is the number of copies that need not be made when this value is replaced.
    """

    value: ir.Value
    dims: Arrangement
    factor: float
    saved: int = 0
