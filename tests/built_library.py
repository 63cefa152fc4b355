"""FA_COMPILER_TEST_LIBRARY names another build of the library to test: the one with sanitizers (make sanitize)."""

from __future__ import annotations

import os

from fa_compiler.lowering.ort import library

VARIABLE = "FA_COMPILER_TEST_LIBRARY"
SLOWER = 10
"""A case may take so many times as long with such a library."""


def slowed() -> int:
    """How many times as long a case may take."""
    return SLOWER if os.environ.get(VARIABLE) else 1


def choose_library() -> bool:
    """Have sessions register the library that the variable names; False where it names none."""
    path = os.environ.get(VARIABLE)
    if path:
        library.library_path = lambda: path
    return bool(path)
