"""REG_OP text: the language in which CANN headers state an operator's prototype.

    REG_OP(Name)
        .INPUT(x, TensorType({DT_FLOAT16, DT_FLOAT}))
        .ATTR(scale_value, Float, 1.0)
        .OP_END_FACTORY_REG(Name)

`parse` and `print_op` are inverse to each other. They keep everything that REG_OP says, with types
and defaults as they are spelled. They drop white space, comments, preprocessor lines and the order
between macros of different kinds. `print_op` writes inputs, outputs, attributes, data types and
graphs, in this order. The order within each kind is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from fa_compiler.op_registry.errors import RegistryError, RegOpSyntaxError, suggestion
from fa_compiler.op_registry.spec import (
    ATTR_TYPES,
    AttrSpec,
    AttrValue,
    GraphSpec,
    InputSpec,
    Kind,
    OpSpec,
    OutputSpec,
    TensorSpec,
    types_in,
)

_Tensor = TypeVar("_Tensor", bound=TensorSpec)

_INPUTS = {
    "INPUT": Kind.REQUIRED,
    "OPTIONAL_INPUT": Kind.OPTIONAL,
    "DYNAMIC_INPUT": Kind.DYNAMIC,
}
_OUTPUTS = {
    "OUTPUT": Kind.REQUIRED,
    "OPTIONAL_OUTPUT": Kind.OPTIONAL,
    "DYNAMIC_OUTPUT": Kind.DYNAMIC,
}
_INPUT_MACRO = {kind: macro for macro, kind in _INPUTS.items()}
_OUTPUT_MACRO = {kind: macro for macro, kind in _OUTPUTS.items()}
_ARGUMENTS = {
    **dict.fromkeys((*_INPUTS, *_OUTPUTS, "REQUIRED_ATTR", "DATATYPE"), 2),
    "ATTR": 3,
    "GRAPH": 1,
    "DYNAMIC_GRAPH": 1,
    "OP_END_FACTORY_REG": 1,
}
_LIMITS = {
    "INT64_MAX": 2**63 - 1,
    "INT64_MIN": -(2**63),
    "INT32_MAX": 2**31 - 1,
    "INT32_MIN": -(2**31),
    "INT_MAX": 2**31 - 1,
    "INT_MIN": -(2**31),
    "UINT32_MAX": 2**32 - 1,
}


@dataclass(frozen=True)
class Parsed:
    """A prototype and the place where it begins. `spec` holds what REG_OP says and nothing else."""

    spec: OpSpec
    path: str
    line: int


@dataclass(frozen=True)
class Unreadable:
    """A prototype that was not read. `error` says why it could not be read; None means that it was
    not asked for."""

    op: str
    error: RegOpSyntaxError | None


def parse(text: str, path: str = "<text>") -> list[OpSpec]:
    """Every prototype in a piece of C++ text, in order. Raises RegOpSyntaxError with `path` and the
    line."""
    return [found.spec for found in parse_located(text, path)]


def parse_located(text: str, path: str = "<text>") -> list[Parsed]:
    """Like `parse`, but with the place of each prototype."""
    reader = _TextReader(text, path)
    return [reader.prototype(place) for place in reader.places()]


def parse_file(path: str | Path, only: Collection[str] | None = None) -> list[Parsed | Unreadable]:
    """The prototypes of a header file. Each is read separately, so that an invalid one does not
    hide the others.

    With `only`, prototypes of other names are not read; they are returned as Unreadable without an
    error. Raises RegistryError if the file cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise RegistryError(f"cannot read {path}: {error.strerror or error}") from error
    reader = _TextReader(text, str(path))
    found: list[Parsed | Unreadable] = []
    for place in reader.places():
        if only is not None and place.name not in only:
            found.append(Unreadable(place.name, None))
            continue
        try:
            found.append(reader.prototype(place))
        except RegOpSyntaxError as error:
            found.append(Unreadable(place.name, error))
    return found


def print_op(spec: OpSpec) -> str:
    """A prototype as REG_OP text. Each macro is indented by four blanks, and there is no final
    newline."""
    lines = [f"REG_OP({spec.name})"]
    lines += [
        f".{_INPUT_MACRO[entry.kind]}({entry.name}, {entry.written})" for entry in spec.inputs
    ]
    lines += [
        f".{_OUTPUT_MACRO[entry.kind]}({entry.name}, {entry.written})" for entry in spec.outputs
    ]
    for attr in spec.attrs:
        if attr.required:
            lines.append(f".REQUIRED_ATTR({attr.name}, {attr.type})")
        else:
            lines.append(f".ATTR({attr.name}, {attr.type}, {attr.written})")
    lines += [f".DATATYPE({name}, {written})" for name, written in spec.datatypes]
    lines += [f".{'DYNAMIC_' if graph.dynamic else ''}GRAPH({graph.name})" for graph in spec.graphs]
    lines.append(f".OP_END_FACTORY_REG({spec.name})")
    return "\n    ".join(lines)


def format_default(type: str, value: AttrValue) -> str:
    """The C++ text of a default value for an attribute of type `type`."""
    if isinstance(value, tuple):
        element = type.removeprefix("List")
        return "{" + ", ".join(format_default(element, item) for item in value) + "}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str) and type == "String":
        return json.dumps(value, ensure_ascii=False)
    return repr(float(value)) if type == "Float" else str(value)


@dataclass(frozen=True)
class _Place:
    """The place of one REG_OP(name): its line, and the offset after its closing bracket."""

    name: str
    line: int
    end: int


@dataclass
class _Draft:
    """A prototype while its macros are being read."""

    name: str
    inputs: list[InputSpec] = field(default_factory=list)
    outputs: list[OutputSpec] = field(default_factory=list)
    attrs: list[AttrSpec] = field(default_factory=list)
    datatypes: list[tuple[str, str]] = field(default_factory=list)
    graphs: list[GraphSpec] = field(default_factory=list)

    def spec(self) -> OpSpec:
        templates = {name: types_in(written) for name, written in self.datatypes}
        return OpSpec(
            self.name,
            tuple(_resolve(entry, templates) for entry in self.inputs),
            tuple(_resolve(entry, templates) for entry in self.outputs),
            tuple(self.attrs),
            tuple(self.datatypes),
            tuple(self.graphs),
        )


class _TextReader:
    """Reads prototypes from a text. Comments and preprocessor lines are first replaced by blanks,
    which keeps the offsets and lines."""

    def __init__(self, text: str, path: str) -> None:
        self.path = path
        self.text = _blank(text)

    def places(self) -> Iterator[_Place]:
        """The place of each REG_OP(name)."""
        for match in re.finditer(r"\bREG_OP\s*\(", self.text):
            (name,), end = self._arguments(match.end() - 1, "REG_OP", 1)
            yield _Place(name, self._line(match.start()), end)

    def prototype(self, place: _Place) -> Parsed:
        """The prototype that begins at a place."""
        return Parsed(self._prototype(place.name, place.end), self.path, place.line)

    def _prototype(self, name: str, position: int) -> OpSpec:
        draft = _Draft(name)
        macro = re.compile(r"\s*\.\s*(\w+)\s*(?=\()")
        while match := macro.match(self.text, position):
            kind, where = match.group(1), match.start(1)
            if kind not in _ARGUMENTS:
                raise self._error(
                    where, f"{name}: unknown macro .{kind}{suggestion(kind, _ARGUMENTS)}"
                )
            arguments, position = self._arguments(match.end(), kind, _ARGUMENTS[kind])
            if kind == "OP_END_FACTORY_REG":
                if arguments[0] != name:
                    raise self._error(
                        where, f"REG_OP({name}) is closed by OP_END_FACTORY_REG({arguments[0]})"
                    )
                return draft.spec()
            self._apply(draft, kind, arguments, where)
        raise self._error(
            position, f"{name}: expected another macro or .OP_END_FACTORY_REG({name})"
        )

    def _apply(self, draft: _Draft, macro: str, arguments: list[str], where: int) -> None:
        name = arguments[0]
        taken: Collection[str]
        if macro in _INPUTS:
            taken = [entry.name for entry in draft.inputs]
            draft.inputs.append(
                InputSpec(name, _INPUTS[macro], _tidy(arguments[1]), types_in(arguments[1]))
            )
        elif macro in _OUTPUTS:
            taken = [entry.name for entry in draft.outputs]
            draft.outputs.append(
                OutputSpec(name, _OUTPUTS[macro], _tidy(arguments[1]), types_in(arguments[1]))
            )
        elif macro == "DATATYPE":
            taken = [each for each, _ in draft.datatypes]
            draft.datatypes.append((name, _tidy(arguments[1])))
        elif macro in ("GRAPH", "DYNAMIC_GRAPH"):
            taken = [entry.name for entry in draft.graphs]
            draft.graphs.append(GraphSpec(name, macro == "DYNAMIC_GRAPH"))
        else:
            taken = [entry.name for entry in draft.attrs]
            draft.attrs.append(self._attr(draft.name, macro, arguments, where))
        if name in taken:
            raise self._error(where, f"{draft.name}: .{macro} names {name!r} a second time")

    def _attr(self, op: str, macro: str, arguments: list[str], where: int) -> AttrSpec:
        name, type = arguments[0], arguments[1]
        if type not in ATTR_TYPES:
            raise self._error(
                where,
                f"{op}: attribute {name} has unknown type {type}{suggestion(type, ATTR_TYPES)}",
            )
        if macro == "REQUIRED_ATTR":
            return AttrSpec(name, type, required=True)
        try:
            default = _parse_default(type, arguments[2])
        except ValueError:
            raise self._error(
                where, f"{op}: {arguments[2]} is no default for attribute {name}, a {type}"
            ) from None
        return AttrSpec(name, type, False, default, _tidy(arguments[2]))

    def _arguments(self, position: int, macro: str, count: int) -> tuple[list[str], int]:
        """The arguments of the macro whose bracket opens at `position`, and the position after the
        closing bracket."""
        arguments, end = [], position + 1
        start, depth, quoted = end, 0, False
        while end < len(self.text):
            char = self.text[end]
            if quoted:
                quoted = char != '"'
                end += char == "\\"
            elif char == '"':
                quoted = True
            elif char in "({[":
                depth += 1
            elif char in ")}]" and depth:
                depth -= 1
            elif char == ")" or (char == "," and not depth):
                arguments.append(self.text[start:end].strip())
                start = end + 1
                if char == ")":
                    break
            end += 1
        else:
            raise self._error(position, f"{macro}: the bracket is never closed")
        if len(arguments) != count or not all(arguments):
            many = "1 argument" if count == 1 else f"{count} arguments"
            raise self._error(
                position, f"{macro} takes {many}, found ({self.text[position + 1 : end].strip()})"
            )
        return arguments, end + 1

    def _line(self, position: int) -> int:
        return self.text.count("\n", 0, position) + 1

    def _error(self, position: int, message: str) -> RegOpSyntaxError:
        return RegOpSyntaxError(self.path, self._line(position), message)


def _blank(text: str) -> str:
    """The text with comments and preprocessor lines replaced by blanks. Line breaks are kept."""
    pattern = re.compile(
        r'"(?:\\.|[^"\\\n])*"'
        r"|//[^\n]*|/\*.*?(?:\*/|\Z)"
        r"|^[ \t]*#(?:\\\r?\n|[^\n])*",
        re.DOTALL | re.MULTILINE,
    )

    def blank(match: re.Match[str]) -> str:
        found = match.group()
        return found if found.startswith('"') else re.sub(r"[^\n]", " ", found)

    return pattern.sub(blank, text)


def _tidy(expression: str) -> str:
    """An expression with uniform spacing: one blank after each comma and none elsewhere. Quoted
    text is not changed."""
    parts = re.split(r'("(?:\\.|[^"\\])*")', expression)
    parts[::2] = [re.sub(r"\s+", "", part).replace(",", ", ") for part in parts[::2]]
    return "".join(parts)


def _parse_default(type: str, text: str) -> AttrValue:
    """The value of a default's C++ text. Raises ValueError if the text is not a value of that
    type."""
    if type.startswith("List"):
        match = re.fullmatch(r"\{(.*)\}", text, re.DOTALL)
        if match is None:
            raise ValueError(text)
        return tuple(
            _parse_default(type.removeprefix("List"), item) for item in _split(match.group(1))
        )
    if type == "String":
        if not re.fullmatch(r'"(?:\\.|[^"\\])*"', text):
            raise ValueError(text)
        value = json.loads(text)
        return str(value)
    if type == "Bool":
        if text not in ("true", "false"):
            raise ValueError(text)
        return text == "true"
    if type == "Int":
        if text in _LIMITS:
            return _LIMITS[text]
        return int(re.sub(r"[uUlL]+$", "", text), 0)
    if type == "Float":
        return float(re.sub(r"(?<=[\d.])[fF]$", "", text))
    return _tidy(text)


def _split(text: str) -> list[str]:
    """The items of a braced list, split at the commas outside of braces and quotes."""
    items, depth, current = [], 0, ""
    for token in re.findall(r'"(?:\\.|[^"\\])*"|.', text, re.DOTALL):
        depth += {"{": 1, "}": -1, "(": 1, ")": -1}.get(token, 0)
        if token == "," and depth == 0:
            items.append(current.strip())
            current = ""
        else:
            current += token
    return [*items, current.strip()] if current.strip() else items


def _resolve(entry: _Tensor, templates: dict[str, tuple[str, ...]]) -> _Tensor:
    """Returns the tensor. If its type is a template (.DATATYPE), it gets the types that the
    template stands for."""
    if entry.written not in templates:
        return entry
    return type(entry)(entry.name, entry.kind, entry.written, templates[entry.written])
