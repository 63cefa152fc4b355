"""Operators that only give a tensor another shape: several of them become one Reshape, as does a
Transpose that moves nothing.

    x.squeeze(1).unsqueeze(2);  x.transpose(1, 2) where one of the two axes has the size 1

Grammar; the code cites the numbers of the cases:

    view(x) :=
      1     Reshape(x, shape) | Squeeze(x) | Unsqueeze(x) | Flatten(x)
      2   | Transpose(x)               that keeps the order of all axes but those of size 1
    chain(x) :=
      3     view(... view(x))          two or more, the inner ones read by the next one only
      4   | view(x) of case 2          alone: a Reshape is no kernel on the device, a Transpose is
                                       one

The elements keep their order, so that only the shape of the last result counts. A size that is open
is copied from the same place of x, or it is the only open one and follows from the others. Where it
is neither, the chain stays. A chain that ends in the shape of x is x.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import FLOATS, is_op, only_reader, operand_at, permutation
from fa_compiler.passes.ops.context import Shape
from fa_compiler.passes.values.shapes import ShapeInfo


@dataclass(frozen=True)
class Chain:
    """Views from a tensor to the last result, the last node first, and what a Reshape is given;
    None for nothing."""

    source: ir.Value
    nodes: tuple[ir.Node, ...]
    target: tuple[int, ...] | None


def chains(graph: ir.Graph, info: ShapeInfo) -> Iterator[Chain]:
    """The chains of a graph. The caller may replace a chain as soon as it is yielded."""
    for node in list(graph):
        if (
            node.graph is not graph
            or not _is_view(node, info)
            or _is_view(only_reader(node.outputs[0]), info)
        ):
            continue
        if (chain := _chain(node, info)) is not None:
            yield chain


def _chain(last: ir.Node, info: ShapeInfo) -> Chain | None:
    """The chain that ends in a view; None where nothing is won."""
    nodes, source = [last], operand_at(last, 0)
    while only_reader(source) is nodes[-1] and _is_view(maker := source.producer(), info):
        nodes.append(maker)  # 3
        source = operand_at(maker, 0)
    if len(nodes) == 1 and not is_op(last, "Transpose"):  # 4
        return None
    before, after = info.shape(source), info.shape(last.outputs[0])
    if before is None or after is None or last.outputs[0].is_graph_output():
        return None
    if before == after:
        return Chain(source, tuple(nodes), None)
    target = _target(before, after)
    return None if target is None else Chain(source, tuple(nodes), target)


def _is_view(node: ir.Node | None, info: ShapeInfo) -> TypeGuard[ir.Node]:
    """Does a node only give a tensor of floats another shape?"""
    if not is_op(node, "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose"):
        return False
    shape = info.shape(operand_at(node, 0))
    if shape is None or info.dtype(operand_at(node, 0)) not in FLOATS:
        return False
    perm = permutation(node, len(shape)) if is_op(node, "Transpose") else []
    if perm is None:
        return False
    moved = [axis for axis in perm if shape[axis] != 1]  # 1 and 2
    return moved == sorted(moved)


def _target(before: Shape, after: Shape) -> tuple[int, ...] | None:
    """What a Reshape is given to make a shape of another one: 0 for a size that it copies, and -1
    for the only open one. None where that does not say the shape."""
    opened = [place for place, size in enumerate(after) if size.const is None]
    copied = [place for place in opened if place < len(before) and before[place] == after[place]]
    if len(copied) == len(opened):
        open_number = 0
    elif len(opened) == 1:
        open_number = -1
    else:
        return None
    numbers = tuple(open_number if size.const is None else size.const for size in after)
    return None if any(size.const == 0 for size in after) else numbers
