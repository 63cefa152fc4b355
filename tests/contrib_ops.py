"""Operators of com.microsoft for onnx's reference evaluation."""

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
