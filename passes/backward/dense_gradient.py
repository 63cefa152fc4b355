"""From a matched gradient to a FlashAttentionScoreGrad node beside its FlashAttentionScore.

The gradient takes the inputs and attributes of the forward node, so that it computes the same
probabilities again, and the statistics and the result of this node. The gradients are in the layout
of query, key and value. A gradient goes to the cheapest place after the original product,
multiplied by the factor between this place and the product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from fa_compiler.op_registry import OpSpec, get
from fa_compiler.passes.algebra.symbolic import Dim, consts
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.backward.destination import (
    GradientCompanion,
    destination_of,
    gradient_dims,
    moved_to,
    replace_destinations,
)
from fa_compiler.passes.backward.gradient_targets import GradientTarget
from fa_compiler.passes.backward.match import Role
from fa_compiler.passes.emit.build import LayoutEmitter
from fa_compiler.passes.ir.nodes import certain, without_none
from fa_compiler.passes.layout.views import View
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.rewrite.layout_plan import LayoutPlan, OperandSource, cheapest_source
from fa_compiler.passes.rewrite.node_view import registry_node

OP = "FlashAttentionScoreGrad"
RENAMED = {"real_shift": "pse_shift"}
"""Inputs of FlashAttentionScore that its gradient takes under another name."""
EXTENSIONS = {"cpu_nan_rows", "cpu_mask_value", "cpu_masked_bias", "cpu_softcap"}
"""The extensions that are attributes of both operators, and say the same of both."""
OUTPUTS: dict[Role, str] = {
    "query": "dq",
    "key": "dk",
    "value": "dv",
    "query_rope": "dq_rope",
    "key_rope": "dk_rope",
}


class Backward(GradientCompanion):
    """Emits the gradient as the companion of an attention (see rewrite/rewriter.py)."""

    def cost(self, match: AttentionMatch, plan: LayoutPlan) -> int | None:
        """The work in one layout."""
        dy = cheapest_source(self._dy, plan.output, match.space, self.rewriter.builder.info)
        destinations = [
            destination_of(gradient, match, plan.name) for gradient in self.record.gradients
        ]
        if dy is None or None in destinations:
            return None
        return dy.cost + sum(destination.cost for destination in without_none(destinations))

    def build(
        self,
        node: ir.Node,
        match: AttentionMatch,
        plan: LayoutPlan,
        inputs: Mapping[str, ir.Value | None],
        emitter: LayoutEmitter,
    ) -> Callable[[], None]:
        """Add the gradient of a forward node; what is returned puts its results in place."""
        source = certain(
            cheapest_source(self._dy, plan.output, match.space, self.rewriter.builder.info)
        )
        made = self._node(node, match, inputs, self._output_gradient(source, match, emitter))
        self._declare_shapes(made, match, plan.name, inputs.get("real_shift"))
        self.rewriter.check(made, match)
        spec_outputs = {
            output.name: value
            for output, value in zip(self._spec.outputs, made.outputs, strict=True)
        }
        pairs: list[tuple[GradientTarget, ir.Value]] = []
        for gradient in self.record.gradients:
            destination = certain(destination_of(gradient, match, plan.name))
            dims, value = (
                gradient_dims(gradient.role, match, plan.name),
                spec_outputs[OUTPUTS[gradient.role]],
            )
            pairs.append(
                (
                    destination.target,
                    moved_to(value, dims, destination, match.dtype, self.rewriter.builder, emitter),
                )
            )
        self.nodes.append(made)

        def put() -> None:
            replace_destinations(pairs, self.rewriter)
            self.rewriter.replaced.extend(self.record.dead)

        return put

    @property
    def _dy(self) -> View:
        assert self.record.dy is not None
        return self.record.dy

    @property
    def _spec(self) -> OpSpec:
        return get(OP, self.rewriter.options.cann)

    def _output_gradient(
        self, source: OperandSource, match: AttentionMatch, emitter: LayoutEmitter
    ) -> ir.Value:
        return emitter.apply(
            self.rewriter.builder.cast(source.value, match.dtype), source.dims, source.plan
        )

    def _node(
        self,
        forward: ir.Node,
        match: AttentionMatch,
        inputs: Mapping[str, ir.Value | None],
        dy: ir.Value,
    ) -> ir.Node:
        spec, names = self._spec, self.rewriter.builder.names
        given = {
            RENAMED.get(name, name): value for name, value in inputs.items() if value is not None
        }
        known = {tensor.name for tensor in spec.inputs}
        if unknown := given.keys() - known:
            raise Decline(Code.ILLEGAL, f"{OP} has no input {sorted(unknown)[0]}", match.node)
        given |= {
            "dy": dy,
            "softmax_max": forward.outputs[0],
            "softmax_sum": forward.outputs[1],
            "attention_in": forward.outputs[3],
        }
        node = registry_node(spec, given, self._attrs(forward), self.rewriter.builder)
        wanted = {OUTPUTS[gradient.role] for gradient in self.record.gradients}
        for declared, output in zip(spec.outputs, node.outputs, strict=True):
            # The CPU kernel leaves out what nobody asks for.
            named = declared.name in wanted or self.rewriter.options.target == "ascend"
            output.name = names.new(f"{node.name}_{declared.name}") if named else ""
            output.dtype = ir.DataType.FLOAT if declared.name == "dsink" else match.dtype
        self.rewriter.builder.graph.append(node)
        self.rewriter.made.append(node)
        return node

    def _attrs(self, forward: ir.Node) -> dict[str, int | float | str]:
        """The forward node's attributes, as far as its gradient has them."""
        spec = self._spec
        shared = {attr.name for attr in spec.attrs} | EXTENSIONS
        attrs = {name: attr.value for name, attr in forward.attributes.items() if name in shared}
        if self.rewriter.options.target == "ort" and self.record.empty_rows in ("mean", "nan"):
            attrs["cpu_empty_rows"] = self.record.empty_rows
        return attrs

    def _declare_shapes(
        self, node: ir.Node, match: AttentionMatch, layout: str, shift: ir.Value | None
    ) -> None:
        """Shapes of all outputs: as their inputs, and of absent ones [0]."""
        space, info = match.space, self.rewriter.builder.info
        shapes: dict[str, Sequence[Dim] | None] = {
            OUTPUTS[role]: [space.size(dim) for dim in gradient_dims(role, match, layout)]
            for role in OUTPUTS
            if match.rope is not None or not role.endswith("_rope")
        }
        if shift is not None:
            shapes["dpse"] = info.shape(shift)
        for declared, output in zip(self._spec.outputs, node.outputs, strict=True):
            shape = shapes.get(declared.name, [Dim(0)])
            if output.name and shape is not None:
                info.set(output, shape, output.dtype)
                output.shape = ir.Shape(consts(shape))
