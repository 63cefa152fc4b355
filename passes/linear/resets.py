"""Resets: tokens in front of which the state becomes 0, such as the first one of each document in a
packed sequence.

Grammar of what is found, in a loop, or at each token of an unrolled one; the code cites the numbers
of the cases:

    reset :=
      1     Where(truth, 0, state) | Where(truth, state, 0)
      2   | Mul(state, factor)     the factor is 1 or 0: Cast(truth), 1 - Cast(truth), Where(truth,
                                   0, 1), and others
    truth :=
      3     a truth value for each token, or for each token and head, of the graph itself
      4   | chain(tensor)          made of such a tensor element by element, with single numbers:
                                   Not(first), Equal(position, 0)

In the proof a truth value is an unknown number c: Not(c) is 1 - c, Cast(c) is c, and Where(c, x, y)
is c x + (1 - c) y (operators.py). What is equal for every c is equal for 0 and 1. So a reset is a
decay of 1 - c, or of c, beside the one that the attention has, and the operator gets a log decay of
minus infinity. It multiplies the state by 0, as case 2 does. Case 1 also ends NaN and infinity,
which 0 does not. So what is chosen by a truth value, other than of two finite constants, is only
fused where all numbers are finite (emit.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.ir.nodes import all_nodes, int_attr, is_op, single, subgraphs, without_none
from fa_compiler.passes.linear.candidates import Operand, Sizes, arranged_as
from fa_compiler.passes.linear.evaluation import Evaluation
from fa_compiler.passes.linear.field import reduced
from fa_compiler.passes.linear.operators import evaluated
from fa_compiler.passes.linear.regions import Region
from fa_compiler.passes.linear.tensors import FailedError, Tensor, exact
from fa_compiler.passes.ops.elementwise import POINTWISE
from fa_compiler.passes.ops.movers import MOVES
from fa_compiler.passes.values.shapes import ShapeInfo

MOST_TRUTHS = 16
"""So many tensors of truth values are looked at."""


@dataclass(frozen=True)
class Truth:
    """Truth values: `steps` make them of a value of the graph, one after the other."""

    source: ir.Value
    steps: tuple[ir.Node, ...]

    def at(self, point: Evaluation) -> Tensor | None:
        """The truth values at a point; None where they are not known there, or are the same in
        every run."""
        try:
            tensor = point.tensor(self.source)
            for node in self.steps:
                arrays = map(single, node.inputs)
                operands = [tensor if array is None else exact(array) for array in arrays]
                (tensor,) = evaluated(node, operands, point.info.dtype(node.inputs[0]), False)
        except FailedError:
            return None
        return tensor if tensor.exact is None else None


@dataclass(frozen=True)
class Reset:
    """The state becomes 0 where the truth holds; where `is_kept`, it does where it does not hold.
    `operand` says how the axes lie in the truth values."""

    truth: Truth
    operand: Operand
    is_kept: bool
    shape: tuple[int, ...]
    """Of the truth values at the first point."""


def read_reset(reset: Reset, point: Evaluation, sizes: Sizes) -> np.ndarray | None:
    """What the state is multiplied by, [B,T,H]. None where the truth values do not fit the
    sizes."""
    numbers = if_known(Tensor.numbers, reset.truth.at(point))
    array = if_known(arranged_as, numbers, reset.operand, sizes)
    if array is None:
        return None
    kept = array if reset.is_kept else reduced(1 - array)
    return np.broadcast_to(kept, (sizes.batch, sizes.tokens, sizes.heads))


def truths_of(region: Region, info: ShapeInfo) -> list[Truth]:
    """The truth values by which the states of a region may be reset."""
    bodies = [graph for node in region.nodes for graph in subgraphs(node)]
    inner = [node for graph in bodies for node in all_nodes(graph)]
    owners = {graph: node for node in (*region.nodes, *inner) for graph in subgraphs(node)}
    uses = [node for node in region.nodes if _may_reset(node, region.depth, info)]
    uses += [node for node in inner if _may_reset(node, lambda _: 1, info)]
    read = dict.fromkeys(without_none(node.inputs[0] for node in uses))
    found = (
        truth
        for value in read
        for truth in _chains(value, owners)
        if not region.depth(truth.source)
    )
    return [*islice(dict.fromkeys(found), MOST_TRUTHS)]


def _may_reset(node: ir.Node, depth: Callable[[ir.Value], int], info: ShapeInfo) -> bool:
    """Does a node choose by truth values what may be a state, or make factors of them? What it
    chooses from two operands is an operand."""
    if is_op(node, "Cast"):
        return info.dtype(node.inputs[0]) == ir.DataType.BOOL  # 2
    if not is_op(node, "Where"):
        return False
    varying = [value for value in node.inputs[1:] if value is not None and single(value) is None]
    return len(varying) < 2 or any(map(depth, varying))  # 2, 1


def _chains(value: ir.Value | None, owners: Mapping[ir.Graph, ir.Node]) -> Iterator[Truth]:
    """The values of the graph that a value is made of element by element, the nearest first, with
    what makes it."""
    steps = list[ir.Node]()
    while value is not None:
        node = value.producer()
        if not _is_inside(value, owners):
            yield Truth(value, tuple(reversed(steps)))  # 3
        if node is None:
            value = _scanned(value, owners)
        elif is_op(node, *MOVES, "Split"):
            value = node.inputs[0]
        else:
            varying = [each for each in node.inputs if single(each) is None]
            if not is_op(node, *POINTWISE) or len(varying) != 1:
                return
            steps.append(node)  # 4
            (value,) = varying


def _is_inside(value: ir.Value, owners: Mapping[ir.Graph, ir.Node]) -> bool:
    """Is this a value of a body?"""
    maker = value.producer()
    return (value.graph if maker is None else maker.graph) in owners


def _scanned(value: ir.Value, owners: Mapping[ir.Graph, ir.Node]) -> ir.Value | None:
    """The tensor of which an input of a Scan's body is a part; None for another value."""
    owner = owners.get(value.graph) if value.graph is not None else None
    if owner is None or value.graph is None or not is_op(owner, "Scan"):
        return None
    place = value.graph.inputs.index(value)
    first = len(owner.inputs) - int_attr(owner, "num_scan_inputs", 0)
    return owner.inputs[place] if place >= first else None
