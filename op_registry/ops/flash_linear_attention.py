"""FlashLinearAttention: attention by a state that each token changes, as in the gated delta rule or
Mamba-2.

It is no operator of Ascend. It has the inputs of the LinearAttention of ai.onnx 27 and of
com.microsoft, and what these leave out: fewer key heads than states, a correction of rank one in
general, and packed sequences. Its constraints are FL.1 to FL.7.
"""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.op_registry import dtypes
from fa_compiler.op_registry.constraints.core import (
    CheckedNode,
    Rules,
    fixed_types,
    one_type,
    shape_is,
    text,
)
from fa_compiler.op_registry.cpu_kernel import CpuKernel, TypeRow
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.geometry import divide, no_multiple, product, shape_of, shapes_differ
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.node import Dim, TensorInfo
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs

FLOATS = "DT_FLOAT, DT_FLOAT16, DT_BF16"

GATED = ("gated", "gated_delta")
DELTA = ("delta", "gated_delta")
LOW_RANK = ("general", "dplr")
"""A correction of rank one, which reads the state after the decay, or before it."""
CORRECTED = (*DELTA, *LOW_RANK)
"""The rules in which a token also changes what others wrote."""
UPDATE_RULES = ("linear", "gated", *CORRECTED)

OURS = (
    REG_OP(
        "FlashLinearAttention",
        "fa_compiler_1",
        source="onnx/onnx f75469120, the definition of LinearAttention 27; "
        "the schema of com.microsoft LinearAttention in onnxruntime 1.32.0",
    )
    .INPUT("query", FLOATS)
    .INPUT("key", FLOATS)
    .INPUT("value", FLOATS)
    .OPTIONAL_INPUT("past_state", FLOATS)
    .OPTIONAL_INPUT("decay", FLOATS)
    .OPTIONAL_INPUT("beta", FLOATS)
    .OPTIONAL_INPUT("low_rank_write", FLOATS)
    .OPTIONAL_INPUT("low_rank_read", FLOATS)
    .OPTIONAL_INPUT("cu_seqlens", "DT_INT32")
    .OUTPUT("output", FLOATS)
    .OUTPUT("present_state", FLOATS)
    .REQUIRED_ATTR("q_num_heads", "Int")
    .REQUIRED_ATTR("kv_num_heads", "Int")
    .ATTR("update_rule", "String", "gated_delta")
    .ATTR("scale", "Float", 0.0)
)

_TOKENS = ("query", "key", "value", "decay", "beta", "low_rank_write", "low_rank_read")
"""The inputs of one type, with a row for each token."""

rules = Rules("FL", typed=(*_TOKENS, "past_state", "cu_seqlens", "output", "present_state"))


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """All tensors of tokens have one type: FLOAT, FLOAT16 or BF16. The states have one of these
    types. cu_seqlens is INT32."""
    yield from one_type(call, (*_TOKENS, "output"), dtypes.FLOATS)
    yield from one_type(call, ("past_state", "present_state"), dtypes.FLOATS)
    yield from fixed_types(call, {"cu_seqlens": "DT_INT32"})


rules.values(2, "update_rule", UPDATE_RULES)


@rules(3)
def heads(call: CheckedNode) -> Iterator[Diagnostic]:
    """q_num_heads and kv_num_heads are positive, and one of them is a multiple of the other."""
    for name in ("q_num_heads", "kv_num_heads"):
        if call.attr(name) < 1:
            yield Diagnostic(name, f"{name} is {call.attr(name)}, expected 1 or more")
            return
    small, large = sorted((call.attr("q_num_heads"), call.attr("kv_num_heads")))
    if large % small:
        message = f"q_num_heads is {call.attr('q_num_heads')} beside {call.attr('kv_num_heads')} of kv_num_heads"
        yield Diagnostic("q_num_heads", f"{message}, expected a multiple or a divisor")


@rules(4)
def widths(call: CheckedNode) -> Iterator[Diagnostic]:
    """query is [B,T,Hq*Dk] with the q_num_heads Hq, value is [B,T,Hv*Dv] with the kv_num_heads Hv.
    key is [B,T,Hk*Dk], where Hk divides Hv. Dk is 1 or more."""
    query, key, value = (call.shape(name) for name in ("query", "key", "value"))
    for name, shape in (("query", query), ("key", key), ("value", value)):
        if shape is not None and len(shape) != 3:
            yield Diagnostic(name, f"{name} has rank {len(shape)}, expected 3")
            return
        if shape is not None and query is not None and shapes_differ(shape[:2], query[:2]):
            yield Diagnostic(
                name,
                f"{name} is {text(shape)}, expected the batch and the tokens of query {text(query)}",
            )
            return
    for name, count in (("query", call.attr("q_num_heads")), ("value", call.attr("kv_num_heads"))):
        shape = call.shape(name)
        if shape is not None and no_multiple(shape[2], count):
            yield Diagnostic(name, f"{name} is {text(shape)}, expected a width of {count} heads")
            return
    yield from _key_heads(call)


def _key_heads(call: CheckedNode) -> Iterator[Diagnostic]:
    """The heads of key have the size of those of query, which is not 0, and their number divides
    kv_num_heads."""
    key, size = call.shape("key"), _key_size(call.shape("query"), call.attr("q_num_heads"))
    if size == 0:
        yield Diagnostic(
            "query", f"query is {text(call.shape('query'))}, expected heads of 1 or more numbers"
        )
        return
    if key is None or not isinstance(size, int) or not isinstance(key[2], int):
        return
    key_heads = key[2] // size if key[2] % size == 0 else 0
    if key_heads == 0 or call.attr("kv_num_heads") % key_heads:
        message = f"key is {text(key)}, expected heads of {size} whose number divides {call.attr('kv_num_heads')}"
        yield Diagnostic("key", f"{message} (kv_num_heads)")


@rules(5)
def operands(call: CheckedNode) -> Iterator[Diagnostic]:
    """decay is given with the rules gated and gated_delta, and may be with general and dplr; beta
    with delta and gated_delta; low_rank_write and low_rank_read with general and dplr. No other
    rule has them."""
    rule = call.attr("update_rule")
    if rule not in UPDATE_RULES:
        return
    needed = {
        "decay": rule in GATED or (rule in LOW_RANK and call["decay"] is not None),
        "beta": rule in DELTA,
        "low_rank_write": rule in LOW_RANK,
        "low_rank_read": rule in LOW_RANK,
    }
    for name, is_needed in needed.items():
        if is_needed != (call[name] is not None):
            found, expected = ("absent", "given") if is_needed else ("given", "absent")
            yield Diagnostic(
                name, f"{name} is {found} with the update_rule {rule}, expected {expected}"
            )


@rules(6)
def rows(call: CheckedNode) -> Iterator[Diagnostic]:
    """decay is [B,T,Hv] or [B,T,Hv*Dk], beta [B,T,Hv] or [B,T,1]; low_rank_write and low_rank_read
    are [B,T,Hv*Dk]."""
    count = call.attr("kv_num_heads")
    wide = product(count, _key_size(call.shape("query"), call.attr("q_num_heads")))
    tokens = shape_of(call["query"], 3)[:2]
    expected: dict[str, tuple[Dim, ...]] = {
        "decay": (count, wide),
        "beta": (count, 1),
        "low_rank_write": (wide,),
        "low_rank_read": (wide,),
    }
    for name, legal in expected.items():
        shape = call.shape(name)
        if shape is None:
            continue
        if all(shapes_differ(shape, (*tokens, width)) for width in legal):
            listed = " or ".join(text((*tokens, width)) for width in legal)
            yield Diagnostic(name, f"{name} has the shape {text(shape)}, expected {listed}")


@rules(7)
def states(call: CheckedNode) -> Iterator[Diagnostic]:
    """past_state is [N,Hv,Dk,Dv] for N sequences: those of the batch or, if B is 1, those that
    cu_seqlens [N+1] divides the tokens into. cu_seqlens begins with 0, does not fall, and ends with
    T."""
    limits = call.content("cu_seqlens")
    batch, tokens, _ = shape_of(call["query"], 3)
    if call.rank("cu_seqlens") not in (None, 1):
        yield Diagnostic("cu_seqlens", f"cu_seqlens has rank {call.rank('cu_seqlens')}, expected 1")
        return
    if call["cu_seqlens"] is not None and isinstance(batch, int) and batch != 1:
        yield Diagnostic("cu_seqlens", f"cu_seqlens is given with a batch of {batch}, expected 1")
    if limits is not None and (limits != sorted(limits) or limits[:1] != [0]):
        yield Diagnostic("cu_seqlens", "cu_seqlens is not a rising list that begins with 0")
    elif limits is not None and isinstance(tokens, int) and limits[-1] != tokens:
        yield Diagnostic(
            "cu_seqlens",
            f"cu_seqlens ends with {limits[-1]}, expected {tokens}, the tokens of query",
        )
    yield from shape_is("past_state", call["past_state"], _state(call.tensors, call.attrs))


def _key_size(query: tuple[Dim, ...] | None, q_num_heads: int) -> Dim:
    return (
        None
        if query is None or len(query) != 3 or q_num_heads < 1
        else divide(query[2], q_num_heads)
    )


def _state(inputs: Inputs, attrs: Attrs) -> tuple[Dim, ...]:
    """The shape of the states."""
    count, query, value = (
        attrs["kv_num_heads"],
        shape_of(inputs.get("query"), 3),
        shape_of(inputs.get("value"), 3),
    )
    limits, entries = inputs.get("cu_seqlens"), query[0]
    if limits is not None:
        (ends,) = shape_of(limits, 1)
        entries = ends - 1 if isinstance(ends, int) else None
    size = divide(value[2], count) if count > 0 else None
    return entries, count, _key_size(query, attrs["q_num_heads"]), size


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """output is [B,T,H*Dv], where H is the larger one of q_num_heads and kv_num_heads.
    present_state is [N,Hv,Dk,Dv]. It has the type of past_state, or of query without one."""
    query, state = inputs["query"], _state(inputs, attrs)
    out = product(max(attrs["q_num_heads"], attrs["kv_num_heads"]), state[3])
    of_state = inputs["past_state"].dtype if "past_state" in inputs else query.dtype
    return {
        "output": TensorInfo(query.dtype, (*shape_of(query, 3)[:2], out)),
        "present_state": TensorInfo(of_state, state),
    }


def _type_rows() -> tuple[TypeRow, ...]:
    """A state of the type of query comes first: without past_state it has this type."""
    names = ("float32", "float16", "bfloat16")
    pairs = [(each, each) for each in names] + [
        (each, state) for each in names for state in names if each != state
    ]
    return tuple(
        TypeRow((each, each, each, state, each, each, each, each, "int32"), (each, state))
        for each, state in pairs
    )


OPERATOR = Operator(
    variants=(OURS.OP_END_FACTORY_REG(),),
    infer=infer,
    rules=rules,
    kernel=CpuKernel(type_rows=_type_rows),
)
