"""Softmaxes of quantised models that are no anchors, for they compute on 8-bit numbers: the report names them.

1 QLinearSoftmax(scores, ...)       com.microsoft, as ONNX Runtime's quantiser writes it (QuantFormat.QOperator)
"""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.passes.decline import Decline
from fa_compiler.passes.facts import Facts
from fa_compiler.passes.layout.axes import AxisSpace
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.matching.probability_path import reaches_product
from fa_compiler.passes.matching.scores import QUANTISED_ADVICE
from fa_compiler.passes.report import Code


def is_integer_softmax(node: ir.Node) -> bool:
    """Case 1: is this a softmax from quantised numbers to quantised numbers?"""
    return (node.domain, node.op_type) == ("com.microsoft", "QLinearSoftmax")


def integer_softmax(node: ir.Node, facts: Facts) -> Decline:
    """Why it is left as it is."""
    if not reaches_product(node.outputs[0], Viewer(facts, AxisSpace())):
        return Decline(Code.NOT_ATTENTION, "no product with values follows this softmax", node)
    reason = f"{node.op_type} computes on 8-bit numbers, which the operator does not take"
    return Decline(Code.DTYPE, reason, node, QUANTISED_ADVICE)
