"""Walks the wire format of protobuf: where the fields of a serialised message begin and end.

The content of a field is skipped. A message that cannot be walked is `Malformed`; only protobuf
itself can tell whether such a message is damaged or merely unusual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from fa_compiler.model_files import positional

LENGTH_DELIMITED = 2
"""The wire type of strings, bytes, messages and packed numbers."""

_WINDOW = 1 << 16
_VARINT = 10
"""The most bytes of a varint."""


class Malformed(Exception):
    """The bytes are not a message that can be walked."""


class Field(NamedTuple):
    """A field of a message. Its tag is at `begin`; its content, without a length, is from `body` to
    `end`."""

    number: int
    kind: int
    begin: int
    body: int
    end: int


class Bytes:
    """Serialised bytes by position. Only a window of a file around the last position is in
    memory."""

    def __init__(self, read: Callable[[int, int], bytes], content: bytes = b"") -> None:
        self._read = read
        self._window = content
        self._start = 0

    @classmethod
    def of_file(cls, descriptor: int) -> Bytes:
        """The bytes of an open file."""
        return cls(lambda count, position: positional.read_at(descriptor, count, position))

    @classmethod
    def of(cls, content: bytes) -> Bytes:
        """Bytes in memory."""
        return cls(lambda count, position: content[position : position + count], content)

    def varint(self, position: int) -> tuple[int, int]:
        """The number at a position, and the position after it."""
        index = position - self._start
        if not 0 <= index <= len(self._window) - _VARINT:
            self._window, self._start, index = self._read(_WINDOW, position), position, 0
        value = shift = 0
        for byte in self._window[index : index + _VARINT]:
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, position
            shift += 7
        raise Malformed


def fields(data: Bytes, start: int, stop: int) -> Iterator[Field]:
    """The fields of the message from `start` to `stop`, in order.

    Raises:
        Malformed: the fields do not fill the message exactly, or one has a wire type that ONNX does
            not use.
    """
    position = start
    while position < stop:
        begin = position
        tag, position = data.varint(position)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            _, end = data.varint(position)
        elif kind == 1:
            end = position + 8
        elif kind == LENGTH_DELIMITED:
            length, position = data.varint(position)
            end = position + length
        elif kind == 5:
            end = position + 4
        else:
            raise Malformed
        if end > stop or not number:
            raise Malformed
        yield Field(number, kind, begin, position, end)
        position = end


def head(number: int, length: int) -> bytes:
    """The tag and length that precede the content of a length-delimited field."""
    return varint_of(number << 3 | LENGTH_DELIMITED) + varint_of(length)


def varint_of(value: int) -> bytes:
    """A number from 0 to 2**64 - 1 as protobuf writes it."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
