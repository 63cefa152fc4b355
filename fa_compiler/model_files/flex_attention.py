"""Writes out a FlexAttention that was not fused as its definition, because ONNX Runtime has no
kernel for it."""

from __future__ import annotations

import onnx
from onnx import inliner

from fa_compiler.checks.checker import fault
from fa_compiler.protos.subgraphs import all_nodes

FLEX = ("ai.onnx.preview", "FlexAttention")


def may_hold_flex(model: onnx.ModelProto) -> bool:
    """Whether the model or one of its functions imports the domain of FlexAttention."""
    return any(
        opset.domain == FLEX[0]
        for owner in (model, *model.functions)
        for opset in owner.opset_import
    )


def expand_flex(model: onnx.ModelProto) -> tuple[onnx.ModelProto, str] | None:
    """The model with every FlexAttention replaced by its definition, and a sentence for the report.

    None if the model has no FlexAttention, if the types of its inputs are unknown or do not fit, or
    if the model's opset is older than the operators of the definition.
    """
    names = [
        node.name or node.output[0]
        for node in all_nodes(model.graph.node)
        if (node.domain, node.op_type) == FLEX
    ]
    if not names or (result := with_definitions(model)) is None:
        return None
    # A new fault: the opset lacks an operator of the definition, or the definition contradicts the
    # declared sizes.
    if any(
        fault(result, full=full) is not None and fault(model, full=full) is None
        for full in (False, True)
    ):
        return None
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        result,
        f"{names[0]}{more}: FlexAttention is written out as its definition; ONNX Runtime has no kernel of it",
    )


def with_definitions(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """The model with every FlexAttention replaced by its definition, valid or not.

    None if the types of its inputs are unknown or do not fit.
    """
    try:
        return inliner.inline_selected_functions(model, [FLEX], inline_schema_functions=True)
    except (RuntimeError, ValueError, onnx.shape_inference.InferenceError):
        return None
