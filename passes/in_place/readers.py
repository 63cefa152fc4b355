"""Fused attention that reads a buffer in place: it takes the number of keys and reads nothing after
the last key.

FlashAttentionScore   The number is actual_seq_kvlen (EXT-KEY-LENGTH). The layout must have the
                      tokens along the axis of the cache. Any of key, value and key_rope may have
                      room for more keys. Masks, bands, biases and rows that are masked everywhere
                      mean the same as before.
IncreFlashAttention   The number is actual_seq_lengths. Key and value must both be caches. There
                      must be no mask, bias
                      or padding on the left, because the operator measures these from the end of
                      the buffer. Lengths that the node has already stay: they are at most the
                      number of keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from fa_compiler.op_registry import DOMAIN, bind_inputs, get, place_inputs
from fa_compiler.op_registry.geometry import SEQUENCE_AXIS
from fa_compiler.passes.ir.nodes import attribute_values, sole, text_attr, without_absent

LENGTHS = {"FlashAttentionScore": "actual_seq_kvlen", "IncreFlashAttention": "actual_seq_lengths"}
CACHES = ("key", "value", "key_rope")
FROM_THE_END = ("atten_mask", "pse_shift", "kv_padding_size", "block_table")


def cache_inputs(node: ir.Node, axes: Mapping[ir.Value, int]) -> dict[str, ir.Value]:
    """The inputs that an attention can read out of a buffer; `axes` has the axis of the tokens for
    each cache."""
    if node.domain != DOMAIN or node.op_type not in LENGTHS:
        return {}
    inputs = _bound(node)
    wanted = SEQUENCE_AXIS.get(text_attr(node, "input_layout", ""))
    given = {name: _one(inputs.get(name)) for name in CACHES}
    caches = {
        name: value
        for name, value in given.items()
        if value is not None and axes.get(value, -1) == wanted
    }
    if node.op_type == "FlashAttentionScore":
        in_place = inputs["actual_seq_kvlen"] is None
    else:
        in_place = len(caches) == 2 and all(inputs[name] is None for name in FROM_THE_END)
    if not in_place:
        return {}
    return caches


def read_buffers(node: ir.Node, buffers: Mapping[str, ir.Value], total: ir.Value) -> None:
    """Let an attention read these inputs from buffers that hold `total` keys, int64 [1]."""
    inputs = _bound(node) | dict(buffers)
    length = LENGTHS[node.op_type]
    if inputs[length] is None:
        inputs[length] = total
    placed = place_inputs(get(node.op_type), without_absent(inputs))
    node.resize_inputs(len(placed))
    for index, value in enumerate(placed):
        node.replace_input_with(index, value)


def _bound(node: ir.Node) -> dict[str, Any]:
    attrs = attribute_values(node)
    return bind_inputs(get(node.op_type), list(node.inputs), attrs)


def _one(value: Any) -> ir.Value | None:
    """The tensor of an input; None where it is absent or a list of several tensors."""
    if isinstance(value, Sequence):
        value = sole(value)
    return value if isinstance(value, ir.Value) else None
