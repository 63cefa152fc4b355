"""Attention operators that a model may already hold, and their conversion into FlashAttentionScore.

Each family has its file with the grammar of what it accepts. What is not converted is left as it is, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable

from fa_compiler.passes.ready_made import multi_head, onnx, packed
from fa_compiler.passes.ready_made.call import Call, Converted
from fa_compiler.passes.ready_made.names import READY_MADE, is_ready_made
from fa_compiler.passes.report import Code

__all__ = ["READY_MADE", "Call", "Converted", "convert", "is_ready_made"]

FAMILIES: dict[tuple[str, str], Callable[[Call], Converted]] = {
    ("", "Attention"): onnx.convert,
    ("ai.onnx", "Attention"): onnx.convert,
    ("com.microsoft", "Attention"): packed.convert,
    ("com.microsoft", "MultiHeadAttention"): multi_head.convert,
}


def convert(call: Call) -> Converted:
    """The record of a ready-made operator; raises Decline."""
    node = call.node
    family = FAMILIES.get((node.domain, node.op_type))
    if family is None:
        raise call.decline(Code.READY_MADE, f"{node.op_type} of domain {node.domain or 'ai.onnx'!r} is left as it is")
    return family(call)
