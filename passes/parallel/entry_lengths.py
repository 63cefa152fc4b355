"""Caches in which each batch entry has a number of keys of its own: the rows of present, gathered
one by one.

A GroupQueryAttention is fused so, where past and present are separate buffers
(attention_ops/group_cache.py):

    places = torch.arange(T)[None]                          # T rows of present; past has P, before[b] of which are kept
    appended = torch.where(places < after, places - before + P, last)
    source = torch.where(places < before, places, appended)
    present = torch.cat([past, new, zeros], dim=2)[entry, heads, source]

    present  := GatherND(Concat(moved(past), new ..; axis of the tokens), Concat(entry ..; last
             axis))
    entry    := anything; the one of the tokens is moved(source)
    source   := Where(Less(place, before), place, Where(any, Add(Sub(place, before), held), last))
    place    := moved(Range(0, count, 1)), which counts along the tokens of present
    held     := the number of rows of past
    last     := held or more
    moved(x) := x | Unsqueeze(moved(x)) | Expand(moved(x))

A row of present whose source lies in past has the place of its source: before[b] rows are kept
where they are. All others come from behind past. So a rank needs no other rank's rows: where the
sequence is that of present, the row j of past that it wants is its own, and j / N is the place of
this row in its part, for N ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ir.nodes import int_attr, is_op, operands, source_through
from fa_compiler.passes.ops.parts import Parts, concat_of
from fa_compiler.passes.values.shapes import ShapeInfo


@dataclass(frozen=True)
class GatheredRows:
    """A GatherND as above. `rows` is the Concat of past and what is behind it, along `axis`.
    `entries` are those of the indices, of which that at `axis` picks the rows; `count` is the
    number of rows of present."""

    rows: Parts
    entries: tuple[ir.Value, ...]
    count: ir.Value

    @property
    def axis(self) -> int:
        """The dimension of the rows."""
        return self.rows.axis


def gathered_rows(node: ir.Node, info: ShapeInfo) -> GatheredRows | None:
    """The gathered rows that a node gives; None where it is not proven that each row of past keeps
    its place."""
    if not is_op(node, "GatherND") or int_attr(node, "batch_dims", 0):
        return None
    data, indices = operands(node)
    rows, join = concat_of(data.producer(), info), concat_of(indices.producer(), info)
    if rows is None or join is None or not join.is_last:
        return None
    shape, index_shape, past = info.shape(data), info.shape(indices), info.shape(rows.parts[0])
    if shape is None or index_shape is None or past is None or len(index_shape) != len(shape):
        return None
    axis, entries = rows.axis, join.parts
    single = all(join.size(entry, info) == Dim(1) for entry in entries)
    if not single or len(entries) <= axis:
        return None
    count = _counted(entries[axis], past[axis], axis, info)
    if count is None:
        return None
    return GatheredRows(rows, entries, count)


def _counted(entry: ir.Value, held: Dim, axis: int, info: ShapeInfo) -> ir.Value | None:
    """The number of rows that an entry picks along the axis, if it picks each row of past for its
    own place."""
    choice = _operands(_unbroadcast(entry), "Where")
    if not choice:
        return None
    kept, place, behind = choice
    compared, other = _operands(kept, "Less"), _operands(behind, "Where")
    if not compared or not other or compared[0] is not place:
        return None
    before, (_, shifted, last) = compared[1], other
    added = _operands(shifted, "Add")
    subtracted = added and _operands(added[0], "Sub")
    if not subtracted or subtracted[0] is not place or subtracted[1] is not before:
        return None
    end = info.integer(last)
    if info.integer(added[1]) != held or end is None or not (end - held).is_at_least(0):
        return None
    return _range_along(entry, place, axis, info)


def _range_along(entry: ir.Value, place: ir.Value, axis: int, info: ShapeInfo) -> ir.Value | None:
    """The limit of a Range from 0 in steps of 1, if it counts along the axis of the entry."""
    counter = _unbroadcast(place)
    counted = _operands(counter, "Range")
    whole, own = info.shape(entry), info.shape(counter)
    if not counted or whole is None or own is None:
        return None
    start, limit, step = counted
    if info.scalar(start) != 0 or info.scalar(step) != 1 or whole[axis] != own[0]:
        return None
    # The dimension is found by its size alone. Another one of this size would leave it open along
    # which it counts.
    if whole.count(own[0]) != 1:
        return None
    return limit


def _unbroadcast(value: ir.Value) -> ir.Value:
    """What Unsqueeze and Expand make a value of: `x` of moved(x)."""
    return source_through(value, "Unsqueeze", "Expand")


def _operands(value: ir.Value, op_type: str) -> tuple[ir.Value, ...]:
    """The inputs of the node that makes the value, if it is of this type and has all of them; else
    none."""
    node = value.producer()
    if not is_op(node, op_type) or None in node.inputs:
        return ()
    return operands(node)
