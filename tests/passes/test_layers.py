"""The packages of passes stand on each other in one order; within one, no file imports another in a circle."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent / "passes"
ORDER = (
    *("answer", "ir", "algebra", "ops", "values", "layout", "emit", "masks", "matching", "rewrite"),
    *("attention_ops", "sparse", "backward", "in_place", "parallel", "prepare", "fusion"),
)
"""From the ground up."""
FILES = sorted(ROOT.rglob("*.py"))


def imports(file: Path) -> set[str]:
    """The modules of passes that a file imports, such as "masks.mask"."""
    found = set()
    package = file.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        name = node.module or ""
        if node.level:
            name = ".".join((*package[: len(package) - node.level + 1], *filter(None, [name])))
        elif name == "fa_compiler.passes" or name.startswith("fa_compiler.passes."):
            name = name.removeprefix("fa_compiler.passes").removeprefix(".")
        else:
            continue
        for alias in node.names:
            whole = f"{name}.{alias.name}".removeprefix(".")
            found.add(whole if ROOT.joinpath(*whole.split(".")).with_suffix(".py").is_file() else name)
    return found


def test_every_package_has_its_place() -> None:
    packages = {file.relative_to(ROOT).parts[0].removesuffix(".py") for file in FILES} - {"__init__"}
    assert packages == set(ORDER)


@pytest.mark.parametrize("layer", ORDER)
def test_a_layer_knows_those_below_only(layer: str) -> None:
    above = ORDER[ORDER.index(layer) + 1 :]
    for file in FILES:
        if file.relative_to(ROOT).parts[0].removesuffix(".py") == layer:
            for name in imports(file):
                assert name.split(".")[0] not in above, f"{file.relative_to(ROOT)} imports {name}"


def test_no_circles() -> None:
    graph = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts): imports(file)
        for file in FILES
        if file.stem != "__init__"
    }
    assert len(list(TopologicalSorter(graph).static_order())) >= len(graph)
