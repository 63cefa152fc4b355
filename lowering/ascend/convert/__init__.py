"""Conversions between ONNX and GE: `to_ge` by the tables in `forward`, and `from_ge` by those in `backward`.

The tables of the two directions were written independently, so a round trip tests both. Only the operators that have
one name in ONNX and GE stand in a common list (`same.py`).
"""

from __future__ import annotations

from fa_compiler.lowering.ascend.convert.errors import UnmappedError, UnmappedNode, UnreadableError
from fa_compiler.lowering.ascend.convert.from_ge import from_ge
from fa_compiler.lowering.ascend.convert.to_ge import is_convertible, to_ge

__all__ = ["UnmappedError", "UnmappedNode", "UnreadableError", "from_ge", "is_convertible", "to_ge"]
