"""The node form: one operator of the domain "ascend", with its tensors in REG_OP order and all its
attributes.

An absent optional input has an empty name; absent inputs at the end are left off. A dynamic input
is written as all its tensors, one after the other. The integer attribute `<name>_count` states
their number and is left out if the number is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from fa_compiler.op_registry.errors import NodeError, suggestion
from fa_compiler.op_registry.spec import (
    AttrSpec,
    AttrValue,
    InputSpec,
    Kind,
    OpSpec,
    OutputSpec,
    TensorSpec,
)

T = TypeVar("T")

_LARGEST = float(np.finfo(np.float32).max)

Dim = int | str | None
"""A dimension: its size, the name of a symbol, or None if nothing is known."""


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor before the model runs.

    `dtype` is a GE name ("DT_FLOAT16"), or "" if unknown. `shape` is None if not even the rank is
    known. `value` is the content of a constant, None for other tensors.
    """

    dtype: str
    shape: tuple[Dim, ...] | None = None
    value: np.ndarray[Any, Any] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class NodeView:
    """A node as `verify` reads it. The tensors have their REG_OP names, absent ones are missing,
    and a dynamic input is a list."""

    op_type: str
    name: str
    inputs: Mapping[str, TensorInfo | list[TensorInfo]]
    outputs: Mapping[str, TensorInfo]
    attrs: Mapping[str, Any]


def place_inputs(spec: OpSpec, inputs: Mapping[str, Any]) -> list[Any]:
    """The positional inputs of a node, from its inputs by name. Absent inputs are None, and None at
    the end is removed.

    A dynamic input takes a sequence of tensors, or a single tensor; the node then needs the
    attributes of `count_attrs`. Raises NodeError for an unknown name or a missing required input.
    """
    return _place(spec, spec.inputs, inputs, "input", keep_required=True)


def place_outputs(spec: OpSpec, outputs: Mapping[str, Any]) -> list[Any]:
    """The positional outputs of a node, from its outputs by name. Outputs that nobody reads are
    None, and None at the end is removed."""
    return _place(spec, spec.outputs, outputs, "output", keep_required=False)


def bind_inputs(
    spec: OpSpec, positional: Sequence[T | None], attrs: Mapping[str, Any] | None = None
) -> dict[str, T | list[T] | None]:
    """The inverse of `place_inputs`: every input of `spec` by name, as a value, a list (dynamic
    inputs) or None.

    An empty string counts as absent, as in ONNX. `attrs` are the node's attributes, from which
    `<name>_count` is read. Raises NodeError if there are more tensors than the prototype has, or if
    a required one is missing.
    """
    return _bind(spec, spec.inputs, positional, attrs or {}, "input")


def bind_outputs(
    spec: OpSpec, positional: Sequence[T | None], attrs: Mapping[str, Any] | None = None
) -> dict[str, T | list[T] | None]:
    """Like `bind_inputs`, but for the outputs, all of which may be absent. Raises NodeError if
    there are too many."""
    return _bind(spec, spec.outputs, positional, attrs or {}, "output")


def count_attrs(spec: OpSpec, inputs: Mapping[str, Any]) -> dict[str, int]:
    """The `<name>_count` attributes that a node with these inputs needs: one for each dynamic
    input, unless it has exactly one tensor."""
    counts = {
        f"{entry.name}_count": len(inputs[entry.name])
        for entry in spec.inputs
        if entry.kind is Kind.DYNAMIC and isinstance(inputs.get(entry.name), (list, tuple))
    }
    return {name: count for name, count in counts.items() if count != 1}


def attr_value(op: str, entry: AttrSpec, value: Any) -> AttrValue:
    """Converts as `convert_attr`, and also raises NodeError for a Float that is NaN, infinite or
    outside the range of float32. Such a value has no meaning in the operators of the registry."""
    converted = convert_attr(op, entry, value)
    for number in converted if isinstance(converted, list | tuple) else (converted,):
        if isinstance(number, float) and not abs(number) <= _LARGEST:
            raise NodeError(
                f"attribute {entry.name} of {op} is {number!r}, expected a finite float32"
            )
    return converted


_SCALARS: Mapping[str, tuple[Callable[[Any], bool], Callable[[Any], AttrValue]]] = {
    "Bool": (lambda value: isinstance(value, int) and value in (0, 1), bool),
    "Int": (lambda value: _is_number(value, int) and -(1 << 63) <= value < 1 << 63, int),
    "Float": (lambda value: _is_number(value, int, float), float),
    "String": (lambda value: isinstance(value, str), str),
}
"""The types of attributes that are no lists: which values have the type, and how they are
written."""


def convert_attr(op: str, entry: AttrSpec, value: Any) -> AttrValue:
    """Converts a Python, NumPy or ONNX (bytes) value to the attribute's type. Raises NodeError if
    it does not have that type."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bytes):
        value = value.decode()
    kind = entry.type
    if kind.startswith("List") and isinstance(value, (list, tuple)):
        element = AttrSpec(entry.name, kind.removeprefix("List"), required=True)
        return tuple(convert_attr(op, element, item) for item in value)
    if kind in _SCALARS:
        has_type, convert = _SCALARS[kind]
        if has_type(value):
            return convert(value)
    raise NodeError(f"attribute {entry.name} of {op} is {value!r}, expected a value of type {kind}")


def _is_number(value: Any, *types: type) -> bool:
    """Whether a value has one of the types and is no Boolean, which Python counts among the
    integers."""
    return isinstance(value, types) and not isinstance(value, bool)


def _place(
    spec: OpSpec,
    entries: Sequence[InputSpec] | Sequence[OutputSpec],
    given: Mapping[str, Any],
    what: str,
    keep_required: bool,
) -> list[Any]:
    known = [entry.name for entry in entries]
    for name in given:
        if name not in known:
            raise NodeError(f"{spec.name} has no {what} {name!r}{suggestion(name, known)}")
    placed: list[Any] = []
    for entry in entries:
        value = given.get(entry.name)
        if entry.kind is Kind.DYNAMIC:
            tensors = list(value) if isinstance(value, (list, tuple)) else [value]
        else:
            tensors = [value]
        if (
            keep_required
            and entry.kind is not Kind.OPTIONAL
            and (not tensors or any(t is None for t in tensors))
        ):
            raise NodeError(f"{spec.name} needs the {what} {entry.name}")
        placed += tensors
    while placed and placed[-1] is None:
        placed.pop()
    return placed


def _bind(
    spec: OpSpec,
    entries: Sequence[InputSpec] | Sequence[OutputSpec],
    positional: Sequence[T | None],
    attrs: Mapping[str, Any],
    what: str,
) -> dict[str, T | list[T] | None]:
    rest = [None if isinstance(value, str) and value == "" else value for value in positional]
    bound: dict[str, T | list[T] | None] = {}
    for entry in entries:
        if entry.kind is Kind.DYNAMIC:
            count = attrs.get(f"{entry.name}_count", 1)
            tensors, rest = rest[:count], rest[count:]
            bound[entry.name] = _bound_list(spec, entry, tensors, count, required=what == "input")
            continue
        tensor = rest.pop(0) if rest else None
        if tensor is None and what == "input" and entry.kind is Kind.REQUIRED:
            raise NodeError(f"{spec.name} needs the input {entry.name}")
        bound[entry.name] = tensor
    if any(value is not None for value in rest):
        raise NodeError(f"{spec.name} takes {len(entries)} {what}s, found {len(positional)}")
    return bound


def _bound_list(
    spec: OpSpec, entry: TensorSpec, tensors: Sequence[T | None], count: int, required: bool
) -> list[T]:
    """The tensors of a dynamic input or output. If it is `required`, there are `count` of them, at
    least one."""
    present = [tensor for tensor in tensors if tensor is not None]
    if required and (count < 1 or len(present) < count):
        raise NodeError(
            f"{spec.name} needs {max(count, 1)} tensor(s) as {entry.name}, found {len(present)}"
        )
    return present
