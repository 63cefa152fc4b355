"""The checks that FlashAttentionScore and its gradient share."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from fa_compiler.op_registry.constraints.core import CheckedNode, both_or_none, number, out_of_range, size_text, text
from fa_compiler.op_registry.diagnostic import Diagnostic, Stage
from fa_compiler.op_registry.dtypes import FLOATS
from fa_compiler.op_registry.geometry import BATCH_AXIS, LAYOUTS, SEQUENCE_AXIS, Shape, differ, divide, shape_of
from fa_compiler.op_registry.node import Dim

FP8 = ("DT_HIFLOAT8", "DT_FLOAT8_E5M2", "DT_FLOAT8_E4M3FN")
FP8_SCALES = ("d_scale_q", "d_scale_k", "d_scale_v", "d_scale_dy", "d_scale_o", "ds_scale", "p_scale")
COMPRESSED_ROWS = 1024
MASK_SIZE = {
    2: (2048, 2048),
    3: (2048, 2048),
    4: (2048, 2048),
    6: (3072, 2048),
    7: (2048, 2048),
    8: (2048, 2048),
}
"""The last two dimensions of atten_mask in the compressed sparse modes."""

MAX_D, MAX_N, MAX_B, MAX_S = 768, 256, 2 << 20, 1 << 20


@cache
def compressed_mask(mode: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """The content that atten_mask must have in a compressed sparse mode. True marks an excluded position.

    In modes 2, 3, 4, 7 and 8 it is a matrix of 2048 x 2048, True above the diagonal. In mode 6 the same matrix is
    followed by 1024 rows whose left half is False and whose right half is True. Every call returns the same read-only
    array.
    """
    mask = np.triu(np.ones((2048, 2048), np.bool_), 1)
    if mode == 6:
        lower = np.zeros((1024, 2048), np.bool_)
        lower[:, 1024:] = True
        mask = np.concatenate([mask, lower])
    mask.setflags(write=False)
    return mask


def equal_types(call: CheckedNode, names: tuple[str, ...]) -> Iterator[Diagnostic]:
    """The named inputs have one type: a float, or an 8-bit float on 950 with its scales."""
    first = call.dtype(names[0])
    for name in names[1:]:
        dtype = call.dtype(name)
        if first in (*FLOATS, *FP8) and dtype and dtype != first:
            yield Diagnostic(name, f"{name} is {dtype}, expected {first} as {names[0]}", "aclnn")
    if first is None or first in FLOATS:
        for scale in FP8_SCALES if first is not None and call.product is None else ():
            if call[scale] is not None:
                message = f"{scale} is given beside a {names[0]} of type {first}, expected none: it scales 8-bit floats"
                yield Diagnostic(scale, message, "document")
        return
    allowed = ", ".join(FLOATS)
    if first not in FP8:
        yield Diagnostic(names[0], f"{names[0]} is {first}, expected one of {allowed}", "aclnn")
    elif not call.on("950"):
        yield Diagnostic(names[0], f"{names[0]} is {first}, which only 950 takes; expected one of {allowed}", "aclnn")
    else:
        for scale in ("d_scale_q", "d_scale_k", "d_scale_v"):
            if call[scale] is None:
                yield Diagnostic(scale, f"{scale} is absent, expected with a query of type {first}", "aclnn")


def layout_and_ranks(call: CheckedNode) -> Iterator[Diagnostic]:
    """input_layout is known, and query, key and value have the rank of the layout."""
    layout = call.attr("input_layout")
    if layout not in LAYOUTS:
        yield Diagnostic("input_layout", f"input_layout is {layout!r}, expected one of {', '.join(LAYOUTS)}", "aclnn")
        return
    for name in ("query", "key", "value"):
        rank = call.rank(name)
        if rank is not None and rank != LAYOUTS[layout]:
            yield Diagnostic(name, f"{name} has rank {rank}, expected {LAYOUTS[layout]} for {layout}", "aclnn")


def head_count(call: CheckedNode) -> Iterator[Diagnostic]:
    """head_num is positive and equals the head count of query."""
    head_num, layout = call.attr("head_num"), call.attr("input_layout")
    if layout not in LAYOUTS:
        return
    if head_num <= 0:
        yield Diagnostic("head_num", f"head_num is {head_num}, expected a positive number", "aclnn")
        return
    shape = shape_of(call["query"], LAYOUTS[layout])
    if layout in ("BSH", "SBH"):
        width = shape[2]
        if isinstance(width, int) and width % head_num:
            yield Diagnostic("head_num", f"head_num is {head_num}, expected a divisor of the width {width} of query")
        return
    heads = shape[{"BSND": 2, "BNSD": 1, "TND": 1}[layout]]
    # A query without heads is empty. Nothing is computed then, so head_num does not matter.
    if heads != 0 and differ(heads, head_num):
        yield Diagnostic("head_num", f"head_num is {head_num}, expected {heads}, the head count of query", "aclnn")


def head_sizes(call: CheckedNode, wider: str | None = None) -> Iterator[Diagnostic]:
    """query and key have the same D, which is at most 768. Dv is at most D; the extension `wider` also allows a larger
    Dv."""
    g = call.geometry
    rank = LAYOUTS.get(g.layout, 0)
    if rank and g.layout not in ("BSH", "SBH"):
        d_query, d_key = shape_of(call["query"], rank)[-1], shape_of(call["key"], rank)[-1]
        if differ(d_query, d_key):
            yield Diagnostic("key", f"key has the head size {d_key}, expected {d_query} as query", "aclnn")
    if isinstance(g.n2, int) and g.layout in ("BSH", "SBH"):
        width = shape_of(call["value"], rank)[2]
        if isinstance(width, int) and (width % g.n2 if g.n2 else width):
            wanted = f"a multiple of its {g.n2} heads" if g.n2 else "0: key has no heads"
            yield Diagnostic("value", f"value has the width {width}, expected {wanted}")
    if isinstance(g.d, int) and isinstance(g.dv, int) and g.dv > g.d:
        message = f"value has the head size {g.dv}, expected at most {g.d}, that of key"
        yield Diagnostic("value", message, "aclnn", extension=wider if g.dv <= MAX_D else None)
    if isinstance(g.d, int) and g.d > MAX_D:
        yield Diagnostic("query", f"query has the head size {g.d}, expected at most {MAX_D}", "aclnn")


def head_groups(call: CheckedNode) -> Iterator[Diagnostic]:
    """N1 is a multiple of N2 and in the documented range."""
    g = call.geometry
    rank = LAYOUTS.get(g.layout, 0)
    if g.layout in ("BSH", "SBH") and isinstance(g.d, int):
        width = shape_of(call["key"], rank)[2]
        if isinstance(width, int) and (width % g.d if g.d else width):
            wanted = f"a multiple of the head size {g.d}" if g.d else "0: query has the head size 0"
            yield Diagnostic("key", f"key has the width {width}, expected {wanted}")
    if isinstance(g.n1, int) and isinstance(g.n2, int) and g.n2 and g.n1 % g.n2:
        yield Diagnostic("key", f"key has {g.n2} heads, expected a divisor of the {g.n1} heads of query")
    if isinstance(g.n1, int) and g.n1 > MAX_N:
        yield out_of_range("query", "head count", g.n1, MAX_N, "document")


def batch_and_sequence(call: CheckedNode, prefix_batch: int) -> Iterator[Diagnostic]:
    """query, key and value have one batch size, and key and value differ in D only. The sizes are in the documented
    ranges. `prefix_batch` is the largest batch size of a call with a prefix."""
    g = call.geometry
    rank = LAYOUTS.get(g.layout, 0)
    if not rank:
        return
    yield from _one_batch(call)
    k, v = (shape_of(call[name], rank) for name in ("key", "value"))
    names = {"BSH": "BS", "SBH": "SB", "BSND": ("B", "S", "N2"), "BNSD": ("B", "N2", "S"), "TND": ("T", "N2")}
    for axis, what in enumerate(names[g.layout]):
        if what != "B" and not (what == "S" and given_key_length(call)) and differ(k[axis], v[axis]):
            yield Diagnostic("value", f"value has {v[axis]} as {what}, expected {k[axis]} as key: {text(k)}")
    if isinstance(g.b, int) and g.b > MAX_B:
        yield out_of_range("query", "batch size", g.b, MAX_B, "document")
    elif isinstance(g.b, int) and g.b > prefix_batch and call["prefix"] is not None:
        yield out_of_range("query", "batch size beside a prefix", g.b, prefix_batch, "document")
    for name, size in (("query", g.t1 if g.tnd else g.s1), ("key", g.t2 if g.tnd else g.s2)):
        if isinstance(size, int) and size > MAX_S:
            yield out_of_range(name, "sequence length", size, MAX_S, "document")


def _one_batch(call: CheckedNode) -> Iterator[Diagnostic]:
    """query, key and value have one batch size. Where an extension allows it, a tensor may have batch 1 instead."""
    g = call.geometry
    axis = BATCH_AXIS.get(g.layout)
    if axis is None:
        return
    sizes = {name: shape_of(call[name], LAYOUTS[g.layout])[axis] for name in ("query", "key", "value")}
    for name, size in sizes.items():
        if not differ(size, g.b):
            continue
        like = next(other for other in sizes if sizes[other] == g.b)
        extension = call.extension("EXT-BATCH-BROADCAST") if size == 1 else None
        yield Diagnostic(name, f"{name} has the batch size {size}, expected {g.b} as {like}", extension=extension)
        if extension is None:
            return


def keep_probability(call: CheckedNode) -> Iterator[Diagnostic]:
    """keep_prob is in (0, 1]."""
    keep = call.attr("keep_prob")
    if not 0.0 < keep <= 1.0:
        yield Diagnostic("keep_prob", f"keep_prob is {keep}, expected a number above 0 and at most 1")


def pse_type_known(call: CheckedNode, shift: str) -> Iterator[Diagnostic]:
    """pse_type is 0 to 3. It is 1 if there is no bias."""
    kind = call.attr("pse_type")
    if kind not in (0, 1, 2, 3):
        yield Diagnostic("pse_type", f"pse_type is {kind}, expected 0, 1, 2 or 3")
    elif kind != 1 and call[shift] is None:
        stage: Stage = "aclnn" if kind in (2, 3) else "tiling"
        yield Diagnostic(shift, f"{shift} is absent although pse_type is {kind}, expected pse_type 1", stage)


def bias_type(call: CheckedNode, shift: str) -> Iterator[Diagnostic]:
    """The bias of pse_type 0 and 1 has the type of query."""
    bias, query = call.dtype(shift), call.dtype("query")
    if call.attr("pse_type") in (0, 1) and bias and query and bias != query:
        wide = bias == "DT_FLOAT" and query in ("DT_FLOAT16", "DT_BF16")
        message = f"{shift} is {bias}, expected {query} as query"
        yield Diagnostic(shift, message, "aclnn", extension="EXT-SHIFT-FLOAT" if wide else None)


def inner_pse(call: CheckedNode, shift: str) -> Iterator[Diagnostic]:
    """The slopes of pse_type 2 and 3 have their type and shape, and are used only where they are allowed."""
    if call.attr("pse_type") in (2, 3) and call[shift] is not None:
        yield from _slopes(call, shift)
        yield from _inner_pse_positions(call, shift)


def _slopes(call: CheckedNode, shift: str) -> Iterator[Diagnostic]:
    """The slopes of pse_type 2 and 3 are float32 and have the shape [N1] or [B,N1]."""
    g, tensor = call.geometry, call[shift]
    if tensor is None:
        return
    kind = call.attr("pse_type")
    if tensor.dtype and tensor.dtype != "DT_FLOAT":
        yield Diagnostic(shift, f"{shift} is {tensor.dtype}, expected DT_FLOAT slopes for pse_type {kind}", "aclnn")
    if tensor.shape is None:
        return
    expected = (g.n1,) if len(tensor.shape) == 1 else (g.b, g.n1)
    if len(tensor.shape) not in (1, 2) or any(map(differ, tensor.shape, expected)):
        wanted = f"{text((g.n1,))} or {text((g.b, g.n1))}"
        yield Diagnostic(shift, f"{shift} has the shape {text(tensor.shape)}, expected slopes {wanted}")


def _inner_pse_positions(call: CheckedNode, shift: str) -> Iterator[Diagnostic]:
    """Where slopes (pse_type 2 and 3) may be used. Outside TND they need S1 == S2. In TND with a mask, sparse_mode 7
    excludes them, and in sparse_mode 8 the queries and keys of each sequence must end at the same position."""
    g, mode = call.geometry, call.attr("sparse_mode")
    slopes_here = f"{shift} holds slopes of pse_type {call.attr('pse_type')}"
    if not g.tnd and differ(g.s1, g.s2):
        yield Diagnostic(shift, f"{slopes_here} for {g.s1} queries and {g.s2} keys, expected as many of both")
    if not g.tnd or call["atten_mask"] is None:
        return
    if mode == 7:
        yield Diagnostic(shift, f"{slopes_here} in sparse_mode 7, expected pse_type 0 or 1")
    if mode == 8 and g.q_lens and g.kv_lens:
        pairs = list(zip(g.q_lens, g.kv_lens, strict=True))
        if unequal := [i for i, (q, k) in enumerate(pairs) if i and q != k]:
            q, k = pairs[unequal[0]]
            message = f"{slopes_here} in sparse_mode 8 where sequence {unequal[0]} has {q} queries and {k} keys"
            yield Diagnostic(shift, f"{message}, expected as many of both")
        starts = [call.content(name) if call[name] else [0] for name in ("q_start_idx", "kv_start_idx")]
        if starts[0] and starts[1]:
            apart = g.q_lens[0] - g.kv_lens[0] + starts[0][0] - starts[1][0]
            if apart:
                message = f"{slopes_here} in sparse_mode 8 where sequence 0 ends {apart} positions after its keys"
                yield Diagnostic(shift, f"{message}, expected 0")


def sparse_mode_known(call: CheckedNode) -> Iterator[Diagnostic]:
    """sparse_mode is one of the modes of the layout. Without atten_mask the mode is ignored."""
    mode = call.attr("sparse_mode")
    if call["atten_mask"] is None or call.attr("input_layout") not in LAYOUTS:
        return
    modes = (0, 1, 2, 3, 4, 6, 7, 8) if call.geometry.tnd else tuple(range(7))
    if mode not in modes:
        listed = ", ".join(map(str, modes))
        layout = call.geometry.layout
        yield Diagnostic("sparse_mode", f"sparse_mode is {mode}, expected one of {listed} for {layout}")


def masked_bias(call: CheckedNode, bias: str) -> Iterator[Diagnostic]:
    """cpu_masked_bias needs a mask and the bias, which is the input `bias`."""
    for name in ("atten_mask", bias) if call.attrs.get("cpu_masked_bias") == "added" else ():
        if call[name] is None:
            yield Diagnostic("cpu_masked_bias", f"cpu_masked_bias is 'added' without {name}, expected ''")


def mask_batch(call: CheckedNode, size: Dim) -> Dim:
    """The batch size that a mask or bias with this batch size has to have: that of the operands, or with cpu_mask_batch
    its own, if that divides it."""
    batch = call.geometry.b
    if call.attrs.get("cpu_mask_batch") != "repeated" or call.geometry.tnd:
        return batch
    divides = isinstance(size, int) and isinstance(batch, int) and size > 0 and batch % size == 0
    return size if divides else batch


def packed_mask_batch(call: CheckedNode) -> Iterator[Diagnostic]:
    """cpu_mask_batch needs a layout with a batch."""
    if call.attrs.get("cpu_mask_batch") == "repeated" and call.geometry.tnd:
        yield Diagnostic("cpu_mask_batch", "cpu_mask_batch is 'repeated' in TND, expected ''")


def mask_shape(call: CheckedNode, broadcast: str | None) -> Iterator[Diagnostic]:
    """atten_mask has the type and shape that sparse_mode requires, and in the compressed modes also the content.

    `broadcast` is the extension that also allows 1 in any dimension. Where it is None, a mask of the keys beside a band
    (EXT-BAND-MASK) is refused as well.
    """
    g, mask, mode = call.geometry, call["atten_mask"], call.attr("sparse_mode")
    if mask is None:
        return
    if mask.dtype and mask.dtype not in ("DT_BOOL", "DT_UINT8"):
        yield Diagnostic("atten_mask", f"atten_mask is {mask.dtype}, expected DT_BOOL or DT_UINT8")
    shape = mask.shape
    if shape is None or any(sparse_mode_known(call)):
        return
    if len(shape) not in (2, 4):
        yield Diagnostic("atten_mask", f"atten_mask has rank {len(shape)}, expected 2 or 4")
        return
    if mode in MASK_SIZE:
        size = MASK_SIZE[mode]
        if any(map(differ, shape[-2:], size)):
            message = f"atten_mask has the shape {text(shape)}, expected {text(size)} for sparse_mode {mode}"
            beside_band = broadcast is not None and _is_key_mask(call, shape)
            yield Diagnostic("atten_mask", message, extension="EXT-BAND-MASK" if beside_band else None)
        elif mask.value is not None and not _is_compressed(mask.value, mode):
            what = "ones above the diagonal" if mode != 6 else "the upper triangle over the prefix block"
            yield Diagnostic("atten_mask", f"atten_mask does not hold {what}, as expected for sparse_mode {mode}")
        return
    if g.tnd:
        yield from _packed_mask_shape(call, shape)
        return
    batch = mask_batch(call, shape[0]) if len(shape) == 4 else g.b
    full: Shape = (batch, g.n1, g.s1, g.s2)
    forms = [(g.s1, g.s2)] if len(shape) == 2 else [full, (batch, 1, g.s1, g.s2), (1, 1, g.s1, g.s2)]
    if any(not any(map(_does_not_match, shape, form)) for form in forms):
        return
    wanted = " or ".join(map(text, forms))
    message = f"atten_mask has the shape {text(shape)}, expected {wanted}"
    if any(size != 1 and differ(size, whole) for size, whole in zip(shape, full[-len(shape) :], strict=True)):
        yield Diagnostic("atten_mask", message)
    else:
        yield Diagnostic("atten_mask", message, extension=broadcast)


def _is_compressed(value: np.ndarray[Any, Any], mode: int) -> bool:
    """Whether a mask has the content that a compressed mode requires. The array of `compressed_mask` itself is not
    compared."""
    wanted = compressed_mask(mode)
    return value is wanted or bool(((value != 0) == wanted).all())


def _is_key_mask(call: CheckedNode, shape: Shape) -> bool:
    """Whether a mask may be used in addition to a band: it is the same for every query row, [B|1,N1|1,1,S2|1]."""
    g = call.geometry
    if call.attr("sparse_mode") not in (2, 3, 4) or g.tnd or len(shape) != 4 or shape[2] != 1:
        return False
    full = (mask_batch(call, shape[0]), g.n1, 1, g.s2)
    return not any(size != 1 and differ(size, whole) for size, whole in zip(shape, full, strict=True))


def _does_not_match(found: Dim, wanted: Dim) -> bool:
    """Whether a dimension is not the one wanted. If the wanted size is unknown, only a dimension of 1 is reported."""
    if found == 1:
        return wanted != 1
    return differ(found, wanted)


def _packed_mask_shape(call: CheckedNode, shape: Shape) -> Iterator[Diagnostic]:
    """A mask of packed sequences is [S1,S2] of the longest sequences or of all tokens; [1,1,S1,S2] is the same."""
    g = call.geometry
    if not g.q_lens or not g.kv_lens:
        return
    forms = ((max(g.q_lens), max(g.kv_lens)), (sum(g.q_lens), sum(g.kv_lens)))
    leading = any(differ(size, 1) for size in shape[:-2])
    if leading or all(any(map(differ, shape[-2:], form)) for form in forms):
        wanted = " or ".join(map(text, forms))
        yield Diagnostic("atten_mask", f"atten_mask has the shape {text(shape)}, expected {wanted}")


def causal(call: CheckedNode) -> bool:
    """Whether the mask may be a lower triangle, as compressed ALiBi requires."""
    g, mode = call.geometry, call.attr("sparse_mode")
    if call["atten_mask"] is None:
        return False
    pre, nxt = call.attr("pre_tockens"), call.attr("next_tockens")
    if mode == 0:
        size = max(g.q_lens, default=0) if g.q_lens else g.s1
        return bool(nxt == 0 and (not isinstance(size, int) or pre >= size))
    if mode == 4 and g.tnd:
        longest = max(g.kv_lens, default=0) if g.kv_lens else 0
        return bool(nxt == 0 and pre >= longest)
    return mode in (2, 3)


def bias_shape(call: CheckedNode, shift: str, broadcast: str | None, one_row: bool) -> Iterator[Diagnostic]:
    """Outside TND, the bias of pse_type 0 and 1 is [B|1,N1,S1|1,S2], or its last 1024 rows (compressed ALiBi).

    `broadcast` is the extension that also allows 1 in any dimension. `one_row` says whether [1,N1,1,S2] is legal if the
    batch is larger than 1.
    """
    g, tensor = call.geometry, call[shift]
    if tensor is None or tensor.shape is None:
        return
    shape = tensor.shape
    if len(shape) != 4:
        yield Diagnostic(shift, f"{shift} has rank {len(shape)}, expected 4")
        return
    wanted = f"[{size_text(g.b)} or 1,{size_text(g.n1)},{size_text(g.s1)} or 1,{size_text(g.s2)}]"
    message = f"{shift} has the shape {text(shape)}, expected {wanted}"
    if shape[2] == COMPRESSED_ROWS and isinstance(g.s1, int) and g.s1 != COMPRESSED_ROWS:
        yield from _compressed_bias(call, shift)
        shape = (shape[0], shape[1], g.s1, shape[3])
    full: Shape = (mask_batch(call, shape[0]), g.n1, g.s1, g.s2)
    if any(size != 1 and differ(size, whole) for size, whole in zip(shape, full, strict=True)):
        yield Diagnostic(shift, message)
    elif any(shape[axis] == 1 and full[axis] != 1 for axis in (1, 3)):
        yield Diagnostic(shift, message, extension=broadcast)
    elif not one_row and shape[0] == shape[2] == 1 and g.b != 1 and g.s1 != 1:
        yield Diagnostic(shift, f"{message}, not 1 in both", extension=broadcast)


def _compressed_bias(call: CheckedNode, shift: str) -> Iterator[Diagnostic]:
    """Compressed ALiBi needs at least 1024 queries, the same number of keys, and a causal mask."""
    g = call.geometry
    rows = f"{shift} has {COMPRESSED_ROWS} rows (compressed ALiBi)"
    if isinstance(g.s1, int) and g.s1 < COMPRESSED_ROWS:
        yield Diagnostic(shift, f"{rows} although query has {g.s1} positions, expected at least {COMPRESSED_ROWS}")
    elif differ(g.s1, g.s2):
        yield Diagnostic(shift, f"{rows} and query has {g.s1} positions, expected as many keys, found {g.s2}")
    elif not causal(call):
        yield Diagnostic(shift, f"{rows}, expected a causal atten_mask: sparse_mode 2, 3, or 0 with next_tockens 0")


def packed_bias_shape(call: CheckedNode, shift: str, flat_rank_one: bool) -> Iterator[Diagnostic]:
    """In TND, the bias of pse_type 0 and 1 is compressed, [B|1,N1,1024,maxS2], or flat over the sequences.

    The flat form has N1*sum(S2) or N1*sum(S1*S2) elements. In the forward operator they are dimension 0 of a tensor of
    rank 2 or more, in the backward operator a tensor of rank 1 (`flat_rank_one`).
    """
    g, tensor = call.geometry, call[shift]
    if tensor is None:
        return
    if g.q_lens and g.kv_lens and 0 in (*g.q_lens, *g.kv_lens):
        message = f"{shift} is given although a sequence is empty, expected none"
        yield Diagnostic(shift, message, "document", extension="EXT-EMPTY-SEQUENCES")
    if tensor.shape is None:
        return
    shape = tensor.shape
    if len(shape) == 4 and shape[2] == COMPRESSED_ROWS:
        longest = max(g.kv_lens) if g.kv_lens else None
        if differ(shape[1], g.n1) or differ(shape[3], longest) or (shape[0] != 1 and differ(shape[0], g.b)):
            form = text((g.b, g.n1, COMPRESSED_ROWS, longest))
            yield Diagnostic(shift, f"{shift} has the shape {text(shape)}, expected {form}, or 1 for the batch")
        elif not causal(call):
            message = f"{shift} has {COMPRESSED_ROWS} rows (compressed ALiBi), expected a causal atten_mask"
            yield Diagnostic(shift, message)
        elif g.q_lens and g.kv_lens and g.q_lens != g.kv_lens:
            message = f"{shift} has {COMPRESSED_ROWS} rows (compressed ALiBi), expected equal lengths of query and key"
            yield Diagnostic(shift, message)
        return
    fits = len(shape) == 1 if flat_rank_one else len(shape) >= 2
    rank = "rank 1" if flat_rank_one else "rank 2 or more"
    if not fits:
        yield Diagnostic(shift, f"{shift} has the shape {text(shape)}, expected {rank}, or [B,N1,1024,maxS2]")
    elif g.q_lens and g.kv_lens and isinstance(g.n1, int):
        pairs = sum(q * k for q, k in zip(g.q_lens, g.kv_lens, strict=True))
        sizes = (g.n1 * sum(g.kv_lens), g.n1 * pairs)
        if all(differ(shape[0], size) for size in sizes):
            message = f"{shift} has {shape[0]} as dimension 0, expected {sizes[0]} or {sizes[1]} elements"
            yield Diagnostic(shift, message)
        elif any(size != 1 for size in shape[1:]):
            yield Diagnostic(shift, f"{shift} has the shape {text(shape)}, expected all elements on dimension 0")
        elif sizes[0] == sizes[1] and any(q != 1 for q in g.q_lens):
            yield Diagnostic(shift, f"{shift} could be one row or a matrix for each sequence with these lengths")


def band(call: CheckedNode) -> Iterator[Diagnostic]:
    """Outside TND, in sparse_mode 0 and 4, the band of pre_tockens and next_tockens overlaps the scores. The CPU kernel
    also takes a band that misses them: its query rows then have no keys."""
    outside = call.extension("EXT-BAND-OUTSIDE")
    for tensor, message in _band_faults(call):
        yield Diagnostic(tensor, message, extension=outside)


def _band_faults(call: CheckedNode) -> Iterator[tuple[str, str]]:
    g, mode = call.geometry, call.attr("sparse_mode")
    if call["atten_mask"] is None or mode not in (0, 4) or not isinstance(g.s1, int) or not isinstance(g.s2, int):
        return
    pre, nxt = call.attr("pre_tockens"), call.attr("next_tockens")
    shift = g.s2 - g.s1 if mode == 4 else 0
    # The scores that the band allows have -left <= j - i <= right.
    left, right = pre - shift, nxt + shift
    where = f"pre_tockens {pre} and next_tockens {nxt} in sparse_mode {mode}"
    if left < 0 and right < 0:
        yield "pre_tockens", f"{where} both lie outside, expected a band that meets the scores"
    elif left < 0 and (right < -left or -left >= g.s2):
        yield "pre_tockens", f"{where} leave an empty band, expected {-left} or more to the right of it"
    elif right < 0 and (left < -right or -right >= g.s1):
        yield "next_tockens", f"{where} leave an empty band, expected {-right} or more to the left of it"


def packed_band(call: CheckedNode) -> Iterator[Diagnostic]:
    """The limits that the sparse modes of TND put on the sequence lengths and on pre_tockens and next_tockens. The CPU
    kernel has none of these limits."""
    outside = call.extension("EXT-BAND-OUTSIDE")
    for tensor, message in _packed_band_faults(call):
        yield Diagnostic(tensor, message, extension=outside)


def _packed_band_faults(call: CheckedNode) -> Iterator[tuple[str, str]]:
    """The faults by mode; q and k are the queries and keys of a sequence that has queries.

    mode 0      next_tockens >= 0; k + pre_tockens >= q, unless the band reaches beyond every length
    modes 3, 7  q <= k
    mode 4      pre_tockens >= 0 and pre_tockens + next_tockens >= 0; next_tockens >= q - k
    mode 7      the last sequence: pre_tockens >= k and q - k <= next_tockens <= 0
    mode 8      the first sequence: pre_tockens >= k and next_tockens >= q - k
    """
    g, mode = call.geometry, call.attr("sparse_mode")
    pre, nxt = call.attr("pre_tockens"), call.attr("next_tockens")
    if call["atten_mask"] is None or not g.q_lens or not g.kv_lens:
        return
    pairs = [(i, q, k) for i, (q, k) in enumerate(zip(g.q_lens, g.kv_lens, strict=True)) if q]
    if not pairs:
        return
    if mode == 0:
        unbounded = pre >= max(g.q_lens) and (nxt == 0 or nxt >= max(g.kv_lens))
        if nxt < 0:
            yield "next_tockens", f"next_tockens is {nxt}, expected 0 or more in sparse_mode 0 of TND"
        elif not unbounded and (bad := [i for i, q, k in pairs if k + pre < q]):
            message = f"pre_tockens {pre} leaves rows of sequence {bad[0]} without keys, expected a longer band"
            yield "pre_tockens", message
    if mode in (3, 7) and (longer := [(i, q, k) for i, q, k in pairs if q > k]):
        i, q, k = longer[0]
        message = (
            f"actual_seq_qlen gives sequence {i} {q} queries for {k} keys, expected at least as many keys "
            f"in sparse_mode {mode}"
        )
        yield "actual_seq_qlen", message
    if mode == 4:
        if pre < 0 or (nxt < 0 and pre + nxt < 0):
            message = f"pre_tockens is {pre} and next_tockens {nxt}, expected pre_tockens and their sum to be >= 0"
            yield "pre_tockens", message
        elif beyond := [i for i, q, k in pairs if q - nxt > k]:
            yield "next_tockens", f"next_tockens {nxt} leaves rows of sequence {beyond[0]} without keys"
    if mode in (7, 8):
        i, q, k = pairs[-1] if mode == 7 else pairs[0]
        if pre < k:
            yield "pre_tockens", f"pre_tockens is {pre}, expected at least {k}, the keys of sequence {i}"
        if (mode == 7 and nxt > 0) or q - nxt > k:
            bound = "0 or less and " if mode == 7 else ""
            yield "next_tockens", f"next_tockens is {nxt}, expected {bound}at least {q - k} for sequence {i}"


def prefix_lengths(call: CheckedNode) -> Iterator[Diagnostic]:
    """prefix holds one length for each sequence, in range. sparse_mode 6 needs a prefix. sparse_mode 5 needs a mask for
    each batch entry."""
    g, mode, tensor = call.geometry, call.attr("sparse_mode"), call["prefix"]
    if call["atten_mask"] is None or mode not in (5, 6):
        return
    if mode == 5 and not g.tnd and g.b != 1:
        shape = shape_of(call["atten_mask"], 4)
        if call.rank("atten_mask") == 2 or (shape[0] == 1 and isinstance(g.b, int)):
            forms = f"{text((g.b, g.n1, g.s1, g.s2))} or {text((g.b, 1, g.s1, g.s2))}"
            message = f"atten_mask is shared by the batch, expected {forms} in sparse_mode 5"
            yield Diagnostic("atten_mask", message, extension="EXT-MASK-BROADCAST")
    if tensor is None:
        if mode == 6:
            yield Diagnostic("prefix", "prefix is absent, expected a length for each sequence in sparse_mode 6")
        return
    if tensor.shape is not None and (len(tensor.shape) != 1 or differ(tensor.shape[0], g.b)):
        yield Diagnostic("prefix", f"prefix has the shape {text(tensor.shape)}, expected {text((g.b,))}")
        return
    given = call.content("prefix")
    if mode == 5 or given is None:
        return
    sizes: list[tuple[int, int]] = []
    if g.tnd:
        sizes = list(zip(g.q_lens or (), g.kv_lens or (), strict=False))
    elif isinstance(g.s1, int) and isinstance(g.s2, int):
        sizes = [(g.s1, g.s2)] * len(given)
    for index, (length, (s1, s2)) in enumerate(zip(given, sizes, strict=False)):
        low = max(s2 - s1, 0)
        if s1 and not low <= length <= s2:  # without queries the prefix has no effect
            yield Diagnostic("prefix", f"prefix of sequence {index} is {length}, expected {low} to {s2}")
            return


def dropout(call: CheckedNode) -> Iterator[Diagnostic]:
    """drop_mask has a bit for each score, and is given if keep_prob is below 1."""
    yield from _drop_bytes(call)
    keep = call.attr("keep_prob")
    if 0.0 < keep < 1.0 and call["drop_mask"] is None and not call.on("950"):
        message = f"drop_mask is absent although keep_prob is {keep}, expected one: only 950 draws its own"
        yield Diagnostic("drop_mask", message, "document")


def _drop_bytes(call: CheckedNode) -> Iterator[Diagnostic]:
    """drop_mask is UINT8 and has at least one bit for each score."""
    g, tensor = call.geometry, call["drop_mask"]
    if tensor is None:
        return
    if tensor.dtype and tensor.dtype != "DT_UINT8":
        yield Diagnostic("drop_mask", f"drop_mask is {tensor.dtype}, expected DT_UINT8")
    bits = None
    if g.tnd and g.q_lens and g.kv_lens and isinstance(g.n1, int):
        bits = g.n1 * sum(q * k for q, k in zip(g.q_lens, g.kv_lens, strict=True))
    elif not g.tnd and all(isinstance(size, int) for size in (g.b, g.n1, g.s1, g.s2)):
        bits = int(np.prod([size for size in (g.b, g.n1, g.s1, g.s2) if isinstance(size, int)], dtype=object))
    if bits is None or tensor.shape is None or not all(isinstance(size, int) for size in tensor.shape):
        return
    found = int(np.prod([size for size in tensor.shape if isinstance(size, int)], dtype=object))
    if found < -(-bits // 8):
        message = f"drop_mask has {number(found)} bytes, expected at least {number(-(-bits // 8))}, a bit a score"
        yield Diagnostic("drop_mask", message)


def sink_shape(call: CheckedNode) -> Iterator[Diagnostic]:
    """sink is float32. If its rank is 1, it is [N1]."""
    g, tensor = call.geometry, call["sink"]
    if tensor is None:
        return
    if tensor.dtype and tensor.dtype != "DT_FLOAT":
        yield Diagnostic("sink", f"sink is {tensor.dtype}, expected DT_FLOAT", "aclnn")
    if tensor.shape is not None and len(tensor.shape) == 1 and differ(tensor.shape[0], g.n1):
        yield Diagnostic("sink", f"sink has the shape {text(tensor.shape)}, expected {text((g.n1,))}")


def starts(call: CheckedNode) -> Iterator[Diagnostic]:
    """The start indices are vectors, and their difference fits 32 bits. An absent start index is 0."""
    names = ("q_start_idx", "kv_start_idx")
    for name in names:
        if call.rank(name) not in (1, None):
            yield Diagnostic(name, f"{name} has rank {call.rank(name)}, expected 1")
    query, key = ([0] if call[name] is None else call.content(name) for name in names)
    if query and key and not -(2**31) <= key[0] - query[0] < 2**31:
        yield Diagnostic("kv_start_idx", f"kv_start_idx - q_start_idx is {key[0] - query[0]}, expected 32 bits")


def given_key_length(call: CheckedNode) -> bool:
    """Whether actual_seq_kvlen states the number of keys outside TND (EXT-KEY-LENGTH). key and value may then have more
    rows."""
    given = call["actual_seq_kvlen"] is not None and call.geometry.layout in SEQUENCE_AXIS
    return given and call.extension("EXT-KEY-LENGTH") is not None


def key_length(call: CheckedNode) -> Iterator[Diagnostic]:
    """Outside TND there are no lengths. With EXT-KEY-LENGTH, actual_seq_kvlen may be one number, which is at most the
    number of rows of key and of value."""
    g = call.geometry
    numbered = given_key_length(call)
    for name in ("actual_seq_qlen", "actual_seq_kvlen"):
        if call[name] is not None and g.layout in SEQUENCE_AXIS and not (numbered and name == "actual_seq_kvlen"):
            yield Diagnostic(
                name, f"{name} is given for {g.layout}, expected none: it has a meaning for TND only", "aclnn"
            )
    if not numbered:
        return
    name = "actual_seq_kvlen"
    sizes, content = shape_of(call[name], 1), call.content(name)
    if call.rank(name) not in (1, None) or differ(sizes[0], 1):
        yield Diagnostic(name, f"{name} has the shape {text(sizes)}, expected [1]")
        return
    for tensor in ("key", "value"):
        room = shape_of(call[tensor], LAYOUTS[g.layout])[SEQUENCE_AXIS[g.layout]]
        if content and isinstance(room, int) and not 0 <= content[0] <= room:
            yield Diagnostic(name, f"{name} is {content[0]}, expected 0 to {room}, the rows of {tensor}")
            return
    message = f"{name} is given for {g.layout}, expected none: it has a meaning for TND only"
    yield Diagnostic(name, message, "aclnn", extension="EXT-KEY-LENGTH")


def packed_lengths(call: CheckedNode) -> Iterator[Diagnostic]:
    """In TND, both cumulative lengths are given and have the same number of entries. They do not decrease, and they end
    within query and key."""
    g = call.geometry
    if not g.tnd:
        return
    for name in ("actual_seq_qlen", "actual_seq_kvlen"):
        if call[name] is None:
            yield Diagnostic(name, f"{name} is absent, expected cumulative lengths for TND")
        elif call.rank(name) not in (1, None):
            yield Diagnostic(name, f"{name} has rank {call.rank(name)}, expected 1")
    counts = [shape_of(call[name], 1)[0] for name in ("actual_seq_qlen", "actual_seq_kvlen")]
    if differ(*counts):
        yield Diagnostic(
            "actual_seq_kvlen", f"actual_seq_kvlen has {counts[1]} lengths, expected {counts[0]}, as query"
        )
    for name, tensor, total in (("actual_seq_qlen", "query", g.t1), ("actual_seq_kvlen", "key", g.t2)):
        ends = call.content(name)
        if not ends:
            continue
        used = ends[: max((i + 1 for i, end in enumerate(ends) if end), default=0)]
        if any(a > b for a, b in pairwise([0, *used])):
            yield Diagnostic(name, f"{name} is {ends}, expected cumulative lengths, which never shrink")
        elif isinstance(total, int) and max(ends) > total:
            yield Diagnostic(name, f"{name} ends at {max(ends)}, expected at most {total}, the positions of {tensor}")


def rope(call: CheckedNode, stage: Stage, code: int) -> Iterator[Diagnostic]:
    """Both rope inputs are given, or neither, and they are shaped as query and key."""
    yield from list(both_or_none(call, ("query_rope", "key_rope"), stage, code)) or _rope_shapes(call)


def _rope_shapes(call: CheckedNode) -> Iterator[Diagnostic]:
    """query_rope and key_rope have the types of query and key, and their shapes except for the last dimension."""
    for name, like in (("query_rope", "query"), ("key_rope", "key")):
        rope, base = call[name], call[like]
        if rope is None or base is None:
            continue
        if rope.dtype and base.dtype and rope.dtype != base.dtype:
            yield Diagnostic(name, f"{name} is {rope.dtype}, expected {base.dtype} as {like}", "document")
        if rope.shape is None or base.shape is None:
            continue
        heads = call.geometry.n1 if like == "query" else call.geometry.n2
        if call.geometry.layout in ("BSH", "SBH") and len(rope.shape) == 3 and isinstance(heads, int):
            width = rope.shape[2]
            if isinstance(width, int) and width % heads if heads else differ(width, 0):
                yield Diagnostic(
                    name, f"{name} has the width {width}, expected a multiple of its {heads} heads", "document"
                )
        apart = {axis for axis, sizes in enumerate(zip(rope.shape[:-1], base.shape, strict=False)) if differ(*sizes)}
        if name == "key_rope" and given_key_length(call):
            apart.discard(SEQUENCE_AXIS[call.geometry.layout])
        if len(rope.shape) != len(base.shape) or apart:
            wanted = text((*base.shape[:-1], "Dr"))
            yield Diagnostic(name, f"{name} has the shape {text(rope.shape)}, expected {wanted}", "document")
            return
    sizes = [_rope_size(call, name) for name in ("query_rope", "key_rope")]
    if differ(*sizes):
        yield Diagnostic(
            "key_rope", f"key_rope has the head size {sizes[1]}, expected {sizes[0]} as query_rope", "document"
        )


def _rope_size(call: CheckedNode, name: str) -> Dim:
    """The head size of a rope input, or None if it is unknown."""
    rope, g = call[name], call.geometry
    if rope is None or not rope.shape:
        return None
    heads = g.n1 if name == "query_rope" else g.n2
    return divide(rope.shape[-1], heads) if g.layout in ("BSH", "SBH") else rope.shape[-1]
