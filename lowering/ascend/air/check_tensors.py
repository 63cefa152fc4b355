"""Rules of descriptors and constants."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from fa_compiler.lowering.ascend.air.decode import (
    CONSTANTS,
    FORMATS,
    file_at,
    layout_of,
    location_of,
    type_name,
)
from fa_compiler.lowering.ascend.air.schema import DATA_TYPE, Proto
from fa_compiler.lowering.ascend.diagnostic import FileDiagnostic, Rule, Severity
from fa_compiler.lowering.ascend.dtypes import data_size

DIMS = Rule(
    "dims", Severity.LATER, "use sizes from 0, -1 for an unknown size, [-2] for an unknown rank"
)
TYPE = Rule("dtype-number", Severity.WRONG, "use the numbers of ge.proto.DataType")
LAYOUT = Rule("layout", Severity.NOTE, 'write "ND", unless your CANN has it')
LAYOUT_NUMBER = Rule(
    "layout-number", Severity.WRONG, "leave format_for_int out, or write the number of the layout"
)
RANGE = Rule(
    "shape-range",
    Severity.LATER,
    "give one [low, high] for each dimension that holds its size, -1 for no bound",
)
CONST_FORM = Rule(
    "const-form",
    Severity.WRONG,
    "give it one output, no input and its value as a tensor of the same type",
)
CONST_SIZE = Rule("const-size", Severity.LATER, "store exactly the elements of the shape")
CONSTANT_SIZE = Rule("constant-size", Severity.WRONG, "store exactly the elements of the shape")
WEIGHT_FILE = Rule(
    "weight-file", Severity.REJECTED, "put the file where the .air says, relative to its folder"
)
WEIGHT_LENGTH = Rule(
    "weight-length", Severity.LATER, "restore the file, or write its length into the .air"
)
WEIGHT_PLACE = Rule("weight-place", Severity.REJECTED, "use a relative path without '..'")

_TYPES = DATA_TYPE.values_by_number
LAYOUTS = frozenset(
    (
        "",
        "RESERVED",
        "FORMAT_RESERVED",
        "NC1HWC0_C04",
        "FRACTAL_Z_3D",
        "NDC1HWC0",
        *FORMATS.values(),
    )
)


def check(graph: Proto, folder: Path | None) -> Iterator[FileDiagnostic]:
    """The diagnostics of one graph. `folder` is the folder of its weights' files; None does not
    check these files."""
    for op in graph.op:
        for desc in (*op.input_desc, *op.output_desc):
            yield from _desc(op.name, desc)
        if op.type in CONSTANTS:
            yield from _constant(op, folder)


def _desc(node: str, desc: Proto) -> Iterator[FileDiagnostic]:
    tensor, dims = desc.name or "a tensor", list(desc.shape.dim)
    if any(dim < -1 for dim in dims) and dims != [-2]:
        yield DIMS(node, f"{tensor} has the shape {dims}")
    if desc.dtype not in _TYPES:
        yield TYPE(node, f"{tensor} has type number {desc.dtype}, which GE does not have")
    if desc.layout not in LAYOUTS:
        yield LAYOUT(node, f"{tensor} has the layout {desc.layout!r}, which GE may not know")
    if "format_for_int" in desc.attr and not _is_same_layout(desc):
        text = f"has the layout {desc.layout!r} and format_for_int {desc.attr['format_for_int'].i}"
        yield LAYOUT_NUMBER(
            node, f"{tensor} {text}: GE takes the number, {layout_of(desc) or 'reserved'}"
        )
    if "shape_range" in desc.attr:
        rows = [list(row.list_i) for row in desc.attr["shape_range"].list_list_int.list_list_i]
        if len(rows) != len(dims) or not all(map(_covers, rows, dims)):
            yield RANGE(node, f"the ranges {rows} of {tensor} do not match its shape {dims}")


def _is_same_layout(desc: Proto) -> bool:
    """Whether the number of a layout says what its text says. Two that are not in the table are not
    compared."""
    text = "" if desc.layout in ("RESERVED", "FORMAT_RESERVED") else desc.layout
    return layout_of(desc) == text or not {layout_of(desc), text} & {*FORMATS.values()}


def _covers(row: list[int], dim: int) -> bool:
    if len(row) != 2 or row[0] < 0 or (row[1] != -1 and row[1] < row[0]):
        return False
    return dim == -1 or (row[0] <= dim and (row[1] == -1 or dim <= row[1]))


def _constant(op: Proto, folder: Path | None) -> Iterator[FileDiagnostic]:
    if "value" not in op.attr or op.attr["value"].WhichOneof("value") != "t":
        yield CONST_FORM(op.name, "the constant has no value")
        return
    value = op.attr["value"].t
    if len(op.output_desc) != 1 or len(op.input):
        yield CONST_FORM(
            op.name, f"the constant has {len(op.output_desc)} outputs and {len(op.input)} inputs"
        )
    else:
        stated = op.output_desc[0]
        if (stated.dtype, list(stated.shape.dim)) != (value.desc.dtype, list(value.desc.shape.dim)):
            yield CONST_FORM(
                op.name, "its output is declared with another type or shape than its value"
            )
    size = len(value.data)
    place = location_of(op)
    if place is not None:
        location, size = place
        yield from _file(op.name, location, size, folder)
    yield from _size(op, size)


def _size(op: Proto, size: int) -> Iterator[FileDiagnostic]:
    desc = op.attr["value"].t.desc
    dims, dtype = list(desc.shape.dim), type_name(desc.dtype)
    rule = CONST_SIZE if op.type == "Const" else CONSTANT_SIZE
    if any(dim < 0 for dim in dims):
        yield rule(op.name, f"the constant has the dynamic shape {dims}")
        return
    wanted = data_size(dtype, math.prod(dims))
    if wanted is not None and size != wanted:
        yield rule(op.name, f"the constant has {size} bytes, {dtype} {dims} needs {wanted}")


def _file(node: str, location: str, length: int, folder: Path | None) -> Iterator[FileDiagnostic]:
    if folder is None:
        return
    path = file_at(folder, location)
    if path is None:
        yield WEIGHT_PLACE(
            node,
            f"its data are said to be in {location!r}, which leads out of the folder of the .air",
        )
    elif is_missing(path):
        yield WEIGHT_FILE(node, f"the file of its data, {location}, is missing")
    elif path.stat().st_size != length:
        yield WEIGHT_LENGTH(
            node, f"{location} has {path.stat().st_size} bytes, the .air says {length}"
        )


def is_missing(path: Path) -> bool:
    """Whether a path is not a regular file. This includes a name that is too long for the file
    system."""
    try:
        return not path.is_file()
    except OSError:
        return True
