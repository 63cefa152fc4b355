"""FusedCausalConv1d: a convolution of each channel with the last three tokens, and x added to it by
default.

A line of conv_states is read unless num_computed_tokens says that the sequence begins. Its last two
tokens are those before the first one, or, with num_accepted_tokens a, the two behind its first a
- 1. The output conv_states is the input, changed in place; the last tokens fill a line from its
end. With the inputs block_idx_first_scheduled_token, block_idx_last_scheduled_token and
initial_state_idx the states of whole blocks are kept, too (prefix caching), and cache_indices has
the lines of all blocks. The last row of weight is that of the current token. The operator reads
neither bias nor initial_state_mode nor activation_mode. Its constraints are FC.1 to FC.9. The
product is 950.

The betas of CANN 9.1 had another operator of this name, with fewer inputs, y as the first output,
and initial_state_mode.
"""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.op_registry.constraints import causal_conv1d
from fa_compiler.op_registry.constraints.core import CheckedNode, Rules, number, shape_is
from fa_compiler.op_registry.cpu_kernel import CpuKernel
from fa_compiler.op_registry.diagnostic import NULLPTR, Diagnostic
from fa_compiler.op_registry.geometry import shape_of
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs

HALFS = "DT_BF16, DT_FLOAT16"
MOST_SEQUENCES, MOST_BLOCKS, WIDTH = 256, 1024, 3
SHORT = 8
"""The most tokens of a sequence in a step of decoding."""

OPDEF = (
    REG_OP(
        "FusedCausalConv1d",
        "opdef_2026_07",
        source="mirror-cann/ops-transformer v9.1.0.pre 121f37def (2026-07-09) "
        "attention/fused_causal_conv1d/op_graph/fused_causal_conv1d_proto.h; op_host/fused_causal_conv1d_def.cpp; "
        "op_host/fused_causal_conv1d_cut_bh_tiling_arch35.cpp; op_host/fused_causal_conv1d_cut_bsh_tiling_arch35.cpp; "
        "aclnnFusedCausalConv1d.md",
        cann="9.1.0",
    )
    .INPUT("x", HALFS)
    .INPUT("weight", HALFS)
    .INPUT("conv_states", HALFS)
    .OPTIONAL_INPUT("query_start_loc", "DT_INT32")
    .OPTIONAL_INPUT("cache_indices", "DT_INT32")
    .OPTIONAL_INPUT("initial_state_mode", "DT_INT32")
    .OPTIONAL_INPUT("bias", HALFS)
    .OPTIONAL_INPUT("num_accepted_tokens", "DT_INT32")
    .OPTIONAL_INPUT("num_computed_tokens", "DT_INT32")
    .OPTIONAL_INPUT("block_idx_first_scheduled_token", "DT_INT32")
    .OPTIONAL_INPUT("block_idx_last_scheduled_token", "DT_INT32")
    .OPTIONAL_INPUT("initial_state_idx", "DT_INT32")
    .OUTPUT("conv_states", HALFS)
    .OUTPUT("y", HALFS)
    .ATTR("activation_mode", "Int", 0)
    .ATTR("pad_slot_id", "Int", -1, note="Sequences with this entry of cache_indices are skipped.")
    .ATTR("run_mode", "Int", 0, note="The operator does not read it.")
    .ATTR("max_query_len", "Int", -1)
    .ATTR("residual_connection", "Int", 1, note="With 1, x is added to the result.")
    .ATTR("block_size", "Int", 128)
    .ATTR("conv_mode", "Int", 0, note="With 1, the first tokens of a text give 0.")
    .PRODUCT("ascend950", "x=weight=conv_states=bias=y\nBF16\nFLOAT16")
)

BLOCKS = ("block_idx_first_scheduled_token", "block_idx_last_scheduled_token", "initial_state_idx")
"""The inputs of prefix caching, which are given together."""
_ROWS = ("num_accepted_tokens", "num_computed_tokens", *BLOCKS)
_WHOLE = ("query_start_loc", "cache_indices", "initial_state_mode", *_ROWS)

rules = Rules("FC", typed=("x", "weight", "conv_states", "bias", "y", *_WHOLE))


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """x, weight, conv_states and y have one type, FLOAT16 or BF16. query_start_loc, cache_indices,
    num_accepted_tokens, num_computed_tokens, block_idx_first_scheduled_token,
    block_idx_last_scheduled_token and initial_state_idx are INT32."""
    yield from causal_conv1d.types(call, _WHOLE)


rules.values(2, "activation_mode", (0,), "document")
rules.values(3, "residual_connection", (0, 1), "document")
rules.values(4, "conv_mode", (0, 1), "document")


@rules(5)
def unread(call: CheckedNode) -> Iterator[Diagnostic]:
    """bias and initial_state_mode are absent: the operator does not read them."""
    for name in ("bias", "initial_state_mode"):
        if call[name] is not None:
            yield Diagnostic(
                name, f"{name} is given, expected none: the operator does not read it", "document"
            )


@rules(6)
def shapes(call: CheckedNode) -> Iterator[Diagnostic]:
    """x is [B,S,dim], or [T,dim] with query_start_loc [B+1]. weight is [3,dim], and conv_states
    [lines,length,dim]. num_accepted_tokens, num_computed_tokens, block_idx_first_scheduled_token,
    block_idx_last_scheduled_token and initial_state_idx are [B]. B is 1 to 256. cache_indices is
    [B], or [B,blocks] with prefix caching."""
    yield from causal_conv1d.shapes(call, _ROWS, MOST_SEQUENCES)
    sizes = causal_conv1d.sizes_of(call)
    if sizes is None:
        return
    if _keeps_blocks(call):
        yield from shape_is("cache_indices", call["cache_indices"], (sizes.b, None))
        blocks = shape_of(call["cache_indices"], 2)[1]
        if isinstance(blocks, int) and not 1 <= blocks <= MOST_BLOCKS:
            message = (
                f"cache_indices has {number(blocks)} blocks, expected 1 to {number(MOST_BLOCKS)}"
            )
            yield Diagnostic("cache_indices", message, "document")
    else:
        yield from shape_is("cache_indices", call["cache_indices"], (sizes.b,))


@rules(7)
def sizes(call: CheckedNode) -> Iterator[Diagnostic]:
    """weight has 3 rows. dim of x is 64 to 16384 and a multiple of 16. S is 1 to 8, and a line of
    conv_states has S+1 tokens or more. T is 1 to 1048576. max_query_len is the length of the
    longest sequence if the tokens are packed."""
    found = causal_conv1d.sizes_of(call)
    if found is None:
        return
    if isinstance(found.k, int) and found.k != WIDTH:
        yield Diagnostic("weight", f"weight has {found.k} rows, expected {WIDTH}")
    yield from causal_conv1d.channels(found)
    yield from causal_conv1d.states(call, found)
    if isinstance(found.s, int) and found.s > SHORT:
        yield Diagnostic(
            "x", f"x has {number(found.s)} tokens in a sequence, expected 1 to {SHORT}"
        )
    elif (
        isinstance(found.s, int)
        and isinstance(found.state_length, int)
        and found.state_length < found.s + 1
    ):
        message = f"conv_states has {found.state_length} tokens in a line, expected at least {found.s + 1}"
        yield Diagnostic("conv_states", message)
    yield from _longest(call, found)


def _longest(call: CheckedNode, found: causal_conv1d.ConvolutionSizes) -> Iterator[Diagnostic]:
    """max_query_len is 1 or more with packed tokens, and the length of the longest sequence where
    that is known."""
    given = call.attr("max_query_len")
    lengths = causal_conv1d.sequence_lengths(call, found) if found.packed else None
    if found.packed and given < 1:
        yield Diagnostic(
            "max_query_len",
            f"max_query_len is {number(given)}, expected 1 or more with packed tokens",
        )
    elif lengths and max(lengths) != given:
        message = f"max_query_len is {number(given)}, expected {number(max(lengths))}, the longest sequence"
        yield Diagnostic("max_query_len", message, "document")


@rules(8)
def prefix_caching(call: CheckedNode) -> Iterator[Diagnostic]:
    """With one of block_idx_first_scheduled_token, block_idx_last_scheduled_token and
    initial_state_idx the others are given, too, and so are cache_indices and num_computed_tokens.
    block_size is then 2 or more. With conv_mode 1 num_computed_tokens is given."""
    needed = (*BLOCKS, "cache_indices", "num_computed_tokens") if _keeps_blocks(call) else ()
    if call.attr("conv_mode") == 1:
        needed = ("num_computed_tokens", *needed)
    for name in dict.fromkeys(needed):
        if call[name] is None:
            beside = "with prefix caching" if _keeps_blocks(call) else "with conv_mode 1"
            yield Diagnostic(name, f"{name} is absent {beside}, expected one", code=NULLPTR)
    if _keeps_blocks(call) and call.attr("block_size") < 2:
        yield Diagnostic(
            "block_size", f"block_size is {call.attr('block_size')}, expected 2 or more"
        )


@rules(9)
def contents(call: CheckedNode) -> Iterator[Diagnostic]:
    """query_start_loc begins with 0, rises, and ends with T. cache_indices names lines of
    conv_states, each once, or pad_slot_id. num_computed_tokens is 0 or more. num_accepted_tokens is
    1 to the length of the sequence, and of a line without 1. The blocks of a sequence fit together,
    and the one that it reads has a line."""
    found = causal_conv1d.sizes_of(call)
    if found is None:
        return
    yield from causal_conv1d.limits(call, found, 1)
    yield from causal_conv1d.line_numbers(call, found, call.attr("pad_slot_id"))
    for name in ("num_computed_tokens", *BLOCKS):
        if min(call.content(name) or (0,)) < 0:
            yield Diagnostic(name, f"{name} has a negative entry, expected 0 or more", "document")
    lengths, accepted = (
        causal_conv1d.sequence_lengths(call, found),
        call.content("num_accepted_tokens"),
    )
    for length, count in zip(lengths or (), accepted or (), strict=False):
        most = (
            min(length, found.state_length - 1) if isinstance(found.state_length, int) else length
        )
        if not 1 <= count <= most:
            message = f"num_accepted_tokens has {number(count)}, expected 1 to {number(most)}"
            yield Diagnostic("num_accepted_tokens", message, "document")
            return
    yield from _block_numbers(call)


def _block_numbers(call: CheckedNode) -> Iterator[Diagnostic]:
    """The first block is not behind the last one, the state is read from at most the block behind
    the first and from none behind the last, and the last is a block of cache_indices."""
    first, last, initial = (call.content(name) for name in BLOCKS)
    blocks = shape_of(call["cache_indices"], 2)[1]
    if first is None or last is None or initial is None:
        return
    for one, other, read in zip(first, last, initial, strict=False):
        if (
            one > other
            or read > min(one + 1, other)
            or (isinstance(blocks, int) and other >= blocks)
        ):
            message = f"{BLOCKS[1]} has {number(other)} beside {number(one)} and {number(read)}, which do not fit"
            yield Diagnostic(BLOCKS[1], message, "document")
            return
    yield from _read_lines(call, initial, last)


def _read_lines(call: CheckedNode, initial: list[int], last: list[int]) -> Iterator[Diagnostic]:
    """A sequence that does not begin reads a block that has a line."""
    lines, computed = call.content("cache_indices"), call.content("num_computed_tokens")
    blocks, skipped = shape_of(call["cache_indices"], 2)[1], call.attr("pad_slot_id")
    if lines is None or computed is None or not isinstance(blocks, int):
        return
    for sequence, (read, write, begun) in enumerate(zip(initial, last, computed, strict=False)):
        row = lines[sequence * blocks : (sequence + 1) * blocks]
        if begun and 0 <= read <= write < len(row) and row[read] == skipped != row[write]:
            message = (
                f"{BLOCKS[2]} names a block without a line, expected one that is not {skipped}"
            )
            yield Diagnostic(BLOCKS[2], message, "document")
            return


def _keeps_blocks(call: CheckedNode) -> bool:
    return any(call[name] is not None for name in BLOCKS)


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """y has the shape and type of x. conv_states has its shape and type as input, and is changed in
    place."""
    return causal_conv1d.infer(inputs)


OPERATOR = Operator(
    variants=(OPDEF.OP_END_FACTORY_REG(),), infer=infer, rules=rules, kernel=CpuKernel()
)
