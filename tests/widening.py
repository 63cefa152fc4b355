"""Models with a wider type in place of a narrow one, for runtimes without kernels of it, or to see what it loses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

TYPES = ("to", "dtype", "softmax_precision", "stash_type")
"""The attributes that name a type."""


WIDE = {TensorProto.FLOAT: np.float32, TensorProto.DOUBLE: np.float64}


def widened(
    model: onnx.ModelProto, narrow: int = TensorProto.FLOAT16, wide: int = TensorProto.FLOAT
) -> onnx.ModelProto:
    """A copy of the model with the type `wide`, float32 or float64, in place of the type `narrow`."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    widening = _Widening(narrow, wide)
    widening.graph(changed.graph)
    for function in changed.functions:
        for node in function.node:
            widening.node(node)
    return changed


@dataclass(frozen=True)
class _Widening:
    narrow: int
    wide: int

    def graph(self, graph: onnx.GraphProto) -> None:
        for info in (*graph.input, *graph.output, *graph.value_info):
            if info.type.tensor_type.elem_type == self.narrow:
                info.type.tensor_type.elem_type = self.wide
        for tensor in graph.initializer:
            self.tensor(tensor)
        for node in graph.node:
            self.node(node)

    def node(self, node: onnx.NodeProto) -> None:
        for attribute in node.attribute:
            if attribute.name in TYPES and attribute.i == self.narrow:
                attribute.i = self.wide
            if attribute.HasField("t"):
                self.tensor(attribute.t)
            for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                self.graph(graph)

    def tensor(self, tensor: onnx.TensorProto) -> None:
        if tensor.data_type == self.narrow:
            numbers = numpy_helper.to_array(tensor).astype(WIDE[self.wide])
            tensor.CopyFrom(numpy_helper.from_array(numbers, tensor.name))
