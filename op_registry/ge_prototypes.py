"""Prototypes of all operators of GE, not only of those in the registry.

The file `ge_prototypes.jsonl.xz` holds one operator per line, in alphabetical order. A line gives
the names and kinds of inputs, outputs and attributes in prototype order, the text of the inputs'
type expressions, and the defaults. The file was dumped from the compiled REG_OP headers of CANN's
open sources: the operators of 2026-08, and the operators of torchair's older set that are missing
there. It holds neither the types of outputs nor the DATATYPE clauses, which bind type names such as
`T`.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from fa_compiler.op_registry.registry import get, names
from fa_compiler.op_registry.spec import (
    AttrSpec,
    GraphSpec,
    InputSpec,
    Kind,
    OpSpec,
    OutputSpec,
    types_in,
)

_ATTR_TYPES = {
    "VT_INT": "Int",
    "VT_FLOAT": "Float",
    "VT_BOOL": "Bool",
    "VT_STRING": "String",
    "VT_DATA_TYPE": "Type",
    "VT_TENSOR": "Tensor",
    "VT_LIST_INT": "ListInt",
    "VT_LIST_FLOAT": "ListFloat",
    "VT_LIST_BOOL": "ListBool",
    "VT_LIST_STRING": "ListString",
    "VT_LIST_DATA_TYPE": "ListType",
    "VT_LIST_LIST_INT": "ListListInt",
}


def ge_prototype(op_type: str) -> OpSpec | None:
    """The newest known prototype of a GE operator, or None.

    For an operator of the registry it is the registry's prototype with all its facts. For the
    others, `dtypes` of an input is empty if its type expression is an alias.
    """
    if op_type in names():
        return get(op_type)
    line = _lines().get(op_type)
    return None if line is None else _read(line)


def ge_operators() -> tuple[str, ...]:
    """Names of all operators that have a known prototype, in alphabetical order."""
    return tuple(sorted({*_lines(), *names()}))


@cache
def _lines() -> Mapping[str, str]:
    packed = resources.files(__package__).joinpath("ge_prototypes.jsonl.xz").read_bytes()
    lines = lzma.decompress(packed).decode().splitlines()
    return {line.removeprefix('{"op":"').partition('"')[0]: line for line in lines}


@cache
def _read(line: str) -> OpSpec:
    entry = json.loads(line)
    return OpSpec(
        entry["op"],
        inputs=tuple(
            InputSpec(name, Kind(kind), types, types_in(types))
            for name, kind, types in entry["inputs"]
        ),
        outputs=tuple(OutputSpec(name, Kind(kind), "") for name, kind in entry["outputs"]),
        attrs=tuple(_attr(*fields) for fields in entry["attrs"]),
        graphs=tuple(GraphSpec(name) for name in entry.get("subgraphs", ())),
    )


def _attr(name: str, kind: str, required: bool, default: Any = None) -> AttrSpec:
    return AttrSpec(name, _ATTR_TYPES[kind], required, _frozen(default))


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
