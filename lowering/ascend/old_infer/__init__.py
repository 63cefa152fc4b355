"""Inference of types and shapes through a whole GE graph. The checker compares a file with its result.

`RULES` has a small function for each kind of operator, in a module for each family. `graph.infer_model` applies them in
the order of the edges. **Add an operator**: its name in the `@rule(...)` of a function that fits, or a new function.
"""

from fa_compiler.lowering.ascend.old_infer import (  # noqa: F401  # they fill RULES
    attention,
    contractions,
    elementwise,
    hcom,
    indexing,
    movement,
    reductions,
)
from fa_compiler.lowering.ascend.old_infer.rules import RULES, Fact, InferenceError, OpFacts

__all__ = ["RULES", "Fact", "InferenceError", "OpFacts"]
