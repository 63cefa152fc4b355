"""CausalConv1d: a convolution of each channel with the last K tokens, and the states that it
updates in place.

With several tokens in a sequence it is a prompt: a line of conv_states is read only where
initial_state_mode is 1, and without that input from none. With one token, or with
num_accepted_tokens, it is a step of decoding: the line is always read. The output conv_states is
the input, changed in place. The last row of weight is that of the current token; the formula of the
operator's documents has the rows the other way round than its kernel and its golden function. The
constraints are CC.1 to CC.7. The product is 950.
"""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.op_registry.constraints import causal_conv1d
from fa_compiler.op_registry.constraints.causal_conv1d import ConvolutionSizes
from fa_compiler.op_registry.constraints.core import CheckedNode, Rules, number, one_of
from fa_compiler.op_registry.cpu_kernel import CpuKernel
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs

HALFS = "DT_BF16, DT_FLOAT16"
MOST_SEQUENCES, LONGEST = 1024, 16384
ACTIVATIONS = ("silu", "none", "")
"""The empty word is silu."""
SPECULATIVE = 4
"""The only width with num_accepted_tokens."""

OPDEF = (
    REG_OP(
        "CausalConv1d",
        "opdef_2026_07",
        source="mirror-cann/ops-transformer 3a280bcc3 (2026-07-21) mamba/causal_conv1d/op_host/causal_conv1d_def.cpp; "
        "op_host/causal_conv1d_tiling.cpp; aclnnCausalConv1dFn.md; aclnnCausalConv1dUpdate.md; "
        "op_kernel/arch35/causal_conv1d.h; tests/assets/golden.py",
    )
    .INPUT("x", HALFS)
    .INPUT("weight", HALFS)
    .INPUT("conv_states", HALFS)
    .OPTIONAL_INPUT("bias", HALFS)
    .OPTIONAL_INPUT("query_start_loc", "DT_INT32")
    .OPTIONAL_INPUT("cache_indices", "DT_INT32")
    .OPTIONAL_INPUT("initial_state_mode", "DT_INT32")
    .OPTIONAL_INPUT("num_accepted_tokens", "DT_INT32")
    .OUTPUT("conv_states", HALFS)
    .OUTPUT("y", HALFS)
    .ATTR("activation_mode", "String", "silu")
    .ATTR("null_block_id", "Int", 0, note="Sequences with this entry of cache_indices are skipped.")
    .PRODUCT("ascend950", "x=weight=conv_states=bias=y\nBF16\nFLOAT16")
)

_ROWS = ("cache_indices", "initial_state_mode", "num_accepted_tokens")
_WHOLE = ("query_start_loc", *_ROWS)

rules = Rules("CC", typed=("x", "weight", "conv_states", "bias", "y", *_WHOLE), drops_empty=True)


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """x, weight, conv_states, bias and y have one type, FLOAT16 or BF16. query_start_loc,
    cache_indices, initial_state_mode and num_accepted_tokens are INT32."""
    yield from causal_conv1d.types(call, _WHOLE)


@rules(2)
def activation(call: CheckedNode) -> Iterator[Diagnostic]:
    """activation_mode is silu, none, or empty, which means silu."""
    yield from one_of(call, "activation_mode", ACTIVATIONS)


@rules(3)
def shapes(call: CheckedNode) -> Iterator[Diagnostic]:
    """x is [B,S,dim], or [T,dim] with query_start_loc [B+1]. weight is [K,dim], bias [dim],
    conv_states [lines,length,dim]. cache_indices, initial_state_mode and num_accepted_tokens are
    [B], and B is 1 to 1024."""
    yield from causal_conv1d.shapes(call, _ROWS, MOST_SEQUENCES)


@rules(4)
def sizes(call: CheckedNode) -> Iterator[Diagnostic]:
    """K is 2 to 4. dim of x is 64 to 16384 and a multiple of 16. S is 1 to 16384, and T 1
    to 1048576. conv_states has B lines or more, of K-1 tokens or more."""
    found = causal_conv1d.sizes_of(call)
    if found is None:
        return
    if isinstance(found.k, int) and not 2 <= found.k <= SPECULATIVE:
        yield Diagnostic("weight", f"weight has {found.k} rows, expected 2 to {SPECULATIVE}")
    yield from causal_conv1d.channels(found)
    yield from causal_conv1d.states(call, found)
    if isinstance(found.s, int) and found.s > LONGEST:
        yield Diagnostic(
            "x", f"x has {number(found.s)} tokens, expected at most {number(LONGEST)}", "document"
        )


@rules(5)
def kinds(call: CheckedNode) -> Iterator[Diagnostic]:
    """initial_state_mode is for prompts: it is absent if S is 1, or if num_accepted_tokens is
    given. With num_accepted_tokens K is 4."""
    found = causal_conv1d.sizes_of(call)
    mode, accepted = call["initial_state_mode"], call["num_accepted_tokens"]
    if mode is not None and (accepted is not None or (found is not None and found.s == 1)):
        beside = (
            "with num_accepted_tokens" if accepted is not None else "with one token in a sequence"
        )
        yield Diagnostic(
            "initial_state_mode", f"initial_state_mode is given {beside}, expected none in a step"
        )
    if (
        accepted is not None
        and found is not None
        and isinstance(found.k, int)
        and found.k != SPECULATIVE
    ):
        message = (
            f"num_accepted_tokens is given with {found.k} rows of weight, expected {SPECULATIVE}"
        )
        yield Diagnostic("num_accepted_tokens", message)


@rules(6)
def contents(call: CheckedNode) -> Iterator[Diagnostic]:
    """query_start_loc begins with 0, does not fall, and ends with T; with num_accepted_tokens it
    rises. cache_indices names lines of conv_states, each once, or null_block_id. initial_state_mode
    is 0 or 1."""
    found = causal_conv1d.sizes_of(call)
    if found is None:
        return
    yield from causal_conv1d.limits(call, found, 0 if call["num_accepted_tokens"] is None else 1)
    yield from causal_conv1d.line_numbers(call, found, call.attr("null_block_id"))
    wrong = [mode for mode in call.content("initial_state_mode") or () if mode not in (0, 1)]
    if wrong:
        message = f"initial_state_mode has {number(wrong[0])}, expected 0 or 1"
        yield Diagnostic("initial_state_mode", message, "document")


@rules(7)
def accepted_tokens(call: CheckedNode) -> Iterator[Diagnostic]:
    """With num_accepted_tokens a line of conv_states has K-1 tokens and one for each token of x but
    the first. num_accepted_tokens is 0 to the length of a line without K-1."""
    found = causal_conv1d.sizes_of(call)
    if call["num_accepted_tokens"] is None or found is None:
        return
    yield from _speculative(call, found)


def _speculative(call: CheckedNode, found: ConvolutionSizes) -> Iterator[Diagnostic]:
    length, k = found.state_length, found.k
    if not isinstance(length, int) or not isinstance(k, int):
        return
    longest = (
        found.s
        if isinstance(found.s, int)
        else max(causal_conv1d.sequence_lengths(call, found) or (1,))
    )
    if length < k - 2 + longest:
        message = f"conv_states has {length} tokens in a line, expected at least {k - 2 + longest}"
        yield Diagnostic("conv_states", message)
    for count in call.content("num_accepted_tokens") or ():
        if not 0 <= count <= length - (k - 1):
            message = f"num_accepted_tokens has {number(count)}, expected 0 to {length - (k - 1)}"
            yield Diagnostic("num_accepted_tokens", message, "document")
            return


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """y has the shape and type of x. conv_states has its shape and type as input, and is changed in
    place."""
    return causal_conv1d.infer(inputs)


OPERATOR = Operator(
    variants=(OPDEF.OP_END_FACTORY_REG(),), infer=infer, rules=rules, kernel=CpuKernel()
)
