"""The local form of a FlashAttentionScore: a SequenceAttention, with the mask of the whole sequence as a band.

    sparse_mode   atten_mask          pre_tockens, next_tockens of the band    mask
    -             absent              no limits                                none
    0             given               its own                                  the given one
    1, 5          given               no limits                                the given one
    2, 3          of the keys         no limit, 0                              the given one
    2, 3          compressed          no limit, 0                              none
    4             of the keys         its own                                  the given one
    4             compressed          its own                                  none

A mask that excludes nothing is left out. Query and key have the same length, so that the diagonals of modes 2 and 3,
counted from the top left and from the bottom right, are the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext

import onnx_ir as ir

from fa_compiler.op_registry import collectives, full_attrs, get, place_inputs
from fa_compiler.op_registry.collectives import RING
from fa_compiler.op_registry.geometry import SEQUENCE_AXIS, UNLIMITED
from fa_compiler.passes.decline import label
from fa_compiler.passes.nodes import constant
from fa_compiler.passes.parallel.methods import AttentionSizes, refused_methods
from fa_compiler.passes.parallel.places import Place, Refusal
from fa_compiler.passes.parallel.sharder import Sharder, local_rule
from fa_compiler.passes.values.bounds import Bounds

TAKEN = frozenset({"query", "key", "value", "real_shift", "atten_mask", "sink", "query_rope", "key_rope"})
"""The inputs that a SequenceAttention takes."""


@local_rule("FlashAttentionScore")
def attention(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """The rank's rows of attention_out."""
    spec = get(node.op_type)
    attrs = {name: attr.value for name, attr in node.attributes.items()}
    inputs = {name: value for name, value in zip(spec.input_names, node.inputs, strict=False) if value is not None}
    full = full_attrs(spec, attrs)
    layout = str(full["input_layout"])
    _check(sharder, node, inputs, full, output, place)
    pre, after, masked = _band(sharder, node, inputs.get("atten_mask"), full)
    if not masked:
        inputs.pop("atten_mask", None)
    choice = sharder.choose(_sizes(sharder, node, inputs, full, after))
    if choice.method in choice.refused:
        raise Refusal(f"{choice.method} is not possible: {choice.refused[choice.method]}", node)
    forms: dict[str, ir.Value] = {}
    for name, value in inputs.items():
        if name in ("query", "key", "value", "query_rope", "key_rope"):
            forms[name] = sharder.local(value, Place(SEQUENCE_AXIS[layout]), node)
        elif name == "sink" or choice.method == collectives.ALL_TO_ALL:
            with sharder.gathering() if name == "real_shift" else nullcontext():
                forms[name] = sharder.whole(value, node)
        else:
            forms[name] = _rows(sharder, node, name, value)
    changed = {**full, "sparse_mode": 0, "pre_tockens": pre, "next_tockens": after, "method": choice.method}
    made = ir.Node(
        collectives.DOMAIN,
        collectives.SEQUENCE_ATTENTION,
        place_inputs(spec, forms),
        [ir.convenience.convert_attribute(name, value) for name, value in changed.items()],
        name=sharder.names.new(label(node) or "attention"),
    )
    made.outputs[0].name = sharder.names.new(node.outputs[output].name or "attention_out")
    if (dtype := sharder.info.dtype(node.outputs[output])) is not None:
        made.outputs[0].dtype = dtype
    sharder.nodes.append(made)
    sharder.choices.append(choice)
    return made.outputs[0]


def _check(
    sharder: Sharder,
    node: ir.Node,
    inputs: Mapping[str, ir.Value],
    attrs: Mapping[str, object],
    output: int,
    place: Place,
) -> None:
    axis = SEQUENCE_AXIS.get(str(attrs["input_layout"]))
    if get(node.op_type).output_names[output] != "attention_out":
        raise Refusal("its statistics are read", node)
    if axis is None:
        raise Refusal("its sequences are packed (layout TND)", node)
    if place != Place(axis):
        raise Refusal(f"its result is demanded in parts along dimension {place.dim}, not along its tokens", node)
    for name in inputs:
        if name not in TAKEN:
            raise Refusal(f"its input {name} is not cut", node)
    if attrs["keep_prob"] != 1.0:
        raise Refusal("its dropout draws random numbers", node)
    if "real_shift" in inputs and attrs["pse_type"] not in (0, 1):
        raise Refusal("its bias is made of slopes", node)
    for name in ("query", "key", "value"):
        if sharder.shape(inputs[name], node)[axis] != sharder.length:
            raise Refusal(f"its {name} is not proven to be as long as the sequence", node)


def _band(sharder: Sharder, node: ir.Node, mask: ir.Value | None, attrs: Mapping[str, object]) -> tuple[int, int, bool]:
    """The two diagonals of the table above, and whether the mask stays."""
    if mask is None:
        return UNLIMITED, UNLIMITED, False
    mode = attrs["sparse_mode"]
    shape = sharder.shape(mask, node)
    of_keys = len(shape) == 4 and shape[2].const == 1
    content = constant(mask)
    masks = content is None or bool(content.any())
    pre, after = int(str(attrs["pre_tockens"])), int(str(attrs["next_tockens"]))
    if mode == 0:
        return pre, after, masks
    if mode in (1, 5):
        return UNLIMITED, UNLIMITED, masks
    if mode in (2, 3):
        return UNLIMITED, 0, of_keys and masks
    if mode == 4:
        return pre, after, of_keys and masks
    raise Refusal(f"sparse_mode {mode} is not cut", node)


def _rows(sharder: Sharder, node: ir.Node, name: str, value: ir.Value) -> ir.Value:
    """The rank's rows of a mask or bias, with all keys."""
    shape = sharder.shape(value, node)
    if name == "real_shift" and (len(shape) != 4 or (shape[2].const != 1 and shape[2] != sharder.length)):
        raise Refusal("the rows of its bias are not proven to be those of the sequence", node)
    place = Place(len(shape) - 2)
    with sharder.gathering() if name == "real_shift" else nullcontext():
        found = sharder.aligned(value, place, len(shape), sharder.length, node)
    assert found is not None
    return found


def _sizes(
    sharder: Sharder, node: ir.Node, inputs: Mapping[str, ir.Value], attrs: Mapping[str, object], after: int
) -> AttentionSizes:
    """The sizes that the choice of a method depends on. Raises Refusal where they are unknown."""
    layout, heads = str(attrs["input_layout"]), int(str(attrs["head_num"]))
    query, key, value = (sharder.shape(inputs[name], node) for name in ("query", "key", "value"))
    folded = layout in ("BSH", "SBH")
    widths = [shape[-1].const for shape in (query, key, value)]
    if None in widths or heads < 1:
        raise Refusal("its head sizes are unknown", node)
    head_axis = 1 if layout == "BNSD" else 2
    if folded:
        size = (widths[0] or 0) // heads
        key_heads = (widths[1] or 0) // max(size, 1)
        width = size + (widths[2] or 0) // max(key_heads, 1)
    else:
        key_heads = key[head_axis].const or 0
        width = (widths[1] or 0) + (widths[2] or 0)
    if key_heads < 1:
        raise Refusal("the number of its key heads is unknown", node)
    dtype = sharder.info.dtype(inputs["query"])
    refused = refused_methods(heads, key_heads, sharder.ranks, "sink" in inputs, str(attrs.get("cpu_empty_rows", "")))
    if (reason := sharder.no_ring or _ring_fault(sharder, inputs.get("real_shift"))) and RING not in refused:
        refused[RING] = reason
    return AttentionSizes(
        name=label(node) or node.op_type,
        heads=heads,
        key_heads=key_heads,
        width=width,
        bytes=4 if dtype is None else int(dtype.itemsize),
        causal=after < UNLIMITED,
        refused=refused,
    )


def _ring_fault(sharder: Sharder, bias: ir.Value | None) -> str:
    """Why a rank with a graph of its own cannot compute this attention in a ring; "" where it can.

    The scores of a part are all infinite where a bias excludes all its keys by infinity. Such a part has no softmax.
    Ranks of one graph notice this and gather the keys instead.
    """
    if bias is None or not sharder.own_graphs:
        return ""
    limits = Bounds(sharder.info).of(bias)
    if limits is not None and all(map(math.isfinite, limits)):
        return ""
    return "its bias may be infinite, so that a part of the keys may have no softmax"
