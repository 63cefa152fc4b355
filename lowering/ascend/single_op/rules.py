"""The checker of single-op JSON: the rules of ATC's parser, and then those of the prototype.

The codes in the messages are those that ATC prints. The rules of the prototype (required
attributes, types, names) are those of an `.air` file; ATC's parser does not check them. If they
hold, the numbered constraints of an attention operator follow, as far as they are checked on every
product: the file does not name its product.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fa_compiler.lowering.ascend.air.check_prototypes import check_op
from fa_compiler.lowering.ascend.diagnostic import FileDiagnostic, Rule, Severity
from fa_compiler.lowering.ascend.dtypes import attr_name, is_type
from fa_compiler.lowering.ascend.single_op.constraints import broken_constraints
from fa_compiler.lowering.ascend.single_op.json_form import from_json, is_absent
from fa_compiler.lowering.ascend.single_op.spelling import (
    ABSENT_FORMAT,
    ABSENT_TYPE,
    ATTR_KINDS,
    CONST_TYPES,
    FORMATS,
    TYPES,
)
from fa_compiler.op_registry.ge_prototypes import ge_prototype
from fa_compiler.op_registry.spec import Kind

NOT_JSON = Rule("not-json", Severity.REJECTED, "write JSON: an array of operators")
NOT_ARRAY = Rule(
    "not-array", Severity.REJECTED, "put the operators into an array, even a single one"
)
NO_OP = Rule("no-op", Severity.REJECTED, 'name the operator under "op" (E10026)')
KEY = Rule("key", Severity.REJECTED, "write the key with a value of its kind (E10032)")
WORDS = Rule(
    "type-or-format",
    Severity.REJECTED,
    "use a type and format of ATC, such as float16, bfloat16 and ND (E10027)",
)
HALF_ABSENT = Rule(
    "half-absent",
    Severity.REJECTED,
    f"write both {ABSENT_TYPE} and {ABSENT_FORMAT} for an absent input (E10027)",
)
ABSENT_OUTPUT = Rule("absent-output", Severity.REJECTED, "declare every output (E10027)")
RANGE = Rule(
    "shape-range",
    Severity.REJECTED,
    "give one [low, high] for each negative size, in order (E13014)",
)
INPUTS = Rule("too-few-inputs", Severity.REJECTED, "declare the required inputs (E13014)")
OUTPUTS = Rule(
    "too-few-outputs", Severity.REJECTED, "declare all outputs of the prototype (E13014)"
)
ATTR_TYPE = Rule("attr-type", Severity.REJECTED, f"use one of {', '.join(ATTR_KINDS)} (E13006)")
NAME = Rule(
    "file-name", Severity.NOTE, "use letters, digits, '.', '_' and '-': ATC names the .om otherwise"
)
CONST_TYPE = Rule("const-type", Severity.NOTE, "ATC leaves the value out")
CONST_SIZE = Rule("const-size", Severity.WRONG, "write one number for each element, flat")
CONSTRAINT = Rule(
    "constraint",
    Severity.LATER,
    "correct the call: the operator does not run in this form on any product",
)

_NAME = re.compile(r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,128}")


def check(path: Path) -> list[FileDiagnostic]:
    """All diagnostics of a file. Raises OSError if it cannot be read."""
    return check_text(path.read_bytes(), path.name)


def check_text(data: bytes, name: str = "the file") -> list[FileDiagnostic]:
    """All diagnostics of the content of a file."""
    try:
        entries = json.loads(data, parse_constant=_no_number)
    except UnicodeDecodeError:
        return [NOT_JSON("", f"{name} is not JSON, and no text at all")]
    except (ValueError, RecursionError) as error:
        return [NOT_JSON("", f"{name} is not JSON ({' '.join(str(error).split())})")]
    if not isinstance(entries, list):
        return [NOT_ARRAY("", f"{name} holds {_kind(entries)}")]
    return [
        diagnostic
        for number, entry in enumerate(entries)
        for diagnostic in _entry(entry, f"operator {number}")
    ]


def _kind(value: Any) -> str:
    """The kind of a value of JSON, with its article."""
    kinds = {
        dict: "an object",
        list: "an array",
        str: "a string",
        bool: "a truth value",
        type(None): "a null",
    }
    return kinds.get(type(value), "a number")


def _no_number(word: str) -> None:
    """Refuse NaN and Infinity, which Python's parser accepts, but ATC's does not."""
    raise ValueError(f"it holds {word}")


def _entry(entry: Any, node: str) -> list[FileDiagnostic]:
    if not isinstance(entry, dict):
        return [KEY(node, f"{_kind(entry)} stands where an operator should")]
    if "compile_flag" in entry and "op" not in entry:
        return [] if _is_int(entry["compile_flag"]) else [KEY(node, "compile_flag is not a number")]
    op_type = entry.get("op")
    if not isinstance(op_type, str) or not op_type:
        return [NO_OP(node, "it has no operator name")]
    node = f"{node} ({op_type})"
    found = list(_keys(entry, node))
    if found:
        return found
    found += _parts(entry, node)
    if any(diagnostic.severity is Severity.REJECTED for diagnostic in found):
        return found
    found += _counts(entry, op_type, node)
    op, constants = from_json(entry)
    found += check_op(op)
    if any(diagnostic.severity is not Severity.NOTE for diagnostic in found):
        return found
    return [
        *found,
        *(CONSTRAINT(node, str(broken)) for broken in broken_constraints(op, constants)),
    ]


def _parts(entry: Mapping[str, Any], node: str) -> Iterator[FileDiagnostic]:
    """The tensors and the attributes of an operator."""
    for side in ("input_desc", "output_desc"):
        for number, tensor in enumerate(entry.get(side, [])):
            yield from _tensor(tensor, node, f"{side}[{number}]", side == "input_desc")
    for number, attr in enumerate(entry.get("attr", [])):
        yield from _attr(attr, node, f"attr[{number}]")


def _keys(entry: Mapping[str, Any], node: str) -> Iterator[FileDiagnostic]:
    for key in ("input_desc", "output_desc", "attr"):
        value = entry.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            yield KEY(node, f"{key} is not an array of objects")
    name = entry.get("name", "")
    if not isinstance(name, str):
        yield KEY(node, "its name is not a string")
    elif name and not _NAME.fullmatch(name):
        yield NAME(node, f"{name!r} cannot be a file name")


def _tensor(
    tensor: Mapping[str, Any], node: str, place: str, is_input: bool
) -> Iterator[FileDiagnostic]:
    shape = tensor.get("shape")
    if not isinstance(shape, list) or not all(map(_is_int, shape)):
        yield KEY(node, f"{place} has no shape, a list of numbers")
        return
    for key in ("type", "format", "name", "dynamic_input", "origin_format"):
        if not isinstance(
            tensor.get(key, "" if key in ("name", "dynamic_input", "origin_format") else None), str
        ):
            yield KEY(node, f"{place} has no {key}, a string")
            return
    word, layout = tensor["type"], tensor["format"]
    absences = (word.upper() == ABSENT_TYPE, layout.upper() == ABSENT_FORMAT)
    if all(absences):
        if not is_input:
            yield ABSENT_OUTPUT(node, f"{place} is declared absent")
        return
    if any(absences):
        yield HALF_ABSENT(node, f"{place} has the type {word} and the format {layout}")
        return
    if word.lower() not in TYPES:
        yield WORDS(node, f"{place} has the type {word!r}, which ATC does not know")
    if layout.lower() not in FORMATS:
        yield WORDS(node, f"{place} has the format {layout!r}, which ATC does not know")
    yield from _ranges(tensor, node, place)
    yield from _const(tensor, node, place)


def _ranges(tensor: Mapping[str, Any], node: str, place: str) -> Iterator[FileDiagnostic]:
    shape, ranges = tensor["shape"], tensor.get("shape_range", [])
    dynamic_sizes = 0 if shape == [-2] else sum(size < 0 for size in shape)
    if not isinstance(ranges, list) or not all(_is_pair(row) for row in ranges):
        yield KEY(node, f"{place} has a shape_range that is not a list of pairs of numbers")
    elif any(size < -1 for size in shape) and shape != [-2]:
        yield RANGE(node, f"{place} has the shape {shape}")
    elif len(ranges) != dynamic_sizes:
        yield RANGE(node, f"{place} has {dynamic_sizes} dynamic sizes and {len(ranges)} ranges")


def _const(tensor: Mapping[str, Any], node: str, place: str) -> Iterator[FileDiagnostic]:
    is_const = tensor.get("is_const", False)
    if not isinstance(is_const, bool):
        yield KEY(node, f"{place} has an is_const that is neither true nor false")
    if is_const is not True:
        return
    values, word = tensor.get("const_value", []), tensor["type"].lower()
    if not isinstance(values, list) or not all(_is_number(value) for value in values):
        yield KEY(node, f"{place} has a const_value that is not a flat list of numbers")
    elif word not in CONST_TYPES:
        yield CONST_TYPE(node, f"{place} is a constant of type {word}, which ATC takes none of")
    elif min(tensor["shape"], default=0) < 0 or len(values) != math.prod(tensor["shape"]):
        yield CONST_SIZE(node, f"{place} has {len(values)} values for the shape {tensor['shape']}")


_LARGEST_FLOAT = (2 - 2**-23) * 2.0**127
"""The largest number of a float attribute. ATC would read a larger number as infinity."""


def _attr(attr: Mapping[str, Any], node: str, place: str) -> Iterator[FileDiagnostic]:
    name, word = attr.get("name"), attr.get("type")
    if not isinstance(name, str) or not isinstance(word, str) or "value" not in attr:
        yield KEY(node, f"{place} needs a name, a type and a value")
    elif word not in ATTR_KINDS:
        yield ATTR_TYPE(node, f"{name} has the type {word!r}")
    elif not _fits(word, attr["value"]):
        yield KEY(node, f"{name} is {json.dumps(attr['value'])[:60]}, which is no {word}")


def _fits(word: str, value: Any) -> bool:
    if word.startswith("list_"):
        return isinstance(value, list) and all(
            _fits(word.removeprefix("list_"), item) for item in value
        )
    if word == "data_type":
        return (
            attr_name(value) is not None
            if _is_int(value)
            else isinstance(value, str) and is_type(value)
        )
    tests = {"bool": lambda: isinstance(value, bool), "string": lambda: isinstance(value, str)}
    tests |= {
        "int": lambda: _is_int(value),
        "float": lambda: _is_number(value) and abs(value) <= _LARGEST_FLOAT,
    }
    return tests[word]()


def _counts(entry: Mapping[str, Any], op_type: str, node: str) -> Iterator[FileDiagnostic]:
    spec = ge_prototype(op_type)
    if spec is None:
        return
    given = len(entry.get("input_desc", []))
    needed = sum(tensor.kind is Kind.REQUIRED for tensor in spec.inputs)
    if given < needed:
        yield INPUTS(node, f"it declares {given} inputs, {op_type} has {needed} required ones")
    given = sum(not is_absent(tensor) for tensor in entry.get("output_desc", []))
    needed = sum(tensor.kind is Kind.REQUIRED for tensor in spec.outputs)
    if given < needed:
        yield OUTPUTS(node, f"it declares {given} outputs, {op_type} has {needed}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 63


def _is_number(value: Any) -> bool:
    return _is_int(value) or isinstance(value, float)


def _is_pair(row: Any) -> bool:
    return isinstance(row, list) and len(row) == 2 and all(map(_is_int, row))
