"""Writes the nodes of an ONNX function."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


@dataclass
class FunctionWriter:
    """Nodes under construction. The methods return the names of values. Equal constants are one node."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    _constants: dict[bytes, str] = field(default_factory=dict)
    offset: int = 0
    """The numbers of new names begin behind this one, so that a subgraph has other names than what is around it."""

    def op(self, op_type: str, *inputs: str, out: str = "", **attrs: Any) -> str:
        """Add a node, and return the name of its output."""
        name = out or self.new(op_type.lower())
        self.nodes.append(helper.make_node(op_type, inputs, [name], **attrs))
        return name

    def wide(self, name: str) -> str:
        """A tensor in float32."""
        return self.op("Cast", name, to=TensorProto.FLOAT)

    def size(self, name: str, axis: int) -> str:
        """A size of a tensor, as a list."""
        return self.op("Slice", self.op("Shape", name), self.ints(axis), self.ints(axis + 1))

    def number(self, value: float) -> str:
        """A float32 scalar."""
        return self.constant(np.array(value, np.float32))

    def ints(self, *values: int) -> str:
        """A list of int64."""
        return self.constant(np.array(values, np.int64))

    def constant(self, array: np.ndarray) -> str:
        """A tensor of these numbers."""
        tensor = numpy_helper.from_array(array)
        key = tensor.SerializeToString(deterministic=True)
        if key not in self._constants:
            self._constants[key] = self.op("Constant", value=tensor)
        return self._constants[key]

    def attribute(self, name: str) -> str:
        """The value of a float attribute of the function. Its node has the attribute's name."""
        node = helper.make_node("Constant", [], [name])
        node.attribute.append(reference("value_float", name, onnx.AttributeProto.FLOAT))
        self.nodes.append(node)
        return name

    def new(self, stem: str) -> str:
        """A name that no other value has."""
        self.names[stem] = self.names.get(stem, self.offset) + 1
        return f"{stem}_{self.names[stem]}"


def reference(name: str, source: str, kind: onnx.AttributeProto.AttributeType) -> onnx.AttributeProto:
    """An attribute of a node in a function, whose value is that of an attribute of the function."""
    attribute = helper.make_attribute_ref(name, kind)
    attribute.ref_attr_name = source
    return attribute
