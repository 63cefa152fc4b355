"""Declared shapes of intermediate values and outputs that cannot be.

Exporters and optimisers leave shapes behind that belong to another model: of a graph before it was changed, or of the
run that was traced. ONNX Runtime takes what it infers instead. In a result they would do harm: where an operator of
another domain had stood, whose shapes ONNX's own inference does not know, an operator stands that it knows.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from fa_compiler.passes.values.shapes import ShapeInfo


def correct_shapes(graphs: Iterable[ir.Graph], info: ShapeInfo) -> list[str]:
    """Take back every declared shape that contradicts what the operators give in every run, and tell of it.

    An intermediate value keeps its type only. An output keeps its rank where that is right, and what is open in it.
    """
    wrong: list[str] = []
    for graph in graphs:
        for node in graph:
            for value in node.outputs:
                if value.shape is None or (known := info.shape(value)) is None:
                    continue
                sizes = [size.const for size in known]
                given = list(value.shape)
                if len(given) == len(sizes) and not any(map(_contradict, given, sizes)):
                    continue
                wrong.append(str(value.name))
                if not value.is_graph_output():
                    value.shape = None
                elif len(given) != len(sizes):
                    value.shape = ir.Shape(sizes)
                else:
                    value.shape = ir.Shape(
                        [size if _contradict(old, size) else old for old, size in zip(given, sizes, strict=True)]
                    )
    if not wrong:
        return []
    who = f"'{wrong[0]}'" if len(wrong) == 1 else f"'{wrong[0]}' and {len(wrong) - 1} more"
    return [f"the declared shape of {who} is not what the operators give: it is taken back, as in ONNX Runtime"]


def _contradict(given: int | ir.SymbolicDim, size: int | None) -> bool:
    return isinstance(given, int) and size is not None and given != size
