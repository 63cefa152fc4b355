"""FA_COMPILER_TEST_LIBRARY names another build of the library to test: the one with sanitizers (make sanitize)."""

from __future__ import annotations

import os

from fa_compiler.lowering.ort import library

VARIABLE = "FA_COMPILER_TEST_LIBRARY"


def choose_library() -> bool:
    """Have sessions register the library that the variable names; False where it names none."""
    path = os.environ.get(VARIABLE)
    if path:
        library.library_path = lambda: path
    return bool(path)
