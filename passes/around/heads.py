"""Heads: parts of the last axis that become an axis of heads, and the parts of one tensor that are
cut into heads.

    q, k, v = (part.view(batch, tokens, -1, size) for part in torch.split(x, sizes, -1))

Grammar; the code cites the numbers of the cases:

    heads(x) :=
      1     Reshape(x)                 of the last axis into two, heads and their size; all that
                                       reads x
    parts of x :=
      2     heads(Split(x) -> ...)     all outputs of a Split along the last axis
      3   | heads(Slice(x)), ...       Slices of step 1, which together are the last axis

Nothing else reads x: an operator that works in place may take the parts, which then are the memory
of x. All heads have one size. Then x is cut into heads once, and a Split of the heads gives the
parts: the elements are the same, and two operators do what two for each part did.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import onnx_ir as ir

from fa_compiler.passes.around.halves import cut_by_slice
from fa_compiler.passes.ir.nodes import (
    distinct_consumers,
    is_op,
    only_reader,
    operand_at,
    without_none,
)
from fa_compiler.passes.ops.parts import split_of
from fa_compiler.passes.values.shapes import ShapeInfo


@dataclass(frozen=True)
class Heads:
    """A Reshape of a value into so many heads of a size."""

    node: ir.Node
    count: int
    size: int


@dataclass(frozen=True)
class HeadParts:
    """A tensor whose parts along the last axis are cut into heads of one size, in order."""

    whole: ir.Value
    axis: int
    """The last axis of the tensor."""
    parts: tuple[Heads, ...]


def into_heads(value: ir.Value, info: ShapeInfo) -> Heads | None:
    """The Reshape of a value into heads, which is all that reads it; None where there is no such
    Reshape."""
    node = only_reader(value)
    flat = info.shape(value)
    if not is_op(node, "Reshape") or not flat or node.outputs[0].is_graph_output():
        return None
    shape = info.sizes(node.outputs[0])
    if len(shape) != len(flat) + 1 or shape[:-2] != flat[:-1]:
        return None
    count, size = shape[-2].const, shape[-1].const
    return Heads(node, count, size) if count and size and count * size == flat[-1] else None  # 1


def of_one_size(values: Sequence[ir.Value], info: ShapeInfo) -> tuple[Heads, ...] | None:
    """The heads that values are cut into, if all are, in one size; None for other values."""
    found = without_none(into_heads(value, info) for value in values)
    return (
        tuple(found)
        if len(found) == len(values) and len({heads.size for heads in found}) == 1
        else None
    )


def head_parts(graph: ir.Graph, info: ShapeInfo) -> Iterator[HeadParts]:
    """The tensors of a graph that are cut into parts and then into heads. The caller may replace
    each as soon as it is yielded."""
    for node in list(graph):
        if node.graph is not graph or not is_op(node, "Split", "Slice"):
            continue
        whole = operand_at(node, 0)
        rank = len(info.sizes(whole))
        cuts = _of_slices(whole, rank, info) if is_op(node, "Slice") else _of_split(node, info)
        heads = of_one_size(cuts, info) if len(cuts) > 1 else None
        if heads is not None:
            yield HeadParts(whole, rank - 1, heads)


def _of_split(node: ir.Node, info: ShapeInfo) -> Sequence[ir.Value]:
    """The parts that a Split along the last axis gives, if it is all that reads the tensor; none
    for another one."""
    split = split_of(node, info)
    # 2
    return (
        split.parts
        if split is not None and split.is_last and only_reader(split.whole) is node
        else ()
    )


def _of_slices(whole: ir.Value, rank: int, info: ShapeInfo) -> Sequence[ir.Value]:
    """The parts that Slices give, if they are all of the last axis; none for others."""
    cuts = [cut_by_slice(node, info) for node in distinct_consumers(whole)]
    found = sorted(without_none(cuts), key=lambda cut: cut.places)
    if not found or len(found) < len(cuts) or whole.is_graph_output():
        return ()
    ends = [0, *(cut.places[1] for cut in found)]
    places = [(start, end, 1) for start, end in pairwise(ends)]
    fits = [cut.places for cut in found] == places and ends[-1] == found[0].size
    return [cut.node.outputs[0] for cut in found] if fits and found[0].axis == rank - 1 else ()  # 3
