"""`.air` files: read, written, with the weights inside or in files beside it."""

from __future__ import annotations

import re
from pathlib import Path

from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]

from fa_compiler.lowering.ascend.air.decode import CONSTANTS, decode
from fa_compiler.lowering.ascend.air.encode import encode
from fa_compiler.lowering.ascend.air.errors import AirError
from fa_compiler.lowering.ascend.air.rejections import rejections
from fa_compiler.lowering.ascend.air.schema import ModelDef, Proto
from fa_compiler.lowering.ascend.graph import Model, Weight

INLINE_LIMIT = 1 << 29
"""Weights of more bytes together go into files beside the `.air`. A message is several times in memory while it is made
or read, here and in GE; a file is so once."""

MESSAGE_LIMIT = (1 << 31) - 1
"""Bytes a protobuf message may have."""

SMALL = 1 << 12
"""Constants of up to this many bytes stay inside in any case: shapes, axes, scales."""

WEIGHT_FOLDER = "air_weight"


def parse_message(data: bytes, name: str = "the file") -> Proto:
    """The ModelDef of a file's bytes. Raises AirError for bytes that are none."""
    try:
        return ModelDef.FromString(data)
    except DecodeError:
        raise AirError(f"{name} is no .air file: it does not parse as a ge.proto.ModelDef") from None


def read_message(path: Path) -> Proto:
    """The ModelDef of a file. Raises AirError as `parse_message` does, and for a file too large for GE to load; OSError
    where it cannot be read."""
    size = path.stat().st_size
    if size > MESSAGE_LIMIT:
        raise AirError(f"{path.name} has {size} bytes, more than the 2 GiB that GE can load; put the weights beside it")
    return parse_message(path.read_bytes(), path.name)


def parse(data: bytes, folder: Path | None = None, name: str = "the file") -> Model:
    """The graph of a file's bytes; `folder` is where its weights' files are.

    Raises AirError for what GE's loader rejects, and for a weight whose file is missing. What it accepts may still be
    wrong: that is for `check`.
    """
    return _decoded(parse_message(data, name), folder, name)


def read(path: Path) -> Model:
    """The graph of an `.air` file. Raises AirError as `parse` does, and OSError where the file cannot be read."""
    return _decoded(read_message(path), path.parent, path.name)


def _decoded(proto: Proto, folder: Path | None, name: str) -> Model:
    for finding in rejections(proto):
        raise AirError(f"{name}: {finding}")
    return decode(proto, folder)


def serialise(
    model: Model, inline_limit: int = INLINE_LIMIT, message_limit: int = MESSAGE_LIMIT
) -> tuple[bytes, dict[str, Weight]]:
    """The bytes of the `.air` file, and the weights of the files beside it by their relative path.

    Weights of more than `inline_limit` bytes together go beside it. Raises AirError for a graph the loader would
    reject, one that the format cannot hold, and one of more than `message_limit` bytes without its weights.
    """
    outside = _outside(model) if sum(weight.size for _, _, weight in _constants(model)) > inline_limit else {}
    places = {id(weight): location for location, weight in outside.items()}
    inline = sum(weight.size for _, _, weight in _constants(model) if id(weight) not in places)
    if inline > message_limit:
        raise AirError(_too_large(model, inline))
    proto = encode(model, places)
    for finding in rejections(proto):
        raise AirError(f"{model.name} cannot be written: {finding}")
    size = proto.ByteSize()
    if size > message_limit:
        raise AirError(_too_large(model, size))
    try:
        return proto.SerializeToString(deterministic=True), outside
    except EncodeError as error:
        raise AirError(f"{model.name} cannot be written: {error}") from None


def write(model: Model, path: Path, inline_limit: int = INLINE_LIMIT, message_limit: int = MESSAGE_LIMIT) -> list[Path]:
    """Write the `.air` file and what belongs beside it; returns all files, the `.air` first.

    The caller gives a place where a half-written file does no harm, and moves the files. Raises AirError as `serialise`
    does, before anything is written.
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
    """Graph, name and value of every constant."""
    return [
        (graph.name, op.name, attr.value)
        for graph in model.graphs
        for op in graph.ops
        if op.type in CONSTANTS and (attr := op.attrs.get("value")) is not None and isinstance(attr.value, Weight)
    ]


def _outside(model: Model) -> dict[str, Weight]:
    """The weights that leave the message, by the path that GE's own writer would give them."""
    places: dict[str, Weight] = {}
    placed: set[int] = set()
    for graph, op, weight in _constants(model):
        if weight.size > SMALL and id(weight) not in placed:
            placed.add(id(weight))
            stem = f"{WEIGHT_FOLDER}/{_plain(model.name) or 'model'}/Const_{_plain(graph)}_{_plain(op)}_file"[:200]
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
