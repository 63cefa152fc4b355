"""Counts the attention blocks that other tools fuse: a helper process of coverage.py, in the interpreter that has them.

A job is a line of JSON with the path `original`, the architecture `arch` and the number of `heads`, 0 if it is unknown.
The answer maps each installed tool to {"fused": blocks, "seconds": s} or {"error": text}. A fused block is an attention
operator that the original does not have. For OpenVINO it is a ScaledDotProductAttention after the common passes or in
the graph of the CPU plugin; the larger number counts. The results of the tools are not run, so they may be wrong.
"""

from __future__ import annotations

import importlib.util
import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import onnx

from tools.processes import serve

ATTENTION = {
    "Attention",
    "MultiHeadAttention",
    "GroupQueryAttention",
    "PackedAttention",
    "PackedMultiHeadAttention",
    "DecoderMaskedMultiHeadAttention",
    "SDPA",
}


def _attentions(model: onnx.ModelProto) -> int:
    return sum(node.op_type in ATTENTION for node in _nodes(model.graph.node))


def _nodes(nodes: Iterable[onnx.NodeProto]) -> Iterable[onnx.NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g.node)


def ort_transformers(path: str, arch: str, heads: int) -> int:
    """onnxruntime.transformers.optimizer, with the model type that is nearest to the architecture, or bert.

    For most models it needs the number of heads and the hidden size. The latter is the size of the square weights.
    """
    from onnxruntime.transformers import optimizer

    kinds = sorted((kind for kind in optimizer.MODEL_TYPES if arch.startswith(kind)), key=len)
    original = onnx.load(path, load_external_data=False)
    square = Counter(each.dims[0] for each in original.graph.initializer if len(set(each.dims)) == 1 < len(each.dims))
    hidden = square.most_common(1)[0][0] if square else 0
    if heads == 0 or hidden % heads:
        heads = hidden = 0
    chosen = optimizer.optimize_model(
        path, model_type=kinds[-1] if kinds else "bert", num_heads=heads, hidden_size=hidden, opt_level=0
    )
    return _attentions(chosen.model) - _attentions(original)


def onnxscript(path: str, arch: str, heads: int) -> int:
    """onnxscript's fusions for onnxruntime."""
    import onnx_ir as ir
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    result = optimize_for_ort(ir.load(path))
    model = result[0] if isinstance(result, tuple) else result
    return _attentions(ir.to_proto(model)) - _attentions(onnx.load(path, load_external_data=False))


def openvino(path: str, arch: str, heads: int) -> int:
    """OpenVINO's SDPAFusion."""
    import openvino as ov
    from openvino._offline_transformations import apply_moc_transformations

    core = ov.Core()
    model = core.read_model(path)
    apply_moc_transformations(model, cf=False, smart_reshape=False)
    common = sum(op.get_type_name() == "ScaledDotProductAttention" for op in model.get_ops())
    compiled = core.compile_model(core.read_model(path), "CPU").get_runtime_model()
    kinds = [op.get_rt_info()["layerType"].astype(str) for op in compiled.get_ops()]
    return max(common, sum(kind == "ScaledDotProductAttention" for kind in kinds))


TOOLS: Mapping[str, tuple[str, Callable[[str, str, int], int]]] = {
    "onnxruntime.transformers": ("onnxruntime", ort_transformers),
    "onnxscript": ("onnxscript", onnxscript),
    "OpenVINO": ("openvino", openvino),
}
INSTALLED = {name: run for name, (module, run) in TOOLS.items() if importlib.util.find_spec(module)}


def answer(job: Mapping[str, Any]) -> dict[str, Any]:
    """The result of each tool for one model."""
    return {name: _tried(run, job["original"], job["arch"], job["heads"]) for name, run in INSTALLED.items()}


def _tried(run: Callable[[str, str, int], int], path: str, arch: str, heads: int) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        fused = run(path, arch, heads)
    except Exception as error:  # any failure is a result
        return {"error": f"{type(error).__name__}: {str(error).strip()[:200]}"}
    return {"fused": fused, "seconds": round(time.perf_counter() - start, 3)}


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    serve(answer, {"tools": list(INSTALLED)})
