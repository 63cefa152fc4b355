"""The values between attention's probabilities and the gradients of an indexer's loss, each as the polynomial it is.

    target             the mean of attention's probabilities over its heads: a distribution over the keys, which is
                       constant to the indexer
    predicted          the indexer's own distribution, the softmax of its scores
    log_predicted      its logarithm
    log_target         the logarithm of target, -inf where target is 0
    safe_log_target    the same, but for the product with target, which is 0 where target is 0
    rectified          the rectified products of query and key
    positive           1 where these are positive, 0 elsewhere
    weight             the heads' weights
    row_loss           what a row adds to the loss: the sum over the keys of target * (safe_log_target - log_predicted)

Grammar, from the probabilities downwards and, where another operand comes in, upwards. The code cites the numbers of
the cases; c is a number:

    region :=
      1   ReduceSum(P) | ReduceMean(P) over all heads      c * target; P as region.py has it
      2   LogSoftmax over the keys of the masked scores    log_predicted
      3   Exp(log_predicted)                               predicted
      4   Log(target)                                      log_target
      5   Relu of the products                             c * rectified
      6   the weights, in any layout                       c * weight
      7   layout(region) | Cast(region) | c * region
      8   region / c                                       c also a sum over the keys of target or predicted, which is 1
      9   region + region | region - region
     10   region * region
     11   ReduceSum(region) over the keys                  of target and predicted: a number
     12   ReduceSum(target * safe_log_target - target * log_predicted) over the keys      row_loss
     13   ReduceSum(row_loss) | ReduceMean(row_loss)       over rows and batch, at once with the keys or behind them
     14   Where(IsNaN(target), NaN, region)                the region, for no target is NaN
     15   Where(target == 0, 0, region)                    region a multiple of target; log_target becomes
                                                           safe_log_target: so 0 ln 0 is 0, and no NaN
     16   Where(rectified <= 0, 0, region)                 region * positive
     17   Where(b, 0, region)                              b the condition of one of the scores' masks, where target and
                                                           predicted are 0

Zeros where a mask excludes (17) change nothing: every term there has a factor target or predicted, and both are 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import onnx_ir as ir

from fa_compiler.passes.backward.quantities import TOLERANCE, sum_of
from fa_compiler.passes.backward.region import Region
from fa_compiler.passes.backward.tracing import seeds, stripped
from fa_compiler.passes.layout.axes import Arrangement, Axes
from fa_compiler.passes.nodes import int_attr, is_op, reduced_axes
from fa_compiler.passes.sparse.index_scores import IndexScores, Mask

Monomial = tuple[int, ...]
Terms = Mapping[Monomial, float]
CASES = ("Mul", "Add", "Sub", "Div", "ReduceSum", "ReduceMean", "Exp", "Log", "Where")
MAX_POWER = 3
MAX_DEPTH = 40


class Factor(IntEnum):
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


def monomial(*factors: Factor) -> Monomial:
    """The powers of the product of these factors."""
    return tuple(factors.count(factor) for factor in Factor)


ONE, TARGET, PREDICTED = monomial(), monomial(Factor.TARGET), monomial(Factor.PREDICTED)
LOG_PREDICTED, LOG_TARGET = monomial(Factor.LOG_PREDICTED), monomial(Factor.LOG_TARGET)
RECTIFIED, WEIGHT, POSITIVE = monomial(Factor.RECTIFIED), monomial(Factor.WEIGHT), monomial(Factor.POSITIVE)
ROW_LOSS = monomial(Factor.ROW_LOSS)


@dataclass(frozen=True)
class Part:
    """A polynomial and the axes of the tensor that holds it."""

    terms: Terms
    dims: Arrangement

    def difference(self, *behind: Factor) -> float | None:
        """c of c * (predicted - target) times these factors; None for anything else."""
        return self._pair(monomial(Factor.PREDICTED, *behind), monomial(Factor.TARGET, *behind))

    @property
    def divergence(self) -> float | None:
        """c of c * target * (safe_log_target - log_predicted); None for anything else."""
        return self._pair(
            monomial(Factor.TARGET, Factor.SAFE_LOG_TARGET), monomial(Factor.TARGET, Factor.LOG_PREDICTED)
        )

    def _pair(self, first: Monomial, second: Monomial) -> float | None:
        if set(self.terms) != {first, second}:
            return None
        factor = self.terms[first]
        return factor if math.isclose(factor, -self.terms[second], rel_tol=TOLERANCE) else None

    def only(self, wanted: Monomial) -> float | None:
        """c of c times this monomial; None for anything else."""
        return self.terms.get(wanted) if len(self.terms) == 1 else None


@dataclass
class IndexRegion:
    """The region of one loss. `scores` are the indexer's, `masks` what they are masked by, `log` the logarithm of their
    softmax, over the axes of the scores."""

    region: Region
    scores: IndexScores
    masks: tuple[Mask, ...]
    log: ir.Value
    parts: dict[ir.Value, Part | None] = field(default_factory=dict)
    _depth: int = 0

    def __post_init__(self) -> None:
        self.viewer, self.tracer = self.region.viewer, self.region.tracer
        self.parts[self.log] = Part({LOG_PREDICTED: 1.0}, self.rows_and_keys)  # 2
        scores = self.scores
        self.parts[scores.rectified] = Part({RECTIFIED: scores.slope}, scores.rectified_dims)  # 5

    @property
    def rows_and_keys(self) -> Arrangement:
        """Of a distribution over the keys: [B,S,T]."""
        batch, rows, _, keys, _ = self.scores.axes
        return self.viewer.space.resolve_all((batch, rows, keys))

    def part(self, value: ir.Value | None) -> Part | None:
        """What a value is; None when it is nothing that the grammar knows."""
        if value is None:
            return None
        if value not in self.parts:
            node = value.producer()
            weight = self.tracer.trace(value, seeds(self.scores.views[2].stops))
            if weight is not None:
                self.parts[value] = Part({WEIGHT: weight.factor}, weight.dims)  # 6
            elif self._depth >= MAX_DEPTH or node is None or value is not node.outputs[0]:
                return None
            else:
                self.parts[value] = None
                self._depth += 1
                self.parts[value] = self._of_node(node)
                self._depth -= 1
        found = self.parts[value]
        return None if found is None else Part(found.terms, self.viewer.space.resolve_all(found.dims))

    def _of_node(self, node: ir.Node) -> Part | None:
        step = self.tracer.look_through(node)
        if step is not None:
            return self._rearranged(node, *step)
        match node.op_type if is_op(node, *CASES) else "":
            case "Mul":
                return self._multiplied(node)
            case "Add" | "Sub":
                return self._added(node, -1.0 if node.op_type == "Sub" else 1.0)
            case "Div":
                return self._divided(node)
            case "ReduceSum" | "ReduceMean":
                return self._mean_of_heads(node) or self._summed(node)
            case "Exp":
                return self._function(node, LOG_PREDICTED, PREDICTED)  # 3
            case "Log":
                return self._function(node, TARGET, LOG_TARGET)  # 4
            case "Where":
                return self._selected(node)
        return None

    def _function(self, node: ir.Node, of: Monomial, result: Monomial) -> Part | None:
        """What a function makes of one quantity, the factor of which is 1."""
        inner = self.part(node.inputs[0])
        factor = None if inner is None else inner.only(of)
        is_one = factor is not None and abs(factor - 1.0) <= TOLERANCE
        return Part({result: 1.0}, inner.dims) if inner is not None and is_one else None

    def _divided(self, node: ir.Node) -> Part | None:
        """8."""
        above, below = self.part(node.inputs[0]), self.part(node.inputs[1])
        number = None if below is None else below.only(ONE)
        if below is None or above is None or not number:
            return None
        return _part(_scaled(above.terms, 1.0 / number), self.tracer.aligned(above.dims, below.dims))

    def _rearranged(self, node: ir.Node, source: ir.Value, factor: float) -> Part | None:
        """7."""
        part = self.part(source)
        if part is None:
            return None
        if self.viewer.factor(node) is not None:
            return _part(_scaled(part.terms, factor), part.dims)
        return _part(part.terms, self.viewer.rearranged(node, part.dims))

    def _multiplied(self, node: ir.Node) -> Part | None:
        """7 and 10."""
        one, other = node.inputs[0], node.inputs[1]
        assert one is not None and other is not None
        for number, tensor in ((one, other), (other, one)):
            factor = self.viewer.filler(number, tensor)
            if factor is not None:
                part = self.part(tensor)
                return None if part is None else _part(_scaled(part.terms, factor), part.dims)
        left, right = self.part(one), self.part(other)
        if left is None or right is None:
            return None
        terms: dict[Monomial, float] = {}
        for a, x in left.terms.items():
            for b, y in right.terms.items():
                power = _product(a, b)
                if max(power) > MAX_POWER:
                    return None
                terms[power] = terms.get(power, 0.0) + x * y
        return _part(terms, self.tracer.aligned(left.dims, right.dims))

    def _added(self, node: ir.Node, sign: float) -> Part | None:
        """9."""
        left, right = self.part(node.inputs[0]), self.part(node.inputs[1])
        if left is None or right is None:
            return None
        return _part(sum_of(left.terms, right.terms, sign), self.tracer.aligned(left.dims, right.dims))

    # -- sums -----------------------------------------------------------------------------------

    def _mean_of_heads(self, node: ir.Node) -> Part | None:
        """1: the sum or mean over everything that attention's probabilities have besides batch, rows and keys."""
        source, axes, space = node.inputs[0], reduced_axes(node), self.viewer.space
        tensor = None if source is None else self.region.tensors.get(source)
        factor = None if tensor is None else tensor.quantity.probabilities(self.region.dropout)
        if tensor is None or factor is None or axes is None or len(axes) != 1 or len(tensor.dims) != 4:
            return None
        axis, own = axes[0] % 4, space.resolve_all(tensor.dims)
        left = (*own[:axis], *own[axis + 1 :])
        wanted = self.rows_and_keys
        same = all(space.size(a) == space.size(b) and self.tracer.same(a, b) for a, b in zip(left, wanted, strict=True))
        heads = space.size(own[axis]).const
        if not same or not heads or not self.region.are_columns(left[2]):
            return None
        kept: Arrangement = ((),) if int_attr(node, "keepdims", 1) else ()
        dims = (*own[:axis], *kept, *own[axis + 1 :])
        return _part({TARGET: factor * (heads if node.op_type == "ReduceSum" else 1.0)}, dims)

    def summed_dims(self, node: ir.Node, dims: Arrangement) -> tuple[Axes, Arrangement] | None:
        """The axes that a reduction of a tensor of this arrangement runs over, in order, and what it leaves."""
        axes, every = reduced_axes(node), list(range(len(dims)))
        if axes is None or not axes:
            # No axes are all axes, where the attribute does not say that they are none.
            known = len(node.inputs) < 2 or node.inputs[1] is None or axes == []
            if not known or int_attr(node, "noop_with_empty_axes", 0):
                return None
            axes = every
        chosen = {axis % len(dims) for axis in axes}
        gone = tuple(axis for place in sorted(chosen) for axis in self.viewer.space.resolve(dims[place]))
        keep = int_attr(node, "keepdims", 1) == 1
        return gone, tuple(() if place in chosen else dims[place] for place in every if keep or place not in chosen)

    def _summed(self, node: ir.Node) -> Part | None:
        """11 to 13."""
        part = self.part(node.inputs[0])
        summed = None if part is None else self.summed_dims(node, part.dims)
        if part is None or summed is None:
            return None
        (gone, kept), space = summed, self.viewer.space
        keys, factor = space.resolve(self.scores.axes[3]), 1.0
        if node.op_type == "ReduceMean":
            count = space.size(gone).const
            if not count:
                return None
            factor = 1.0 / count
        if set(keys) <= set(gone):
            terms = self._over_keys(part, set(gone) == set(keys))
        else:
            terms = part.terms if part.only(ROW_LOSS) is not None and not set(keys) & set(gone) else None
        return None if terms is None else _part(_scaled(terms, factor), kept)

    def _over_keys(self, part: Part, alone: bool) -> Terms | None:
        """11 and 12: the sum over the keys, and over nothing else if `alone`. Only what a row adds to the loss may be
        summed over rows as well."""
        divergence = part.divergence
        if divergence is not None and len(part.dims) == 3:
            return {ROW_LOSS: divergence}
        if alone and set(part.terms) <= {TARGET, PREDICTED}:
            return {ONE: sum(part.terms.values())}
        return None

    # -- selections -----------------------------------------------------------------------------

    def _selected(self, node: ir.Node) -> Part | None:
        condition, chosen, other = node.inputs
        assert condition is not None and chosen is not None and other is not None
        part = self.part(other)
        number = self.viewer.filler(chosen, other)
        if part is None or number is None or self.viewer.info.shape(node.outputs[0]) != self.viewer.info.shape(other):
            return None
        test = condition.producer()
        if math.isnan(number):
            return part if self._tests_nan(test) else None
        if number != 0.0:
            return None
        if test is not None and is_op(test, "Equal"):
            return self._guarded(part, test)
        if test is not None and is_op(test, "LessOrEqual"):
            return self._where_positive(part, test)
        return part if self._is_masked(part, condition) else None

    def _tests_nan(self, test: ir.Node | None) -> bool:
        """14: is this IsNaN of a target?"""
        tested = None if test is None or not is_op(test, "IsNaN") else self.part(test.inputs[0])
        return tested is not None and tested.only(TARGET) is not None

    def _guarded(self, part: Part, test: ir.Node) -> Part | None:
        """15."""
        tested = self._beside_zero(test)
        if tested is None or tested.only(TARGET) is None or not all(power[Factor.TARGET] > 0 for power in part.terms):
            return None
        return _part({_with_safe_log(power): factor for power, factor in part.terms.items()}, part.dims)

    def _where_positive(self, part: Part, test: ir.Node) -> Part | None:
        """16."""
        tested = self._beside_zero(test)
        slope = None if tested is None else tested.only(RECTIFIED)
        if tested is None or slope is None or slope <= 0:
            return None
        return _part(
            {_product(power, POSITIVE): factor for power, factor in part.terms.items()},
            self.tracer.aligned(part.dims, tested.dims),
        )

    def _is_masked(self, part: Part, condition: ir.Value) -> bool:
        """17: is a part 0 wherever this condition of a mask holds?"""
        distributions = all(power[Factor.TARGET] + power[Factor.PREDICTED] > 0 for power in part.terms)
        along = part.dims == self.rows_and_keys
        return along and distributions and any(self._excludes(mask, condition) for mask in self.masks)

    def _beside_zero(self, test: ir.Node) -> Part | None:
        """The first operand of a comparison, where the other is 0."""
        value, zero = test.inputs[0], test.inputs[1]
        if value is None or zero is None or self.viewer.filler(zero, value) != 0.0:
            return None
        return self.part(value)

    def _excludes(self, mask: Mask, condition: ir.Value) -> bool:
        """Is a condition true where this mask excludes, and nowhere else?"""
        own, negated = stripped(condition, self.tracer)
        theirs, other = stripped(mask.value, self.tracer)
        return own is theirs and negated == (other if mask.when else not other)


def _product(one: Monomial, other: Monomial) -> Monomial:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def _with_safe_log(power: Monomial) -> Monomial:
    """The monomial with every log_target as safe_log_target."""
    result = list(power)
    result[Factor.SAFE_LOG_TARGET] += result[Factor.LOG_TARGET]
    result[Factor.LOG_TARGET] = 0
    return tuple(result)


def _scaled(terms: Terms, factor: float) -> Terms:
    return {power: each * factor for power, each in terms.items()}


def _part(terms: Terms, dims: Arrangement | None) -> Part | None:
    usable = bool(terms) and all(math.isfinite(each) and each != 0.0 for each in terms.values())
    return Part(terms, dims) if usable and dims is not None else None
