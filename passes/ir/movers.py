"""The operators that only move the elements of their first input: one table for all modules that look through them.

    group            operators                      elements                        costs at run time
    ---------------  -----------------------------  ------------------------------  ------------------------
    RESHAPES         Reshape, Flatten, Squeeze,     all of them, in the same order  nothing: the same memory
                     Unsqueeze
    LAYOUT_OPS       these, Identity, Transpose     all of them, each once          a Transpose copies
    REPEATS          Expand, Tile                   each of them several times      a copy
    INDEXING_OPS     Slice, Gather, GatherND,       some of them, in any order      a copy
                     GatherElements
    DEPTH_SPACE_OPS  DepthToSpace, SpaceToDepth     all of them, each once          a copy

What they do to axes is in layout/views.py, what they do to indices in values/position_moves.py, and what they do to
shapes in values/shape_rules/.
"""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import source_through

RESHAPES = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")
LAYOUT_OPS = ("Identity", *RESHAPES, "Transpose")
REPEATS = ("Expand", "Tile")
INDEXING_OPS = ("Slice", "Gather", "GatherND", "GatherElements")
DEPTH_SPACE_OPS = ("DepthToSpace", "SpaceToDepth")
MOVES = (*LAYOUT_OPS, *REPEATS, *INDEXING_OPS, *DEPTH_SPACE_OPS)
"""All operators that only move elements."""
COPIES = ("Transpose", *REPEATS, "Concat", "Gather")
"""The operators that copy when they make a layout. Concat and Gather are meant where they repeat or pick whole
parts."""


def element_source(value: ir.Value, *more: str) -> ir.Value:
    """The source of a value's elements: the value upstream of the operators that move them and of those of the types
    `more`."""
    return source_through(value, *MOVES, *more)
