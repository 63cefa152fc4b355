"""Operators for onnx's reference evaluation: of com.microsoft, and of versions that it lacks."""

from __future__ import annotations

from math import erf, pi, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx.reference.op_run import OpRun

Array = npt.NDArray[Any]


class SoftmaxGrad_13(OpRun):  # noqa: N801  (the operator's name)
    """The gradient of a softmax, as onnxruntime-training's graphs have it."""

    op_domain = "com.microsoft"

    def _run(self, gradient: Array, softmax: Array, axis: int = -1) -> tuple[Array]:
        rows = (gradient * softmax).sum(axis, keepdims=True)
        return (((gradient - rows) * softmax).astype(softmax.dtype),)


class TanhGrad(OpRun):
    """The gradient of a tanh, as onnxruntime-training's graphs have it."""

    op_domain = "com.microsoft"

    def _run(self, gradient: Array, tanh: Array) -> tuple[Array]:
        return ((gradient * (1 - tanh * tanh)).astype(tanh.dtype),)


class DropoutGrad(OpRun):
    """The gradient through a Dropout, as onnxruntime-training's graphs have it."""

    op_domain = "com.microsoft"

    def _run(self, gradient: Array, mask: Array, ratio: Array, mode: Array | None = None) -> tuple[Array]:
        if mode is None or not mode or ratio == 0:
            return (gradient,)
        return ((gradient * mask / (1 - ratio)).astype(gradient.dtype),)


class FusedMatMul(OpRun):
    """A matrix product with transposed operands and a factor."""

    op_domain = "com.microsoft"

    def _run(self, a: Array, b: Array, alpha: float = 1.0, transA: int = 0, transB: int = 0, **_: Any) -> tuple[Array]:  # noqa: N803
        left = np.swapaxes(a, -1, -2) if transA else a
        right = np.swapaxes(b, -1, -2) if transB else b
        return (((left @ right) * alpha).astype(a.dtype),)


class DequantizeLinear(OpRun):
    """`(x - zero_point) * scale` before opset 19, with one scale or one for each index of the axis."""

    op_domain = ""

    def _run(
        self, x: Array, scale: Array, zero_point: Array | None = None, axis: int | None = None, **_: Any
    ) -> tuple[Array]:
        axis = 1 if axis is None else axis

        def along_axis(numbers: Array) -> Array:
            others = [dim for dim in range(x.ndim) if dim != axis % x.ndim]
            return numbers if numbers.ndim == 0 else np.expand_dims(numbers, others)

        zero = np.zeros((), np.int32) if zero_point is None else along_axis(zero_point).astype(np.int32)
        return (((x.astype(np.int32) - zero) * along_axis(scale)).astype(scale.dtype),)


class Gelu(OpRun):
    """The exact Gelu."""

    op_domain = "com.microsoft"

    def _run(self, x: Array) -> tuple[Array]:
        share = np.vectorize(erf, otypes=[np.float64])(x / sqrt(2))
        return ((0.5 * x * (1 + share)).astype(x.dtype),)


class FastGelu(OpRun):
    """Gelu by tanh, of x and a bias."""

    op_domain = "com.microsoft"

    def _run(self, x: Array, bias: Array | None = None) -> tuple[Array]:
        y = x if bias is None else x + bias
        share = np.tanh(sqrt(2 / pi) * (y + 0.044715 * y**3))
        return ((0.5 * y * (1 + share)).astype(x.dtype),)


class SimplifiedLayerNormalization(OpRun):
    """RMSNorm along the last axis, and the reciprocal of the root."""

    op_domain = ""

    def _run(self, x: Array, weight: Array, epsilon: float = 1e-5, **_: Any) -> tuple[Array, ...]:
        rate = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)
        return (x * rate * weight).astype(weight.dtype), rate


class SkipSimplifiedLayerNormalization(OpRun):
    """RMSNorm of a sum, and the sum."""

    op_domain = "com.microsoft"

    def _run(
        self, x: Array, skip: Array, weight: Array, bias: Array | None = None, epsilon: float = 1e-12
    ) -> tuple[Array, ...]:
        total = x + skip if bias is None else x + skip + bias
        rate = 1 / np.sqrt((total * total).mean(-1, keepdims=True) + epsilon)
        return (total * rate * weight).astype(x.dtype), rate, rate, total


class SkipLayerNormalization(OpRun):
    """LayerNorm of a sum, and the sum."""

    op_domain = "com.microsoft"

    def _run(
        self,
        x: Array,
        skip: Array,
        gamma: Array,
        beta: Array | None = None,
        bias: Array | None = None,
        epsilon: float = 1e-12,
    ) -> tuple[Array, ...]:
        total = x + skip if bias is None else x + skip + bias
        mean = total.mean(-1, keepdims=True)
        rate = 1 / np.sqrt(((total - mean) ** 2).mean(-1, keepdims=True) + epsilon)
        scaled = (total - mean) * rate * gamma
        return (scaled if beta is None else scaled + beta).astype(x.dtype), mean, rate, total
