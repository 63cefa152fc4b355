"""The checks that PromptFlashAttention and FusedInferAttentionScore share, and the sizes of their
calls.

| layout | query | key and value (value with Dv for D) | attention_out |
|---|---|---|---|
| BSH | B,S1,N1*D | B,S2,N2*D | B,S1,N1*Dv |
| BSND | B,S1,N1,D | B,S2,N2,D | B,S1,N1,Dv |
| BNSD | B,N1,S1,D | B,N2,S2,D | B,N1,S1,Dv |
| NSD (of one batch entry) | N1,S1,D | N2,S2,D | N1,S1,Dv |
| TND, NTD | T1,N1,D; N1,T1,D | T2,N2,D; N2,T2,D | as query, with Dv for D |

In a layout `IN_OUT`, IN is the layout of query, key and value, and OUT that of attention_out. The
output layout NBSD is N1,B,S1,Dv.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fa_compiler.op_registry.constraints.core import CheckedNode, number, text
from fa_compiler.op_registry.constraints.decode_sizes import query_heads, shorter
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.geometry import (
    Geometry,
    Shape,
    differ,
    divide,
    exceeds,
    misfit,
    shape_of,
    sizes_by_letter,
)
from fa_compiler.op_registry.node import Dim, TensorInfo

RANKS: Mapping[str, int] = {"BSH": 3, "BSND": 4, "BNSD": 4, "TND": 3, "NTD": 3, "NSD": 3}
MASK_TYPES = ("DT_BOOL", "DT_INT8", "DT_UINT8")
HALFS = ("DT_FLOAT16", "DT_BF16")
COMPRESSED_MASK_SIZE = 2048
MAX_D, MAX_N, MAX_GROUP, MAX_B, MAX_S = 512, 256, 64, 65536, 20971520
MAX_B_UNALIGNED = 128
MAX_D_CPU = 768

QUANT_SCALE2_PLACE = 10
"""The position of quant_scale2 among the inputs, if key and value are not lists."""

MAX_B_310P, MAX_S_310P = 128, 65535

STEPS = {"DT_INT4": 64, "DT_INT8": 32}
"""Of what D is a multiple if query or key has that type. The first type counts."""


def tensor(call: CheckedNode, name: str) -> TensorInfo | None:
    """An input. If it is a list of keys or values, the result is its first tensor."""
    listed = call.lists.get(name)
    return listed[0] if listed else call[name]


def query_layout(call: CheckedNode) -> str:
    """The layout of query, key and value."""
    return str(call.attr("input_layout")).partition("_")[0]


def sizes_of(call: CheckedNode) -> Geometry:
    """The sizes of a call, with N2 by num_key_value_heads. Unknown layouts and wrong ranks give
    unknown sizes; nothing is checked here."""
    layout, heads, stated = (
        query_layout(call),
        call.attr("num_heads"),
        call.attr("num_key_value_heads"),
    )
    if layout not in RANKS:
        return Geometry("")
    q, k, v = (sizes_by_letter(tensor(call, name), layout) for name in ("query", "key", "value"))
    given = heads if heads > 0 else None
    n1, n2 = q.get("N", given), stated if stated > 0 else given
    d, dv = (divide(q["H"], n1), divide(v["H"], n2)) if layout == "BSH" else (q["D"], v["D"])
    b = 1 if layout == "NSD" else q.get("B")
    return Geometry(layout, b, n1, n2, q.get("S"), k.get("S"), d, dv)


def layout_and_ranks(call: CheckedNode, layouts: tuple[str, ...]) -> Iterator[Diagnostic]:
    """input_layout is known, and query, key and value have the rank of the layout."""
    layout = call.attr("input_layout")
    if layout not in layouts:
        yield Diagnostic(
            "input_layout", f"input_layout is {layout!r}, expected one of {', '.join(layouts)}"
        )
        return
    wanted = RANKS[query_layout(call)]
    for name in ("query",) if paged(call) else ("query", "key", "value"):
        info = tensor(call, name)
        if info is not None and info.shape is not None and len(info.shape) != wanted:
            yield Diagnostic(
                name, f"{name} has rank {len(info.shape)}, expected {wanted} for {layout}"
            )
            return


def paged(call: CheckedNode) -> bool:
    """Whether the keys are in pages."""
    return call["block_table"] is not None


def heads(call: CheckedNode) -> Iterator[Diagnostic]:
    """num_heads is the head count of query. num_key_value_heads is 0 or the head count of key. It
    divides num_heads, and a key head serves at most 64 query heads."""
    sizes, given, stated = sizes_of(call), call.attr("num_heads"), call.attr("num_key_value_heads")
    if given <= 0:
        yield Diagnostic("num_heads", f"num_heads is {given}, expected a positive number")
        return
    yield from query_heads(call, sizes.layout, sizes.n1)
    if stated < 0 or (stated and given % stated):
        message = f"num_key_value_heads is {stated}, expected 0 or a divisor of the {given} heads of query"
        yield Diagnostic("num_key_value_heads", message)
        return
    if stated and given // stated > MAX_GROUP:
        message = f"num_key_value_heads is {stated}, expected one for at most {MAX_GROUP} of {given} heads"
        yield Diagnostic("num_key_value_heads", message, extension="EXT-PROMPT-SIZES")
    if not paged(call):
        yield from _key_heads(call, sizes, stated or given)


def _key_heads(call: CheckedNode, sizes: Geometry, wanted: int) -> Iterator[Diagnostic]:
    for name in ("key", "value"):
        own = sizes_by_letter(tensor(call, name), sizes.layout)
        if differ(own.get("N"), wanted):
            yield Diagnostic(
                name, f"{name} has {own['N']} heads, expected {wanted} by num_key_value_heads"
            )
            return
        if name == "key" and isinstance(sizes.d, int) and differ(own.get("H"), wanted * sizes.d):
            message = f"key has the width {own['H']}, expected {wanted * sizes.d}: {wanted} heads of {sizes.d}"
            yield Diagnostic(name, message)
            return


def same_sizes(call: CheckedNode, narrower: bool = False) -> Iterator[Diagnostic]:
    """query and key have the same head size and batch size, and key and value have the same shape.

    With `narrower`, value may have the head size 128 if key has 192.
    """
    if paged(call) or len(call.lists.get("key", ())) > 1:
        return
    sizes = sizes_of(call)
    rank = RANKS.get(sizes.layout, 0)
    if not rank:
        return
    q, k, v = (shape_of(tensor(call, name), rank) for name in ("query", "key", "value"))
    if sizes.layout in ("BSND", "BNSD", "TND", "NTD") and differ(q[-1], k[-1]):
        yield Diagnostic("key", f"key has the head size {k[-1]}, expected {q[-1]} as query")
    elif any(map(differ, k[:-1], v[:-1])):
        yield Diagnostic("value", f"value has the shape {text(v)}, expected {text(k)} as key")
    elif differ(k[-1], v[-1]) and not (narrower and _has_narrow_value(sizes)):
        message = f"value has the shape {text(v)}, expected {text(k)} as key"
        yield Diagnostic("value", message, extension="EXT-PROMPT-SIZES")
    elif sizes.layout.startswith("B") and differ(q[0], k[0]):
        yield Diagnostic("key", f"key has the batch size {k[0]}, expected {q[0]} as query")


def _has_narrow_value(sizes: Geometry) -> bool:
    return sizes.d in (192, None) and sizes.dv in (128, None)


def ranges(call: CheckedNode) -> Iterator[Diagnostic]:
    """B, N, D and S are in their ranges. D is a multiple of 16, of 32 if query or key is INT8, of
    64 if one of them is INT4."""
    sizes, older = sizes_of(call), call.on("310P")
    types = (call.dtype("query"), _dtype(tensor(call, "key")))
    step = next((step for dtype, step in STEPS.items() if dtype in types), 16)
    aligned = not isinstance(sizes.d, int) or sizes.d % step == 0
    limit_b = MAX_B if aligned else MAX_B_UNALIGNED
    limit_b, limit_s = (MAX_B_310P, MAX_S_310P) if older else (limit_b, MAX_S)
    for name, what, size, limit, computed in (
        ("query", "batch size", sizes.b, limit_b, True),
        ("query", "head count", sizes.n1, MAX_N, True),
        ("query", "head size", sizes.d, MAX_D, not exceeds(sizes.d, MAX_D_CPU)),
        ("query", "sequence length", sizes.s1, limit_s, True),
        ("key", "sequence length", sizes.s2, limit_s, True),
    ):
        if exceeds(size, limit):
            message = f"{name} has the {what} {number(size)}, expected at most {number(limit)}"
            yield Diagnostic(name, message, extension="EXT-PROMPT-SIZES" if computed else None)
    if not aligned:
        message = f"query has the head size {sizes.d}, expected a multiple of {step}"
        yield Diagnostic(
            "query", message, "document", extension="EXT-PROMPT-SIZES" if step < 64 else None
        )


def mask(call: CheckedNode) -> Iterator[Diagnostic]:
    """sparse_mode is 0 to 4. atten_mask is boolean or has 8-bit elements, and its shape is the one
    that the mode requires."""
    mode, given = call.attr("sparse_mode"), call["atten_mask"]
    if mode not in range(5):
        yield Diagnostic("sparse_mode", f"sparse_mode is {mode}, expected 0 to 4")
        return
    if given is None:
        if mode:
            message = f"atten_mask is absent in sparse_mode {mode}, which is made by it"
            yield Diagnostic("atten_mask", message, extension="EXT-PROMPT-MODES")
        return
    yield from mask_type(given)
    if given.shape is None:
        return
    if mode in (2, 3, 4):
        wanted = (1,) * (len(given.shape) - 2) + (COMPRESSED_MASK_SIZE, COMPRESSED_MASK_SIZE)
        if not 2 <= len(given.shape) <= 4 or any(map(differ, given.shape, wanted)):
            shape = text(given.shape)
            yield Diagnostic(
                "atten_mask",
                f"atten_mask has the shape {shape}, expected [2048,2048] in sparse_mode {mode}",
            )
        return
    yield from _full_mask(call, given.shape)


def mask_type(given: TensorInfo) -> Iterator[Diagnostic]:
    """atten_mask is boolean or has 8-bit elements."""
    if given.dtype and given.dtype not in MASK_TYPES:
        yield Diagnostic(
            "atten_mask", f"atten_mask is {given.dtype}, expected {', '.join(MASK_TYPES)}"
        )


def _full_mask(call: CheckedNode, shape: Shape) -> Iterator[Diagnostic]:
    """The mask is [S1,S2], [1|B,S1,S2] or [1|B,1,S1,S2], where S1 and S2 may be padded. If S1 is 1,
    it may also be [B,S2]."""
    sizes = sizes_of(call)
    one = sizes.s1 == 1
    leads = {2: (), 3: (sizes.b,), 4: (sizes.b, 1)}.get(len(shape))
    fits = leads is not None and not any(
        differ(found, wanted) and not (found == 1 and index == 0)
        for index, (found, wanted) in enumerate(zip(shape, leads, strict=False))
    )
    rows_fit = one or not shorter(shape[-2], sizes.s1) if len(shape) >= 2 else False
    if not fits or not rows_fit or shorter(shape[-1], sizes.s2):
        wanted_shapes = (
            f"[S1,S2], [1|B,S1,S2] or [1|B,1,S1,S2] with B {sizes.b}, S1 {sizes.s1}, S2 {sizes.s2}"
        )
        yield Diagnostic(
            "atten_mask", f"atten_mask has the shape {text(shape)}, expected {wanted_shapes}"
        )


def bias(call: CheckedNode) -> Iterator[Diagnostic]:
    """pse_shift is [1|B,N1,S1,S2] or larger in S1 and S2. It has the type of query, or float16 if
    query is INT8."""
    given, sizes = call["pse_shift"], sizes_of(call)
    if given is None:
        return
    query = call.dtype("query")
    wanted = "DT_FLOAT16" if query == "DT_INT8" else query
    if given.dtype and wanted and given.dtype != wanted:
        yield Diagnostic(
            "pse_shift", f"pse_shift is {given.dtype}, expected {wanted} beside a query of {query}"
        )
    shape = given.shape
    if shape is None:
        return
    fits = len(shape) == 4 and not misfit(shape[0], sizes.b) and not differ(shape[1], sizes.n1)
    if not fits or shorter(shape[2], sizes.s1) or shorter(shape[3], sizes.s2):
        whole = text((sizes.b, sizes.n1, sizes.s1, sizes.s2))
        yield Diagnostic(
            "pse_shift",
            f"pse_shift has the shape {text(shape)}, expected {whole}, or 1 in place of B",
        )


def empty_rows(call: CheckedNode) -> Iterator[Diagnostic]:
    """With INT8 results every query row has a key: the sources do not say what a row without keys
    holds."""
    if call["atten_mask"] is None:
        return
    mode, pre, following = (
        call.attr("sparse_mode"),
        call.attr("pre_tokens"),
        call.attr("next_tokens"),
    )
    # the band is not used
    if mode == 0 and (call["query_padding_size"] or call["kv_padding_size"]):
        return
    for queries, keys in _lengths_of_all(call):
        if not queries or not keys:  # nothing is computed, the rows are 0
            continue
        extra = queries - keys
        empty = {
            0: extra - pre > 0 or following < 0,
            3: extra > 0,
            4: pre < 0 or following - extra < 0,
        }.get(mode, False)
        if empty:
            message = f"sparse_mode {mode} leaves rows without a key (S1 {queries}, S2 {keys}), which quantised "
            yield Diagnostic("sparse_mode", f"{message}results do not allow")
            return


def _lengths_of_all(call: CheckedNode) -> list[tuple[int, int]]:
    """The numbers of queries and keys of each sequence. The keys include a shared prefix. The list
    is empty if a number is not known."""
    sizes = sizes_of(call)
    own = _lengths_of(call, "actual_seq_lengths", sizes.s1)
    keys = _lengths_of(call, "actual_seq_lengths_kv", sizes.s2)
    shared = _prefix_length(call)
    if not own or not keys or shared is None or sizes.layout in ("TND", "NTD"):
        return []
    count = max(len(own), len(keys)) if not isinstance(sizes.b, int) else sizes.b
    own, keys = (given * count if len(given) == 1 else given for given in (own, keys))
    return [
        (queries, found + shared) for queries, found in list(zip(own, keys, strict=False))[:count]
    ]


def _lengths_of(call: CheckedNode, name: str, whole: Dim) -> list[int]:
    if call[name] is not None:
        return call.content(name) or []
    return [whole] if isinstance(whole, int) else []


def _prefix_length(call: CheckedNode) -> int | None:
    """The number of keys in the shared prefix, 0 without one, or None if it is not known."""
    if call["key_shared_prefix"] is None:
        return 0
    if call["actual_shared_prefix_len"] is not None:
        return next(iter(call.content("actual_shared_prefix_len") or ()), None)
    size = prefix_size(call)
    return size if isinstance(size, int) else None


def prefix_size(call: CheckedNode) -> Dim:
    """The dimension S of the shared prefix."""
    layout = query_layout(call)
    if layout not in ("BSH", "BSND", "BNSD"):
        return None
    return sizes_by_letter(call["key_shared_prefix"], layout)["S"]


def lengths(call: CheckedNode, name: str) -> Iterator[Diagnostic]:
    """The lengths are INT64. There is one for the whole batch, or at least one for each batch
    entry."""
    given, b = call[name], sizes_of(call).b
    if given is None:
        return
    if given.dtype and given.dtype != "DT_INT64":
        yield Diagnostic(name, f"{name} is {given.dtype}, expected DT_INT64")
    if given.shape is not None and (
        len(given.shape) != 1 or (given.shape[0] != 1 and shorter(given.shape[0], b))
    ):
        yield Diagnostic(name, f"{name} has the shape {text(given.shape)}, expected [{b}] or [1]")


def _dtype(info: TensorInfo | None) -> str:
    return "" if info is None else info.dtype
