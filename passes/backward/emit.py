"""From a matched gradient to a FlashAttentionScoreGrad node beside its FlashAttentionScore.

The gradient takes the forward node's very inputs and attributes, so that it recomputes the same probabilities, and its
statistics and result. Its own results are in the layout of query, key and value; each goes to the place behind the
original product that costs least, multiplied by the factor that is between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from fa_compiler.op_registry import DOMAIN, OpSpec, full_attrs, get, place_inputs
from fa_compiler.passes.axes import Arrangement, Axes
from fa_compiler.passes.backward.match import Gradient, GradientMatch, Place, Role
from fa_compiler.passes.backward.quantities import TOLERANCE
from fa_compiler.passes.build import PREFIX, Mover
from fa_compiler.passes.decline import Decline
from fa_compiler.passes.emit import Emitter
from fa_compiler.passes.layout import COPY_COST, Move, arrangement, cost, moves
from fa_compiler.passes.layout_plan import LayoutPlan, Source, cheapest_source
from fa_compiler.passes.match import AttentionMatch, Roles
from fa_compiler.passes.report import Code
from fa_compiler.passes.surgery import replace_value
from fa_compiler.passes.symbolic import Dim
from fa_compiler.passes.views import View

OP = "FlashAttentionScoreGrad"
RENAMED = {"real_shift": "pse_shift"}
"""Inputs of FlashAttentionScore that its gradient takes under another name."""
OUTPUTS: dict[Role, str] = {"query": "dq", "key": "dk", "value": "dv"}


@dataclass(frozen=True)
class Landing:
    """A place for a gradient, the axes to sum over first, and the moves to it from the operator's output with those
    axes in front."""

    place: Place
    summed: Axes
    plan: tuple[Move, ...]

    @property
    def cost(self) -> int:
        """The work added minus the work saved."""
        extra = COPY_COST * (bool(self.summed) + (not _is_one(self.place.factor)))
        return cost(self.plan) + extra - self.place.saved


@dataclass
class Backward:
    """Emits the gradient as the companion of an attention (see emit.py)."""

    record: GradientMatch
    emitter: Emitter
    nodes: list[ir.Node] = field(default_factory=list)

    @property
    def views(self) -> tuple[View, ...]:
        """The gradient of the output."""
        return (self.record.dy,)

    def adapted(self, match: AttentionMatch) -> AttentionMatch:
        """The match with repeated key and value heads where their gradients are wanted one by one.

        The operator adds up the gradients of the query heads that share a key head.
        """
        space, roles = match.space, match.roles
        owned = {*roles.batch, *roles.kv_heads, *roles.columns, *roles.depth, *roles.value_depth}
        for gradient in self.record.gradients:
            places = (space.resolve_all(place.dims) for place in gradient.places)
            if gradient.role != "query" and not any(_axes(dims) <= owned for dims in places):
                return replace(match, roles=replace(roles, kv_heads=roles.heads))
        return match

    def cost(self, match: AttentionMatch, plan: LayoutPlan) -> int | None:
        """The work in one layout."""
        dy = cheapest_source(self.record.dy, plan.output, match.space)
        landings = [self._landing(gradient, match, plan.name) for gradient in self.record.gradients]
        if dy is None or None in landings:
            return None
        return dy.cost + sum(landing.cost for landing in landings if landing is not None)

    def _landing(self, gradient: Gradient, match: AttentionMatch, layout: str) -> Landing | None:
        dims = _arrangement(gradient.role, match.roles, layout)
        best: Landing | None = None
        for place in gradient.places:
            wanted = match.space.resolve_all(place.dims)
            left = _axes(wanted)
            summed = tuple(axis for dim in dims for axis in dim if axis not in left)
            plan = moves(dims, (summed, *wanted) if summed else wanted)
            if plan is None or not left <= _axes(dims):
                continue
            landing = Landing(place, summed, plan)
            if best is None or landing.cost <= best.cost:
                best = landing
        return best

    def build(
        self,
        node: ir.Node,
        match: AttentionMatch,
        plan: LayoutPlan,
        inputs: Mapping[str, ir.Value | None],
        mover: Mover,
    ) -> Callable[[], None]:
        """Add the gradient of a forward node; what is returned puts its results in place."""
        source = cheapest_source(self.record.dy, plan.output, match.space)
        assert source is not None
        gradient = self._node(node, match, inputs, self._output_gradient(source, match, mover))
        self._declare_shapes(gradient, match, plan.name, inputs.get("real_shift"))
        self.emitter.check(gradient, match)
        spec_outputs = {output.name: value for output, value in zip(self._spec.outputs, gradient.outputs, strict=True)}
        pairs: list[tuple[Place, ir.Value]] = []
        for each in self.record.gradients:
            landing = self._landing(each, match, plan.name)
            assert landing is not None
            dims = _arrangement(each.role, match.roles, plan.name)
            pairs.append((landing.place, self._result(spec_outputs[OUTPUTS[each.role]], dims, landing, match, mover)))
        self.nodes.append(gradient)

        def land() -> None:
            landed: set[ir.Value] = set()
            for place, result in pairs:
                maker = place.value.producer()
                assert maker is not None
                self.emitter.replaced.append(maker)
                # The same gradient may be asked for twice: each place has its own name.
                replace_value(place.value, self.emitter.builder.alias(result) if result in landed else result)
                landed.add(result)
            self.emitter.replaced.extend(self.record.dead)

        return land

    @property
    def _spec(self) -> OpSpec:
        return get(OP, self.emitter.options.cann)

    def _output_gradient(self, source: Source, match: AttentionMatch, mover: Mover) -> ir.Value:
        return mover.apply(self.emitter.builder.cast(source.value, match.dtype), source.dims, source.plan)

    def _node(
        self, forward: ir.Node, match: AttentionMatch, inputs: Mapping[str, ir.Value | None], dy: ir.Value
    ) -> ir.Node:
        spec, names = self._spec, self.emitter.builder.names
        given = {RENAMED.get(name, name): value for name, value in inputs.items() if value is not None}
        known = {tensor.name for tensor in spec.inputs}
        if unknown := given.keys() - known:
            raise Decline(Code.ILLEGAL, f"{OP} has no input {sorted(unknown)[0]}", match.node)
        given |= {
            "dy": dy,
            "softmax_max": forward.outputs[0],
            "softmax_sum": forward.outputs[1],
            "attention_in": forward.outputs[3],
        }
        name = names.new(f"{PREFIX}_{OP}")
        node = ir.Node(
            DOMAIN,
            OP,
            place_inputs(spec, given),
            [ir.convenience.convert_attribute(key, value) for key, value in self._attrs(forward).items()],
            num_outputs=len(spec.outputs),
            name=name,
        )
        wanted = {OUTPUTS[each.role] for each in self.record.gradients}
        for declared, output in zip(spec.outputs, node.outputs, strict=True):
            # The CPU kernel leaves out what nobody asks for.
            named = declared.name in wanted or self.emitter.options.target == "ascend"
            output.name = names.new(f"{name}_{declared.name}") if named else ""
            output.dtype = ir.DataType.FLOAT if declared.name == "dsink" else match.dtype
        self.emitter.builder.graph.append(node)
        self.emitter.made.append(node)
        return node

    def _attrs(self, forward: ir.Node) -> dict[str, int | float | str]:
        """The forward node's attributes, as far as its gradient has them."""
        spec = self._spec
        shared = {attr.name for attr in spec.attrs} | {"cpu_nan_rows", "cpu_mask_value"}
        attrs = {name: attr.value for name, attr in forward.attributes.items() if name in shared}
        if self.emitter.options.target == "ort" and self.record.empty_rows in ("mean", "nan"):
            attrs["cpu_empty_rows"] = self.record.empty_rows
        return dict(full_attrs(spec, attrs))

    def _declare_shapes(self, node: ir.Node, match: AttentionMatch, layout: str, shift: ir.Value | None) -> None:
        """Shapes of all outputs: as their inputs, and of absent ones [0]."""
        space, info = match.space, self.emitter.builder.info
        shapes: dict[str, Sequence[Dim] | None] = {
            OUTPUTS[role]: [space.size(dim) for dim in _arrangement(role, match.roles, layout)] for role in OUTPUTS
        }
        if shift is not None:
            shapes["dpse"] = info.shape(shift)
        for declared, output in zip(self._spec.outputs, node.outputs, strict=True):
            shape = shapes.get(declared.name, [Dim(0)])
            if output.name and shape is not None:
                info.set(output, shape, output.dtype)
                output.shape = ir.Shape([size.const for size in shape])

    def _result(
        self, value: ir.Value, dims: Arrangement, landing: Landing, match: AttentionMatch, mover: Mover
    ) -> ir.Value:
        """The operator's output as the value it replaces."""
        builder = self.emitter.builder
        value = mover.apply(value, dims, landing.plan)
        if landing.summed:
            value = self._sum_first(value, match.dtype)
        if not _is_one(landing.place.factor):
            number = builder.constant(np.array(landing.place.factor, dtype=match.dtype.numpy()), "number")
            value = builder.op("Mul", [value, number], match.dtype)
        wanted = builder.info.dtype(landing.place.value)
        return value if wanted is None else builder.cast(value, wanted)

    def _sum_first(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        builder = self.emitter.builder
        if builder.opset >= 13:
            return builder.op("ReduceSum", [value, builder.ints([0])], dtype, {"keepdims": 0})
        return builder.op("ReduceSum", [value], dtype, {"axes": (0,), "keepdims": 0})


def _arrangement(role: Role, roles: Roles, layout: str) -> Arrangement:
    """The axes of a gradient: those of what it is the gradient of."""
    if role == "query":
        return arrangement(layout, roles.batch, roles.heads, roles.rows, roles.depth)
    depth = roles.depth if role == "key" else roles.value_depth
    return arrangement(layout, roles.batch, roles.kv_heads, roles.columns, depth)


def _axes(dims: Arrangement) -> set[object]:
    return {axis for dim in dims for axis in dim}


def _is_one(factor: float) -> bool:
    return abs(factor - 1.0) <= TOLERANCE
