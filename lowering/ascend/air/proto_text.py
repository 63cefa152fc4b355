"""Parses the text of a `.proto` file into a FileDescriptorProto, without protoc.

It accepts the language of `ge_ir.proto`: proto3 with messages and enums, nested or not, `repeated`,
`map<string, M>` and `oneof`; no imports, options or services. Anything else raises ValueError.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from google.protobuf import descriptor_pb2  # type: ignore[import-untyped]

_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bytes": _FIELD.TYPE_BYTES,
    "string": _FIELD.TYPE_STRING,
    "bool": _FIELD.TYPE_BOOL,
    "float": _FIELD.TYPE_FLOAT,
    "int64": _FIELD.TYPE_INT64,
    "uint32": _FIELD.TYPE_UINT32,
}
_BLOCK = re.compile(r"(message|enum|oneof)\s+(\w+)\s*\{|(\})|([^;{}]+);")
_MEMBER = re.compile(r"(?:(repeated)\s+)?(?:map<string,\s*(\w+)>|(\w+))\s+(\w+)\s*=\s*(\d+)")
_VALUE = re.compile(r"(\w+)\s*=\s*(\d+)")


def file_descriptor(text: str, name: str) -> Any:
    """The FileDescriptorProto of a `.proto` text. Raises ValueError for syntax that is not
    supported."""
    file = descriptor_pb2.FileDescriptorProto(name=name, syntax="proto3")
    enums = set(re.findall(r"\benum\s+(\w+)", text))
    statements = _statements(re.sub(r"//[^\n]*", "", text))
    for kind, word in statements:
        if kind == "message":
            _message(file.message_type.add(name=word), statements, enums)
        elif kind == "enum":
            _enum(file.enum_type.add(name=word), statements)
        elif word.startswith("package "):
            file.package = word.removeprefix("package ").strip()
        elif word != 'syntax = "proto3"':
            raise ValueError(f"{name}: {word!r} is not understood")
    return file


def _statements(text: str) -> Iterator[tuple[str, str]]:
    """("message"|"enum"|"oneof", name), ("end", "") and ("", a statement without its semicolon), in
    order."""
    place = 0
    while place < len(text.rstrip()):
        found = _BLOCK.match(text, place + len(text[place:]) - len(text[place:].lstrip()))
        if found is None:
            raise ValueError(f"{text[place:].strip()[:40]!r} is not understood")
        block, name, end, statement = found.groups()
        if block:
            yield block, name
        elif end:
            yield "end", ""
        else:
            yield "", " ".join(statement.split())
        place = found.end()


def _message(message: Any, statements: Iterator[tuple[str, str]], enums: set[str]) -> None:
    oneof: int | None = None
    for kind, word in statements:
        if kind == "message":
            _message(message.nested_type.add(name=word), statements, enums)
        elif kind == "enum":
            _enum(message.enum_type.add(name=word), statements)
        elif kind == "oneof":
            message.oneof_decl.add(name=word)
            oneof = len(message.oneof_decl) - 1
        elif kind == "end" and oneof is not None:
            oneof = None
        elif kind == "end":
            return
        else:
            _field(message, word, oneof, enums)
    raise ValueError(f"message {message.name} is not closed")


def _field(message: Any, text: str, oneof: int | None, enums: set[str]) -> None:
    found = _MEMBER.fullmatch(text)
    if found is None:
        raise ValueError(f"{message.name}: {text!r} is not understood")
    repeated, mapped, word, name, number = found.groups()
    field = message.field.add(name=name, number=int(number), label=_FIELD.LABEL_OPTIONAL)
    if mapped:
        entry = message.nested_type.add(
            name="".join(part.capitalize() for part in name.split("_")) + "Entry"
        )
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=_FIELD.LABEL_OPTIONAL, type=_FIELD.TYPE_STRING)
        entry.field.add(
            name="value",
            number=2,
            label=_FIELD.LABEL_OPTIONAL,
            type=_FIELD.TYPE_MESSAGE,
            type_name=mapped,
        )
        word, repeated = entry.name, "repeated"
    if repeated:
        field.label = _FIELD.LABEL_REPEATED
    if oneof is not None:
        field.oneof_index = oneof
    if word in _SCALARS:
        field.type = _SCALARS[word]
    else:
        field.type = _FIELD.TYPE_ENUM if word in enums else _FIELD.TYPE_MESSAGE
        field.type_name = word


def _enum(enum: Any, statements: Iterator[tuple[str, str]]) -> None:
    for kind, word in statements:
        if kind == "end":
            return
        found = _VALUE.fullmatch(word)
        if found is None:
            raise ValueError(f"{enum.name}: {word!r} is not understood")
        enum.value.add(name=found[1], number=int(found[2]))
