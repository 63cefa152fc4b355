"""How many examples a random test draws."""

from __future__ import annotations

import os


def examples(count: int) -> int:
    """FA_COMPILER_EXAMPLES times as many as usual."""
    return count * int(os.environ.get("FA_COMPILER_EXAMPLES", "1"))
