"""Operators for onnx's reference evaluation: of com.microsoft, and of versions that it lacks."""

from __future__ import annotations

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
