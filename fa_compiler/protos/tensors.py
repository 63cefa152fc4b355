"""Iterates over the tensors of a protobuf model, and checks the files of external ones without
reading them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir

from fa_compiler.errors import InputError

_Kind = onnx.AttributeProto
_Type = onnx.TensorProto.DataType
_PLAIN = frozenset({_Kind.INT, _Kind.INTS, _Kind.FLOAT, _Kind.FLOATS, _Kind.STRING, _Kind.STRINGS})


def all_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of the model: initializers and attributes, including those in subgraphs and
    functions."""
    yield from _graph_tensors(model.graph)
    for function in model.functions:
        for node in function.node:
            yield from _node_tensors(node)


def _graph_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        yield from _node_tensors(node)


def is_plain(attribute: onnx.AttributeProto) -> bool:
    """Whether the type of an attribute is numbers or strings: it holds neither a tensor nor a
    graph."""
    return attribute.type in _PLAIN


def _node_tensors(node: onnx.NodeProto) -> Iterator[onnx.TensorProto]:
    for attribute in node.attribute:
        if is_plain(attribute):
            continue
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        if attribute.HasField("g"):
            yield from _graph_tensors(attribute.g)
        for graph in attribute.graphs:
            yield from _graph_tensors(graph)


def is_external(tensor: onnx.TensorProto) -> bool:
    """Whether the bytes of the tensor are in another file."""
    return tensor.data_location == onnx.TensorProto.EXTERNAL


def location(tensor: onnx.TensorProto) -> str:
    """The `location` of an external tensor, or "" if it has none."""
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def offset(tensor: onnx.TensorProto) -> int:
    """Where the bytes of an external tensor begin in their file."""
    return next((int(entry.value) for entry in tensor.external_data if entry.key == "offset"), 0)


def set_location(tensor: onnx.TensorProto, value: str, shift: int = 0) -> None:
    """Make an external tensor refer to the file `value`, with an offset that is larger by `shift`
    bytes."""
    offset = 0
    for entry in tensor.external_data:
        if entry.key == "location":
            entry.value = value
        elif entry.key == "offset":
            offset = int(entry.value)
            entry.value = str(offset + shift)
    if shift and not any(entry.key == "offset" for entry in tensor.external_data):
        tensor.external_data.add(key="offset", value=str(shift))


def make_external(tensor: onnx.TensorProto, place: str, offset: int, length: int) -> None:
    """Make a tensor external: its `length` bytes begin at `offset` of the file `place`."""
    for field in ("raw_data", "external_data"):
        tensor.ClearField(field)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", place), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)


@dataclass(frozen=True)
class Folder:
    """The folders that may hold external data: `base`, or, if the model file is a link, the folder
    of its target.

    Download caches keep models as such links. ONNX Runtime accepts the same folders. A model that
    was given without a path has no file beside which its data lie.
    """

    base: Path
    roots: tuple[Path, ...]
    has_path: bool = True

    @classmethod
    def of(cls, model_path: Path) -> Folder:
        """The folder of a model file."""
        base = model_path.absolute().parent
        return cls(base, (base.resolve(), model_path.resolve().parent))

    @classmethod
    def at(cls, base: Path) -> Folder:
        """The folder for a model that was given without a path."""
        return cls(base.absolute(), (base.resolve(),), has_path=False)


def check_external(tensor: onnx.TensorProto, folder: Folder, model: str) -> Path:
    """The real path of the file of an external tensor.

    Raises:
        InputError: the file is outside the model's folder, is missing, or is too short.
    """
    who = f"{model}: tensor '{tensor.name}'"
    place = location(tensor)
    if not place:
        raise InputError(f"{who} is external but names no file; export the model again")
    if isinstance(place, bytes):  # protobuf returns bytes for a string that is not UTF-8
        raise InputError(f"{who} lies in {place!r}, which is not UTF-8; export the model again")
    if "\0" in place:
        raise InputError(
            f"{who} lies in {place!r}, which cannot be the name of a file; export the model again"
        )
    # On Windows a path of Linux is not absolute, but it leaves the folder, too; so does a drive.
    if Path(place).anchor or os.pardir in Path(os.path.normpath(place)).parts[:1]:
        raise InputError(
            f"{who} lies in '{place}', outside the model's folder, which is not followed for safety; "
            f"move the file into the folder and save the model with a relative location"
        )
    path = (folder.base / place).resolve()
    if not any(path.is_relative_to(root) for root in folder.roots):
        raise InputError(
            f"{who} lies in '{place}', a link to '{path}' outside the model's folder, which is not followed "
            f"for safety; put the file itself there"
        )
    start, size = _extent(tensor, who)
    if path.exists() and not path.is_file():  # a folder; opening a pipe would wait for its writer
        raise InputError(
            f"{who} lies in '{folder.base / place}', which is not a regular file; put the data there"
        )
    try:
        with path.open("rb") as file:
            found = file.seek(0, os.SEEK_END)
    except OSError as error:
        advice = (
            "put the file beside the model"
            if folder.has_path
            else "put it there, or give the path of the model"
        )
        if not isinstance(error, FileNotFoundError):
            advice = "let this user read the file"
        raise InputError(
            f"{who} needs {_told(size)} bytes of '{folder.base / place}', which cannot be read "
            f"({error.strerror or error}); {advice}"
        ) from None
    if start + size > found:
        raise InputError(
            f"{who} needs {_told(size)} bytes at offset {start} of '{folder.base / place}', "
            f"which has only {found} bytes; the file is truncated, fetch it again"
        )
    return path


def _extent(tensor: onnx.TensorProto, who: str) -> tuple[int, int]:
    """The offset and size of an external tensor in bytes, checked against its type and shape."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        start = int(entries.get("offset", "0"))
        length = int(entries["length"]) if "length" in entries else None
    except ValueError:
        raise InputError(
            f"{who} has an offset or length that is not a number; export the model again"
        ) from None
    if not is_sized(tensor):
        raise InputError(
            f"{who} lies in another file, which a tensor of type {tensor.data_type} cannot"
        )
    size = nbytes(tensor)
    if start < 0 or (length is not None and length != size):
        raise InputError(
            f"{who} has offset {start} and length {length}, but its type and shape need {_told(size)} bytes; "
            f"export the model again"
        )
    return start, size


_UNSIZED = (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING)


def is_sized(tensor: onnx.TensorProto) -> bool:
    """Whether the elements of a tensor have a fixed size."""
    return tensor.data_type in _Type.values() and tensor.data_type not in _UNSIZED


_PARTS: Mapping[int, int] = {onnx.TensorProto.COMPLEX64: 2, onnx.TensorProto.COMPLEX128: 2}
"""The number of numbers in an element, for the types with more than one."""


def content_fault(tensor: onnx.TensorProto) -> str | None:
    """Why the data inside a tensor do not match its type and shape, or None if they do. ONNX
    Runtime refuses a tensor with such a fault."""
    if tensor.data_type == onnx.TensorProto.STRING:
        raw, wanted = tensor.HasField("raw_data"), math.prod(tensor.dims)
        if not is_external(tensor) and (raw or len(tensor.string_data) != wanted):
            held = "raw bytes" if raw else f"{len(tensor.string_data)} strings"
            shape = list(tensor.dims)[:16]
            return f"tensor '{tensor.name}' holds {held}, its type and shape {shape} need {_told(wanted)} strings"
        return None
    if not is_sized(tensor):
        return f"tensor '{tensor.name}' is of type {tensor.data_type}, which ONNX does not have"
    if any(size < 0 for size in tensor.dims):
        return f"tensor '{tensor.name}' has the negative shape {list(tensor.dims)}"
    if is_external(tensor):
        return None
    if tensor.HasField("raw_data"):
        wanted, found = nbytes(tensor), len(tensor.raw_data)
    else:
        bits = ir.DataType(tensor.data_type).bitwidth
        wanted = math.prod(tensor.dims) * _PARTS.get(tensor.data_type, 1)
        if bits < 8:  # several elements share a number
            wanted = (wanted * bits + 7) // 8
        typed = (
            tensor.float_data,
            tensor.int32_data,
            tensor.int64_data,
            tensor.double_data,
            tensor.uint64_data,
        )
        found = max(map(len, typed))
    if found == wanted:
        return None
    unit = "bytes" if tensor.HasField("raw_data") else "numbers"
    shape = list(tensor.dims)[:16]
    return f"tensor '{tensor.name}' holds {found} {unit}, its type and shape {shape} need {_told(wanted)}"


def _told(count: int) -> str:
    """A count for a message. Thousands of dimensions make a number that Python does not print."""
    return str(count) if count < 1 << 63 else "more than 2^63"


_MEASURED = 1 << 16
"""Raw data of up to this many bytes are measured by protobuf."""


def message_size(tensor: onnx.TensorProto) -> int:
    """The number of bytes of a tensor as a message.

    protobuf serialises a message to tell its size. More raw data than `_MEASURED` are counted by
    type and shape instead, which have to match, and without what lies beside them.
    """
    if tensor.HasField("raw_data") and is_sized(tensor) and nbytes(tensor) > _MEASURED:
        return nbytes(tensor)
    size: int = tensor.ByteSize()
    return size


def nbytes(tensor: onnx.TensorProto) -> int:
    """The number of bytes of a tensor that `is_sized`, from its type and shape."""
    size: int = (math.prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth + 7) // 8
    return size
