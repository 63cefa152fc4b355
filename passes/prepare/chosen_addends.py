"""Terms that are added to the scores under a condition: the condition becomes a part of the term.

    scores = where(padding, scores - 1e9, scores)

Keras' Attention writes its mask so. Grammar; the code cites the numbers of the cases:

    chosen :=
      1     Where(b, lowered, scores) | Where(b, scores, lowered)    the scores come from a product
      2   | Add(Mul(f, lowered), Mul(g, scores))       f and g are b and its opposite, cast to 0 and
                                                       1 (tf2onnx) or constants; the scores are a
                                                       product in float32, with factors
                                                       or layout after it, and t is one finite
                                                       number
    lowered :=
      3     Add(scores, t) | Add(t, scores) | Sub(scores, t)
    emitted
      4     Add(scores, Where(b, t, 0)) | Sub(scores, Where(b, t, 0))    the operator of `lowered`;
                                                       0 and t change places where b chooses the
                                                       scores

Where the scores are chosen, 0 is added to them or taken from them, which leaves them as they are:
NaN and infinities stay, and a softmax does not tell -0 from 0. Elsewhere the same two numbers are
added. In case 2 an infinite number makes NaN in the original, whichever of the two is chosen. So t
is finite there, and no mask is before it; the scores of a product are assumed to be finite. In
float16 the scores with t might be infinite.

The change is a trial: it is kept if the ordinary matcher then takes the attention
(substitutions.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.axes import AxisSpace
from fa_compiler.passes.answer.decline import if_possible
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.emit.trial import Trial
from fa_compiler.passes.ir.nodes import (
    certain,
    constant,
    is_op,
    nodes_of_type,
    operand_at,
    operand_beside,
    operand_orders,
    operands,
)
from fa_compiler.passes.ir.surgery import depends
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.masks.score_ops import Scale
from fa_compiler.passes.matching.attention import Matcher
from fa_compiler.passes.matching.score_walk import Rearrange
from fa_compiler.passes.matching.scores import ScorePath, find_scores, is_rest
from fa_compiler.passes.matching.softmax import SoftmaxAnchor
from fa_compiler.passes.prepare.substitutions import Substitution, Substitutions, is_match_at
from fa_compiler.passes.values.shapes import ShapeInfo


@dataclass(frozen=True)
class Chosen:
    """`whole` is `op_type` of scores and an addend where the condition equals `adds`, and the
    scores elsewhere."""

    whole: ir.Value
    scores: ir.Value
    op_type: str
    addend: ir.Value
    condition: ir.Value
    adds: bool

    def emitted(self, builder: Builder, dtype: ir.DataType) -> ir.Value:
        """Case 4."""
        terms = [self.addend, builder.constant(np.array(0, dtype=dtype.numpy()), "number")]
        term = builder.where(
            builder.cast(self.condition, ir.DataType.BOOL),
            *(terms if self.adds else reversed(terms)),
        )
        return builder.op(self.op_type, [self.scores, term])


def add_under_conditions(
    graph: ir.Graph,
    softmaxes: Sequence[SoftmaxAnchor],
    matcher: Matcher,
    new_builder: Callable[[], Builder],
) -> Substitutions:
    """Add terms under their conditions, where the attention then matches. The graph stays as it is
    where there are none."""
    result, info = Substitutions(), matcher.facts.info
    for node in reversed(list(nodes_of_type(graph, "Where", "Add"))):  # the last choice first
        if node.graph is not graph or (chosen := _chosen(node, matcher)) is None:
            continue
        dtype = info.dtype(chosen.whole)
        anchor = next((anchor for anchor in softmaxes if depends(anchor.scores, node)), None)
        if dtype is None or anchor is None:
            continue
        with Trial(new_builder()) as trial:
            trial.replace((chosen.whole, chosen.emitted(trial.builder, dtype)))
            if is_match_at(anchor.node, matcher) and (change := trial.keep()) is not None:
                result.add(Substitution(change), anchor.node)
    return result


def _chosen(node: ir.Node, matcher: Matcher) -> Chosen | None:
    """The scores that a node gives with an addend or without it; None for other nodes, such as a
    choice between indices that count from the end."""
    info = matcher.facts.info
    for condition, lowered, scores, adds in _choices(node, info):
        addend = _addend(lowered.producer(), scores)
        if addend is None:
            continue
        path = if_possible(partial(find_scores, scores, Viewer(matcher.facts, AxisSpace()), True))
        if path is not None and (is_op(node, "Where") or _is_finite(path, addend, info)):
            op_type = certain(lowered.producer()).op_type
            return Chosen(node.outputs[0], scores, op_type, addend, condition, adds)
    return None


def _choices(node: ir.Node, info: ShapeInfo) -> Iterator[tuple[ir.Value, ir.Value, ir.Value, bool]]:
    """Cases 1 and 2: a condition, what is chosen where it is true or false, what is chosen
    elsewhere, and which of the two that is."""
    if is_op(node, "Where"):
        condition, chosen, other = operands(node)
        yield condition, chosen, other, True
        yield condition, other, chosen, False
        return
    for left, right in (
        operand_orders(node, "Add") if info.dtype(node.outputs[0]) == ir.DataType.FLOAT else ()
    ):
        for lowered, flag in operand_orders(left.producer(), "Mul"):
            if (truth := _condition(flag, info)) is None:
                continue
            for scores, rest in operand_orders(right.producer(), "Mul"):
                if is_rest(rest, flag, info):
                    yield truth, lowered, scores, True


def _addend(lowered: ir.Node | None, scores: ir.Value) -> ir.Value | None:
    """Case 3: what is added to scores, or taken from them."""
    if is_op(lowered, "Sub"):
        left, right = operands(lowered)
        return right if left is scores else None
    return operand_beside(lowered, scores, "Add")


def _condition(flag: ir.Value, info: ShapeInfo) -> ir.Value | None:
    """The boolean that is cast to this value, or this value if it is a constant of 0 and 1; None
    for other values."""
    source, numbers = operand_at(flag.producer(), 0), constant(flag)
    if is_op(flag.producer(), "Cast") and info.dtype(source) == ir.DataType.BOOL:
        return source
    return flag if numbers is not None and np.isin(numbers, (0, 1)).all() else None


def _is_finite(path: ScorePath, addend: ir.Value, info: ShapeInfo) -> bool:
    """Case 2: is this a product, with factors or layout after it, and the addend one finite
    number?"""
    number = info.scalar(addend)
    plain = all(isinstance(step, Rearrange | Scale) for step in path.steps)
    return plain and number is not None and math.isfinite(number)
