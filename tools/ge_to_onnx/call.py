"""The call of a handler that makes nodes of an ONNX model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from fa_compiler.lowering.ascend.convert.backward import GeCall
from fa_compiler.lowering.ascend.convert.backward.ge_call import onnx_type
from fa_compiler.lowering.ascend.convert.errors import UnreadableError
from fa_compiler.lowering.ascend.graph import Op, TensorDesc, Weight
from fa_compiler.op_registry import dtypes
from fa_compiler.op_registry.spec import Kind

_FORMATTED = ("x", "filter", "y")
"""The tensors that are declared in the format of the attribute data_format."""


class NodeCollector:
    """Collects the nodes of one ONNX graph."""

    def __init__(self, prefix: str) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._prefix = prefix
        self._count = 0

    def fresh(self, stem: str) -> str:
        """A new name for a tensor."""
        self._count += 1
        return f"{self._prefix}{stem}_{self._count}"

    def node(
        self, op_type: str, inputs: Sequence[str], count: int, domain: str, name: str, attrs: Mapping[str, Any]
    ) -> list[str]:
        """Add a node; returns the names of its outputs."""
        outputs = [self.fresh(op_type) for _ in range(count)]
        given = list(inputs)
        while given and not given[-1]:
            given.pop()
        self.nodes.append(helper.make_node(op_type, given, outputs, name=name, domain=domain or None, **attrs))
        return outputs


class DeclaredCall(GeCall):
    """A GE operator whose inputs are already tensors of the ONNX graph. Its types and shapes are the declared ones."""

    def __init__(
        self, op: Op, inputs: Sequence[str], collector: NodeCollector, constants: Mapping[str, Weight]
    ) -> None:
        given = [(name, desc) for desc, name in zip(op.input_descs, inputs, strict=True) if name]
        super().__init__(op, {desc.name: name for name, desc in given})
        self._descs = {desc.name: desc for _, desc in given}
        self._collector = collector
        self._constants = constants

    def dtype(self, name: str) -> str:
        return self._desc(name).dtype

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._desc(name).shape

    def _desc(self, name: str) -> TensorDesc:
        self.x(name)  # raises UnreadableError for an absent input
        return self._descs[name]

    def constant(self, name: str) -> np.ndarray[Any, Any]:
        weight = self._constants.get(self.x(name))
        if weight is None:
            raise UnreadableError(f"operator '{self.op.name}': its input {name} is not a constant")
        return np.frombuffer(weight.load(), dtypes.to_numpy(weight.dtype)).reshape(weight.shape)

    def out(self, index: int = 0) -> TensorDesc:
        """The descriptor of output `index`."""
        return self.op.output_descs[index]

    def nodes(self, op_type: str, *inputs: str, count: int, domain: str = "", **attrs: Any) -> list[str]:
        return self._collector.node(op_type, inputs, count, domain, self._collector.fresh(self.op.name), attrs)

    def array(self, value: Any, dtype: str) -> str:
        array = np.asarray(value, dtypes.to_numpy(dtype))
        weight = Weight(dtype, array.shape, array.nbytes, array.tobytes)
        return self.node("Constant", value=tensor_proto(weight, ""))

    def cast(self, name: str, dtype: str) -> str:
        return self.node("Cast", name, to=onnx_type(dtype))

    def finish(self) -> None:
        """Raise UnreadableError for an attribute that was not read and does not have its default, for an attribute or
        input that the prototype does not have, and for a tensor that is not declared in the operator's format."""
        what = f"{self.op.type} '{self.op.name}'"
        for name in self.op.attrs:
            if not name.startswith("_") and name not in self.spec.attr_names:
                raise UnreadableError(f"{what} has the attribute {name}, which GE lacks")
        self.expect_read()
        dynamic = tuple(entry.name for entry in self.spec.inputs if entry.kind is Kind.DYNAMIC)
        for name in self._descs:
            if name not in self.spec.input_names and name.rstrip("0123456789") not in dynamic:
                raise UnreadableError(f"{what} has the input {name}, which GE lacks")
        if "data_format" in self.spec.attr_names:
            layout = self.attr("data_format")
            for desc in (*self._descs.values(), *self.op.output_descs):
                if desc.name in _FORMATTED and desc.layout != layout:
                    raise UnreadableError(f"{what}: its {desc.name} is not declared in the format {layout}")


def tensor_proto(weight: Weight, name: str) -> onnx.TensorProto:
    """A constant as an ONNX tensor."""
    data = weight.load()
    if len(data) != weight.size:
        raise UnreadableError(f"constant '{name}' has {len(data)} bytes, {weight.size} are declared")
    return onnx.TensorProto(name=name, data_type=onnx_type(weight.dtype), dims=weight.shape, raw_data=data)
