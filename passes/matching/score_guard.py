"""The guard that asks whether a row has any score but -inf, as torch's decomposition of a safe softmax writes it.

Grammar; the code cites the numbers of the cases:

    keep :=
      1     any(Not(test))                            any(x) := ReduceMax(x, last axis, keepdims=1)
      2   | Not(drop)
      3   | Cast(keep)                                from booleans to numbers, or back
    drop :=
      4     all(test)                                 all(x) := ReduceMin(x, last axis, keepdims=1)
          | Not(keep) | Cast(drop)                    as 2 and 3
    test :=
      5     Equal(scores, -inf)                       scores the very input of the softmax, or what it was before its
                                                      own maximum was subtracted

Casts (3) and negations (2) may also lie between the reduction and the test. Exact: the rows that the guard makes 0 are
those whose scores are -inf throughout.

It is read by a walk with a state, and not as a pattern: casts and negations come in any number and at any place.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from fa_compiler.passes.nodes import int_attr, is_op, reduced_axes
from fa_compiler.passes.patterns import Bind, OneOf, Op, match
from fa_compiler.passes.values.shapes import ShapeInfo

MAX_STEPS = 12

SCORES = Bind("scores")
SHIFTED = Op("Sub", SCORES, Bind("maximum"))
EXPONENTIALS = OneOf((Op("Softmax", SCORES), Op(("Softmax", "Exp"), SHIFTED)))
SOFTMAX_OF_SCORES = OneOf((EXPONENTIALS, Op("Div", EXPONENTIALS, Bind("total"))))


def score_tests(condition: ir.Value | None, keep: bool, softmax: ir.Value, info: ShapeInfo) -> tuple[ir.Node, ...]:
    """The nodes that compute the condition, first the comparison; none when it is no such guard.

    `keep` says whether the guard keeps a probability where the condition is true.
    """
    nodes: list[ir.Node] = []
    reduced = False
    value, wanted = condition, keep
    while value is not None and len(nodes) < MAX_STEPS:
        node = value.producer()
        if node is None or value.is_graph_output() or sum(1 for _ in value.uses()) != 1:
            return ()
        nodes.append(node)
        if is_op(node, "Not"):  # 2
            wanted = not wanted
        elif is_op(node, "ReduceMax", "ReduceMin"):  # 1 and 4
            shape = info.shape(node.inputs[0]) if node.inputs[0] is not None else None
            last = shape is not None and reduced_axes(node) in ([-1], [len(shape) - 1])
            # A maximum asks for any score that is kept, a minimum whether all are dropped.
            fits = wanted == (node.op_type == "ReduceMax")
            if reduced or not fits or not last or int_attr(node, "keepdims", 1) != 1:
                return ()
            reduced = True
        elif is_op(node, "Equal"):  # 5
            return tuple(reversed(nodes)) if reduced and not wanted and _of_scores(node, softmax, info) else ()
        elif not is_op(node, "Cast") or not _keeps_truth(node, info):
            return ()
        value = node.inputs[0]
    return ()


def _keeps_truth(cast: ir.Node, info: ShapeInfo) -> bool:
    """3: is a cast from booleans to numbers, or from numbers to booleans?"""
    source = cast.inputs[0]
    kinds = (None if source is None else info.dtype(source)), info.dtype(cast.outputs[0])
    return None not in kinds and ir.DataType.BOOL in kinds


def _of_scores(equal: ir.Node, softmax: ir.Value, info: ShapeInfo) -> bool:
    """5: is this Equal(scores, -inf)?"""
    scores, number = equal.inputs[0], equal.inputs[1]
    if scores is None or number is None or info.scalar(number) != -math.inf:
        return False
    return match(SOFTMAX_OF_SCORES, softmax, info, {SCORES.name: scores}) is not None
