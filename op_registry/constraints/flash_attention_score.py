"""The constraints FA.1 to FA.23 of FlashAttentionScore.

Numbers, codes and stages: the project's constraints list, drawn from the aclnn documents, the aclnn host
code and the operator's tiling. Products: A2, A3 and 950.
"""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.op_registry.constraints import common
from fa_compiler.op_registry.constraints.core import CheckedNode, Fault, Rules, size_text, text
from fa_compiler.op_registry.geometry import LAYOUTS

rules = Rules("FA")

OWN_TYPES = (
    "query",
    "key",
    "value",
    "real_shift",
    "atten_mask",
    "drop_mask",
    "sink",
    "query_rope",
    "key_rope",
)
"""Inputs whose type a numbered rule looks after."""


@rules(1)
def types(call: CheckedNode) -> Iterator[Fault]:
    """query, key and value have one type."""
    yield from common.equal_types(call, ("query", "key", "value"))


@rules(2)
def layout(call: CheckedNode) -> Iterator[Fault]:
    """input_layout is known and the ranks fit it."""
    yield from common.layout_and_ranks(call)


@rules(3)
def heads(call: CheckedNode) -> Iterator[Fault]:
    """head_num is the head count of query."""
    yield from common.head_count(call)


@rules(4)
def head_sizes(call: CheckedNode) -> Iterator[Fault]:
    """D is the same in query and key, at least Dv and at most 768."""
    yield from common.head_sizes(call, "EXT-VALUE-WIDER")


@rules(5)
def head_groups(call: CheckedNode) -> Iterator[Fault]:
    """N1 is a multiple of N2."""
    yield from common.head_groups(call)


@rules(6)
def sizes(call: CheckedNode) -> Iterator[Fault]:
    """One batch size, or 1 (an extension), and key and value alike."""
    yield from common.batch_and_sequence(call, prefix_batch=2 << 10)


@rules(7)
def keep_prob(call: CheckedNode) -> Iterator[Fault]:
    """keep_prob is a probability."""
    yield from common.keep_probability(call)


@rules(8)
def pse_type(call: CheckedNode) -> Iterator[Fault]:
    """pse_type is known and fits the presence of real_shift."""
    yield from common.pse_type_known(call, "real_shift")


@rules(9)
def shift_type(call: CheckedNode) -> Iterator[Fault]:
    """real_shift has the type its pse_type wants; slopes have their shape and place."""
    shift = call["real_shift"]
    if shift is None:
        return
    if call.attr("pse_type") in (2, 3):
        yield from common.slopes(call, "real_shift")
        yield from common.inner_pse_positions(call, "real_shift")
    elif call.attr("pse_type") in (0, 1):
        query = call.dtype("query")
        if shift.dtype and query and shift.dtype != query:
            wide = shift.dtype == "DT_FLOAT" and query in ("DT_FLOAT16", "DT_BF16")
            message = f"real_shift is {shift.dtype}, expected {query} as query"
            yield Fault("real_shift", message, "aclnn", extension="EXT-SHIFT-FLOAT" if wide else None)


@rules(10)
def shift_shape(call: CheckedNode) -> Iterator[Fault]:
    """real_shift of pse_type 0 and 1 has a shape of the scores."""
    if call.attr("pse_type") not in (0, 1):
        return
    if call.geometry.tnd:
        yield from common.packed_bias_shape(call, "real_shift", flat_rank_one=False)
    elif call.geometry.layout in LAYOUTS:
        yield from common.bias_shape(call, "real_shift", "EXT-SHIFT-BROADCAST", one_row=True)


@rules(11)
def mask(call: CheckedNode) -> Iterator[Fault]:
    """atten_mask has the type, shape and content of its mode, and masked keys with a biased score have a bias."""
    yield from common.mask_shape(call, "EXT-MASK-BROADCAST")
    if call.attrs.get("cpu_masked_bias") != "added":
        return
    for name in ("atten_mask", "real_shift"):
        if call[name] is None:
            yield Fault("cpu_masked_bias", f"cpu_masked_bias is 'added' without {name}, expected ''")
    if call.attrs.get("cpu_masked_values") == "zero":
        yield Fault("cpu_masked_values", "cpu_masked_values is 'zero' beside cpu_masked_bias, expected ''")


@rules(12)
def sparse_mode(call: CheckedNode) -> Iterator[Fault]:
    """sparse_mode is one of the layout's."""
    yield from common.sparse_mode_known(call)


@rules(13)
def band(call: CheckedNode) -> Iterator[Fault]:
    """The band leaves something to attend to."""
    yield from common.packed_band(call) if call.geometry.tnd else common.band(call)


@rules(14)
def prefix(call: CheckedNode) -> Iterator[Fault]:
    """prefix fits the batch and the lengths."""
    yield from common.prefix_lengths(call)


@rules(15)
def dropout(call: CheckedNode) -> Iterator[Fault]:
    """drop_mask has a bit a score, and is there where something is dropped."""
    yield from common.drop_bytes(call)
    keep = call.attr("keep_prob")
    draws = call.product is not None and call.product.name == "950"
    if 0.0 < keep < 1.0 and call["drop_mask"] is None and not draws:
        message = f"drop_mask is absent although keep_prob is {keep}, expected one: only 950 draws its own"
        yield Fault("drop_mask", message, "document")


@rules(16)
def sink(call: CheckedNode) -> Iterator[Fault]:
    """sink is float32, one for each head of a 16-bit query."""
    tensor = call["sink"]
    if tensor is None:
        return
    yield from common.sink_shape(call)
    if tensor.shape is not None and len(tensor.shape) != 1:
        yield Fault("sink", f"sink has the shape {text(tensor.shape)}, expected {text((call.geometry.n1,))}")
    if call.attrs.get("cpu_empty_rows") not in (None, "", "zero"):
        found = f"cpu_empty_rows is {call.attr('cpu_empty_rows')!r} beside a sink"
        yield Fault("cpu_empty_rows", f"{found}, which no mask excludes, expected '' or 'zero'")
    if call.dtype("query") == "DT_FLOAT":
        message = "query is DT_FLOAT beside a sink, expected DT_FLOAT16 or DT_BF16"
        yield Fault("query", message, "document", extension="EXT-SINK-FLOAT")


@rules(17)
def lengths(call: CheckedNode) -> Iterator[Fault]:
    """TND has cumulative lengths; elsewhere there may be a number of keys (an extension)."""
    yield from common.packed_lengths(call)
    yield from common.key_length(call)


@rules(18)
def rope(call: CheckedNode) -> Iterator[Fault]:
    """The rope inputs come in pairs, shaped as query and key; documented for TND with D 128 and Dr 64."""
    given = [name for name in ("query_rope", "key_rope") if call[name] is not None]
    if not given:
        return
    if len(given) == 1:
        other = "key_rope" if given[0] == "query_rope" else "query_rope"
        yield Fault(other, f"{other} is absent beside {given[0]}, expected both or none", "document")
        return
    faults = list(common.rope_shapes(call))
    yield from faults
    if faults:
        return
    g, rope_tensor = call.geometry, call["query_rope"]
    width = rope_tensor.shape[-1] if rope_tensor and rope_tensor.shape else None
    if not g.tnd or (isinstance(g.d, int) and g.d != 128) or (isinstance(width, int) and width != 64):
        found = f"{g.layout} with head size {size_text(g.d)} and rope size {size_text(width)}"
        message = f"query_rope is used in {found}, expected TND with 128 and 64"
        yield Fault("query_rope", message, "document", extension="EXT-ROPE")


@rules(19)
def starts(call: CheckedNode) -> Iterator[Fault]:
    """The start indices are vectors, and their difference fits 32 bits."""
    yield from common.starts(call)


@rules(20)
def reserved(call: CheckedNode) -> Iterator[Fault]:
    """padding_mask is reserved."""
    if call["padding_mask"] is not None:
        yield Fault("padding_mask", "padding_mask is given, expected none: it is reserved")


@rules(21)
def statistics_order(call: CheckedNode) -> Iterator[Fault]:
    """softmax_out_layout is known."""
    value = call.attr("softmax_out_layout")
    if value not in ("", "same_as_input"):
        message = f"softmax_out_layout is {value!r}, expected '' or 'same_as_input'"
        yield Fault("softmax_out_layout", message)


@rules(22)
def out_dtype(call: CheckedNode) -> Iterator[Fault]:
    """out_dtype is known."""
    value = call.attr("out_dtype")
    if value not in (0, 1):
        yield Fault("out_dtype", f"out_dtype is {value}, expected 0 (float16) or 1 (bfloat16)")


@rules(23)
def empty(call: CheckedNode) -> Iterator[Fault]:
    """Empty tensors are fine, but for a packed sequence that has queries and no keys."""
    g = call.geometry
    if g.tnd and g.q_lens and g.kv_lens:
        for index, (queries, keys) in enumerate(zip(g.q_lens, g.kv_lens, strict=True)):
            if queries and not keys:
                message = f"actual_seq_kvlen gives sequence {index} no key for {queries} queries, expected keys"
                yield Fault("actual_seq_kvlen", message, "document", extension="EXT-EMPTY-SEQUENCES")
                return
