"""The basic blocks of the sources, and the hook that notes which of them run.

A block is a run of statements of a function without a branch between them. It is named by its file and the line of its
first statement, and numbered by its place in `all_blocks()`, which depends on the sources only. Statements that run
while a module is imported belong to no block.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import mmap
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType

ROOT = Path(__file__).parents[2]
FOLDERS = ("passes", "op_registry", "lowering")
PREFIXES = tuple(f"fa_compiler.{folder}." for folder in FOLDERS)
_PROBE = "_block_ran"

Block = tuple[str, int]
"""A file, relative to the root, and the line of the block's first statement."""


def bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The statement lists directly below a statement."""
    for name in ("body", "orelse", "finalbody"):
        found = getattr(node, name, None)
        if isinstance(found, list) and found:
            yield found
    for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield part.body


def starts(body: list[ast.stmt]) -> Iterator[int]:
    """The positions in a statement list at which a block starts: the first, and each behind a branch."""
    documented = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    fresh = True
    for position, statement in enumerate(body):
        if fresh and not (position == 0 and documented and len(body) > 1):
            yield position
            fresh = False
        if any(True for _ in bodies(statement)):
            fresh = True


def blocks(body: list[ast.stmt], *, inside: bool = False) -> Iterator[tuple[list[ast.stmt], list[int]]]:
    """All statement lists of functions below a statement list, with the positions at which their blocks start."""
    if inside:
        yield body, list(starts(body))
    for statement in body:
        is_function = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
        for below in bodies(statement):
            yield from blocks(below, inside=(inside and not isinstance(statement, ast.ClassDef)) or is_function)


@cache
def sources() -> dict[str, bytes]:
    """The Python files of the folders."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_bytes() for path in paths}


@cache
def all_blocks() -> dict[Block, int]:
    """The number of each block."""
    numbers: dict[Block, int] = {}
    for file, source in sources().items():
        for body, positions in blocks(ast.parse(source).body):
            for position in positions:
                numbers.setdefault((file, body[position].lineno), len(numbers))
    return numbers


# -- which blocks run -------------------------------------------------------------------------------


RAN: mmap.mmap | None = None
"""A byte for each block, 1 where it has run; shared with the processes that a test forks."""


class _Loader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data: bytes, path: str, *, _optimize: int = -1) -> CodeType:  # type: ignore[override]
        tree = ast.parse(data)
        file = str(Path(path).resolve().relative_to(ROOT))
        for body, positions in list(blocks(tree.body)):
            for position in reversed(positions):
                statement = body[position]
                probe = ast.parse(f"{_PROBE}[{all_blocks()[file, statement.lineno]}] = 1").body[0]
                for node in ast.walk(probe):
                    ast.copy_location(node, statement)
                body.insert(position, probe)
        return compile(tree, path, "exec", dont_inherit=True)

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, _PROBE, RAN)
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Loads the modules of the folders with a probe at each block."""

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if not f"{fullname}.".startswith(PREFIXES):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.origin, str) and spec.origin.endswith(".py"):
            spec.loader = _Loader(fullname, spec.origin)
        return spec


def watch() -> mmap.mmap:
    """Have the modules that are imported from now on note their blocks in RAN."""
    global RAN
    assert not any(f"{name}.".startswith(PREFIXES) for name in sys.modules), "the sources are imported already"
    RAN = mmap.mmap(-1, len(all_blocks()))
    sys.meta_path.insert(0, _Finder())
    return RAN
