"""The errors of this package: the user's input is at fault, or this program is."""

from __future__ import annotations

import re

from fa_compiler.op_registry.errors import FaCompilerError, check_keywords, suggests_keywords

__all__ = [
    "FaCompilerError",
    "InputError",
    "InternalError",
    "check_keywords",
    "one_line",
    "origin",
    "suggests_keywords",
]


_PLACE = r"(?<!\S)\S*[/\\]onnxruntime[/\\]\S+?\.(?:h|cc):\d+ "
_SOURCE = re.compile(
    rf"{_PLACE}(?:(?:(?!{_PLACE}).)*? was false\. |[^()]*\([^()]*\)(?: const)? )(?=\S)"
)
"""What stands in front of ONNX Runtime's words: the file, the function, and the condition of a
check."""
SEARCHED = 10_000
"""Messages of fewer letters are searched: the time grows with their square."""


class InputError(FaCompilerError):
    """The input, an option or the path of the output is at fault. The text names the file or
    node."""


class InternalError(FaCompilerError):
    """A result of this program failed its own checks. Nothing was written."""


def one_line(error: BaseException) -> str:
    """The text of `error` on one line; messages of libraries often have several. That of the system
    for a file has its name in front, and no number. That of ONNX Runtime is without its source."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    text = " ".join(str(error).split())
    if len(text) < SEARCHED:
        text = _SOURCE.sub("", text)
    return text or type(error).__name__


def origin(error: BaseException) -> BaseException:
    """The first error in the chain of causes of `error`; `error` itself if it has no cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
