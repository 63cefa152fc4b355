"""Differences and sums of probabilities (differential attention, ConViT): the product with the
values is moved in front of them.

    output = (q1 @ k1).softmax(-1) @ v - t * ((q2 @ k2).softmax(-1) @ v)      where the model has
    output = ((q1 @ k1).softmax(-1) - t * (q2 @ k2).softmax(-1)) @ v

Grammar; the code cites the numbers of the cases:

    output :=
      1     MatMul(difference, values)                     values of rank 2 or more
      2   | MatMul(Div(difference, total), values)         total := its sum along the keys, see
                                                           row_reductions.py
    difference, read by nothing else :=
      3     Sub(part, part) | Add(part, part)              parts of the same shape; one of them may
                                                           be a rest
    part :=
      4     chosen | Mul(chosen, t) | Div(chosen, t)       t of size 1 along the keys, of moderate
                                                           size (factors.py)
    chosen :=
      5     probabilities                                  of a softmax of their own
      6   | Gather(probabilities, i)                       i one number, along an axis before rows
                                                           and keys
      7   | Split(probabilities)                           into equal parts, along such an axis
      8   | Slice(probabilities)                           such an equal part, of a number of parts
                                                           that is known
    rest :=
      9     any tensor that has all the keys               not in float16

The product is linear: (p - t q) v = p v - t (q v). Where p and q are parts of one softmax (6 to 8),
p v and q v are the same parts of its product with values that are repeated for all parts. One
product at least is then an ordinary attention. The other one may remain a product, like that of
ConViT's probabilities of positions. What is left is done to the results. Only rounding changes, and
NaN stays NaN, as long as the values are finite: for a value of +inf, (p - t q) v is infinite, and p
v - t (q v) is inf - inf, NaN. In a sum, a probability that is rounded to 0 gives 0 * inf, NaN,
where the sum of both is above 0. So the user has to vouch for finite values. An infinite t would
give NaN for keys with q = 0 only on one side, so t has to be proven finite. In float16 it also has
to be proven not to be above 1: t p - t q is small where t (p v) and t (q v) overflow, and inf - inf
is NaN. For the same reason float16 has no rest, whose product with the values has no known bound.

A division by the sum of each row (2) follows the products, for they are linear, and nothing has to
add up a row: the sum of t p is t, because that of p is 1. So t is no divisor here. Where p is NaN,
the result is NaN in both orders. The sum of a rest is computed. The original rounds each term of
its sum. This is as little as in the result if no term is negative, and if the sum is not near 0. So
both have to be proven of t p + u q, and differences are refused. Where t is 1 - u, and u is between
0 and 1, the sum is 1, and the division is left out: it only divides by what rounding makes of
1. float16 takes no other sums, because t p v may overflow where the quotient does not.

The change is a trial: it is kept if the ordinary matcher then takes an attention
(substitutions.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.axes import AxisSpace
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import FINITE_SCORES, FINITE_SCORES_HINT
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.emit.trial import Trial
from fa_compiler.passes.ir.nodes import (
    attribute_values,
    certain,
    equal_values,
    holds_output,
    is_dead,
    is_op,
    operand_at,
    operands,
    outputs_of,
    source_through,
    without_none,
)
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.matching.attention import Matcher
from fa_compiler.passes.matching.factors import SMALLEST, factorings, immoderate
from fa_compiler.passes.matching.row_reductions import reduced
from fa_compiler.passes.matching.softmax import SoftmaxAnchor
from fa_compiler.passes.ops.context import Shape
from fa_compiler.passes.ops.movers import LAYOUT_OPS
from fa_compiler.passes.ops.parts import EqualPart, equal_part, takes_parts
from fa_compiler.passes.prepare.substitutions import Substitution, Substitutions, is_match
from fa_compiler.passes.values.facts import Facts
from fa_compiler.passes.values.patterns import Bind, Number, Op, match
from fa_compiler.passes.values.shapes import ShapeInfo

KINDS = {"Add": "sum", "Sub": "difference"}
"""3: what the operators that combine two parts are called."""
UNSOUND = (
    "a {0} of probabilities is multiplied by the values; the {0} of the products is the same only if no value is "
    "infinite: inf - inf and 0 * inf are NaN"
)
UNBOUNDED = "{!r} is added to the probabilities, and its product with the values has no known bound in float16"
UNKNOWN_SUM = "probabilities are divided by the sum of each row, which is not proven to be a sum of positive numbers"
OVERFLOWS = "the factor {!r} is not proven to be 1 at most: multiplied by it, a result in float16 may overflow"
COMPLEMENT = Op("Sub", Number(1.0), Bind("other"))
CONSTANT_ADVICE = "make the factor of the difference a constant of the model"


@dataclass(frozen=True)
class Choice:
    """All of the probabilities: nothing is chosen of them."""

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        """The nodes that choose."""
        return ()

    def of(self, value: ir.Value, builder: Builder) -> ir.Value:
        """The same part of another tensor."""
        return value

    def fits(self, values: ir.Value, info: ShapeInfo) -> bool:
        """Are values, along the axis of which a part is taken, as large as a part, or of size 1?"""
        return True

    def for_all_parts(self, values: ir.Value, builder: Builder) -> ir.Value:
        """Values that are repeated for all parts."""
        return values


@dataclass(frozen=True)
class ChosenPart(Choice):
    """Cases 6 to 8: the node that chooses one of equal parts, as its output `output`."""

    node: ir.Node
    output: int
    part: EqualPart

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        return (self.node,)

    def of(self, value: ir.Value, builder: Builder) -> ir.Value:
        inputs, count = [value, *self.node.inputs[1:]], len(self.node.outputs)
        made = builder.op(self.node.op_type, inputs, attribute_values(self.node), outputs=count)
        return certain(made.producer()).outputs[self.output]

    def _own_axis(self, values: ir.Value, info: ShapeInfo) -> int:
        """Which axis of the values stands where the part is chosen; negative where they have none
        there."""
        return self.part.axis - (len(info.sizes(self.node.outputs[0])) - len(info.sizes(values)))

    def fits(self, values: ir.Value, info: ShapeInfo) -> bool:
        shape, sizes, own = (
            info.sizes(values),
            info.sizes(self.node.outputs[0]),
            self._own_axis(values, info),
        )
        if len(shape) > len(sizes):
            return False
        return (
            self.part.drops_axis
            or own < 0
            or shape[own].const == 1
            or shape[own] == sizes[self.part.axis]
        )

    def for_all_parts(self, values: ir.Value, builder: Builder) -> ir.Value:
        own = self._own_axis(values, builder.info)
        if self.part.drops_axis:
            return builder.unsqueeze(values, [own]) if own > 0 else values
        if own < 0 or builder.info.sizes(values)[own].const == 1:
            return values
        return builder.concat([values] * self.part.count, own)


@dataclass(frozen=True)
class Part:
    """One side of a difference: what is read of the probabilities, which part of them is chosen,
    and the factor with its node. A rest is a side without an anchor."""

    probabilities: ir.Value
    choice: Choice = Choice()
    factor: ir.Value | None = None
    scaling: ir.Node | None = None
    anchor: SoftmaxAnchor | None = None

    @property
    def nodes(self) -> list[ir.Node]:
        """The nodes from the probabilities to this side, the last one first."""
        return without_none((self.scaling, *self.choice.nodes))

    @property
    def divides(self) -> bool:
        """Is the factor a divisor?"""
        return is_op(self.scaling, "Div")

    def of(self, value: ir.Value, builder: Builder) -> ir.Value:
        """What this side makes of the product of the probabilities with the values."""
        chosen = self.choice.of(value, builder)
        return (
            chosen
            if self.scaling is None
            else builder.op(self.scaling.op_type, [chosen, self.factor])
        )

    def product(self, values: ir.Value, builder: Builder) -> ir.Value:
        """The product of this side's probabilities with the values, which are repeated for all
        parts."""
        return builder.matmul(self.probabilities, self.choice.for_all_parts(values, builder))

    def total(self, builder: Builder) -> ir.Value:
        """The sum along the keys, whose size is then 1."""
        if self.anchor is None:
            rank = len(builder.info.sizes(self.probabilities))
            return builder.reduce("ReduceSum", self.probabilities, [rank - 1])
        dtype = certain(builder.info.dtype(self.probabilities))
        return self.factor or builder.constant(np.array(1.0, dtype.numpy()), "one")

    def least_total(self, facts: Facts) -> float:
        """A number that no sum along the keys is below, if none of its terms is negative; else a
        negative number."""
        if self.anchor is None:
            return min(_bounds(self.probabilities, facts)[0], 0.0)
        return _bounds(self.factor, facts)[0]


@dataclass(frozen=True)
class Difference:
    """A difference or sum of probabilities that is multiplied by values: the nodes `combining` and
    `product`, and between them, in order, those that divide by the sum of each row."""

    combining: ir.Node
    product: ir.Node
    parts: tuple[Part, Part]
    dividing: tuple[ir.Node, ...] = ()

    @property
    def replaced(self) -> tuple[ir.Node, ...]:
        """The nodes from the probabilities to the product, the product first."""
        parts = chain.from_iterable(part.nodes for part in self.parts)
        return tuple(
            dict.fromkeys((self.product, *reversed(self.dividing), self.combining, *parts))
        )

    @property
    def values(self) -> ir.Value:
        """The values."""
        return operand_at(self.product, 1)

    @property
    def is_sum(self) -> bool:
        """Are the parts added?"""
        return self.combining.op_type == "Add"

    def sums_up_to_one(self, facts: Facts) -> bool:
        """Is this a sum, and one factor 1 less the other one, which is between 0 and 1?"""
        for one, other in (self.parts, self.parts[::-1]):
            complement = match(COMPLEMENT, one.factor, facts.info)
            if complement is not None and equal_values(complement["other"], other.factor):
                low, high = _bounds(other.factor, facts)
                return self.is_sum and low >= 0.0 and high <= 1.0
        return False

    def emitted(self, facts: Facts, builder: Builder) -> ir.Value:
        """What takes the place of the product."""
        results = [part.of(part.product(self.values, builder), builder) for part in self.parts]
        combined = builder.op(self.combining.op_type, results)
        return self._divided(combined, facts, builder)

    def _divided(self, value: ir.Value, facts: Facts, builder: Builder) -> ir.Value:
        """The sum of the products, divided as their probabilities were."""
        if not self.dividing or self.sums_up_to_one(facts):
            return value
        total = builder.op("Add", [part.total(builder) for part in self.parts])
        return builder.div(value, total)


def move_products(
    graph: ir.Graph,
    softmaxes: Sequence[SoftmaxAnchor],
    matcher: Matcher,
    new_builder: Callable[[], Builder],
) -> Substitutions:
    """Move the products of a graph in front of the differences of probabilities, where every
    attention then matches. The graph stays as it is where there are none."""
    result = Substitutions()
    for difference in list(_differences(graph, softmaxes, matcher.facts)):
        anchors = without_none(part.anchor for part in difference.parts)
        if any(is_match(anchor, matcher) for anchor in anchors):
            continue  # a sum with zeros, which the ordinary matcher leaves out
        with Trial(new_builder()) as trial:
            new = difference.emitted(matcher.facts, trial.builder)
            trial.replace((difference.product.outputs[0], new), nodes=difference.replaced)
            matching = [anchor.node for anchor in anchors if is_match(anchor, matcher)]
            unsound = _why_unsound(difference, matching, matcher.facts)
            if matching and unsound is not None:
                result.declined.update(dict.fromkeys(matching, unsound))
            elif matching and (change := trial.keep()) is not None:
                result.add(Substitution(change, assumed=(FINITE_SCORES,)), *matching)
    return result


def _differences(
    graph: ir.Graph, softmaxes: Sequence[SoftmaxAnchor], facts: Facts
) -> Iterator[Difference]:
    anchors = {anchor.output: anchor for anchor in softmaxes if anchor.late is None}
    if not anchors:
        return
    for product in graph:
        difference = _difference(product, anchors, facts)
        if difference is not None and _is_closed(difference):
            yield difference


def _difference(
    product: ir.Node, anchors: Mapping[ir.Value, SoftmaxAnchor], facts: Facts
) -> Difference | None:
    """Cases 1 to 3, where the values fit every part."""
    if not is_op(product, "MatMul") or is_dead(product):
        return None
    combined, dividing = _undivided(operand_at(product, 0), facts.info)  # 1 and 2
    combining = combined.producer()
    parts = _parts(combining, anchors, facts.info)  # 3
    if combining is None or parts is None or (dividing and any(part.divides for part in parts)):
        return None
    difference, info = Difference(combining, product, parts, dividing), facts.info
    values = difference.values
    fits = len(info.sizes(values)) > 1 and all(part.choice.fits(values, info) for part in parts)
    return difference if fits else None


def _undivided(weights: ir.Value, info: ShapeInfo) -> tuple[ir.Value, tuple[ir.Node, ...]]:
    """Case 2: what is divided by the sum of each row, and the nodes that do so. Otherwise the value
    itself and ()."""
    divide, rank = weights.producer(), len(info.sizes(weights))
    if not is_op(divide, "Div"):
        return weights, ()
    combined, total = operands(divide)
    sums = reduced(total, ("ReduceSum",), combined, info)
    if sums is None or sums[0] != (rank - 1,):
        return weights, ()
    return combined, (*sums[1], divide)


def _parts(
    combining: ir.Node | None, anchors: Mapping[ir.Value, SoftmaxAnchor], info: ShapeInfo
) -> tuple[Part, Part] | None:
    """Case 3: both sides of a difference."""
    if not is_op(combining, "Sub", "Add"):
        return None
    shape = info.shape(combining.outputs[0])
    one, other = (_side(value, shape, anchors, info) for value in operands(combining))
    if one is None or other is None or (one.anchor is None and other.anchor is None):
        return None
    return one, other


def _side(
    value: ir.Value, shape: Shape | None, anchors: Mapping[ir.Value, SoftmaxAnchor], info: ShapeInfo
) -> Part | None:
    """One side of a difference of this shape: a part of the same shape, or a rest."""
    part, own = _scaled_part(value, anchors, info), info.sizes(value)
    if not shape:
        return None
    if part is not None:
        return part if own == shape else None
    return Part(value) if len(own) > 1 and own[-1] == shape[-1] else None  # 9


def _scaled_part(
    value: ir.Value, anchors: Mapping[ir.Value, SoftmaxAnchor], info: ShapeInfo
) -> Part | None:
    """Cases 4 to 8."""
    scaling = value.producer()
    for chosen, factor, _ in factorings(scaling):
        part = _chosen_part(chosen, anchors, info)
        if (
            part is not None
            and info.shape(value) == info.shape(chosen)
            and _is_per_row(factor, chosen, info)
        ):
            return replace(part, factor=factor, scaling=scaling)
    return _chosen_part(value, anchors, info)


def _is_per_row(factor: ir.Value, chosen: ir.Value, info: ShapeInfo) -> bool:
    """Case 4: is a factor of size 1 along the keys, and of no more dimensions than what it
    multiplies?"""
    shape, rank = info.shape(factor), len(info.sizes(chosen))
    return shape is not None and len(shape) <= rank and (not shape or shape[-1].const == 1)


def _chosen_part(
    value: ir.Value, anchors: Mapping[ir.Value, SoftmaxAnchor], info: ShapeInfo
) -> Part | None:
    """Cases 5 to 8."""
    chooser = value.producer()
    part = _equal_part(chooser, value, info) if takes_parts(chooser) else Part(value)
    anchor = (
        None
        if part is None
        else anchors.get(source_through(part.probabilities, *LAYOUT_OPS, "Cast"))
    )
    return None if part is None or anchor is None else replace(part, anchor=anchor)


def _equal_part(chooser: ir.Node, value: ir.Value, info: ShapeInfo) -> Part | None:
    """Cases 6 to 8: the part that a node chooses along an axis before rows and keys."""
    part = equal_part(value, info)  # a Slice that names another axis, too, would cut the results
    if part is None or part.axis >= len(info.sizes(part.source)) - 2:
        return None
    return Part(part.source, ChosenPart(chooser, list(chooser.outputs).index(value), part))


def _is_closed(difference: Difference) -> bool:
    """Is what the nodes make on the way to the product read by nothing else, all in one graph?"""
    if any(node.graph is not difference.product.graph for node in difference.replaced):
        return False
    outputs = outputs_of(difference.replaced[1:])
    readers = {reader for output in outputs for reader, _ in output.uses()}
    return readers <= set(difference.replaced) and not holds_output(outputs)


def _why_unsound(difference: Difference, matching: list[ir.Node], facts: Facts) -> Decline | None:
    """Why the products of a difference may not give the same: values and factors that may be
    infinite, a sum of unknown size. None if they do."""
    for part in difference.parts:
        if (unsound := _why_part_unsound(part, difference, facts)) is not None:
            return unsound
    if difference.dividing and not _is_sum_known(difference, matching, facts):
        return Decline(Code.PROBABILITY_TERM, UNKNOWN_SUM, difference.dividing[-1])
    if not facts.options.takes_scores_as_finite:
        reason = UNSOUND.format(KINDS[difference.combining.op_type])
        return Decline(Code.PROBABILITY_TERM, reason, difference.combining, FINITE_SCORES_HINT)
    return None


def _why_part_unsound(part: Part, difference: Difference, facts: Facts) -> Decline | None:
    """Why one side of a difference may not give the same: its factor, or a product without a bound
    in float16."""
    half = facts.info.dtype(difference.product.outputs[0]) == ir.DataType.FLOAT16
    if part.factor is not None and part.scaling is not None:
        reason = immoderate(part.factor, part.divides, Viewer(facts, AxisSpace()))
        if reason is not None:
            return Decline(Code.PROBABILITY_TERM, reason, part.scaling, CONSTANT_ADVICE)
        if half and not _never_enlarges(part.factor, part.divides, facts):
            return Decline(Code.PROBABILITY_TERM, OVERFLOWS.format(part.factor.name), part.scaling)
    if half and part.anchor is None:
        return Decline(
            Code.PROBABILITY_TERM, UNBOUNDED.format(part.probabilities.name), difference.combining
        )
    return None


def _is_sum_known(difference: Difference, matching: list[ir.Node], facts: Facts) -> bool:
    """Is the sum of each row proven to be that of the totals of both parts, and none of these to be
    negative?"""
    for part in difference.parts:
        if part.anchor is not None and not _adds_up(
            part.anchor, part, part.anchor.node in matching, facts.info
        ):
            return False
    if difference.sums_up_to_one(facts):
        return True
    half = facts.info.dtype(difference.product.outputs[0]) == ir.DataType.FLOAT16
    totals = [part.least_total(facts) for part in difference.parts]
    return not half and difference.is_sum and min(totals) >= 0.0 and sum(totals) >= SMALLEST


def _adds_up(anchor: SoftmaxAnchor, part: Part, matches: bool, info: ShapeInfo) -> bool:
    """Is the sum of probabilities along the keys 1? What matches is known to be a softmax along the
    keys."""
    if anchor.sink is not None or anchor.overflows or anchor.masked or anchor.floored:
        return False
    rank = len(info.sizes(part.probabilities))
    return matches or (part.probabilities is anchor.output and anchor.axes == (rank - 1,))


def _bounds(factor: ir.Value | None, facts: Facts) -> tuple[float, float]:
    """The numbers between which all those of a tensor are; 1 where there is none."""
    if factor is None:
        return 1.0, 1.0
    if (number := facts.info.scalar(factor)) is not None:
        return number, number
    return facts.bounds.unless_nan(factor) or (-math.inf, math.inf)


def _never_enlarges(factor: ir.Value, divides: bool, facts: Facts) -> bool:
    """Is the result of a product with this factor, or of a division by it, proven not to be
    larger?"""
    low, high = _bounds(factor, facts)
    if divides:
        return low >= 1.0 or high <= -1.0
    return low >= -1.0 and high <= 1.0
