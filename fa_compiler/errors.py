"""The two ways a run can fail: the user's input, or a fault of this program."""

from __future__ import annotations


class FaCompilerError(Exception):
    """Base of every error this package raises on purpose; its text is one line for the user."""


class InputError(FaCompilerError):
    """The input, an option or the place of the output is at fault. The text names the file or node."""


class InternalError(FaCompilerError):
    """A result of this program failed its own checks. Nothing was written."""


def one_line(error: BaseException) -> str:
    """The text of `error` on one line, for messages of libraries that span several."""
    text = " ".join(str(error).split())
    return text or type(error).__name__


def origin(error: BaseException) -> BaseException:
    """The error that others were raised from, `error` itself where there is none."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
