"""IncreFlashAttention: attention of one new token on a key-value cache (decoding).

Its constraints are IFA.1 to IFA.15. The numbers, codes and stages of IFA.1 to IFA.14 are those of
the project's constraints list, drawn from the aclnn document (V4), the aclnn host code and the
operator's tiling. IFA.15 is about an attribute of the CPU kernel. The products are A2, A3, 950 and,
with fewer features, 310P.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fa_compiler.op_registry.constraints.core import (
    CheckedNode,
    Rules,
    first,
    number,
    out_of_range,
    shape_is,
    text,
)
from fa_compiler.op_registry.constraints.decode_sizes import (
    DECODE_LAYOUTS,
    DecodeSizes,
    query_heads,
    shorter,
    sizes_of,
    unlike,
)
from fa_compiler.op_registry.constraints.softcap import softcap
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
from fa_compiler.op_registry.geometry import (
    LAYOUTS,
    Shape,
    differ,
    exceeds,
    misfit,
    product,
    shapes_differ,
)
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.node import TensorInfo
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs
from fa_compiler.op_registry.shapes import inference_type

HALFS = "DT_FLOAT16, DT_BF16"
HALFS_INT8 = "DT_FLOAT16, DT_BF16, DT_INT8"
OLD = "DT_FLOAT16, DT_BF16, DT_FLOAT32, DT_INT8"

FIRST = (
    REG_OP(
        "IncreFlashAttention",
        "first_public",
        source="first public operator header of CANN",
        note="the source gives names only: the types are those of experiment_ops",
    )
    .INPUT("query", OLD)
    .DYNAMIC_INPUT("key", OLD)
    .DYNAMIC_INPUT("value", OLD)
    .OPTIONAL_INPUT("padding_mask", HALFS)
    .OPTIONAL_INPUT("atten_mask", "DT_FLOAT16, DT_BOOL, DT_FLOAT32")
    .OPTIONAL_INPUT("actual_seq_lengths", "DT_INT64", value_depend="optional")
    .OUTPUT("attention_out", OLD)
    .REQUIRED_ATTR("num_heads", "Int")
    .ATTR("scale_value", "Float", 1.0)
    .ATTR("input_layout", "String", "BSH")
    .ATTR("num_key_value_heads", "Int", 1)
)

EXPERIMENT = (
    FIRST.then("experiment_ops", source="Ascend/torchair experiment_ops.h:1766")
    .DROP("padding_mask")
    .OPTIONAL_INPUT("pse_shift", HALFS)
    .INPUT_ORDER("query key value pse_shift atten_mask actual_seq_lengths")
    .OPTIONAL_INPUT("dequant_scale1", "DT_UINT64, DT_FLOAT32")
    .OPTIONAL_INPUT("quant_scale1", "DT_FLOAT32")
    .OPTIONAL_INPUT("dequant_scale2", "DT_UINT64, DT_FLOAT32")
    .OPTIONAL_INPUT("quant_scale2", "DT_FLOAT32")
    .OPTIONAL_INPUT("quant_offset2", "DT_FLOAT32")
    .OPTIONAL_INPUT("antiquant_scale", "DT_FLOAT16")
    .OPTIONAL_INPUT("antiquant_offset", "DT_FLOAT16")
    .OPTIONAL_INPUT("block_table", "DT_INT32")
    .OPTIONAL_INPUT("kv_padding_size", "DT_INT64")
    .ATTR("block_size", "Int", 0)
    .ATTR("inner_precise", "Int", 1)
)

CURRENT = (
    EXPERIMENT.then(
        "opdef_2025_12",
        source="yuanfang-chen/ops-transformer@8512c325 "
        "attention/incre_flash_attention/op_graph/incre_flash_attention_proto.h; "
        "cannmirror/ops-transformer 05c401f9 (2025-12-31) "
        "attention/incre_flash_attention/op_host/incre_flash_attention_def.cpp; "
        "aclnn document aclnnIncreFlashAttentionV4",
        cann="8.5.0-beta.1",
        note="the header admits INT8 queries, the operator definition does not",
    )
    .INPUT("query", HALFS_INT8)
    .DYNAMIC_INPUT("key", HALFS_INT8)
    .DYNAMIC_INPUT("value", HALFS_INT8)
    .OPTIONAL_INPUT("atten_mask", "DT_BOOL, DT_INT8, DT_UINT8")
    .OPTIONAL_INPUT("dequant_scale1", "DT_UINT64, DT_FLOAT")
    .OPTIONAL_INPUT("quant_scale1", "DT_FLOAT")
    .OPTIONAL_INPUT("dequant_scale2", "DT_UINT64, DT_FLOAT")
    .OPTIONAL_INPUT("quant_scale2", "DT_FLOAT, DT_BF16")
    .OPTIONAL_INPUT("quant_offset2", "DT_FLOAT, DT_BF16")
    .OPTIONAL_INPUT("antiquant_scale", HALFS)
    .OPTIONAL_INPUT("antiquant_offset", HALFS)
    .OUTPUT("attention_out", HALFS_INT8)
    .ATTR(
        "num_key_value_heads",
        "Int",
        1,
        definition_default=0,
        note="the header says 1, the operator definition and the aclnn document 0 (as many as num_heads)",
    )
    .PRODUCT(
        "ascend910b ascend910_93 mc62cm12a ascend910_95",
        """
        query=pse_shift=antiquant_scale=antiquant_offset  key=value  atten_mask  dequant_scale1=dequant_scale2 \
        quant_scale2=quant_offset2  attention_out
        FLOAT16  FLOAT16  BOOL   UINT64  FLOAT  FLOAT16
        BF16     BF16     BOOL   UINT64  FLOAT  BF16
        FLOAT16  FLOAT16  BOOL   UINT64  FLOAT  INT8
        FLOAT16  INT8     BOOL   UINT64  FLOAT  FLOAT16
        FLOAT16  INT8     BOOL   UINT64  FLOAT  INT8
        BF16     INT8     BOOL   UINT64  FLOAT  BF16
        FLOAT16  FLOAT16  INT8   UINT64  FLOAT  FLOAT16
        BF16     BF16     INT8   UINT64  FLOAT  BF16
        FLOAT16  FLOAT16  INT8   UINT64  FLOAT  INT8
        FLOAT16  INT8     INT8   UINT64  FLOAT  FLOAT16
        FLOAT16  INT8     INT8   UINT64  FLOAT  INT8
        BF16     INT8     INT8   UINT64  FLOAT  BF16
        FLOAT16  FLOAT16  UINT8  UINT64  FLOAT  FLOAT16
        BF16     BF16     UINT8  UINT64  FLOAT  BF16
        FLOAT16  FLOAT16  UINT8  UINT64  FLOAT  INT8
        FLOAT16  INT8     UINT8  UINT64  FLOAT  FLOAT16
        FLOAT16  INT8     UINT8  UINT64  FLOAT  INT8
        BF16     INT8     UINT8  UINT64  FLOAT  BF16
        BF16     INT8     BOOL   FLOAT   BF16   INT8
        BF16     BF16     BOOL   FLOAT   BF16   INT8
        BF16     INT8     BOOL   FLOAT   FLOAT  INT8
        BF16     BF16     BOOL   FLOAT   FLOAT  INT8
        """,
    )
    .PRODUCT(
        "ascend310p",
        """
        query=pse_shift=antiquant_scale=antiquant_offset=attention_out  key=value  atten_mask \
        dequant_scale1=dequant_scale2  quant_scale2=quant_offset2
        FLOAT16  FLOAT16  FLOAT16  UINT64  FLOAT
        FLOAT16  FLOAT16  BOOL     UINT64  FLOAT
        FLOAT16  INT8     BOOL     UINT64  FLOAT
        """,
    )
)

rules = Rules(
    "IFA",
    typed=(
        *(
            "query",
            "key",
            "value",
            "pse_shift",
            "atten_mask",
            "antiquant_scale",
            "antiquant_offset",
        ),
        *("quant_scale2", "quant_offset2", "attention_out"),
    ),
    drops_empty=True,
)

MAX_D, MAX_N, MAX_B, MAX_GROUP, MAX_LIST = 512, 256, 65536, 64, 256
MAX_B_310P, MAX_S_310P = 256, 65536
MAX_BLOCK = 512
PAGE_RANKS: dict[str, tuple[int, ...]] = {"BSH": (3,), "BSND": (3,), "BNSD": (3, 4)}
"""The ranks that a cache of pages may have, by the layout of query."""

MAX_PAGE_WIDTH = 65536

_HALFS = ("DT_FLOAT16", "DT_BF16")
_INT8_PATH = ("dequant_scale1", "quant_scale1", "dequant_scale2")
_QUANTISED = (*_INT8_PATH, "quant_scale2", "quant_offset2")


def _caches(call: CheckedNode) -> Iterator[tuple[str, TensorInfo]]:
    for name in ("key", "value"):
        for tensor in call.lists.get(name, ()):
            yield name, tensor


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """query is float16 or bfloat16 (float16 on 310P). key and value have the type of query, or
    INT8."""
    query = call.dtype("query")
    if query is None:
        return
    if query == "DT_INT8":
        message = "query is DT_INT8, expected DT_FLOAT16 or DT_BF16: the operator does not take INT8 throughout yet"
        yield Diagnostic("query", message, extension="EXT-DECODE-INT8")
    elif query == "DT_FLOAT":
        message = "query is DT_FLOAT, expected DT_FLOAT16 or DT_BF16"
        yield Diagnostic("query", message, extension="EXT-DECODE-FLOAT")
    elif query not in _HALFS:
        yield Diagnostic("query", f"query is {query}, expected DT_FLOAT16 or DT_BF16")
        return
    elif call.on("310P") and query != "DT_FLOAT16":
        yield Diagnostic("query", f"query is {query}, expected DT_FLOAT16 on 310P")
    keys = [tensor.dtype for tensor in call.lists.get("key", ()) if tensor.dtype]
    for name, tensor in _caches(call):
        if not tensor.dtype:
            continue
        if tensor.dtype not in (query, "DT_INT8"):
            wanted = query if query == "DT_INT8" else f"{query} as query, or DT_INT8"
            yield Diagnostic(name, f"{name} is {tensor.dtype}, expected {wanted}")
            return
        if keys and tensor.dtype != keys[0]:
            yield Diagnostic(name, f"{name} is {tensor.dtype}, expected {keys[0]} as the first key")
            return


@rules(2)
def one_token(call: CheckedNode) -> Iterator[Diagnostic]:
    """input_layout is known, the ranks fit it, and query has one token."""
    layout = call.attr("input_layout")
    if layout not in DECODE_LAYOUTS:
        yield Diagnostic(
            "input_layout",
            f"input_layout is {layout!r}, expected one of {', '.join(DECODE_LAYOUTS)}",
        )
        return
    rank = call.rank("query")
    if rank is not None and rank != LAYOUTS[layout]:
        yield Diagnostic("query", f"query has rank {rank}, expected {LAYOUTS[layout]} for {layout}")
    sizes = sizes_of(call)
    ranks: tuple[int, ...] = (LAYOUTS[layout],)
    where = layout
    if sizes.paged:
        ranks, where = PAGE_RANKS[layout], f"a paged cache beside {layout}"
    for name, tensor in _caches(call):
        if tensor.shape is not None and len(tensor.shape) not in ranks:
            wanted = " or ".join(map(str, ranks))
            yield Diagnostic(
                name, f"{name} has rank {len(tensor.shape)}, expected {wanted} for {where}"
            )
            return
    if differ(sizes.s1, 1):
        yield Diagnostic("query", f"query has {sizes.s1} tokens, expected 1")


@rules(3)
def heads(call: CheckedNode) -> Iterator[Diagnostic]:
    """num_heads is the head count of query. num_key_value_heads is 0 or a divisor of num_heads, and
    a key head serves at most 64 query heads."""
    heads, stated = call.attr("num_heads"), call.attr("num_key_value_heads")
    sizes = sizes_of(call)
    if heads <= 0:
        yield Diagnostic("num_heads", f"num_heads is {heads}, expected a positive number")
        return
    yield from query_heads(call, sizes.layout, sizes.n1)
    if stated < 0 or (stated and heads % stated):
        message = f"num_key_value_heads is {stated}, expected 0 or a divisor of the {heads} heads of query"
        yield Diagnostic("num_key_value_heads", message)
    elif stated and heads // stated > MAX_GROUP:
        message = f"num_key_value_heads is {stated}, expected one for at most {MAX_GROUP} of {heads} heads"
        yield Diagnostic("num_key_value_heads", message)
    elif call.on("310P") and stated not in (0, heads):
        message = f"num_key_value_heads is {stated}, expected as many key heads as the {heads} of query on 310P"
        yield Diagnostic("num_key_value_heads", message, "document")


@rules(4)
def ranges(call: CheckedNode) -> Iterator[Diagnostic]:
    """D, N2, B and S are in the documented ranges."""
    sizes, older = sizes_of(call), call.on("310P")
    if exceeds(sizes.d, MAX_D):
        yield Diagnostic("query", f"query has the head size {sizes.d}, expected at most {MAX_D}")
    limits = [
        ("key", "head count", sizes.n2, MAX_N),
        ("query", "batch size", sizes.b, MAX_B_310P if older else MAX_B),
    ]
    if older:
        limits += [("key", "sequence length", length, MAX_S_310P) for length in sizes.lengths]
    for name, what, size, limit in limits:
        if exceeds(size, limit):
            yield out_of_range(name, what, size, limit, "tiling")
    unit = 32 if any(tensor.dtype == "DT_INT8" for _, tensor in _caches(call)) else 16
    if older and isinstance(sizes.d, int) and sizes.d % unit:
        yield Diagnostic(
            "query", f"query has the head size {sizes.d}, expected a multiple of {unit} on 310P"
        )


@rules(5)
def caches(call: CheckedNode) -> Iterator[Diagnostic]:
    """key and value have the same shapes and fit query. A list has one tensor for each batch
    entry."""
    sizes = sizes_of(call)
    keys, values = call.lists.get("key", ()), call.lists.get("value", ())
    if not sizes.layout or not keys or not values or any(one_token(call)):
        return
    if len(keys) != len(values):
        yield Diagnostic(
            "value", f"value is a list of {len(values)}, expected {len(keys)} tensors as key"
        )
        return
    for key, value in zip(keys, values, strict=True):
        if unlike(key, value):
            yield Diagnostic(
                "value",
                f"value has the shape {text(value.shape)}, expected {text(key.shape)} as key",
            )
            return
    if sizes.listed and not sizes.paged and (differ(sizes.b, len(keys)) or len(keys) > MAX_LIST):
        yield Diagnostic(
            "key",
            f"key is a list of {len(keys)}, expected one tensor or {sizes.b}, at most {MAX_LIST}",
        )
        return
    yield from first(fault for key in keys for fault in _key_faults(sizes, key))


def _key_faults(sizes: DecodeSizes, key: TensorInfo) -> Iterator[Diagnostic]:
    """One tensor of keys has the batch size of query, or 1 in a list, and the heads and the head
    size of the call."""
    batch, _, width = sizes.cache(key)
    wanted, stated = (1, "1 in a list") if sizes.listed else (sizes.b, f"{sizes.b} as query")
    if not sizes.paged and differ(batch, wanted):
        yield Diagnostic("key", f"key has the batch size {batch}, expected {stated}")
    if differ(width, product(sizes.n2, sizes.d)):
        message = (
            f"key has the shape {text(key.shape)}, expected {sizes.n2} heads of size {sizes.d}"
        )
        yield Diagnostic("key", message)
    if len(key.shape or ()) == 4 and differ(_heads_of(sizes, key), sizes.n2):
        yield Diagnostic(
            "key",
            f"key has {_heads_of(sizes, key)} heads, expected {sizes.n2} (num_key_value_heads)",
        )


def _heads_of(sizes: DecodeSizes, key: TensorInfo) -> int | str | None:
    assert key.shape is not None
    return key.shape[2 if sizes.layout == "BSND" and not sizes.paged else 1]


@rules(6)
def mask(call: CheckedNode) -> Iterator[Diagnostic]:
    """atten_mask has one byte for each key of each batch entry."""
    tensor, sizes = call["atten_mask"], sizes_of(call)
    if tensor is None or not sizes.layout:
        return
    legal = ("DT_BOOL", "DT_INT8", "DT_UINT8") + (("DT_FLOAT16",) if call.on("310P") else ())
    if tensor.dtype and tensor.dtype not in legal:
        yield Diagnostic(
            "atten_mask", f"atten_mask is {tensor.dtype}, expected {' or '.join(legal)}"
        )
    if (
        tensor.value is not None
        and tensor.dtype in ("DT_INT8", "DT_UINT8")
        and not ((tensor.value | 1) == 1).all()
    ):
        message = "atten_mask holds other values than 0 and 1"
        yield Diagnostic("atten_mask", message, "document", extension="EXT-DECODE-MASK-BYTES")
    if tensor.shape is not None:
        yield from _mask_shape(sizes, tensor.shape)


def _mask_shape(sizes: DecodeSizes, shape: Shape) -> Iterator[Diagnostic]:
    """A mask of the keys is [B,S], [B,1,S] or [B,1,1,S], where S may be padded."""
    fits = len(shape) in (2, 3, 4) and not shapes_differ(
        shape[:-1], (sizes.b, *(1,) * (len(shape) - 2))
    )
    if not fits or shorter(shape[-1], sizes.s):
        forms = " or ".join(text((sizes.b, *(1,) * ones, sizes.s)) for ones in range(3))
        yield Diagnostic(
            "atten_mask",
            f"atten_mask has the shape {text(shape)}, expected {forms}, or with more keys",
        )


@rules(7)
def shift(call: CheckedNode) -> Iterator[Diagnostic]:
    """pse_shift has the type of query and one number for each head and key."""
    tensor, sizes = call["pse_shift"], sizes_of(call)
    if tensor is None or not sizes.layout:
        return
    query = call.dtype("query")
    wanted_type = "DT_FLOAT16" if query == "DT_INT8" else query
    if tensor.dtype and wanted_type and tensor.dtype != wanted_type:
        yield Diagnostic(
            "pse_shift", f"pse_shift is {tensor.dtype}, expected {wanted_type} as query"
        )
    shape = tensor.shape
    if shape is None:
        return
    wanted: Shape = (sizes.b, sizes.n1, 1, sizes.s)
    wrong = (
        len(shape) != 4 or misfit(shape[0], sizes.b) or any(map(differ, shape[1:3], wanted[1:3]))
    )
    if wrong or shorter(shape[-1], sizes.s):
        message = f"pse_shift has the shape {text(shape)}, expected {text(wanted)} or {text((1, *wanted[1:]))}"
        yield Diagnostic("pse_shift", f"{message}, or with more keys")


@rules(8)
def lengths(call: CheckedNode) -> Iterator[Diagnostic]:
    """actual_seq_lengths has one value, or one for each batch entry. Each is at most the number of
    keys."""
    tensor, sizes = call["actual_seq_lengths"], sizes_of(call)
    if tensor is None:
        return
    shape = tensor.shape
    if shape is not None and (len(shape) != 1 or misfit(shape[0], sizes.b)):
        found = f"actual_seq_lengths has the shape {text(shape)}"
        yield Diagnostic(
            "actual_seq_lengths", f"{found}, expected {text((sizes.b,))} or [1]", "aclnn"
        )
        return
    content = call.content("actual_seq_lengths") or []
    for entry, length in enumerate(content):
        listed = sizes.listed and not sizes.paged and len(content) == len(sizes.lengths)
        most = sizes.lengths[entry] if listed else sizes.s
        if length < 0 or (isinstance(most, int) and length > most):
            found = f"actual_seq_lengths gives batch entry {entry} {length} keys"
            yield Diagnostic(
                "actual_seq_lengths", f"{found}, expected 0 to {most if most is not None else 'S'}"
            )
            return


@rules(9)
def pages(call: CheckedNode) -> Iterator[Diagnostic]:
    """A paged cache has a table, lengths, and blocks of a legal size."""
    sizes, table = sizes_of(call), call["block_table"]
    if not sizes.paged or table is None or not sizes.layout:
        return
    keys = call.lists.get("key", ())
    wrong = list(first(_page_form(sizes, keys, table)))
    yield from wrong
    if wrong:
        return
    if call["actual_seq_lengths"] is None:
        yield Diagnostic(
            "actual_seq_lengths", "actual_seq_lengths is absent beside a block_table, expected one"
        )
    if call["kv_padding_size"] is not None:
        yield Diagnostic(
            "kv_padding_size", "kv_padding_size is given beside a block_table, expected none"
        )
    if len(keys) > 1:
        yield Diagnostic(
            "key", f"key is a list of {len(keys)} beside a block_table, expected one tensor"
        )
        return
    for key in keys:
        yield from _paged_key(call, sizes, key)


def _page_form(
    sizes: DecodeSizes, keys: Sequence[TensorInfo], table: TensorInfo
) -> Iterator[Diagnostic]:
    """block_size is legal, and block_table has one row for each batch entry."""
    size = sizes.block_size
    unit = 32 if any(key.dtype == "DT_INT8" for key in keys) else 16
    if size <= 0 or size > MAX_BLOCK or size % unit:
        message = f"block_size is {size} beside a block_table, expected a multiple of {unit} up to {MAX_BLOCK}"
        yield Diagnostic("block_size", message)
    if table.shape is not None and shapes_differ(table.shape, (sizes.b, None)):
        message = f"block_table has the shape {text(table.shape)}, expected {text((sizes.b, '?'))}"
        yield Diagnostic("block_table", message)


def _paged_key(call: CheckedNode, sizes: DecodeSizes, key: TensorInfo) -> Iterator[Diagnostic]:
    """The blocks of key have block_size tokens and a documented width, and block_table names
    existing ones."""
    blocks, tokens, width = sizes.cache(key)
    if differ(tokens, sizes.block_size):
        yield Diagnostic(
            "key", f"key has blocks of {tokens} tokens, expected {sizes.block_size} (block_size)"
        )
    if len(key.shape or ()) == 3 and exceeds(width, MAX_PAGE_WIDTH):
        yield Diagnostic(
            "key", f"key has the width {number(width)} in a cache of pages, expected at most 65 536"
        )
    yield from _block_table_entries(call, sizes, blocks)


def _block_table_entries(
    call: CheckedNode, sizes: DecodeSizes, blocks: int | str | None
) -> Iterator[Diagnostic]:
    """The used entries of a constant block_table name existing blocks."""
    table, content = call["block_table"], call.content("actual_seq_lengths")
    if table is None or table.value is None or content is None or not isinstance(blocks, int):
        return
    lengths = content * len(table.value) if len(content) == 1 else content
    for entry, (row, length) in enumerate(zip(table.value, lengths, strict=False)):
        for used in row[: max(0, -(-length // sizes.block_size))]:
            if not 0 <= used < blocks:
                message = f"block_table names block {used} for batch entry {entry}, expected 0 to {blocks - 1}"
                yield Diagnostic("block_table", message)
                return


@rules(10)
def padding(call: CheckedNode) -> Iterator[Diagnostic]:
    """kv_padding_size is one number, needs actual_seq_lengths and leaves room for the keys."""
    tensor, sizes = call["kv_padding_size"], sizes_of(call)
    if tensor is None:
        return
    yield from shape_is("kv_padding_size", tensor, (1,))
    # The lengths of an empty batch are an empty tensor, which counts as absent.
    if call["actual_seq_lengths"] is None and sizes.b != 0:
        yield Diagnostic(
            "actual_seq_lengths",
            "actual_seq_lengths is absent beside kv_padding_size, expected one",
        )
    behind, content = call.content("kv_padding_size"), call.content("actual_seq_lengths")
    if behind and content and isinstance(sizes.s, int) and not sizes.paged and not sizes.listed:
        needed = max(0, behind[0]) + max(content)
        if needed > sizes.s:
            message = f"kv_padding_size is {behind[0]} behind up to {max(content)} keys"
            message = f"{message}, expected at most {sizes.s} in all"
            yield Diagnostic("kv_padding_size", message, extension="EXT-DECODE-PADDING")


@rules(11)
def antiquant(call: CheckedNode) -> Iterator[Diagnostic]:
    """INT8 keys and values with a float query need antiquant_scale. antiquant_offset has the shape
    of antiquant_scale."""
    scale, offset = call["antiquant_scale"], call["antiquant_offset"]
    given = [name for name in ("antiquant_scale", "antiquant_offset") if call[name] is not None]
    keys = [tensor.dtype for tensor in call.lists.get("key", ())]
    quantised = "DT_INT8" in keys and call.dtype("query") not in (None, "DT_INT8")
    if given and not quantised and any(keys[:1]):
        yield Diagnostic(
            given[0], f"{given[0]} is given beside a key of type {keys[0]}, expected an INT8 key"
        )
        return
    if scale is None and quantised:
        yield Diagnostic(
            "antiquant_scale", "antiquant_scale is absent beside an INT8 key, expected one"
        )
    if scale is None and offset is not None:
        yield Diagnostic(
            "antiquant_scale", "antiquant_scale is absent beside antiquant_offset, expected both"
        )
    for name in given:
        yield from _antiquant_tensor(call, name)
    yield from _same_shape(call, "antiquant_offset", "antiquant_scale")


def _same_shape(call: CheckedNode, name: str, like: str) -> Iterator[Diagnostic]:
    """An input has the shape of another, if both are given."""
    given, other = call[name], call[like]
    if given is not None and other is not None and unlike(given, other):
        message = (
            f"{name} has the shape {text(given.shape)}, expected {text(other.shape)} as {like}"
        )
        yield Diagnostic(name, message)


def _antiquant_tensor(call: CheckedNode, name: str) -> Iterator[Diagnostic]:
    """antiquant_scale or antiquant_offset has the type of query, and two numbers for each column,
    or two in all."""
    sizes, query, own, shape = (
        sizes_of(call),
        call.dtype("query"),
        call.dtype(name),
        call.shape(name),
    )
    if own and query and own != query:
        yield Diagnostic(name, f"{name} is {own}, expected {query} as query")
    if shape is None or not sizes.layout:
        return
    n2, d = sizes.n2, sizes.d
    forms: tuple[Shape, ...] = ((2,), (2, n2, 1, d), (2, n2, d), (2, product(n2, d)))
    if all(shapes_differ(shape, form) for form in forms):
        wanted = " or ".join(map(text, forms))
        yield Diagnostic(name, f"{name} has the shape {text(shape)}, expected {wanted}")


@rules(12)
def output_quantisation(call: CheckedNode) -> Iterator[Diagnostic]:
    """An INT8 attention_out needs quant_scale2, which has one number, or one for each head and
    column. An INT8 query needs its three scales."""
    scale, offset, out = (
        call["quant_scale2"],
        call["quant_offset2"],
        call.outputs.get("attention_out"),
    )
    if offset is not None and scale is None:
        yield Diagnostic(
            "quant_scale2", "quant_scale2 is absent beside quant_offset2, expected one"
        )
    if out is not None and out.dtype == "DT_INT8" and scale is None:
        yield Diagnostic(
            "quant_scale2", "quant_scale2 is absent although attention_out is DT_INT8, expected one"
        )
    yield from _int8_path(call)
    for name in ("quant_scale2", "quant_offset2"):
        yield from _output_scale(call, name)
    yield from _same_shape(call, "quant_offset2", "quant_scale2")


def _int8_path(call: CheckedNode) -> Iterator[Diagnostic]:
    """The three scales of the INT8 path are given beside an INT8 query, and only there. Each is one
    number."""
    query = call.dtype("query")
    given = {name: tensor for name in _INT8_PATH if (tensor := call[name]) is not None}
    missing = [name for name in _INT8_PATH if name not in given]
    if query == "DT_INT8" and missing:
        yield Diagnostic(missing[0], f"{missing[0]} is absent beside an INT8 query, expected one")
    if query not in (None, "DT_INT8") and given:
        name = next(iter(given))
        yield Diagnostic(name, f"{name} is given beside a query of type {query}, expected none")
    for name, tensor in given.items():
        shape = tensor.shape or ()
        if len(shape) > 1 or any(differ(size, 1) for size in shape):
            yield Diagnostic(name, f"{name} has the shape {text(shape)}, expected [1]")


def _output_scale(call: CheckedNode, name: str) -> Iterator[Diagnostic]:
    """quant_scale2 or quant_offset2 is float32, beside a bfloat16 query also bfloat16, and both
    have one type."""
    query, own, scale = call.dtype("query"), call.dtype(name), call.dtype("quant_scale2")
    legal = ("DT_FLOAT", "DT_BF16") if query == "DT_BF16" else ("DT_FLOAT",)
    if own and query and own not in legal:
        message = f"{name} is {own}, expected {' or '.join(legal)} beside a query of type {query}"
        yield Diagnostic(name, message)
    elif own and scale and own != scale:
        yield Diagnostic(name, f"{name} is {own}, expected {scale} as quant_scale2")
    yield from _quant_shape(sizes_of(call), name, call.shape(name))


def _quant_shape(sizes: DecodeSizes, name: str, shape: Shape | None) -> Iterator[Diagnostic]:
    """quant_scale2 or quant_offset2 has one number, or one for each head and column of query."""
    if shape is None or not sizes.layout:
        return
    n1, d, h = sizes.n1, sizes.d, product(sizes.n1, sizes.d)
    forms: tuple[Shape, ...] = (
        *((1,), (1, n1, 1, d), (1, 1, n1, d), (n1, 1, d), (1, n1, d)),
        *((1, 1, h), (1, h), (n1, d), (h,)),
    )
    if all(shapes_differ(shape, form) for form in forms):
        message = f"{name} has the shape {text(shape)}, expected [1] or {text((n1, d))} (the heads of query)"
        yield Diagnostic(name, message)


@rules(13)
def no_quantisation(call: CheckedNode) -> Iterator[Diagnostic]:
    """310P takes no scales of the INT8 path and no INT8 output."""
    if not call.on("310P"):
        return
    for name in _QUANTISED:
        if call[name] is not None:
            yield Diagnostic(name, f"{name} is given, expected none on 310P", "document")


rules.values(14, "inner_precise", (0, 1), wanted="0 (high precision) or 1 (high performance)")
rules.shared(
    15,
    "softcap",
    softcap,
    "cpu_softcap is 0 or in the range in which the kernels compute it exactly enough.",
)


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """attention_out has the shape of query."""
    return {"attention_out": TensorInfo(inference_type(inputs), inputs["query"].shape)}


def _type_rows() -> tuple[TypeRow, ...]:
    """Results are int8 if quant_scale2 is given, otherwise they have the type of query (float16 for
    int8).

    1. Nodes without quant_scale2 in its usual place.
    2. Nodes with quant_scale2 there. A node with lists does not fit these rows, because it has a
       key or value in the place of atten_mask. If the keys and values are int8, which is also a
       type of masks, the tensor in the place of pse_shift is int8, too, and does not fit.
    3. The rest are nodes with lists. Their results have the type of query.
    """
    places = 13 + 2 * MOST_LISTED
    # 1
    rows = [
        type_row((query, *(ANY,) * 8, ABSENT, *(ANY,) * 5), places, out)
        for query, out in OF_QUERY.items()
    ]
    scales = [("float32", "float32"), ("float16", "float32"), ("int8", "float32")]
    scales += [("bfloat16", "float32"), ("bfloat16", "bfloat16")]
    for query, scale in scales:  # 2
        for mask in ("boolean", "int8", "uint8"):
            before = (query, ANY, ANY, OF_QUERY[query], mask, "int64", ANY, "float32", ANY)
            behind = (scale, scale, OF_QUERY[query], OF_QUERY[query], "int32", "int64")
            rows.append(type_row((*before, *behind), places, "int8"))
    # 3
    rows += [TypeRow((query, *(ANY,) * (places - 1)), (out,)) for query, out in OF_QUERY.items()]
    return tuple(rows)


OPERATOR = Operator(
    variants=(
        FIRST.OP_END_FACTORY_REG(),
        EXPERIMENT.OP_END_FACTORY_REG(),
        CURRENT.OP_END_FACTORY_REG(),
    ),
    infer=infer,
    rules=rules,
    kernel=CpuKernel(
        extensions=(
            "EXT-RANGE",
            "EXT-DECODE-FLOAT",
            "EXT-DECODE-MASK-BYTES",
            "EXT-DECODE-PADDING",
            "EXT-DECODE-INT8",
            "EXT-SOFTCAP",
        ),
        required_output="attention_out",
        type_rows=_type_rows,
    ),
)
