"""Adds operators to a GE graph. Each operator is checked against its prototype.

An operator takes its inputs in the order of the prototype: None for an absent optional input, a
sequence for a dynamic input. It has the type and shape of every output, and every attribute of the
prototype, with defaults written out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fa_compiler.lowering.ascend.convert.errors import CannotMapError
from fa_compiler.lowering.ascend.graph import Attr, Graph, Op, Output, TensorDesc, Weight, absent
from fa_compiler.op_registry import dtypes
from fa_compiler.op_registry.errors import NodeError
from fa_compiler.op_registry.ge_prototypes import ge_prototype
from fa_compiler.op_registry.ge_types import input_types
from fa_compiler.op_registry.node import convert_attr
from fa_compiler.op_registry.spec import AttrSpec, Kind, OpSpec

Shape = tuple[int, ...] | None
"""The sizes, -1 for a dynamic size; None if the rank is unknown."""

SHARED = 1024
"""Equal constants of up to this many bytes are made once for each graph."""


@dataclass(frozen=True)
class Type:
    """Type and shape of a tensor."""

    dtype: str
    shape: Shape = None


@dataclass(frozen=True)
class Tensor(Type):
    """A tensor of the GE graph: its type and shape, the output that makes it, and its value if it
    is a constant."""

    output: Output = field(default_factory=lambda: Output(""))
    value: np.ndarray[Any, Any] | None = field(default=None, compare=False, repr=False)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes. Raises CannotMapError if the rank is unknown."""
        if self.shape is None:
            raise CannotMapError(
                "the rank of an input is not known", "declare the shapes of the model's inputs"
            )
        return self.shape

    @property
    def rank(self) -> int:
        """The rank. Raises CannotMapError if it is unknown."""
        return len(self.sizes)

    def size(self, axis: int) -> int:
        """The size of an axis, -1 if it is dynamic or the rank unknown."""
        return -1 if self.shape is None else self.shape[axis]

    def with_shape(self, shape: Shape) -> Type:
        """The same type with another shape."""
        return Type(self.dtype, shape)

    def with_dtype(self, dtype: str) -> Type:
        """The same shape with another type."""
        return Type(dtype, self.shape)


Input = Tensor | Sequence[Tensor] | None


class Names:
    """Makes unique names for operators."""

    def __init__(self) -> None:
        self._used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._used

    def new(self, stem: str) -> str:
        """`stem`, or `stem` with a number. Names hold neither ":" nor ";", at which ATC splits its
        options."""
        stem = stem.replace(":", "_").replace(";", "_") or "op"
        name, count = stem, 0
        while name in self._used:
            count += 1
            name = f"{stem}_{count}"
        self._used.add(name)
        return name


class Emitter:
    """Makes the operators of one graph. `stem` is the name of the ONNX node that is converted."""

    def __init__(self, graph: Graph, names: Names) -> None:
        self.graph = graph
        self.names = names
        self.stem = ""
        self._constants: dict[tuple[str, Shape, bytes], Tensor] = {}

    def op(self, op_type: str, *inputs: Input, out: Type, **options: Any) -> Tensor:
        """Add an operator as `ops` does; returns its only output."""
        return self.ops(op_type, *inputs, outs=[out], **options)[0]

    def ops(
        self,
        op_type: str,
        *inputs: Input,
        outs: Sequence[Type],
        layouts: Mapping[str, str] | None = None,
        **attrs: Any,
    ) -> tuple[Tensor, ...]:
        """Add an operator; returns its outputs. `layouts` are the layouts other than "ND", by
        tensor name.

        Raises:
            CannotMapError: the prototype does not allow the inputs, a type or an attribute.
        """
        spec = ge_prototype(op_type)
        if spec is None:
            raise CannotMapError(f"GE has no operator {op_type}")
        op = Op(self._name(op_type), op_type, attrs=full_attrs(spec, attrs))
        layouts = layouts or {}
        for name, tensor in _expanded(spec, inputs):
            if tensor is None:
                op.inputs.append(None)
                op.input_descs.append(absent(name))
                continue
            _check_type(spec, name, tensor)
            op.inputs.append(tensor.output)
            layout = layouts.get(name, "ND")
            op.input_descs.append(TensorDesc(name, tensor.dtype, tensor.shape, layout))
        for name, made in zip(_output_names(spec, len(outs)), outs, strict=True):
            op.output_descs.append(
                TensorDesc(name, made.dtype, made.shape, layouts.get(name, "ND"))
            )
        self.graph.ops.append(op)
        return tuple(
            Tensor(made.dtype, made.shape, Output(op.name, i)) for i, made in enumerate(outs)
        )

    def weight(self, name: str, weight: Weight) -> Tensor:
        """A constant whose bytes are loaded only when the file is written."""
        op = Op(self.names.new(name), "Const", attrs={"value": Attr("Tensor", weight)})
        op.output_descs.append(TensorDesc("y", weight.dtype, weight.shape))
        self.graph.ops.append(op)
        return Tensor(weight.dtype, weight.shape, Output(op.name))

    def const(self, value: Any, dtype: str) -> Tensor:
        """A small constant of a GE type."""
        array = np.ascontiguousarray(np.asarray(value, dtype=dtypes.to_numpy(dtype)))
        array = array.reshape(np.shape(value))  # ascontiguousarray makes a vector of a scalar
        content = array.tobytes()
        key = (dtype, array.shape, content)
        found = self._constants.get(key)
        if found is None:
            made = self.weight("const", Weight(dtype, array.shape, len(content), lambda: content))
            found = Tensor(made.dtype, made.shape, made.output, array)
            if len(content) <= SHARED:
                self._constants[key] = found
        return found

    def ints(self, numbers: Iterable[int] | int, dtype: str = "DT_INT64") -> Tensor:
        """A constant of integers: a vector from a list, a scalar from a number."""
        return self.const(numbers if isinstance(numbers, int) else list(numbers), dtype)

    def _name(self, op_type: str) -> str:
        """The ONNX node's name for the first of its operators, and a longer name for each of the
        others."""
        return self.names.new(
            f"{self.stem}/{op_type}" if self.stem in self.names else self.stem or op_type
        )


def full_attrs(spec: OpSpec, given: Mapping[str, Any]) -> dict[str, Attr]:
    """Every attribute of a prototype in its order, with the given value or the default."""
    unknown = [name for name in given if name not in spec.attr_names]
    if unknown:
        raise CannotMapError(f"{spec.name} of GE has no attribute {unknown[0]}")
    full: dict[str, Attr] = {}
    for entry in spec.attrs:
        value = given.get(entry.name, entry.value_if_absent)
        if value is None:
            raise CannotMapError(f"{spec.name} of GE needs the attribute {entry.name}")
        full[entry.name] = Attr(entry.type, _attr_value(spec.name, entry, value))
    return full


def _attr_value(op: str, entry: AttrSpec, value: Any) -> Any:
    if entry.type == "Type":
        return str(value)
    try:
        converted = convert_attr(op, entry, value)
    except NodeError as error:
        raise CannotMapError(str(error)) from None
    if entry.type == "Float":
        return float(np.float32(converted))  # type: ignore[arg-type]  # a number, by its type
    return converted


def _expanded(spec: OpSpec, inputs: Sequence[Input]) -> list[tuple[str, Tensor | None]]:
    """The inputs of an operator by name. Those of a dynamic input are numbered; absent ones at the
    end are left out."""
    if len(inputs) > len(spec.inputs):
        raise CannotMapError(
            f"{spec.name} of GE takes {len(spec.inputs)} inputs, not {len(inputs)}"
        )
    placed: list[tuple[str, Tensor | None]] = []
    for entry, given in zip(spec.inputs, (*inputs, *[None] * len(spec.inputs)), strict=False):
        if entry.kind is Kind.DYNAMIC:
            tensors = [given] if isinstance(given, Tensor) else list(given or ())
            placed += [(f"{entry.name}{index}", tensor) for index, tensor in enumerate(tensors)]
        elif given is None or isinstance(given, Tensor):
            if given is None and entry.kind is Kind.REQUIRED:
                raise CannotMapError(f"{spec.name} of GE needs the input {entry.name}")
            placed.append((entry.name, given))
        else:
            raise CannotMapError(f"{spec.name} of GE takes one tensor as {entry.name}")
    while placed and placed[-1][1] is None:
        placed.pop()
    return placed


def _output_names(spec: OpSpec, count: int) -> list[str]:
    names: list[str] = []
    for entry in spec.outputs:
        if entry.kind is Kind.DYNAMIC:
            names += [f"{entry.name}{index}" for index in range(count - len(names))]
        else:
            names.append(entry.name)
    return names


def _check_type(spec: OpSpec, name: str, tensor: Tensor) -> None:
    entry = name if name in spec.input_names else name.rstrip("0123456789")
    legal = input_types(spec, entry)
    if legal is not None and tensor.dtype not in legal:
        words = ", ".join(dtype.removeprefix("DT_").lower() for dtype in legal if "Q" not in dtype)
        raise CannotMapError(
            f"{spec.name} of GE does not take {tensor.dtype.removeprefix('DT_').lower()} as {entry}",
            f"it takes {words}",
        )
