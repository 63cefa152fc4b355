"""The argument of a handler of the backward table, and the decorator that registers a handler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fa_compiler.lowering.ascend.convert.errors import UnreadableError
from fa_compiler.lowering.ascend.dtypes import attr_name
from fa_compiler.lowering.ascend.graph import Op
from fa_compiler.op_registry import dtypes
from fa_compiler.op_registry.ge_prototypes import ge_prototype
from fa_compiler.op_registry.spec import OpSpec

OPSET = 20
"""The opset of ONNX in which the handlers say what an operator means."""


class GeCall(ABC):
    """A GE operator whose inputs are tensors of ONNX, by name. It records which attributes are
    read."""

    def __init__(self, op: Op, inputs: Mapping[str, str]) -> None:
        spec = ge_prototype(op.type)
        if spec is None:
            raise UnreadableError(
                f"operator '{op.name}' has the type {op.type}, which GE does not have"
            )
        self.op = op
        self.spec: OpSpec = spec
        self._inputs = inputs
        self._read: set[str] = set()

    # -- inputs ----------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether input `name` is connected."""
        return name in self._inputs

    def x(self, name: str) -> str:
        """The ONNX tensor of input `name`."""
        if name not in self._inputs:
            known = ", ".join(self._inputs) or "none"
            raise UnreadableError(
                f"{self.op.type} '{self.op.name}' has no input {name}; connected are: {known}"
            )
        return self._inputs[name]

    def maybe(self, name: str) -> str:
        """The ONNX tensor of an optional input, or "" if it is absent."""
        return self._inputs.get(name, "")

    @abstractmethod
    def dtype(self, name: str) -> str:
        """The GE type of input `name`."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of input `name`, None if its rank is unknown."""

    def rank(self, name: str) -> int:
        """The rank of input `name`."""
        shape = self.shape(name)
        if shape is None:
            raise UnreadableError(
                f"operator '{self.op.name}': the rank of its input {name} is not known"
            )
        return len(shape)

    def dynamic(self, name: str) -> list[str]:
        """The tensors of a dynamic input."""
        names = [
            key for key in self._inputs if key.startswith(name) and key.removeprefix(name).isdigit()
        ]
        return [self._inputs[f"{name}{index}"] for index in range(len(names))]

    def counted(self, name: str) -> list[str]:
        """The tensors of a dynamic input, as many as the attribute N says."""
        tensors = self.dynamic(name)
        if self.attr("N") != len(tensors):
            what = f"{self.op.type} '{self.op.name}'"
            raise UnreadableError(f"{what} has {len(tensors)} inputs and N = {self.attr('N')}")
        return tensors

    @abstractmethod
    def constant(self, name: str) -> np.ndarray[Any, Any]:
        """The value of a constant input. Raises UnreadableError for any other input."""

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
            raise UnreadableError(
                f"{self.op.type} '{self.op.name}': {name} = {self.attr(name)} is not a type"
            )
        return dtype

    def only(self, name: str, *values: Any) -> None:
        """Raise UnreadableError for an attribute with none of these values."""
        value = self.attr(name)
        if value not in values:
            raise UnreadableError(
                f"{self.op.type} '{self.op.name}': {name} = {value!r} has no meaning in ONNX here"
            )

    def expect_read(self) -> None:
        """Raise UnreadableError for an attribute of GE that was not read and does not have its
        default."""
        for name in self.op.attrs:
            if name in self.spec.attr_names and name not in self._read:
                self.only(name, self.spec.attr(name).value_if_absent)

    # -- making nodes ----------------------------------------------------------------------------

    def node(self, op_type: str, *inputs: str, **attrs: Any) -> str:
        """A node of the standard domain with one output."""
        return self.nodes(op_type, *inputs, count=1, **attrs)[0]

    @abstractmethod
    def nodes(
        self, op_type: str, *inputs: str, count: int, domain: str = "", **attrs: Any
    ) -> list[str]:
        """A node with several outputs."""

    @abstractmethod
    def array(self, value: Any, dtype: str) -> str:
        """A constant of a GE type."""

    def ints(self, numbers: Sequence[int] | int) -> str:
        """An int64 constant."""
        return self.array(numbers, "DT_INT64")

    @abstractmethod
    def cast(self, name: str, dtype: str) -> str:
        """A tensor in another type."""

    def vector(self, name: str) -> str:
        """A scalar as a vector of one element."""
        return self.node("Reshape", name, self.ints([1]))


Handler = Callable[[GeCall], "str | Sequence[str]"]
HANDLERS: dict[str, Handler] = {}


def handles(*op_types: str) -> Callable[[Handler], Handler]:
    """A decorator that registers a function for GE operators."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(op_types, handler))
        return handler

    return register


def onnx_type(dtype: str) -> int:
    """The number in TensorProto.DataType of a GE type."""
    number = dtypes.to_onnx(dtype)
    if number is None:
        raise UnreadableError(f"ONNX has no type {dtype}")
    return number
