"""What single operators mean.

`rule` registers the shape, the type and the small contents of an operator's results in `RULES`, by
domain and type (context.py). `mover` says where the elements of an operator come from, and
`element` how an operator makes the element at an index that is given as a formula (moves.py).
numbers.py has the intervals and sets of numbers.
"""

from __future__ import annotations

from fa_compiler.passes.ops import (  # noqa: F401  imported for the rules they register
    attention,
    contrib,
    contrib_attention,
    elementwise,
    gather,
    generate,
    hcom,
    linear,
    parts,
    quantized,
    recurrent,
    reduce,
    registry,
    reshape,
    slicing,
)
from fa_compiler.passes.ops.context import RULES, Context, Fact, UnresolvedError

__all__ = ["RULES", "Context", "Fact", "UnresolvedError"]
