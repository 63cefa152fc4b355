"""Rules for the operators that talk to other ranks (op_registry/hcom.py)."""

from __future__ import annotations

from fa_compiler.op_registry import DOMAIN, hcom
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ops.context import Context, Fact, Shape, rule, shape_rule


@rule(hcom.ALL_TO_ALL, hcom.ALL_REDUCE, domain=DOMAIN)
def _like_input(ctx: Context) -> Fact:
    return Fact(ctx.shape(0), ctx.dtype(0))


@shape_rule(hcom.ALL_GATHER, domain=DOMAIN)
def _gathered(ctx: Context, shape: Shape) -> Shape | None:
    return (shape[0] * ctx.int_attr("rank_size", 1), *shape[1:]) if shape else None


@rule(hcom.RECEIVE, domain=DOMAIN)
def _received(ctx: Context) -> Fact:
    return Fact(tuple(map(Dim, ctx.ints_attr("shape") or ())), ctx.dtype_attr("dtype"))
