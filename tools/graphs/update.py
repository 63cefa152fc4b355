"""Record in index.json what the compiler makes of the kept graphs.

    python -m tools.graphs.update [NAME...]

Look at the diff: each changed line is a changed promise. A graph whose outputs differ is not recorded.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.graphs import harness
from tests.graphs.examine import examine


def main(names: list[str]) -> int:
    """Update the named graphs, or all."""
    index = harness.read_index()
    broken = 0
    for name in names or sorted(index):
        with tempfile.TemporaryDirectory() as folder:
            seen = examine(name, Path(folder))
        for problem in seen.problems:
            print(f"{name}: {problem}")
        if seen.problems:
            broken += 1
            continue
        if index[name].get("blocks") != seen.blocks:
            print(f"{name}: {index[name].get('blocks')} -> {seen.blocks}")
        index[name].update(blocks=seen.blocks, compared=seen.compared)
    harness.write_index(index)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
