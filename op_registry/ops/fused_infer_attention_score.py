"""FusedInferAttentionScore: inference attention, prefill and decoding in one operator.

Its constraints are FIA.1 to FIA.17, as far as a prompt without quantised caches needs them. Their
numbers and stages are those of the project's constraints list, drawn from the aclnn document V4 and
the host code. FIA.16 checks only the pairs of scales and offsets, and their modes. No rule checks
the shapes of the antiquantisation tensors and of pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from fa_compiler.op_registry.constraints import prefill
from fa_compiler.op_registry.constraints.core import (
    CheckedNode,
    Rules,
    first,
    shape_is,
    size_text,
    text,
)
from fa_compiler.op_registry.constraints.decode_sizes import shorter
from fa_compiler.op_registry.constraints.prefill import RANKS
from fa_compiler.op_registry.cpu_kernel import (
    ABSENT,
    ANY,
    MOST_LISTED,
    OF_QUERY,
    CpuKernel,
    TypeRow,
    type_row,
)
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.geometry import differ, shapes_differ
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.node import TensorInfo
from fa_compiler.op_registry.operator import Operator
from fa_compiler.op_registry.shapes import prompt_outputs

INT8_HALFS = "DT_INT8, DT_FLOAT16, DT_BF16"
HALFS = "DT_FLOAT16, DT_BF16"
HALFS_INT8 = "DT_FLOAT16, DT_BF16, DT_INT8"
HALFS_INT8_4 = "DT_FLOAT16, DT_BF16, DT_INT8, DT_INT4"
FLOATS = "DT_FLOAT16, DT_BF16, DT_FLOAT"
FLOATS32 = "DT_FLOAT16, DT_BF16, DT_FLOAT32"
FLOAT_BF16 = "DT_FLOAT, DT_BF16"
INT8_TO_FP8 = f"{INT8_HALFS}, DT_HIFLOAT8, DT_FLOAT8_E5M2, DT_FLOAT8_E4M3FN"
INT8_TO_FP4 = f"{INT8_TO_FP8}, DT_FLOAT4_E2M1, DT_FLOAT4_E1M2, DT_INT4"
ON_950 = f"{HALFS_INT8}, DT_HIFLOAT8, DT_FLOAT8_E4M3FN"
ON_950_KV = f"{HALFS_INT8_4}, DT_HIFLOAT8, DT_FLOAT8_E4M3FN, DT_FLOAT4_E2M1, DT_FLOAT4_E1M2"
ON_950_SCALE = f"{FLOATS}, DT_FLOAT8_E8M0"

CANN_8X = (
    REG_OP(
        "FusedInferAttentionScore",
        "cann_8x_header",
        source="built-in operator header of CANN 8.x",
        cann="8.0",
        note="the source gives names and counts: types and defaults are those of experiment_ops",
    )
    .INPUT("query", INT8_HALFS)
    .DYNAMIC_INPUT("key", INT8_HALFS)
    .DYNAMIC_INPUT("value", INT8_HALFS)
    .OPTIONAL_INPUT("pse_shift", HALFS)
    .OPTIONAL_INPUT("atten_mask", "DT_FLOAT16, DT_BOOL, DT_UINT8, DT_INT8")
    .OPTIONAL_INPUT("actual_seq_lengths", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("actual_seq_lengths_kv", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("dequant_scale1", "DT_UINT64")
    .OPTIONAL_INPUT("quant_scale1", "DT_FLOAT")
    .OPTIONAL_INPUT("dequant_scale2", "DT_UINT64")
    .OPTIONAL_INPUT("quant_scale2", FLOAT_BF16)
    .OPTIONAL_INPUT("quant_offset2", FLOAT_BF16)
    .OPTIONAL_INPUT("antiquant_scale", FLOATS)
    .OPTIONAL_INPUT("antiquant_offset", FLOATS)
    .OPTIONAL_INPUT("block_table", "DT_INT32")
    .OPTIONAL_INPUT("query_padding_size", "DT_INT64")
    .OPTIONAL_INPUT("kv_padding_size", "DT_INT64")
    .OPTIONAL_INPUT("key_antiquant_scale", FLOATS)
    .OPTIONAL_INPUT("key_antiquant_offset", FLOATS)
    .OPTIONAL_INPUT("value_antiquant_scale", FLOATS)
    .OPTIONAL_INPUT("value_antiquant_offset", FLOATS)
    .OPTIONAL_INPUT("key_shared_prefix", INT8_HALFS)
    .OPTIONAL_INPUT("value_shared_prefix", INT8_HALFS)
    .OPTIONAL_INPUT("actual_shared_prefix_len", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("query_rope", INT8_HALFS)
    .OPTIONAL_INPUT("key_rope", INT8_HALFS)
    .OPTIONAL_INPUT("key_rope_antiquant_scale", INT8_HALFS)
    .OUTPUT("attention_out", "DT_FLOAT16, DT_FLOAT, DT_INT8, DT_BF16")
    .OUTPUT("softmax_lse", "DT_FLOAT16, DT_FLOAT, DT_BF16")
    .REQUIRED_ATTR("num_heads", "Int")
    .ATTR("scale", "Float", 1.0)
    .ATTR("pre_tokens", "Int", 2147483647)
    .ATTR("next_tokens", "Int", 2147483647)
    .ATTR("input_layout", "String", "BSH")
    .ATTR("num_key_value_heads", "Int", 0)
    .ATTR("sparse_mode", "Int", 0)
    .ATTR("inner_precise", "Int", 0)
    .ATTR("block_size", "Int", 0)
    .ATTR("antiquant_mode", "Int", 0)
    .ATTR("softmax_lse_flag", "Bool", False)
    .ATTR("key_antiquant_mode", "Int", 0)
    .ATTR("value_antiquant_mode", "Int", 0)
)

EXPERIMENT = (
    CANN_8X.then("experiment_ops", source="Ascend/torchair experiment_ops.h:3911 (2026-06)")
    .OPTIONAL_INPUT("dequant_scale_query", "DT_FLOAT")
    .OPTIONAL_INPUT("learnable_sink", "DT_BF16")
    .OPTIONAL_INPUT("q_start_idx", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("kv_start_idx", "DT_INT64", value_depend="optional")
    .ATTR("query_quant_mode", "Int", 0)
    .ATTR("pse_type", "Int", 0)
    .ATTR("out_dtype", "Int", 0)
)

CURRENT = (
    EXPERIMENT.then(
        "opdef_2025_12",
        source="cannmirror/ops-transformer 05c401f9 (2025-12-31) "
        "attention/fused_infer_attention_score/op_host/fused_infer_attention_score_def.cpp; "
        "CANN header attention/fused_infer_attention_score/op_graph/fused_infer_attention_score_proto.h (2026)",
        cann="8.5.0-beta.1",
    )
    .INPUT("query", INT8_TO_FP8)
    .DYNAMIC_INPUT("key", INT8_TO_FP4)
    .DYNAMIC_INPUT("value", INT8_TO_FP4)
    .OPTIONAL_INPUT("dequant_scale1", "DT_UINT64, DT_FLOAT")
    .OPTIONAL_INPUT("quant_scale1", "DT_FLOAT32")
    .OPTIONAL_INPUT("dequant_scale2", "DT_UINT64, DT_FLOAT")
    .OPTIONAL_INPUT("quant_scale2", "DT_FLOAT32, DT_BF16")
    .OPTIONAL_INPUT("quant_offset2", "DT_FLOAT32, DT_BF16")
    .OPTIONAL_INPUT("antiquant_scale", FLOATS32)
    .OPTIONAL_INPUT("antiquant_offset", FLOATS32)
    .OPTIONAL_INPUT("key_antiquant_scale", FLOATS32)
    .OPTIONAL_INPUT("key_antiquant_offset", FLOATS32)
    .OPTIONAL_INPUT("value_antiquant_scale", FLOATS32)
    .OPTIONAL_INPUT("value_antiquant_offset", FLOATS32)
    .OPTIONAL_INPUT("key_rope_antiquant_scale", HALFS)
    .OPTIONAL_INPUT("dequant_scale_query", "DT_FLOAT32")
    .OUTPUT("attention_out", HALFS_INT8)
    .OUTPUT("softmax_lse", "DT_FLOAT")
    .ATTR("inner_precise", "Int", 1, note="0 in torchair's experiment_ops.h")
    .PRODUCT(
        "ascend910b ascend910_93",
        types={
            "query": HALFS_INT8,
            "key": HALFS_INT8_4,
            "value": HALFS_INT8_4,
            "quant_scale2": "DT_FLOAT, DT_BF16, DT_FLOAT16",
            "quant_offset2": "DT_FLOAT, DT_BF16, DT_FLOAT16",
            "key_shared_prefix": "DT_FLOAT16, DT_BF16, DT_INT8, DT_FLOAT, DT_INT4",
            "value_shared_prefix": "DT_FLOAT16, DT_BF16, DT_INT8, DT_FLOAT, DT_INT4",
            "query_rope": HALFS_INT8,
            "key_rope": HALFS_INT8_4,
            "key_rope_antiquant_scale": FLOATS,
        },
        note="69 combinations, not listed here",
    )
    .PRODUCT(
        "ascend910_95",
        types={
            "query": ON_950,
            "key": ON_950_KV,
            "value": ON_950_KV,
            "pse_shift": FLOATS,
            "quant_scale2": "DT_FLOAT, DT_BF16, DT_FLOAT16",
            "quant_offset2": "DT_FLOAT, DT_BF16, DT_FLOAT16",
            "antiquant_scale": ON_950_SCALE,
            "antiquant_offset": ON_950_SCALE,
            "key_antiquant_scale": ON_950_SCALE,
            "key_antiquant_offset": ON_950_SCALE,
            "value_antiquant_scale": ON_950_SCALE,
            "value_antiquant_offset": ON_950_SCALE,
            "key_shared_prefix": f"{ON_950_KV}, DT_FLOAT",
            "value_shared_prefix": f"{ON_950_KV}, DT_FLOAT",
            "query_rope": ON_950,
            "key_rope": ON_950_KV,
            "key_rope_antiquant_scale": ON_950_SCALE,
            "attention_out": ON_950,
        },
        note="291 combinations, not listed here",
    )
)

rules = Rules(
    "FIA",
    typed=(
        *("query", "key", "value", "query_rope", "key_rope"),
        *("pse_shift", "atten_mask", "actual_seq_lengths", "actual_seq_lengths_kv"),
    ),
    drops_empty=True,
)

LAYOUTS = (
    *("BSH", "BSND", "BNSD", "TND", "NTD", "NSD"),
    *(
        "BNSD_BSND",
        "BSH_BNSD",
        "BSND_BNSD",
        "NTD_TND",
        "TND_NTD",
        "BSH_NBSD",
        "BSND_NBSD",
        "BNSD_NBSD",
    ),
)

_INT8_CHAIN = ("dequant_scale1", "quant_scale1", "dequant_scale2")
_OUTPUT_SCALES = ("quant_scale2", "quant_offset2")
_PADDINGS = ("query_padding_size", "kv_padding_size")
_PREFIX = ("key_shared_prefix", "value_shared_prefix")
_LENGTH_AXIS = {"BSH": 1, "BSND": 1, "BNSD": 2, "NSD": 1}
MAX_LIST, LATENT, ROPE = 256, 512, 64
_PACKED = ("TND", "NTD", "NTD_TND", "TND_NTD")
_KEY_TYPES = (*prefill.HALFS, "DT_INT8", "DT_INT4", "DT_INT32")


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """query is float16, bfloat16 or INT8. A key or value that is float16 or bfloat16 has the type
    of query."""
    query = call.dtype("query")
    if query is None:
        return
    eight = ("DT_FLOAT8_E4M3FN", "DT_HIFLOAT8") if call.on("950") else ()
    if query not in (*prefill.HALFS, "DT_INT8", "DT_FLOAT", *eight):
        yield Diagnostic(
            "query", f"query is {query}, expected DT_FLOAT16, DT_BF16 or DT_INT8", "aclnn"
        )
        return
    if query == "DT_FLOAT":
        message = f"query is {query}, expected DT_FLOAT16, DT_BF16 or DT_INT8"
        yield Diagnostic("query", message, "aclnn", extension="EXT-PROMPT-FLOAT")
    for name in ("key", "value"):
        for info in call.lists.get(name, ()):
            if query == "DT_FLOAT" == info.dtype:
                continue
            wrong = (
                info.dtype in prefill.HALFS
                and query in (*prefill.HALFS, "DT_FLOAT")
                and info.dtype != query
            )
            if info.dtype and (wrong or (info.dtype not in _KEY_TYPES and not eight)):
                yield Diagnostic(
                    name,
                    f"{name} is {info.dtype}, expected {query} as query, or a quantised type",
                    "aclnn",
                )
                break


rules.shared(2, "layout", partial(prefill.layout_and_ranks, layouts=LAYOUTS))
rules.shared(3, "heads", prefill.heads)


@rules(4)
def sizes(call: CheckedNode) -> Iterator[Diagnostic]:
    """The sizes fit together and are in their ranges."""
    yield from prefill.same_sizes(call, narrower=True)
    yield from prefill.ranges(call)


@rules(5)
def mask(call: CheckedNode) -> Iterator[Diagnostic]:
    """sparse_mode is 0 to 4, with the mask that it requires."""
    if one_row(call):
        yield from _row_mask(call)
    elif not prefill.paged(call):
        yield from prefill.mask(call)
    elif call.attr("sparse_mode") not in range(5):
        yield Diagnostic(
            "sparse_mode", f"sparse_mode is {call.attr('sparse_mode')}, expected 0 to 4"
        )


def one_row(call: CheckedNode) -> bool:
    """Whether the call takes the path of decoding: query has one row, value has the head size of
    key, and there is no rope part."""
    sizes = prefill.sizes_of(call)
    same = isinstance(sizes.d, int) and sizes.d == sizes.dv
    return (
        sizes.layout in ("BSH", "BSND", "BNSD")
        and sizes.s1 == 1
        and same
        and call["query_rope"] is None
    )


def _row_mask(call: CheckedNode) -> Iterator[Diagnostic]:
    """If query has one row, the mask is [1|B,S2], [1|B,1,S2] or [1|B,1,1,S2] in every mode. S2 may
    be padded."""
    mode, given, sizes = call.attr("sparse_mode"), call["atten_mask"], prefill.sizes_of(call)
    if given is None:
        return
    if mode not in range(5):
        yield Diagnostic("sparse_mode", f"sparse_mode is {mode}, expected 0 to 4")
    yield from prefill.mask_type(given)
    if given.shape is None:
        return
    ranked = 2 <= len(given.shape) <= 4
    fits = ranked and (given.shape[0] == 1 or not differ(given.shape[0], sizes.b))
    ones = fits and not any(differ(size, 1) for size in given.shape[1:-1])
    if not ones or (not prefill.paged(call) and shorter(given.shape[-1], sizes.s2)):
        expected = f"{text((sizes.b, sizes.s2))} with ones between"
        message = f"atten_mask has the shape {text(given.shape)}, expected {expected}"
        yield Diagnostic(
            "atten_mask", f"{message}: with one row of query every sparse_mode takes a mask of keys"
        )


@rules(6)
def bias(call: CheckedNode) -> Iterator[Diagnostic]:
    """In pse_type 0, pse_shift has the type of query and covers the scores. In pse_type 2 and 3 it
    holds slopes."""
    kind, given = call.attr("pse_type"), call["pse_shift"]
    if kind not in (0, 2, 3):
        yield Diagnostic("pse_type", f"pse_type is {kind}, expected 0, 2 or 3")
    elif kind:
        yield from _slopes(call, kind, given)
    elif not prefill.paged(call):
        yield from prefill.bias(call)


def _slopes(call: CheckedNode, kind: int, given: TensorInfo | None) -> Iterator[Diagnostic]:
    sizes = prefill.sizes_of(call)
    if given is None:
        yield Diagnostic(
            "pse_shift", f"pse_shift is absent, expected slopes with a pse_type of {kind}"
        )
        return
    if given.dtype not in ("", "DT_FLOAT"):
        yield Diagnostic(
            "pse_shift", f"pse_shift is {given.dtype}, expected DT_FLOAT with a pse_type of {kind}"
        )
    wanted = (sizes.b, sizes.n1)
    if given.shape is not None and (
        len(given.shape) not in (1, 2) or any(map(differ, given.shape, wanted[-len(given.shape) :]))
    ):
        yield Diagnostic(
            "pse_shift",
            f"pse_shift has the shape {text(given.shape)}, expected {text(wanted)} or without B",
        )


@rules(7)
def quantised(call: CheckedNode) -> Iterator[Diagnostic]:
    """An INT8 query without scales of its own has several rows and all three scales of the INT8
    path. A query that is not INT8 has none of these scales. An INT8 result needs quant_scale2."""
    given = [name for name in _INT8_CHAIN if call[name] is not None]
    query, out = call.dtype("query"), call.outputs.get("attention_out")
    result = "" if out is None else out.dtype
    if query == "DT_INT8" and call["dequant_scale_query"] is None:
        yield from _int8_path(call, result)
    elif query in prefill.HALFS and given:
        yield Diagnostic(given[0], f"{given[0]} is given, expected none beside a query of {query}")
    if result == "DT_INT8" and call["quant_scale2"] is None:
        yield Diagnostic(
            "quant_scale2", "quant_scale2 is absent, expected with an INT8 attention_out"
        )


def _int8_path(call: CheckedNode, result: str) -> Iterator[Diagnostic]:
    """A query of the INT8 path has its three scales and several rows. A result of 16 bits has no
    scale."""
    missing = [name for name in _INT8_CHAIN if call[name] is None]
    if missing:
        yield Diagnostic(missing[0], f"{missing[0]} is absent, expected with an INT8 query")
    elif prefill.sizes_of(call).s1 == 1:
        yield Diagnostic(
            "query", "query is DT_INT8 and has one row, expected DT_FLOAT16 or DT_BF16"
        )
    scaled = [name for name in _OUTPUT_SCALES if call[name] is not None]
    if result in prefill.HALFS and scaled:
        yield Diagnostic(
            scaled[0], f"{scaled[0]} is given, expected none with an attention_out of {result}"
        )


@rules(8)
def rows_without_keys(call: CheckedNode) -> Iterator[Diagnostic]:
    """With quantised results, the band does not lie to one side of the diagonal. With
    quant_offset2, each query row has a key. A quant_scale2 for channels excludes left padding and
    softmax_lse, and requires a D that is a multiple of 32."""
    scale = call["quant_scale2"]
    if scale is None:
        return
    before, after = call.attr("pre_tokens"), call.attr("next_tokens")
    if call["atten_mask"] is not None and call.attr("sparse_mode") == 4 and min(before, after) < 0:
        message = f"sparse_mode is 4 with pre_tokens {before} and next_tokens {after}"
        message = f"{message}, expected neither below 0 with quantised results"
        yield Diagnostic("sparse_mode", message, extension="EXT-PROMPT-MODES")
    if call["quant_offset2"] is not None and not one_row(call):
        yield from prefill.empty_rows(call)
    if any(differ(size, 1) for size in scale.shape or ()):
        yield from _scale_for_channels(call)


def _scale_for_channels(call: CheckedNode) -> Iterator[Diagnostic]:
    """A quant_scale2 for channels excludes left padding and softmax_lse, and requires a D that is a
    multiple of 32."""
    for name in _PADDINGS:
        if call[name] is not None:
            yield Diagnostic(
                name, f"{name} is given, expected none with a quant_scale2 for channels"
            )
    if call.attr("softmax_lse_flag"):
        message = "softmax_lse_flag is set, expected it unset with a quant_scale2 for channels"
        yield Diagnostic("softmax_lse_flag", message)
    d = prefill.sizes_of(call).d
    if isinstance(d, int) and d % 32:
        message = f"query has the head size {d}, expected a multiple of 32 with a quant_scale2 for channels"
        yield Diagnostic("query", message, extension="EXT-PROMPT-SIZES")


@rules(9)
def pages(call: CheckedNode) -> Iterator[Diagnostic]:
    """Pages need block_size and the lengths of the keys. They allow one tensor of keys and no
    prefix."""
    table, keys = call["block_table"], call.lists.get("key", ())
    if table is None:
        return
    yield from _block_size(call)
    if call["actual_seq_lengths_kv"] is None:
        yield Diagnostic(
            "actual_seq_lengths_kv", "actual_seq_lengths_kv is absent, expected with pages"
        )
    wanted = (prefill.sizes_of(call).b, None)
    if table.shape is not None and shapes_differ(table.shape, wanted):
        yield Diagnostic(
            "block_table", f"block_table has the shape {text(table.shape)}, expected {text(wanted)}"
        )
    if len(keys) > 1:
        yield Diagnostic(
            "key", f"key is a list of {len(keys)} beside a block_table, expected one tensor"
        )
    if call["key_shared_prefix"] is not None:
        yield Diagnostic(
            "key_shared_prefix", "key_shared_prefix is given beside a block_table, expected none"
        )


def _block_size(call: CheckedNode) -> Iterator[Diagnostic]:
    """block_size is a multiple of 16, or of 32 for INT8, up to 512. Packed layouts and rope allow
    1024."""
    size = call.attr("block_size")
    unit = 32 if any(info.dtype == "DT_INT8" for info in call.lists.get("key", ())) else 16
    most = 1024 if call.attr("input_layout") in _PACKED or call["query_rope"] is not None else 512
    if size <= 0 or size > most or size % unit:
        message = f"block_size is {size}, expected a multiple of {unit} from {unit} to {most}"
        yield Diagnostic(
            "block_size", message, extension="EXT-PROMPT-SIZES" if 0 < size < 2**31 else None
        )


@rules(10)
def padding(call: CheckedNode) -> Iterator[Diagnostic]:
    """Left padding is one number and needs lengths. It excludes packed layouts, pages and lists."""
    for name, needed in zip(
        _PADDINGS, ("actual_seq_lengths", "actual_seq_lengths_kv"), strict=True
    ):
        given = call[name]
        if given is None:
            continue
        listed = len(call.lists.get("key", ())) > 1
        if call.attr("input_layout") in _PACKED or prefill.paged(call) or listed:
            yield Diagnostic(
                name, f"{name} is given, expected none with packed layouts, pages or lists"
            )
        elif call[needed] is None:
            yield Diagnostic(needed, f"{needed} is absent, expected with {name}")
        yield from shape_is(name, given, (1,))


@rules(11)
def lists(call: CheckedNode) -> Iterator[Diagnostic]:
    """key and value are one tensor each, or lists with one tensor of batch 1 for each batch entry.
    The tensors of a list differ in S only."""
    keys, values = call.lists.get("key", ()), call.lists.get("value", ())
    sizes = prefill.sizes_of(call)
    if len(keys) != len(values):
        yield Diagnostic("value", f"value has {len(values)} tensors, expected {len(keys)} as key")
        return
    if len(keys) < 2:
        return
    if call.attr("input_layout") in _PACKED:
        yield Diagnostic(
            "key", f"key has {len(keys)} tensors, expected one with {call.attr('input_layout')}"
        )
    elif differ(sizes.b, len(keys)) or len(keys) > MAX_LIST:
        message = f"key has {len(keys)} tensors, expected {size_text(sizes.b)}, one for each batch, or one"
        yield Diagnostic("key", f"{message}; at most {MAX_LIST}")
    elif sizes.layout in _LENGTH_AXIS:  # another rule reports an unknown layout
        faults = (
            fault for name in ("key", "value") for fault in _list_shapes(call, name, sizes.layout)
        )
        yield from first(faults)


def _list_shapes(call: CheckedNode, name: str, layout: str) -> Iterator[Diagnostic]:
    """The tensors of a list have batch 1 and differ in S only. Those of another rank are left to
    another rule."""
    places = [axis for axis in range(RANKS[layout]) if axis != _LENGTH_AXIS[layout]]
    known = [info.shape for info in call.lists[name] if info.shape is not None]
    shapes = [shape for shape in known if len(shape) > max(places)]
    for shape in shapes:
        if differ(shape[0], 1) or any(differ(shape[axis], shapes[0][axis]) for axis in places):
            message = f"{name} holds a tensor of shape {text(shape)}, expected batch 1, and heads and their size"
            yield Diagnostic(name, f"{message} as in {text(shapes[0])}")


@rules(12)
def packed(call: CheckedNode) -> Iterator[Diagnostic]:
    """Packed layouts need both vectors of lengths and allow few other features."""
    layout = call.attr("input_layout")
    for name in ("actual_seq_lengths", "actual_seq_lengths_kv"):
        if layout not in _PACKED:
            yield from prefill.lengths(call, name)
        elif call[name] is None:
            yield Diagnostic(name, f"{name} is absent, expected with {layout}")
    if layout not in _PACKED:
        return
    d = prefill.sizes_of(call).d
    if isinstance(d, int):
        yield from _packed_latent(call) if d == LATENT else _packed_plain(call, d)


def _packed_latent(call: CheckedNode) -> Iterator[Diagnostic]:
    """With head size 512, packed layouts need one key head in pages and at most 128 query heads (a
    power of two). They give no softmax_lse."""
    layout, sizes = call.attr("input_layout"), prefill.sizes_of(call)

    def fault(name: str, message: str) -> Diagnostic:
        return Diagnostic(name, message, extension="EXT-PROMPT-PACKED")

    if layout not in ("TND", "TND_NTD"):
        yield fault(
            "input_layout",
            f"input_layout is {layout}, expected TND or TND_NTD with a head size of {LATENT}",
        )
    if isinstance(sizes.n1, int) and (sizes.n1 > 128 or sizes.n1 & (sizes.n1 - 1)):
        yield fault("query", f"query has {sizes.n1} heads, expected a power of two up to 128")
    if differ(sizes.n2, 1):
        yield fault(
            "num_key_value_heads",
            f"num_key_value_heads is {sizes.n2}, expected 1 with {layout} of {LATENT}",
        )
    if call.attr("sparse_mode") not in (0, 3, 4):
        yield fault(
            "sparse_mode",
            f"sparse_mode is {call.attr('sparse_mode')}, expected 0, 3 or 4 with {layout}",
        )
    if not prefill.paged(call):
        yield fault(
            "block_table",
            f"block_table is absent, expected with {layout} and a head size of {LATENT}",
        )
    if call["query_rope"] is None:
        yield fault(
            "query_rope",
            f"query_rope is absent, expected with {layout} and a head size of {LATENT}",
        )
    if call.attr("softmax_lse_flag") and layout != "TND_NTD":  # rule 14 refuses it in TND_NTD
        yield fault(
            "softmax_lse_flag",
            f"softmax_lse_flag is set, expected it unset with a head size of {LATENT}",
        )


def _packed_plain(call: CheckedNode, d: int) -> Iterator[Diagnostic]:
    """With another head size, packed layouts take bfloat16 and the head sizes 128 and 192. They
    take no bias, prefix or quantisation."""
    layout, extension = call.attr("input_layout"), "EXT-PROMPT-PACKED"
    if layout == "TND_NTD":
        message = f"input_layout is {layout}, expected TND, NTD or NTD_TND with a head size of {d}"
        yield Diagnostic("input_layout", message, extension=extension)
    if d not in (128, 192):
        message = f"query has the head size {d}, expected 128, 192 or {LATENT} with {layout}"
        yield Diagnostic("query", message, extension=extension)
    if call.dtype("query") not in (None, "DT_BF16"):
        integers = call.dtype("query") == "DT_INT8"
        message = (
            f"query is {call.dtype('query')}, expected DT_BF16 with {layout} and a head size of {d}"
        )
        yield Diagnostic("query", message, extension=None if integers else extension)
    computed = {
        "pse_shift": call.attr("pse_type") in (2, 3),
        "antiquant_scale": call.attr("antiquant_mode") != 1,
        "key_antiquant_scale": not {1, 3}
        & {call.attr("key_antiquant_mode"), call.attr("value_antiquant_mode")},
    }
    for name in (
        "pse_shift",
        "key_shared_prefix",
        "antiquant_scale",
        "key_antiquant_scale",
        "quant_scale2",
    ):
        if call[name] is not None:
            message = f"{name} is given, expected none with {layout} and a head size of {d}"
            yield Diagnostic(name, message, extension=extension if computed.get(name) else None)


@rules(13)
def rope(call: CheckedNode) -> Iterator[Diagnostic]:
    """query_rope and key_rope are both given, or neither. They are float16 or bfloat16, of head
    size 64. They exclude padding, lists, bias, prefix and scales."""
    yield from _pair(call, "query_rope", "key_rope")
    if call["query_rope"] is None or call["key_rope"] is None:
        return
    yield from _rope_tensor(call, "query_rope", folded=prefill.query_layout(call) == "BSH")
    yield from _rope_tensor(
        call, "key_rope", folded=prefill.query_layout(call) == "BSH" or prefill.paged(call)
    )
    # With an 8-bit query, the scale of the keys belongs to the full quantisation, which may be used
    # with rope.
    excluded = [*_PADDINGS, "pse_shift", "key_shared_prefix", "antiquant_scale", "quant_scale2"]
    if call["dequant_scale_query"] is None:
        excluded.insert(-1, "key_antiquant_scale")
    for name in excluded:
        if call[name] is not None:
            yield Diagnostic(name, f"{name} is given, expected none with query_rope")
    if len(call.lists.get("key", ())) > 1:
        yield Diagnostic("key", "key is a list of tensors, expected one tensor with query_rope")


def _rope_tensor(call: CheckedNode, name: str, folded: bool) -> Iterator[Diagnostic]:
    """A rope input has 16 bits and the head size 64. If it is `folded`, its last dimension may hold
    several heads."""
    dtype, shape = call.dtype(name), call.shape(name)
    if dtype and dtype not in prefill.HALFS:
        extension = "EXT-PROMPT-FLOAT" if dtype == "DT_FLOAT" else None
        yield Diagnostic(
            name, f"{name} is {dtype}, expected {' or '.join(prefill.HALFS)}", extension=extension
        )
    if shape and not folded and differ(shape[-1], ROPE):
        message = f"{name} has the head size {shape[-1]}, expected {ROPE}"
        yield Diagnostic(name, message, extension="EXT-PROMPT-SIZES")


@rules(14)
def statistics(call: CheckedNode) -> Iterator[Diagnostic]:
    """softmax_lse is not available in TND_NTD and in the layouts whose results are NBSD."""
    given = call.attr("input_layout")
    if call.attr("softmax_lse_flag") and (given.endswith("_NBSD") or given == "TND_NTD"):
        message = f"softmax_lse_flag is set, expected not with {given}"
        yield Diagnostic("softmax_lse_flag", message, extension="EXT-PROMPT-STATISTICS")


@rules(15)
def prefix(call: CheckedNode) -> Iterator[Diagnostic]:
    """A shared prefix has keys and values, which have batch 1 and the type of key. Its length is
    one number, at most its S."""
    yield from _pair(call, *_PREFIX)
    if call["key_shared_prefix"] is None or call["value_shared_prefix"] is None:
        return
    for name in _PREFIX:
        yield from _prefix_tensor(call, name)
    length = call["actual_shared_prefix_len"]
    if length is None:
        return
    yield from shape_is("actual_shared_prefix_len", length, (1,))
    content, size = call.content("actual_shared_prefix_len"), prefill.prefix_size(call)
    if content and isinstance(size, int) and not 0 <= content[0] <= size:
        yield Diagnostic(
            "actual_shared_prefix_len",
            f"actual_shared_prefix_len is {content[0]}, expected 0 to {size}",
        )


def _prefix_tensor(call: CheckedNode, name: str) -> Iterator[Diagnostic]:
    """The keys or values of the prefix have the type of key and batch 1."""
    key, dtype, shape = prefill.tensor(call, "key"), call.dtype(name), call.shape(name)
    if key is not None and key.dtype and dtype and dtype != key.dtype:
        yield Diagnostic(name, f"{name} is {dtype}, expected {key.dtype} as key")
    if shape and prefill.query_layout(call).startswith("B") and differ(shape[0], 1):
        yield Diagnostic(name, f"{name} has the batch size {shape[0]}, expected 1")


@rules(16)
def antiquantised(call: CheckedNode) -> Iterator[Diagnostic]:
    """The scales of quantised keys and values are both given, or neither, and so are their offsets.
    The two modes are equal, or 0 and 1."""
    yield from _pair(call, "key_antiquant_scale", "value_antiquant_scale")
    yield from _pair(call, "key_antiquant_offset", "value_antiquant_offset")
    modes = call.attr("key_antiquant_mode"), call.attr("value_antiquant_mode")
    if call["key_antiquant_scale"] is not None and modes[0] != modes[1] and modes != (0, 1):
        message = f"value_antiquant_mode is {modes[1]} beside a key_antiquant_mode of {modes[0]}"
        yield Diagnostic("value_antiquant_mode", f"{message}, expected the same, or 0 and 1")


@rules(17)
def query_quant_mode(call: CheckedNode) -> Iterator[Diagnostic]:
    """query_quant_mode is 3 if query has scales of its own."""
    if call["dequant_scale_query"] is not None and call.attr("query_quant_mode") != 3:
        yield Diagnostic(
            "query_quant_mode", f"query_quant_mode is {call.attr('query_quant_mode')}, expected 3"
        )


def _pair(call: CheckedNode, first: str, second: str) -> Iterator[Diagnostic]:
    """Both inputs are given, or neither."""
    if (call[first] is None) != (call[second] is None):
        missing, given = (first, second) if call[first] is None else (second, first)
        yield Diagnostic(missing, f"{missing} is absent, expected with {given}")


def _type_rows() -> tuple[TypeRow, ...]:
    """attention_out has the same types as in PromptFlashAttention, and softmax_lse is float32.

    In a node with lists, the place of quant_scale2 may hold a key, a value or another input. The
    types in the places of the lengths and of pse_shift distinguish it from a node with
    quant_scale2. The results of a node with lists have the type of query.
    """
    places = 29 + 2 * MOST_LISTED
    rows = [
        type_row(
            (query, *(ANY,) * (prefill.QUANT_SCALE2_PLACE - 1), ABSENT, *(ANY,) * 20),
            places,
            out,
            "float32",
        )
        for query, out in OF_QUERY.items()
    ]
    for query, out in OF_QUERY.items():
        for bias in dict.fromkeys((out, "float32")):  # slopes are float32
            before = (query, ANY, ANY, bias, ANY, "int64", "int64")
            rows.append(type_row((*before, *(ANY,) * 24), places, "int8", "float32"))
    rows += [
        TypeRow((query, *(ANY,) * (places - 1)), (out, "float32"))
        for query, out in OF_QUERY.items()
    ]
    return tuple(rows)


OPERATOR = Operator(
    variants=(
        CANN_8X.OP_END_FACTORY_REG(),
        EXPERIMENT.OP_END_FACTORY_REG(),
        CURRENT.OP_END_FACTORY_REG(),
    ),
    infer=prompt_outputs,
    rules=rules,
    kernel=CpuKernel(
        extensions=(
            "EXT-PROMPT-FLOAT",
            "EXT-PROMPT-SIZES",
            "EXT-PROMPT-MODES",
            "EXT-PROMPT-PACKED",
            "EXT-PROMPT-STATISTICS",
        ),
        required_output="attention_out",
        type_rows=_type_rows,
    ),
)
