"""The rules of weights for ATC's ONNX parser: their types, and the positions of weights in
files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import onnx
import onnx_ir as ir

from fa_compiler.lowering.ascend.diagnostic import FileDiagnostic, Rule, Severity
from fa_compiler.lowering.ascend.onnx_route import parser

CONSTANT = Rule(
    "constant-type", Severity.REJECTED, "use a type that ATC takes for constants (E19999)"
)
NO_FILE = Rule("weights-file", Severity.LATER, "put the file beside the model")
ENTRY = Rule(
    "weights-entry", Severity.WRONG, "write the model again with location, offset and length only"
)
BRANCH = Rule("weights-in-branch", Severity.LATER, "move the weight to the main graph")


def check_weights(
    graph: onnx.GraphProto, folder: Path | None, is_main: bool
) -> Iterator[FileDiagnostic]:
    """The diagnostics of a graph's initializers and Constant nodes. `folder` is the model's folder;
    None does not check files."""
    for tensor in graph.initializer:
        yield from _tensor(tensor, tensor.name, folder)
        if not is_main and tensor.data_location == onnx.TensorProto.EXTERNAL:
            yield BRANCH(
                tensor.name,
                "it is in a file, and ATC finds the files of the main graph's weights only",
            )
    for node in graph.node:
        for attr in node.attribute:
            if attr.type == onnx.AttributeProto.TENSOR:
                yield from _tensor(attr.t, node.name or node.output[0], folder)


def _tensor(tensor: onnx.TensorProto, name: str, folder: Path | None) -> Iterator[FileDiagnostic]:
    if tensor.data_type not in parser.TYPES - parser.NO_CONSTANTS:
        yield CONSTANT(name, f"its type is number {tensor.data_type} of ONNX's list")
        return
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return
    entries = {entry.key: entry.value for entry in tensor.external_data}
    for key in entries:
        if key not in parser.EXTERNAL_ENTRIES:
            yield ENTRY(name, f"the entry '{key}' of its external data is read as the length")
    if folder is not None:
        yield from _file(tensor, name, {key: str(value) for key, value in entries.items()}, folder)


def _file(
    tensor: onnx.TensorProto, name: str, entries: Mapping[str, str], folder: Path
) -> Iterator[FileDiagnostic]:
    location, offset = entries.get("location", ""), entries.get("offset", "0")
    if not offset.isascii() or not offset.isdigit():
        yield ENTRY(name, f"its offset is {offset!r}")
        return
    if tensor.data_type == onnx.TensorProto.STRING:
        yield ENTRY(name, "it holds strings, which cannot be in a file")
        return
    needed = int(offset) + (prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth + 7) // 8
    place = folder / location
    if "\0" in location or not place.is_file():
        yield NO_FILE(name, f"its file {location!r} is not beside the model")
    elif place.stat().st_size < needed:
        message = f"its file {location!r} has only {place.stat().st_size} bytes"
        yield NO_FILE(
            name, message, "fetch the file again, or write the model again: it is truncated"
        )
