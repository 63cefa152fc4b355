"""The values between attention's probabilities and the gradients of an indexer's loss, each as the
polynomial it is.

    target = p.mean(1).detach()
    log_predicted = index_scores.log_softmax(-1)
    loss = torch.nn.functional.kl_div(log_predicted, target, reduction="sum")

    target             the mean of attention's probabilities over its heads: a distribution over the
                       keys, which is constant to the indexer
    predicted          the indexer's own distribution, the softmax of its scores
    log_predicted      its logarithm
    log_target         the logarithm of target, -inf where target is 0
    safe_log_target    the same, but for the product with target, which is 0 where target is 0
    rectified          the rectified products of query and key
    positive           1 where these are positive, 0 elsewhere
    weight             the heads' weights
    row_loss           what a row adds to the loss: the sum over the keys of target *
                       (safe_log_target - log_predicted)

Grammar, from the probabilities downwards and, where another operand comes in, upwards. The code
cites the numbers of the cases; c is a number:

    region :=
      1   ReduceSum(P) | ReduceMean(P) over all heads      c * target; P as region.py has it
      2   LogSoftmax over the keys of the masked scores    log_predicted
      3   Exp(log_predicted)                               predicted
      4   Log(target)                                      log_target
      5   Relu of the products                             c * rectified
      6   the weights, in any layout                       c * weight
      7   arithmetic of regions                            layout, casts, factors, products, sums:
                                                           see polynomials.py
      8   region / c | c * region                          c a sum over the keys of target or
                                                           predicted, which is 1,
                                                           or a tensor of one number
      9   ReduceSum(region) over the keys                  of target and predicted: a number
     10   ReduceSum(target * safe_log_target - target * log_predicted) over the keys      row_loss
     11   ReduceSum(row_loss) | ReduceMean(row_loss)       over rows and batch, at once with the
                                                           keys or after them
     12   Where(IsNaN(target), NaN, region)                the region, for no target is NaN
     13   Where(target == 0, 0, region)                    region a multiple of target; log_target
                                                           becomes safe_log_target: so 0 ln 0 is 0,
                                                           and no NaN
     14   Where(rectified <= 0, 0, region)                 region * positive
     15   Where(b, 0, region)                              b the condition of one of the scores'
                                                           masks, where target and predicted are 0

Zeros where a mask excludes (15) change nothing: every term there has a factor target or predicted,
and both are 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes
from fa_compiler.passes.backward.polynomials import (
    TOLERANCE,
    Monomial,
    Polynomial,
    PolynomialReader,
    Tensor,
    product,
)
from fa_compiler.passes.backward.region import Region
from fa_compiler.passes.backward.tracing import left_by
from fa_compiler.passes.ir.nodes import (
    axes_of,
    int_attr,
    is_op,
    operand_at,
    operand_orders,
    operands,
    sole,
)
from fa_compiler.passes.ops.elementwise import bare
from fa_compiler.passes.sparse.index_scores import IndexScores, Mask

Part = Tensor[Polynomial]


class Symbol(IntEnum):
    """What the monomials are products of. The number is its place in the powers of a monomial."""

    TARGET = 0
    PREDICTED = 1
    LOG_PREDICTED = 2
    SAFE_LOG_TARGET = 3
    LOG_TARGET = 4
    RECTIFIED = 5
    WEIGHT = 6
    POSITIVE = 7
    ROW_LOSS = 8


def monomial(*factors: Symbol) -> Monomial:
    """The powers of the product of these factors."""
    return tuple(factors.count(factor) for factor in Symbol)


ONE, TARGET, PREDICTED = monomial(), monomial(Symbol.TARGET), monomial(Symbol.PREDICTED)
LOG_PREDICTED, LOG_TARGET = monomial(Symbol.LOG_PREDICTED), monomial(Symbol.LOG_TARGET)
RECTIFIED, WEIGHT, POSITIVE = (
    monomial(Symbol.RECTIFIED),
    monomial(Symbol.WEIGHT),
    monomial(Symbol.POSITIVE),
)
ROW_LOSS = monomial(Symbol.ROW_LOSS)


DIVERGENCE = (
    monomial(Symbol.TARGET, Symbol.SAFE_LOG_TARGET),
    monomial(Symbol.TARGET, Symbol.LOG_PREDICTED),
)
"""target * safe_log_target and target * log_predicted, the difference of which a row's loss sums
up."""


def error_times(part: Part, *behind: Symbol) -> float | None:
    """c of c * (predicted - target) times these factors; None for anything else."""
    return part.quantity.difference(
        monomial(Symbol.PREDICTED, *behind), monomial(Symbol.TARGET, *behind)
    )


@dataclass
class IndexRegion:
    """The region of one loss. `scores` are the indexer's, `masks` what they are masked by, `log`
    the logarithm of their softmax, over the axes of the scores."""

    region: Region
    scores: IndexScores
    masks: tuple[Mask, ...]
    log: ir.Value

    def __post_init__(self) -> None:
        self.viewer, self.tracer = self.region.viewer, self.region.tracer
        self.reader = PolynomialReader[Polynomial](self.tracer, self._of_node)
        scores, put = self.scores, self.reader.put
        put(self.log, Polynomial({LOG_PREDICTED: 1.0}), self.rows_and_keys)  # 2
        put(scores.relu_output, Polynomial({RECTIFIED: scores.relu_scale}), scores.relu_dims)  # 5
        for value, dims in scores.views[2].equivalent_values:
            put(value, Polynomial({WEIGHT: 1.0}), dims)  # 6

    @property
    def rows_and_keys(self) -> Arrangement:
        """Of a distribution over the keys: [B,S,T]."""
        batch, rows, _, keys, _ = self.scores.axes
        return self.viewer.space.resolve_all((batch, rows, keys))

    def _of_node(self, node: ir.Node) -> Part | None:
        """What a node makes; None when it is nothing that the grammar knows."""
        if (made := self.reader.made_by(node)) is not None:  # 7 and 8
            return made
        if is_op(node, "Mul"):
            return self._repeated_number(node)
        if is_op(node, "ReduceSum", "ReduceMean"):
            return self._mean_of_heads(node) or self._summed(node)
        if is_op(node, "Exp"):
            return self._function(node, LOG_PREDICTED, PREDICTED)  # 3
        if is_op(node, "Log"):
            return self._function(node, TARGET, LOG_TARGET)  # 4
        return self._selected(node) if is_op(node, "Where") else None

    def _function(self, node: ir.Node, of: Monomial, result: Monomial) -> Part | None:
        """What a function makes of one quantity, the factor of which is 1."""
        inner = self.reader.tensor(node.inputs[0])
        if (
            inner is None
            or (factor := inner.quantity.coefficient(of)) is None
            or abs(factor - 1.0) > TOLERANCE
        ):
            return None
        return Tensor(Polynomial({result: 1.0}), inner.dims)

    def _repeated_number(self, node: ir.Node) -> Part | None:
        """Case 8: the product with a tensor that holds one number."""
        for number, tensor in operand_orders(node, "Mul"):
            if (factor := self.viewer.uniform_value(number, tensor)) is not None:
                part = self.reader.tensor(tensor)
                return None if part is None else Tensor.of(part.quantity.scaled(factor), part.dims)
        return None

    # -- sums -----------------------------------------------------------------------------------

    def _mean_of_heads(self, node: ir.Node) -> Part | None:
        """Case 1: the sum or mean over everything that attention's probabilities have besides
        batch, rows and keys."""
        tensor, place = (
            self.region.reader.tensors.get(operand_at(node, 0)),
            sole(axes_of(node) or ()),
        )
        if tensor is None or place is None or len(tensor.dims) != 4:
            return None
        if (factor := tensor.quantity.probabilities(self.region.dropout)) is None:
            return None
        space = self.viewer.space
        axis, own = place % 4, space.resolve_all(tensor.dims)
        left = (*own[:axis], *own[axis + 1 :])
        wanted = self.rows_and_keys
        same = all(
            space.size(a) == space.size(b) and self.tracer.same(a, b)
            for a, b in zip(left, wanted, strict=True)
        )
        heads = space.size(own[axis]).const
        if not same or not heads or not self.region.are_columns(left[2]):
            return None
        if node.op_type == "ReduceSum":
            factor *= heads
        return Tensor.of(Polynomial.of({TARGET: factor}), left_by(node, own, {axis}))

    def summed_dims(self, node: ir.Node, dims: Arrangement) -> tuple[Axes, Arrangement] | None:
        """The axes that a reduction of a tensor of this arrangement runs over, in order, and what
        it leaves."""
        axes = axes_of(node)
        if not axes:
            # No axes are all axes, where the attribute does not say that they are none.
            known = len(node.inputs) < 2 or node.inputs[1] is None or axes == []
            if not known or int_attr(node, "noop_with_empty_axes", 0):
                return None
            axes = list(range(len(dims)))
        if axes and not dims:
            return None
        chosen = {axis % len(dims) for axis in axes}
        gone = tuple(
            axis for place in sorted(chosen) for axis in self.viewer.space.resolve(dims[place])
        )
        return gone, left_by(node, dims, chosen)

    def _summed(self, node: ir.Node) -> Part | None:
        """Cases 9 to 11: a sum."""
        part = self.reader.tensor(node.inputs[0])
        if part is None or (summed := self.summed_dims(node, part.dims)) is None:
            return None
        (gone, kept), space = summed, self.viewer.space
        keys, factor = space.resolve(self.scores.axes[3]), 1.0
        if node.op_type == "ReduceMean":
            count = space.size(gone).const
            if not count:
                return None
            factor = 1.0 / count
        total: Polynomial | None = part.quantity
        if set(keys) <= set(gone):
            total = self._over_keys(part, set(gone) == set(keys))
        elif part.quantity.coefficient(ROW_LOSS) is None or set(keys) & set(gone):  # 11
            return None
        return Tensor.of(total and total.scaled(factor), kept)

    @staticmethod
    def _over_keys(part: Part, alone: bool) -> Polynomial | None:
        """Cases 9 and 10: the sum over the keys, and over nothing else if `alone`. Only what a row
        adds to the loss may be summed over rows as well."""
        divergence = part.quantity.difference(*DIVERGENCE)
        if divergence is not None and len(part.dims) == 3:
            return Polynomial({ROW_LOSS: divergence})
        terms = part.quantity.terms
        if alone and set(terms) <= {TARGET, PREDICTED}:
            return Polynomial.of({ONE: sum(terms.values())})
        return None

    # -- selections -----------------------------------------------------------------------------

    def _selected(self, node: ir.Node) -> Part | None:
        condition, chosen, other = operands(node)
        part = self.reader.tensor(other)
        number = self.viewer.uniform_value(chosen, other)
        if (
            part is None
            or number is None
            or self.viewer.info.shape(node.outputs[0]) != self.viewer.info.shape(other)
        ):
            return None
        test = condition.producer()
        if math.isnan(number):
            return part if self._tests_nan(test) else None
        if number != 0.0:
            return None
        if is_op(test, "Equal"):
            return self._guarded(part, test)
        if is_op(test, "LessOrEqual"):
            return self._where_positive(part, test)
        return part if self._is_masked(part, condition) else None

    def _tests_nan(self, test: ir.Node | None) -> bool:
        """Case 12: is this IsNaN of a target?"""
        if not is_op(test, "IsNaN") or (tested := self.reader.tensor(test.inputs[0])) is None:
            return False
        return tested.quantity.coefficient(TARGET) is not None

    def _guarded(self, part: Part, test: ir.Node) -> Part | None:
        """Case 13: a selection of 0 where the target is 0, which turns log_target into
        safe_log_target."""
        tested, terms = self._beside_zero(test), part.quantity.terms
        if tested is None or tested.quantity.coefficient(TARGET) is None:
            return None
        if not all(power[Symbol.TARGET] > 0 for power in terms):
            return None
        return Tensor(
            Polynomial({_with_safe_log(power): factor for power, factor in terms.items()}),
            part.dims,
        )

    def _where_positive(self, part: Part, test: ir.Node) -> Part | None:
        """Case 14: a selection of 0 where the rectified products are 0."""
        tested = self._beside_zero(test)
        if (
            tested is None
            or (slope := tested.quantity.coefficient(RECTIFIED)) is None
            or slope <= 0
        ):
            return None
        terms = {product(power, POSITIVE): factor for power, factor in part.quantity.terms.items()}
        return Tensor.of(Polynomial(terms), self.tracer.aligned(part.dims, tested.dims))

    def _is_masked(self, part: Part, condition: ir.Value) -> bool:
        """Case 15: is a part 0 wherever this condition of a mask holds?"""
        distributions = all(
            power[Symbol.TARGET] + power[Symbol.PREDICTED] > 0 for power in part.quantity.terms
        )
        along = part.dims == self.rows_and_keys
        return (
            along and distributions and any(self._excludes(mask, condition) for mask in self.masks)
        )

    def _beside_zero(self, test: ir.Node) -> Part | None:
        """The first operand of a comparison, where the other is 0."""
        value, zero = operands(test)
        return self.reader.tensor(value) if self.viewer.uniform_value(zero, value) == 0.0 else None

    def _excludes(self, mask: Mask, condition: ir.Value) -> bool:
        """Is a condition true where this mask excludes, and nowhere else?"""
        own, negated = bare(condition, self.viewer.info)
        theirs, other = bare(mask.value, self.viewer.info)
        return own is theirs and (negated == other) == mask.when


def _with_safe_log(power: Monomial) -> Monomial:
    """The monomial with every log_target as safe_log_target."""
    result = list(power)
    result[Symbol.SAFE_LOG_TARGET] += result[Symbol.LOG_TARGET]
    result[Symbol.LOG_TARGET] = 0
    return tuple(result)
