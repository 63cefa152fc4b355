"""Writes the nodes of an ONNX function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from fa_compiler.op_registry import DOMAIN, get

CAST_LIKE = 15
"""The first opset with CastLike."""


@dataclass
class FunctionWriter:
    """Nodes under construction. The methods return the names of values. Equal constants are one
    node."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    _constants: dict[bytes, str] = field(default_factory=dict)
    offset: int = 0
    """The numbers of new names begin behind this one, so that a subgraph has other names than what
    is around it."""

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

    def scalar(self, value: int, dtype: type = np.int64) -> str:
        """An integer scalar."""
        return self.constant(np.array(value, dtype))

    def constant(self, array: np.ndarray) -> str:
        """A tensor of these numbers."""
        tensor = numpy_helper.from_array(array)
        key = tensor.SerializeToString(deterministic=True)
        if key not in self._constants:
            self._constants[key] = self.op("Constant", value=tensor)
        return self._constants[key]

    def attribute(
        self, name: str, kind: AttributeProto.AttributeType = AttributeProto.FLOAT
    ) -> str:
        """The value of an attribute of the function, which is a number or a text. Its node has the
        attribute's name."""
        node = helper.make_node("Constant", [], [name])
        word = AttributeProto.AttributeType.Name(kind).lower()
        node.attribute.append(reference(f"value_{word}", name, kind))
        self.nodes.append(node)
        return name

    def new(self, stem: str) -> str:
        """A name that no other value has."""
        self.names[stem] = self.names.get(stem, self.offset) + 1
        return f"{stem}_{self.names[stem]}"

    def function(
        self,
        op_type: str,
        opset: int,
        attributes: Sequence[str],
        outputs: Sequence[str],
        given: Sequence[str],
        key: tuple[str, str] | None = None,
    ) -> onnx.FunctionProto:
        """The nodes as the function of an operator of the registry. It has the inputs up to the
        last one that is given, and the domain and name of the operator, or those of the key."""
        names, imports = get(op_type).input_names, [helper.make_opsetid("", opset)]
        inputs = names[: max(map(names.index, given)) + 1]
        domain, name = key or (DOMAIN, op_type)
        return helper.make_function(
            domain, name, inputs, outputs, self.nodes, imports, attributes=attributes
        )


def declared(name: str, rank: int = 4, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    """The declaration of an input or output of a graph, of any sizes."""
    return helper.make_tensor_value_info(name, kind, [None] * rank)


def reference(name: str, source: str, kind: AttributeProto.AttributeType) -> AttributeProto:
    """An attribute of a node in a function, whose value is that of an attribute of the function."""
    attribute = helper.make_attribute_ref(name, kind)
    attribute.ref_attr_name = source
    return attribute
