"""The operators of ONNX and ONNX Runtime for what is around attention, and the runtimes that are
given them.

A runtime is given an operator if it has a kernel that rounds no more than the nodes, and does not
fuse them itself, or not in the spellings of today's exporters; on ONNX Runtime's CPU only if it was
measured to be faster. Without a runtime none is given: other runtimes that take the attention may
not know the operator.

| operator | domain | computes |
| --- | --- | --- |
| SimplifiedLayerNormalization | ai.onnx, of ONNX Runtime | RMSNorm |
| SkipSimplifiedLayerNormalization | com.microsoft | a sum and its RMSNorm |
| RMSNormalization | ai.onnx 23 | RMSNorm |
| RotaryEmbedding | com.microsoft; ai.onnx 23 | rotary positions |
| Gelu, FastGelu | com.microsoft | GELU, exact and by tanh |

Not given, with the reason:

| operator | runtime | reason |
| --- | --- | --- |
| SkipSimplifiedLayerNormalization | ort-cpu | measured: slower than Add and SimplifiedLayerNormalization |
| LayerNormalization, SkipLayerNormalization | ort-cpu, ort-cuda | ONNX Runtime fuses LayerNorm itself |
| LayerNormalization, SkipLayerNormalization | ort-webgpu | the kernel takes the variance for E(x^2) - E(x)^2 |
| SimplifiedLayerNormalization in float16 | ort-webgpu | the kernel rounds more often than the nodes |
| Gelu, FastGelu, QuickGelu | ort-cpu, ort-cuda | ONNX Runtime fuses them itself |
| SwiGLU | all | no kernel is known but that of CUDA |
| all | openvino, tensorrt | they fuse the nodes themselves |
| all | ort-dml, ort-coreml, qnn, mlx | not known |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fa_compiler.op_registry.runtimes import Runtime

SIMPLIFIED, SKIP_SIMPLIFIED = "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"
RMS_NORM, ROTARY, GELU, FAST_GELU = "RMSNormalization", "RotaryEmbedding", "Gelu", "FastGelu"


@dataclass(frozen=True)
class AroundKernel:
    """The element types for which a runtime is given an operator, from which version on, and how
    this is known."""

    dtypes: tuple[str, ...]
    source: str
    since: tuple[int, ...] = ()

    def takes(self, dtype: str, version: tuple[int, ...]) -> bool:
        """Is a version, () for the newest one, given the operator for a type?"""
        return dtype in self.dtypes and (not version or version >= self.since)


_BOTH, _ALONE = ("float32", "float16"), ("float32",)
_CPU = AroundKernel(_BOTH, "measured, ONNX Runtime 1.23 to 1.32", (1, 23))
_CUDA = "core/providers/cuda/nn/layer_norm_impl.cu of ONNX Runtime"
_WEBGPU = "contrib_ops/webgpu/webgpu_contrib_kernels.cc of ONNX Runtime; core/optimizer has no fusion for it on WebGPU"

AROUND: Mapping[str, Mapping[str, Mapping[str, AroundKernel]]] = {
    "contrib": {
        SIMPLIFIED: {
            "ort-cpu": _CPU,
            "ort-cuda": AroundKernel(
                _BOTH, f"{_CUDA}; its fusion knows no product with the reciprocal root"
            ),
            "ort-webgpu": AroundKernel(_ALONE, _WEBGPU),
        },
        SKIP_SIMPLIFIED: {"ort-webgpu": AroundKernel(_ALONE, _WEBGPU)},
        ROTARY: {
            "ort-cpu": _CPU,
            "ort-cuda": AroundKernel(
                _BOTH, "contrib_ops/cuda/bert/rotary_embedding_impl.cu of ONNX Runtime"
            ),
            "ort-webgpu": AroundKernel(_BOTH, _WEBGPU),
        },
        GELU: {"ort-webgpu": AroundKernel(_ALONE, _WEBGPU)},
        FAST_GELU: {"ort-webgpu": AroundKernel(_ALONE, _WEBGPU)},
    },
    "onnx": {
        RMS_NORM: {
            "ort-cpu": _CPU,
            "ort-cuda": AroundKernel(
                _BOTH,
                "core/providers/cuda/nn/rms_norm.cc of ONNX Runtime; microsoft/onnxruntime 24875",
                (1, 23),
            ),
        },
        ROTARY: {
            "ort-cpu": _CPU,
            "ort-cuda": AroundKernel(_BOTH, "microsoft/onnxruntime 25178", (1, 23)),
        },
    },
}
"""The operators of each target, and the runtimes that are given them."""


def is_given(target: str, operator: str, runtime: Runtime | None, dtype: str) -> bool:
    """Is a runtime given an operator of a target for tensors of a type?"""
    kernel = None if runtime is None else AROUND[target].get(operator, {}).get(runtime.name)
    return kernel is not None and runtime is not None and kernel.takes(dtype, runtime.version)


def around_matrix() -> str:
    """The table as Markdown: a row for each operator of a target and each runtime that is given
    it."""
    lines = ["### Around attention", "", "| target | operator | runtime | types | source |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for target, operators in AROUND.items():
        for operator, runtimes in operators.items():
            for name, kernel in runtimes.items():
                since = f" from {'.'.join(map(str, kernel.since))}" if kernel.since else ""
                types = ", ".join(kernel.dtypes)
                lines.append(
                    f"| {target} | {operator} | {name}{since} | {types} | {kernel.source} |"
                )
    return "\n".join(lines)
