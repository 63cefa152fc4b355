"""The `.air` file, which ATC compiles with --framework=1: written, read and checked as GE's loader reads it.

`write` and `read` go between a file and `lowering.ascend.graph.Model`; `check` applies the loader's rules, the
prototypes and inference to a file.
"""

from fa_compiler.lowering.ascend.air.errors import AirError
from fa_compiler.lowering.ascend.air.files import INLINE_LIMIT, parse, read, serialise, write

__all__ = ["INLINE_LIMIT", "AirError", "parse", "read", "serialise", "write"]
