"""Draws how the folders and loose modules of passes/ stand on each other, of one or several checkouts.

    python -m tools.structure OUT.svg TITLE=CHECKOUT [TITLE=CHECKOUT ...]

A box is a folder (blue) or a loose module; the more lines it has, the wider it is. It stands one floor above the
highest box that it imports. A line means that the upper box imports the lower one. matplotlib, which the extra `bench`
brings, draws it.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = "fa_compiler.passes"
FOLDER, MODULE = "#b9d4ea", "#f1d9b5"
LINES_OF_INCH = 2600
"""So many lines of code make a box an inch wide."""
LEAST_WIDTH, HEIGHT, FLOOR, GAP = 0.75, 0.3, 0.66, 0.1


@dataclass(frozen=True)
class Structure:
    """The rooms, with the number of their lines, and whom each imports."""

    lines: Mapping[str, int]
    folders: frozenset[str]
    imports: Mapping[str, frozenset[str]]

    @staticmethod
    def of(checkout: Path) -> Structure:
        """That of passes/ in a checkout."""
        root = checkout / "passes"
        lines: dict[str, int] = defaultdict(int)
        imports: dict[str, set[str]] = defaultdict(set)
        files = [path for path in sorted(root.rglob("*.py")) if path != root / "__init__.py"]
        rooms = {path.relative_to(root).parts[0].removesuffix(".py") for path in files}
        for path in files:
            room = path.relative_to(root).parts[0].removesuffix(".py")
            text = path.read_text()
            lines[room] += text.count("\n")
            imports[room] |= {name for name in _imported(ast.parse(text)) if name in rooms and name != room}
        folders = frozenset(room for room in rooms if (root / room).is_dir())
        return Structure(lines, folders, {room: frozenset(imports[room]) for room in rooms})

    @property
    def arrows(self) -> int:
        """How many rooms import how many others."""
        return sum(map(len, self.imports.values()))

    def floors(self) -> list[list[str]]:
        """The rooms of each floor, the ground floor first."""

        @cache
        def floor(room: str) -> int:
            return 1 + max(map(floor, self.imports[room]), default=-1)

        made: dict[int, list[str]] = defaultdict(list)
        for room in sorted(self.imports):
            made[floor(room)].append(room)
        return [made[number] for number in sorted(made)]


def _imported(tree: ast.Module) -> set[str]:
    """The rooms that a file imports, in functions, too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        if node.module == PACKAGE:
            names |= {alias.name for alias in node.names}
        elif node.module.startswith(f"{PACKAGE}."):
            names.add(node.module.removeprefix(f"{PACKAGE}.").split(".")[0])
    return names


def _width(structure: Structure, room: str) -> float:
    named = 0.085 * len(room) + 0.12
    return max(LEAST_WIDTH, named, structure.lines[room] / LINES_OF_INCH)


def draw(axes: Any, structure: Structure, title: str) -> None:
    """Draw one structure into axes of matplotlib, whose units are inches."""
    centres: dict[str, tuple[float, float]] = {}
    floors = structure.floors()
    for number, rooms in enumerate(floors):
        widths = [_width(structure, room) for room in rooms]
        left = -(sum(widths) + GAP * (len(rooms) - 1)) / 2
        for room, width in zip(rooms, widths, strict=True):
            centres[room] = (left + width / 2, number * FLOOR)
            left += width + GAP
    for room, others in structure.imports.items():
        for other in others:
            (x, y), (to_x, to_y) = centres[room], centres[other]
            axes.plot([x, to_x], [y - HEIGHT / 2, to_y + HEIGHT / 2], color="#555", linewidth=0.5, alpha=0.45, zorder=1)
    for room, (x, y) in centres.items():
        width = _width(structure, room)
        colour = FOLDER if room in structure.folders else MODULE
        corner = (x - width / 2, y - HEIGHT / 2)
        axes.add_patch(_rectangle(corner, width, colour))
        axes.text(x, y, room, ha="center", va="center", fontsize=7.5, zorder=3)
    total = f"{len(structure.imports)} rooms, {structure.arrows} arrows, {len(floors)} floors"
    axes.set_title(f"{title}: {total}", fontsize=9)
    axes.set_aspect("equal")
    axes.autoscale_view()
    axes.axis("off")


def _rectangle(corner: tuple[float, float], width: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, HEIGHT, facecolor=colour, edgecolor="#444", linewidth=0.6, zorder=2)


def main(arguments: Sequence[str]) -> int:
    """Write the drawing, and return the exit code."""
    out, *given = arguments
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.fonttype"] = "none"
    mpl.rcParams["svg.hashsalt"] = "structure"
    from matplotlib import pyplot

    parts = [text.partition("=") for text in given]
    structures = [(title, Structure.of(Path(place))) for title, _, place in parts]
    figure, axes = pyplot.subplots(1, len(structures), squeeze=False, figsize=(7 * len(structures), 7.6))
    for place, (title, structure) in zip(axes[0], structures, strict=True):
        draw(place, structure, title)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit((__doc__ or "").strip())
    sys.exit(main(sys.argv[1:]))
