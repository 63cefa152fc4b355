"""Checks that ChunkGatedDeltaRule and RecurrentGatedDeltaRule share.

Both take packed tokens (TND) and one state [Dv,Dk] for each sequence and head of value:

| tensor | shape |
|---|---|
| query, key | T,Nk,Dk |
| value, out | T,Nv,Dv |
| beta, g | T,Nv |
| gk | T,Nv,Dk |
| the state | sequences or blocks,Nv,Dv,Dk |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fa_compiler.op_registry.constraints.core import (
    CheckedNode,
    fixed_types,
    number,
    one_type,
    shape_is,
)
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.errors import NodeError
from fa_compiler.op_registry.geometry import exceeds, no_multiple, shape_of
from fa_compiler.op_registry.node import Dim, TensorInfo
from fa_compiler.op_registry.operator import Inputs, Outputs

TOKENS = ("query", "key", "value", "beta", "out")
"""The tensors with a row for each token, which are all BF16."""


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of a call, None where unknown: the tokens T, the heads Nk and Nv, the head sizes Dk and
    Dv, and the number of states."""

    t: Dim
    nk: Dim
    dk: Dim
    nv: Dim
    dv: Dim
    states: Dim


def sizes_of(call: CheckedNode, state: str) -> DeltaSizes:
    """The sizes, read from query, value and the input `state`."""
    t, nk, dk = shape_of(call["query"], 3)
    _, nv, dv = shape_of(call["value"], 3)
    return DeltaSizes(t, nk, dk, nv, dv, shape_of(call[state], 4)[0])


def types(
    call: CheckedNode, states: tuple[str, ...], fixed: dict[str, str]
) -> Iterator[Diagnostic]:
    """The tensors of tokens are BF16. The states have one type, which the prototype allows. Each
    input of `fixed` has the only type that it may have."""
    yield from one_type(call, TOKENS, ("DT_BF16",))
    yield from one_type(call, states, call.spec.legal_types(states[0]))
    yield from fixed_types(call, fixed)


def shapes(call: CheckedNode, state: str, rows: dict[str, tuple[Dim, ...]]) -> Iterator[Diagnostic]:
    """query and key are [T,Nk,Dk], value [T,Nv,Dv], beta and g [T,Nv], and the state [.,Nv,Dv,Dk].
    `rows` are the shapes of further inputs."""
    sizes = sizes_of(call, state)
    expected: dict[str, tuple[Dim, ...]] = {
        "query": (sizes.t, sizes.nk, sizes.dk),
        "key": (sizes.t, sizes.nk, sizes.dk),
        "value": (sizes.t, sizes.nv, sizes.dv),
        "beta": (sizes.t, sizes.nv),
        "g": (sizes.t, sizes.nv),
        state: (sizes.states, sizes.nv, sizes.dv, sizes.dk),
    }
    for name, shape in (expected | rows).items():
        yield from shape_is(name, call[name], shape)


def limits(
    call: CheckedNode, sizes: DeltaSizes, state: str, heads: int, width: int
) -> Iterator[Diagnostic]:
    """No tensor is empty. Nk and Nv are at most `heads`, Dk and Dv at most `width`, and Nv is a
    multiple of Nk."""
    listed = (
        ("query", "T", sizes.t, None),
        (state, "its first size", sizes.states, None),
        ("query", "Nk", sizes.nk, heads),
        ("value", "Nv", sizes.nv, heads),
        ("query", "Dk", sizes.dk, width),
        ("value", "Dv", sizes.dv, width),
    )
    for tensor, what, size, largest in listed:
        if size == 0 or (largest is not None and exceeds(size, largest)):
            wanted = "1 or more" if largest is None else f"1 to {largest}"
            yield Diagnostic(tensor, f"{tensor}: {what} is {number(int(size))}, expected {wanted}")
    if isinstance(sizes.nk, int) and sizes.nk and no_multiple(sizes.nv, sizes.nk):
        yield Diagnostic(
            "value",
            f"value has {sizes.nv} heads, expected a multiple of {sizes.nk}, the heads of query",
        )


def sequence_lengths(
    call: CheckedNode, tokens: Dim, least: int, most: int | None
) -> Iterator[Diagnostic]:
    """The entries of actual_seq_lengths, if they are constant, are `least` to `most`, and their sum
    is `tokens`."""
    lengths = call.content("actual_seq_lengths")
    if lengths is None:
        return
    for length in lengths:
        if length < least or (most is not None and length > most):
            wanted = f"{least} or more" if most is None else f"{least} to {most}"
            message = f"actual_seq_lengths has a length of {number(length)}, expected {wanted}"
            yield Diagnostic("actual_seq_lengths", message, "document")
            return
    if isinstance(tokens, int) and sum(lengths) != tokens:
        message = f"actual_seq_lengths has the sum {number(sum(lengths))}, expected {number(tokens)}, the tokens"
        yield Diagnostic("actual_seq_lengths", message, "document")


def infer(inputs: Inputs, state: str, final: str) -> Outputs:
    """out has the shape of value in the type of query, and the new state is like the given one.
    Raises NodeError for a wrong rank."""
    for name, rank in (("query", 3), ("value", 3), (state, 4)):
        shape = inputs[name].shape if name in inputs else None
        if shape is not None and len(shape) != rank:
            raise NodeError(f"{name} has rank {len(shape)}, expected {rank}")
    if state not in inputs:
        raise NodeError(f"the input {state} is needed")
    given = inputs[state]
    return {
        "out": TensorInfo(inputs["query"].dtype, inputs["value"].shape),
        final: TensorInfo(given.dtype, given.shape),
    }
