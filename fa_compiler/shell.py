"""Commands as the user's shell takes them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterable

IS_WINDOWS = sys.platform == "win32"


def command(words: Iterable[str]) -> str:
    """Words of a command line, with the quotation marks that the shell of this system needs."""
    return subprocess.list2cmdline(words) if IS_WINDOWS else shlex.join(words)


def with_variable(name: str, value: str, words: str) -> tuple[str, ...]:
    """The lines that run a command with a variable of the environment."""
    if IS_WINDOWS:  # a line for its command prompt; PowerShell has another form
        return (f"set {name}={value}    (in PowerShell: $env:{name} = '{value}')", words)
    return (f"{name}={shlex.quote(value)} {words}",)
