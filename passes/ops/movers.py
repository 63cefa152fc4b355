"""The operators that only move the elements of their first input, by what they cost, for all
modules that look through them. Which operators they are, and where they move what, is in moves.py
and beside the rules for their shapes.

    group       elements                        costs at run time
    ----------  ------------------------------  ------------------------
    RESHAPES    all of them, in the same order  nothing: the same memory
    LAYOUT_OPS  all of them, each once          a Transpose copies
    REPEATS     each of them several times      a copy
    the others  some or all of them, anywhere   a copy
"""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import source_through
from fa_compiler.passes.ops import gather, parts, reshape, slicing  # noqa: F401  imported for the moves they list
from fa_compiler.passes.ops.moves import (
    Converted,
    Flattened,
    Inserted,
    Move,
    Permuted,
    Picked,
    PickedElements,
    PickedPoints,
    Regrouped,
    Removed,
    Same,
    Stretched,
    Tiled,
    operators_of,
    operators_that,
)

_REGROUPING = (Regrouped, Flattened, Removed, Inserted)
RESHAPES = operators_of(*_REGROUPING)
LAYOUT_OPS = operators_of(Same, *_REGROUPING, Permuted)
REPEATS = operators_of(Stretched, Tiled)
PICKS = operators_of(Picked, PickedPoints, PickedElements)
"""Those that have a tensor of indices."""
MOVES = operators_that(lambda form: not issubclass(form, Converted))
"""All operators that only move elements, whatever their operands are."""
ARRAY_MOVES = operators_that(
    lambda form: not issubclass(form, Same) and form.on_arrays is not Move.on_arrays
)
"""Those of them whose form knows the move of an array (`on_arrays`), but for Identity, which leaves
it as it is."""
COPIES = (*operators_of(Permuted), *REPEATS, "Concat", *operators_of(Picked))
"""The operators that copy when they make a layout. Concat and Gather are meant where they repeat or
pick whole parts."""


def element_source(value: ir.Value, *more: str) -> ir.Value:
    """The source of a value's elements: the value upstream of the operators that move them and of
    those of the types `more`."""
    return source_through(value, *MOVES, *more)
