"""Functions of what may be unknown, which is None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
R = TypeVar("R")


@overload
def if_known(function: Callable[[A], R], one: A | None, /) -> R | None: ...


@overload
def if_known(function: Callable[[A, B], R], one: A | None, two: B | None, /) -> R | None: ...


@overload
def if_known(
    function: Callable[[A, B, C], R], one: A | None, two: B | None, three: C | None, /
) -> R | None: ...


def if_known(function: Callable[..., Any], *arguments: object) -> Any:
    """What a function makes of its arguments; None where one of them is unknown."""
    if any(argument is None for argument in arguments):
        return None
    return function(*arguments)
