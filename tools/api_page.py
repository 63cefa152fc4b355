"""Writes docs/api.md anew from the docstrings: `python -m tools.api_page`.

A heading of the third level names a function or class of the package, such as `### optimize`. What stands below it,
down to the next heading, comes from its docstring. The headings and all other text of the page are written by hand.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import fa_compiler
from fa_compiler.passes.answer.option import options_of
from fa_compiler.pipeline.options import FileOptions

PAGE = Path(__file__).parents[1] / "fa_compiler" / "docs" / "api.md"
WIDTH = 120

_HEADING = re.compile(r"^(### (\S+)|## .+)$", re.MULTILINE)
_SECTION = re.compile(r"^(Args|Returns|Raises):$", re.MULTILINE)
_TITLES = {"Args": "Arguments", "Returns": "Returns", "Raises": "Raises"}
_OPTIONS = {name: option.sentences for name, option in options_of(FileOptions).items()}
"""What the table of options has already."""


def made(page: str) -> str:
    """The page with what the docstrings say now."""
    headings = [*_HEADING.finditer(page)]
    ends = [heading.start() for heading in headings[1:]] + [len(page)]
    parts = [page[: headings[0].start()]]
    for heading, end in zip(headings, ends, strict=True):
        name = heading[2]
        parts.append(page[heading.start() : end] if name is None else f"{heading[0]}\n\n{_described(name)}\n\n")
    return "".join(parts).rstrip() + "\n"


def _described(name: str) -> str:
    found = reduce(getattr, name.split("."), fa_compiler)
    return "\n\n".join((*_signature(name, found), *_text(found), *_fields(found), *_members(found)))


def _signature(name: str, found: Any) -> Iterator[str]:
    """How a function or class is called. A record or an error is not made by the caller."""
    is_record = dataclasses.is_dataclass(found)
    if is_record or (isinstance(found, type) and issubclass(found, Exception)):
        return
    yield f"```text\n{_call(f'fa_compiler.{name}', found)}\n```"


def _call(name: str, found: Any) -> str:
    """A call without the types, which the text gives, on lines that are not too long."""
    signature = inspect.signature(found)
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    ]
    parameters = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    returned = signature.return_annotation
    arrow = "" if isinstance(found, type) or returned in ("None", None) else f" -> {inspect.formatannotation(returned)}"
    call = f"{name}{parameters}{arrow}".replace("'", '"').replace(' -> "', " -> ").removesuffix('"')
    return textwrap.fill(call, WIDTH, subsequent_indent="    ", break_on_hyphens=False)


def _text(found: Any) -> Iterator[str]:
    """A docstring as Markdown: its paragraphs, and its sections as lists."""
    before, *sections = _SECTION.split(inspect.getdoc(found) or "")
    yield from _paragraphs(before)
    for title, text in zip(sections[::2], sections[1::2], strict=True):
        indented, after = _indented(text)
        yield f"{_TITLES[title]}:"
        yield "\n".join(_items(title, indented))
        yield from _paragraphs(after)


def _indented(text: str) -> tuple[str, str]:
    """What is indented below a title, and what comes behind."""
    lines = text.strip("\n").splitlines()
    end = next((number for number, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    return textwrap.dedent("\n".join(lines[:end])), "\n".join(lines[end:])


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\n+", text.strip()):
        if paragraph.startswith("    "):
            yield f"```python\n{textwrap.dedent(paragraph)}\n```"
        elif paragraph.startswith("- "):
            yield "\n".join(_item(line) for line in re.split(r"\n(?=- )", paragraph))
        elif paragraph:
            yield textwrap.fill(" ".join(paragraph.split()), WIDTH, break_on_hyphens=False, break_long_words=False)


def _items(title: str, text: str) -> Iterator[str]:
    """The items of a section. Keywords that the table of options has are told there."""
    if title == "Returns":
        yield from _paragraphs(text)
        return
    options = []
    for item in re.split(r"\n(?! )", text.strip()):
        names, _, said = item.partition(": ")
        if title == "Args" and " ".join(said.split()) == _OPTIONS.get(names):
            options.append(f"`{names}`")
        else:
            yield _item(f"- {', '.join(f'`{name}`' for name in names.split(', '))}: {said}")
    if options:
        yield _item(f"- {', '.join(options)}: [options](#options)")


def _item(text: str) -> str:
    return textwrap.fill(
        " ".join(text.split()), WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


def _fields(found: Any) -> Iterator[str]:
    """The fields of a record."""
    if dataclasses.is_dataclass(found):
        names = [f"`{field.name}`" for field in dataclasses.fields(found) if not field.name.startswith("_")]
        yield textwrap.fill(f"Fields: {', '.join(names)}.", WIDTH)


def _members(found: Any) -> Iterator[str]:
    """The methods and properties of a class that have a text of their own."""
    if not isinstance(found, type):
        return
    for name, member in vars(found).items():
        documented = member.fget if isinstance(member, property) else member
        if name.startswith("_") or not inspect.isfunction(documented) or not documented.__doc__:
            continue
        yield f"#### {found.__name__}.{name}"
        if not isinstance(member, property):
            yield f"```text\n{_call(name, member)}\n```"
        yield from _text(documented)


if __name__ == "__main__":
    PAGE.write_text(made(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
