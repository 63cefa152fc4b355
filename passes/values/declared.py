"""Declared shapes of intermediate values and outputs that cannot be right.

Exporters and optimisers leave such shapes behind: shapes of a graph before it was changed, or of
the run that was traced. ONNX Runtime uses the shapes that it infers instead. In a result they would
do harm. ONNX's own inference does not know the shapes of an operator of another domain, but it
knows those of the operators that replace it, and then finds the contradiction.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import consts
from fa_compiler.passes.values.shapes import ShapeInfo


def correct_shapes(graphs: Iterable[ir.Graph], info: ShapeInfo) -> list[str]:
    """Take back every declared shape that contradicts what the operators give in every run. Returns
    a note for the report.

    An intermediate value keeps only its type. An output keeps its rank if that is right, and the
    sizes that are not contradicted.
    """
    wrong: list[str] = []
    for graph in graphs:
        for node in graph:
            for value in node.outputs:
                if value.shape is None or (known := info.shape(value)) is None:
                    continue
                sizes = consts(known)
                given = list(value.shape)
                if len(given) == len(sizes) and not any(map(_contradict, given, sizes)):
                    continue
                wrong.append(str(value.name))
                if not value.is_graph_output():
                    value.shape = None
                elif len(given) != len(sizes):
                    value.shape = ir.Shape(sizes)
                else:
                    value.shape = ir.Shape(list(map(_corrected, given, sizes)))
    if not wrong:
        return []
    who = f"'{wrong[0]}'"
    if len(wrong) > 1:
        who += f" and {len(wrong) - 1} more"
    return [
        f"the declared shape of {who} is not what the operators give: it is taken back, as in ONNX Runtime"
    ]


def _corrected(given: int | ir.SymbolicDim, size: int | None) -> int | ir.SymbolicDim | None:
    """A declared size, or what the operators give where it contradicts that."""
    return size if _contradict(given, size) else given


def _contradict(given: int | ir.SymbolicDim, size: int | None) -> bool:
    return isinstance(given, int) and size is not None and given != size
