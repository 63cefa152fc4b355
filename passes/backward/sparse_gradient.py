"""From a matched gradient to a SparseFlashAttentionGrad node beside its SparseFlashAttention.

    accepted    a gradient as of any attention (match.py), whose forward part is one to selected
                keys (sparse/masked_selection.py), or to gathered ones (sparse/gathered_keys.py)
                whose gradients are added up after it (scattered.py); no guard against NaN
                probabilities; rows without a key give the gradients nothing
    emitted     SparseFlashAttentionGrad with the forward node's inputs, list, statistics and result
    left        (both are then the dense pair) a row that may be without a key and gives the
                gradients something; what the target forbids

Sound because the dense gradient was proven to be that of the attention under its mask, where P is 0
at every key that is not listed, and the operator sums the same terms over the listed keys. A key
that is also value, or part of it, is so in the graph: it adds up the two gradients itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import AxisSpace
from fa_compiler.passes.answer.decline import Decline, reworded
from fa_compiler.passes.answer.options import NO_EMPTY_ROWS
from fa_compiler.passes.backward.destination import (
    GradientCompanion,
    destination_of,
    gradient_dims,
    moved_to,
    replace_destinations,
)
from fa_compiler.passes.backward.gradient_targets import GradientTarget
from fa_compiler.passes.backward.index_loss import IndexLoss
from fa_compiler.passes.backward.match import Gradient, Role
from fa_compiler.passes.backward.scattered import scattered
from fa_compiler.passes.backward.tracing import Tracer
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.sparse.builder import SparseFlashBuilder
from fa_compiler.passes.sparse.emit import domain_node
from fa_compiler.passes.sparse.gathers import GatheredOperand
from fa_compiler.passes.sparse.selection import Selection

OP = "SparseFlashAttentionGrad"
LAYOUT = "BSND"
OUTPUTS: dict[Role, str] = {
    "query": "d_query",
    "key": "d_key",
    "value": "d_value",
    "query_rope": "d_query_rope",
    "key_rope": "d_key_rope",
}


@dataclass
class ListedBackward(GradientCompanion):
    """Emits the gradient as the companion of an attention to selected keys (see sparse/builder.py).
    `every_row` says whether every row has to be proven to have a key."""

    every_row: bool = field(kw_only=True)
    failure: Decline | None = None
    """Why the loss of an indexer could not be built."""
    refused: str = ""
    """Why an attention to selected keys keeps the dense pair, for the report."""

    def _failed(self, decline: Decline) -> Decline:
        self.failure = decline
        return decline

    def check_rows(self, match: AttentionMatch, full: bool) -> bool:
        """Can the operator give the gradients what the graph gives them in rows without a key or
        with a NaN softmax? If not, `refused` says why."""
        mask = match.mask
        if mask.nan_rows:
            self.refused = (
                f"{OP} has no zeros for rows whose softmax is NaN, as the guard here gives"
            )
        elif not (
            full if self.every_row else {mask.empty_rows, self.record.empty_rows} <= {"", "zero"}
        ):
            reason = f"{OP} has no name for what a row without a key gives the gradients"
            self.refused = f"{reason}; --assume {NO_EMPTY_ROWS} if there is no such row"
        return not self.refused

    def move_after_scatter(
        self, match: AttentionMatch, read: Sequence[GatheredOperand], space: AxisSpace
    ) -> bool:
        """Are the gradients added up where keys and values were gathered from? Then they are taken
        from there."""
        if self.record.divergence is not None:
            self.refused = "an indexer learns from probabilities of gathered keys"
            return False
        tracer = Tracer(match, Viewer(self.rewriter.facts, space))
        roles, rope = match.roles, match.rope
        sources = {
            "key": (match.key, read[0], roles.head_dim),
            "value": (match.value, read[1], roles.value_head_dim),
        }
        if rope is not None:
            sources["key_rope"] = rope.key, read[2], rope.head_dim
        gradients: list[Gradient] = []
        for gradient in self.found.gradients:
            behind = gradient
            if gradient.role in sources:
                target = scattered(gradient, *sources[gradient.role], tracer)
                if target is None:
                    self.refused = f"the gradient of {gradient.role} is not added up by the list that gathers it"
                    return False
                behind = target
            gradients.append(behind)
        self.record = space.settle(replace(self.found, gradients=tuple(gradients)))
        return True

    def build(
        self,
        node: ir.Node,
        inputs: dict[str, ir.Value],
        sparse: SparseFlashBuilder,
        selection: Selection | None,
    ) -> Callable[[], None] | None:
        """Add the gradient of a forward node, and the loss; what is returned puts the results in
        place. None where the target forbids it. Raises Decline."""
        pairs = self._gradients(node, inputs, sparse)
        if pairs is None:
            return None
        if self.record.divergence is not None:
            # of gathered keys there is no loss: see move_after_scatter()
            assert selection is not None
            loss_builder = IndexLoss(self.record.divergence, selection, self.rewriter)
            loss, more = reworded(lambda: loss_builder.build(node, inputs, sparse), self._failed)
            self.nodes.append(loss)
            pairs.extend(more)

        def put() -> None:
            replace_destinations(pairs, self.rewriter)
            self.rewriter.replaced.extend(self.record.dead)

        return put

    def _gradients(
        self, node: ir.Node, inputs: dict[str, ir.Value], sparse: SparseFlashBuilder
    ) -> list[tuple[GradientTarget, ir.Value]] | None:
        """Add the gradient, if any is wanted, and return the result for each target."""
        if self.record.dy is None:
            return []
        builder = self.rewriter.builder
        match = replace(sparse.match, roles=replace(sparse.match.roles, kv_seq=sparse.tokens))
        destinations = [
            destination_of(wanted_gradient, match, LAYOUT)
            for wanted_gradient in self.record.gradients
        ]
        if None in destinations:
            return None
        roles = match.roles
        given = inputs | {
            "d_out": sparse.arranged(
                self.record.dy,
                (roles.batch, roles.q_seq, roles.heads, roles.value_head_dim),
                match.dtype,
            ),
            "out": node.outputs[0],
            "softmax_max": node.outputs[1],
            "softmax_sum": node.outputs[2],
        }
        names = ("scale_value", "sparse_block_size", "sparse_mode")
        attrs = {name: node.attributes[name].value for name in names} | {"layout": LAYOUT}
        wanted = {OUTPUTS[wanted_gradient.role] for wanted_gradient in self.record.gradients}
        gradient = domain_node(OP, given, attrs, builder, self.rewriter.options, wanted)
        if gradient is None:
            return None
        self.rewriter.made.append(gradient)
        results = {output.name: output for output in gradient.outputs}
        pairs: list[tuple[GradientTarget, ir.Value]] = []
        for wanted_gradient, destination in zip(self.record.gradients, destinations, strict=True):
            assert destination is not None
            value = results[f"{gradient.name}_{OUTPUTS[wanted_gradient.role]}"]
            dims = gradient_dims(wanted_gradient.role, match, LAYOUT)
            pairs.append(
                (
                    destination.target,
                    moved_to(value, dims, destination, match.dtype, builder, sparse.emitter),
                )
            )
        self.nodes.append(gradient)
        return pairs
