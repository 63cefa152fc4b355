"""From a softmax up to the product of query and key.

    scores = q @ k.transpose(-2, -1) / math.sqrt(d)
    scores = cap * torch.tanh(scores / cap)
    scores = scores + bias
    scores = scores.masked_fill(~mask, -inf)
    p = scores.softmax(-1)

Grammar, from the softmax's input, which is `scores_with_sink`, upwards. The code cites the numbers
of the cases:

    scores_with_sink := scores
      1     | a sink beside the scores, layout and casts after it     see sinks.py
      2 scores := product                                  see contraction.py
      3     | Gemm(x, y, t)                                beta 1 or -1, no weights: the product and
                                                           t added to it
      4     | layout(scores)                               what views.py looks through
      5     | Slice(scores) | Pad(scores)                  as large as the scores, forwards: it
                                                           leaves out nothing; a Pad of no width
            | Expand(scores) | Tile(scores)                as large as the scores: it repeats
                                                           nothing
      6     | Cast(scores)                                 to the same type or a wider one; from
                                                           float32 to bfloat16 before any term: the
                                                           rounding is left out, which is noted; to
                                                           float16 behind a floor of numbers that
                                                           were float16 (13)
      7     | Mul(scores, c) | Div(scores, c) | Neg        c one finite number known before the run,
                                                           also repeated: the scale
      8     | Mul(scores, t) | Div(scores, t)              t of size 1 along the keys, see
                                                           factors.py
      9     | Add(scores, t) | Sum(scores, t, ...)         t any tensor that does not enlarge the
                                                           scores: a term. A
            | Sub(scores, t) | Sub(t, scores)              Sum adds from left to right, so that it
                                                           is a chain of Adds where the scores are
                                                           one of its first two operands and no
                                                           operand is given twice
     10     | Where(b, scores, f) | Where(b, f, scores)    f one number, repeated or not: a
                                                           selection
     11     | Add(Mul(scores, b), t)                       b of 0 and 1, t = f * (1 - b): the same
                                                           selection. f is
            | Sub(Mul(scores, b), t)                       finite, and may be repeated for all
                                                           scores (TensorFlow's ones_like). 1 - b
                                                           may be the opposite of a boolean
                                                           (tf2onnx), and t c * (b - 1) or
                                                           Where(boolean of b, 0, f). Or b and t are
                                                           constants; b of 0 and c: c is also a
                                                           scale. Or b and t went through the same
                                                           layout operators or Expand (jax2onnx)
     12     | Sub(scores, ReduceMax(scores))               along the keys, only factors and layout
                                                           after it
     13     | Max(scores, f) | Clip(scores, min=f)         f one number of at most -1e30 in float32:
                                                           a floor; or f -65504, and all scores
                                                           float16 numbers, in float16 or cast
     14     | Tanh(scores)                                 a soft cap, the only one; only scales,
                                                           layout, casts, factors and addends of 0
                                                           before it; not on Ascend
     15     | rounded(scores)                              see activation_rounding.py; only if the
                                                           user says so
     16     | one of 8 to 11 and 13 with an operand of     its first dimensions are 1, so that the
                                                           scores get these
              more dimensions than the scores              dimensions in front, as by Unsqueeze
     17     | Mul(scores, b)                               b is 1 wherever a selection (10) behind
                                                           it, with factors (7) between them, keeps
                                                           the scores: b is cast from its condition,
                                                           or the condition compares b with 0 or 1
     18     | Min(scores, Where(b, inf, -inf))             the same selection as Where(b, scores,
                                                           -inf) (10): no
            | Min(scores, Where(b, -inf, inf))             number is above inf, and none is below
                                                           -inf. A minimum keeps NaN, so that no
                                                           term may make +inf or NaN before

A soft cap is c * tanh(scores / c), in any spelling. The operator's scale is the product of all
factors (7) on both sides of Tanh. c is the product of the factors behind Tanh, so that scale / c is
the product of the factors before Tanh. The operator caps the scores before anything is added and
before keys are masked. A mask before Tanh would give masked keys the score -c, which takes part in
the softmax, so no term may be there.

bfloat16 has the exponents of float32, so that no score overflows when it is rounded to bfloat16
(6). The number of a mask (-3.4e38) does overflow, and -1e4 + score is rounded to multiples of 64.
So the rounding may be left out for scores alone, as 16-bit operands may be computed in float32. In
float16 any score may overflow.

The floor of float16 (13) lifts -inf, and sums that fall below it, to -65504. A finite score is not
below it, so without a mask the floor changes nothing. Behind a mask it shows in rows that are
masked everywhere, and beside scores near -65504. So the user has to vouch that there are none: by
`--assume masks-dominate`, and by `no-empty-rows` where no single mask is proven to leave each row a
key.

Refused: everything else.
Where both operands of an Add lead to a product, the one whose shape is provably that of the sum is
followed; the other is a term like any tensor, so either choice is right.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.budget import spend
from fa_compiler.passes.answer.decline import Decline, attempt, if_possible
from fa_compiler.passes.answer.options import DROP_ROUNDINGS
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.nodes import (
    ABSENT,
    constant,
    equal_numbers,
    equal_values,
    input_of,
    inputs_of,
    is_op,
    is_weight,
    operand_at,
    operand_orders,
    operand_pairs,
    operands,
    others_of,
    selections_of,
    sole,
    source_through,
    without_none,
)
from fa_compiler.passes.layout.contraction import (
    Contraction,
    addend,
    any_contraction,
    unknown_rank,
    without_addend,
)
from fa_compiler.passes.layout.views import WIDENING, Viewer
from fa_compiler.passes.masks.magnitudes import DOMINATING, FLOAT16_MAX
from fa_compiler.passes.masks.mask_values import TermValues
from fa_compiler.passes.masks.score_ops import Add, Floor, Scale, Select, Term
from fa_compiler.passes.matching.activation_rounding import HINT as ROUNDING_ADVICE
from fa_compiler.passes.matching.activation_rounding import rounding_ends, rounding_starts
from fa_compiler.passes.matching.factors import factorings, operand
from fa_compiler.passes.matching.row_reductions import shifted_by
from fa_compiler.passes.matching.score_walk import OwnStep, Rearrange, ScoreWalk, Step
from fa_compiler.passes.matching.sinks import SinkSource, append_sink, sinks
from fa_compiler.passes.matching.weights import base_of, holds_weights
from fa_compiler.passes.ops.elementwise import bare, drops_nothing
from fa_compiler.passes.ops.movers import LAYOUT_OPS, MOVES
from fa_compiler.passes.ops.moves import keeps_everything
from fa_compiler.passes.values.patterns import Bind, Number, Op, match
from fa_compiler.passes.values.shapes import ShapeInfo

MAX_DEPTH = 100
"""How deeply operators with two candidates may be nested between product and softmax."""
SUMS = ("Add", "Sub", "Sum")
LIMITS = ("Clip", "Max", "Min", "Relu")
QUANTISING = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")
INTEGER_PRODUCTS = {
    **dict.fromkeys(("DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat"), (0, 1)),
    "QLinearMatMul": (0, 3),
}
"""Products of integers that stand for numbers, and the places of their operands."""
QUANTISED_PRODUCTS = tuple(INTEGER_PRODUCTS)
QUANTISED = (*QUANTISED_PRODUCTS, "QLinearAdd", "QLinearMul", "QLinearWhere")
"""Operators on integers that stand for numbers, of ONNX and of com.microsoft."""
ONE_MINUS_KEEP = Op("Sub", Number(1.0), Bind("keep"))
KEEP_MINUS_ONE = Op("Sub", Bind("keep"), Number(1.0))
CAP_ADVICE = "cap the scores once, before anything is added to them and before keys are masked"
LIMIT_ADVICE = "leave it out, where the scores stay within its limits"
MASK_ADVICE = "if masked keys are to have no weight, select instead: where(mask, scores, -inf) before the softmax"
FACTOR_ADVICE = "multiply the query by it if it is the same for all keys, and the key if it is the same for all rows"
PARTS_ADVICE = (
    "join the keys, and the values, before their products, and not the scores and the results"
)
OWN_QUERIES = (
    "keys in parts: each of them has a query of its own, and one product with all of them would be wider, which takes "
    "longer than the parts"
)
QUANTISED_ADVICE = "fuse the model before it is quantised, or leave the products of attention out of the quantisation"


@dataclass(frozen=True)
class AppendSink(OwnStep):
    """Case 1: a sink beside the scores."""

    sink: SinkSource

    def walk(self, walk: ScoreWalk) -> None:
        number = (
            self.sink.number
            if self.sink.value is None
            else walk.viewer.facts.sets.only(self.sink.value)
        )
        walk.dims, walk.found_sink = append_sink(self.sink, number, walk.dims, walk.viewer)


@dataclass(frozen=True)
class Multiply(OwnStep):
    """Case 8: everything so far times `value`, or divided by it."""

    value: ir.Value
    divides: bool

    def walk(self, walk: ScoreWalk) -> None:
        walk.multiply_by(self.node, self.value, self.divides)


@dataclass(frozen=True)
class AddAll(OwnStep):
    """Case 9: everything so far, and each of `values`."""

    values: tuple[ir.Value, ...]

    def walk(self, walk: ScoreWalk) -> None:
        for value in self.values:
            walk.add(Add(self.node, value))


@dataclass(frozen=True)
class SubtractFrom(OwnStep):
    """Case 9: `value` less everything so far."""

    value: ir.Value

    def walk(self, walk: ScoreWalk) -> None:
        walk.multiply(Scale(self.node, -1.0))
        walk.add(Add(self.node, self.value))


@dataclass(frozen=True)
class SubtractMaximum(OwnStep):
    """Case 12: everything so far less its maximum along `axis`, computed by `maximum`; only factors
    and layout are after it."""

    axis: int
    maximum: tuple[ir.Node, ...]

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        return self.maximum

    def walk(self, walk: ScoreWalk) -> None:
        walk.shifted.append((self.node, walk.dims[self.axis]))


@dataclass(frozen=True)
class Cap(OwnStep):
    """Case 14: tanh of everything so far."""

    def walk(self, walk: ScoreWalk) -> None:
        term = _first_live(walk)
        if walk.softcap != 0.0:
            raise Decline(
                Code.SOFTCAP, "the scores are capped by tanh a second time", self.node, CAP_ADVICE
            )
        if term is not None:
            reason = f"the scores are capped by tanh behind {term.node.op_type}, which would give masked keys a weight"
            raise Decline(Code.SOFTCAP, reason, self.node, CAP_ADVICE)
        walk.terms.clear()
        walk.softcap = 1.0


@dataclass(frozen=True)
class Unround(OwnStep):
    """Case 15: everything so far rounded by `start` and this node, which is left out."""

    start: ir.Node

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        return self.start, self.node

    def walk(self, walk: ScoreWalk) -> None:
        """The arrangement stays what it is."""


def _first_live(walk: ScoreWalk) -> Term | None:
    """The first term so far that does not leave the scores as they are. The scale counts a factor
    already, and no score is below a floor."""
    values, terms = TermValues(walk.viewer), tuple(walk.terms)
    live = (
        term
        for index, term in enumerate(terms)
        if not isinstance(term, Scale | Floor) and not values.changes_no_softmax(terms, index, 0.0)
    )
    return next(live, None)


@dataclass(frozen=True)
class RoundScores(OwnStep):
    """Case 6: everything so far rounded to bfloat16, which the kernels leave out."""

    def walk(self, walk: ScoreWalk) -> None:
        term = _first_live(walk)
        if term is not None:
            reason = f"the scores are rounded to bfloat16 behind {term.node.op_type}, whose numbers are rounded, too"
            raise Decline(Code.CAST, reason, self.node)
        if walk.is_unbounded:
            reason = "the scores are multiplied by a number of any size and rounded to bfloat16, and may overflow there"
            raise Decline(Code.CAST, reason, self.node)
        walk.rounded.append(self.node)


@dataclass(frozen=True)
class ZeroSelected(OwnStep):
    """Case 11: everything so far times `value`, which is 0 or one number, the scale. The Select
    that follows fills what this makes 0."""

    value: ir.Value
    sets_shape: ClassVar[bool] = False

    def walk(self, walk: ScoreWalk) -> None:
        if (endless := TermValues(walk.viewer).first_infinite(tuple(walk.terms))) is not None:
            reason = f"{endless.node.op_type} may make scores infinite, and 0 times infinity is NaN"
            raise Decline(Code.SCORE_TERM, reason, self.node)
        number = walk.viewer.facts.sets.only_besides_zero(self.value)
        if number is None or (number != 1.0 and constant(self.value) is None):
            reason = f"the factor {self.value.name!r} is not proven to be 0 or 1"
            raise Decline(Code.SCALE, reason, self.node, "cast it from a boolean mask")
        if number != 1.0:
            walk.multiply(Scale(self.node, number))


@dataclass(frozen=True)
class SelectByMinimum(OwnStep):
    """Case 18: everything so far where `condition` equals `keep`, and -inf elsewhere."""

    condition: ir.Value
    keep: bool

    def walk(self, walk: ScoreWalk) -> None:
        values, terms = TermValues(walk.viewer), tuple(walk.terms)
        for index, term in enumerate(terms):
            if values.may_be_plus_infinity(terms, index):
                reason = f"{term.node.op_type} may make NaN of scores, which a minimum keeps and a selection does not"
                raise Decline(Code.SCORE_TERM, reason, self.node, MASK_ADVICE)
        walk.select(Select(self.node, self.condition, self.keep, -math.inf))


@dataclass(frozen=True)
class Spare(OwnStep):
    """Case 17: everything so far times a tensor that is 1 wherever the scores are kept."""

    sets_shape: ClassVar[bool] = False

    def walk(self, walk: ScoreWalk) -> None:
        """The scores that are kept stay what they are."""


@dataclass(frozen=True)
class ScorePath:
    """The product and the steps from it to the softmax, in order of computation."""

    product: Contraction
    steps: tuple[Step, ...]

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        """The product's node and every step's."""
        parts = (step.nodes if isinstance(step, OwnStep) else (step.node,) for step in self.steps)
        return (self.product.node, *(node for part in parts for node in part))


Peeling = tuple[Step, ir.Value]
"""A step of the grammar, and what it was done to."""
Peeled = Peeling | None
"""The same; None where a node is another step."""


def find_scores(value: ir.Value, viewer: Viewer, inner: bool = False) -> ScorePath:
    """Follow the grammar above from a softmax's input, or from scores further up; declines name the
    node that broke it.

    With `inner` the walk starts inside the scores, where no sink and no subtracted maximum can
    stand.
    """
    steps: list[Step] = []
    current = value
    while True:
        node = current.producer()
        if node is None:
            raise Decline(
                Code.NO_SCORES_MATMUL,
                f"the scores come from {current.name!r}, which no product makes",
            )
        spend(node)
        product = product_at(node, viewer.info)
        if product is None and (added := _gemm_addend(node)) is not None:  # 3
            product = without_addend(node, viewer.info)
            steps.append(Add(node, *added))
        if product is not None:
            return ScorePath(product, tuple(reversed(steps)))
        if (unknown := unknown_rank(node, viewer.info)) is not None:
            raise Decline(Code.RANK, f"the rank of {unknown!r} is unknown", node)
        step, current = _peel_by_later_steps(current, node, steps, inner, viewer) or _peel(
            node, viewer
        )
        steps.append(step)


def product_at(node: ir.Node | None, info: ShapeInfo) -> Contraction | None:
    """Case 2: the product that a node computes, over one or several axes; None for other nodes."""
    product = any_contraction(node, info)
    return product if product is not None and product.summed else None


def _peel_by_later_steps(
    value: ir.Value, node: ir.Node, later: list[Step], inner: bool, viewer: Viewer
) -> Peeled:
    """The step, if this node is one that depends on the steps after it. `later` holds those, from
    the softmax upwards."""
    if later:
        product = _peel_zeros(node, later[-1]) or _peel_spared(node, later, viewer)
        if product is not None:
            return product
    if inner:
        return None
    only = {type(step) for step in later}
    if only <= {Rearrange, Scale} and (maximum := _peel_maximum(value, viewer)) is not None:
        return maximum
    return _of_scores(_sinks(node, viewer), viewer) if only <= {Rearrange} else None


def _gemm_addend(node: ir.Node) -> tuple[ir.Value, float] | None:
    """What a Gemm of two tensors adds to its product; of a tensor and weights it is a linear
    layer."""
    if not is_op(node, "Gemm") or any(
        value is None or is_weight(value) for value in node.inputs[:2]
    ):
        return None
    added = addend(node)
    return added if added is not None and abs(added[1]) == 1.0 else None


def _of_scores(peelings: Iterable[Peeling], viewer: Viewer) -> Peeled:
    """The first of the ways to read a node in which the step was done to scores; None where no
    product leads to it."""
    # a loop, for a generator would deepen the stack of operators with two candidates
    for step, scores in peelings:
        if _leads_to_product(scores, viewer) or _leads_to_spared(scores, step, viewer):
            return step, scores
    return None


def _leads_to_product(value: ir.Value, viewer: Viewer) -> bool:
    """Does a value come from a product? A soft cap that the target lacks counts: the product lies
    beyond it, and the decline then names the cap."""
    failure = _failure(value, viewer)
    return failure is None or failure.code == Code.SOFTCAP


def _failure(value: ir.Value, viewer: Viewer) -> Decline | None:
    """Why a value does not come from a product; None when it does. Remembered, so that each value
    is asked once."""
    if value not in viewer.failures:
        if viewer.depth >= MAX_DEPTH:
            return Decline(
                Code.SCORE_TERM, "too many terms are added to the scores", value.producer()
            )
        viewer.depth += 1
        path = attempt(lambda: find_scores(value, viewer, True))
        viewer.depth -= 1
        viewer.failures[value] = path if isinstance(path, Decline) else None
    return viewer.failures[value]


def takes_scores(conv: ir.Node, viewer: Viewer) -> bool:
    """Does a convolution take the scores of an attention, their heads as channels, and keep their
    rows and keys?"""
    source = operand_at(conv, 0)
    path = if_possible(lambda: find_scores(source, viewer, True))
    if path is None or any(holds_weights(operand, viewer) for operand in path.product.operands):
        return False
    shapes = [viewer.info.sizes(value) for value in (path.product.output, source, conv.outputs[0])]
    return all(len(shape) == 4 for shape in shapes) and len({shape[2:] for shape in shapes}) == 1


def mixing(what: str, conv: ir.Node, viewer: Viewer) -> str:
    """What a convolution does to scores or probabilities, in words."""
    shape = viewer.info.shape(operand_at(conv, 1))
    if shape is not None and all(size.const == 1 for size in shape[2:]):
        return f"talking heads: a convolution mixes the {what} of several heads"
    return f"a convolution mixes {what} of neighbouring rows and keys"


def _peel(node: ir.Node, viewer: Viewer) -> tuple[Step, ir.Value]:
    """One step of the grammar: what was done, and the scores it was done to."""
    if not node.inputs or node.inputs[0] is None:
        raise Decline(
            Code.NO_SCORES_MATMUL, f"the scores come from {node.op_type}, not from a product", node
        )
    if (product := _integer_product(node, viewer)) is not None:
        reason = f"the scores are a product of integers, by {product.op_type}"
        raise Decline(Code.DTYPE, reason, product, QUANTISED_ADVICE)
    for case in CASES:
        if (peeled := case(node, viewer)) is not None:
            return peeled
    for reading in READINGS:
        if (peeled := _of_scores(reading(node, viewer), viewer)) is not None:
            return peeled
    raise _no_step(node, viewer)


def _integer_product(node: ir.Node, viewer: Viewer) -> ir.Node | None:
    """The product of quantised tensors, none of them a weight, that this node is or casts to
    floats; None for other nodes."""
    maker: ir.Node | None = node
    if is_op(node, "Cast"):
        maker = source_through(operand_at(node, 0), *LAYOUT_OPS).producer()
    if maker is None or maker.op_type not in INTEGER_PRODUCTS:
        return None
    given = [input_of(maker, place) for place in INTEGER_PRODUCTS[maker.op_type]]
    if any(operand is None or holds_weights(operand, viewer) for operand in given):
        return None
    return maker


def _joined_parts(node: ir.Node, parts: list[ir.Value], viewer: Viewer) -> Decline:
    """Why scores that are joined along the keys or rows are no scores of one product."""
    queries = set[ir.Value]()
    for part in parts:
        product = find_scores(part, viewer, True).product
        query_side = int(product.out[-1] not in product.labels[1])
        queries.add(base_of(product.operands[query_side], viewer))
    if len(queries) > 1:
        return Decline(Code.SCORE_TERM, OWN_QUERIES, node, "")
    return Decline(
        Code.SCORE_TERM,
        "keys in parts: the scores of several products are joined",
        node,
        PARTS_ADVICE,
    )


def _no_step(node: ir.Node, viewer: Viewer) -> Decline:
    """Why an operator is no step of the grammar."""
    if addends := _addends(node):
        return _no_addend(node, viewer) or _no_path(node, [value for _, value in addends], viewer)
    if is_op(node, "Where"):
        return _no_selection(node, viewer)
    leading = [value for value in inputs_of(node) if _leads_to_product(value, viewer)]
    if not leading:
        return _no_product(node, viewer)
    if is_op(node, "Mul", "Div"):
        return _no_factor(node, leading[0], viewer)
    if is_op(node, "Conv") and takes_scores(node, viewer):
        return Decline(Code.SCORE_TERM, mixing("scores", node, viewer), node, "")
    if is_op(node, "Concat") and len(leading) > 1:
        return _joined_parts(node, leading, viewer)
    reason = f"{node.op_type} on the scores has no counterpart in the operator"
    advice = LIMIT_ADVICE if is_op(node, *LIMITS) else quantised_advice(node)
    return Decline(Code.SCORE_TERM, reason, node, advice)


def _no_addend(node: ir.Node, viewer: Viewer) -> Decline | None:
    """Why a Sum whose third or later operand is the scores adds no term to them; None for any other
    sum."""
    late = [value for value in operands(node)[2:] if _leads_to_product(value, viewer)]
    if not late:
        return None
    reason = f"Sum adds its first two operands to each other, and {late[0].name!r}, the scores, to their sum"
    return Decline(Code.SCORE_TERM, reason, node, "make the scores the first operand of the Sum")


def _no_product(node: ir.Node, viewer: Viewer) -> Decline:
    """Why the operator that scores come from is no product. A product further up that could not be
    reached tells more than this node."""
    if is_op(node, "Gemm"):
        return Decline(
            Code.NO_SCORES_MATMUL, "the scores come from a Gemm that adds to its product", node
        )
    if is_op(node, "ReduceSum"):
        return Decline(
            Code.NO_SCORES_MATMUL,
            "the scores are summed up by ReduceSum, not by a matrix product",
            node,
        )
    failures = without_none(_failure(value, viewer) for value in inputs_of(node))
    nearer = next((failure for failure in failures if failure.code != Code.NO_SCORES_MATMUL), None)
    reason = f"the scores come from {node.op_type}, not from a product"
    return nearer or Decline(Code.NO_SCORES_MATMUL, reason, node)


def _no_factor(node: ir.Node, scores: ir.Value, viewer: Viewer) -> Decline:
    """Why a product of scores and a tensor that differs between rows and keys is no step."""
    factor = operand(node, scores)
    if (
        factor is not None
        and node.op_type == "Mul"
        and viewer.facts.sets.only_besides_zero(factor[0]) is not None
    ):
        reason = (
            f"the mask {factor[0].name!r} multiplies the scores: a masked key has the score 0, not "
            "-inf, and a weight"
        )
        return Decline(Code.SCALE, reason, node, MASK_ADVICE)
    reason = "the scores are multiplied by something that is not one known number"
    return Decline(Code.SCALE, reason, node, FACTOR_ADVICE)


def quantised_advice(node: ir.Node) -> str | None:
    """What to do about a node that quantises, or computes with quantised numbers; None for other
    nodes."""
    if rounding_ends(node) is not None or rounding_starts(node) is not None:
        return ROUNDING_ADVICE
    return QUANTISED_ADVICE if node.op_type in (*QUANTISING, *QUANTISED) else None


def _peel_layout(node: ir.Node, viewer: Viewer) -> Peeled:
    """Cases 4 and 5, and a Dropout that drops nothing."""
    layout = is_op(node, *LAYOUT_OPS) or drops_nothing(node)
    if not layout and not keeps_everything(node, viewer.info):
        return None
    return Rearrange(node), operand_at(node, 0)


def _peel_rounding(node: ir.Node, viewer: Viewer) -> Peeled:
    """Case 15: a rounding."""
    start = rounding_ends(node)
    if start is None or DROP_ROUNDINGS not in viewer.facts.options.assume:
        return None
    return Unround(node, start), operand_at(start, 0)


def _peel_cap(node: ir.Node, viewer: Viewer) -> Peeled:
    """Case 14: a soft cap. Raises Decline where the target has none."""
    source = operand_at(node, 0)
    if not is_op(node, "Tanh") or not _leads_to_product(source, viewer):
        return None
    if viewer.facts.options.target == "ascend":
        raise Decline(Code.SOFTCAP, "the scores are capped by tanh", node)
    return Cap(node), source


def _peel_number(node: ir.Node, viewer: Viewer) -> Peeled:
    """Case 7: a scale that is one known number."""
    factor = viewer.factor(node)
    return None if factor is None else (Scale(node, factor[1]), factor[0])


def _scales(node: ir.Node, viewer: Viewer) -> Iterator[Peeling]:
    """Case 7: a scale that is one known number, repeated."""
    for scores, value, divides in factorings(node):
        number = viewer.uniform_value(value, scores)
        if number and math.isfinite(number) and _keeps_shape(scores, node, viewer.info):
            yield Scale(node, 1.0 / number if divides else number), scores


def _multiplications(node: ir.Node, viewer: Viewer) -> Iterator[Peeling]:
    """Case 8: a tensor that is the same along rows or keys; which of the two is told later."""
    for scores, value, divides in factorings(node):
        shape = viewer.info.shape(value)
        is_repeated = shape is not None and (len(shape) < 2 or Dim(1) in shape[-2:])
        if is_repeated and _may_keep_shape(scores, node, viewer.info):
            yield Multiply(node, value, divides), scores


def _peel_blend(node: ir.Node, viewer: Viewer) -> Peeled:
    """Case 11: the sum; `_peel_zeros` takes the product with b."""
    for zeroed, rest in _sums(node):
        for keep, scores in operand_orders(zeroed.producer(), "Mul"):
            fill = _fill(rest, keep, scores, viewer)
            if fill is not None and _leads_to_product(scores, viewer):
                return Select(node, keep, True, -fill if node.op_type == "Sub" else fill), zeroed
    return None


def _sums(node: ir.Node) -> tuple[tuple[ir.Value, ir.Value], ...]:
    """How a node may be read as a tensor to which another one is added, or from which it is
    subtracted."""
    orders = operand_orders(node, *SUMS)
    return orders[:1] if is_op(node, "Sub") else orders


def _peel_spared(node: ir.Node, later: list[Step], viewer: Viewer) -> Peeled:
    """Case 17: a product with what is 1 wherever a later selection keeps the scores. Elsewhere the
    selection puts its number, whatever the product is."""
    select = next((step for step in reversed(later) if not isinstance(step, Scale)), None)
    return _of_scores(_spared(node, select, viewer), viewer)


def _leads_to_spared(value: ir.Value, step: Step, viewer: Viewer) -> bool:
    """Does a selection stand behind a product of case 17, with factors between them?"""
    while (factor := viewer.factor(node := value.producer())) is not None:
        value = factor[0]
    return _of_scores(_spared(node, step, viewer), viewer) is not None


def _spared(node: ir.Node | None, select: Step | None, viewer: Viewer) -> Iterator[Peeling]:
    """Case 17: the scores that a node multiplies by what is 1 wherever a selection keeps them."""
    if node is None or not isinstance(select, Select) or not is_op(select.node, "Where"):
        return
    for scores, factor in operand_orders(node, "Mul"):
        if _keeps_shape(scores, node, viewer.info) and _is_one_where_kept(factor, select, viewer):
            yield Spare(node), scores


def _is_one_where_kept(factor: ir.Value, select: Select[ir.Value], viewer: Viewer) -> bool:
    """Is a factor 1 wherever a selection keeps the scores?"""
    condition, negated = bare(select.operand, viewer.info)
    kept, (flag, is_opposite) = select.keep != negated, _flag(factor, viewer.info)
    if equal_values(flag, condition):
        return kept != is_opposite
    numbers = _compared_with(factor, condition, viewer.info)
    if kept:
        return 1.0 in numbers
    return 0.0 in numbers and viewer.facts.sets.only_besides_zero(factor) == 1.0


def _compared_with(value: ir.Value, condition: ir.Value, info: ShapeInfo) -> list[float | None]:
    """The numbers that a condition tests a value to be equal to; none where it is another
    condition."""
    orders = operand_orders(condition.producer(), "Equal")
    return [info.scalar(number) for tested, number in orders if equal_values(tested, value)]


def _fill(rest: ir.Value, keep: ir.Value, scores: ir.Value, viewer: Viewer) -> float | None:
    """f where `rest` is f * (1 - keep), both of them moved in the same way or not, or both of them
    constants."""
    left, right = constant(rest), truth_numbers(keep)
    if right is not None and (left is not None or not np.isin(right, (0, 1)).all()):
        return _folded_fill(left, right)
    rest, keep = _in_front_of_moves(rest, keep)
    maker = rest.producer()
    if is_op(maker, "Where"):
        return _selected_fill(maker, keep, viewer)
    for difference, number in _shares(maker, scores, viewer):
        if not math.isfinite(number):  # infinity times 0 is NaN where keep is 1
            continue
        if match(KEEP_MINUS_ONE, difference, viewer.info, {"keep": keep}) is not None:
            return -number
        if is_rest(difference, keep, viewer.info):
            return number
    return None


def _shares(
    node: ir.Node | None, scores: ir.Value, viewer: Viewer
) -> Iterator[tuple[ir.Value, float]]:
    """How a node may be read as a tensor times one number, which may be repeated for all scores."""
    if (share := viewer.factor(node)) is not None:
        yield share
        return
    for value, number in operand_orders(node, "Mul"):
        if (known := viewer.uniform_value(number, scores)) is not None:
            yield value, known


def _in_front_of_moves(one: ir.Value, other: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Two values in front of the operators that move both in the same way. ABSENT takes their
    places where the last operators of the same kind do not move them alike."""
    while is_op(one.producer(), *MOVES) and (pairs := operand_pairs(one, other)):
        source, moved = pairs[0]
        if source is None or moved is None or not all(equal_values(*pair) for pair in pairs[1:]):
            return ABSENT, ABSENT
        one, other = source, moved
    return one, other


def _selected_fill(where: ir.Node, keep: ir.Value, viewer: Viewer) -> float | None:
    """f where a Where gives 0 where `keep`, cast from its condition, is 1, and f elsewhere."""
    (flag, is_opposite), (condition, *branches) = _flag(keep, viewer.info), operands(where)
    own, negated = bare(condition, viewer.info)
    numbers = [viewer.info.scalar(branch) for branch in branches]
    kept, fill = numbers if is_opposite == negated else reversed(numbers)
    return fill if kept == 0.0 and equal_values(own, flag) else None


def _folded_fill(rest: np.ndarray | None, keep: np.ndarray) -> float | None:
    """f where the first constant is 0 except where the second, which holds one number besides 0, is
    0; None where the first is none."""
    if (
        rest is None
        or rest.shape != keep.shape
        or np.unique(keep[keep != 0]).size != 1
        or np.any(rest[keep != 0])
    ):
        return None
    numbers = np.unique(rest[keep == 0])
    return float(numbers[0]) if numbers.size == 1 else None


def is_rest(rest: ir.Value, keep: ir.Value, info: ShapeInfo) -> bool:
    """Is `rest` equal to 1 - keep?"""
    if match(ONE_MINUS_KEEP, rest, info, {"keep": keep}) is not None:
        return True
    (one, is_opposite), (other, is_other_opposite) = _flag(rest, info), _flag(keep, info)
    if other is ABSENT:
        other = keep
    if is_opposite != is_other_opposite and equal_numbers(one, other):
        return True
    left, right = truth_numbers(rest), truth_numbers(keep)
    return left is not None and right is not None and np.array_equal(left, 1 - right)


def truth_numbers(value: ir.Value) -> np.ndarray | None:
    """The numbers of a constant, or of one that is cast from a constant boolean or its opposite;
    else None."""
    node, negated = value.producer(), False
    if not is_op(node, "Cast"):
        return constant(value)
    while is_op(node, "Cast", "Not"):
        value, negated = operand_at(node, 0), negated != (node.op_type == "Not")
        node = value.producer()
    truths = constant(value)
    if truths is None or truths.dtype != np.bool_:
        return None
    numbers: np.ndarray = (truths != negated).astype(np.float32)
    return numbers


def _flag(value: ir.Value, info: ShapeInfo) -> tuple[ir.Value, bool]:
    """For a boolean cast to 0 and 1: the boolean without its casts and Nots, and whether these
    negate it. ABSENT for another value."""
    node = value.producer()
    flag = operand_at(node, 0)
    if not is_op(node, "Cast") or info.dtype(flag) != ir.DataType.BOOL:
        return ABSENT, False
    return bare(flag, info)


def _peel_zeros(node: ir.Node, next_step: Step) -> Peeled:
    """Case 11: the product with b, behind whose sum the walk went on."""
    if not isinstance(next_step, Select) or not is_op(next_step.node, "Add", "Sub"):
        return None
    scores = sole(others_of(node, next_step.operand))
    return None if scores is None else (ZeroSelected(node, next_step.operand), scores)


def _peel_maximum(value: ir.Value, viewer: Viewer) -> Peeled:
    """Case 12: one number for each row, times whatever factors: it changes no softmax (CogView's
    and LayoutLMv3's)."""
    shift = shifted_by(value, "ReduceMax", viewer.info)
    if shift is None or len(shift[0]) != 1 or not _leads_to_product(shift[1], viewer):
        return None
    return SubtractMaximum(shift[2][-1], shift[0][0], shift[2]), shift[1]


def _sinks(node: ir.Node, viewer: Viewer) -> Iterator[Peeling]:
    """Case 1: a sink beside the scores."""
    return ((AppendSink(node, step), scores) for step, scores in sinks(node, viewer.info))


def _peel_floor(node: ir.Node, viewer: Viewer) -> Peeled:
    """Case 13: a floor. Only a mask can fall below it: -inf becomes the smallest number, and scores
    do not change."""
    for scores, floor in _floors(node, viewer):
        known = viewer.info.dtype(scores) == ir.DataType.FLOAT and floor <= DOMINATING
        if (known or _is_half_floor(scores, floor, viewer)) and _may_keep_shape(
            scores, node, viewer.info
        ):
            return Floor(node, floor), scores
    return None


def _floors(node: ir.Node, viewer: Viewer) -> list[tuple[ir.Value, float]]:
    """What a node may put a floor below, and the floor."""
    orders = operand_orders(node, "Max")
    if is_op(node, "Clip") and input_of(node, 2) is None and not node.attributes:
        orders = ((operand_at(node, 0), operand_at(node, 1)),)
    return [
        (scores, floor)
        for scores, number in orders
        if (floor := viewer.info.scalar(number)) is not None
    ]


def _is_half_floor(scores: ir.Value, floor: float, viewer: Viewer) -> bool:
    """Is this the lowest number of float16, and are all scores float16 numbers?"""
    node, dtype = scores.producer(), viewer.info.dtype(scores)
    if dtype == ir.DataType.FLOAT and is_op(node, "Cast"):
        dtype = viewer.info.dtype(operand_at(node, 0))
    return dtype == ir.DataType.FLOAT16 and floor == -FLOAT16_MAX


def _minima(node: ir.Node, viewer: Viewer) -> Iterator[Peeling]:
    """Case 18: a selection by a minimum."""
    for scores, limit in operand_orders(node, "Min"):
        maker = limit.producer()
        if is_op(maker, "Where") and _may_keep_shape(scores, node, viewer.info):
            condition, *branches = operands(maker)
            limits = [viewer.uniform_value(branch, scores) for branch in branches]
            if set(limits) == {math.inf, -math.inf}:
                yield SelectByMinimum(node, condition, limits[0] == math.inf), scores


def _peel_cast(node: ir.Node, viewer: Viewer) -> Peeled:
    """Case 6: a cast. Raises Decline where the cast rounds to float16."""
    if not is_op(node, "Cast"):
        return None
    source, info = operand_at(node, 0), viewer.info
    own, target = info.dtype(source), info.dtype(node.outputs[0])
    if own is None or target is None:
        raise Decline(Code.DTYPE, "the data type of a cast on the scores is unknown", node)
    if not own.is_floating_point():
        raise Decline(
            Code.NO_SCORES_MATMUL, f"the scores come from {own}, not from a product", node
        )
    if (own, target) == (ir.DataType.FLOAT, ir.DataType.BFLOAT16):
        return RoundScores(node), source
    if (
        own != target
        and (own, target) not in WIDENING
        and not _restores_halves(source, target, viewer)
    ):
        raise Decline(
            Code.CAST, f"the scores are cast from {own} to {target}, which rounds them", node
        )
    return Rearrange(node), source


def _restores_halves(scores: ir.Value, target: ir.DataType, viewer: Viewer) -> bool:
    """Does a cast of these scores give the float16 numbers that a floor was put below?"""
    maker = scores.producer()
    if maker is None or target != ir.DataType.FLOAT16:
        return False
    return any(_is_half_floor(held, floor, viewer) for held, floor in _floors(maker, viewer))


def _terms(node: ir.Node, viewer: Viewer) -> list[Peeling]:
    """Case 9: a term. An operand that is proven to have the shape of the sum comes first."""
    fitting = [option for option in _addends(node) if _may_keep_shape(option[1], node, viewer.info)]
    return sorted(fitting, key=lambda option: not _keeps_shape(option[1], node, viewer.info))


def _addends(node: ir.Node) -> list[Peeling]:
    """Case 9: the operands of a sum that may be the scores, each with the step that does the rest
    to it. Terms of one node are told apart by their operands, so that a longer Sum has to give each
    of them once."""
    given = operands(node) if is_op(node, *SUMS) else []
    if len(given) < 2 or (len(given) > 2 and len({*given}) < len(given)):
        return []
    left, right, *further = given
    if is_op(node, "Sub"):
        return [(Add(node, right, -1.0), left), (SubtractFrom(node, left), right)]
    if further:
        return [(AddAll(node, (right, *further)), left), (AddAll(node, (left, *further)), right)]
    return [(Add(node, right), left), (Add(node, left), right)]


def _no_path(node: ir.Node, tried: Sequence[ir.Value], viewer: Viewer) -> Decline:
    """The most telling of the reasons met above an operator with several candidates."""
    if any(
        _leads_to_product(value, viewer) and not _may_keep_shape(value, node, viewer.info)
        for value in tried
    ):
        return Decline(Code.SHAPE, f"{node.op_type} enlarges the scores", node)
    reasons = without_none(_failure(value, viewer) for value in tried)
    reasons.sort(key=lambda decline: decline.code == Code.NO_SCORES_MATMUL)
    return reasons[0]


def _keeps_shape(value: ir.Value, node: ir.Node, info: ShapeInfo) -> bool:
    return info.shape(value) == info.shape(node.outputs[0])


def _may_keep_shape(value: ir.Value, node: ir.Node, info: ShapeInfo) -> bool:
    """Could this operand have the shape of the result, behind further dimensions of 1 (16)? A
    dimension of 1 that becomes another number cannot."""
    shape, result = info.shape(value), info.shape(node.outputs[0])
    if shape is None or result is None or len(shape) > len(result):
        return False
    own = (Dim(1),) * (len(result) - len(shape)) + shape
    return not any(a.const == 1 and b.const != 1 for a, b in zip(own, result, strict=True))


def _selections(node: ir.Node, viewer: Viewer) -> Iterator[Peeling]:
    """Case 10: a selection."""
    for condition, scores, filler, keep in selections_of(node):
        fill = viewer.uniform_value(filler, scores)
        if fill is not None and _may_keep_shape(scores, node, viewer.info):
            yield Select(node, condition, keep, fill), scores


def _no_selection(where: ir.Node, viewer: Viewer) -> Decline:
    """Why neither branch of a Where is scores that it selects from."""
    _, *branches = operands(where)
    fitting = [value for value in branches if _may_keep_shape(value, where, viewer.info)]
    if any(_leads_to_product(value, viewer) for value in fitting):
        reason = "Where puts something other than one known number into the scores"
        return Decline(Code.SCORE_TERM, reason, where)
    return _no_path(where, branches, viewer)


CASES = (
    _peel_layout,
    _peel_cast,
    _peel_rounding,
    _peel_number,
    _peel_cap,
    _peel_blend,
    _peel_floor,
)
"""What `_peel` tries in turn: 4 and 5, 6, 15, 7, 14, 11, 13."""
READINGS = (_scales, _terms, _selections, _minima, _multiplications)
"""The ways to read a node that it tries then, each for all operands that may be scores: 7, 9, 10,
18, 8."""
