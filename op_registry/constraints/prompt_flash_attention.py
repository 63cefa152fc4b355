"""The constraints PFA.1 to PFA.11 of PromptFlashAttention.

1 to 6 are the project's constraints list, drawn from the operator's document and tiling; 5 (empty tensors) and 6
(torch on 950) refuse nothing. 7 is what 310P adds. 8 to 11 are the checks it shares with FusedInferAttentionScore,
whose path for more than one row it is.
"""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.op_registry.constraints import prefill
from fa_compiler.op_registry.constraints.core import CheckedNode, Fault, Rules
from fa_compiler.op_registry.constraints.prefill import HALFS, UNLIMITED, is_310p

rules = Rules("PFA", drops_empty=True)

OWN_TYPES = ("query", "key", "value", "pse_shift", "atten_mask", "actual_seq_lengths", "actual_seq_lengths_kv")

LAYOUTS = ("BSH", "BSND", "BNSD", "BNSD_BSND")

_INT8_CHAIN = ("deq_scale1", "quant_scale1", "deq_scale2")


@rules(1)
def types(call: CheckedNode) -> Iterator[Fault]:
    """query, key and value have one type: a half or INT8; on 310P float16."""
    query = call.dtype("query")
    if query is None:
        return
    if query not in (*HALFS, "DT_INT8"):
        extension = "EXT-PROMPT-FLOAT" if query == "DT_FLOAT" else None
        message = f"query is {query}, expected DT_FLOAT16, DT_BF16 or DT_INT8"
        yield Fault("query", message, "aclnn", extension=extension)
    elif is_310p(call) and query != "DT_FLOAT16":
        yield Fault("query", f"query is {query}, expected DT_FLOAT16 on 310P", "aclnn")
    for name in ("key", "value"):
        dtype = call.dtype(name)
        if dtype and dtype != query:
            yield Fault(name, f"{name} is {dtype}, expected {query} as query", "aclnn")


@rules(2)
def layout(call: CheckedNode) -> Iterator[Fault]:
    """input_layout is known, and ranks fit it."""
    yield from prefill.layout_and_ranks(call, LAYOUTS)


@rules(3)
def mask(call: CheckedNode) -> Iterator[Fault]:
    """sparse_mode is 0 to 4, with the mask it wants."""
    yield from prefill.mask(call)


@rules(4)
def int8_results(call: CheckedNode) -> Iterator[Fault]:
    """An INT8 result needs quant_scale2, and has no rows without a key; an INT8 query needs its three scales."""
    out = call.outputs.get("attention_out")
    if out is not None and out.dtype == "DT_INT8" and call["quant_scale2"] is None:
        yield Fault("quant_scale2", "quant_scale2 is absent, expected with an INT8 attention_out")
    if call.dtype("query") == "DT_INT8":
        for name in _INT8_CHAIN:
            if call[name] is None:
                yield Fault(name, f"{name} is absent, expected with an INT8 query")
                break
    if call["quant_scale2"] is not None:
        yield from prefill.empty_rows(call)


@rules(7)
def on_310p(call: CheckedNode) -> Iterator[Fault]:
    """What 310P takes: sparse_mode 0 with a boolean mask, no groups, no bias, nothing quantised."""
    if not is_310p(call):
        return
    for name, allowed in (
        ("sparse_mode", (0,)),
        ("pre_tokens", (UNLIMITED,)),
        ("next_tokens", (0, UNLIMITED)),
        ("num_key_value_heads", (0,)),
    ):
        value = call.attr(name)
        if value not in allowed:
            yield Fault(name, f"{name} is {value}, expected {' or '.join(map(str, allowed))} on 310P", "document")
    for name in ("pse_shift", *_INT8_CHAIN, "quant_scale2", "quant_offset2"):
        if call[name] is not None:
            yield Fault(name, f"{name} is given, expected none on 310P", "document")
    if call.dtype("atten_mask") not in (None, "DT_BOOL"):
        yield Fault("atten_mask", f"atten_mask is {call.dtype('atten_mask')}, expected DT_BOOL on 310P", "document")


@rules(8)
def heads(call: CheckedNode) -> Iterator[Fault]:
    """num_heads and num_key_value_heads are those of query and key."""
    yield from prefill.heads(call)


@rules(9)
def sizes(call: CheckedNode) -> Iterator[Fault]:
    """Sizes fit together and are in their ranges."""
    yield from prefill.same_sizes(call)
    yield from prefill.ranges(call)


@rules(10)
def bias(call: CheckedNode) -> Iterator[Fault]:
    """pse_shift has query's type, and covers the scores."""
    yield from prefill.bias(call)


@rules(11)
def lengths(call: CheckedNode) -> Iterator[Fault]:
    """actual_seq_lengths and actual_seq_lengths_kv have one value, or one for each batch."""
    for name in ("actual_seq_lengths", "actual_seq_lengths_kv"):
        yield from prefill.lengths(call, name)
