"""Operators that ONNX Runtime's inference packages cannot run.

Training graphs hold operators of the tool that made them: those of onnxruntime-training, and those
of TensorFlow for which tf2onnx has no counterpart. They stay in the result, and the report names
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import onnx
from onnx import defs

from fa_compiler.checks.checker import is_left_over
from fa_compiler.protos.subgraphs import all_nodes

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
"""Operators of onnxruntime-training that the inference packages do not register. Operators with
Grad in their name are not listed."""
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
    """One sentence for each kind of operator that ONNX Runtime's inference packages are known not
    to run."""
    local = {(function.domain, function.name) for function in model.functions}
    newest = all(
        opset.version <= defs.onnx_opset_version()
        for opset in model.opset_import
        if not opset.domain
    )
    training: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    for node in all_nodes(model.graph.node):
        if (node.domain, node.op_type) in local:
            continue
        if node.domain == TRAINING_DOMAIN and (
            "Grad" in node.op_type or node.op_type in TRAINING_ONLY
        ):
            training[node.op_type] += 1
        elif node.domain in ("", "ai.onnx") and newest and not _is_operator(node):
            unknown[node.op_type] += 1
    found: list[str] = []
    if training:
        found.append(
            f"runs with onnxruntime-training only: {_listed(training)} of {TRAINING_DOMAIN}"
        )
    if unknown:
        found.append(
            f"runs nowhere: the converter left what is no operator of ONNX: {_listed(unknown)}"
        )
    return found


def _is_operator(node: onnx.NodeProto) -> bool:
    """Whether the node is an operator of some opset, or one that ONNX Runtime has in the standard
    domain."""
    return not is_left_over(node) and (
        node.op_type in RUNTIMES_OWN or bool(defs.has(node.op_type, ""))
    )


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(
        name if count == 1 else f"{name} ({count})" for name, count in sorted(counts.items())
    )
