"""The constraints FIA.1 to FIA.17 of FusedInferAttentionScore, as far as a prompt without quantised caches needs them.

Numbers and stages: the project's constraints list (aclnn document V4 and host code). Of 16 the pairs and modes are
checked; shapes of the antiquantisation and of pages are not.
"""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.op_registry.constraints import prefill
from fa_compiler.op_registry.constraints.core import CheckedNode, Fault, Rules, size_text, text
from fa_compiler.op_registry.constraints.decode_sizes import shorter
from fa_compiler.op_registry.constraints.prefill import HALFS, RANKS
from fa_compiler.op_registry.geometry import differ
from fa_compiler.op_registry.node import TensorInfo

rules = Rules("FIA", drops_empty=True)

OWN_TYPES = (
    *("query", "key", "value", "query_rope", "key_rope"),
    *("pse_shift", "atten_mask", "actual_seq_lengths", "actual_seq_lengths_kv"),
)

LAYOUTS = (
    *("BSH", "BSND", "BNSD", "TND", "NTD", "NSD"),
    *("BNSD_BSND", "BSH_BNSD", "BSND_BNSD", "NTD_TND", "TND_NTD", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD"),
)

_INT8_CHAIN = ("dequant_scale1", "quant_scale1", "dequant_scale2")
_OUTPUT_SCALES = ("quant_scale2", "quant_offset2")
_PADDINGS = ("query_padding_size", "kv_padding_size")
_LENGTH_AXIS = {"BSH": 1, "BSND": 1, "BNSD": 2, "NSD": 1}
MAX_LIST, LATENT, ROPE = 256, 512, 64
_PACKED = ("TND", "NTD", "NTD_TND", "TND_NTD")
_KEY_TYPES = (*HALFS, "DT_INT8", "DT_INT4", "DT_INT32")
_PAIRS = {
    13: ("query_rope", "key_rope"),
    15: ("key_shared_prefix", "value_shared_prefix"),
    16: ("key_antiquant_scale", "value_antiquant_scale"),
}


@rules(1)
def types(call: CheckedNode) -> Iterator[Fault]:
    """query is a half or INT8; a key that is a half has its type."""
    query = call.dtype("query")
    if query is None:
        return
    eight = ("DT_FLOAT8_E4M3FN", "DT_HIFLOAT8") if call.product is not None and call.product.name == "950" else ()
    if query not in (*HALFS, "DT_INT8", "DT_FLOAT", *eight):
        yield Fault("query", f"query is {query}, expected DT_FLOAT16, DT_BF16 or DT_INT8", "aclnn")
        return
    if query == "DT_FLOAT":
        message = f"query is {query}, expected DT_FLOAT16, DT_BF16 or DT_INT8"
        yield Fault("query", message, "aclnn", extension="EXT-PROMPT-FLOAT")
    for name in ("key", "value"):
        for info in call.lists.get(name, ()):
            if query == "DT_FLOAT" == info.dtype:
                continue
            wrong = info.dtype in HALFS and query in (*HALFS, "DT_FLOAT") and info.dtype != query
            if info.dtype and (wrong or (info.dtype not in _KEY_TYPES and not eight)):
                yield Fault(name, f"{name} is {info.dtype}, expected {query} as query, or a quantised type", "aclnn")
                break


@rules(2)
def layout(call: CheckedNode) -> Iterator[Fault]:
    """input_layout is known, and ranks fit it."""
    yield from prefill.layout_and_ranks(call, LAYOUTS)


@rules(3)
def heads(call: CheckedNode) -> Iterator[Fault]:
    """num_heads and num_key_value_heads are those of query and key."""
    yield from prefill.heads(call)


@rules(4)
def sizes(call: CheckedNode) -> Iterator[Fault]:
    """Sizes fit together and are in their ranges."""
    yield from prefill.same_sizes(call, narrower=True)
    yield from prefill.ranges(call)


@rules(5)
def mask(call: CheckedNode) -> Iterator[Fault]:
    """sparse_mode is 0 to 4, with the mask it wants."""
    if one_row(call):
        yield from _row_mask(call)
    elif not prefill.paged(call):
        yield from prefill.mask(call)
    elif call.attr("sparse_mode") not in range(5):
        yield Fault("sparse_mode", f"sparse_mode is {call.attr('sparse_mode')}, expected 0 to 4")


def one_row(call: CheckedNode) -> bool:
    """Is this the path of decoding? It has one row, value as wide as key, and no rope part."""
    sizes = prefill.sizes_of(call)
    same = isinstance(sizes.d, int) and sizes.d == sizes.dv
    return sizes.layout in ("BSH", "BSND", "BNSD") and sizes.s1 == 1 and same and call["query_rope"] is None


def _row_mask(call: CheckedNode) -> Iterator[Fault]:
    """Whatever the mode, the mask of one row is [1|B,..,S2] with ones between, S2 possibly padded."""
    mode, given, sizes = call.attr("sparse_mode"), call["atten_mask"], prefill.sizes_of(call)
    if given is None:
        return
    if mode not in range(5):
        yield Fault("sparse_mode", f"sparse_mode is {mode}, expected 0 to 4")
    yield from prefill.mask_type(given)
    if given.shape is None:
        return
    ranked = 2 <= len(given.shape) <= 4
    fits = ranked and (given.shape[0] == 1 or not differ(given.shape[0], sizes.b))
    ones = fits and not any(differ(size, 1) for size in given.shape[1:-1])
    if not ones or (not prefill.paged(call) and shorter(given.shape[-1], sizes.s2)):
        message = (
            f"atten_mask has the shape {text(given.shape)}, expected {text((sizes.b, sizes.s2))} with ones between"
        )
        yield Fault("atten_mask", f"{message}: with one row of query every sparse_mode takes a mask of keys")


@rules(6)
def bias(call: CheckedNode) -> Iterator[Fault]:
    """pse_shift has query's type, and covers the scores; or it holds slopes, by pse_type."""
    kind, given = call.attr("pse_type"), call["pse_shift"]
    if kind not in (0, 2, 3):
        yield Fault("pse_type", f"pse_type is {kind}, expected 0, 2 or 3")
    elif kind:
        yield from _slopes(call, kind, given)
    elif not prefill.paged(call):
        yield from prefill.bias(call)


def _slopes(call: CheckedNode, kind: int, given: TensorInfo | None) -> Iterator[Fault]:
    sizes = prefill.sizes_of(call)
    if given is None:
        yield Fault("pse_shift", f"pse_shift is absent, expected slopes with a pse_type of {kind}")
        return
    if given.dtype not in ("", "DT_FLOAT"):
        yield Fault("pse_shift", f"pse_shift is {given.dtype}, expected DT_FLOAT with a pse_type of {kind}")
    wanted = (sizes.b, sizes.n1)
    if given.shape is not None and (
        len(given.shape) not in (1, 2) or any(map(differ, given.shape, wanted[-len(given.shape) :]))
    ):
        yield Fault("pse_shift", f"pse_shift has the shape {text(given.shape)}, expected {text(wanted)} or without B")


@rules(7)
def quantised(call: CheckedNode) -> Iterator[Fault]:
    """The INT8 chain is whole, and there for an INT8 query of several rows only; an INT8 result has its scale."""
    given = [name for name in _INT8_CHAIN if call[name] is not None]
    out = call.outputs.get("attention_out")
    stated = None if out is None else out.dtype
    if call.dtype("query") == "DT_INT8" and call["dequant_scale_query"] is None:
        if len(given) < len(_INT8_CHAIN):
            missing = next(name for name in _INT8_CHAIN if name not in given)
            yield Fault(missing, f"{missing} is absent, expected with an INT8 query")
        elif prefill.sizes_of(call).s1 == 1:
            yield Fault("query", "query is DT_INT8 and has one row, expected DT_FLOAT16 or DT_BF16")
        scaled = [name for name in _OUTPUT_SCALES if call[name] is not None]
        if stated in HALFS and scaled:
            yield Fault(scaled[0], f"{scaled[0]} is given, expected none with an attention_out of {stated}")
    elif call.dtype("query") in HALFS and given:
        yield Fault(given[0], f"{given[0]} is given, expected none beside a query of {call.dtype('query')}")
    if stated == "DT_INT8" and call["quant_scale2"] is None:
        yield Fault("quant_scale2", "quant_scale2 is absent, expected with an INT8 attention_out")


@rules(8)
def rows_without_keys(call: CheckedNode) -> Iterator[Fault]:
    """Quantised results have no rows without a key and no band to one side; scales for channels go with neither left
    padding nor softmax_lse, and with whole 32s of D."""
    scale = call["quant_scale2"]
    if scale is None:
        return
    before, after = call.attr("pre_tokens"), call.attr("next_tokens")
    if call["atten_mask"] is not None and call.attr("sparse_mode") == 4 and min(before, after) < 0:
        message = f"sparse_mode is 4 with pre_tokens {before} and next_tokens {after}"
        message = f"{message}, expected neither below 0 with quantised results"
        yield Fault("sparse_mode", message, extension="EXT-PROMPT-MODES")
    if call["quant_offset2"] is not None and not one_row(call):
        yield from prefill.empty_rows(call)
    if scale.shape is None or all(size == 1 or not isinstance(size, int) for size in scale.shape):
        return
    for name in _PADDINGS:
        if call[name] is not None:
            yield Fault(name, f"{name} is given, expected none with a quant_scale2 for channels")
    if call.attr("softmax_lse_flag"):
        yield Fault("softmax_lse_flag", "softmax_lse_flag is set, expected it unset with a quant_scale2 for channels")
    d = prefill.sizes_of(call).d
    if isinstance(d, int) and d % 32:
        message = f"query has the head size {d}, expected a multiple of 32 with a quant_scale2 for channels"
        yield Fault("query", message, extension="EXT-PROMPT-SIZES")


@rules(9)
def pages(call: CheckedNode) -> Iterator[Fault]:
    """Pages need their size and the lengths of the keys, and go with one tensor of keys without a prefix."""
    table = call["block_table"]
    if table is None:
        return
    size, keys = call.attr("block_size"), call.lists.get("key", ())
    unit = 32 if any(info.dtype == "DT_INT8" for info in keys) else 16
    most = 1024 if call.attr("input_layout") in _PACKED or call["query_rope"] is not None else 512
    if size <= 0 or size > most or size % unit:
        message = f"block_size is {size}, expected a multiple of {unit} from {unit} to {most}"
        yield Fault("block_size", message, extension="EXT-PROMPT-SIZES" if 0 < size < 2**31 else None)
    if call["actual_seq_lengths_kv"] is None:
        yield Fault("actual_seq_lengths_kv", "actual_seq_lengths_kv is absent, expected with pages")
    b = prefill.sizes_of(call).b
    if table.shape is not None and (len(table.shape) != 2 or differ(table.shape[0], b)):
        yield Fault("block_table", f"block_table has the shape {text(table.shape)}, expected {text((b, None))}")
    if len(keys) > 1:
        yield Fault("key", f"key is a list of {len(keys)} beside a block_table, expected one tensor")
    if call["key_shared_prefix"] is not None:
        yield Fault("key_shared_prefix", "key_shared_prefix is given beside a block_table, expected none")


@rules(10)
def padding(call: CheckedNode) -> Iterator[Fault]:
    """Left padding is one number, goes with lengths, and not with packed layouts, pages or lists."""
    for name, needed in zip(_PADDINGS, ("actual_seq_lengths", "actual_seq_lengths_kv"), strict=True):
        given = call[name]
        if given is None:
            continue
        listed = len(call.lists.get("key", ())) > 1
        if call.attr("input_layout") in _PACKED or prefill.paged(call) or listed:
            yield Fault(name, f"{name} is given, expected none with packed layouts, pages or lists")
        elif call[needed] is None:
            yield Fault(needed, f"{needed} is absent, expected with {name}")
        if given.shape is not None and (len(given.shape) != 1 or differ(given.shape[0], 1)):
            yield Fault(name, f"{name} has the shape {text(given.shape)}, expected [1]")


@rules(11)
def lists(call: CheckedNode) -> Iterator[Fault]:
    """Lists of keys and values have one tensor for each batch, of batch 1 and alike but for S, or one tensor."""
    keys, values = call.lists.get("key", ()), call.lists.get("value", ())
    sizes = prefill.sizes_of(call)
    if len(keys) != len(values):
        yield Fault("value", f"value has {len(values)} tensors, expected {len(keys)} as key")
        return
    if len(keys) < 2:
        return
    if call.attr("input_layout") in _PACKED:
        yield Fault("key", f"key has {len(keys)} tensors, expected one with {call.attr('input_layout')}")
        return
    if differ(sizes.b, len(keys)) or len(keys) > MAX_LIST:
        message = f"key has {len(keys)} tensors, expected {size_text(sizes.b)}, one for each batch, or one"
        yield Fault("key", f"{message}; at most {MAX_LIST}")
        return
    if sizes.layout not in _LENGTH_AXIS:  # unknown, which another rule tells
        return
    places = [axis for axis in range(RANKS[sizes.layout]) if axis != _LENGTH_AXIS[sizes.layout]]
    for name, tensors in (("key", keys), ("value", values)):
        shapes = [shape for info in tensors if (shape := info.shape) is not None and len(shape) > max(places)]
        for shape in shapes:
            if differ(shape[0], 1) or any(differ(shape[axis], shapes[0][axis]) for axis in places):
                message = f"{name} holds a tensor of shape {text(shape)}, expected batch 1, and heads and their size"
                yield Fault(name, f"{message} as in {text(shapes[0])}")
                return


@rules(12)
def packed(call: CheckedNode) -> Iterator[Fault]:
    """Packed layouts have both vectors of lengths, and few other features."""
    layout = call.attr("input_layout")
    for name in ("actual_seq_lengths", "actual_seq_lengths_kv"):
        if layout not in _PACKED:
            yield from prefill.lengths(call, name)
        elif call[name] is None:
            yield Fault(name, f"{name} is absent, expected with {layout}")
    if layout not in _PACKED:
        return
    d = prefill.sizes_of(call).d
    if isinstance(d, int):
        yield from _packed_latent(call) if d == LATENT else _packed_plain(call, d)


def _packed_latent(call: CheckedNode) -> Iterator[Fault]:
    """Of head size 512: one key head in pages, up to 128 query heads (a power of two), no softmax_lse."""
    layout, sizes = call.attr("input_layout"), prefill.sizes_of(call)

    def fault(name: str, message: str) -> Fault:
        return Fault(name, message, extension="EXT-PROMPT-PACKED")

    if layout not in ("TND", "TND_NTD"):
        yield fault("input_layout", f"input_layout is {layout}, expected TND or TND_NTD with a head size of {LATENT}")
    if isinstance(sizes.n1, int) and (sizes.n1 > 128 or sizes.n1 & (sizes.n1 - 1)):
        yield fault("query", f"query has {sizes.n1} heads, expected a power of two up to 128")
    if differ(sizes.n2, 1):
        yield fault("num_key_value_heads", f"num_key_value_heads is {sizes.n2}, expected 1 with {layout} of {LATENT}")
    if call.attr("sparse_mode") not in (0, 3, 4):
        yield fault("sparse_mode", f"sparse_mode is {call.attr('sparse_mode')}, expected 0, 3 or 4 with {layout}")
    if not prefill.paged(call):
        yield fault("block_table", f"block_table is absent, expected with {layout} and a head size of {LATENT}")
    if call["query_rope"] is None:
        yield fault("query_rope", f"query_rope is absent, expected with {layout} and a head size of {LATENT}")
    if call.attr("softmax_lse_flag") and layout != "TND_NTD":  # which has it in no case: rule 14
        yield fault("softmax_lse_flag", f"softmax_lse_flag is set, expected it unset with a head size of {LATENT}")


def _packed_plain(call: CheckedNode, d: int) -> Iterator[Fault]:
    """Of another head size: bfloat16 and 128, or 192 with values of 128 or 192; no bias, prefix or quantisation."""
    layout, extension = call.attr("input_layout"), "EXT-PROMPT-PACKED"
    if layout == "TND_NTD":
        message = f"input_layout is {layout}, expected TND, NTD or NTD_TND with a head size of {d}"
        yield Fault("input_layout", message, extension=extension)
    if d not in (128, 192):
        message = f"query has the head size {d}, expected 128, 192 or {LATENT} with {layout}"
        yield Fault("query", message, extension=extension)
    if call.dtype("query") not in (None, "DT_BF16"):
        integers = call.dtype("query") == "DT_INT8"
        message = f"query is {call.dtype('query')}, expected DT_BF16 with {layout} and a head size of {d}"
        yield Fault("query", message, extension=None if integers else extension)
    computed = {
        "pse_shift": call.attr("pse_type") in (2, 3),
        "antiquant_scale": call.attr("antiquant_mode") != 1,
        "key_antiquant_scale": not {1, 3} & {call.attr("key_antiquant_mode"), call.attr("value_antiquant_mode")},
    }
    for name in ("pse_shift", "key_shared_prefix", "antiquant_scale", "key_antiquant_scale", "quant_scale2"):
        if call[name] is not None:
            message = f"{name} is given, expected none with {layout} and a head size of {d}"
            yield Fault(name, message, extension=extension if computed.get(name) else None)


@rules(13)
def rope(call: CheckedNode) -> Iterator[Fault]:
    """query_rope and key_rope: both or none; halves of size 64, without padding, lists, bias, prefix or scales."""
    yield from _pair(call, 13)
    query, key = call["query_rope"], call["key_rope"]
    if query is None or key is None:
        return
    for name, info in (("query_rope", query), ("key_rope", key)):
        if info.dtype and info.dtype not in HALFS:
            extension = "EXT-PROMPT-FLOAT" if info.dtype == "DT_FLOAT" else None
            yield Fault(name, f"{name} is {info.dtype}, expected {' or '.join(HALFS)}", extension=extension)
        paged_key = name == "key_rope" and prefill.paged(call)
        folded = prefill.query_layout(call) == "BSH"
        if info.shape and not paged_key and not folded and differ(info.shape[-1], ROPE):
            message = f"{name} has the head size {info.shape[-1]}, expected {ROPE}"
            yield Fault(name, message, extension="EXT-PROMPT-SIZES")
    for name in (*_PADDINGS, "pse_shift", "key_shared_prefix", "antiquant_scale", "key_antiquant_scale"):
        # Beside a query of 8 bits a scale of the keys belongs to the full quantisation, which has rope.
        full = name == "key_antiquant_scale" and call["dequant_scale_query"] is not None
        if call[name] is not None and not full:
            yield Fault(name, f"{name} is given, expected none with query_rope")
    if call["quant_scale2"] is not None:
        yield Fault("quant_scale2", "quant_scale2 is given, expected none with query_rope")
    if len(call.lists.get("key", ())) > 1:
        yield Fault("key", "key is a list of tensors, expected one tensor with query_rope")


@rules(14)
def statistics(call: CheckedNode) -> Iterator[Fault]:
    """softmax_lse is there in most layouts."""
    given = call.attr("input_layout")
    if call.attr("softmax_lse_flag") and (given.endswith("_NBSD") or given == "TND_NTD"):
        message = f"softmax_lse_flag is set, expected not with {given}"
        yield Fault("softmax_lse_flag", message, extension="EXT-PROMPT-STATISTICS")


@rules(15)
def prefix(call: CheckedNode) -> Iterator[Fault]:
    """A shared prefix has keys and values of one batch entry and key's type; its length is one number within it."""
    yield from _pair(call, 15)
    key = call["key_shared_prefix"]
    if key is None or call["value_shared_prefix"] is None:
        return
    own = prefill.tensor(call, "key")
    for name in _PAIRS[15]:
        info = call[name]
        if info is None:
            continue
        if own is not None and own.dtype and info.dtype and info.dtype != own.dtype:
            yield Fault(name, f"{name} is {info.dtype}, expected {own.dtype} as key")
        if info.shape and prefill.query_layout(call).startswith("B") and differ(info.shape[0], 1):
            yield Fault(name, f"{name} has the batch size {info.shape[0]}, expected 1")
    length = call["actual_shared_prefix_len"]
    if length is None:
        return
    if length.shape is not None and (len(length.shape) != 1 or differ(length.shape[0], 1)):
        yield Fault(
            "actual_shared_prefix_len", f"actual_shared_prefix_len has the shape {text(length.shape)}, expected [1]"
        )
    content, size = call.content("actual_shared_prefix_len"), prefill.prefix_size(call)
    if content and isinstance(size, int) and not 0 <= content[0] <= size:
        yield Fault("actual_shared_prefix_len", f"actual_shared_prefix_len is {content[0]}, expected 0 to {size}")


@rules(16)
def antiquantised(call: CheckedNode) -> Iterator[Fault]:
    """Scales of quantised keys and values: both or none, and so their offsets; of one mode, or 0 and 1."""
    yield from _pair(call, 16)
    first, second = "key_antiquant_offset", "value_antiquant_offset"
    if (call[first] is None) != (call[second] is None):
        missing, given = (first, second) if call[first] is None else (second, first)
        yield Fault(missing, f"{missing} is absent, expected with {given}")
    modes = call.attr("key_antiquant_mode"), call.attr("value_antiquant_mode")
    if call["key_antiquant_scale"] is not None and modes[0] != modes[1] and modes != (0, 1):
        message = f"value_antiquant_mode is {modes[1]} beside a key_antiquant_mode of {modes[0]}"
        yield Fault("value_antiquant_mode", f"{message}, expected the same, or 0 and 1")


@rules(17)
def query_quant_mode(call: CheckedNode) -> Iterator[Fault]:
    """query_quant_mode is 3 where the query has scales of its own."""
    if call["dequant_scale_query"] is not None and call.attr("query_quant_mode") != 3:
        yield Fault("query_quant_mode", f"query_quant_mode is {call.attr('query_quant_mode')}, expected 3")


def _pair(call: CheckedNode, rule: int) -> Iterator[Fault]:
    first, second = _PAIRS[rule]
    if (call[first] is None) != (call[second] is None):
        missing, given = (first, second) if call[first] is None else (second, first)
        yield Fault(missing, f"{missing} is absent, expected with {given}")
