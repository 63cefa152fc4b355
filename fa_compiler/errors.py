"""The errors of this package: the user's input is at fault, or this program is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

from fa_compiler.op_registry.errors import FaCompilerError, suggestion

__all__ = [
    "FaCompilerError",
    "InputError",
    "InternalError",
    "check_keywords",
    "one_line",
    "origin",
    "suggests_keywords",
]

P = ParamSpec("P")
R = TypeVar("R")


class InputError(FaCompilerError):
    """The input, an option or the path of the output is at fault. The text names the file or node."""


class InternalError(FaCompilerError):
    """A result of this program failed its own checks. Nothing was written."""


def check_keywords(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for a keyword that a function does not know: the error of Python, with the name that is meant."""
    names = frozenset(known)
    for name in given:
        if name not in names:
            told = f"{name!r}{suggestion(name, names - {'self'})}"
            raise TypeError(f"{function}() got an unexpected keyword argument {told}")


def suggests_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function that is given an unknown keyword say which one is meant."""
    known = inspect.signature(function).parameters

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        check_keywords(function.__qualname__, kwargs, known)
        return function(*args, **kwargs)

    return checked


def one_line(error: BaseException) -> str:
    """The text of `error` on one line; messages of libraries often have several. That of the system for a file has its
    name in front, and no number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    text = " ".join(str(error).split())
    return text or type(error).__name__


def origin(error: BaseException) -> BaseException:
    """The first error in the chain of causes of `error`; `error` itself if it has no cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
