"""Weights that are joined: a tensor that is made of the tensors of a file when it is written, and
not before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.ir.nodes import unheld

OF_MODEL_FILE = "fa_compiler.of_model_file"
"""Marks a tensor that lies in the model's own file, which is written anew in any case."""


class JoinedTensor(ir.LazyTensor):
    """Tensors of one type, joined along an axis: 0 or 1 of matrices, or 0 of vectors. Nothing is
    read until somebody asks for the content, and nothing is kept of it."""

    def __init__(self, parts: Sequence[ir.TensorProtocol], axis: int, name: str) -> None:
        self.parts = tuple(parts)
        self.axis = axis
        shapes = [part.shape.numpy() for part in self.parts]
        sizes = list(shapes[0])
        sizes[axis] = sum(shape[axis] for shape in shapes)
        super().__init__(self._content, dtype=self.parts[0].dtype, shape=ir.Shape(sizes), name=name)

    def _content(self) -> ir.TensorProtocol:
        arrays = [unheld(part).numpy() for part in self.parts]
        return ir.Tensor(np.concatenate(arrays, axis=self.axis), dtype=self.dtype)


def is_of_other_file(tensor: ir.TensorProtocol) -> bool:
    """Does the content lie in a file beside the model's?"""
    return isinstance(tensor, ir.ExternalTensor) and not tensor.meta.get(OF_MODEL_FILE)
