"""Tensors that are filled part by part: the parts are joined, where all of the tensor is written.

    key = torch.empty(b, n, s, d + r)
    key[..., :d], key[..., d:] = a, b

torch.onnx writes the keys of DeepSeek's latent attention so. ScatterND writes along the first
dimension, so the keys of all tokens are transposed for each part, and back. Grammar; the code cites
the numbers of the cases:

    filled := Transpose(written)                    that alone reads `written`, and is no output
    written :=
      1     ScatterND(below, places, part)          places one constant range of the first
                                                    dimension, as [[3], [4], ...]
    below :=
      2     written                                 behind Transposes, too, that undo each other
      3   | what all of it is overwritten of: the ranges leave out nothing, and no two of them meet
    part :=
      4     x                                       behind Transposes that reorder all parts alike
    emitted
      5     Concat(x1, ..., xn)                     in the order of the ranges; then one Transpose,
                                                    unless those before and behind undo each other

In a run that succeeds both sides hold the same bits. Other readers of a value between keep it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import consts
from fa_compiler.passes.emit.build import Builder, Names
from fa_compiler.passes.ir.nodes import (
    constant,
    is_op,
    makers_of,
    only_reader,
    operand_at,
    permutation,
    sole,
    text_attr,
)
from fa_compiler.passes.ops.parts import cut_from
from fa_compiler.passes.prepare.changes import change_found
from fa_compiler.passes.values.shapes import ShapeInfo


def join_parts(graphs: Sequence[ir.Graph], info: ShapeInfo, names: Names) -> bool:
    """Join the parts of filled tensors. Returns whether anything changed; then `info` does not know
    all of the graphs."""
    return change_found(graphs, info, names, _filled, _Filled.replace)


@dataclass(frozen=True)
class _Part:
    """What is written to places of the first dimension: a value whose dimensions are read in the
    order `order`."""

    places: range
    value: ir.Value
    order: tuple[int, ...]


@dataclass(frozen=True)
class _Filled:
    """A value that holds these parts one behind the other along the axis of each, after it is
    transposed by `perm`."""

    value: ir.Value
    axis: int
    perm: tuple[int, ...]
    parts: tuple[_Part, ...]

    def replace(self, builder: Builder) -> list[ir.Node]:
        """Put the joined parts in the place of the value. Returns the node that made it."""
        builder.replace(self.value, self._joined(builder))
        return makers_of([self.value])

    def _joined(self, builder: Builder) -> ir.Value:
        """Case 5."""
        joined = builder.concat([part.value for part in self.parts], self.axis)
        if self.perm == tuple(range(len(self.perm))):
            return joined
        return builder.transpose(joined, self.perm)


def _filled(node: ir.Node, info: ShapeInfo) -> _Filled | None:
    """The value that a Transpose makes of a tensor that is written in parts; None for other
    nodes."""
    written = operand_at(node, 0)
    shape = (
        info.shape(written)
        if is_op(node, "Transpose") and is_op(written.producer(), "ScatterND")
        else None
    )
    if not shape or only_reader(written) is not node or node.outputs[0].is_graph_output():
        return None
    perm, length = permutation(node, len(shape)), shape[0].const
    if perm is None or length is None:
        return None
    parts = tuple(sorted(_parts(written, length, info), key=lambda part: part.places.start))
    order = sole({part.order for part in parts})  # 4
    if order is None:
        return None
    return _Filled(node.outputs[0], order[0], tuple(order[place] for place in perm), parts)


def _parts(written: ir.Value, length: int, info: ShapeInfo) -> list[_Part]:
    """The parts that make up a tensor of this length, the last one first; none where they do
    not."""
    parts, left, current = list[_Part](), set(range(length)), written
    while left:
        part = _part(current, info)
        if part is None or not left.issuperset(part.places):  # 3
            return []
        left.difference_update(part.places)
        parts.append(part)
        below, order = _moved(operand_at(current.producer(), 0), info)
        if list(order) != sorted(order) and left:
            return []
        current = below  # 2
    return parts


def _part(written: ir.Value, info: ShapeInfo) -> _Part | None:
    """Case 1: what a ScatterND writes; None where it does something else."""
    node = written.producer()
    if not is_op(node, "ScatterND") or text_attr(node, "reduction", "none") != "none":
        return None
    places = _range(operand_at(node, 1), info)
    value, order = _moved(operand_at(node, 2), info)
    return _Part(places, value, order) if places and order else None


def _range(indices: ir.Value, info: ShapeInfo) -> range:
    """The places of indices such as [[3], [4], ...]; empty where they are not known to be one
    range."""
    if (numbers := constant(indices)) is not None:
        start = int(next(iter(numbers.flat), 0))
        found = range(start, start + numbers.size)
        return (
            found
            if numbers.shape[1:] == (1,) and start >= 0 and list(numbers.flat) == list(found)
            else range(0)
        )
    maker, sizes = indices.producer(), consts(info.sizes(indices))
    line = operand_at(maker, 0)
    if not is_op(maker, "Unsqueeze") or len(sizes) != 2 or sizes[1] != 1 or sizes[0] is None:
        return range(0)
    cut = cut_from(line, info)
    whole, _, start = (line, 0, 0) if cut is None else cut
    counted = whole.producer()
    if not is_op(counted, "Range") or [
        info.integer(operand_at(counted, place)) for place in (0, 2)
    ] != [0, 1]:
        return range(0)
    return range(start, start + sizes[0])


def _moved(value: ir.Value, info: ShapeInfo) -> tuple[ir.Value, tuple[int, ...]]:
    """What a value is behind Transposes, and its dimensions in the order of the value; none of an
    unknown rank."""
    order = list(range(len(info.sizes(value))))
    while is_op(node := value.producer(), "Transpose", "Identity"):
        perm = (
            permutation(node, len(order))
            if node.op_type == "Transpose"
            else list(range(len(order)))
        )
        if perm is None:
            break
        order, value = [perm[place] for place in order], operand_at(node, 0)
    return value, tuple(order)
