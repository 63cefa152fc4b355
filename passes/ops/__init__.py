"""Shape, dtype and content rules, one per operator, by (domain, op type)."""

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
    quantized,
    recurrent,
    reduce,
    registry,
    reshape,
    slicing,
)
from fa_compiler.passes.ops.context import RULES, Context, Fact, UnresolvedError

__all__ = ["RULES", "Context", "Fact", "UnresolvedError"]
