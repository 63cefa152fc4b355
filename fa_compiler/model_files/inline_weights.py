"""Weights inside a model file are left there: what is read is the model without them, and what is written gets them
from there, a chunk at a time.

While a model is in work, a large initializer of its main graph whose bytes lie in the file itself is an external
tensor that points into this file, by a `location` no tensor of a user can have. Everything that leaves external data
alone leaves these alone too. They become inline again where the model is written or returned.

Left in the file is only what is simple: `raw_data`, of exactly the length that type and shape demand, in a regular
file that can be walked. Everything else goes to protobuf whole, which also says what is wrong with a damaged file.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from fa_compiler.errors import InputError
from fa_compiler.model_files import tensors, wire

LEFT = 1 << 16
"""Tensors of more bytes than this are left in the file. Not below `checking.LIGHT`: what is smaller may steer shape
inference."""

PROTO_LIMIT = (1 << 31) - 1
"""Bytes a protobuf message may have at most."""

_GRAPH, _INITIALIZER = 7, 5
"""Field numbers in ModelProto and GraphProto."""

_DIMS, _TYPE, _NAME, _RAW, _DOC, _LOCATION, _PROPS = 1, 2, 8, 9, 12, 14, 16
_SIMPLE = frozenset({_DIMS, _TYPE, _NAME, _RAW, _DOC, _LOCATION, _PROPS})
"""Field numbers in TensorProto: all that a tensor that is left in the file may have."""

_CHUNK = 1 << 20


class FileWeights:
    """An open model file, and the `location` of the tensors that were left in it.

    The file is open as long as this lives, so that it may be replaced or removed meanwhile.
    """

    def __init__(self, path: Path) -> None:
        """Open a file; raises OSError."""
        self.path = path
        self._real = path.resolve()
        # Resolved paths hold no ".": this one cannot be the place of a user's data file.
        self.location = f"{self._real.parent}{os.sep}{os.curdir}{os.sep}{self._real.name}"
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)
        found = os.fstat(self.descriptor)
        self._state, self.size = _state(found), found.st_size

    def own(self, tensor: onnx.TensorProto) -> bool:
        """Whether a tensor is one that was left in the file."""
        return tensors.is_external(tensor) and tensors.location(tensor) == self.location

    def check(self, by_path: bool = False) -> None:
        """Make sure that the file is what it was when it was opened; `by_path` that it is still at its place, too.

        Raises:
            InputError: somebody wrote to it.
        """
        try:
            state = self._real.stat() if by_path else os.fstat(self.descriptor)
        except OSError:
            state = None
        if state is None or _state(state) != self._state:
            raise InputError(f"{self.path} was changed while it was in use; start again when it is complete")

    def chunks(self, start: int, count: int) -> Iterator[bytes]:
        """Some bytes of the file, in pieces.

        Raises:
            InputError: they cannot be read, or the file was changed.
        """
        self.check()
        while count:
            try:
                chunk = os.pread(self.descriptor, min(count, _CHUNK), start)
            except OSError as error:
                raise InputError(f"{self.path} cannot be read: {error.strerror or error}") from None
            if not chunk:
                break
            yield chunk
            start += len(chunk)
            count -= len(chunk)
        self.check()

    def bring_in(self, tensor: onnx.TensorProto) -> None:
        """Give a tensor that was left in the file its content.

        Raises:
            InputError: it cannot be read, or the file was changed.
        """
        content = b"".join(self.chunks(*extent(tensor)))
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
        tensor.raw_data = content


def _state(found: os.stat_result) -> tuple[int, ...]:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def extent(tensor: onnx.TensorProto) -> tuple[int, int]:
    """Where in the file a tensor lies that was left there, and how many bytes it has."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return int(entries["offset"]), int(entries["length"])


@dataclass(frozen=True)
class Skimmed:
    """A serialised model whose large weights are external tensors. `left` are their positions among the main graph's
    initializers."""

    content: bytes
    left: frozenset[int]
    weights: FileWeights


def skim(path: Path) -> Skimmed | None:
    """Read a model file but for its large weights; None when there are none that can be left.

    Raises:
        OSError: the file cannot be read.
    """
    if not path.is_file():  # a pipe can be read only once
        return None
    weights = FileWeights(path)
    if weights.size <= LEFT or not _is_text(weights.location):
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
                stub = _stub(data, inner, weights) if is_initializer and inner.end - inner.body > LEFT else None
                if stub is None:
                    graph.keep(inner.begin, inner.end)
                else:
                    graph.add(wire.head(_INITIALIZER, len(stub)) + stub)
                    left.append(count)
                count += is_initializer
            content = graph.content()
            kept.add(wire.head(_GRAPH, len(content)) + content)
        if not left:
            return None
        content = kept.content()
    except wire.Malformed:
        return None
    weights.check()
    return Skimmed(content, frozenset(left), weights)


class _Kept:
    """Parts of a file and new bytes, one after the other."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._parts: list[bytes] = []
        self._start = self._stop = 0

    def keep(self, start: int, stop: int) -> None:
        """Go on with a part of the file."""
        if start != self._stop:
            self._read()
            self._start = start
        self._stop = stop

    def add(self, content: bytes) -> None:
        """Go on with new bytes."""
        self._read()
        self._start = self._stop = 0
        self._parts.append(content)

    def content(self) -> bytes:
        """All of it."""
        self._read()
        self._start = self._stop = 0
        return b"".join(self._parts)

    def _read(self) -> None:
        while self._start < self._stop:
            part = os.pread(self._descriptor, self._stop - self._start, self._start)
            if not part:
                raise wire.Malformed
            self._parts.append(part)
            self._start += len(part)


def _stub(data: wire.Bytes, initializer: wire.Field, weights: FileWeights) -> bytes | None:
    """An external tensor for one that can be left in the file."""
    raw: wire.Field | None = None
    rest = _Kept(weights.descriptor)
    for field in wire.fields(data, initializer.body, initializer.end):
        if field.number not in _SIMPLE:
            return None
        if field.number != _RAW:
            rest.keep(field.begin, field.end)
        elif raw is None and field.kind == wire.LENGTH_DELIMITED and field.end - field.body > LEFT:
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
    except (DecodeError, ValueError, TypeError):  # not a tensor, or of a type without a size
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


def bring_in(model: onnx.ModelProto, weights: FileWeights | None) -> onnx.ModelProto:
    """Give a model the content of all tensors that were left in the file; returns it.

    Raises:
        InputError: they cannot be read, or the file was changed.
    """
    if weights is not None:
        for tensor in filter(weights.own, tensors.all_tensors(model)):
            weights.bring_in(tensor)
    return model


def serialised(model: onnx.ModelProto, weights: FileWeights | None, name: str) -> Iterator[bytes | memoryview]:
    """The serialised model with its weights in it, as protobuf would write it, in pieces; `name` is for messages.

    Raises:
        InputError: the file of the weights was changed, or the model has more bytes than a model can.
    """
    if weights is None:
        yield model.SerializeToString()
        return
    initializers = model.graph.initializer
    left = {index for index, tensor in enumerate(initializers) if weights.own(tensor)}
    for index, tensor in enumerate(tensors.all_tensors(model)):
        if index not in left and weights.own(tensor):  # a pass moved it out of the main graph
            weights.bring_in(tensor)
    pieces = _pieces(model, left)
    if (size := _size(pieces)) > PROTO_LIMIT:
        raise InputError(f"{name} would have {size} bytes; over 2 GiB a model needs its weights in external data")
    for piece in pieces:
        if isinstance(piece, tuple):
            yield from weights.chunks(*piece)
        else:
            yield piece


_Piece = bytes | memoryview | tuple[int, int]
"""Bytes, or offset and length of a part of the file the weights lie in."""


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
    """The field of an initializer, `raw_data` at the place protobuf gives it."""
    start, count = extent(tensor)
    before, behind = onnx.TensorProto(), onnx.TensorProto()
    before.CopyFrom(tensor)
    for field in ("doc_string", "external_data", "data_location", "metadata_props"):
        before.ClearField(field)
    if tensor.HasField("doc_string"):
        behind.doc_string = tensor.doc_string
    behind.metadata_props.extend(tensor.metadata_props)
    first = before.SerializeToString() + wire.head(_RAW, count)
    last = behind.SerializeToString()
    return [wire.head(_INITIALIZER, len(first) + count + len(last)) + first, (start, count), last]
