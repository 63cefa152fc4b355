"""The loss of a lightning indexer in a training graph: how far its distribution over the selected keys is from that of
attention, and its gradients.

    target   := the mean of attention's probabilities over its heads, in any spelling; no gradient flows into it
    loss     := c * sum over batch, rows and keys of target * (ln target - log_predicted)
    log_predicted := LogSoftmax over the keys of masked(index scores)
    masked   := index scores (sparse/index_scores.py) | Where(c, f, masked) | Where(c, masked, f) | Add(masked, mask)
                f finite and at most -1e30, the mask 0 or such a number
    gradients:= c * sum over the keys of (predicted - target) * rectified                      of the weights
                c * product((predicted - target) * weight * positive, key), (.., query)        of query and key

in any spelling; index_region.py says what the names mean. c are numbers known before the run, one for each. Loss or
gradients may be missing. Everything after the sum over attention's heads has to
end in one of these four; what is the indexer's alone may be read by anybody.

The operator's loss takes a probability below 1e-8 for 1e-8, the graph's does not: for ONNX Runtime the attribute
cpu_loss_floor takes that away; on Ascend the user has to allow it ("loss-floor") where a graph has the loss, and not
its gradients alone. Its gradients have predicted - target everywhere, as those of the graph. That the masks leave what
attention attends is looked at when its list is known (index_loss.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement
from fa_compiler.passes.answer.decline import Decline, label
from fa_compiler.passes.answer.options import LOSS_FLOOR
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.backward.gradient_targets import GradientTarget
from fa_compiler.passes.backward.index_region import ROW_LOSS, IndexRegion, Symbol, error_times
from fa_compiler.passes.backward.quantities import LARGEST_FACTOR
from fa_compiler.passes.backward.region import Region
from fa_compiler.passes.backward.tracing import seeds
from fa_compiler.passes.ir.nodes import distinct_consumers, int_attr, is_op, nodes_after, producer, reached
from fa_compiler.passes.layout.contraction import Contraction, any_contraction
from fa_compiler.passes.masks.magnitudes import DOMINATING
from fa_compiler.passes.sparse.index_scores import IndexScores, Mask, plain_scores

MAX_MASKS = 8


@dataclass(frozen=True)
class Divergence:
    """A loss with its gradients: `results` by the outputs of SparseLightningIndexerGradKLLoss. `node` is the logarithm
    of the indexer's distribution, `assumed` what the user has vouched for."""

    scores: IndexScores
    masks: tuple[Mask, ...]
    results: dict[str, GradientTarget]
    node: ir.Node
    assumed: tuple[str, ...]


def match_divergence(readers: Sequence[tuple[ir.Value, ir.Node | None]], region: Region) -> Divergence | None:
    """The loss that these readers of a region belong to; None where they are nothing like it. Raises Decline."""
    options = region.viewer.facts.options
    starts = [node for _, node in readers if is_op(node, "ReduceSum", "ReduceMean")]
    if len(starts) != len(readers):
        return None
    log = _logarithm(starts)
    if log is None:
        return None
    found = _masked_scores(log, region)
    if found is None:
        reason = f"{label(log)} takes no index scores under masks of finite numbers"
        raise Decline(Code.TRAINING, reason, log)
    scores, masks = found
    inner = IndexRegion(region, scores, masks, log.outputs[0])
    results = _Results(inner).found(starts)
    _check_axes(scores, region, log)
    floor = "loss" in results and options.target == "ascend"
    if floor and LOSS_FLOOR not in options.assume:
        reason = "the operator's loss takes a probability below 1e-8 for 1e-8"
        raise Decline(Code.TRAINING, reason, log, f"--assume {LOSS_FLOOR} if that is all right")
    return Divergence(scores, masks, results, log, (LOSS_FLOOR,) if floor else ())


def _check_axes(scores: IndexScores, region: Region, log: ir.Node) -> None:
    """Decline where two axes of the indexer were taken for one, or its heads or head size for one of attention's:
    elementwise operators and products name axes after those they walk with, of whatever meaning."""
    space, roles = scores.space, region.viewer.space.settle(region.match.roles)
    batch, rows, heads, keys, depth = (space.resolve(axes) for axes in scores.axes)
    every = (*batch, *rows, *heads, *keys, *depth)
    attended = {
        *(*roles.batch, *roles.heads, *roles.kv_heads, *roles.q_seq),
        *(*roles.kv_seq, *roles.head_dim, *roles.value_head_dim),
    }
    if len(set(every)) != len(every) or not attended.isdisjoint((*heads, *depth)):
        raise Decline(Code.TRAINING, "one axis would have to play two roles in the loss of an indexer", log)


def _logarithm(starts: Sequence[ir.Node], limit: int = 64) -> ir.Node | None:
    """The LogSoftmax of the indexer: a node computed from `starts`, the sums of attention's probabilities over the
    heads, reads it or its exponential."""
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
    value = log.inputs[0]
    masks: list[Mask] = []
    shape = None if value is None else region.viewer.info.shape(value)
    if shape is None or int_attr(log, "axis", -1) not in (-1, len(shape) - 1):
        return None
    while value is not None and len(masks) <= MAX_MASKS:
        scores = plain_scores(value, region.viewer)
        if scores is not None:
            return scores, tuple(masks)
        found = _mask(value, region)
        if found is None or region.viewer.info.shape(found[0]) != shape:
            return None
        value, mask = found
        masks.append(mask)
    return None


def _mask(value: ir.Value, region: Region) -> tuple[ir.Value, Mask] | None:
    """What a value is before a mask, and the mask."""
    node = value.producer()
    if node is None or any(each is None for each in node.inputs):
        return None
    inputs = [each for each in node.inputs if each is not None]
    if is_op(node, "Where"):
        condition, chosen, other = inputs
        for inner, fill, when in ((other, chosen, True), (chosen, other, False)):
            number = region.viewer.uniform_value(fill, inner)
            if number is not None and -float("inf") < number <= DOMINATING:
                return inner, Mask(condition, when)
    if is_op(node, "Add"):
        for inner, mask in (inputs, inputs[::-1]):
            numbers = region.viewer.facts.sets.of(mask)
            if numbers is not None and all(number == 0 or -float("inf") < number <= DOMINATING for number in numbers):
                return inner, Mask(mask, True)
    return None


@dataclass
class _Results:
    inner: IndexRegion

    def found(self, starts: Sequence[ir.Node]) -> dict[str, GradientTarget]:
        """Follow everything computed from `starts`: each end has to be the loss or one of the three gradients. Raises
        Decline."""
        results: dict[str, GradientTarget] = {}
        pending, seen = list(starts), set(starts)
        while pending:
            node = pending.pop(0)
            result = self._result(node)
            if result is not None:
                name, one = result
                if name in results:
                    raise self._foreign(node, f"there are two of {name}")
                if not 1 / LARGEST_FACTOR < abs(one.factor) < LARGEST_FACTOR:
                    raise self._foreign(node, f"it is {one.factor:g} times as large")
                results[name] = one
                continue
            if not is_op(node, "Equal", "IsNaN", "LessOrEqual") and self.inner.reader.tensor(node.outputs[0]) is None:
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
            Code.TRAINING, f"attention's probabilities reach {label(node)}, which is no loss of an indexer: {why}", node
        )

    def _result(self, node: ir.Node) -> tuple[str, GradientTarget] | None:
        inner, value = self.inner, node.outputs[0]
        product = any_contraction(node, inner.viewer.info)
        if product is not None:
            return self._product(product)
        if not is_op(node, "ReduceSum", "ReduceMean"):
            return None
        part, source = inner.reader.tensor(value), inner.reader.tensor(node.inputs[0])
        if part is not None and not any(part.dims) and (factor := part.quantity.coefficient(ROW_LOSS)) is not None:
            return "loss", GradientTarget(value, part.dims, factor)
        factor = None if source is None else error_times(source, Symbol.RECTIFIED)
        if source is None or factor is None:
            return None
        return self._weights(node, source.dims, factor)

    def _weights(self, node: ir.Node, dims: Arrangement, factor: float) -> tuple[str, GradientTarget] | None:
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
        space, region = inner.viewer.space, inner.region
        rows, heads, keys = (space.resolve(axes) for axes in scores.axes[1:4])
        for side in (0, 1):
            part = inner.reader.tensor(product.operands[side])
            factor = None if part is None else error_times(part, Symbol.WEIGHT, Symbol.POSITIVE)
            if part is None or factor is None or len(part.dims) != len(product.labels[side]):
                continue
            by_label = dict(zip(product.labels[side], part.dims, strict=True))
            summed = [axis for each in product.summed for axis in space.resolve(by_label[each])]
            for name, other, place, over in (
                ("d_query_index", scores.views[1], 0, keys),
                ("d_key_index", scores.views[0], 1, (*rows, *heads)),
            ):
                known = inner.tracer.trace(product.operands[1 - side], seeds(other.equivalent_values))
                if known is None or len(summed) != len(over) or set(summed) != set(over):
                    continue
                if not region.walk(product, 1 - side, known.dims, part.dims):
                    continue
                dims = region.arranged(product, side, part.dims, known.dims)
                if not self._covers(dims, scores.wanted[place]):
                    continue
                total = product.factor * factor * known.factor / scores.factor
                return name, GradientTarget(product.output, dims, total)
        return None

    def _covers(self, dims: Arrangement, wanted: Arrangement) -> bool:
        """Are these all of the wanted axes and no others, each once?"""
        space = self.inner.viewer.space
        own = [axis for dim in space.resolve_all(dims) for axis in dim]
        return len(own) == len(set(own)) and set(own) == {axis for dim in wanted for axis in dim}
