"""The operators that talk to other ranks (op_registry/hcom.py)."""

from __future__ import annotations

from collections.abc import Sequence

from fa_compiler.lowering.ascend.graph import UNKNOWN
from fa_compiler.lowering.ascend.old_infer.rules import Fact, InferenceError, OpFacts, rule
from fa_compiler.op_registry import hcom


@rule(hcom.ALL_TO_ALL, hcom.ALL_REDUCE)
def _like_input(call: OpFacts) -> Sequence[Fact]:
    return [call.x()]


@rule(hcom.ALL_GATHER)
def _gathered(call: OpFacts) -> Sequence[Fact]:
    x, ranks = call.x(), call.attr("rank_size")
    if ranks < 1:
        raise InferenceError(f"rank_size is {ranks}")
    if x.shape is None:
        return [x]
    if not x.shape:
        raise InferenceError("it cannot gather a scalar")
    size = UNKNOWN if x.shape[0] == UNKNOWN else x.shape[0] * ranks
    return [x.with_shape((size, *x.shape[1:]))]


@rule(hcom.SEND)
def _sent(call: OpFacts) -> Sequence[Fact]:
    return []


@rule(hcom.RECEIVE)
def _received(call: OpFacts) -> Sequence[Fact]:
    return [Fact(call.attr("dtype"), tuple(call.attr("shape")))]
