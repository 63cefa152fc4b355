"""Runs a script, and says what its last statement gave, how long that took and the most memory that the process had.

    python measured.py RESULT SCRIPT [ARGUMENT ...]

The answer is the JSON file RESULT. This module imports only what every Python has.
"""

from __future__ import annotations

import ast
import json
import sys
import time
from pathlib import Path
from typing import Any


def main(result: str, script: str, *arguments: str) -> None:
    """Run the script, its last statement by itself."""
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    names: dict[str, Any] = {"__name__": "__main__"}
    *before, last = ast.parse(Path(script).read_text(), script).body
    exec(compile(ast.Module(before, []), script, "exec"), names)
    start = time.perf_counter()
    exec(compile(ast.Module([last], []), script, "exec"), names)
    seconds = time.perf_counter() - start
    made = {node.id for node in ast.walk(last) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    import resource  # Windows has none

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    found = {name: _plain(names[name]) for name in sorted(made & names.keys())}
    Path(result).write_text(json.dumps({"seconds": seconds, "bytes": peak, "made": found}))


def _plain(value: Any) -> Any:
    """A value in lists, numbers and texts."""
    if hasattr(value, "detach"):
        value = value.detach()
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value


if __name__ == "__main__":
    main(*sys.argv[1:])
