"""Nodes that compute the same: layers that make the mask or its sizes for themselves read those of
the first one.

    mask[:, :, :, : keys.shape[-2]]      in each layer

Grammar; the code cites the numbers of the cases:

    equal nodes :=
      1     the same standard operator with equal attributes, none of them a graph, that computes
            the same each time and reads equal values; the same results are given
      2   | standard operators with one result each, which are equal integers
    equal values :=
      3     one value, or the results of equal nodes
      4   | small constants of the same bits
      5   | integers: known ones, or the same formulas of the sizes of the model's inputs

So their results are equal in every run, to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import RANDOM, STANDARD, constant, holds_output
from fa_compiler.passes.values.shapes import ShapeInfo

SMALL = 64
"""Constants of more elements than this are not compared."""
PLAIN = (
    ir.AttributeType.INT,
    ir.AttributeType.INTS,
    ir.AttributeType.FLOAT,
    ir.AttributeType.STRING,
)


@dataclass(frozen=True)
class Equal:
    """A node, and another one that may be read in its place."""

    node: ir.Node
    first: ir.Node


def equal_nodes(graph: ir.Graph, info: ShapeInfo) -> Iterator[Equal]:
    """The nodes of a sorted graph that compute what an earlier one computes. The caller replaces
    each as soon as it is yielded."""
    seen: dict[object, ir.Node] = {}
    for node in list(graph):
        key = _key(node, info)
        first = node if key is None else seen.setdefault(key, node)
        if first is not node and not holds_output(node.outputs):
            yield Equal(node, first)


def _key(node: ir.Node, info: ShapeInfo) -> object:
    """What is equal for equal nodes; None for a node that is compared with none."""  # 1
    if node.domain not in STANDARD or node.op_type in (*RANDOM, "Constant") or not node.inputs:
        return None
    attributes = node.attributes.values()
    if any(attr.is_ref() or attr.type not in PLAIN for attr in attributes):
        return None
    if len(node.outputs) == 1 and (integers := _integers(node.outputs[0], info)) is not None:  # 2
        return integers
    numbers = tuple(sorted((attr.name, repr(attr.value)) for attr in attributes))
    given = tuple(bool(value.name) for value in node.outputs)
    return node.op_type, given, numbers, tuple(_value_key(value, info) for value in node.inputs)


def _value_key(value: ir.Value | None, info: ShapeInfo) -> object:
    """What is equal for equal values."""
    if value is None:
        return None
    if (numbers := constant(value, SMALL)) is not None:  # 4
        return numbers.dtype.name, numbers.shape, numbers.tobytes()
    return _integers(value, info) or value  # 3 and 5


def _integers(value: ir.Value, info: ShapeInfo) -> object:
    """The type, the shape and the content of a tensor of integers; None where they are not
    known."""
    content = info.content(value)
    return None if content is None else (info.dtype(value), info.shape(value), content)
