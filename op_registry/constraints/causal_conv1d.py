"""Checks that CausalConv1d and FusedCausalConv1d share.

| tensor | shape |
|---|---|
| x, y | B,S,dim, or T,dim with the packed tokens of B sequences, whose limits are query_start_loc |
| weight | K,dim; the last row is the weight of the current token |
| conv_states | lines,state length,dim |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from fa_compiler.op_registry.constraints.core import (
    CheckedNode,
    fixed_types,
    number,
    one_type,
    shape_is,
    text,
)
from fa_compiler.op_registry.diagnostic import NULLPTR, Diagnostic
from fa_compiler.op_registry.geometry import exceeds, shape_of
from fa_compiler.op_registry.node import Dim, TensorInfo
from fa_compiler.op_registry.operator import Inputs, Outputs

HALFS = ("DT_FLOAT16", "DT_BF16")
LEAST_DIM, MOST_DIM, UNIT = 64, 16384, 16
MOST_TOKENS = 1 << 20
"""The packed tokens of all sequences together."""


@dataclass(frozen=True)
class ConvolutionSizes:
    """Sizes of a call, None where unknown: the sequences B, their length S, the tokens T of all if
    they are packed, the channels dim, the width K of the kernel, and the lines of conv_states with
    their length."""

    b: Dim
    s: Dim
    t: Dim
    dim: Dim
    k: Dim
    lines: Dim
    state_length: Dim
    packed: bool


def sizes_of(call: CheckedNode) -> ConvolutionSizes | None:
    """The sizes of the call, or None if the rank of x is unknown or wrong."""
    x, rank = call.shape("x"), call.rank("x")
    lines, length, _ = shape_of(call["conv_states"], 3)
    k = shape_of(call["weight"], 2)[0]
    if x is None or rank not in (2, 3):
        return None
    if rank == 3:
        return ConvolutionSizes(x[0], x[1], None, x[2], k, lines, length, packed=False)
    limits = shape_of(call["query_start_loc"], 1)[0]
    batch = limits - 1 if isinstance(limits, int) else None
    return ConvolutionSizes(batch, None, x[0], x[1], k, lines, length, packed=True)


def types(call: CheckedNode, whole: tuple[str, ...]) -> Iterator[Diagnostic]:
    """x, weight, conv_states, bias and y have one type, FLOAT16 or BF16. The inputs `whole` are
    INT32."""
    yield from one_type(call, ("x", "weight", "conv_states", "bias", "y"), HALFS)
    yield from fixed_types(call, dict.fromkeys(whole, "DT_INT32"))


def shapes(call: CheckedNode, rows: tuple[str, ...], most_sequences: int) -> Iterator[Diagnostic]:
    """x is [B,S,dim], or [T,dim] with query_start_loc [B+1]. weight is [K,dim], bias [dim],
    conv_states [lines,length,dim], and the inputs `rows` are [B]."""
    sizes = sizes_of(call)
    if call.rank("x") not in (None, 2, 3):
        yield Diagnostic("x", f"x is {text(call.shape('x'))}, expected [B,S,dim] or [T,dim]")
    if sizes is None:
        return
    if sizes.packed and call["query_start_loc"] is None:
        yield Diagnostic(
            "query_start_loc",
            "query_start_loc is absent, expected one with packed tokens",
            code=NULLPTR,
        )
        return
    yield from shape_is("weight", call["weight"], (sizes.k, sizes.dim))
    yield from shape_is("bias", call["bias"], (sizes.dim,))
    yield from shape_is(
        "conv_states", call["conv_states"], (sizes.lines, sizes.state_length, sizes.dim)
    )
    limits = sizes.b + 1 if isinstance(sizes.b, int) else None
    yield from shape_is("query_start_loc", call["query_start_loc"], (limits,))
    for name in rows:
        yield from shape_is(name, call[name], (sizes.b,))
    if exceeds(sizes.b, most_sequences) or sizes.b == 0:
        yield Diagnostic(
            "x",
            f"x has {number(int(sizes.b or 0))} sequences, expected 1 to {number(most_sequences)}",
        )


def states(call: CheckedNode, sizes: ConvolutionSizes) -> Iterator[Diagnostic]:
    """conv_states has at least as many lines as there are sequences, and K-1 tokens or more in
    each."""
    if isinstance(sizes.lines, int) and isinstance(sizes.b, int) and sizes.lines < sizes.b:
        message = f"conv_states has {sizes.lines} lines, expected at least {sizes.b}, one for each sequence"
        yield Diagnostic("conv_states", message)
    if (
        isinstance(sizes.state_length, int)
        and isinstance(sizes.k, int)
        and sizes.state_length < sizes.k - 1
    ):
        message = f"conv_states has {sizes.state_length} tokens in a line, expected at least {sizes.k - 1}"
        yield Diagnostic("conv_states", message)


def channels(sizes: ConvolutionSizes) -> Iterator[Diagnostic]:
    """dim is 64 to 16384 and a multiple of 16, and the packed tokens are at most 1048576. There is
    a token."""
    dim = sizes.dim
    if isinstance(dim, int) and dim % UNIT:
        yield Diagnostic(
            "x", f"x has {number(dim)} channels, expected a multiple of {UNIT}, which are 32 bytes"
        )
    elif isinstance(dim, int) and not LEAST_DIM <= dim <= MOST_DIM:
        message = f"x has {number(dim)} channels, expected {LEAST_DIM} to {number(MOST_DIM)}"
        yield Diagnostic("x", message, "document")
    if 0 in (sizes.s, sizes.t):
        yield Diagnostic("x", "x has no tokens, expected 1 or more")
    if exceeds(sizes.t, MOST_TOKENS):
        yield Diagnostic(
            "x",
            f"x has {number(sizes.t)} tokens, expected at most {number(MOST_TOKENS)}",
            "document",
        )


def sequence_lengths(call: CheckedNode, sizes: ConvolutionSizes) -> tuple[int, ...] | None:
    """The length of each sequence; None where they are not known, or not equal in number to the
    sequences."""
    if not sizes.packed:
        return (
            (sizes.s,) * sizes.b if isinstance(sizes.b, int) and isinstance(sizes.s, int) else None
        )
    limits = call.content("query_start_loc")
    return None if limits is None else tuple(end - start for start, end in pairwise(limits))


def limits(call: CheckedNode, sizes: ConvolutionSizes, least: int) -> Iterator[Diagnostic]:
    """query_start_loc, if it is constant, begins with 0, ends with T, and rises by `least` or
    more."""
    found = call.content("query_start_loc")
    if found is None or not sizes.packed:
        return
    if found[:1] != [0] or any(end - start < least for start, end in pairwise(found)):
        how = "that does not fall" if least == 0 else "that rises"
        yield Diagnostic(
            "query_start_loc", f"query_start_loc is not a list {how} and begins with 0", "document"
        )
    elif isinstance(sizes.t, int) and found[-1] != sizes.t:
        message = f"query_start_loc ends with {number(found[-1])}, expected {number(sizes.t)}, the tokens of x"
        yield Diagnostic("query_start_loc", message, "document")


def line_numbers(call: CheckedNode, sizes: ConvolutionSizes, skipped: int) -> Iterator[Diagnostic]:
    """The entries of cache_indices, if they are constant, are lines of conv_states or `skipped`. No
    line is named twice."""
    found = [line for line in call.content("cache_indices") or () if line != skipped]
    for line in found:
        if line < 0 or (isinstance(sizes.lines, int) and line >= sizes.lines):
            message = (
                f"cache_indices has {number(line)}, expected a line of conv_states or {skipped}"
            )
            yield Diagnostic("cache_indices", message, "document")
            return
    if len({*found}) != len(found):
        yield Diagnostic(
            "cache_indices", "cache_indices names a line twice, expected each once", "document"
        )


def infer(inputs: Inputs) -> Outputs:
    """y has the shape and type of x, and conv_states those of the input of this name."""
    x, states = inputs["x"], inputs["conv_states"]
    return {
        "conv_states": TensorInfo(states.dtype, states.shape),
        "y": TensorInfo(x.dtype, x.shape),
    }
