"""ai.onnx.preview FlexAttention without modifiers: plain attention over [B, N, S, D], key heads shared by groups.

Refused: score_mod and prob_mod, whose graphs stand where the operator has no room; softmax_precision that rounds the
scores. A score_mod that caps the scores has the code of a softcap.
"""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.passes.mask import MaskPlan
from fa_compiler.passes.nodes import int_attr
from fa_compiler.passes.ready_made.call import ROUNDING_PRECISIONS, Call, Converted
from fa_compiler.passes.report import Code


def convert(call: Call) -> Converted:
    """The record of a FlexAttention node."""
    node = call.node
    modifier = node.attributes.get("score_mod")
    if modifier is not None:
        if any(inner.op_type == "Tanh" for inner in modifier.as_graph()):
            raise call.decline(Code.SOFTCAP, "score_mod caps the scores by a Tanh")
        raise call.decline(Code.SCORE_TERM, "score_mod computes the scores anew by a graph of its own")
    if "prob_mod" in node.attributes:
        raise call.decline(Code.PROBABILITY_TERM, "prob_mod computes the probabilities anew by a graph of its own")
    wide = call.info.dtype(call.needed(0)) == ir.DataType.FLOAT
    if wide and int_attr(node, "softmax_precision", 0) in ROUNDING_PRECISIONS:
        raise call.decline(Code.CAST, "softmax_precision rounds the scores to 16 bits before the softmax")
    query, key, value = (call.operand(call.needed(index), "BNSD") for index in range(3))
    scores = call.scores(query, key, value)
    attr = node.attributes.get("scale")
    scale = None if attr is None else attr.as_float()
    return Converted(call.record(query, key, value, scores, MaskPlan(), scale, "BNSD"))
