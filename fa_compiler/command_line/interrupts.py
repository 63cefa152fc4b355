"""Ctrl-C, SIGTERM and SIGHUP end the command `fa-compiler` with one line and one exit code,
whenever they arrive.

SIGHUP comes where the terminal is closed, or a connection to it is lost.

While the command is imported, the process ends at once: nothing has been written yet. Later
KeyboardInterrupt is raised, so that files are cleaned up. Native code may turn it into another
error while it imports a module, such as an ImportError; `arrived` tells the two apart.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import pairwise

from fa_compiler.command_line.exit_codes import INTERRUPTED

TYPE_CHECKING = False  # as in typing, which takes time to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import NoReturn

_NUMBERS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]
"""Windows has no SIGHUP."""

MESSAGE = "interrupted; nothing was written"

_PROGRAMS = ("fa-compiler", "fa-compiler.exe")

_received: list[int] = []


def is_command() -> bool:
    """Whether this process is the command `fa-compiler`, and not a program that uses the
    package."""
    program = sys.argv[0] if sys.argv else ""
    if program.replace("\\", "/").rpartition("/")[2] in _PROGRAMS:
        return True
    given = sys.orig_argv[1:]
    return any(pair == ("-m", "fa_compiler") for pair in pairwise(given))


def end_at_once() -> None:
    """From now on, an interrupt ends the process."""
    _install(_end)


def raise_in_run() -> None:
    """From now on, an interrupt raises KeyboardInterrupt."""
    _install(_raise)


def arrived() -> bool:
    """Whether an interrupt has arrived since `raise_in_run`."""
    return bool(_received)


def _install(handler: Callable[[int, FrameType | None], NoReturn]) -> None:
    for number in _NUMBERS:
        # The shell of a background job lets Ctrl-C be ignored, and nohup SIGHUP.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    try:
        os.write(2, f"fa-compiler: error: {MESSAGE}\n".encode())
    finally:  # the terminal may be gone
        os._exit(INTERRUPTED)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    _received.append(number)
    raise KeyboardInterrupt
