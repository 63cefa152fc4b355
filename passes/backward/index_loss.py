"""From a matched loss of an indexer to a SparseLightningIndexerGradKLLoss node.

    accepted    a loss with gradients (divergence.py) beside an attention to selected keys, one list
                for all heads, one head of keys; the list a sorted TopK of scores under a causal
                mask, attention and the indexer's scores under that list and a causal mask and
                nothing else; no more rows than keys
    emitted     SparseLightningIndexerGradKLLoss with the attention's inputs and statistics and the
                TopK's list, or that of the LightningIndexer in its place
    refused     anything else, and what the target forbids

The operator takes the first min(K, visible) entries of a row for the keys: a sorted TopK under a
causal mask lists the keys that a row sees before all others, so these are the listed keys that the
masks leave.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.op_registry import DOMAIN
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.backward.destination import GradientDestination, moved_to
from fa_compiler.passes.backward.divergence import Divergence
from fa_compiler.passes.backward.gradient_targets import GradientTarget
from fa_compiler.passes.emit.build import LayoutEmitter
from fa_compiler.passes.ir.nodes import int_attr
from fa_compiler.passes.layout.plan import plan_moves
from fa_compiler.passes.matching.factors import scaled
from fa_compiler.passes.rewrite.rewriter import Rewriter
from fa_compiler.passes.sparse.builder import SparseFlashBuilder
from fa_compiler.passes.sparse.conditions import Condition, conditions
from fa_compiler.passes.sparse.emit import STATISTICS, Sizes, domain_node
from fa_compiler.passes.sparse.key_mask import KeyMask
from fa_compiler.passes.sparse.selection import Selection, selection_of
from fa_compiler.passes.sparse.sparse_indices import key_mask_of, ranks_causally
from fa_compiler.passes.values.shapes import ShapeInfo

OP = "SparseLightningIndexerGradKLLoss"
GRADIENTS = ("d_query_index", "d_key_index", "d_weight")
INT32 = ir.DataType.INT32
CAUSAL = KeyMask(causal=True)


@dataclass(frozen=True)
class IndexLoss:
    """Emits a loss beside an attention to the keys of `found`."""

    record: Divergence
    found: Selection
    rewriter: Rewriter

    def build(
        self, node: ir.Node, inputs: dict[str, ir.Value], sparse: SparseFlashBuilder
    ) -> tuple[ir.Node, list[tuple[GradientTarget, ir.Value]]]:
        """The node, and the result for each target. Raises Decline."""
        builder, record = self.rewriter.builder, self.record
        self._check(inputs, sparse)
        equivalent_values = [
            stop for view in record.scores.views for stop in view.equivalent_values
        ]
        emitter = LayoutEmitter(
            builder, sparse.match.space, [*equivalent_values, *sparse.emitter.size_sources]
        )
        given = self._index_inputs(emitter)
        given |= {
            name: inputs[name]
            for name in ("query", "key", "query_rope", "key_rope")
            if name in inputs
        }
        given["sparse_indices"] = self._listed(inputs["sparse_indices"])
        given |= dict(zip(STATISTICS, node.outputs[1:3], strict=True))
        attrs: dict[str, int | float | str] = {
            "scale_value": node.attributes["scale_value"].as_float(),
            "layout": "BSND",
            "sparse_mode": 3,
        }
        if self.rewriter.options.target == "ort" and "loss" in record.results:
            attrs["cpu_loss_floor"] = 0.0
        made = domain_node(OP, given, attrs, builder, self.rewriter.options, tuple(record.results))
        if made is None:
            raise self._decline(f"the target has no {OP} of these sizes and types")
        self.rewriter.made.append(made)
        outputs = {output.name: output for output in made.outputs}
        results = record.results.items()
        return made, [
            self._placed(name, outputs[f"{made.name}_{name}"], result, emitter)
            for name, result in results
        ]

    def _listed(self, attended: ir.Value) -> ir.Value:
        """The list: attention's where that is an indexer's, for the statistics are of these keys;
        else the TopK's, which ends in keys that the row does not see."""
        maker = attended.producer()
        if maker is not None and (maker.domain, maker.op_type) == (DOMAIN, "LightningIndexer"):
            return attended
        builder = self.rewriter.builder
        return builder.unsqueeze(builder.cast(self.found.entries(builder), INT32), [2])

    def _decline(self, reason: str) -> Decline:
        return Decline(Code.TRAINING, f"the indexer's loss: {reason}", self.record.node)

    def _check(self, inputs: dict[str, ir.Value], sparse: SparseFlashBuilder) -> None:
        """Decline another attention than one to a sorted list of keys under a causal mask, with one
        head of keys."""
        info, roles = sparse.builder.info, sparse.match.roles
        query, key = info.shape(inputs["query"]), info.shape(inputs["key"])
        if query is None or key is None or key[2].const != 1:
            raise self._decline("attention has more than one head of keys")
        batch, rows, _, keys, _ = self.record.scores.axes
        if (batch, rows, keys) != (roles.batch, roles.q_seq, roles.kv_seq):
            raise self._decline("its scores are not those of attention's batches, rows and keys")
        sizes = Sizes(query[0], query[1], key[1])
        if self.found.block != 1 or int_attr(self.found.top, "sorted", 1) != 1:
            raise self._decline("the list of keys is not sorted by their scores")
        attended = [key_mask_of(condition, sizes, info) for condition in self.found.others]
        if not attended or any(part != CAUSAL for part in attended):
            raise self._decline("attention has another mask than a causal one beside the selection")
        if not ranks_causally(self.found.top, sizes, self.rewriter.facts):
            raise self._decline(
                "the keys are not proven to be ranked under the causal mask, or there may be too few"
            )
        self._check_masks(sizes, info)

    def _check_masks(self, sizes: Sizes, info: ShapeInfo) -> None:
        """Decline another mask on the indexer's scores than the selection, or than the causal
        one."""
        masks = self.record.masks
        parts = [
            part
            for mask in masks
            for part in conditions(mask.value, mask.when, self.rewriter.facts)
        ]
        selected, seen = False, False
        for condition in parts:
            if self._is_selection(condition):
                selected = True
            elif key_mask_of(condition, sizes, info) == CAUSAL:
                seen = True
            else:
                raise self._decline(
                    f"{condition.value.name!r} masks its scores and not those of attention"
                )
        if not selected or not seen:
            raise self._decline("its scores are not masked as those of attention are")

    def _is_selection(self, condition: Condition) -> bool:
        other = selection_of(condition, self.rewriter.facts)
        return other is not None and other.indices is self.found.indices and other.block == 1

    def _index_inputs(self, emitter: LayoutEmitter) -> dict[str, ir.Value]:
        """query_index, key_index and weight, which takes all factors."""
        builder, scores = self.rewriter.builder, self.record.scores
        arranged: list[ir.Value] = []
        for view, wanted in zip(scores.views, scores.wanted, strict=True):
            plan = plan_moves(view.base_dims, wanted)
            if plan is None:
                raise self._decline(f"{view.base.name!r} could not be arranged for the operator")
            arranged.append(emitter.apply(view.base, view.base_dims, plan))
        query, key, weight = arranged
        return {
            "query_index": query,
            "key_index": key,
            "weight": scaled(weight, scores.factor, builder),
        }

    def _placed(
        self, name: str, value: ir.Value, target: GradientTarget, emitter: LayoutEmitter
    ) -> tuple[GradientTarget, ir.Value]:
        """A result as the target that it replaces."""
        builder, scores = self.rewriter.builder, self.record.scores
        if name == "loss":
            rank = len(builder.info.sizes(target.value))
            value = builder.reshape(value, [1] * rank)
            return target, moved_to(
                value, (), GradientDestination(target, (), ()), ir.DataType.FLOAT, builder, emitter
            )
        dims = scores.wanted[GRADIENTS.index(name)]
        plan = plan_moves(dims, target.dims)
        if plan is None:
            raise self._decline(f"{target.value.name!r} could not be made of the operator's result")
        return target, moved_to(
            value, dims, GradientDestination(target, (), plan), ir.DataType.FLOAT, builder, emitter
        )
