"""The loss of a lightning indexer in a training graph: how far its distribution over the selected
keys is from that of attention, and its gradients.

    target   := the mean of attention's probabilities over its heads, in any spelling; no gradient
             flows into it
    loss     := c * sum over batch, rows and keys of target * (ln target - log_predicted)
    log_predicted := LogSoftmax over the keys of masked(index scores)
    masked   := index scores (sparse/index_scores.py) | Where(c, f, masked) | Where(c, masked, f) |
             Add(masked, mask)
                f finite and at most -1e30, the mask 0 or such a number
    gradients:= c * sum over the keys of (predicted - target) * rectified             of the weights
                c * product((predicted - target) * weight * positive, key), (.., query)
                                                                          of query and key

in any spelling; index_region.py says what the names mean. c are numbers known before the run, one
for each. Loss or gradients may be missing. Everything after the sum over attention's heads has to
end in one of these four; what is the indexer's alone may be read by anybody.

The operator's loss takes a probability below 1e-8 for 1e-8, the graph's does not: for ONNX Runtime
the attribute cpu_loss_floor takes that away; on Ascend the user has to allow it ("loss-floor")
where a graph has the loss, and not its gradients alone. Its gradients have predicted - target
everywhere, as those of the graph. That the masks leave what attention attends is looked at when its
list is known (index_loss.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes
from fa_compiler.passes.answer.decline import Decline, label
from fa_compiler.passes.answer.options import LOSS_FLOOR
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.backward.gradient_targets import GradientTarget
from fa_compiler.passes.backward.index_region import ROW_LOSS, IndexRegion, Symbol, error_times
from fa_compiler.passes.backward.quantities import LARGEST_FACTOR
from fa_compiler.passes.backward.region import Region
from fa_compiler.passes.backward.tracing import seeds
from fa_compiler.passes.ir.nodes import (
    distinct_consumers,
    int_attr,
    is_op,
    nodes_after,
    operand_at,
    operand_orders,
    operands,
    producer,
    reached,
)
from fa_compiler.passes.layout.contraction import Contraction, any_contraction
from fa_compiler.passes.layout.views import View
from fa_compiler.passes.masks.magnitudes import DOMINATING
from fa_compiler.passes.sparse.index_scores import IndexScores, Mask, plain_scores

MAX_MASKS = 8


@dataclass(frozen=True)
class Divergence:
    """A loss with its gradients: `results` by the outputs of SparseLightningIndexerGradKLLoss.
    `node` is the logarithm of the indexer's distribution, `assumed` what the user has vouched
    for."""

    scores: IndexScores
    masks: tuple[Mask, ...]
    results: dict[str, GradientTarget]
    node: ir.Node
    assumed: tuple[str, ...]


def match_divergence(
    readers: Sequence[tuple[ir.Value, ir.Node | None]], region: Region
) -> Divergence | None:
    """The loss that these readers of a region belong to; None where they are nothing like it.
    Raises Decline."""
    options = region.viewer.facts.options
    starts = [node for _, node in readers if is_op(node, "ReduceSum", "ReduceMean")]
    if len(starts) != len(readers):
        return None
    log = _logarithm(starts)
    if log is None:
        return None
    masked = _masked_scores(log, region)
    if masked is None:
        reason = f"{label(log)} takes no index scores under masks of finite numbers"
        raise Decline(Code.TRAINING, reason, log)
    scores, masks = masked
    inner = IndexRegion(region, scores, masks, log.outputs[0])
    results = _Results(inner).found(starts)
    _check_axes(scores, region, log)
    if "loss" not in results or options.target != "ascend":
        return Divergence(scores, masks, results, log, ())
    if LOSS_FLOOR not in options.assume:
        reason = "the operator's loss takes a probability below 1e-8 for 1e-8"
        raise Decline(Code.TRAINING, reason, log, f"--assume {LOSS_FLOOR} if that is all right")
    return Divergence(scores, masks, results, log, (LOSS_FLOOR,))


def _check_axes(scores: IndexScores, region: Region, log: ir.Node) -> None:
    """Decline where two axes of the indexer were taken for one, or its heads or head size for one
    of attention's: elementwise operators and products name axes after those they walk with, of
    whatever meaning."""
    space, roles = scores.space, region.viewer.space.settle(region.match.roles)
    batch, rows, heads, keys, depth = (space.resolve(axes) for axes in scores.axes)
    every = (*batch, *rows, *heads, *keys, *depth)
    attended = {
        *(*roles.batch, *roles.heads, *roles.kv_heads, *roles.q_seq),
        *(*roles.kv_seq, *roles.head_dim, *roles.value_head_dim),
    }
    if len(set(every)) != len(every) or not attended.isdisjoint((*heads, *depth)):
        raise Decline(
            Code.TRAINING, "one axis would have to play two roles in the loss of an indexer", log
        )


def _logarithm(starts: Sequence[ir.Node], limit: int = 64) -> ir.Node | None:
    """The LogSoftmax of the indexer: a node computed from `starts`, the sums of attention's
    probabilities over the heads, reads it or its exponential."""
    for node in reached(starts, nodes_after, limit):
        for value in node.inputs:
            maker = producer(value)
            if is_op(maker, "Exp"):
                maker = producer(maker.inputs[0])
            if is_op(maker, "LogSoftmax"):
                return maker
    return None


def _masked_scores(log: ir.Node, region: Region) -> tuple[IndexScores, tuple[Mask, ...]] | None:
    """The scores under a LogSoftmax over the keys, and what they are masked by."""
    value, masks = operand_at(log, 0), list[Mask]()
    shape = region.viewer.info.shape(value)
    if shape is None or int_attr(log, "axis", -1) not in (-1, len(shape) - 1):
        return None
    while len(masks) <= MAX_MASKS:
        scores = plain_scores(value, region.viewer)
        if scores is not None:
            return scores, tuple(masks)
        masked = _mask(value, region)
        if masked is None or region.viewer.info.shape(masked[0]) != shape:
            return None
        value, mask = masked
        masks.append(mask)
    return None


def _mask(value: ir.Value, region: Region) -> tuple[ir.Value, Mask] | None:
    """What a value is before a mask, and the mask."""
    node, facts = value.producer(), region.viewer.facts
    if is_op(node, "Where"):
        condition, chosen, other = operands(node)
        for inner, fill, when in ((other, chosen, True), (chosen, other, False)):
            if _excludes(region.viewer.uniform_value(fill, inner)):
                return inner, Mask(condition, when)
    for inner, mask in operand_orders(node, "Add"):
        numbers = facts.sets.of(mask)
        if numbers is not None and all(number == 0 or _excludes(number) for number in numbers):
            return inner, Mask(mask, True)
    return None


def _excludes(number: float | None) -> bool:
    """Does a key with such a number, put in or added, have no probability? The number is finite."""
    return number is not None and -math.inf < number <= DOMINATING


@dataclass(frozen=True)
class _ErrorProduct:
    """A product whose operand at `side` is `factor` times (predicted - target) * weight * positive,
    of this arrangement."""

    product: Contraction
    side: int
    dims: Arrangement
    factor: float


@dataclass
class _Results:
    inner: IndexRegion

    def found(self, starts: Sequence[ir.Node]) -> dict[str, GradientTarget]:
        """Follow everything computed from `starts`: each end has to be the loss or one of the three
        gradients. Raises Decline."""
        results: dict[str, GradientTarget] = {}
        pending, seen = list(starts), set(starts)
        while pending:
            node = pending.pop(0)
            result = self._loss_or_gradient(node)
            if result is not None:
                name, one = result
                if name in results:
                    raise self._foreign(node, f"there are two of {name}")
                if not 1 / LARGEST_FACTOR < abs(one.factor) < LARGEST_FACTOR:
                    raise self._foreign(node, f"it is {one.factor:g} times as large")
                results[name] = one
                continue
            if (
                not is_op(node, "Equal", "IsNaN", "LessOrEqual")
                and self.inner.reader.tensor(node.outputs[0]) is None
            ):
                raise self._foreign(node, "it is no part of the loss or its gradients")
            for output in node.outputs:
                if output.is_graph_output():
                    raise self._foreign(node, f"{output.name!r} is a model output")
                readers = distinct_consumers(output)
                if any(reader.graph is not node.graph for reader in readers):
                    raise self._foreign(node, f"{output.name!r} is read in a subgraph")
                pending.extend(reader for reader in readers if reader not in seen)
                seen.update(readers)
        return results

    def _foreign(self, node: ir.Node, why: str) -> Decline:
        return Decline(
            Code.TRAINING,
            f"attention's probabilities reach {label(node)}, which is no loss of an indexer: {why}",
            node,
        )

    def _loss_or_gradient(self, node: ir.Node) -> tuple[str, GradientTarget] | None:
        inner, value = self.inner, node.outputs[0]
        product = any_contraction(node, inner.viewer.info)
        if product is not None:
            return self._product(product)
        if not is_op(node, "ReduceSum", "ReduceMean"):
            return None
        part, source = inner.reader.tensor(value), inner.reader.tensor(node.inputs[0])
        if (
            part is not None
            and not any(part.dims)
            and (factor := part.quantity.coefficient(ROW_LOSS)) is not None
        ):
            return "loss", GradientTarget(value, part.dims, factor)
        if source is None or (factor := error_times(source, Symbol.RECTIFIED)) is None:
            return None
        return self._weights(node, source.dims, factor)

    def _weights(
        self, node: ir.Node, dims: Arrangement, factor: float
    ) -> tuple[str, GradientTarget] | None:
        """The gradient of the weights: a sum over the keys, and nothing else."""
        kept = self.inner.summed_dims(node, dims)
        if kept is None or node.op_type != "ReduceSum":
            return None
        gone, left = kept
        space, scores = self.inner.viewer.space, self.inner.scores
        if gone != space.resolve(scores.axes[3]) or not self._covers(left, scores.wanted[2]):
            return None
        return "d_weight", GradientTarget(node.outputs[0], left, factor)

    def _product(self, product: Contraction) -> tuple[str, GradientTarget] | None:
        """The gradient of query or key."""
        inner, scores = self.inner, self.inner.scores
        if scores.factor == 0.0:
            return None
        query, key, _ = scores.views
        rows, heads, keys = (inner.viewer.space.resolve(axes) for axes in scores.axes[1:4])
        for side in (0, 1):
            part = inner.reader.tensor(product.operands[side])
            if part is None or len(part.dims) != len(product.labels[side]):
                continue
            factor = error_times(part, Symbol.WEIGHT, Symbol.POSITIVE)
            if factor is None:
                continue
            error = _ErrorProduct(product, side, part.dims, factor)
            target = self._gradient(error, key, keys, scores.wanted[0])
            if target is not None:
                return "d_query_index", target
            target = self._gradient(error, query, (*rows, *heads), scores.wanted[1])
            if target is not None:
                return "d_key_index", target
        return None

    def _gradient(
        self, error: _ErrorProduct, other: View, over: Axes, wanted: Arrangement
    ) -> GradientTarget | None:
        """The gradient of these wanted axes, which an error times `other`, summed over these axes,
        is; else None."""
        inner, product, side = self.inner, error.product, error.side
        known = inner.tracer.trace(product.operands[1 - side], seeds(other.equivalent_values))
        by_label = dict(zip(product.labels[side], error.dims, strict=True))
        summed = inner.viewer.space.resolve(
            chain.from_iterable(by_label[label] for label in product.summed)
        )
        if known is None or len(summed) != len(over) or set(summed) != set(over):
            return None
        if not inner.region.walk(product, 1 - side, known.dims, error.dims):
            return None
        dims = inner.region.arranged(product, side, error.dims, known.dims)
        if not self._covers(dims, wanted):
            return None
        total = product.factor * error.factor * known.factor / inner.scores.factor
        return GradientTarget(product.output, dims, total)

    def _covers(self, dims: Arrangement, wanted: Arrangement) -> bool:
        """Are these all of the wanted axes and no others, each once?"""
        space = self.inner.viewer.space
        own = list(chain.from_iterable(space.resolve_all(dims)))
        return len(own) == len(set(own)) and set(own) == set(chain.from_iterable(wanted))
