"""The argument of a handler of the backward table, and the decorator that registers a handler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from fa_compiler.lowering.ascend.convert.errors import UnreadableError
from fa_compiler.lowering.ascend.dtypes import attr_name
from fa_compiler.lowering.ascend.graph import Attr, Op, TensorDesc, Weight
from fa_compiler.op_registry import dtypes
from fa_compiler.op_registry.ge_prototypes import ge_prototype
from fa_compiler.op_registry.spec import Kind, OpSpec


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


class GeCall:
    """A GE operator whose inputs are already tensors of the ONNX graph. It records which attributes are read."""

    def __init__(
        self, op: Op, inputs: Sequence[str], collector: NodeCollector, constants: Mapping[str, Weight]
    ) -> None:
        spec = ge_prototype(op.type)
        if spec is None:
            raise UnreadableError(f"operator '{op.name}' has the type {op.type}, which GE does not have")
        self.op = op
        self.spec: OpSpec = spec
        self._collector = collector
        self._constants = constants
        self._read: set[str] = set()
        self._inputs = {desc.name: (name, desc) for desc, name in zip(op.input_descs, inputs, strict=True) if name}

    # -- inputs and outputs ----------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether input `name` is connected."""
        return name in self._inputs

    def x(self, name: str) -> str:
        """The ONNX tensor of input `name`."""
        return self._input(name)[0]

    def maybe(self, name: str) -> str:
        """The ONNX tensor of an optional input, or "" if it is absent."""
        return self._inputs[name][0] if name in self._inputs else ""

    def desc(self, name: str) -> TensorDesc:
        """The descriptor of input `name`."""
        return self._input(name)[1]

    def rank(self, name: str) -> int:
        """The rank of input `name`."""
        shape = self.desc(name).shape
        if shape is None:
            raise UnreadableError(f"operator '{self.op.name}': the rank of its input {name} is not declared")
        return len(shape)

    def dynamic(self, name: str) -> list[str]:
        """The tensors of a dynamic input."""
        names = [key for key in self._inputs if key.startswith(name) and key.removeprefix(name).isdigit()]
        return [self._inputs[f"{name}{index}"][0] for index in range(len(names))]

    def constant(self, name: str) -> np.ndarray[Any, Any]:
        """The value of a constant input. Raises UnreadableError for any other input."""
        weight = self._constants.get(self.x(name))
        if weight is None:
            raise UnreadableError(f"operator '{self.op.name}': its input {name} is not a constant")
        return array_of(weight)

    def out(self, index: int = 0) -> TensorDesc:
        """The descriptor of output `index`."""
        return self.op.output_descs[index]

    def expect_outputs(self, count: int) -> None:
        """Raise UnreadableError if the operator has another number of outputs than its attribute num_split says."""
        found = len(self.op.output_descs)
        if count != found:
            raise UnreadableError(f"{self.op.type} '{self.op.name}' has {found} outputs, num_split is {count}")

    def _input(self, name: str) -> tuple[str, TensorDesc]:
        if name not in self._inputs:
            known = ", ".join(self._inputs) or "none"
            raise UnreadableError(f"{self.op.type} '{self.op.name}' has no input {name}; connected are: {known}")
        return self._inputs[name]

    # -- attributes ------------------------------------------------------------------------------

    def attr(self, name: str) -> Any:
        """The value of an attribute, or the prototype's default."""
        entry = self.spec.attr(name)
        self._read.add(name)
        found = self.op.attrs.get(name)
        if found is not None:
            if found.kind != entry.type:
                raise UnreadableError(
                    f"attribute {name} of {self.op.type} '{self.op.name}' is a {found.kind}, not a {entry.type}"
                )
            return found.value
        if entry.required:
            raise UnreadableError(f"{self.op.type} '{self.op.name}' lacks the attribute {name}")
        return entry.value_if_absent

    def type_attr(self, name: str) -> str:
        """The GE name of a type, from an integer attribute with its number."""
        dtype = attr_name(self.attr(name))
        if dtype is None:
            raise UnreadableError(f"{self.op.type} '{self.op.name}': {name} = {self.attr(name)} is not a type")
        return dtype

    def only(self, name: str, *values: Any) -> None:
        """Raise UnreadableError for an attribute with none of these values."""
        value = self.attr(name)
        if value not in values:
            raise UnreadableError(f"{self.op.type} '{self.op.name}': {name} = {value!r} has no meaning in ONNX here")

    def unread(self) -> Iterator[tuple[str, Attr]]:
        """The attributes that were not read and do not have their default, and those that the prototype lacks."""
        for name, attr in self.op.attrs.items():
            if name.startswith("_") or name in self._read:
                continue
            entry = self.spec.attr(name) if name in self.spec.attr_names else None
            if entry is None or attr != Attr(entry.type, entry.value_if_absent):  # type: ignore[arg-type]
                yield name, attr

    def finish(self) -> None:
        """Raise UnreadableError for an attribute that was not read and does not have its default, and for an input that
        the prototype does not have."""
        for name, attr in self.unread():
            if name not in self.spec.attr_names:
                raise UnreadableError(f"{self.op.type} '{self.op.name}' has the attribute {name}, which GE lacks")
            raise UnreadableError(
                f"{self.op.type} '{self.op.name}': {name} = {attr.value!r} has no meaning in ONNX here"
            )
        dynamic = tuple(entry.name for entry in self.spec.inputs if entry.kind is Kind.DYNAMIC)
        for name in self._inputs:
            if name not in self.spec.input_names and name.rstrip("0123456789") not in dynamic:
                raise UnreadableError(f"{self.op.type} '{self.op.name}' has the input {name}, which GE lacks")

    # -- making nodes ----------------------------------------------------------------------------

    def node(self, op_type: str, *inputs: str, **attrs: Any) -> str:
        """A node of the standard domain with one output."""
        return self.nodes(op_type, *inputs, count=1, **attrs)[0]

    def nodes(self, op_type: str, *inputs: str, count: int, domain: str = "", **attrs: Any) -> list[str]:
        """A node with several outputs."""
        return self._collector.node(op_type, inputs, count, domain, self._collector.fresh(self.op.name), attrs)

    def array(self, value: Any, dtype: str) -> str:
        """A constant of a GE type."""
        array = np.asarray(value, dtypes.to_numpy(dtype))
        weight = Weight(dtype, array.shape, array.nbytes, array.tobytes)
        return self.node("Constant", value=tensor_proto(weight, ""))

    def ints(self, numbers: Sequence[int] | int) -> str:
        """An int64 constant."""
        return self.array(numbers, "DT_INT64")

    def cast(self, name: str, dtype: str) -> str:
        """A tensor in another type."""
        return self.node("Cast", name, to=onnx_type(dtype))

    def vector(self, name: str) -> str:
        """A scalar as a vector of one element."""
        return self.node("Reshape", name, self.ints([1]))


Handler = Callable[[GeCall], "str | Sequence[str]"]
HANDLERS: dict[str, Handler] = {}


def handles(*op_types: str) -> Callable[[Handler], Handler]:
    """A decorator that registers a function for GE operators."""

    def register(handler: Handler) -> Handler:
        for op_type in op_types:
            HANDLERS[op_type] = handler
        return handler

    return register


def onnx_type(dtype: str) -> int:
    """The number in TensorProto.DataType of a GE type."""
    number = dtypes.to_onnx(dtype)
    if number is None:
        raise UnreadableError(f"ONNX has no type {dtype}")
    return number


def tensor_proto(weight: Weight, name: str) -> onnx.TensorProto:
    """A constant as an ONNX tensor."""
    data = weight.load()
    if len(data) != weight.size:
        raise UnreadableError(f"constant '{name}' has {len(data)} bytes, {weight.size} are declared")
    return onnx.TensorProto(name=name, data_type=onnx_type(weight.dtype), dims=weight.shape, raw_data=data)


def array_of(weight: Weight) -> np.ndarray[Any, Any]:
    """The value of a constant as an array."""
    return np.frombuffer(weight.load(), dtypes.to_numpy(weight.dtype)).reshape(weight.shape)
