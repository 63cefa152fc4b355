"""The record of a gradient that belongs to a matched attention: nothing in the graph has been
changed.

    dq, dk, dv = ds @ k, ds.transpose(-2, -1) @ q, p.transpose(-2, -1) @ dy

    gradient of query := c * product(dS, key)        summed over the keys
    gradient of key   := c * product(dS, query)      summed over the query rows, and heads of a
                                                     group
    gradient of value := c * product(P, dO)          summed over the query rows, and heads of a
                                                     group

dS is P * (dO V^T - D) in any spelling (region.py), and D the row sums of P * dO V^T. Where the
scores are capped, dS has the factor 1 - tanh^2. Where the scores are the sum of two products, the
second query and key have gradients, too. The graph need not compute *the* gradient: any factor c is
kept, and a gradient may be missing. Every value of the region has to be read inside of the region
only, forward and backward part taken together; nodes whose result nobody needs do not count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Literal

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement
from fa_compiler.passes.answer.decline import Decline, attempt, label, reworded
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.backward.divergence import Divergence, match_divergence
from fa_compiler.passes.backward.gradient_targets import GradientTarget, targets_after
from fa_compiler.passes.backward.polynomials import Tensor
from fa_compiler.passes.backward.quantities import MaskedRows, Quantity
from fa_compiler.passes.backward.region import Region
from fa_compiler.passes.backward.tracing import seeds
from fa_compiler.passes.ir.nodes import (
    distinct_consumers,
    holds_output,
    is_op,
    nodes_after,
    reached,
    reads_shape,
)
from fa_compiler.passes.ir.surgery import depends
from fa_compiler.passes.layout.contraction import Contraction, any_contraction
from fa_compiler.passes.layout.views import View, Viewer
from fa_compiler.passes.masks.score_ops import Add
from fa_compiler.passes.matching.attention import Matcher
from fa_compiler.passes.matching.match import AttentionMatch, Derivation
from fa_compiler.passes.matching.routes import Route, paths
from fa_compiler.passes.matching.softmax import SoftmaxAnchor

ALIKE = 16.0
"""A gradient and an operator's result that differ by no more than this factor are of one size for
float16."""

Role = Literal["query", "key", "value", "query_rope", "key_rope"]


@dataclass(frozen=True)
class Gradient:
    """A product of the backward part, and the targets that the operator's result can replace, the
    product or a value after the product."""

    role: Role
    node: ir.Node
    source: Quantity
    targets: tuple[GradientTarget, ...]

    @property
    def rows(self) -> MaskedRows:
        """What fully masked rows are in what the product reads."""
        return self.source.rows


@dataclass(frozen=True)
class GradientMatch:
    """The backward part of an attention.

    `dead` are readers whose results nobody needs; `empty_rows` as the operator's attribute
    cpu_empty_rows; `divergence` the loss of an indexer that learns from the probabilities. `dy` is
    None if only an indexer's loss reads the probabilities: there are no gradients then.
    """

    dy: View | None
    gradients: tuple[Gradient, ...]
    dead: tuple[ir.Node, ...]
    empty_rows: str = ""
    divergence: Divergence | None = None

    @property
    def assumed(self) -> tuple[str, ...]:
        """What the user has vouched for that it needs, besides the attention."""
        return () if self.divergence is None else self.divergence.assumed

    @property
    def node(self) -> ir.Node:
        """The node the report names: the product that makes the first gradient, or what the loss is
        made of."""
        if self.divergence is not None and not self.gradients:
            return self.divergence.node
        return self.gradients[0].node


@dataclass(frozen=True)
class Pair:
    """An attention with its gradient, in one space. What rows without a key give is not looked at
    yet: see empty_rows.py."""

    forward: AttentionMatch
    backward: GradientMatch
    derivation: Derivation


class PairDecline(Decline):
    """A decline after the gradient was found: the forward part alone could be fused. `gradient` is
    one of its nodes."""

    gradient: ir.Node

    @staticmethod
    def about(gradient: ir.Node, decline: Decline) -> PairDecline:
        """The same decline, of a pair with this gradient."""
        told = PairDecline(decline.code, decline.reason, decline.culprit, decline.hint)
        told.gradient = gradient
        return told


def match_pair(anchor: SoftmaxAnchor, matcher: Matcher) -> Pair | None:
    """The attention around an anchor together with its gradient; None when there is nothing like a
    gradient.

    Raises PairDecline when there is one that cannot be fused, or the Decline of the forward part.
    """
    failure: Decline | None = None
    for path in paths(anchor, matcher.facts):
        match = attempt(partial(matcher.match, anchor, Route(path, gradient=True)))
        if isinstance(match, Decline):
            # Another path may end in a product that does not sum over the keys.
            if match.code not in (Code.NO_VALUE_MATMUL, Code.AXIS):
                failure = failure or match
            continue
        assert match.derivation is not None
        finder = _Finder(match, match.derivation, matcher)
        pair = reworded(finder.pair, finder.named)
        # No gradient: this path's product was a row sum of the gradient, which looks like a product
        # with a vector of values.
        if pair is not None:
            return pair
    if failure is not None:
        raise failure
    return None


@dataclass
class _Finder:
    match: AttentionMatch
    derivation: Derivation
    matcher: Matcher

    def __post_init__(self) -> None:
        self.viewer = Viewer(self.matcher.facts, self.match.space.branch())
        self.region = Region(self.match, self.derivation, self.viewer)
        self.gradients: list[Gradient] = []
        self.products: dict[ir.Node, bool] = {}
        self.dead: list[ir.Node] = []
        self.shapes: list[tuple[ir.Node, ir.Value]] = []
        before, after = self.derivation.paths.before, self.derivation.paths.after
        self.forward = {
            *before.nodes,
            *self.match.anchor.nodes,
            *after.nodes,
            *after.tests,
            after.product.node,
        }

    def named(self, decline: Decline) -> Decline:
        """The same decline, with a node of the gradient if it is one of the pair."""
        if isinstance(decline, PairDecline):
            decline.gradient = (
                self.gradients[0].node if self.gradients else decline.culprit or self.match.node
            )
        return decline

    def pair(self) -> Pair | None:
        strangers = self._follow()
        divergence = self._divergence(strangers)
        if not self.gradients and divergence is None:
            return None
        self._check_forward()
        for gradient in self.gradients:
            # Only the values can be computed from their own gradient: every other gradient depends
            # on its operand through P.
            if gradient.role == "value" and depends(self.match.value.base, gradient.node):
                reason = f"the values {self.match.value.base.name!r} are computed from their own gradient"
                raise PairDecline(Code.TRAINING, reason, gradient.node)
        if strangers and divergence is None:
            raise self._foreign(*strangers[0])
        dy = self.region.dy if self.gradients else None
        if dy is not None:
            self._check_output_gradient(dy)
        space = self.viewer.space
        shapes = tuple((node, self._tensor(value).dims) for node, value in self.shapes)
        match = replace(self.match, shapes=(*self.match.shapes, *shapes))
        if dy is not None and not self._has_range(dy):
            match = replace(match, dtype=ir.DataType.FLOAT)
        backward = GradientMatch(dy, tuple(self.gradients), tuple(self.dead), "", divergence)
        return Pair(match.within(space), space.settle(backward), self.derivation)

    def _divergence(self, strangers: list[tuple[ir.Value, ir.Node | None]]) -> Divergence | None:
        """The loss that all readers belong to which are no part of the gradient, if it is one."""
        if not strangers or self.match.dropout is not None:
            return None
        return reworded(
            lambda: match_divergence(strangers, self.region),
            lambda decline: PairDecline(
                decline.code, decline.reason, decline.culprit, decline.hint
            ),
        )

    def _tensor(self, value: ir.Value) -> Tensor[Quantity]:
        tensor = self.region.reader.tensor(value)
        if tensor is None:
            raise PairDecline(
                Code.SHAPE, f"the shape of {value.name!r} is needed elsewhere", value.producer()
            )
        return tensor

    # -- from the probabilities to the gradients ------------------------------------------------

    def _follow(self) -> list[tuple[ir.Value, ir.Node | None]]:
        """Follow every reader of the region; what is left are readers (None: model outputs) that do
        not belong."""
        strangers: list[tuple[ir.Value, ir.Node | None]] = []
        late = self.derivation.paths.values_from_softmax_on
        seen: set[ir.Value] = set()
        while True:
            inner = [
                value for value, tensor in self.region.reader.tensors.items() if tensor is not None
            ]
            fresh = [value for value in dict.fromkeys([*late, *inner]) if value not in seen]
            if not fresh:
                return strangers
            for value in fresh:
                seen.add(value)
                if value.is_graph_output():
                    strangers.append((value, None))
                strangers.extend(
                    (value, node)
                    for node in distinct_consumers(value)
                    if not self._belongs(value, node)
                )

    def _belongs(self, value: ir.Value, node: ir.Node) -> bool:
        if node in self.forward or node in self.products:
            return self.products.get(node, True)
        if node.graph is not self.match.node.graph:
            return False
        if reads_shape(node):
            self.shapes.append((node, value))
            return True
        if dead := dead_branch(node):
            self.dead.extend(dead)
            return True
        product = any_contraction(node, self.matcher.facts.info)
        if product is not None:
            gradient = self._gradient(product)
            if gradient is not None:
                self.gradients.append(gradient)
                self.products[node] = True
                return True
        return self.region.reader.tensor(node.outputs[0]) is not None

    def _gradient(self, product: Contraction) -> Gradient | None:
        """A product that makes one of the three gradients."""
        for side in (0, 1):
            tensor = self.region.reader.tensor(product.operands[side])
            if tensor is None or len(tensor.dims) != len(product.labels[side]):
                continue
            gradient = self._of_scores(product, side, tensor) or self._of_value(
                product, side, tensor
            )
            if gradient is not None:
                return gradient
        return None

    def _of_scores(
        self, product: Contraction, side: int, tensor: Tensor[Quantity]
    ) -> Gradient | None:
        factor = tensor.quantity.product_gradient(self.region.dropout, self.match.softcap != 0.0)
        if factor is None:
            return None
        rope, scale = self.match.rope, self.match.scale
        options: list[tuple[Role, View, float]] = [
            ("query", self.match.key, scale),
            ("key", self.match.query, scale),
        ]
        if rope is not None:
            # The operator is given the second query times its ratio.
            options.extend(
                (("query_rope", rope.key, scale), ("key_rope", rope.query, scale * rope.ratio))
            )
        for role, view, share in options:
            known = self.region.tracer.trace(
                product.operands[1 - side], seeds(view.equivalent_values)
            )
            if known is None or not self._sums(product, side, tensor.dims, role):
                continue
            if not self.region.walk(product, 1 - side, known.dims, tensor.dims):
                continue
            dims = self.region.arranged(product, side, tensor.dims, known.dims)
            total = product.factor * factor * known.factor / share
            return self._gradient_with_targets(role, product, tensor, dims, total)
        return None

    def _of_value(
        self, product: Contraction, side: int, tensor: Tensor[Quantity]
    ) -> Gradient | None:
        factor = tensor.quantity.probabilities(self.region.dropout)
        if factor is None or not self._sums(product, side, tensor.dims, "value"):
            return None
        output = self.region.output_gradient(product, 1 - side, tensor.dims)
        if output is None:
            return None
        dims = self.region.arranged(product, side, tensor.dims, output[0])
        free = [
            label
            for label in product.labels[1 - side]
            if label in product.out and label not in product.labels[side]
        ]
        width = dict(zip(product.labels[1 - side], output[0], strict=True))
        if len(free) != 1 or not self.region.tracer.same(
            width[free[0]], self.match.roles.value_head_dim
        ):
            return None
        dims = self.viewer.space.resolve_all(dims)
        return self._gradient_with_targets(
            "value", product, tensor, dims, product.factor * factor * output[1]
        )

    def _sums(self, product: Contraction, side: int, dims: Arrangement, role: Role) -> bool:
        """Does the product sum over what this gradient sums over: the keys, or the rows and perhaps
        heads or batch?"""
        space = self.viewer.space
        roles = space.settle(self.match.roles)
        by_label = dict(zip(product.labels[side], dims, strict=True))
        summed = space.resolve(chain.from_iterable(by_label[label] for label in product.summed))
        if role in ("query", "query_rope"):
            return summed == roles.kv_seq
        shared = {*roles.batch, *roles.heads}
        return set(roles.q_seq) <= set(summed) and set(summed) - set(roles.q_seq) <= shared

    def _gradient_with_targets(
        self,
        role: Role,
        product: Contraction,
        tensor: Tensor[Quantity],
        dims: Arrangement,
        factor: float,
    ) -> Gradient:
        """The targets after the product; sums may run over heads or batch."""
        roles = self.viewer.space.settle(self.match.roles)
        start = GradientTarget(product.output, dims, factor)
        targets = targets_after(start, (*roles.batch, *roles.heads), self.region.tracer)
        return Gradient(role, product.node, tensor.quantity, targets)

    # -- what has to hold -----------------------------------------------------------------------

    def _check_forward(self) -> None:
        """Decline an attention with what its gradient does not have."""
        if self.match.sink is not None:
            raise PairDecline(
                Code.TRAINING,
                "the gradient of an attention with a sink is not fused",
                self.match.node,
            )
        on_scores = "a factor on the scores that is no number known before the run"
        told = (
            (self.match.query_factors, on_scores),
            (self.match.output_factors, "a factor behind the softmax"),
        )
        for factors, what in told:
            if factors:
                reason = f"the gradient of an attention with {what} is not fused"
                raise PairDecline(Code.TRAINING, reason, factors[0].node)

    def _foreign(self, value: ir.Value, reader: ir.Node | None) -> Decline:
        """Why the pair cannot be fused, given a reader that does not belong to the gradient."""
        who = "it is a model output" if reader is None else f"{label(reader)} reads it"
        tensor = self.region.reader.tensors.get(value)
        culprit = value.producer() if reader is None else reader
        if is_op(reader, "Where"):
            reason = f"{label(reader)} puts something into the gradient where the forward part does not mask"
            return PairDecline(Code.TRAINING, reason, culprit)
        if tensor is not None and tensor.quantity.score_gradient(self.region.dropout) is not None:
            if any(isinstance(term, Add) for term in self.derivation.paths.scores.terms):
                reason = f"the gradient of the scores {value.name!r} is also that of the bias, which is not computed"
                hint = "freeze the bias, or keep this attention unfused"
                return PairDecline(Code.BIAS_GRADIENT, f"{reason}: {who}", culprit, hint)
            return PairDecline(
                Code.TRAINING,
                f"the gradient of the scores {value.name!r} is needed elsewhere: {who}",
                culprit,
            )
        reason = f"{value.name!r} in the backward part is used in a way that is no gradient of attention: {who}"
        return PairDecline(Code.TRAINING, reason, culprit)

    def _has_range(self, dy: View) -> bool:
        """Are the gradients numbers that the type of the attention holds?

        float16 has few exponents, so that training scales the loss. Then the gradient that the
        operator is given has to be float16. The graph has to compute in float16, too, at a place
        where its numbers are about as large as the operator's result. Then neither is infinite or 0
        where the graph has a number. The other types have the exponents of float32.
        """
        info = self.matcher.facts.info
        if self.match.dtype != ir.DataType.FLOAT16:
            return True
        return info.dtype(dy.base) == ir.DataType.FLOAT16 and all(
            any(
                info.dtype(target.value) == ir.DataType.FLOAT16
                and 1 / ALIKE <= abs(target.factor) <= ALIKE
                for target in gradient.targets
            )
            for gradient in self.gradients
        )

    def _check_output_gradient(self, dy: View) -> None:
        if self.matcher.facts.info.dtype(dy.base) == ir.DataType.DOUBLE:
            reason = (
                f"the output's gradient {dy.base.name!r} is of float64, which no operator takes"
            )
            raise PairDecline(Code.DTYPE, reason, self.gradients[0].node)
        space = self.viewer.space
        roles = space.settle(self.match.roles)
        wanted = {*roles.batch, *roles.heads, *roles.q_seq, *roles.value_head_dim}
        if set(chain.from_iterable(space.resolve_all(dy.dims))) != wanted:
            reason = (
                f"the axes of the output's gradient {dy.base.name!r} are not those of the output"
            )
            raise PairDecline(Code.SHAPE, reason, self.gradients[0].node)


def dead_branch(node: ir.Node, limit: int = 16) -> list[ir.Node]:
    """The node and all after it when nobody needs what they compute, else nothing."""
    branch: list[ir.Node] = []
    for reader in reached([node], nodes_after):
        if len(branch) == limit or holds_output(reader.outputs):
            return []
        branch.append(reader)
    return branch
