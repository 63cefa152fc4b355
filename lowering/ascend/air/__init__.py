"""The `.air` file, which ATC compiles with --framework=1.

`write` and `read` convert between a file and `lowering.ascend.graph.Model`. The module `check`
checks a file by the rules of GE's loader, by the prototypes and by shape inference.
"""

from fa_compiler.lowering.ascend.air.files import INLINE_LIMIT, parse, read, serialise, write
from fa_compiler.lowering.ascend.diagnostic import AirError

__all__ = ["INLINE_LIMIT", "AirError", "parse", "read", "serialise", "write"]
