"""The base of the package's errors, and those of the registry. Each message is one clear line for
the user."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class FaCompilerError(Exception):
    """Base of all errors that this package raises on purpose. The text is one line for the user."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as it is: some subclasses make their text from other arguments, and a process
        pool returns errors."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(
    kind: type[FaCompilerError], args: tuple[Any, ...], state: dict[str, Any]
) -> FaCompilerError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class RegistryError(FaCompilerError, ValueError):
    """Base of every error of `fa_compiler.op_registry`."""


class UnknownOp(RegistryError):
    """An operator name the registry does not hold."""

    def __init__(self, op_type: str, known: Iterable[str] = ()) -> None:
        self.op_type = op_type
        super().__init__(f"unknown operator {op_type!r}{suggestion(op_type, known)}")


class UnknownVariant(RegistryError):
    """A CANN version or variant name for which the registry knows no prototype of the operator."""


class UnknownProduct(RegistryError):
    """A name that is neither "ort" nor an Ascend product or SoC version."""


class UnknownRuntime(RegistryError):
    """A runtime that the table of runtimes does not have, or a version that is none."""


class NodeError(RegistryError):
    """Inputs, outputs or attributes that do not fit the operator's prototype at all."""


class InputError(NodeError):
    """An input of a call with arrays that is not a tensor. `input` names it, `problem` says what is
    wrong with it."""

    def __init__(self, op_type: str, name: str, problem: str) -> None:
        super().__init__(f"{op_type}: {name}: {problem}")
        self.input = name
        self.problem = problem


class RegOpSyntaxError(RegistryError):
    """REG_OP text that cannot be read. The message begins with "file:line: "."""

    def __init__(self, path: str, line: int, message: str) -> None:
        self.path = path
        self.line = line
        super().__init__(f"{path}:{line}: {message}")


FEW = 12
"""So many names that begin alike stand in one message."""
LISTED = 100
"""A message lists all known names if they are not more than these."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown `name`: the known name of the same letters, or the one
    that it begins, if all others that it begins are longer forms of that one, or the few that it
    begins; else the closest known name, or all known names if they are few."""
    names = sorted(known)
    if same := [other for other in names if other.lower() == name.lower()]:
        return f", did you mean {same[0]!r}?"
    begun = [other for other in names if name and other.startswith(name)]
    whole = all(other.startswith(begun[0]) for other in begun)
    if 0 < len(begun) <= FEW and not whole:
        return f", did you mean one of {', '.join(begun)}?"
    close = begun[:1] if begun and whole else difflib.get_close_matches(name, names, n=1)
    if close:
        return f", did you mean {close[0]!r}?"
    if not 0 < len(names) <= LISTED:
        return ""
    return f"; known {'are' if len(names) > 1 else 'is'} {', '.join(names)}"


def check_keywords(
    function: str,
    given: Iterable[str],
    known: Iterable[str],
    also_called: Mapping[str, str] | None = None,
) -> None:
    """Raise TypeError for a keyword that a function does not know: the error of Python, with the
    name that is meant.

    `also_called` are other names of keywords, such as those of the command line, and the keywords.
    """
    names = frozenset(known)
    for name in given:
        if name not in names:
            other = (also_called or {}).get(name)
            told = f"{name!r}{suggestion(name, names - {'self'}) if other is None else f', did you mean {other!r}?'}"
            raise TypeError(f"{function}() got an unexpected keyword argument {told}")


def suggests_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function that is given an unknown keyword say which one is meant."""
    known = inspect.signature(function).parameters

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        check_keywords(function.__qualname__, kwargs, known)
        return function(*args, **kwargs)

    return checked
