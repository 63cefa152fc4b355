"""A GE graph as an ONNX model, to compare results: the way back from the conversion.

The meaning of an operator is in `lowering/ascend/convert/backward/` if its types and shapes are inferred from it. If
they follow from a rule of its own, the meaning is in `meanings.py` here. `call.py` makes the nodes, and `graph.py` goes
through the graph.
"""

from __future__ import annotations

from tools.ge_to_onnx.graph import from_ge

__all__ = ["from_ge"]
