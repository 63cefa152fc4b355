"""Large weights inside a model file stay there: the model is read without them, and they are copied
when it is written.

While a model is processed, a large initializer of its main graph whose bytes are in the model file
is an external tensor that refers to this file. Its `location` is one that no tensor of a user can
have. Code that does not touch external data does not touch these tensors either. They become inline
again when the model is written or returned.

Weights that a pass joined are such tensors, too, where their parts lie in files: they begin behind
the end of the file, and their bytes are put together from the parts when they are read.

Only a simple tensor is left in the file: its bytes are `raw_data` of exactly the length of its type
and shape, and the file is a regular file whose fields can be walked. Any other file is parsed by
protobuf as a whole; protobuf also reports the fault of a damaged file.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from fa_compiler.errors import InputError
from fa_compiler.model_files import positional, wire
from fa_compiler.model_files.joined import JoinedRows, joined_rows
from fa_compiler.protos import tensors

LARGE = 1 << 16
"""Tensors of more bytes than this are left in the file. It is at least `checker.LIGHT`: shape
inference may need the values of smaller tensors."""

PROTO_LIMIT = (1 << 31) - 1
"""The most bytes of a protobuf message."""

_GRAPH, _INITIALIZER = 7, 5
"""Field numbers in ModelProto and GraphProto."""

_DIMS, _TYPE, _NAME, _RAW, _DOC, _LOCATION, _PROPS = 1, 2, 8, 9, 12, 14, 16
_SIMPLE = frozenset({_DIMS, _TYPE, _NAME, _RAW, _DOC, _LOCATION, _PROPS})
"""The fields of TensorProto that a tensor may have to be left in the file."""

_CHUNK = 1 << 20


class FileWeights:
    """An open model file, and the `location` of the tensors that were left in it.

    The file stays open as long as this object lives. It may be replaced or removed in the meantime.
    """

    def __init__(self, path: Path) -> None:
        """Open a file. Raises OSError."""
        self.path = path
        self._real = path.resolve()
        # A resolved path holds no ".": this path cannot be the location of a user's data file.
        self.location = f"{self._real.parent}{os.sep}{os.curdir}{os.sep}{self._real.name}"
        self.descriptor = positional.open_shared(path)
        weakref.finalize(self, os.close, self.descriptor)
        found = os.fstat(self.descriptor)
        self._state, self.size = _state(found), found.st_size
        self._joined: dict[int, JoinedRows] = {}
        self._end = self.size

    @staticmethod
    def beside(path: Path | None) -> FileWeights | None:
        """The file of a model whose weights lie in other files; None where it is no regular
        file."""
        if path is None or not path.is_file():
            return None
        weights = FileWeights(path)
        return weights if _is_text(weights.location) else None

    def owns(self, tensor: onnx.TensorProto) -> bool:
        """Whether a tensor is one that was left in the file."""
        return tensors.is_external(tensor) and tensors.location(tensor) == self.location

    def keep_joined(self, model: ir.Model) -> None:
        """Let the joined weights of a model whose parts lie in files be read when they are
        written."""
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if tensor is None or (rows := joined_rows(tensor, self.location)) is None:
                continue
            shape, name = ir.Shape(tensor.shape.numpy()), tensor.name or ""
            stub = ir.ExternalTensor(
                self.location, self._end, rows.length, tensor.dtype, shape=shape, name=name
            )
            value.const_value = stub
            self._joined[self._end] = rows
            self._end += rows.length

    def give_joined(self, model: ir.Model) -> None:
        """Give the joined weights of a model that was read from its message their content, read
        when it is asked for: what `keep_joined` left in their place says where they would lie in
        the file, which does not hold them."""
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if (
                not isinstance(tensor, ir.ExternalTensor)
                or os.fspath(tensor.location) != self.location
            ):
                continue
            if (tensor.offset or 0) in self._joined:
                content = partial(self._joined_tensor, tensor)
                value.const_value = ir.LazyTensor(
                    content, tensor.dtype, tensor.shape, name=tensor.name
                )

    def _joined_tensor(self, stub: ir.ExternalTensor) -> ir.TensorProtocol:
        content = b"".join(self.chunks(stub.offset or 0, stub.nbytes))
        array = np.frombuffer(content, stub.dtype.numpy().newbyteorder("<")).reshape(
            stub.shape.numpy()
        )
        return ir.Tensor(array, dtype=stub.dtype)

    def is_of_other_files(self, tensor: onnx.TensorProto) -> bool:
        """Is this a joined weight with parts in other files than the model's?"""
        if not self.owns(tensor) or (rows := self._joined.get(extent(tensor)[0])) is None:
            return False
        return any(part.path is not None for part in rows.parts)

    def check(self, by_path: bool = False) -> None:
        """Check that the file was not changed since it was opened; with `by_path`, nor replaced or
        removed.

        Raises:
            InputError: the file was changed.
        """
        try:
            state = self._real.stat() if by_path else os.fstat(self.descriptor)
        except OSError:
            state = None
        if state is None or _state(state) != self._state:
            raise InputError(
                f"{self.path} was changed while it was in use; start again when it is complete"
            )

    def chunks(self, start: int, count: int) -> Iterator[bytes]:
        """`count` bytes of the file from `start` on, in pieces.

        Raises:
            InputError: the file cannot be read, or was changed.
        """
        self.check()
        try:
            if (rows := self._joined.get(start)) is not None and count:
                yield from rows.chunks(self.descriptor)
                count = 0
            while count and (
                chunk := positional.read_at(self.descriptor, min(count, _CHUNK), start)
            ):
                yield chunk
                start += len(chunk)
                count -= len(chunk)
        except OSError as error:
            raise InputError(
                f"the weights of {self.path} cannot be read: {error.strerror or error}"
            ) from None
        self.check()

    def are_equal(self, first: onnx.TensorProto, second: onnx.TensorProto) -> bool:
        """Whether two tensors that were left in the file have the same bytes.

        Raises:
            InputError: the file cannot be read, or was changed.
        """
        (start, count), (other, other_count) = extent(first), extent(second)
        pairs = zip(self.chunks(start, count), self.chunks(other, other_count), strict=False)
        return count == other_count and all(left == right for left, right in pairs)

    def make_inline(self, tensor: onnx.TensorProto) -> None:
        """Read the content of a tensor that was left in the file into the tensor.

        Raises:
            InputError: the file cannot be read, or was changed.
        """
        content = b"".join(self.chunks(*extent(tensor)))
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
        tensor.raw_data = content


def _state(found: os.stat_result) -> tuple[int, ...]:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def extent(tensor: onnx.TensorProto) -> tuple[int, int]:
    """The offset and the number of bytes of a tensor that was left in the file."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return int(entries["offset"]), int(entries["length"])


@dataclass(frozen=True)
class Skeleton:
    """A serialised model whose large weights were left in the file, as external tensors.
    `kept_in_file` are their positions among the initializers of the main graph."""

    content: bytes
    kept_in_file: frozenset[int]
    weights: FileWeights


def read_skeleton(path: Path) -> Skeleton | None:
    """Read a model file without its large weights; None if no weight can be left in the file.

    Raises:
        OSError: the file cannot be read.
    """
    if not path.is_file():  # a pipe can be read only once
        return None
    weights = FileWeights(path)
    if weights.size <= LARGE or not _is_text(weights.location):
        return None
    data = wire.Bytes.of_file(weights.descriptor)
    kept = _Kept(weights.descriptor)
    left: list[int] = []
    count = 0
    try:
        for field in wire.fields(data, 0, weights.size):
            if (field.number, field.kind) != (_GRAPH, wire.LENGTH_DELIMITED):
                kept.keep(field.begin, field.end)
                continue
            graph = _Kept(weights.descriptor)
            for inner in wire.fields(data, field.body, field.end):
                is_initializer = (inner.number, inner.kind) == (_INITIALIZER, wire.LENGTH_DELIMITED)
                stub = (
                    _stub(data, inner, weights)
                    if is_initializer and inner.end - inner.body > LARGE
                    else None
                )
                if stub is None:
                    graph.keep(inner.begin, inner.end)
                else:
                    graph.add(wire.head(_INITIALIZER, len(stub)) + stub)
                    left.append(count)
                count += is_initializer
            parts = graph.parts()
            kept.add(wire.head(_GRAPH, sum(map(len, parts))), *parts)
        if not left:
            return None
        content = kept.content()
    except wire.Malformed:
        return None
    weights.check()
    return Skeleton(content, frozenset(left), weights)


class _Kept:
    """Bytes that are put together from parts of a file and new bytes."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._parts: list[bytes] = []
        self._start = self._stop = 0

    def keep(self, start: int, stop: int) -> None:
        """Append a part of the file."""
        if start != self._stop:
            self._read()
            self._start = start
        self._stop = stop

    def add(self, *parts: bytes) -> None:
        """Append new bytes."""
        self.parts().extend(parts)

    def parts(self) -> list[bytes]:
        """All bytes that were appended, in pieces: joining them takes as much memory again."""
        self._read()
        self._start = self._stop = 0
        return self._parts

    def content(self) -> bytes:
        """All bytes that were appended."""
        return b"".join(self.parts())

    def _read(self) -> None:
        while self._start < self._stop:
            part = positional.read_at(self._descriptor, self._stop - self._start, self._start)
            if not part:
                raise wire.Malformed
            self._parts.append(part)
            self._start += len(part)


def _stub(data: wire.Bytes, initializer: wire.Field, weights: FileWeights) -> bytes | None:
    """The serialised external tensor that replaces an initializer; None if it cannot be left in the
    file."""
    raw: wire.Field | None = None
    rest = _Kept(weights.descriptor)
    for field in wire.fields(data, initializer.body, initializer.end):
        if field.number not in _SIMPLE:
            return None
        if field.number != _RAW:
            rest.keep(field.begin, field.end)
        elif raw is None and field.kind == wire.LENGTH_DELIMITED and field.end - field.body > LARGE:
            raw = field
        else:
            return None
    if raw is None:
        return None
    tensor = onnx.TensorProto()
    try:
        tensor.ParseFromString(rest.content())
        if tensors.nbytes(tensor) != raw.end - raw.body or min(tensor.dims, default=1) < 0:
            return None
    except (
        DecodeError,
        ValueError,
        TypeError,
    ):  # the bytes are not a tensor, or its elements have no fixed size
        return None
    if tensors.is_external(tensor):
        return None
    tensors.make_external(tensor, weights.location, raw.body, raw.end - raw.body)
    return bytes(tensor.SerializeToString())


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def make_inline(model: onnx.ModelProto, weights: FileWeights | None) -> onnx.ModelProto:
    """Read the content of all tensors that were left in the file into the model, and return the
    model.

    Raises:
        InputError: the file cannot be read, or was changed.
    """
    if weights is not None:
        for tensor in filter(weights.owns, tensors.all_tensors(model)):
            weights.make_inline(tensor)
    return model


def serialised(
    model: onnx.ModelProto, weights: FileWeights | None, name: str
) -> Iterator[bytes | memoryview]:
    """The serialised model with its weights, in pieces and as protobuf would write it. `name` is
    for messages.

    Raises:
        InputError: the file of the weights was changed, or the model exceeds `PROTO_LIMIT`.
    """
    if weights is None:
        yield model.SerializeToString()
        return
    initializers = model.graph.initializer
    left = {index for index, tensor in enumerate(initializers) if weights.owns(tensor)}
    for index, tensor in enumerate(tensors.all_tensors(model)):
        # a pass moved this tensor out of the main graph
        if index not in left and weights.owns(tensor):
            weights.make_inline(tensor)
    pieces = _pieces(model, left)
    if (size := _size(pieces)) > PROTO_LIMIT:
        raise InputError(
            f"{name} would have {size} bytes; over 2 GiB a model needs its weights in external data"
        )
    for piece in pieces:
        if isinstance(piece, tuple):
            yield from weights.chunks(*piece)
        else:
            yield piece


_Piece = bytes | memoryview | tuple[int, int]
"""Bytes, or the offset and length of a part of the weights' file."""


def _size(pieces: list[_Piece]) -> int:
    return sum(piece[1] if isinstance(piece, tuple) else len(piece) for piece in pieces)


def _pieces(model: onnx.ModelProto, left: set[int]) -> list[_Piece]:
    content = model.SerializeToString()
    data, view = wire.Bytes.of(content), memoryview(content)
    pieces: list[_Piece] = []
    done = 0
    for field in wire.fields(data, 0, len(content)):
        if (field.number, field.kind) != (_GRAPH, wire.LENGTH_DELIMITED):
            continue
        graph = _graph_pieces(model.graph, left, data, view, field)
        pieces += [view[done : field.begin], wire.head(_GRAPH, _size(graph)), *graph]
        done = field.end
    return [*pieces, view[done:]]


def _graph_pieces(
    graph: onnx.GraphProto, left: set[int], data: wire.Bytes, view: memoryview, place: wire.Field
) -> list[_Piece]:
    pieces: list[_Piece] = []
    done = place.body
    index = -1
    for field in wire.fields(data, place.body, place.end):
        if (field.number, field.kind) != (_INITIALIZER, wire.LENGTH_DELIMITED):
            continue
        index += 1
        if index in left:
            pieces += [view[done : field.begin], *_inline(graph.initializer[index])]
            done = field.end
    return [*pieces, view[done : place.end]]


def _inline(tensor: onnx.TensorProto) -> list[_Piece]:
    """The field of an initializer, with `raw_data` at the position where protobuf writes it."""
    start, count = extent(tensor)
    first_fields, last_fields = onnx.TensorProto(), onnx.TensorProto()
    first_fields.CopyFrom(tensor)
    for field in ("doc_string", "external_data", "data_location", "metadata_props"):
        first_fields.ClearField(field)
    if tensor.HasField("doc_string"):
        last_fields.doc_string = tensor.doc_string
    last_fields.metadata_props.extend(tensor.metadata_props)
    first = first_fields.SerializeToString() + wire.head(_RAW, count)
    last = last_fields.SerializeToString()
    return [wire.head(_INITIALIZER, len(first) + count + len(last)) + first, (start, count), last]
