"""Puts operators in the places of what is around attention: norms, gated activations, rotary
positions. Those of Ascend are put here; standard.py has those of ONNX and ONNX Runtime.

Rotary positions come before the attention. It reads their results, and the Transposes of heads and
tokens behind them then become a part of its layout. Norms and gates come after it: they are no part
of an attention, so the order changes none. A sum goes to the first norm that reads it.

Nothing of Ascend is emitted that could not be run here: the function bodies that a file holds
(lowering/onnx_file) need opset 13, and those with casts compute float32 only below opset 15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from fa_compiler.op_registry import OpSpec, verify
from fa_compiler.op_registry.parser_plugins import plugin_misfit
from fa_compiler.passes.answer.budget import limited_attempt
from fa_compiler.passes.answer.decline import Decline, label
from fa_compiler.passes.answer.report import Around, Code
from fa_compiler.passes.around import (
    clipped,
    gelu,
    layer_norm,
    rms_norm,
    rotary,
    rotary_ops,
    rows,
    swiglu,
)
from fa_compiler.passes.around.lines import first_built
from fa_compiler.passes.around.records import (
    FLOAT,
    INTERLEAVE,
    Activation,
    Norm,
    Rotary,
    SummedNorm,
    Weight,
    known_shape,
)
from fa_compiler.passes.around.rotary_ops import RotaryOp
from fa_compiler.passes.around.standard import StandardFuser
from fa_compiler.passes.around.turned import pairs_as_halves, without_pair_axis
from fa_compiler.passes.emit.build import Builder, Names
from fa_compiler.passes.ir.nodes import (
    SIXTEEN_BITS,
    attribute_values,
    certain,
    is_dead,
    is_op,
    is_read,
    name_of,
    operand_at,
    places_of,
    without_none,
)
from fa_compiler.passes.ir.surgery import replace_value, restore_order, sweep
from fa_compiler.passes.rewrite.node_view import node_view, prototype, registry_node
from fa_compiler.passes.values.facts import Facts

OLDEST_OPSET = 13
"""The first opset for which an operator has a body."""
TYPED_OPSET = 15
"""The first opset for which it has one of 16 bits."""

Found = Norm | SummedNorm | Activation | Rotary | RotaryOp


def fuse_positions(graph: ir.Graph, facts: Facts, names: Names) -> list[Around]:
    """Fuse the rotary positions of one graph. Returns a line for each, in the order of the
    graph."""
    return _fused(graph, facts, names, lambda fuser, node: fuser.rotary_at(node))


def fuse_around(graph: ir.Graph, facts: Facts, names: Names) -> list[Around]:
    """Fuse the norms and gated activations of one graph. Returns a line for each, in the order of
    the graph."""
    return _fused(graph, facts, names, lambda fuser, node: fuser.norm_or_activation_at(node))


def _fused(
    graph: ir.Graph,
    facts: Facts,
    names: Names,
    at: Callable[[_Fuser | StandardFuser, ir.Node], Around | None],
) -> list[Around]:
    kind = StandardFuser if facts.options.is_standard else _Fuser
    fuser = kind(Builder(graph, names, facts.info), facts)
    lines = [at(fuser, node) for node in list(graph) if node.graph is graph and not is_dead(node)]
    if fuser.made:
        restore_order(graph)
    return without_none(lines)


@dataclass(frozen=True)
class _Fuser:
    """Fuses in one graph."""

    builder: Builder
    facts: Facts
    made: list[ir.Node] = field(default_factory=list)

    def rotary_at(self, node: ir.Node) -> Around | None:
        """Fuse the rotary positions around a node; None where there are none."""
        info, options = self.facts.info, self.facts.options
        if rotary_ops.is_anchor(node):
            ready = limited_attempt(node, lambda: rotary_ops.rotary_op(node, info, options))
            return self._fused(node, ready if isinstance(ready, Decline) else [ready])
        if not rotary.is_anchor(node):
            return None
        return self._fused(node, limited_attempt(node, lambda: rotary.rotary(node, info, options)))

    def norm_or_activation_at(self, node: ir.Node) -> Around | None:
        """Fuse the norm or the activation around a node; None where there is none."""
        info, options = self.facts.info, self.facts.options
        for kind in (swiglu, clipped, gelu):
            if not kind.is_anchor(node):
                continue
            found = limited_attempt(node, lambda kind=kind: kind.activations(node, info, options))  # type: ignore[misc]
            if isinstance(found, Decline) or found:
                return self._fused(node, found)
        if rms_norm.is_anchor(node, info):
            return self._fused(node, limited_attempt(node, lambda: [*rms_norm.norms(node, info)]))
        if layer_norm.is_anchor(node, info):
            return self._fused(
                node, limited_attempt(node, lambda: [*layer_norm.norms(node, info, options)])
            )
        return None

    def _fused(self, node: ir.Node, found: Iterable[Found] | Decline) -> Around | None:
        """Build the first that the product takes; None where there is none."""
        return first_built(node, found, self.builder, self._emitted)

    def _emitted(self, found: Found) -> Around:
        if isinstance(found, Activation):
            return self._activation(found)
        if isinstance(found, Rotary):
            return self._rotary(found)
        if isinstance(found, RotaryOp):
            return self._rotary_op(found)
        return self._summed_norm(found) if isinstance(found, SummedNorm) else self._norm(found)

    def _norm(self, found: Norm) -> Around:
        inputs = {"x": found.x}
        if found.centred:
            size = rows.last_size(
                known_shape(found.x, self.facts.info, found.anchor), found.x, found.anchor
            )
            inputs["normalized_shape"] = self.builder.constant(
                np.array([size], np.int32), "normalized_shape"
            )
        op_type = "LayerNormV4" if found.centred else "RmsNorm"
        node = self._node(op_type, {**inputs, **self._weights(found, found.x)}, found)
        return self._put(node, found.anchor, found.nodes, found.rounded, {0: found.result})

    def _summed_norm(self, found: SummedNorm) -> Around:
        norm, (one, other), more = found.norm, found.operands, 0
        if found.bias is not None:
            one, more = self.builder.add(one, found.bias), 1
        inputs = {"x1": one, "x2": other, **self._weights(norm, one)}
        if norm.centred:
            node = self._node(
                "AddLayerNorm", inputs, norm, {"additional_output": found.is_total_read}
            )
        else:
            node = self._node("AddRmsNorm", inputs, norm)
        results = {0: norm.result, len(node.outputs) - 1: found.total}
        return self._put(node, norm.anchor, found.nodes, norm.rounded, results, more)

    def _activation(self, found: Activation) -> Around:
        (whole, *others), more = found.operands, 0
        self._check_opset(whole, found.anchor)
        if others:
            rank = len(known_shape(whole, self.facts.info, found.anchor))
            whole, more = self.builder.concat(found.operands, rank - 1), 1
        node = registry_node(
            self._spec(found.op_type, found.anchor), {"x": whole}, found.attrs, self.builder
        )
        return self._put(node, found.anchor, found.nodes, found.rounded, {0: found.result}, more)

    def _rotary(self, found: Rotary) -> Around:
        """The operator between tokens in front of heads, whatever the model has."""
        self._check_opset(found.x, found.anchor, casts=False)
        given, more = found.x, 0
        if found.is_complex:
            found = without_pair_axis(found, self.builder)
            more = int(found.x is not given)
        x, cos, sin = found.x, found.cos, found.sin
        if found.heads_first:
            cos, sin = self._swapped(cos), self._swapped(sin)
            more += 1 if found.read_behind is not None else 2
            x = found.read_behind or self._swapped(x)
        if found.is_half_table:
            cos, sin = self._doubled(cos, found.mode), self._doubled(sin, found.mode)
        if found.moves_pairs:
            size = self.facts.info.sizes(x)[-1].const or 0
            x, more = pairs_as_halves(x, size, self.builder), more + 3
        node = self._turning(found.anchor, x, (cos, sin), found.mode)
        dtype, (before, after) = self.facts.info.dtype(x), found.others

        def behind(result: ir.Value) -> ir.Value:
            whole = self._swapped(result) if found.heads_first else result
            return self.builder.concat([*before, whole, *after], 3)

        more += int(bool(before or after))
        return self._put(
            node, found.anchor, found.nodes, dtype in SIXTEEN_BITS, {0: found.result}, more, behind
        )

    def _turning(
        self, anchor: ir.Node, x: ir.Value, tables: tuple[ir.Value, ir.Value], mode: int
    ) -> ir.Node:
        inputs = dict(zip(("x", "cos", "sin"), (x, *tables), strict=True))
        spec = self._spec("RotaryPositionEmbedding", anchor)
        return registry_node(spec, inputs, {"mode": mode}, self.builder)

    def _rotary_op(self, found: RotaryOp) -> Around:
        """The operator between tokens in front of heads, and what brings x into this form and
        back."""
        self._check_opset(found.x, found.node, casts=False)
        builder, dtype, x = self.builder, self.facts.info.dtype(found.x), found.x
        cos, sin = (self._rows_of(table, found) for table in (found.cos, found.sin))
        if found.heads_first:
            x = self._swapped(x)
        elif found.is_flat:
            x = builder.reshape(x, [0, 0, found.heads, found.size])
        rest = None
        if found.part < found.size:
            x, rest = (
                self._cut(x, *bounds) for bounds in ((0, found.part), (found.part, found.size))
            )
        node = self._turning(found.node, x, (cos, sin), found.mode)

        def back(result: ir.Value) -> ir.Value:
            whole = result if rest is None else builder.concat([result, rest], 3)
            if found.heads_first:
                return self._swapped(whole)
            return builder.reshape(whole, [0, 0, found.heads * found.size])

        more = 1 + int(found.heads_first or found.is_flat) + (0 if rest is None else 3)
        result = {0: found.node.outputs[0]}
        return self._put(node, found.node, (found.node,), dtype in SIXTEEN_BITS, result, more, back)

    def _rows_of(self, table: ir.Value, found: RotaryOp) -> ir.Value:
        """A table with a row for each token, one number for each element, and an axis for the
        heads."""
        if found.positions is not None:
            table = self.builder.gather(table, found.positions, 0)
        return self.builder.unsqueeze(self._doubled(table, found.mode), [2])

    def _cut(self, x: ir.Value, start: int, end: int) -> ir.Value:
        """A part of a tensor of four axes along the last one."""
        return self.builder.slice(x, [start], [end], [3])

    def _doubled(self, table: ir.Value, mode: int) -> ir.Value:
        """A table that holds one number for each pair as one for each element."""
        info = self.facts.info
        size = info.sizes(table)[-1].const
        if mode != INTERLEAVE:
            return self.builder.concat([table, table], -1)
        places = self.builder.ints(np.repeat(np.arange(size or 0), 2).tolist())
        return self.builder.gather(table, places, -1)

    def _swapped(self, value: ir.Value) -> ir.Value:
        """A value with its second and third axis swapped. An Unsqueeze of a table is made anew,
        with the other axis."""
        info, node = self.facts.info, value.producer()
        if (
            is_op(node, "Unsqueeze")
            and len(info.sizes(node.inputs[0])) == 3
            and places_of(node, 4) == [1]
        ):
            return self.builder.unsqueeze(operand_at(node, 0), [2])
        return self.builder.transpose(value, rotary.SWAP)

    def _node(
        self,
        op_type: str,
        inputs: Mapping[str, ir.Value],
        norm: Norm,
        attrs: Mapping[str, bool] | None = None,
    ) -> ir.Node:
        """A norm's operator."""
        self._check_opset(next(iter(inputs.values())), norm.anchor)
        attributes = {"epsilon": norm.epsilon, **(attrs or {})}
        return registry_node(self._spec(op_type, norm.anchor), inputs, attributes, self.builder)

    def _weights(self, norm: Norm, x: ir.Value) -> dict[str, ir.Value]:
        """The weight of a norm of x, and the bias of a LayerNorm, as values of one type: ones and
        zeros for absent ones."""
        gamma, beta = (self._weight(weight) for weight in (norm.gamma, norm.beta))
        gamma = gamma or self._filled(1, beta or x)
        return (
            {"gamma": gamma, "beta": beta or self._filled(0, gamma)}
            if norm.centred
            else {"gamma": gamma}
        )

    def _weight(self, weight: Weight) -> ir.Value | None:
        return (
            weight.value
            if weight.numbers is None
            else self.builder.constant(weight.numbers, "weight")
        )

    def _filled(self, number: int, like: ir.Value) -> ir.Value:
        """A vector that holds one number, as long as the last axis of a tensor, and of its type."""
        size, dtype = (
            certain(self.facts.info.sizes(like)[-1].const),
            certain(self.facts.info.dtype(like)),
        )
        return self.builder.constant(np.full(size, number, dtype.numpy()), "weight")

    def _spec(self, op_type: str, anchor: ir.Node) -> OpSpec:
        """The prototype for the CANN that the user named. Raises Decline where none is known."""
        return prototype(op_type, self.facts.options, anchor)

    def _check_opset(self, x: ir.Value, anchor: ir.Node, casts: bool = True) -> None:
        """Raises Decline where the operator has no body. `casts` tells whether the body has
        casts."""
        opset, narrow = self.builder.opset, casts and self.facts.info.dtype(x) != FLOAT
        if opset < (least := TYPED_OPSET if narrow else OLDEST_OPSET):
            reason = f"the model is of opset {opset}, and the function that runs the operator here needs {least}"
            raise Decline(Code.OPSET, reason, anchor, f"export again with opset {least} or newer")

    def _put(
        self,
        node: ir.Node,
        anchor: ir.Node,
        nodes: tuple[ir.Node, ...],
        rounded: bool,
        results: Mapping[int, ir.Value],
        more: int = 0,
        behind: Callable[[ir.Value], ir.Value] | None = None,
    ) -> Around:
        """Put a node into the graph in the place of `nodes`, if the product takes it. `results` are
        the values that its outputs replace, with what is made `behind` them. Raises Decline."""
        wanted = {index: old for index, old in results.items() if is_read(old)}
        for output in node.outputs:  # a call of a function names all outputs of it
            output.name = self.builder.names.new(f"{node.name}_output")
        self.facts.info.infer_node(node)
        options = self.facts.options
        broken = next(
            iter(verify(node_view(node, self.facts.info), options.platform, options.cann)), None
        )
        if broken is not None:
            raise Decline(
                Code.ILLEGAL, f"{node.op_type} {broken.refusal(options.platform)}", anchor, ""
            )
        self._expect_plugin(node, anchor)
        name, op = label(anchor), node.op_type
        self.builder.graph.append(node)
        self.made.append(node)
        for index, old in wanted.items():
            replace_value(
                old, node.outputs[index] if behind is None else behind(node.outputs[index])
            )
        swept = sweep(
            self.builder.graph, [one for one in nodes if one.graph is self.builder.graph][::-1]
        )
        removed = sum(one in nodes for one, _ in swept.nodes)
        return Around(
            name, "fused", op, name_of(node), replaced=removed, added=1 + more, rounded=rounded
        )

    def _expect_plugin(self, node: ir.Node, anchor: ir.Node) -> None:
        """Raises Decline where the file is for the plugins of ATC's own parser, and none of them
        writes the node."""
        options = self.facts.options
        attrs = attribute_values(node)
        misfit = (
            plugin_misfit(node.op_type, attrs, options.cann) if options.parser_plugins else None
        )
        if misfit is not None:
            raise Decline(Code.PARSER, misfit, anchor)
