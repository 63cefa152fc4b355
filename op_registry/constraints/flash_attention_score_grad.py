"""The constraints FAG.1 to FAG.19 of FlashAttentionScoreGrad.

FAG.19 says that the result is not deterministic unless the runtime is told so: no node can break it.
"""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.op_registry.constraints import common
from fa_compiler.op_registry.constraints.core import INVALID, NULLPTR, CheckedNode, Fault, Rules, text
from fa_compiler.op_registry.geometry import LAYOUTS, STATISTICS, Shape, differ
from fa_compiler.op_registry.node import TensorInfo

rules = Rules("FAG")

OWN_TYPES = (
    "query",
    "key",
    "value",
    "dy",
    "pse_shift",
    "atten_mask",
    "drop_mask",
    "attention_in",
    "sink",
    "query_rope",
    "key_rope",
)
"""Inputs whose type a numbered rule looks after."""


@rules(1)
def types(call: CheckedNode) -> Iterator[Fault]:
    """query, key, value and dy have one type, and so has a bias that is no slope."""
    yield from common.equal_types(call, ("query", "key", "value", "dy"))
    shift, query = call.dtype("pse_shift"), call.dtype("query")
    if call.attr("pse_type") in (0, 1) and shift and query and shift != query:
        wide = shift == "DT_FLOAT" and query in ("DT_FLOAT16", "DT_BF16")
        message = f"pse_shift is {shift}, expected {query} as query"
        yield Fault("pse_shift", message, "aclnn", extension="EXT-SHIFT-FLOAT" if wide else None)


@rules(2)
def layout(call: CheckedNode) -> Iterator[Fault]:
    """input_layout is known and the ranks fit it."""
    yield from common.layout_and_ranks(call)


@rules(3)
def heads(call: CheckedNode) -> Iterator[Fault]:
    """head_num is the head count of query."""
    yield from common.head_count(call)


@rules(4)
def ranks(call: CheckedNode) -> Iterator[Fault]:
    """Tensors shaped like query have rank 3 or more, the sink and its gradient rank 1."""
    shapes = {name: call[name] for name in ("dy", "attention_in")} | {
        name: call.outputs.get(name) for name in ("dq", "dk", "dv")
    }
    for name, tensor in shapes.items():
        if tensor is not None and tensor.shape is not None and len(tensor.shape) < 3:
            yield Fault(name, f"{name} has rank {len(tensor.shape)}, expected 3 or more", "aclnn")
    for name, tensor in (("sink", call["sink"]), ("dsink", _used(call, "dsink", "sink"))):
        if tensor is not None and tensor.shape is not None and len(tensor.shape) != 1:
            yield Fault(name, f"{name} has rank {len(tensor.shape)}, expected 1", "aclnn")


@rules(5)
def head_sizes(call: CheckedNode) -> Iterator[Fault]:
    """D is the same in query and key, at least Dv, at most 768 and not 0."""
    yield from common.head_sizes(call, "EXT-VALUE-WIDER")
    if call.geometry.d == 0:
        yield Fault("query", "query has the head size 0, expected 1 to 768", "aclnn")


@rules(6)
def sizes(call: CheckedNode) -> Iterator[Fault]:
    """N1 is a multiple of N2; one batch size; key and value alike."""
    yield from common.head_groups(call)
    if call.geometry.n2 == 0:
        yield Fault("key", "key has 0 heads, expected 1 or more", extension="EXT-GRAD-NO-KEYS")
    yield from common.batch_and_sequence(call, prefix_batch=1 << 10)


@rules(7)
def dropout(call: CheckedNode) -> Iterator[Fault]:
    """keep_prob is a probability, drop_mask has a bit a score and is there where something was dropped."""
    yield from common.keep_probability(call)
    yield from common.drop_bytes(call)
    keep = call.attr("keep_prob")
    draws = call.product is not None and call.product.name == "950"
    if 0.0 < keep < 1.0 and call["drop_mask"] is None and not draws:
        message = f"drop_mask is absent although keep_prob is {keep}, expected one: only 950 draws its own"
        yield Fault("drop_mask", message, "document")


@rules(8)
def masking(call: CheckedNode) -> Iterator[Fault]:
    """sparse_mode is one of the layout's, and the mask, the band and the bias fit it."""
    unknown = list(common.sparse_mode_known(call))
    yield from unknown
    if unknown:
        return
    yield from common.mask_shape(call, "EXT-MASK-BROADCAST")
    if call["atten_mask"] is None:
        return
    mode, g = call.attr("sparse_mode"), call.geometry
    if mode == 6 and call["query_rope"] is not None:
        message = "sparse_mode is 6 beside rope inputs, expected another"
        yield Fault("sparse_mode", message, "aclnn", extension="EXT-GRAD-ROPE")
    if not g.tnd:
        yield from common.band(call)
        return
    yield from common.packed_band(call)
    pre, nxt = call.attr("pre_tockens"), call.attr("next_tockens")
    if mode in (0, 4, 7, 8) and pre + nxt <= 0:
        message = f"pre_tockens {pre} and next_tockens {nxt} add up to {pre + nxt}, expected more than 0"
        yield Fault("pre_tockens", f"{message} in sparse_mode {mode} of TND", extension="EXT-BAND-OUTSIDE")
    if mode == 7 and call["pse_shift"] is not None:
        message = "pse_shift is given, expected none in sparse_mode 7"
        yield Fault("pse_shift", message, extension="EXT-GRAD-BIAS-MODES")
    if mode == 8 and call["pse_shift"] is not None and g.q_lens and g.kv_lens and g.q_lens[1:] != g.kv_lens[1:]:
        message = "pse_shift is given although lengths of query and key differ, expected equal ones in sparse_mode 8"
        yield Fault("pse_shift", message, extension="EXT-GRAD-BIAS-MODES")


@rules(9)
def pse(call: CheckedNode) -> Iterator[Fault]:
    """pse_type is known and fits pse_shift; slopes have their type and shape, and starts they are counted from."""
    yield from common.pse_type_known(call, "pse_shift")
    yield from common.starts(call)
    if call.attr("pse_type") in (2, 3) and call["pse_shift"] is not None:
        yield from common.slopes(call, "pse_shift")
        yield from common.inner_pse_positions(call, "pse_shift")


@rules(10)
def rope(call: CheckedNode) -> Iterator[Fault]:
    """With rope: both inputs, shaped as query and key; bfloat16, TND, a mask, no bias or dropout, D of whole 128s."""
    given = [name for name in ("query_rope", "key_rope") if call[name] is not None]
    if not given:
        return
    if len(given) == 1:
        other = "key_rope" if given[0] == "query_rope" else "query_rope"
        yield Fault(other, f"{other} is absent beside {given[0]}, expected both or none", "aclnn", NULLPTR)
        return
    faults = list(common.rope_shapes(call))
    yield from faults
    if faults:
        return
    for name, message, code in _device_rope(call, given):
        yield Fault(name, message, "aclnn", code, extension="EXT-GRAD-ROPE")


def _device_rope(call: CheckedNode, given: list[str]) -> Iterator[tuple[str, str, int]]:
    """What the products want besides of a gradient with rope inputs; the CPU kernel wants nothing of it."""
    if call["atten_mask"] is None:
        yield "atten_mask", "atten_mask is absent beside rope inputs, expected one", NULLPTR
    for name in ("query", "key", "value", *given):
        dtype = call.dtype(name)
        if dtype and dtype != "DT_BF16":
            yield name, f"{name} is {dtype} with rope inputs, expected DT_BF16", INVALID
    for name in ("pse_shift", "drop_mask"):
        if call[name] is not None:
            yield name, f"{name} is given beside rope inputs, expected none", INVALID
    if call.attr("keep_prob") != 1.0:
        yield "keep_prob", f"keep_prob is {call.attr('keep_prob')} beside rope inputs, expected 1", INVALID
    g = call.geometry
    if not g.tnd:
        yield "input_layout", f"input_layout is {g.layout} beside rope inputs, expected TND", INVALID
        return
    if isinstance(g.d, int) and g.d % 128:
        yield "query", f"query has the head size {g.d} beside rope inputs, expected a multiple of 128", INVALID
    tensor = call["query_rope"]
    width = tensor.shape[-1] if tensor and tensor.shape else None
    if isinstance(width, int) and isinstance(g.d, int) and width > g.d:
        yield "query_rope", f"query_rope has the size {width}, expected at most {g.d}, that of query", INVALID


@rules(11)
def statistics(call: CheckedNode) -> Iterator[Fault]:
    """softmax_max and softmax_sum are there, in the order softmax_in_layout says."""
    g = call.geometry
    expected: Shape
    if not g.tnd:
        expected = (g.b, g.n1, g.s1, STATISTICS)
    elif call.attr("softmax_in_layout") == "same_as_input":
        expected = (g.n1, g.t1, STATISTICS)
    else:
        expected = (g.t1, g.n1, STATISTICS)
    for name in ("softmax_max", "softmax_sum"):
        tensor = call[name]
        if tensor is None:
            yield Fault(name, f"{name} is absent, expected the one of the forward pass")
        elif g.layout in LAYOUTS:
            yield from _shaped(name, tensor, expected)


@rules(12)
def statistics_order(call: CheckedNode) -> Iterator[Fault]:
    """softmax_in_layout is known."""
    value = call.attr("softmax_in_layout")
    if value not in ("", "same_as_input"):
        message = f"softmax_in_layout is {value!r}, expected '' or 'same_as_input'"
        yield Fault("softmax_in_layout", message, "aclnn")


@rules(13)
def forward_result(call: CheckedNode) -> Iterator[Fault]:
    """attention_in is there and is like dy: query's shape with Dv for D."""
    tensor, dy = call["attention_in"], call["dy"]
    g = call.geometry
    if dy is not None and dy.shape is not None and len(dy.shape) == LAYOUTS.get(g.layout, 0):
        query = call["query"]
        if query is not None and query.shape is not None and len(query.shape) == len(dy.shape):
            folded = g.layout in ("BSH", "SBH")
            last = g.n1 * g.dv if folded and isinstance(g.n1, int) and isinstance(g.dv, int) else g.dv
            yield from _shaped("dy", dy, (*query.shape[:-1], None if folded and isinstance(last, str) else last))
    if tensor is None:
        yield Fault("attention_in", "attention_in is absent, expected attention_out of the forward pass")
    elif dy is not None:
        if tensor.dtype and dy.dtype and tensor.dtype != dy.dtype:
            yield Fault("attention_in", f"attention_in is {tensor.dtype}, expected {dy.dtype} as dy")
        if tensor.shape is not None and dy.shape is not None and len(dy.shape) >= 3 <= len(tensor.shape):
            yield from _shaped("attention_in", tensor, dy.shape)


@rules(14)
def lengths(call: CheckedNode) -> Iterator[Fault]:
    """TND has cumulative lengths, other layouts none; an empty sequence forbids a bias."""
    yield from common.packed_lengths(call)
    yield from common.key_length(call)
    g = call.geometry
    if call["pse_shift"] is not None and g.q_lens and g.kv_lens and 0 in (*g.q_lens, *g.kv_lens):
        message = "pse_shift is given although a sequence is empty, expected none"
        yield Fault("pse_shift", message, "document", extension="EXT-EMPTY-SEQUENCES")


@rules(15)
def sink(call: CheckedNode) -> Iterator[Fault]:
    """sink and dsink are float32, one for each head."""
    yield from common.sink_shape(call)
    gradient = _used(call, "dsink", "sink")
    if gradient is None:
        return
    if gradient.dtype and gradient.dtype != "DT_FLOAT":
        yield Fault("dsink", f"dsink is {gradient.dtype}, expected DT_FLOAT")
    if gradient.shape is not None and len(gradient.shape) == 1:
        yield from _shaped("dsink", gradient, (call.geometry.n1,))


@rules(16)
def reserved(call: CheckedNode) -> Iterator[Fault]:
    """padding_mask and softmax_in are reserved; dpse has the shape of pse_shift, or none."""
    for name in ("padding_mask", "softmax_in"):
        if call[name] is not None:
            yield Fault(name, f"{name} is given, expected none: it is reserved")
    gradient, shift = call.outputs.get("dpse"), call["pse_shift"]
    if gradient is not None and gradient.shape is not None and _holds_something(gradient.shape):
        if shift is None:
            yield Fault("dpse", f"dpse has the shape {text(gradient.shape)}, expected [0] without pse_shift")
        elif shift.shape is not None:
            yield from _shaped("dpse", gradient, shift.shape)


@rules(17)
def prefix(call: CheckedNode) -> Iterator[Fault]:
    """prefix fits the lengths in sparse_mode 5 and 6. In other modes it is not read: the sample of
    aclnnFlashAttentionUnpaddingScoreGradV5 gives one in mode 0."""
    yield from common.prefix_lengths(call)


@rules(18)
def bias_shape(call: CheckedNode) -> Iterator[Fault]:
    """pse_shift of pse_type 0 and 1 has a shape of the scores, or is compressed ALiBi where that is legal."""
    if call.attr("pse_type") not in (0, 1):
        return
    g = call.geometry
    if g.tnd:
        # Empty sequences are FAG.14's.
        for fault in common.packed_bias_shape(call, "pse_shift", flat_rank_one=True):
            if fault.extension != "EXT-EMPTY-SEQUENCES":
                yield fault
    elif g.layout in LAYOUTS:
        yield from common.bias_shape(call, "pse_shift", "EXT-SHIFT-BROADCAST", one_row=False)


def _holds_something(shape: Shape) -> bool:
    return len(shape) != 1 or differ(shape[0], 0)


def _used(call: CheckedNode, output: str, source: str) -> TensorInfo | None:
    """An output that is only meaningful if the input it belongs to is there."""
    return call.outputs.get(output) if call[source] is not None else None


def _shaped(name: str, tensor: TensorInfo, expected: Shape) -> Iterator[Fault]:
    shape = tensor.shape
    if shape is not None and (len(shape) != len(expected) or any(map(differ, shape, expected))):
        yield Fault(name, f"{name} has the shape {text(shape)}, expected {text(expected)}")
