"""The checks that FlashAttentionScore and its gradient share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from fa_compiler.op_registry.constraints.core import (
    CheckedNode,
    both_or_none,
    number,
    out_of_range,
    shape_is,
    size_text,
    text,
)
from fa_compiler.op_registry.diagnostic import Diagnostic, Stage
from fa_compiler.op_registry.dtypes import FLOATS
from fa_compiler.op_registry.geometry import (
    BATCH_AXIS,
    LAYOUTS,
    SEQUENCE_AXIS,
    Geometry,
    PackedSequence,
    Shape,
    differ,
    divide,
    elements,
    exceeds,
    misfit,
    no_multiple,
    shape_of,
)
from fa_compiler.op_registry.node import Dim, TensorInfo

FP8 = ("DT_HIFLOAT8", "DT_FLOAT8_E5M2", "DT_FLOAT8_E4M3FN")
FP8_SCALES = (
    "d_scale_q",
    "d_scale_k",
    "d_scale_v",
    "d_scale_dy",
    "d_scale_o",
    "ds_scale",
    "p_scale",
)
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
    """The content that atten_mask must have in a compressed sparse mode. True marks an excluded
    position.

    In modes 2, 3, 4, 7 and 8 it is a matrix of 2048 x 2048, True above the diagonal. In mode 6 the
    same matrix is followed by 1024 rows whose left half is False and whose right half is True.
    Every call returns the same read-only array.
    """
    mask = np.triu(np.ones((2048, 2048), np.bool_), 1)
    if mode == 6:
        lower = np.zeros((1024, 2048), np.bool_)
        lower[:, 1024:] = True
        mask = np.concatenate([mask, lower])
    mask.setflags(write=False)
    return mask


def equal_types(call: CheckedNode, names: tuple[str, ...]) -> Iterator[Diagnostic]:
    """The inputs `names` have one type: a float, or an 8-bit float on 950 with its scales."""
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
        yield Diagnostic(
            names[0],
            f"{names[0]} is {first}, which only 950 takes; expected one of {allowed}",
            "aclnn",
        )
    else:
        for scale in ("d_scale_q", "d_scale_k", "d_scale_v"):
            if call[scale] is None:
                yield Diagnostic(
                    scale, f"{scale} is absent, expected with a query of type {first}", "aclnn"
                )


def layout_and_ranks(call: CheckedNode) -> Iterator[Diagnostic]:
    """input_layout is known, and query, key and value have the rank of the layout."""
    layout = call.attr("input_layout")
    if layout not in LAYOUTS:
        yield Diagnostic(
            "input_layout",
            f"input_layout is {layout!r}, expected one of {', '.join(LAYOUTS)}",
            "aclnn",
        )
        return
    for name in ("query", "key", "value"):
        rank = call.rank(name)
        if rank is not None and rank != LAYOUTS[layout]:
            yield Diagnostic(
                name, f"{name} has rank {rank}, expected {LAYOUTS[layout]} for {layout}", "aclnn"
            )


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
            yield Diagnostic(
                "head_num",
                f"head_num is {head_num}, expected a divisor of the width {width} of query",
            )
        return
    heads = shape[{"BSND": 2, "BNSD": 1, "TND": 1}[layout]]
    # A query without heads is empty. Nothing is computed then, so head_num does not matter.
    if heads != 0 and differ(heads, head_num):
        yield Diagnostic(
            "head_num",
            f"head_num is {head_num}, expected {heads}, the head count of query",
            "aclnn",
        )


def head_sizes(call: CheckedNode, wider: str | None = None) -> Iterator[Diagnostic]:
    """query and key have the same D, which is at most 768. Dv is at most D; the extension `wider`
    also allows a larger Dv."""
    g = call.geometry
    yield from _folded_value(call) if g.folded else _stated_head_sizes(call)
    if isinstance(g.d, int) and exceeds(g.dv, g.d):
        message = f"value has the head size {g.dv}, expected at most {g.d}, that of key"
        yield Diagnostic(
            "value", message, "aclnn", extension=None if exceeds(g.dv, MAX_D) else wider
        )
    if exceeds(g.d, MAX_D):
        yield Diagnostic(
            "query", f"query has the head size {g.d}, expected at most {MAX_D}", "aclnn"
        )


def _stated_head_sizes(call: CheckedNode) -> Iterator[Diagnostic]:
    """In a layout with a dimension D, query and key have the same one."""
    rank = LAYOUTS.get(call.geometry.layout)
    if rank is None:
        return
    d_query, d_key = shape_of(call["query"], rank)[-1], shape_of(call["key"], rank)[-1]
    if differ(d_query, d_key):
        yield Diagnostic(
            "key", f"key has the head size {d_key}, expected {d_query} as query", "aclnn"
        )


def _folded_value(call: CheckedNode) -> Iterator[Diagnostic]:
    """In BSH and SBH, the width of value is a multiple of N2."""
    g = call.geometry
    width = shape_of(call["value"], LAYOUTS[g.layout])[2]
    if isinstance(g.n2, int) and no_multiple(width, g.n2):
        wanted = f"a multiple of its {g.n2} heads" if g.n2 else "0: key has no heads"
        yield Diagnostic("value", f"value has the width {width}, expected {wanted}")


def head_groups(call: CheckedNode) -> Iterator[Diagnostic]:
    """N1 is a multiple of N2 and in the documented range."""
    g = call.geometry
    if g.folded and isinstance(g.d, int):
        width = shape_of(call["key"], LAYOUTS[g.layout])[2]
        if no_multiple(width, g.d):
            wanted = f"a multiple of the head size {g.d}" if g.d else "0: query has the head size 0"
            yield Diagnostic("key", f"key has the width {width}, expected {wanted}")
    if isinstance(g.n1, int) and isinstance(g.n2, int) and g.n2 and g.n1 % g.n2:
        yield Diagnostic(
            "key", f"key has {g.n2} heads, expected a divisor of the {g.n1} heads of query"
        )
    if isinstance(g.n1, int) and g.n1 > MAX_N:
        yield out_of_range("query", "head count", g.n1, MAX_N, "document")


KEY_AXES: Mapping[str, Mapping[int, str]] = {
    "BSH": {1: "S"},
    "SBH": {0: "S"},
    "BSND": {1: "S", 2: "N2"},
    "BNSD": {1: "N2", 2: "S"},
    "TND": {0: "T", 1: "N2"},
}
"""The dimensions in which key and value agree besides the batch, with their names."""


def batch_and_sequence(call: CheckedNode, prefix_batch: int) -> Iterator[Diagnostic]:
    """query, key and value have one batch size, and key and value differ in D only. The sizes are
    in the documented ranges. `prefix_batch` is the largest batch size of a call with a prefix."""
    g = call.geometry
    if g.layout not in LAYOUTS:
        return
    yield from _one_batch(call)
    yield from _keys_as_values(call)
    limits = [("query", "batch size", g.b, MAX_B)]
    if call["prefix"] is not None and not exceeds(g.b, MAX_B):
        limits = [("query", "batch size beside a prefix", g.b, prefix_batch)]
    limits.append(("query", "sequence length", g.t1 if g.tnd else g.s1, MAX_S))
    limits.append(("key", "sequence length", g.t2 if g.tnd else g.s2, MAX_S))
    for name, what, size, limit in limits:
        if isinstance(size, int) and size > limit:
            yield out_of_range(name, what, size, limit, "document")


def _keys_as_values(call: CheckedNode) -> Iterator[Diagnostic]:
    """key and value differ in D only."""
    layout = call.geometry.layout
    k, v = (shape_of(call[name], LAYOUTS[layout]) for name in ("key", "value"))
    for axis, what in KEY_AXES[layout].items():
        if what == "S" and given_key_length(call):
            continue  # key and value may both have more rows than the length says
        if differ(k[axis], v[axis]):
            yield Diagnostic(
                "value", f"value has {v[axis]} as {what}, expected {k[axis]} as key: {text(k)}"
            )


def _one_batch(call: CheckedNode) -> Iterator[Diagnostic]:
    """query, key and value have one batch size. Where an extension allows it, a tensor may have
    batch 1 instead."""
    g = call.geometry
    axis = BATCH_AXIS.get(g.layout)
    if axis is None:
        return
    sizes = {
        name: shape_of(call[name], LAYOUTS[g.layout])[axis] for name in ("query", "key", "value")
    }
    for name, size in sizes.items():
        if not differ(size, g.b):
            continue
        like = next(other for other in sizes if sizes[other] == g.b)
        extension = call.extension("EXT-BATCH-BROADCAST") if size == 1 else None
        yield Diagnostic(
            name, f"{name} has the batch size {size}, expected {g.b} as {like}", extension=extension
        )
        if extension is None:
            return


def keep_probability(call: CheckedNode) -> Iterator[Diagnostic]:
    """keep_prob is in (0, 1]."""
    keep = call.attr("keep_prob")
    if not 0.0 < keep <= 1.0:
        yield Diagnostic(
            "keep_prob", f"keep_prob is {keep}, expected a number above 0 and at most 1"
        )


def pse_type_known(call: CheckedNode, shift: str) -> Iterator[Diagnostic]:
    """pse_type is 0 to 3. It is 1 if there is no bias."""
    kind = call.attr("pse_type")
    if kind not in (0, 1, 2, 3):
        yield Diagnostic("pse_type", f"pse_type is {kind}, expected 0, 1, 2 or 3")
    elif kind != 1 and call[shift] is None:
        stage: Stage = "aclnn" if kind in (2, 3) else "tiling"
        yield Diagnostic(
            shift, f"{shift} is absent although pse_type is {kind}, expected pse_type 1", stage
        )


def bias_type(call: CheckedNode, shift: str) -> Iterator[Diagnostic]:
    """The bias of pse_type 0 and 1 has the type of query."""
    bias, query = call.dtype(shift), call.dtype("query")
    if call.attr("pse_type") in (0, 1) and bias and query and bias != query:
        wide = bias == "DT_FLOAT" and query in ("DT_FLOAT16", "DT_BF16")
        message = f"{shift} is {bias}, expected {query} as query"
        yield Diagnostic(shift, message, "aclnn", extension="EXT-SHIFT-FLOAT" if wide else None)


def inner_pse(call: CheckedNode, shift: str) -> Iterator[Diagnostic]:
    """The slopes of pse_type 2 and 3 have their type and shape, and are used only where they are
    allowed."""
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
        yield Diagnostic(
            shift,
            f"{shift} is {tensor.dtype}, expected DT_FLOAT slopes for pse_type {kind}",
            "aclnn",
        )
    if tensor.shape is None:
        return
    expected = (g.n1,) if len(tensor.shape) == 1 else (g.b, g.n1)
    if len(tensor.shape) not in (1, 2) or any(map(differ, tensor.shape, expected)):
        wanted = f"{text((g.n1,))} or {text((g.b, g.n1))}"
        yield Diagnostic(
            shift, f"{shift} has the shape {text(tensor.shape)}, expected slopes {wanted}"
        )


def _inner_pse_positions(call: CheckedNode, shift: str) -> Iterator[Diagnostic]:
    """Where slopes (pse_type 2 and 3) may be used. Outside TND they need S1 == S2. In TND with a
    mask, sparse_mode 7 excludes them, and in sparse_mode 8 the queries and keys of each sequence
    must end at the same position."""
    g, mode = call.geometry, call.attr("sparse_mode")
    slopes_here = f"{shift} holds slopes of pse_type {call.attr('pse_type')}"
    if not g.tnd:
        if differ(g.s1, g.s2):
            yield Diagnostic(
                shift, f"{slopes_here} for {g.s1} queries and {g.s2} keys, expected as many of both"
            )
        return
    if call["atten_mask"] is None:
        return
    if mode == 7:
        yield Diagnostic(shift, f"{slopes_here} in sparse_mode 7, expected pse_type 0 or 1")
    if mode == 8 and g.sequences:
        yield from _common_ends(call, shift, f"{slopes_here} in sparse_mode 8 where sequence")


def _common_ends(call: CheckedNode, shift: str, slopes_of_sequence: str) -> Iterator[Diagnostic]:
    """The queries and keys of each packed sequence end at the same position. The start indices move
    sequence 0."""
    first, *others = call.geometry.sequences
    for index, sequence in enumerate(others, 1):
        if sequence.queries != sequence.keys:
            message = f"{slopes_of_sequence} {index} has {sequence.queries} queries and {sequence.keys} keys"
            yield Diagnostic(shift, f"{message}, expected as many of both")
            break
    distance = _start_distance(call)
    if distance is None:
        return
    beyond = first.queries - first.keys - distance
    if beyond:
        message = f"{slopes_of_sequence} 0 ends {beyond} positions after its keys"
        yield Diagnostic(shift, f"{message}, expected 0")


def _start_distance(call: CheckedNode) -> int | None:
    """kv_start_idx - q_start_idx, where an absent start index is 0, or None if it is unknown."""
    query, key = (
        [0] if call[name] is None else call.content(name)
        for name in ("q_start_idx", "kv_start_idx")
    )
    return key[0] - query[0] if query and key else None


def sparse_mode_known(call: CheckedNode) -> Iterator[Diagnostic]:
    """sparse_mode is one of the modes of the layout. Without atten_mask the mode is ignored."""
    mode = call.attr("sparse_mode")
    if call["atten_mask"] is None or call.attr("input_layout") not in LAYOUTS:
        return
    modes = (0, 1, 2, 3, 4, 6, 7, 8) if call.geometry.tnd else tuple(range(7))
    if mode not in modes:
        listed = ", ".join(map(str, modes))
        layout = call.geometry.layout
        yield Diagnostic(
            "sparse_mode", f"sparse_mode is {mode}, expected one of {listed} for {layout}"
        )


def masked_bias(call: CheckedNode, bias: str) -> Iterator[Diagnostic]:
    """cpu_masked_bias needs a mask and the bias, which is the input `bias`."""
    for name in ("atten_mask", bias) if call.attrs.get("cpu_masked_bias") == "added" else ():
        if call[name] is None:
            yield Diagnostic(
                "cpu_masked_bias", f"cpu_masked_bias is 'added' without {name}, expected ''"
            )


def mask_batch(call: CheckedNode, size: Dim) -> Dim:
    """The batch size that a mask or bias has to have, whose own one is `size`: the batch size of
    the operands, or with cpu_mask_batch any divisor of this number."""
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
    """atten_mask has the type and shape that sparse_mode requires, and in the compressed modes also
    the content.

    `broadcast` is the extension that also allows 1 in any dimension. Where it is None, a mask of
    the keys beside a band (EXT-BAND-MASK) is refused as well.
    """
    mask = call["atten_mask"]
    if mask is None:
        return
    if mask.dtype and mask.dtype not in ("DT_BOOL", "DT_UINT8"):
        yield Diagnostic("atten_mask", f"atten_mask is {mask.dtype}, expected DT_BOOL or DT_UINT8")
    if mask.shape is None or any(sparse_mode_known(call)):
        return
    if len(mask.shape) not in (2, 4):
        yield Diagnostic("atten_mask", f"atten_mask has rank {len(mask.shape)}, expected 2 or 4")
    elif call.attr("sparse_mode") in MASK_SIZE:
        yield from _compressed_mask(call, mask, mask.shape, broadcast)
    elif call.geometry.tnd:
        yield from _packed_mask_shape(call, mask.shape)
    else:
        yield from _full_mask_shape(call, mask.shape, broadcast)


def _compressed_mask(
    call: CheckedNode, mask: TensorInfo, shape: Shape, broadcast: str | None
) -> Iterator[Diagnostic]:
    """In a compressed mode, the mask has the size and the content of `compressed_mask`."""
    mode = call.attr("sparse_mode")
    size = MASK_SIZE[mode]
    if any(map(differ, shape[-2:], size)):
        message = (
            f"atten_mask has the shape {text(shape)}, expected {text(size)} for sparse_mode {mode}"
        )
        beside_band = broadcast is not None and _is_key_mask(call, shape)
        yield Diagnostic("atten_mask", message, extension="EXT-BAND-MASK" if beside_band else None)
    elif mask.value is not None and not _is_compressed(mask.value, mode):
        what = (
            "ones above the diagonal" if mode != 6 else "the upper triangle over the prefix block"
        )
        yield Diagnostic(
            "atten_mask", f"atten_mask does not hold {what}, as expected for sparse_mode {mode}"
        )


def _full_mask_shape(
    call: CheckedNode, shape: Shape, broadcast: str | None
) -> Iterator[Diagnostic]:
    """A mask of all scores is [S1,S2] or [B,N1|1,S1,S2] or [1,1,S1,S2]."""
    g = call.geometry
    if len(shape) == 2:
        full: Shape = (g.s1, g.s2)
        forms = [full]
    else:
        batch = mask_batch(call, shape[0])
        full = (batch, g.n1, g.s1, g.s2)
        forms = [full, (batch, 1, g.s1, g.s2), (1, 1, g.s1, g.s2)]
    if any(not any(map(_does_not_match, shape, form)) for form in forms):
        return
    message = f"atten_mask has the shape {text(shape)}, expected {' or '.join(map(text, forms))}"
    repeats = not any(map(misfit, shape, full))
    yield Diagnostic("atten_mask", message, extension=broadcast if repeats else None)


def _is_compressed(value: np.ndarray[Any, Any], mode: int) -> bool:
    """Whether a mask has the content that a compressed mode requires. The array of
    `compressed_mask` itself is not compared."""
    wanted = compressed_mask(mode)
    return value is wanted or bool(((value != 0) == wanted).all())


def _is_key_mask(call: CheckedNode, shape: Shape) -> bool:
    """Whether a mask may be used in addition to a band: it is the same for every query row,
    [B|1,N1|1,1,S2|1]."""
    g = call.geometry
    if call.attr("sparse_mode") not in (2, 3, 4) or g.tnd or len(shape) != 4 or shape[2] != 1:
        return False
    return not any(map(misfit, shape, (mask_batch(call, shape[0]), g.n1, 1, g.s2)))


def _does_not_match(found: Dim, wanted: Dim) -> bool:
    """Whether a dimension is not the one wanted. If the wanted size is unknown, only a dimension of
    1 is reported."""
    if found == 1:
        return wanted != 1
    return differ(found, wanted)


def _packed_mask_shape(call: CheckedNode, shape: Shape) -> Iterator[Diagnostic]:
    """A mask of packed sequences is [S1,S2] of the longest sequences or of all tokens; [1,1,S1,S2]
    is the same."""
    if not call.geometry.sequences:
        return
    queries, keys = zip(*call.geometry.sequences, strict=True)
    forms = ((max(queries), max(keys)), (sum(queries), sum(keys)))
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


def bias_shape(
    call: CheckedNode, shift: str, broadcast: str | None, one_row: bool
) -> Iterator[Diagnostic]:
    """Outside TND, the bias of pse_type 0 and 1 is [B|1,N1,S1|1,S2], or its last 1024 rows
    (compressed ALiBi).

    `broadcast` is the extension that also allows 1 in any dimension. `one_row` says whether
    [1,N1,1,S2] is legal if the batch is larger than 1.
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
    if shape[2] == COMPRESSED_ROWS and differ(g.s1, COMPRESSED_ROWS):
        yield from _compressed_bias(call, shift)
        shape = (shape[0], shape[1], g.s1, shape[3])
    full: Shape = (mask_batch(call, shape[0]), g.n1, g.s1, g.s2)
    repeated = {axis for axis, size in enumerate(shape) if size == 1 != full[axis]}
    one_row_for_all = shape[0] == shape[2] == 1 and g.b != 1 and g.s1 != 1
    if any(map(misfit, shape, full)):
        yield Diagnostic(shift, message)
    elif repeated & {1, 3}:
        yield Diagnostic(shift, message, extension=broadcast)
    elif one_row_for_all and not one_row:
        yield Diagnostic(shift, f"{message}, not 1 in both", extension=broadcast)


def _compressed_bias(call: CheckedNode, shift: str) -> Iterator[Diagnostic]:
    """Compressed ALiBi needs at least 1024 queries, the same number of keys, and a causal mask."""
    g = call.geometry
    rows = f"{shift} has {COMPRESSED_ROWS} rows (compressed ALiBi)"
    if isinstance(g.s1, int) and g.s1 < COMPRESSED_ROWS:
        yield Diagnostic(
            shift,
            f"{rows} although query has {g.s1} positions, expected at least {COMPRESSED_ROWS}",
        )
    elif differ(g.s1, g.s2):
        yield Diagnostic(
            shift, f"{rows} and query has {g.s1} positions, expected as many keys, found {g.s2}"
        )
    elif not causal(call):
        yield Diagnostic(
            shift,
            f"{rows}, expected a causal atten_mask: sparse_mode 2, 3, or 0 with next_tockens 0",
        )


def packed_bias_shape(call: CheckedNode, shift: str, flat_rank_one: bool) -> Iterator[Diagnostic]:
    """In TND, the bias of pse_type 0 and 1 is compressed, [B|1,N1,1024,maxS2], or flat over the
    sequences.

    The flat form has N1*sum(S2) or N1*sum(S1*S2) elements. In the forward operator they are
    dimension 0 of a tensor of rank 2 or more, in the backward operator a tensor of rank 1
    (`flat_rank_one`).
    """
    tensor = call[shift]
    if tensor is None:
        return
    if any(0 in sequence for sequence in call.geometry.sequences):
        message = f"{shift} is given although a sequence is empty, expected none"
        yield Diagnostic(shift, message, "document", extension="EXT-EMPTY-SEQUENCES")
    if tensor.shape is None:
        return
    if len(tensor.shape) == 4 and tensor.shape[2] == COMPRESSED_ROWS:
        yield from _packed_compressed_bias(call, shift, tensor.shape)
    else:
        yield from _flat_bias(call, shift, tensor.shape, flat_rank_one)


def _packed_compressed_bias(call: CheckedNode, shift: str, shape: Shape) -> Iterator[Diagnostic]:
    """Compressed ALiBi of packed sequences is [B|1,N1,1024,maxS2]. It needs a causal mask, and as
    many keys as queries in each sequence."""
    g = call.geometry
    compressed = f"{shift} has {COMPRESSED_ROWS} rows (compressed ALiBi)"
    form: Shape = (g.b, g.n1, COMPRESSED_ROWS, max(g.kv_lens) if g.kv_lens else None)
    if misfit(shape[0], form[0]) or any(map(differ, shape[1:], form[1:])):
        yield Diagnostic(
            shift, f"{shift} has the shape {text(shape)}, expected {text(form)}, or 1 for the batch"
        )
    elif not causal(call):
        yield Diagnostic(shift, f"{compressed}, expected a causal atten_mask")
    elif any(differ(*sequence) for sequence in g.sequences):
        yield Diagnostic(shift, f"{compressed}, expected equal lengths of query and key")


def _flat_bias(call: CheckedNode, shift: str, shape: Shape, rank_one: bool) -> Iterator[Diagnostic]:
    """A flat bias of packed sequences has N1 rows or N1 matrices for each sequence, and the lengths
    say which."""
    g = call.geometry
    rank_fits, rank = (
        (len(shape) == 1, "rank 1") if rank_one else (len(shape) >= 2, "rank 2 or more")
    )
    if not rank_fits:
        yield Diagnostic(
            shift, f"{shift} has the shape {text(shape)}, expected {rank}, or [B,N1,1024,maxS2]"
        )
        return
    if not g.sequences or not isinstance(g.n1, int):
        return
    rows = g.n1 * sum(sequence.keys for sequence in g.sequences)
    matrices = g.n1 * sum(sequence.queries * sequence.keys for sequence in g.sequences)
    if differ(shape[0], rows) and differ(shape[0], matrices):
        message = f"{shift} has {shape[0]} as dimension 0, expected {rows} or {matrices} elements"
        yield Diagnostic(shift, message)
    elif any(size != 1 for size in shape[1:]):
        yield Diagnostic(
            shift, f"{shift} has the shape {text(shape)}, expected all elements on dimension 0"
        )
    elif rows == matrices and any(sequence.queries != 1 for sequence in g.sequences):
        yield Diagnostic(
            shift, f"{shift} could be one row or a matrix for each sequence with these lengths"
        )


def prefix_lengths(call: CheckedNode) -> Iterator[Diagnostic]:
    """prefix holds one length for each sequence, in range. sparse_mode 6 needs a prefix.
    sparse_mode 5 needs a mask for each batch entry."""
    mode, tensor = call.attr("sparse_mode"), call["prefix"]
    if call["atten_mask"] is None or mode not in (5, 6):
        return
    if mode == 5:
        yield from _prefix_mask(call)
    if tensor is None:
        if mode == 6:
            yield Diagnostic(
                "prefix", "prefix is absent, expected a length for each sequence in sparse_mode 6"
            )
        return
    wrong = list(shape_is("prefix", tensor, (call.geometry.b,)))
    yield from wrong
    if mode == 6 and not wrong:
        yield from _prefix_range(call)


def _prefix_mask(call: CheckedNode) -> Iterator[Diagnostic]:
    """In sparse_mode 5, the batch entries have different prefixes, so they do not share a mask."""
    g = call.geometry
    if g.tnd or g.b == 1:
        return
    batch = shape_of(call["atten_mask"], 4)[0]
    if call.rank("atten_mask") == 2 or (batch == 1 and isinstance(g.b, int)):
        forms = f"{text((g.b, g.n1, g.s1, g.s2))} or {text((g.b, 1, g.s1, g.s2))}"
        message = f"atten_mask is shared by the batch, expected {forms} in sparse_mode 5"
        yield Diagnostic("atten_mask", message, extension="EXT-MASK-BROADCAST")


def _prefix_range(call: CheckedNode) -> Iterator[Diagnostic]:
    """The first length of prefix that is not in its range: from S2 - S1, so that every row has a
    key, to S2."""
    g, given = call.geometry, call.content("prefix") or []
    sequences = g.sequences
    if not g.tnd and isinstance(g.s1, int) and isinstance(g.s2, int):
        sequences = (PackedSequence(g.s1, g.s2),) * len(given)
    for index, (length, (queries, keys)) in enumerate(zip(given, sequences, strict=False)):
        low = max(keys - queries, 0)
        if queries and not low <= length <= keys:  # without queries the prefix has no effect
            yield Diagnostic(
                "prefix", f"prefix of sequence {index} is {length}, expected {low} to {keys}"
            )
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
    tensor = call["drop_mask"]
    if tensor is None:
        return
    if tensor.dtype and tensor.dtype != "DT_UINT8":
        yield Diagnostic("drop_mask", f"drop_mask is {tensor.dtype}, expected DT_UINT8")
    bits = _score_count(call.geometry)
    found = None if tensor.shape is None else elements(tensor.shape)
    if bits is None or found is None:
        return
    needed = -(-bits // 8)
    if found < needed:
        message = f"drop_mask has {number(found)} bytes, expected at least {number(needed)}, a bit a score"
        yield Diagnostic("drop_mask", message)


def _score_count(g: Geometry) -> int | None:
    """The number of scores of a call, or None if it is unknown."""
    if not g.tnd:
        return elements((g.b, g.n1, g.s1, g.s2))
    if not g.sequences or not isinstance(g.n1, int):
        return None
    return g.n1 * sum(sequence.queries * sequence.keys for sequence in g.sequences)


def sink_shape(call: CheckedNode) -> Iterator[Diagnostic]:
    """sink is float32. If its rank is 1, it is [N1]."""
    g, tensor = call.geometry, call["sink"]
    if tensor is None:
        return
    if tensor.dtype and tensor.dtype != "DT_FLOAT":
        yield Diagnostic("sink", f"sink is {tensor.dtype}, expected DT_FLOAT", "aclnn")
    if tensor.shape is not None and len(tensor.shape) == 1 and differ(tensor.shape[0], g.n1):
        yield Diagnostic(
            "sink", f"sink has the shape {text(tensor.shape)}, expected {text((g.n1,))}"
        )


def starts(call: CheckedNode) -> Iterator[Diagnostic]:
    """The start indices are vectors, and their difference fits 32 bits. An absent start index is
    0."""
    for name in ("q_start_idx", "kv_start_idx"):
        if call.rank(name) not in (1, None):
            yield Diagnostic(name, f"{name} has rank {call.rank(name)}, expected 1")
    distance = _start_distance(call)
    if distance is not None and not -(2**31) <= distance < 2**31:
        yield Diagnostic(
            "kv_start_idx", f"kv_start_idx - q_start_idx is {distance}, expected 32 bits"
        )


def given_key_length(call: CheckedNode) -> bool:
    """Whether actual_seq_kvlen states the number of keys outside TND (EXT-KEY-LENGTH). key and
    value may then have more rows."""
    given = call["actual_seq_kvlen"] is not None and call.geometry.layout in SEQUENCE_AXIS
    return given and call.extension("EXT-KEY-LENGTH") is not None


def key_length(call: CheckedNode) -> Iterator[Diagnostic]:
    """Outside TND there are no lengths. With EXT-KEY-LENGTH, actual_seq_kvlen may be one number,
    which is at most the number of rows of key and of value."""
    g = call.geometry
    numbered = given_key_length(call)
    for name in ("actual_seq_qlen", "actual_seq_kvlen"):
        if (
            call[name] is not None
            and g.layout in SEQUENCE_AXIS
            and not (numbered and name == "actual_seq_kvlen")
        ):
            yield Diagnostic(
                name,
                f"{name} is given for {g.layout}, expected none: it has a meaning for TND only",
                "aclnn",
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
            yield Diagnostic(
                name, f"{name} is {content[0]}, expected 0 to {room}, the rows of {tensor}"
            )
            return
    message = f"{name} is given for {g.layout}, expected none: it has a meaning for TND only"
    yield Diagnostic(name, message, "aclnn", extension="EXT-KEY-LENGTH")


def packed_lengths(call: CheckedNode) -> Iterator[Diagnostic]:
    """In TND, both cumulative lengths are given and have the same number of entries. They do not
    decrease, and they end within query and key."""
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
            "actual_seq_kvlen",
            f"actual_seq_kvlen has {counts[1]} lengths, expected {counts[0]}, as query",
        )
    for name, tensor, total in (
        ("actual_seq_qlen", "query", g.t1),
        ("actual_seq_kvlen", "key", g.t2),
    ):
        ends = call.content(name)
        if not ends:
            continue
        used = ends[: max((i + 1 for i, end in enumerate(ends) if end), default=0)]
        if any(a > b for a, b in pairwise([0, *used])):
            yield Diagnostic(
                name, f"{name} is {ends}, expected cumulative lengths, which never shrink"
            )
        elif isinstance(total, int) and max(ends) > total:
            yield Diagnostic(
                name,
                f"{name} ends at {max(ends)}, expected at most {total}, the positions of {tensor}",
            )


def rope(call: CheckedNode, stage: Stage, code: int) -> Iterator[Diagnostic]:
    """Both rope inputs are given, or neither, and they are shaped as query and key."""
    yield from list(both_or_none(call, ("query_rope", "key_rope"), stage, code)) or _rope_shapes(
        call
    )


def _rope_shapes(call: CheckedNode) -> Iterator[Diagnostic]:
    """query_rope and key_rope have the types of query and key, and their shapes except for the last
    dimension."""
    for name, like in (("query_rope", "query"), ("key_rope", "key")):
        rope, base = call[name], call[like]
        if rope is None or base is None:
            continue
        if rope.dtype and base.dtype and rope.dtype != base.dtype:
            yield Diagnostic(
                name, f"{name} is {rope.dtype}, expected {base.dtype} as {like}", "document"
            )
        if rope.shape is None or base.shape is None:
            continue
        yield from _rope_width(call, name)
        if _rope_unlike(call, name, rope.shape, base.shape):
            wanted = text((*base.shape[:-1], "Dr"))
            yield Diagnostic(
                name, f"{name} has the shape {text(rope.shape)}, expected {wanted}", "document"
            )
            return
    query_size, key_size = (_rope_size(call, name) for name in ("query_rope", "key_rope"))
    if differ(query_size, key_size):
        message = f"key_rope has the head size {key_size}, expected {query_size} as query_rope"
        yield Diagnostic("key_rope", message, "document")


def _rope_width(call: CheckedNode, name: str) -> Iterator[Diagnostic]:
    """In BSH and SBH, the width of a rope input is a multiple of its heads."""
    heads, width = _rope_heads(call, name), shape_of(call[name], 3)[2]
    if call.geometry.folded and isinstance(heads, int) and no_multiple(width, heads):
        message = f"{name} has the width {width}, expected a multiple of its {heads} heads"
        yield Diagnostic(name, message, "document")


def _rope_unlike(call: CheckedNode, name: str, rope: Shape, base: Shape) -> bool:
    """Whether the shape of a rope input is certainly not that of the input beside it, the last
    dimension aside. With a given key length, key_rope may have other rows than key."""
    if len(rope) != len(base):
        return True
    unequal = {
        axis for axis, sizes in enumerate(zip(rope[:-1], base, strict=False)) if differ(*sizes)
    }
    if name == "key_rope" and given_key_length(call):
        unequal.discard(SEQUENCE_AXIS[call.geometry.layout])
    return bool(unequal)


def _rope_heads(call: CheckedNode, name: str) -> Dim:
    """The head count of a rope input."""
    return call.geometry.n1 if name == "query_rope" else call.geometry.n2


def _rope_size(call: CheckedNode, name: str) -> Dim:
    """The head size of a rope input, or None if it is unknown."""
    rope = call[name]
    if rope is None or not rope.shape:
        return None
    width = rope.shape[-1]
    return divide(width, _rope_heads(call, name)) if call.geometry.folded else width
