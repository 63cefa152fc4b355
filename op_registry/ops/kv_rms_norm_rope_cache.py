"""KvRmsNormRopeCache: RMSNorm and rotary positions of the keys of multi-head latent attention,
written into two caches.

Without v, a row of kv is the latent, which is normalised with gamma, and behind it the key that is
rotated, as wide as cos. The rotated key goes into k_cache, the normalised latent into ckv_cache.
With v, a row of kv is a key: all of it is normalised, and then its first numbers, as many as cos
has, are rotated; v goes into ckv_cache as it is. The pairs that are rotated are neighbours. The
result has the first numbers of all pairs in front of the second ones.

The outputs k_cache and ckv_cache are the inputs of these names, changed in place. What an entry of
index means depends on cache_mode:

| cache_mode | a cache | an entry of index |
|---|---|---|
| Norm | [Bcache,N,Scache,D] | the place of a token in its batch entry |
| PA, PA_BNSD, PA_NZ | [pages,size,N,D] | the place of a token among all places of all pages |
| PA_BLK_BNSD, PA_BLK_NZ | [pages,size,N,D] | that of the first of as many tokens as a page holds |

In the modes with NZ the memory of a page is [N,D/16,size,16], or with 32 in place of 16 for types
of 8 bits. An entry of -1 writes nothing. k_rope and c_kv are what is written, before it is
quantised, if is_output_kv is set; otherwise their numbers mean nothing. Its constraints are KRC.1
to KRC.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

from fa_compiler.op_registry.constraints import norms
from fa_compiler.op_registry.constraints.core import (
    CheckedNode,
    Rules,
    fixed_types,
    number,
    one_type,
    shape_is,
    text,
)
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.geometry import Shape, differ, no_multiple, shape_of, shapes_differ
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.node import Dim, TensorInfo
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs

FLOATS = "DT_FLOAT, DT_FLOAT16, DT_BF16"
CACHES = "DT_FLOAT, DT_FLOAT16, DT_BF16, DT_INT8, DT_HIFLOAT8, DT_FLOAT8_E5M2, DT_FLOAT8_E4M3FN"
HALFS = ("DT_FLOAT16", "DT_BF16")
NORM, PAGED = "Norm", ("PA", "PA_BNSD", "PA_NZ")
BLOCKS, SORTED = ("PA_BLK_BNSD", "PA_BLK_NZ"), ("PA_NZ", "PA_BLK_NZ")
"""The modes in which an entry of index stands for a page, and those with the memory of NZ."""
MODES = (NORM, *PAGED, *BLOCKS)
LATENT, TURNED, KEY, VALUE = 512, 64, 192, 128
"""The widths on A2 and A3: of the latent and of what is rotated, and with v those of a key and of a
value."""


def _rows(*small: str) -> str:
    """The types of a product: each cache has that of kv or one of 8 bits, and both the same one of
    8 bits."""
    titles = "kv=gamma=cos=sin=v=k_rope=c_kv index k_cache ckv_cache k_rope_scale=c_kv_scale=k_rope_offset=c_kv_offset"
    rows = [titles]
    for wide in ("FLOAT16", "BF16"):
        pairs = {pair: None for eight in small for pair in product((wide, eight), repeat=2)}
        rows += [f"{wide} INT64 {key} {value} FLOAT" for key, value in pairs]
    return "\n".join(rows)


PROTO = (
    REG_OP(
        "KvRmsNormRopeCache",
        "proto_2026_07",
        source="mirror-cann/ops-transformer 3a280bcc (2026-07-21) posembedding/kv_rms_norm_rope_cache/op_graph/"
        "kv_rms_norm_rope_cache_proto.h; same, op_host/kv_rms_norm_rope_cache_def.cpp; same, "
        "op_host/kv_rms_norm_rope_cache_base_tiling.cpp; same, op_host/kv_rms_norm_rope_cache_ds_tiling.cpp; same, "
        "op_host/kv_rms_norm_rope_cache_infershape.cpp; the documents aclnnKvRmsNormRopeCache and "
        "aclnnKvRmsNormRopeCacheV2",
        cann="9.1.0",
    )
    .INPUT("kv", FLOATS)
    .INPUT("gamma", FLOATS)
    .INPUT("cos", FLOATS)
    .INPUT("sin", FLOATS)
    .INPUT("index", "DT_INT64")
    .INPUT("k_cache", CACHES)
    .INPUT("ckv_cache", CACHES)
    .OPTIONAL_INPUT("k_rope_scale", "DT_FLOAT")
    .OPTIONAL_INPUT("c_kv_scale", "DT_FLOAT")
    .OPTIONAL_INPUT("k_rope_offset", "DT_FLOAT")
    .OPTIONAL_INPUT("c_kv_offset", "DT_FLOAT")
    .OPTIONAL_INPUT("v", FLOATS)
    .OUTPUT("k_cache", CACHES)
    .OUTPUT("ckv_cache", CACHES)
    .OUTPUT("k_rope", FLOATS)
    .OUTPUT("c_kv", FLOATS)
    .ATTR("epsilon", "Float", 1e-5)
    .ATTR("cache_mode", "String", NORM)
    .ATTR("is_output_kv", "Bool", False)
    .PRODUCT("ascend910b ascend910_93", _rows("INT8"))
    .PRODUCT("ascend950", _rows("INT8", "HIFLOAT8", "FLOAT8_E5M2", "FLOAT8_E4M3FN"))
)

_QUANTISED = {
    "k_cache": ("k_rope_scale", "k_rope_offset"),
    "ckv_cache": ("c_kv_scale", "c_kv_offset"),
}
_NUMBERS = tuple(name for names in _QUANTISED.values() for name in names)
_WIDE = ("kv", "gamma", "cos", "sin", "v", "k_rope", "c_kv")

rules = Rules("KRC", typed=("kv", "gamma", "cos", "sin", "v", "index", *_QUANTISED, *_NUMBERS))


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """kv, gamma, cos, sin, v, k_rope and c_kv have one type, FLOAT16 or BF16. index is INT64, and
    scales and offsets are FLOAT."""
    yield from one_type(call, _WIDE, HALFS)
    yield from fixed_types(call, {"index": "DT_INT64", **dict.fromkeys(_NUMBERS, "DT_FLOAT")})


@rules(2)
def cache_types(call: CheckedNode) -> Iterator[Diagnostic]:
    """k_cache and ckv_cache each have the type of kv, or one of 8 bits: INT8, and on 950 also
    HIFLOAT8, FLOAT8_E5M2 or FLOAT8_E4M3FN. If both are of 8 bits, they have one type."""
    wide = call.dtype("kv") if call.dtype("kv") in HALFS else None
    small = _small_types(call)
    found = {name: own for name in _QUANTISED if (own := call.dtype(name))}
    for name, own in found.items():
        if own not in small and own not in ((wide,) if wide else HALFS):
            wanted = " or ".join((wide or "the type of kv", *small))
            yield Diagnostic(name, f"{name} is {own}, expected {wanted}", "aclnn")
            return
    if len(found) == 2 and len(set(found.values()) & set(small)) == 2:
        yield Diagnostic(
            "ckv_cache", f"ckv_cache is {found['ckv_cache']}, expected that of k_cache", "aclnn"
        )


def _small_types(call: CheckedNode) -> tuple[str, ...]:
    """The types of 8 bits that a cache may have on the product."""
    others = ("DT_HIFLOAT8", "DT_FLOAT8_E5M2", "DT_FLOAT8_E4M3FN")
    return ("DT_INT8", *(others if call.product is None or call.on("950") else ()))


rules.values(3, "cache_mode", MODES)


@rules(4)
def keys(call: CheckedNode) -> Iterator[Diagnostic]:
    """kv is [B,N,S,D] and has elements. N is 1, or with v 1, 2, 4 or 8."""
    if call.rank("kv") not in (None, 4):
        yield Diagnostic("kv", f"kv has rank {call.rank('kv')}, expected 4")
        return
    shape = shape_of(call["kv"], 4)
    heads = (1,) if call["v"] is None else (1, 2, 4, 8)
    if 0 in shape:
        yield Diagnostic("kv", f"kv has the shape {text(shape)}, expected sizes of at least 1")
    elif isinstance(shape[1], int) and shape[1] not in heads:
        yield Diagnostic("kv", f"kv has {shape[1]} heads, expected {' or '.join(map(str, heads))}")


@rules(5)
def tables(call: CheckedNode) -> Iterator[Diagnostic]:
    """gamma is [Dv]. cos and sin are [B,N,S,Dk] or [B,N,1,Dk], of one shape, and Dk is even. Dv +
    Dk is D without v. With v, Dv is D, Dk is at most D, and v is [B,N,S,Dv of its own]."""
    b, n, s, d = shape_of(call["kv"], 4)
    gamma, cos = shape_of(call["gamma"], 1)[0], shape_of(call["cos"], 4)
    yield from shape_is("gamma", call["gamma"], (None,))
    yield from shape_is("cos", call["cos"], (b, n, 1 if cos[2] == 1 else s, None))
    yield from shape_is("sin", call["sin"], cos)
    if no_multiple(cos[3], 2):
        yield Diagnostic("cos", f"cos has the last size {cos[3]}, expected an even one")
    wanted = d if call["v"] is not None else _less(d, cos[3])
    if differ(gamma, wanted):
        yield Diagnostic(
            "gamma", f"gamma has the size {gamma}, expected {wanted} beside kv and cos"
        )
    if call["v"] is not None:
        yield from shape_is("v", call["v"], (b, n, s, None))
        if isinstance(d, int) and isinstance(cos[3], int) and cos[3] > d:
            yield Diagnostic("cos", f"cos has the last size {cos[3]}, expected at most {d} as kv")


def _less(whole: Dim, part: Dim) -> Dim:
    return whole - part if isinstance(whole, int) and isinstance(part, int) else None


@rules(6)
def widths(call: CheckedNode) -> Iterator[Diagnostic]:
    """On A2 and A3, gamma has 512 numbers and the last axis of cos 64. With v, gamma has 192 and
    the last axis of v 128."""
    if call.product is None or call.on("950"):
        return
    wanted = {"gamma": LATENT if call["v"] is None else KEY, "cos": TURNED, "v": VALUE}
    for name, width in wanted.items():
        shape = call.shape(name)
        if shape and differ(shape[-1], width):
            yield Diagnostic(name, f"{name} has the last size {shape[-1]}, expected {width}")


@rules(7)
def values(call: CheckedNode) -> Iterator[Diagnostic]:
    """On 950, v is absent."""
    if call.on("950") and call["v"] is not None:
        yield Diagnostic("v", "v is given, expected none on 950", "document")


@rules(8)
def caches(call: CheckedNode) -> Iterator[Diagnostic]:
    """In the mode Norm, k_cache is [Bcache,N,Scache,D] and ckv_cache [Bcache,N,Scache,Dv]; in the
    others they are [pages,size,N,D] and [pages,size,N,Dv]. D is the width of a rotated key, or with
    v of a key, and Dv that of the latent, or of v. The size of a page is a multiple of 16, or of 32
    beside a cache of 8 bits. In the modes with NZ the last axis is one, too."""
    mode, n = call.attr("cache_mode"), shape_of(call["kv"], 4)[1]
    if mode not in MODES:
        return
    for name, width in zip(_QUANTISED, _widths(call), strict=True):
        first, size = shape_of(call[name], 4)[:2]
        yield from shape_is(
            name, call[name], (None, n, None, width) if mode == NORM else (first, size, n, width)
        )
        part = 32 if call.dtype(name) not in (None, *HALFS) else 16
        if mode != NORM and no_multiple(size, part):
            yield Diagnostic(
                name, f"{name} has pages of {size} tokens, expected a multiple of {part}"
            )
        if mode in SORTED and no_multiple(width, part):
            yield Diagnostic(
                name, f"{name} has the last size {width}, expected a multiple of {part}"
            )
    one, other = (shape_of(call[name], 4)[:3] for name in _QUANTISED)
    if shapes_differ(one, other):
        yield Diagnostic(
            "ckv_cache", f"ckv_cache begins with {text(other)}, expected {text(one)} as k_cache"
        )


def _widths(call: CheckedNode) -> tuple[Dim, Dim]:
    """The numbers of a row that go into k_cache and into ckv_cache."""
    if call["v"] is None:
        return shape_of(call["cos"], 4)[3], shape_of(call["gamma"], 1)[0]
    return shape_of(call["kv"], 4)[3], shape_of(call["v"], 4)[3]


@rules(9)
def index(call: CheckedNode) -> Iterator[Diagnostic]:
    """index is [B,S] in the mode Norm. In PA, PA_BNSD and PA_NZ it is [B*S], and in PA_BLK_BNSD and
    PA_BLK_NZ it has an entry for as many tokens of a batch entry as a page holds."""
    mode, (b, _, s, _) = call.attr("cache_mode"), shape_of(call["kv"], 4)
    size = shape_of(call["k_cache"], 4)[1]
    if mode == NORM:
        yield from shape_is("index", call["index"], (b, s))
    elif isinstance(b, int) and isinstance(s, int) and mode in PAGED:
        yield from shape_is("index", call["index"], (b * s,))
    elif (
        isinstance(b, int)
        and isinstance(s, int)
        and isinstance(size, int)
        and size > 0
        and mode in BLOCKS
    ):
        yield from shape_is("index", call["index"], (b * -(-s // size),))


@rules(10)
def quantisation(call: CheckedNode) -> Iterator[Diagnostic]:
    """A cache of 8 bits has a scale, and only it. An offset stands beside a scale. On A2 and A3 the
    mode Norm without v has none."""
    for name, (scale, offset) in _QUANTISED.items():
        own, given = call.dtype(name), call[scale] is not None
        if own and own not in HALFS and not given:
            yield Diagnostic(
                scale, f"{scale} is absent beside {name} of the type {own}, expected one"
            )
        elif own in HALFS and given:
            yield Diagnostic(
                scale, f"{scale} is given beside {name} of the type {own}, expected none"
            )
        if call[offset] is not None and not given:
            yield Diagnostic(offset, f"{offset} is given without {scale}, expected none")
        on_others = call.product is not None and not call.on("950")
        if given and on_others and call["v"] is None and call.attr("cache_mode") == NORM:
            yield Diagnostic(scale, f"{scale} is given in the mode Norm, expected none")


@rules(11)
def scales(call: CheckedNode) -> Iterator[Diagnostic]:
    """Scales and offsets are [D], [N,D] or [1], where D is the width of the rows of their cache. On
    A2 and A3 they are [D] or [1,D] without v, and [N,D] with it."""
    n, known = shape_of(call["kv"], 4)[1], call.product is not None and not call.on("950")
    for names, width in zip(_QUANTISED.values(), _widths(call), strict=True):
        legal: list[Shape] = [(n, width)]
        if not known or call["v"] is None:
            legal += [(width,)] if known else [(width,), (1,)]
        for name in names:
            shape = call.shape(name)
            if shape is not None and all(shapes_differ(shape, each) for each in legal):
                wanted = " or ".join(map(text, legal))
                yield Diagnostic(name, f"{name} has the shape {text(shape)}, expected {wanted}")


@rules(12)
def contents(call: CheckedNode) -> Iterator[Diagnostic]:
    """Where index is constant, its entries are -1 or places of the caches, and no place is named
    twice: in the mode Norm by one batch entry, otherwise at all. Where an entry stands for a page,
    that goes for pages."""
    found, mode, cache = (
        call.content("index"),
        call.attr("cache_mode"),
        shape_of(call["k_cache"], 4),
    )
    used = [cache[2]] if mode == NORM else [*cache[:2]]
    sizes = [size for size in used if isinstance(size, int)]
    if not found or len(sizes) != len(used):
        return
    limit, page = prod(sizes), sizes[-1] if mode in BLOCKS else 1
    wrong = next((entry for entry in found if not -1 <= entry < limit), None)
    if wrong is not None:
        yield Diagnostic(
            "index", f"index has {number(wrong)}, expected -1 to {number(limit - 1)}", "document"
        )
    elif any(len({*row}) < len(row) for row in _written(call, found, page)):
        yield Diagnostic("index", "index names a place twice, expected each once", "document")


def _written(call: CheckedNode, entries: list[int], page: int) -> Iterator[list[int]]:
    """What entries write to, places or pages: of each batch entry in the mode Norm, otherwise of
    all."""
    tokens = shape_of(call["index"], 2)[1] if call.attr("cache_mode") == NORM else len(entries)
    if not isinstance(tokens, int):
        return
    for start in range(0, len(entries), tokens):
        yield [entry // page for entry in entries[start : start + tokens] if entry >= 0]


rules.shared(13, "epsilon", norms.epsilon)


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """The caches have their types and shapes as inputs. k_rope and c_kv have the type of kv and its
    shape, with the widths of the rows that go into k_cache and into ckv_cache."""
    kv, value = inputs["kv"], inputs.get("v")
    shape = shape_of(kv, 4)
    key = shape[3] if value is not None else shape_of(inputs["cos"], 4)[3]
    latent = shape_of(inputs["gamma"], 1)[0] if value is None else shape_of(value, 4)[3]
    return {
        **{name: TensorInfo(inputs[name].dtype, inputs[name].shape) for name in _QUANTISED},
        "k_rope": TensorInfo(kv.dtype, (*shape[:3], key)),
        "c_kv": TensorInfo(kv.dtype, (*shape[:3], latent)),
    }


OPERATOR = Operator(
    variants=(PROTO.OP_END_FACTORY_REG(),),
    infer=infer,
    rules=rules,
    kernel=None,
    is_attention=False,
)
