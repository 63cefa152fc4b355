"""Sizes that are equal in every run in which a Reshape succeeds.

    mask = mask[..., :keys].unsqueeze(2).expand(batch, kv_heads, groups, rows, keys)
    scores = scores + mask.reshape(batch, heads, rows, keys)      # fails where the mask had fewer columns

    operand := Reshape(x, sizes) | a move (movers.py) or Cast of an operand

A Reshape keeps the number of elements. So where its input has the sizes a, b, c and its result a,
b, d, then c is d if there are elements at all. Doge repeats a mask for several heads and states the
number of its columns once more: a mask of one column, which the bias beside it makes one of all
keys, does not fit there.

Only an operand of an element-wise operator is looked at. If the result has elements, then each
operand has some. The scores have no elements if there are no keys, but the attention then still has
a result: zeros for each row of each batch entry and head. So only the number of columns is read by
these sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Atom, Dim, product, zero_minimum
from fa_compiler.passes.ir.nodes import is_op, producer
from fa_compiler.passes.ops.context import Shape
from fa_compiler.passes.ops.movers import MOVES
from fa_compiler.passes.values.shapes import ShapeInfo

ELEMENTWISE = ("Add", "Sub", "Where")
"""The operators by which masks and biases join the scores."""


def sizes_of_reshapes(nodes: Sequence[ir.Node], info: ShapeInfo) -> Mapping[Atom, Dim]:
    """What sizes are in the runs in which the results of these nodes have elements, by the Reshapes
    that make their operands."""
    sizes: dict[Atom, Dim] = {}
    joined = (node for node in nodes if is_op(node, *ELEMENTWISE))
    for reshape in itertools.chain.from_iterable(map(_reshapes, joined)):
        own, shape = info.shape(reshape.inputs[0]), info.shape(reshape.outputs[0])
        if own is not None and shape is not None:
            sizes.update(_equal_sizes(own, shape))
    return sizes


def _reshapes(node: ir.Node) -> Iterator[ir.Node]:
    """The Reshapes among the operators that only move the operands of a node."""
    for operand in node.inputs:
        maker = producer(operand)
        while is_op(maker, *MOVES, "Cast"):
            if is_op(maker, "Reshape"):
                yield maker
            maker = producer(maker.inputs[0])


def _equal_sizes(own: Shape, shape: Shape) -> dict[Atom, Dim]:
    """The size that equal numbers of elements prove, if all other sizes of both shapes are equal
    and none is 0."""
    left, right = list(own), list(shape)
    for size in own:
        if size in right:
            left.remove(size)
            right.remove(size)
    return zero_minimum(product(left) - product(right))
