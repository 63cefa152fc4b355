"""The operators that only move the elements of their first input, by what they cost, for all modules that look through
them. Which operators they are, and where they move what, is in moves.py and beside the rules for their shapes.

    group            elements                        costs at run time
    ---------------  ------------------------------  ------------------------
    RESHAPES         all of them, in the same order  nothing: the same memory
    LAYOUT_OPS       all of them, each once          a Transpose copies
    REPEATS          each of them several times      a copy
    INDEXING_OPS     some of them, in any order      a copy
    DEPTH_SPACE_OPS  all of them, each once          a copy
"""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import source_through
from fa_compiler.passes.ops import gather, parts, reshape, slicing  # noqa: F401  imported for the moves they list
from fa_compiler.passes.ops.moves import (
    Cut,
    Permuted,
    Picked,
    PickedElements,
    PickedPoints,
    Regrouped,
    Reversed,
    Same,
    Shuffled,
    Stretched,
    operators_of,
)

RESHAPES = operators_of(Regrouped)
LAYOUT_OPS = operators_of(Same, Regrouped, Permuted)
REPEATS = operators_of(Stretched)
INDEXING_OPS = operators_of(Cut, Picked, PickedPoints, PickedElements, Reversed)
PICKS = operators_of(Picked, PickedPoints, PickedElements)
"""Those of INDEXING_OPS that have a tensor of indices."""
DEPTH_SPACE_OPS = operators_of(Shuffled)
ARRAY_MOVES = operators_of(Permuted, Regrouped, Stretched, Cut, Picked, PickedPoints, PickedElements)
"""Those whose record knows the move of an array (`on_arrays`)."""
MOVES = (*LAYOUT_OPS, *REPEATS, *INDEXING_OPS, *DEPTH_SPACE_OPS)
"""All operators that only move elements."""
COPIES = (*operators_of(Permuted), *REPEATS, "Concat", *operators_of(Picked))
"""The operators that copy when they make a layout. Concat and Gather are meant where they repeat or pick whole
parts."""


def element_source(value: ir.Value, *more: str) -> ir.Value:
    """The source of a value's elements: the value upstream of the operators that move them and of those of the types
    `more`."""
    return source_through(value, *MOVES, *more)
