"""Reads and writes `.air` files, with the weights inside the file or in files beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]

from fa_compiler.lowering.ascend.air import check_edges, check_ends, check_names
from fa_compiler.lowering.ascend.air.decode import CONSTANTS, decode
from fa_compiler.lowering.ascend.air.encode import encode
from fa_compiler.lowering.ascend.air.schema import ModelDef, Proto
from fa_compiler.lowering.ascend.diagnostic import AirError, FileDiagnostic
from fa_compiler.lowering.ascend.graph import Model, Weight

INLINE_LIMIT = 1 << 29
"""If all weights together have more bytes than this, they go into files beside the `.air`. This
package and GE hold several copies of a message in memory while they read or write it, but only one
copy of a file."""

MESSAGE_LIMIT = (1 << 31) - 1
"""The most bytes of a protobuf message."""

SMALL = 1 << 12
"""Constants of up to this many bytes always stay inside: shapes, axes, scales."""

WEIGHT_FOLDER = "air_weight"


def parse_message(data: bytes, name: str = "the file") -> Proto:
    """The ModelDef from the bytes of a file. Raises AirError for bytes that are not a ModelDef."""
    try:
        return ModelDef.FromString(data)
    except DecodeError:
        hint = (
            "; `fa-compiler single-op --check` reads single operators in JSON"
            if name.endswith(".json")
            else ""
        )
        raise AirError(
            f"{name} is not an .air file: it does not parse as a ge.proto.ModelDef{hint}"
        ) from None


def read_message(path: Path) -> Proto:
    """The ModelDef of a file.

    Raises:
        AirError: the file is not a ModelDef, or it is too large for GE.
        OSError: the file cannot be read.
    """
    size = path.stat().st_size
    if size > MESSAGE_LIMIT:
        raise AirError(
            f"{path} has {size} bytes, more than the 2 GiB that GE can load; put the weights beside it"
        )
    return parse_message(path.read_bytes(), str(path))


def parse(data: bytes, folder: Path | None = None, name: str = "the file") -> Model:
    """The graph from the bytes of a file; `folder` is the folder of its weights' files.

    An accepted graph may still be wrong: `check` tells.

    Raises:
        AirError: GE's loader rejects the file, or the file of a weight is missing.
    """
    return _decoded(parse_message(data, name), folder, name)


def read(path: Path) -> Model:
    """The graph of an `.air` file. Raises AirError as `parse` does, and OSError if the file cannot
    be read."""
    return _decoded(read_message(path), path.parent, str(path))


def rejections(proto: Proto) -> Iterator[FileDiagnostic]:
    """The reasons for which GE's loader rejects a ModelDef. Those of edges come first."""
    yield from check_edges.rejections(proto)
    yield from check_ends.rejections(proto)
    yield from check_names.rejections(proto)


def _decoded(proto: Proto, folder: Path | None, name: str) -> Model:
    for diagnostic in (*rejections(proto), *check_ends.lost(proto)):
        raise AirError(f"{name}: {diagnostic}")
    return decode(proto, folder)


def serialise(
    model: Model, inline_limit: int = INLINE_LIMIT, message_limit: int = MESSAGE_LIMIT
) -> tuple[bytes, dict[str, Weight]]:
    """The bytes of the `.air` file, and the weights in files beside it by their relative paths.

    The weights go into files if all of them together have more than `inline_limit` bytes.

    Raises:
        AirError: the loader would reject the graph, the format cannot hold it, or it has more than
            `message_limit` bytes without its weights.
    """
    outside = (
        _outside(model)
        if sum(weight.size for _, _, weight in _constants(model)) > inline_limit
        else {}
    )
    places = {id(weight): location for location, weight in outside.items()}
    inline = sum(weight.size for _, _, weight in _constants(model) if id(weight) not in places)
    if inline > message_limit:
        raise AirError(_too_large(model, inline))
    proto = encode(model, places)
    for diagnostic in (*rejections(proto), *check_ends.lost(proto)):
        raise AirError(f"{model.name} cannot be written: {diagnostic}")
    size = proto.ByteSize()
    if size > message_limit:
        raise AirError(_too_large(model, size))
    try:
        return proto.SerializeToString(deterministic=True), outside
    except EncodeError as error:
        raise AirError(f"{model.name} cannot be written: {error}") from None


def write(
    model: Model, path: Path, inline_limit: int = INLINE_LIMIT, message_limit: int = MESSAGE_LIMIT
) -> list[Path]:
    """Write the `.air` file and the files beside it; returns all files, the `.air` first.

    The caller chooses a folder in which an incomplete file does no harm, and moves the files
    afterwards. AirError is raised as by `serialise`, before anything is written.
    """
    data, outside = serialise(model, inline_limit, message_limit)
    files = [path]
    path.write_bytes(data)
    for location, weight in outside.items():
        place = path.parent / location
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(weight.load())
        files.append(place)
    return files


def _constants(model: Model) -> list[tuple[str, str, Weight]]:
    """The graph, the name and the value of every constant."""
    return [
        (graph.name, op.name, attr.value)
        for graph in model.graphs
        for op in graph.ops
        if op.type in CONSTANTS
        and (attr := op.attrs.get("value")) is not None
        and isinstance(attr.value, Weight)
    ]


def _outside(model: Model) -> dict[str, Weight]:
    """The weights that go into files, by the paths that GE's own writer would use."""
    places: dict[str, Weight] = {}
    placed: set[int] = set()
    for graph, op, weight in _constants(model):
        if weight.size > SMALL and id(weight) not in placed:
            placed.add(id(weight))
            stem = f"{WEIGHT_FOLDER}/{_plain(model.name) or 'model'}/Const_{_plain(graph)}_{_plain(op)}_file"[
                :200
            ]
            location, number = stem, 1
            while location in places:
                location, number = f"{stem}_{number}", number + 1
            places[location] = weight
    return places


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip(".")


def _too_large(model: Model, size: int) -> str:
    return (
        f"{model.name} takes {size} bytes even without its weights, more than the 2 GiB of a protobuf message; "
        "split the model"
    )
