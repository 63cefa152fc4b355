"""Sizes that the nodes of a model demand of its inputs, where the inputs declare only symbols.

    node                                        demands
    com.microsoft.GroupQueryAttention,          a past has as many heads as the new keys, and the
                                                size of a head is
    MultiHeadAttention,                         the width of the new keys or values, divided by their heads
    DecoderMaskedMultiHeadAttention,
    ai.onnx.Attention
    MatMul                                      the last axis of the left operand is as long as the
                                                second to last axis of the right one
    Concat                                      all operands are equally long on each axis that is
                                                not its own
    ScatterND                                   the axes that the indices do not reach are as long
                                                in the new rows as in the buffer
    Conv                                        its input has as many channels as its kernel times
                                                its groups

onnxruntime-genai's builder names the last axis of each cache `kv_cache_dim`, although its nodes fix
this size: the attention does, and in files of float16 for the CPU a Concat of past and new keys. A
demand counts if shape inference knows one of the two sizes and the other is a symbol of the inputs.
A GroupQueryAttention whose past has another type than its query has a compressed past, of which
nothing is demanded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir

from fa_compiler.comparison.cache_lengths import GROUP_QUERY, PASTS, PREALLOCATED
from fa_compiler.passes import ShapeInfo
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ir.nodes import input_of, int_attr, is_op

Pair = tuple[Dim, Dim]
"""Two sizes that have to be equal."""

PAST_KEYS = {**PREALLOCATED, ("", "Attention"): 4}
"""The input with the past keys, [B, heads, keys, head size]; the past values follow. Inputs 1 and 2
are the new keys and values."""


def demanded_sizes(graph: ir.Graph, info: ShapeInfo) -> dict[str, int]:
    """The size that the nodes of the main graph demand for each symbol. Of several demands the
    first counts."""
    sizes: dict[str, int] = {}
    for node in graph:
        for pair in _equal(node, info):
            for symbol, other in (pair, pair[::-1]):
                atom = symbol.single_atom
                if (
                    atom is not None
                    and atom.op == "symbol"
                    and (number := other.evaluate(sizes)) is not None
                ):
                    sizes.setdefault(atom.name, number)
    return sizes


def _equal(node: ir.Node, info: ShapeInfo) -> Iterable[Pair]:
    if is_op(node, "MatMul"):
        left, right = _shape(node, 0, info), _shape(node, 1, info)
        return [(left[-1], right[-2])] if left and len(right) > 1 else []
    if is_op(node, "Concat"):
        return _joined(node, info)
    if is_op(node, "ScatterND"):
        return _written(*(_shape(node, index, info) for index in range(3)))
    if is_op(node, "Conv"):
        value, kernel = _shape(node, 0, info), _shape(node, 1, info)
        return (
            [(value[1], kernel[1] * int_attr(node, "group", 1))]
            if len(value) > 1 and len(kernel) > 1
            else []
        )
    kind = (node.domain, node.op_type)
    if kind == GROUP_QUERY:
        return _group_query(node, info)
    return _plain(node, PAST_KEYS[kind], info) if kind in PAST_KEYS else []


def _joined(node: ir.Node, info: ShapeInfo) -> Iterator[Pair]:
    first, *others = (_shape(node, index, info) for index in range(len(node.inputs)))
    if not first:
        return
    own = int_attr(node, "axis", 0) % len(first)
    for other in others:
        if len(other) == len(first):
            yield from (
                pair for axis, pair in enumerate(zip(first, other, strict=True)) if axis != own
            )


def _written(
    buffer: tuple[Dim, ...], indices: tuple[Dim, ...], rows: tuple[Dim, ...]
) -> Iterable[Pair]:
    reached = indices[-1].const if indices else None
    return (
        []
        if reached is None
        else list(zip(buffer[reached:], rows[len(indices) - 1 :], strict=False))
    )


def _group_query(node: ir.Node, info: ShapeInfo) -> Iterator[Pair]:
    heads, key_heads = int_attr(node, "num_heads", 0), int_attr(node, "kv_num_heads", 0)
    in_a_row = heads if input_of(node, 1) is not None else heads + 2 * key_heads
    query = input_of(node, 0)
    for index in PASTS:
        past = input_of(node, index)
        if query is not None and past is not None and info.dtype(past) == info.dtype(query):
            yield from _head(_shape(node, index, info), key_heads, _shape(node, 0, info), in_a_row)


def _plain(node: ir.Node, past_key: int, info: ShapeInfo) -> Iterator[Pair]:
    heads = int_attr(node, "kv_num_heads" if node.domain == "" else "num_heads", 0)
    for new, past in ((1, past_key), (2, past_key + 1)):
        shape = _shape(node, new, info)
        if len(shape) == 4:
            yield from zip(_shape(node, past, info)[1::2], shape[1::2], strict=False)
        else:
            yield from _head(_shape(node, past, info), heads, shape, heads)


def _head(past: tuple[Dim, ...], heads: int, new: tuple[Dim, ...], in_a_row: int) -> Iterator[Pair]:
    """The demands on a past with `heads` heads, if the 3-D tensor `new` holds `in_a_row` heads in
    each row."""
    if len(past) == 4 and len(new) == 3 and heads > 0 and in_a_row > 0:
        yield past[1], Dim(heads)
        yield past[3], Dim.floordiv(new[2], in_a_row)


def _shape(node: ir.Node, index: int, info: ShapeInfo) -> tuple[Dim, ...]:
    """The sizes of an input; none if the input is absent or its rank is open."""
    value = input_of(node, index)
    return () if value is None else tuple(info.shape(value) or ())
