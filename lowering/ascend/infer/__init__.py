"""Types and shapes through a whole GE graph, by the rules of GE's operators: what the checker compares a file with.

`RULES` has one small function for each kind of operator, in a file for each family; `graph.walk` applies them in order
of the edges. **Add an operator**: a name in the `@rule(...)` of the function that fits, or a function of its own.
"""

from fa_compiler.lowering.ascend.infer import (  # noqa: F401  # they fill RULES
    attention,
    contractions,
    elementwise,
    indexing,
    movement,
    reductions,
)
from fa_compiler.lowering.ascend.infer.rules import RULES, Fact, Misfit, OpFacts

__all__ = ["RULES", "Fact", "Misfit", "OpFacts"]
