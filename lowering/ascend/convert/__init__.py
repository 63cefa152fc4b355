"""The conversion of ONNX to GE: `to_ge`, by the tables in `forward`. What GE's operators mean in
ONNX is in `backward`.

The tables of the two directions were written independently, so a round trip tests both. Only the
operators that have one name in ONNX and GE stand in a common list (`same.py`).
"""

from __future__ import annotations

from fa_compiler.lowering.ascend.convert.errors import UnmappedError, UnmappedNode
from fa_compiler.lowering.ascend.convert.to_ge import is_convertible, to_ge

__all__ = ["UnmappedError", "UnmappedNode", "is_convertible", "to_ge"]
