"""The forms of FlashAttentionScore and its gradient: SequenceAttention, CacheAttention and
SequenceGradient.

The mask of the whole sequence becomes a band:

    sparse_mode   atten_mask          pre_tockens, next_tockens of the band    mask
    -             absent              no limits                                none
    0             given               its own                                  the given one
    1, 5          given               no limits                                the given one
    2, 3          of the keys         no limit, 0                              the given one
    2, 3          compressed          no limit, 0                              none
    4             of the keys         its own                                  the given one
    4             compressed          its own                                  none

A mask that excludes nothing is left out. The query and key of a SequenceAttention have the same
length, so that the diagonals of modes 2 and 3, counted from the top left and from the bottom right,
are the same. A CacheAttention has sparse_mode 4 for those that are counted from the bottom right (3
and 4), and 0 for the others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from fa_compiler.op_registry import TensorInfo, collectives, full_attrs, get, place_inputs
from fa_compiler.op_registry.collectives import RING, STATISTICS
from fa_compiler.op_registry.constraints.training import COMPRESSED_ROWS
from fa_compiler.op_registry.geometry import SEQUENCE_AXIS, UNLIMITED, measure
from fa_compiler.passes.algebra.symbolic import Dim, consts
from fa_compiler.passes.answer.decline import label
from fa_compiler.passes.ir.nodes import ABSENT, attribute_values, constant, instances, text_attr
from fa_compiler.passes.parallel.caches import KEYS, CacheSharder
from fa_compiler.passes.parallel.methods import AttentionSizes, Choice, refused_methods
from fa_compiler.passes.parallel.places import Place, Refusal
from fa_compiler.passes.parallel.sharder import Sharder, local_rule
from fa_compiler.passes.values.bounds import Bounds

ROW_AXIS = 2
"""The dimension of the statistics, [B, N, S, 8], that runs over the queries."""
BIASES = ("real_shift", "pse_shift")
TAKEN = frozenset(
    {"query", "key", "value", "real_shift", "atten_mask", "sink", "query_rope", "key_rope"}
)
"""The inputs that a SequenceAttention or CacheAttention takes."""
GRADIENT_TAKEN = frozenset(
    {"query", "key", "value", "dy", "pse_shift", "atten_mask", "attention_in", *STATISTICS}
)
"""The inputs that a SequenceGradient takes."""

OTHER_KEYS = (
    "where the keys are another sequence, such as that of an encoder, divide encoder and decoder as models of their "
    "own, or, if both are equally long in every run, name the inputs of both by --sequence-axis INPUT:DIM"
)
"""What the user can do about an attention whose keys are not proven to be those of the sequence."""
FROM_THE_END = (3, 4)
"""The values of sparse_mode whose diagonals are counted from the bottom right."""


def cached_attention(sharder: CacheSharder, node: ir.Node, output: int) -> ir.Value:
    """The whole attention_out, of keys that the ranks have in parts."""
    if get(node.op_type).output_names[output] != "attention_out":
        raise Refusal("its statistics are read", node)
    axis = _axis(node)
    inputs, full = operands_of(node)
    _check_kind(node, inputs, full, TAKEN)
    for name in KEYS:
        if name in inputs and sharder.shape(inputs[name], node)[axis] != sharder.length:
            raise Refusal(f"its {name} is not proven to be as long as the caches", node)
    pre, after = _band(sharder, node, inputs, full)
    rows = sharder.shape(inputs["query"], node)[axis].const or 1
    choice = _choice(
        sharder, node, replace(_sizes(sharder, node, inputs, full, after), rows=rows, refused={})
    )
    forms = {
        name: sharder.local(value, Place(axis), node)
        if name in KEYS
        else sharder.whole(value, node)
        for name, value in inputs.items()
    }
    mode = 0
    if full["sparse_mode"] in FROM_THE_END:
        mode = 4
    changed = {**full, "sparse_mode": mode, "pre_tockens": pre, "next_tockens": after}
    sharder.choices.append(choice)
    names = collectives.FORWARD_OUTPUTS[:1]
    return add_collective(
        sharder, node, collectives.CACHE_ATTENTION, forms, changed, names
    ).outputs[0]


@local_rule("FlashAttentionScore")
def attention(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """The rank's rows of attention_out, or of the statistics that a gradient reads."""
    name = get(node.op_type).output_names[output]
    _check_place(node, name, place, collectives.FORWARD_OUTPUTS)
    made = sharder.attentions.get(node) or _forward(sharder, node)
    return made.outputs[collectives.FORWARD_OUTPUTS.index(name)]


def _forward(sharder: Sharder, node: ir.Node) -> ir.Node:
    spec = get(node.op_type)
    inputs, full = operands_of(node)
    _check(sharder, node, inputs, full, TAKEN)
    pre, after = _band(sharder, node, inputs, full)
    outputs = dict(zip(spec.output_names, node.outputs, strict=False))
    read = [name for name in STATISTICS if name in outputs and any(outputs[name].uses())]
    sizes = _sizes(sharder, node, inputs, full, after)
    if read:
        sizes = replace(sizes, refused={**refused_with_gradient(full), **sizes.refused})
    choice = _choice(sharder, node, sizes)
    forms = _forms(sharder, node, inputs, str(full["input_layout"]), choice.method)
    changed = {
        **full,
        "sparse_mode": 0,
        "pre_tockens": pre,
        "next_tockens": after,
        "method": choice.method,
    }
    names: tuple[str, ...] = collectives.FORWARD_OUTPUTS
    if not read:
        names = names[:1]
    sharder.choices.append(choice)
    return add_collective(sharder, node, collectives.SEQUENCE_ATTENTION, forms, changed, names)


def _choice(sharder: Sharder, node: ir.Node, sizes: AttentionSizes) -> Choice:
    """The method of an attention. Raises Refusal if the user asks for one that it does not
    allow."""
    choice = sharder.choose(sizes)
    if choice.method in choice.refused:
        raise Refusal(f"{choice.method} is not possible: {choice.refused[choice.method]}", node)
    return choice


def refused_with_gradient(attrs: Mapping[str, object]) -> dict[str, str]:
    """The methods that an attention does not allow if a gradient reads its statistics, and why."""
    refused = {collectives.ALL_TO_ALL: "it has a gradient"}
    if attrs.get("cpu_empty_rows", "") not in ("", "zero") or attrs.get("cpu_nan_rows", ""):
        refused[RING] = "it has a gradient, also of rows without a defined softmax"
    return refused


@local_rule("FlashAttentionScoreGrad")
def gradient(sharder: Sharder, node: ir.Node, output: int, place: Place) -> ir.Value:
    """The rank's tokens of dq, dk and dv."""
    name = get(node.op_type).output_names[output]
    _check_place(node, name, place, collectives.GRADIENT_OUTPUTS)
    made = sharder.attentions.get(node) or _backward(sharder, node)
    return made.outputs[collectives.GRADIENT_OUTPUTS.index(name)]


def _backward(sharder: Sharder, node: ir.Node) -> ir.Node:
    inputs, full = operands_of(node)
    _check(sharder, node, inputs, full, GRADIENT_TAKEN)
    for name in (*STATISTICS, "attention_in"):
        if name not in inputs:
            raise Refusal(f"its input {name} is absent", node)
    pre, after = _band(sharder, node, inputs, full)
    forms = _forms(sharder, node, inputs, str(full["input_layout"]), collectives.GATHER)
    method = collectives.GATHER
    maker = inputs["softmax_max"].producer()  # its local form was made for the statistics
    if maker is not None and (forward := sharder.attentions.get(maker)) is not None:
        method = text_attr(forward, "method", method)
    changed = {
        **full,
        "sparse_mode": 0,
        "pre_tockens": pre,
        "next_tockens": after,
        "method": method,
    }
    return add_collective(
        sharder, node, collectives.SEQUENCE_GRADIENT, forms, changed, collectives.GRADIENT_OUTPUTS
    )


def operands_of(node: ir.Node) -> tuple[dict[str, ir.Value], dict[str, Any]]:
    """The inputs that a node has, and all its attributes, by name."""
    spec = get(node.op_type)
    attrs = attribute_values(node)
    inputs = {
        name: value
        for name, value in zip(spec.input_names, node.inputs, strict=False)
        if value is not None
    }
    return inputs, full_attrs(spec, attrs)


def _forms(
    sharder: Sharder, node: ir.Node, inputs: Mapping[str, ir.Value], layout: str, method: str
) -> dict[str, ir.Value]:
    """The inputs of the rank: its own tokens and rows, and what is whole."""
    forms: dict[str, ir.Value] = {}
    for name, value in inputs.items():
        if name in ("query", "key", "value", "dy", "attention_in", "query_rope", "key_rope"):
            forms[name] = sharder.local(value, Place(SEQUENCE_AXIS[layout]), node)
        elif name in STATISTICS:
            forms[name] = sharder.local(value, Place(ROW_AXIS), node)
        elif name == "sink" or method == collectives.ALL_TO_ALL:
            with sharder.gathering() if name in BIASES else nullcontext():
                forms[name] = sharder.whole(value, node)
        else:
            forms[name] = _rows(sharder, node, name, value)
    return forms


def add_collective(
    sharder: Sharder,
    node: ir.Node,
    op_type: str,
    forms: Mapping[str, ir.Value],
    attrs: Mapping[str, Any],
    outputs: Sequence[str],
) -> ir.Node:
    """The node of all ranks in the place of a node, with these outputs of it."""
    spec = get(node.op_type)
    made = ir.Node(
        collectives.DOMAIN,
        op_type,
        place_inputs(spec, forms),
        [ir.convenience.convert_attribute(name, value) for name, value in attrs.items()],
        num_outputs=len(outputs),
        name=sharder.names.new(label(node)),
    )
    given = dict(zip(spec.output_names, node.outputs, strict=False))
    for name, value in zip(outputs, made.outputs, strict=True):
        old = given.get(name, ABSENT)
        value.name = sharder.names.new(old.name or name)
        if (dtype := sharder.info.dtype(old)) is not None:
            value.dtype = dtype
    sharder.nodes.append(made)
    sharder.attentions[node] = made
    return made


def _axis(node: ir.Node) -> int:
    """The dimension of the tokens. Raises Refusal."""
    axis = SEQUENCE_AXIS.get(text_attr(node, "input_layout", ""))
    if axis is None:
        raise Refusal("its sequences are packed (layout TND)", node)
    return axis


def _check_place(node: ir.Node, name: str, place: Place, known: Sequence[str]) -> None:
    """Raise Refusal for an output that is not cut, or for one that is demanded in other parts than
    those of tokens."""
    axis = _axis(node)
    if name not in known:
        raise Refusal(f"its output {name} is read", node)
    if name in STATISTICS:
        axis = ROW_AXIS
    if place != Place(axis):
        raise Refusal(
            f"its result is demanded in parts along dimension {place.dim}, not along its tokens",
            node,
        )


def _check(
    sharder: Sharder,
    node: ir.Node,
    inputs: Mapping[str, ir.Value],
    attrs: Mapping[str, object],
    taken: Collection[str],
) -> None:
    _check_kind(node, inputs, attrs, taken)
    axis = _axis(node)
    for name in ("query", "key", "value"):
        if sharder.shape(inputs[name], node)[axis] != sharder.length:
            raise Refusal(
                f"its {name} is not proven to be as long as the sequence; {OTHER_KEYS}", node
            )


def _check_kind(
    node: ir.Node,
    inputs: Mapping[str, ir.Value],
    attrs: Mapping[str, object],
    taken: Collection[str],
) -> None:
    """Raise Refusal for an attention that ranks cannot compute together."""
    for name in inputs:
        if name not in taken:
            raise Refusal(f"its input {name} is not cut", node)
    if attrs["keep_prob"] != 1.0:
        raise Refusal("its dropout draws random numbers", node)
    if any(name in inputs for name in BIASES) and attrs["pse_type"] not in (0, 1):
        raise Refusal("its bias is made of slopes", node)


def _band(
    sharder: Sharder, node: ir.Node, inputs: dict[str, ir.Value], attrs: Mapping[str, object]
) -> tuple[int, int]:
    """The two diagonals of the table above. A mask that is not needed beside them leaves the
    inputs."""
    pre, after, masked = _band_and_mask(sharder, node, inputs.get("atten_mask"), attrs)
    if not masked:
        inputs.pop("atten_mask", None)
    return pre, after


def _band_and_mask(
    sharder: Sharder, node: ir.Node, mask: ir.Value | None, attrs: Mapping[str, object]
) -> tuple[int, int, bool]:
    """The two diagonals, and whether the mask stays."""
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
    if mode == 4 and min(pre, after) >= 0:
        return pre, after, of_keys and masks
    if mode == 4:
        raise Refusal("its band leaves out the key of the row itself", node)
    raise Refusal(f"sparse_mode {mode} is not cut", node)


def _rows(sharder: Sharder, node: ir.Node, name: str, value: ir.Value) -> ir.Value:
    """The rank's rows of a mask or bias, with all keys."""
    shape = sharder.shape(value, node)
    if name in BIASES and (len(shape) != 4 or not _are_rows(shape[2], sharder.length)):
        raise Refusal("the rows of its bias are not proven to be those of the sequence", node)
    place = Place(len(shape) - 2)
    with sharder.gathering() if name in BIASES else nullcontext():
        own = sharder.aligned(value, place, len(shape), sharder.length, node)
    assert own is not None
    return own


def _are_rows(size: Dim, length: Dim) -> bool:
    """Is this 1 or the length of the sequence in every run in which such a bias fits the scores? A
    table with a row for each position is cut to the smaller of its own rows and the sequence's. One
    of COMPRESSED_ROWS stands for more."""
    tables = ((length - arg).const for atom in size.atoms for arg in atom.args)
    cut = (Dim.min(length, rows) for rows in tables if rows not in (None, COMPRESSED_ROWS))
    return size.const == 1 or size in (length, *cut)


def _sizes(
    sharder: Sharder,
    node: ir.Node,
    inputs: Mapping[str, ir.Value],
    attrs: Mapping[str, object],
    after: int,
) -> AttentionSizes:
    """The sizes that the choice of a method depends on. Raises Refusal where they are unknown."""
    heads = int(str(attrs["head_num"]))
    shapes = (sharder.shape(inputs[name], node) for name in ("query", "key", "value"))
    query, key, value = (TensorInfo("", tuple(consts(shape))) for shape in shapes)
    sizes = measure(str(attrs["input_layout"]), heads, query, key, value)
    numbers = instances((sizes.n2, sizes.d, sizes.dv), int)
    if len(numbers) < 3 or min(heads, *numbers) < 1:
        raise Refusal("its heads and their sizes are unknown", node)
    key_heads, size, value_width = numbers
    dtype = sharder.info.dtype(inputs["query"])
    refused = refused_methods(
        heads, key_heads, sharder.ranks, "sink" in inputs, str(attrs.get("cpu_empty_rows", ""))
    )
    reason = sharder.no_ring or _ring_fault(sharder, inputs.get("real_shift"))
    if reason:
        refused.setdefault(RING, reason)
    return AttentionSizes(
        name=label(node),
        heads=heads,
        key_heads=key_heads,
        width=size + value_width,
        value_width=value_width,
        bytes=4 if dtype is None else int(dtype.itemsize),
        causal=after < UNLIMITED,
        refused=refused,
    )


def _ring_fault(sharder: Sharder, bias: ir.Value | None) -> str:
    """Why a rank with a graph of its own cannot compute this attention in a ring; "" where it can.

    The scores of a part are all infinite where a bias excludes all its keys by infinity. Such a
    part has no softmax. Ranks of one graph notice this and gather the keys instead.
    """
    if bias is None or not sharder.own_graphs:
        return ""
    # NaN in a part makes the row NaN, as in the whole
    limits = Bounds(sharder.info).unless_nan(bias)
    if limits is not None and all(map(math.isfinite, limits)):
        return ""
    return "its bias may be infinite, so that a part of the keys may have no softmax"
