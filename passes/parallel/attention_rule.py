"""The forms of a FlashAttentionScore: a SequenceAttention or a CacheAttention, with the mask as a band.

    sparse_mode   atten_mask          pre_tockens, next_tockens of the band    mask
    -             absent              no limits                                none
    0             given               its own                                  the given one
    1, 5          given               no limits                                the given one
    2, 3          of the keys         no limit, 0                              the given one
    2, 3          compressed          no limit, 0                              none
    4             of the keys         its own                                  the given one
    4             compressed          its own                                  none

A mask that excludes nothing is left out. The query and key of a SequenceAttention have the same length, so that the
diagonals of modes 2 and 3, counted from the top left and from the bottom right, are the same. A CacheAttention has
sparse_mode 4 for those that are counted from the bottom right (3 and 4), and 0 for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from fa_compiler.op_registry import TensorInfo, collectives, full_attrs, get, place_inputs
from fa_compiler.op_registry.geometry import SEQUENCE_AXIS, UNLIMITED, measure
from fa_compiler.passes.decline import label
from fa_compiler.passes.nodes import constant
from fa_compiler.passes.parallel.caches import KEYS, CacheSharder
from fa_compiler.passes.parallel.methods import AttentionSizes, refused_methods
from fa_compiler.passes.parallel.places import Place, Refusal
from fa_compiler.passes.parallel.sharder import Sharder, local_rule

TAKEN = frozenset({"query", "key", "value", "real_shift", "atten_mask", "sink", "query_rope", "key_rope"})
"""The inputs that a SequenceAttention or CacheAttention takes."""

FROM_THE_END = (3, 4)
"""The values of sparse_mode whose diagonals are counted from the bottom right."""


def cached_attention(sharder: CacheSharder, node: ir.Node, output: int) -> ir.Value:
    """The whole attention_out, of keys that the ranks have in parts."""
    spec = get(node.op_type)
    inputs = _inputs(node)
    full = full_attrs(spec, {name: attr.value for name, attr in node.attributes.items()})
    axis = _check_kind(node, inputs, full, output)
    for name in KEYS:
        if name in inputs and sharder.shape(inputs[name], node)[axis] != sharder.length:
            raise Refusal(f"its {name} is not proven to be as long as the caches", node)
    pre, after, masked = _band(sharder, node, inputs.get("atten_mask"), full)
    if not masked:
        inputs.pop("atten_mask", None)
    rows = sharder.shape(inputs["query"], node)[axis].const or 1
    choice = sharder.choose(replace(_sizes(sharder, node, inputs, full, after), rows=rows, refused={}))
    if choice.method in choice.refused:
        raise Refusal(f"{choice.method} is not possible: {choice.refused[choice.method]}", node)
    forms = {
        name: sharder.local(value, Place(axis), node) if name in KEYS else sharder.whole(value, node)
        for name, value in inputs.items()
    }
    mode = 4 if full["sparse_mode"] in FROM_THE_END else 0
    changed = {**full, "sparse_mode": mode, "pre_tockens": pre, "next_tockens": after}
    sharder.choices.append(choice)
    return _emitted(sharder, node, output, collectives.CACHE_ATTENTION, forms, changed)


@local_rule("FlashAttentionScore")
def attention(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """The rank's rows of attention_out."""
    inputs = _inputs(node)
    full = full_attrs(get(node.op_type), {name: attr.value for name, attr in node.attributes.items()})
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
    sharder.choices.append(choice)
    return _emitted(sharder, node, output, collectives.SEQUENCE_ATTENTION, forms, changed)


def _inputs(node: ir.Node) -> dict[str, ir.Value]:
    """The inputs that are given, by name."""
    names = get(node.op_type).input_names
    return {name: value for name, value in zip(names, node.inputs, strict=False) if value is not None}


def _emitted(
    sharder: Sharder,
    node: ir.Node,
    output: int,
    op_type: str,
    inputs: Mapping[str, ir.Value],
    attrs: Mapping[str, Any],
) -> ir.Value:
    """The result of the collective node that stands for an attention."""
    made = ir.Node(
        collectives.DOMAIN,
        op_type,
        place_inputs(get(node.op_type), inputs),
        [ir.convenience.convert_attribute(name, value) for name, value in attrs.items()],
        name=sharder.names.new(label(node) or "attention"),
    )
    made.outputs[0].name = sharder.names.new(node.outputs[output].name or "attention_out")
    if (dtype := sharder.info.dtype(node.outputs[output])) is not None:
        made.outputs[0].dtype = dtype
    sharder.nodes.append(made)
    return made.outputs[0]


def _check(
    sharder: Sharder,
    node: ir.Node,
    inputs: Mapping[str, ir.Value],
    attrs: Mapping[str, object],
    output: int,
    place: Place,
) -> None:
    axis = _check_kind(node, inputs, attrs, output)
    if place != Place(axis):
        raise Refusal(f"its result is demanded in parts along dimension {place.dim}, not along its tokens", node)
    for name in ("query", "key", "value"):
        if sharder.shape(inputs[name], node)[axis] != sharder.length:
            raise Refusal(f"its {name} is not proven to be as long as the sequence", node)


def _check_kind(node: ir.Node, inputs: Mapping[str, ir.Value], attrs: Mapping[str, object], output: int) -> int:
    """The dimension of the tokens of an attention that ranks can compute together. Raises Refusal."""
    axis = SEQUENCE_AXIS.get(str(attrs["input_layout"]))
    if get(node.op_type).output_names[output] != "attention_out":
        raise Refusal("its statistics are read", node)
    if axis is None:
        raise Refusal("its sequences are packed (layout TND)", node)
    for name in inputs:
        if name not in TAKEN:
            raise Refusal(f"its input {name} is not cut", node)
    if attrs["keep_prob"] != 1.0:
        raise Refusal("its dropout draws random numbers", node)
    if "real_shift" in inputs and attrs["pse_type"] not in (0, 1):
        raise Refusal("its bias is made of slopes", node)
    return axis


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
    heads = int(str(attrs["head_num"]))
    shapes = (sharder.shape(inputs[name], node) for name in ("query", "key", "value"))
    query, key, value = (TensorInfo("", tuple(size.const for size in shape)) for shape in shapes)
    sizes = measure(str(attrs["input_layout"]), heads, query, key, value)
    numbers = [size for size in (sizes.n2, sizes.d, sizes.dv) if isinstance(size, int)]
    if len(numbers) < 3 or min(heads, *numbers) < 1:
        raise Refusal("its heads and their sizes are unknown", node)
    key_heads, size, value_width = numbers
    dtype = sharder.info.dtype(inputs["query"])
    empty = attrs.get("cpu_empty_rows", "")
    return AttentionSizes(
        name=label(node) or node.op_type,
        heads=heads,
        key_heads=key_heads,
        width=size + value_width,
        value_width=value_width,
        bytes=4 if dtype is None else int(dtype.itemsize),
        causal=after < UNLIMITED,
        refused=refused_methods(heads, key_heads, sharder.ranks, "sink" in inputs, str(empty)),
    )
