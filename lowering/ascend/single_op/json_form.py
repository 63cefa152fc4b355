"""Converts between a GE operator and its JSON object.

The tensors are in the order of the prototype, each with its name. An absent optional input before a
present one is a placeholder with type UNDEFINED and format RESERVED. A dynamic size needs a range;
[1, -1] means any size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fa_compiler.lowering.ascend.air.encode import UNKNOWN_RANK
from fa_compiler.lowering.ascend.dtypes import attr_name
from fa_compiler.lowering.ascend.graph import Attr, Op, Output, TensorDesc, Weight, absent
from fa_compiler.lowering.ascend.single_op.spelling import (
    ABSENT_FORMAT,
    ABSENT_TYPE,
    ATTR_KINDS,
    CONST_TYPES,
    TYPES,
    kind_spelling,
    type_spelling,
)
from fa_compiler.op_registry import dtypes
from fa_compiler.op_registry.dtypes import canonical
from fa_compiler.op_registry.errors import RegistryError
from fa_compiler.op_registry.ge_prototypes import ge_prototype
from fa_compiler.op_registry.spec import Kind, TensorSpec


def to_json(op: Op, name: str, constants: Mapping[str, Weight] | None = None) -> dict[str, Any]:
    """The JSON object of an operator. `name` is the name of the .om, and `constants` are the values
    of inputs by name.

    Raises:
        ValueError: ATC's --singleop has no notation for a type or an attribute.
    """
    known = constants or {}
    attrs = []
    for key, attr in op.attrs.items():
        word = kind_spelling(attr.kind)
        if word is None:
            raise ValueError(
                f"the attribute {key} is of type {attr.kind}, which --singleop does not take"
            )
        attrs.append({"name": key, "type": word, "value": attr.value})
    return {
        "op": op.type,
        "name": re.sub(r"[^A-Za-z0-9._-]", "_", name)[:128],
        "input_desc": [_tensor(op, desc, known.get(desc.name)) for desc in op.input_descs],
        "output_desc": [_tensor(op, desc, None) for desc in op.output_descs],
        "attr": attrs,
    }


def _tensor(op: Op, desc: TensorDesc, value: Weight | None) -> dict[str, Any]:
    if desc.is_absent:
        return {"name": desc.name, "type": ABSENT_TYPE, "format": ABSENT_FORMAT, "shape": []}
    word = type_spelling(canonical(desc.dtype))
    if word is None:
        raise ValueError(f"{desc.name} is {desc.dtype}, which --singleop does not take")
    shape = [UNKNOWN_RANK] if desc.shape is None else list(desc.shape)
    tensor: dict[str, Any] = {
        "name": desc.name,
        "type": word,
        "format": desc.layout,
        "shape": shape,
    }
    if desc.shape is not None and -1 in desc.shape:
        ranges = desc.ranges or [(1, -1)] * len(desc.shape)
        tensor["shape_range"] = [
            list(row) for row, size in zip(ranges, desc.shape, strict=True) if size < 0
        ]
    if value is not None:
        if word not in CONST_TYPES:
            raise ValueError(
                f"{desc.name} is {desc.dtype}, which --singleop does not take for constants"
            )
        array = np.frombuffer(value.load(), dtypes.to_numpy(value.dtype))
        tensor |= {"is_const": True, "const_value": array.tolist()}
    return tensor


def from_json(entry: Mapping[str, Any]) -> tuple[Op, dict[str, Weight]]:
    """The operator of a JSON object that passed `check`, and the values of its constant inputs by
    name."""
    spec = ge_prototype(entry["op"])
    inputs = _named(entry.get("input_desc", []), spec.inputs if spec else ())
    outputs = _named(entry.get("output_desc", []), spec.outputs if spec else ())
    op = Op(str(entry.get("name") or entry["op"]), entry["op"])
    op.input_descs = [_desc(tensor, name) for name, tensor in inputs]
    op.inputs = [None if desc.is_absent else Output(desc.name) for desc in op.input_descs]
    op.output_descs = [_desc(tensor, name) for name, tensor in outputs]
    op.attrs = {attr["name"]: _attr(attr) for attr in entry.get("attr", [])}
    constants = {
        name: weight for name, tensor in inputs if (weight := _constant(tensor)) is not None
    }
    return op, constants


def _named(
    tensors: Sequence[Mapping[str, Any]], entries: Sequence[TensorSpec]
) -> list[tuple[str, Mapping[str, Any]]]:
    """Every tensor with its name: its own, the name of its dynamic input with a number, or the
    prototype's name."""
    named: list[tuple[str, Mapping[str, Any]]] = []
    counts: dict[str, int] = {}
    place = 0
    for tensor in tensors:
        group = tensor.get("dynamic_input")
        if group:
            number = counts[group] = counts.get(group, -1) + 1
            name = f"{group}{number}"
        else:
            name = str(tensor.get("name") or "")
            if not name and place < len(entries):
                entry = entries[place]
                name = f"{entry.name}0" if entry.kind is Kind.DYNAMIC else entry.name
        stem = re.sub(r"\d+$", "", name)
        here = [
            at
            for at, entry in enumerate(entries)
            if entry.name == (stem if entry.kind is Kind.DYNAMIC else name)
        ]
        place = here[0] + 1 if here else place + 1
        named.append((name, tensor))
    return named


def is_absent(tensor: Mapping[str, Any]) -> bool:
    """Whether a tensor object is the placeholder of an absent optional input."""
    return (str(tensor["type"]).upper(), str(tensor["format"]).upper()) == (
        ABSENT_TYPE,
        ABSENT_FORMAT,
    )


def _desc(tensor: Mapping[str, Any], name: str) -> TensorDesc:
    if is_absent(tensor):
        return absent(name)
    shape = None if tensor["shape"] == [UNKNOWN_RANK] else tuple(tensor["shape"])
    ranges = iter(tensor.get("shape_range") or ())
    bounds = None
    if shape is not None and -1 in shape:
        bounds = tuple(tuple(next(ranges)) if size < 0 else (size, size) for size in shape)
    return TensorDesc(name, TYPES[tensor["type"].lower()], shape, tensor["format"].upper(), bounds)


def _attr(attr: Mapping[str, Any]) -> Attr:
    kind, value = ATTR_KINDS[attr["type"]], attr["value"]
    if kind == "Type":
        return Attr(kind, value if isinstance(value, str) else attr_name(value) or "DT_UNDEFINED")
    if kind == "Float":
        return Attr(kind, float(value))
    if kind == "ListFloat":
        return Attr(kind, tuple(map(float, value)))
    return Attr(kind, _frozen(value))


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _constant(tensor: Mapping[str, Any]) -> Weight | None:
    if not tensor.get("is_const") or tensor["type"].lower() not in CONST_TYPES:
        return None
    dtype = TYPES[tensor["type"].lower()]
    try:
        data = np.array(tensor.get("const_value", []), dtypes.to_numpy(dtype)).tobytes()
    except (OverflowError, ValueError, TypeError, RegistryError):
        return None
    return Weight(dtype, tuple(tensor["shape"]), len(data), lambda: data)
