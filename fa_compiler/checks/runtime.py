"""Operators that ONNX Runtime's inference packages cannot run.

Training graphs hold operators of the tool that made them: those of onnxruntime-training, and those of TensorFlow for
which tf2onnx has no counterpart. They stay in the result, and the report names them. A FlexAttention that was not fused
is replaced by its definition, because ONNX Runtime has no kernel for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import onnx
from onnx import defs, inliner

from fa_compiler.checks.checker import fault, is_left_over
from fa_compiler.model_files.subgraphs import graphs_of

TRAINING_DOMAIN = "com.microsoft"
TRAINING_ONLY = frozenset(
    (
        "AdamOptimizer",
        "AdamWOptimizer",
        "BatchNormInternal",
        "ConcatTraining",
        "FlattenAndUnpad",
        "Group",
        "InPlaceAccumulator",
        "InPlaceAccumulatorV2",
        "LambOptimizer",
        "MixedPrecisionScale",
        "PadAndUnflatten",
        "PassThrough",
        "ReduceAllL2",
        "ReduceSumTraining",
        "SGDOptimizer",
        "SGDOptimizerV2",
        "Scale",
        "ScaledSum",
        "ShrunkenGather",
        "SoftmaxCrossEntropy",
        "SoftmaxCrossEntropyLossInternal",
        "SparseSoftmaxCrossEntropy",
        "SplitTraining",
        "YieldOp",
        "ZeroGradient",
    )
)
"""Operators of onnxruntime-training that the inference packages do not register. Operators with Grad in their name are
not listed."""
RUNTIMES_OWN = frozenset(
    (
        "Affine",
        "Crop",
        "DynamicSlice",
        "GivenTensorFill",
        "GRUUnit",
        "ImageScaler",
        "ParametricSoftplus",
        "Scale",
        "ScaledTanh",
        "SimplifiedLayerNormalization",
    )
)
"""Operators that ONNX Runtime, but not ONNX, has in the standard domain."""


def remarks(model: onnx.ModelProto) -> list[str]:
    """One sentence for each kind of operator that ONNX Runtime's inference packages are known not to run."""
    local = {(function.domain, function.name) for function in model.functions}
    newest = all(opset.version <= defs.onnx_opset_version() for opset in model.opset_import if not opset.domain)
    training: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    for node in _nodes(model.graph):
        if (node.domain, node.op_type) in local:
            continue
        if node.domain == TRAINING_DOMAIN and ("Grad" in node.op_type or node.op_type in TRAINING_ONLY):
            training[node.op_type] += 1
        elif node.domain in ("", "ai.onnx") and newest and not _is_operator(node):
            unknown[node.op_type] += 1
    found: list[str] = []
    if training:
        found.append(f"runs with onnxruntime-training only: {_listed(training)} of {TRAINING_DOMAIN}")
    if unknown:
        found.append(f"runs nowhere: {_listed(unknown)} as the converter left it is not an operator of ONNX")
    return found


FLEX = ("ai.onnx.preview", "FlexAttention")


def may_hold_flex(model: onnx.ModelProto) -> bool:
    """Whether the model or one of its functions imports the domain of FlexAttention."""
    return any(opset.domain == FLEX[0] for owner in (model, *model.functions) for opset in owner.opset_import)


def expand_flex(model: onnx.ModelProto) -> tuple[onnx.ModelProto, str] | None:
    """The model with every FlexAttention replaced by its definition, and a sentence for the report.

    None if the model has no FlexAttention, if the types of its inputs are unknown or do not fit, or if the model's
    opset is older than the operators of the definition.
    """
    names = [node.name or node.output[0] for node in _nodes(model.graph) if (node.domain, node.op_type) == FLEX]
    if not names:
        return None
    try:
        result = inliner.inline_selected_functions(model, [FLEX], inline_schema_functions=True)
    except (RuntimeError, ValueError, onnx.shape_inference.InferenceError):
        return None
    # A new fault: the opset lacks an operator of the definition, or the definition contradicts the declared sizes.
    if any(fault(result, full=full) is not None and fault(model, full=full) is None for full in (False, True)):
        return None
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return result, f"{names[0]}{more}: FlexAttention is written out as its definition; ONNX Runtime has no kernel of it"


def _is_operator(node: onnx.NodeProto) -> bool:
    """Whether the node is an operator of some opset, or one that ONNX Runtime has in the standard domain."""
    return not is_left_over(node) and (node.op_type in RUNTIMES_OWN or bool(defs.has(node.op_type, "")))


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(name if count == 1 else f"{name} ({count})" for name, count in sorted(counts.items()))


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    pending = [graph]
    while pending:
        for node in pending.pop().node:
            yield node
            pending.extend(graphs_of(node))
