"""The constraints FIA.1 to FIA.17 of FusedInferAttentionScore, as far as a prompt without quantised caches needs them.

Numbers and stages: the project's constraints list (aclnn document V4 and host code). Of 7 to 12 and 16 the pairs and
absences are checked; shapes of the antiquantisation and of pages are not.
"""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.op_registry.constraints import prefill
from fa_compiler.op_registry.constraints.core import Call, Fault, Rules
from fa_compiler.op_registry.constraints.prefill import HALFS
from fa_compiler.op_registry.geometry import differ

rules = Rules("FIA")

OWN_TYPES = ("query", "pse_shift", "atten_mask", "actual_seq_lengths", "actual_seq_lengths_kv")

LAYOUTS = (
    *("BSH", "BSND", "BNSD", "TND", "NTD", "NSD"),
    *("BNSD_BSND", "BSH_BNSD", "BSND_BNSD", "NTD_TND", "TND_NTD", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD"),
)

_INT8_CHAIN = ("dequant_scale1", "quant_scale1", "dequant_scale2")
_PACKED = ("TND", "NTD", "NTD_TND", "TND_NTD")
_KEY_TYPES = (*HALFS, "DT_INT8", "DT_INT4", "DT_INT32")
_PAIRS = {
    13: ("query_rope", "key_rope"),
    15: ("key_shared_prefix", "value_shared_prefix"),
    16: ("key_antiquant_scale", "value_antiquant_scale"),
}


@rules(1)
def types(call: Call) -> Iterator[Fault]:
    """query is a half or INT8; a key that is a half has its type."""
    query = call.dtype("query")
    if query is None:
        return
    eight = ("DT_FLOAT8_E4M3FN", "DT_HIFLOAT8") if call.product is not None and call.product.name == "950" else ()
    if query not in (*HALFS, "DT_INT8", *eight):
        yield Fault("query", f"query is {query}, expected DT_FLOAT16, DT_BF16 or DT_INT8", "aclnn")
        return
    for name in ("key", "value"):
        for info in call.lists.get(name, ()):
            wrong = info.dtype in HALFS and query in HALFS and info.dtype != query
            if info.dtype and (wrong or (info.dtype not in _KEY_TYPES and not eight)):
                yield Fault(name, f"{name} is {info.dtype}, expected {query} as query, or a quantised type", "aclnn")
                break


@rules(2)
def layout(call: Call) -> Iterator[Fault]:
    """input_layout is known, and ranks fit it."""
    yield from prefill.layout_and_ranks(call, LAYOUTS)


@rules(3)
def heads(call: Call) -> Iterator[Fault]:
    """num_heads and num_key_value_heads are those of query and key."""
    yield from prefill.heads(call)


@rules(4)
def sizes(call: Call) -> Iterator[Fault]:
    """Sizes fit together and are in their ranges."""
    yield from prefill.same_sizes(call)
    yield from prefill.ranges(call)


@rules(5)
def mask(call: Call) -> Iterator[Fault]:
    """sparse_mode is 0 to 4, with the mask it wants."""
    if not prefill.paged(call):
        yield from prefill.mask(call)
    elif call.attr("sparse_mode") not in range(5):
        yield Fault("sparse_mode", f"sparse_mode is {call.attr('sparse_mode')}, expected 0 to 4")


@rules(6)
def bias(call: Call) -> Iterator[Fault]:
    """pse_shift has query's type, and covers the scores."""
    if not prefill.paged(call):
        yield from prefill.bias(call)


@rules(7)
def quantised(call: Call) -> Iterator[Fault]:
    """The INT8 chain is whole, and there for an INT8 query only; an INT8 result has its scale."""
    given = [name for name in _INT8_CHAIN if call[name] is not None]
    if call.dtype("query") == "DT_INT8" and call["dequant_scale_query"] is None and len(given) < len(_INT8_CHAIN):
        missing = next(name for name in _INT8_CHAIN if name not in given)
        yield Fault(missing, f"{missing} is absent, expected with an INT8 query")
    elif call.dtype("query") in HALFS and given:
        yield Fault(given[0], f"{given[0]} is given, expected none beside a query of {call.dtype('query')}")
    out = call.outputs.get("attention_out")
    if out is not None and out.dtype == "DT_INT8" and call["quant_scale2"] is None:
        yield Fault("quant_scale2", "quant_scale2 is absent, expected with an INT8 attention_out")


@rules(8)
def rows_without_keys(call: Call) -> Iterator[Fault]:
    """Quantised results have no rows without a key."""
    yield from prefill.empty_rows(call)


@rules(9)
def pages(call: Call) -> Iterator[Fault]:
    """Pages need their size and the lengths of the keys."""
    if not prefill.paged(call):
        return
    size = call.attr("block_size")
    if size <= 0 or size > 1024 or size % 16:
        yield Fault("block_size", f"block_size is {size}, expected a multiple of 16 from 16 to 512, or 1024 in TND")
    if call["actual_seq_lengths_kv"] is None:
        yield Fault("actual_seq_lengths_kv", "actual_seq_lengths_kv is absent, expected with pages")


@rules(10)
def padding(call: Call) -> Iterator[Fault]:
    """Left padding goes with lengths, and neither with packed layouts nor with pages."""
    for name, needed in (
        ("query_padding_size", "actual_seq_lengths"),
        ("kv_padding_size", "actual_seq_lengths_kv"),
    ):
        if call[name] is None:
            continue
        if call.attr("input_layout") in _PACKED or prefill.paged(call):
            yield Fault(name, f"{name} is given, expected none with packed layouts or pages")
        elif call[needed] is None:
            yield Fault(needed, f"{needed} is absent, expected with {name}")


@rules(11)
def lists(call: Call) -> Iterator[Fault]:
    """Lists of keys and values have one tensor for each batch, or one."""
    keys, values = (len(call.lists.get(name, ())) for name in ("key", "value"))
    b = prefill.sizes_of(call).b
    if keys != values:
        yield Fault("value", f"value has {values} tensors, expected {keys} as key")
    elif keys > 1 and differ(b, keys):
        yield Fault("key", f"key has {keys} tensors, expected {b}, one for each batch, or one")


@rules(12)
def packed(call: Call) -> Iterator[Fault]:
    """Packed layouts have both vectors of lengths."""
    for name in ("actual_seq_lengths", "actual_seq_lengths_kv"):
        if call.attr("input_layout") in _PACKED:
            if call[name] is None:
                yield Fault(name, f"{name} is absent, expected with {call.attr('input_layout')}")
        else:
            yield from prefill.lengths(call, name)


@rules(13)
def rope(call: Call) -> Iterator[Fault]:
    """query_rope and key_rope: both or none."""
    yield from _pair(call, 13)


@rules(14)
def statistics(call: Call) -> Iterator[Fault]:
    """softmax_lse is there in most layouts."""
    given = call.attr("input_layout")
    if call.attr("softmax_lse_flag") and (given.endswith("_NBSD") or given == "TND_NTD"):
        yield Fault("softmax_lse_flag", f"softmax_lse_flag is set, expected not with {given}")


@rules(15)
def prefix(call: Call) -> Iterator[Fault]:
    """A shared prefix has keys and values."""
    yield from _pair(call, 15)


@rules(16)
def antiquantised(call: Call) -> Iterator[Fault]:
    """Scales of quantised keys and values: both or none."""
    yield from _pair(call, 16)


@rules(17)
def query_quant_mode(call: Call) -> Iterator[Fault]:
    """query_quant_mode is 3 where the query has scales of its own."""
    if call["dequant_scale_query"] is not None and call.attr("query_quant_mode") != 3:
        yield Fault("query_quant_mode", f"query_quant_mode is {call.attr('query_quant_mode')}, expected 3")


def _pair(call: Call, rule: int) -> Iterator[Fault]:
    first, second = _PAIRS[rule]
    if (call[first] is None) != (call[second] is None):
        missing, given = (first, second) if call[first] is None else (second, first)
        yield Fault(missing, f"{missing} is absent, expected with {given}")
