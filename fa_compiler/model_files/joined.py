"""Joined weights that nobody has written yet: their bytes are those of parts of files, in rows
beside each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from fa_compiler.model_files import positional
from fa_compiler.passes.emit.joined import JoinedTensor

CHUNK = 1 << 20


@dataclass(frozen=True)
class Part:
    """Rows of `width` bytes, which begin at `start` of a file; None stands for the model's own
    file."""

    path: Path | None
    start: int
    width: int


@dataclass(frozen=True)
class JoinedRows:
    """Rows that consist of one row of each part."""

    rows: int
    parts: tuple[Part, ...]

    @property
    def length(self) -> int:
        """The number of bytes."""
        return self.rows * sum(part.width for part in self.parts)

    def chunks(self, own: int) -> Iterator[bytes]:
        """The bytes in pieces. `own` is the open model file. Raises OSError."""
        with ExitStack() as stack:
            files = {}
            for path in {part.path for part in self.parts}:
                files[path] = own if path is None else positional.open_shared(path)
                if path is not None:
                    stack.callback(os.close, files[path])
            if self.rows == 1:
                for part in self.parts:
                    yield from _chunks(files[part.path], part.start, part.width)
                return
            step = max(1, CHUNK * self.rows // max(1, self.length))
            for first in range(0, self.rows, step):
                count = min(step, self.rows - first)
                blocks = [_rows(files[part.path], part, first, count) for part in self.parts]
                yield np.concatenate(blocks, axis=1).tobytes()


def _rows(descriptor: int, part: Part, first: int, count: int) -> np.ndarray:
    content = b"".join(_chunks(descriptor, part.start + first * part.width, count * part.width))
    return np.frombuffer(content, np.uint8).reshape(count, part.width)


def _chunks(descriptor: int, start: int, count: int) -> Iterator[bytes]:
    while count:
        chunk = positional.read_at(descriptor, min(count, CHUNK), start)
        if not chunk:
            raise OSError(None, "the weights became shorter while they were read")
        yield chunk
        start, count = start + len(chunk), count - len(chunk)


def file_chunks(path: Path, start: int, count: int) -> Iterator[bytes]:
    """Bytes of a file, in pieces. Raises OSError."""
    descriptor = positional.open_shared(path)
    try:
        yield from _chunks(descriptor, start, count)
    finally:
        os.close(descriptor)


def joined_rows(tensor: ir.TensorProtocol | None, own: str) -> JoinedRows | None:
    """The rows of a joined tensor whose parts all lie in files; None for another tensor. `own` is
    the location of what lies in the model's file."""
    if not isinstance(tensor, JoinedTensor):
        return None
    parts = []
    for part in tensor.parts:
        if not isinstance(part, ir.ExternalTensor):
            return None
        rows = part.shape.numpy()[0] if tensor.axis else 1
        place = os.fspath(part.location)
        parts.append(
            Part(None if place == own else Path(place), part.offset or 0, part.nbytes // rows)
        )
    return JoinedRows(tensor.shape.numpy()[0] if tensor.axis else 1, tuple(parts))
