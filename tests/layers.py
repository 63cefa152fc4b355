"""The imports of a package, for the tests of its layers."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path


@dataclass(frozen=True)
class Layers:
    """The files of a package below `root`, which others import as `name`.

    `order` are its sub-packages and loose modules from the ground up. `apart` are folders below `root` that are not
    part of it.
    """

    name: str
    root: Path
    order: tuple[str, ...]
    apart: tuple[str, ...] = ()

    @property
    def files(self) -> list[Path]:
        """The files, without `__init__.py` of the package itself."""
        files = (file for file in sorted(self.root.rglob("*.py")) if file != self.root / "__init__.py")
        return [file for file in files if self.layer(file) not in self.apart]

    def layer(self, file: Path) -> str:
        """The sub-package, or the loose module, that a file belongs to."""
        return file.relative_to(self.root).parts[0].removesuffix(".py")

    def imports(self, file: Path) -> set[str]:
        """The modules of the package that a file imports anywhere, also in a function, such as "masks.mask"."""
        found = set()
        package = file.relative_to(self.root).parent.parts
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.removeprefix(f"{self.name}.") for alias in node.names if self.holds(alias.name)}
            if not isinstance(node, ast.ImportFrom):
                continue
            name = node.module or ""
            if node.level:
                name = ".".join((*package[: len(package) - node.level + 1], *filter(None, [name])))
            elif name == self.name or self.holds(name):
                name = name.removeprefix(self.name).removeprefix(".")
            else:
                continue
            for alias in node.names:
                whole = f"{name}.{alias.name}".removeprefix(".")
                place = self.root.joinpath(*whole.split("."))
                found.add(whole if place.with_suffix(".py").is_file() or place.is_dir() else name or "__init__")
        return {name for name in found if name.split(".")[0] not in self.apart}

    def holds(self, module: str) -> bool:
        """Whether a module is below the package."""
        return module.startswith(f"{self.name}.")

    def arrows_upward(self) -> list[str]:
        """The imports of a layer above, as sentences. The `__init__.py` of the package stands above all of them."""
        return [
            f"{file.relative_to(self.root)} imports {name}"
            for file in self.files
            for name in sorted(self.imports(file))
            if name.split(".")[0] not in self.order[: self.order.index(self.layer(file)) + 1]
        ]

    def assert_no_circles(self) -> None:
        """Raise CycleError if files import each other in a circle."""
        graph = {
            ".".join(file.relative_to(self.root).with_suffix("").parts).removesuffix(".__init__"): self.imports(file)
            for file in self.files
        }
        for name, read in graph.items():
            read.discard(name)
        assert len(list(TopologicalSorter(graph).static_order())) >= len(graph)
