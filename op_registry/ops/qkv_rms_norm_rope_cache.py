"""QkvRmsNormRopeCache: RMSNorm and rotary positions of query and key out of one product, which go
to q_out and caches.

A row of qkv is one token: its query heads, its key heads and its value heads. The heads of query
and key are normalised with a weight each, and all of a head is rotated, whose halves are the pairs.
k_cache and v_cache get the row of a token at its entry of index, which counts the places of all
pages; -1 writes nothing. Their memory is that of NZ. What goes into a cache of INT8 is divided by a
scale and moved by an offset.

The outputs q_out, k_cache and v_cache are the inputs of these names, changed in place. The others
are what is written, before it is quantised, if is_output_qkv is set; otherwise their numbers mean
nothing. Its constraints are QRC.1 to QRC.11.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

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
from fa_compiler.op_registry.geometry import no_multiple, shape_of, shapes_differ
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.node import TensorInfo
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs

FLOATS = "DT_FLOAT16, DT_BF16"
CACHES = "DT_FLOAT16, DT_BF16, DT_INT8"
HALFS = ("DT_FLOAT16", "DT_BF16")
WIDTH = 128
"""The numbers of a head."""
_TITLES = (
    "qkv=q_gamma=k_gamma=cos=sin=q_out=q_out_before_quant=k_out_before_quant=v_out_before_quant index k_cache v_cache "
    "k_scale=v_scale=k_offset=v_offset"
)
_ROWS = [
    f"{wide} INT64 {key} {value} FLOAT"
    for wide in ("FLOAT16", "BF16")
    for key, value in product((wide, "INT8"), repeat=2)
]

PROTO = (
    REG_OP(
        "QkvRmsNormRopeCache",
        "proto_2026_07",
        source="mirror-cann/ops-transformer 3a280bcc (2026-07-21) posembedding/qkv_rms_norm_rope_cache/op_graph/"
        "qkv_rms_norm_rope_cache_proto.h; same, op_host/qkv_rms_norm_rope_cache_def.cpp; same, "
        "op_host/qkv_rms_norm_rope_cache_infershape.cpp; the document aclnnQkvRmsNormRopeCache",
        cann="9.1.0",
    )
    .INPUT("qkv", FLOATS)
    .INPUT("q_gamma", FLOATS)
    .INPUT("k_gamma", FLOATS)
    .INPUT("cos", FLOATS)
    .INPUT("sin", FLOATS)
    .INPUT("index", "DT_INT64")
    .INPUT("q_out", FLOATS)
    .INPUT("k_cache", CACHES)
    .INPUT("v_cache", CACHES)
    .OPTIONAL_INPUT("k_scale", "DT_FLOAT")
    .OPTIONAL_INPUT("v_scale", "DT_FLOAT")
    .OPTIONAL_INPUT("k_offset", "DT_FLOAT")
    .OPTIONAL_INPUT("v_offset", "DT_FLOAT")
    .OUTPUT("q_out", FLOATS)
    .OUTPUT("k_cache", CACHES)
    .OUTPUT("v_cache", CACHES)
    .OUTPUT("q_out_before_quant", FLOATS)
    .OUTPUT("k_out_before_quant", FLOATS)
    .OUTPUT("v_out_before_quant", FLOATS)
    .REQUIRED_ATTR("qkv_size", "ListInt", note="The sizes B, S, N and D of qkv.")
    .REQUIRED_ATTR("head_nums", "ListInt", note="The heads of query, key and value.")
    .ATTR("epsilon", "Float", 1e-6)
    .ATTR("cache_mode", "String", "PA_NZ")
    .ATTR("is_output_qkv", "Bool", False)
    .PRODUCT("ascend910b ascend910_93", "\n".join([_TITLES, *_ROWS]))
)

_CACHES = {"k_cache": ("k_scale", "k_offset"), "v_cache": ("v_scale", "v_offset")}
_NUMBERS = tuple(name for names in _CACHES.values() for name in names)
_SHOWN = ("q_out_before_quant", "k_out_before_quant", "v_out_before_quant")
_WIDE = ("qkv", "q_gamma", "k_gamma", "cos", "sin", "q_out")

rules = Rules("QRC", typed=(*_WIDE, "index", *_CACHES, *_NUMBERS))


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """qkv, q_gamma, k_gamma, cos, sin, q_out and the last three outputs have one type, FLOAT16 or
    BF16. index is INT64, and scales and offsets are FLOAT."""
    yield from one_type(call, (*_WIDE, *_SHOWN), HALFS)
    yield from fixed_types(call, {"index": "DT_INT64", **dict.fromkeys(_NUMBERS, "DT_FLOAT")})


@rules(2)
def cache_types(call: CheckedNode) -> Iterator[Diagnostic]:
    """k_cache and v_cache each have the type of qkv, or INT8."""
    wide = call.dtype("qkv")
    legal = (wide,) if wide in HALFS else HALFS
    for name in _CACHES:
        if (own := call.dtype(name)) and own not in (*legal, "DT_INT8"):
            yield Diagnostic(
                name,
                f"{name} is {own}, expected {' or '.join(map(str, legal))} or DT_INT8",
                "aclnn",
            )


rules.values(3, "cache_mode", ("PA_NZ",), "document")
rules.values(4, "is_output_qkv", (False,), "document")


@rules(5)
def sizes(call: CheckedNode) -> Iterator[Diagnostic]:
    """qkv_size has four numbers of at least 1, of which the last is 128. head_nums has three of at
    least 1. Their sum is the third of qkv_size. Key and value have one number of heads."""
    whole, heads = call.attr("qkv_size"), call.attr("head_nums")
    if len(whole) != 4 or min(whole) < 1:
        yield Diagnostic(
            "qkv_size", f"qkv_size is {list(whole)}, expected four numbers of at least 1"
        )
    elif whole[3] != WIDTH:
        yield Diagnostic("qkv_size", f"qkv_size ends with {whole[3]}, expected {WIDTH}")
    elif len(heads) != 3 or min(heads) < 1 or heads[1] != heads[2] or sum(heads) != whole[2]:
        wanted = (
            f"heads of query, key and value with the sum {whole[2]}, as many of value as of key"
        )
        yield Diagnostic("head_nums", f"head_nums is {list(heads)}, expected {wanted}")


@rules(6)
def shapes(call: CheckedNode) -> Iterator[Diagnostic]:
    """qkv is [B*S,N*D], q_gamma and k_gamma are [D], cos and sin [B*S,D], index is [B*S] and q_out
    [B*S,Nq*D]."""
    if any(sizes(call)):
        return
    batch, tokens, heads, width = call.attr("qkv_size")
    rows, query = batch * tokens, call.attr("head_nums")[0] * width
    expected = {"qkv": (rows, heads * width), "index": (rows,), "q_out": (rows, query)}
    expected |= dict.fromkeys(("q_gamma", "k_gamma"), (width,)) | dict.fromkeys(
        ("cos", "sin"), (rows, width)
    )
    for name, shape in expected.items():
        yield from shape_is(name, call[name], shape)


@rules(7)
def caches(call: CheckedNode) -> Iterator[Diagnostic]:
    """A cache is [pages,Nk*D/16,size,16], or with 32 in place of 16 if it is of INT8. Both have as
    many pages, of one size, which is a multiple of 16, or of 32 if one of them is of INT8."""
    if any(sizes(call)):
        return
    heads, width = call.attr("head_nums")[1], call.attr("qkv_size")[3]
    narrow = {name: call.dtype(name) == "DT_INT8" for name in _CACHES}
    for name, is_narrow in narrow.items():
        part = 32 if is_narrow else 16
        yield from shape_is(name, call[name], (None, heads * width // part, None, part))
    (pages, _, size, _), (others, _, other, _) = (shape_of(call[name], 4) for name in _CACHES)
    if shapes_differ((pages, size), (others, other)):
        found = f"v_cache has {text((others, other))} pages and tokens"
        yield Diagnostic("v_cache", f"{found}, expected {text((pages, size))} as k_cache")
    part = 32 if any(narrow.values()) else 16
    if no_multiple(size, part):
        yield Diagnostic(
            "k_cache", f"k_cache has pages of {size} tokens, expected a multiple of {part}"
        )


@rules(8)
def room(call: CheckedNode) -> Iterator[Diagnostic]:
    """There are pages for all tokens, if each batch entry begins with a page of its own."""
    pages, _, size, _ = shape_of(call["k_cache"], 4)
    if any(sizes(call)) or not isinstance(pages, int) or not isinstance(size, int) or size < 1:
        return
    batch, tokens = call.attr("qkv_size")[:2]
    if pages < (wanted := batch * -(-tokens // size)):
        yield Diagnostic(
            "k_cache",
            f"k_cache has {number(pages)} pages, expected at least {number(wanted)}",
            "document",
        )


@rules(9)
def quantisation(call: CheckedNode) -> Iterator[Diagnostic]:
    """A cache of INT8 has a scale, and only it, and no scale is 0. An offset stands beside a scale.
    Both are [Nk,D]."""
    for name, (scale, offset) in _CACHES.items():
        own, given = call.dtype(name), call[scale] is not None
        if own == "DT_INT8" and not given:
            yield Diagnostic(
                scale, f"{scale} is absent beside {name} of the type {own}, expected one"
            )
        elif own in HALFS and given:
            yield Diagnostic(
                scale, f"{scale} is given beside {name} of the type {own}, expected none"
            )
        if call[offset] is not None and not given:
            yield Diagnostic(offset, f"{offset} is given without {scale}, expected none")
    if not any(sizes(call)):
        expected = call.attr("head_nums")[1], call.attr("qkv_size")[3]
        for name in _NUMBERS:
            yield from shape_is(name, call[name], expected)


@rules(10)
def contents(call: CheckedNode) -> Iterator[Diagnostic]:
    """Where index is constant, its entries are -1 or places of the pages, and no place is named
    twice."""
    pages, _, size, _ = shape_of(call["k_cache"], 4)
    found = call.content("index")
    if found is None or not isinstance(pages, int) or not isinstance(size, int):
        return
    wrong = next((entry for entry in found if not -1 <= entry < pages * size), None)
    written = [entry for entry in found if entry >= 0]
    if wrong is not None:
        yield Diagnostic(
            "index",
            f"index has {number(wrong)}, expected -1 to {number(pages * size - 1)}",
            "document",
        )
    elif len({*written}) < len(written):
        yield Diagnostic("index", "index names a place twice, expected each once", "document")


rules.shared(11, "epsilon", norms.epsilon)


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """q_out and the caches have their types and shapes as inputs. The others have the type of qkv,
    and the heads of query, key or value of each token in a row."""
    rows, heads = shape_of(inputs["qkv"], 2)[0], attrs["head_nums"]
    width = attrs["qkv_size"][3] if len(attrs["qkv_size"]) == 4 else None
    counts = heads if len(heads) == 3 else (None,) * 3
    sizes_ = [
        count * width if count is not None and width is not None else None for count in counts
    ]
    shown = {
        name: TensorInfo(inputs["qkv"].dtype, (rows, size))
        for name, size in zip(_SHOWN, sizes_, strict=True)
    }
    kept = {
        name: TensorInfo(inputs[name].dtype, inputs[name].shape) for name in ("q_out", *_CACHES)
    }
    return kept | shown


OPERATOR = Operator(
    variants=(PROTO.OP_END_FACTORY_REG(),),
    infer=infer,
    rules=rules,
    kernel=None,
    is_attention=False,
)
