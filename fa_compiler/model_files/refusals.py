"""Why a system refuses a file, in words for whoever named it."""

from __future__ import annotations

import sys
from pathlib import Path

HELD = (32, 33)
"""Windows' errors for a file that another program has opened for itself, as a whole or a part of
it."""

LONGEST = 259 if sys.platform == "win32" else None
"""The most characters of a path, where the system has such a limit: Windows, unless it is told to
allow long paths."""

TEMPORARY = len("..12345678.tmp")
"""The characters that the name of a file has more than the one for the user while it is written."""


def reason(error: OSError, path: Path) -> str:
    """What the system says of a path, and what else may be known of it."""
    if getattr(error, "winerror", None) in HELD:
        return "another program holds it open; close it there"
    return f"{error.strerror or error}{too_long(path)}"


def too_long(path: Path) -> str:
    """A remark on the length of a path, with what stands in front of it; nothing where the length
    is no reason."""
    if LONGEST is None or (count := len(str(path.absolute()))) + TEMPORARY <= LONGEST:
        return ""
    return f" (the path has {count} characters; above {LONGEST - TEMPORARY} Windows has to allow long paths)"
