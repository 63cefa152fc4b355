"""Functions whose keywords are the options of a record: their signature and docstring say so.

The parameter `**options: Unpack[...]` tells type checkers of the keywords. Python, help() and the
site of the docs take names, defaults and texts from the record (fa_compiler.passes.answer.option).
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from fa_compiler.errors import InputError, check_keywords
from fa_compiler.passes.answer.option import Option, options_of

_COMMAND = re.compile(r"(`fa-compiler [^`]*`)")

_IN_PYTHON = re.compile(r", in Python \w+=\w+,?")

_WORDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    NoneType: "None",
    Iterable: "a list",
    Sequence: "a list",
    Mapping: "a dictionary",
}
"""What users call the types of keywords."""

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def takes(keywords: type, *records: type) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function with the parameter `**options: Unpack[keywords]` have the options in its
    signature and docstring.

    It refuses other keywords by itself, with the error of Python and the name that is meant, and
    values of other types. The line of its docstring that begins with "**options:" becomes one line
    for each option.

    Args:
        keywords: a TypedDict with the options that the function takes.
        records: the dataclasses that hold them.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        options = options_in(keywords, *records)
        signature = _signature(function, keywords, options)
        of_command_line = {
            each.flag.removeprefix("--").replace("-", "_"): each.name for each in options
        }

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            check_keywords(function.__qualname__, kwargs, signature.parameters, of_command_line)
            check_types(keywords, kwargs)
            return function(*args, **kwargs)

        checked.__signature__ = signature  # type: ignore[attr-defined]
        checked.__doc__ = _with_options(function.__doc__, options)
        return checked

    return decorated


def tells_of(keywords: type, *records: type) -> Callable[[C], C]:
    """Let the docstring of a class have the options that its `__init__` takes."""

    def decorated(of: C) -> C:
        of.__doc__ = _with_options(of.__doc__, options_in(keywords, *records))
        return of

    return decorated


def check_types(keywords: type, given: Mapping[str, object]) -> None:
    """Raise TypeError for a value that has another type than a TypedDict of keywords gives to its
    keyword."""
    types = get_type_hints(keywords)
    for name, value in given.items():
        wanted = _types(types.get(name, object))
        if not any(_is_of(value, each) for each in wanted):
            words = " or ".join(_WORDS.get(each, each.__name__) for each in wanted)
            raise TypeError(f"`{name}` is {words}, not {value!r}")


def _types(hint: Any) -> list[type]:
    """The types of the values that a hint allows, such as str and NoneType for `str | None`."""
    if get_origin(hint) in (Union, UnionType):
        return [each for part in get_args(hint) for each in _types(part)]
    return [str if get_origin(hint) is Literal else get_origin(hint) or hint]


def _is_of(value: object, wanted: type) -> bool:
    """Is a value of a type? NumPy has numbers, too. True is no number."""
    number = {int: Integral, float: Real}.get(wanted)
    if number is not None:
        return isinstance(value, number) and not isinstance(value, bool)
    return isinstance(value, wanted)


@contextmanager
def names_of_python(*records: type) -> Iterator[None]:
    """Let errors speak of the keywords of a function, where their text has the flags of the command
    line: `opset` in the place of --opset, and target="onnx" in the place of --target onnx. A
    command in backticks keeps its flags."""
    try:
        yield
    except InputError as error:
        options = list(options_of(*records).values())
        parts = _COMMAND.split(str(error))
        told = (
            part if _COMMAND.fullmatch(part) else _with_keywords(part, options) for part in parts
        )
        raise InputError("".join(told)) from None


def flags_only(text: str) -> str:
    """A text for the command line: without the keywords of Python that stand behind the flags."""
    return _IN_PYTHON.sub("", text)


def _with_keywords(text: str, options: Sequence[Option]) -> str:
    """A text with the keywords of options in the place of their flags."""
    names = {option.flag: f"`{option.name}`" for option in options}
    for option in options:
        if option.metavar is not None:
            text = text.replace(f"{option.flag} {option.metavar}", names[option.flag])
    text = re.sub(r"--(target|runtime) ([a-z-]+)(?= --)", r"--\1 \2,", text)
    text = re.sub(r"--(target|runtime) ([a-z-]+)", r'\1="\2"', text)
    return re.sub(r"--[a-z]+(-[a-z]+)*(?!\w)", lambda flag: names.get(flag[0], flag[0]), text)


def options_in(keywords: type, *records: type) -> list[Option]:
    """The options that a TypedDict names, in the order of the records."""
    return [
        option for name, option in options_of(*records).items() if name in keywords.__annotations__
    ]


def _signature(
    function: Callable[..., Any], keywords: type, options: Sequence[Option]
) -> inspect.Signature:
    """The signature of a function with the options in the place of **options."""
    signature, types = inspect.signature(function), get_type_hints(keywords)
    own = [
        each
        for each in signature.parameters.values()
        if each.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    more = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=option.default,
            annotation=types[option.name],
        )
        for option in options
    ]
    return signature.replace(parameters=[*own, *more])


def _with_options(doc: str | None, options: Sequence[Option]) -> str | None:
    """A docstring with the options; Python has no docstring if it runs with -OO."""
    if doc is None:
        return None
    return re.sub(
        r"^( *)\*\*options: .*\n",
        lambda found: "".join(_lines(found[1], options)),
        doc,
        flags=re.MULTILINE,
    )


def _lines(indent: str, options: Sequence[Option]) -> Iterator[str]:
    for option in options:
        text, further = f"{indent}{option.name}: {option.sentences}", f"{indent}    "
        yield textwrap.fill(text, 120, subsequent_indent=further, break_on_hyphens=False) + "\n"
