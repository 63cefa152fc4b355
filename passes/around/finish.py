"""What is done when all is fused: equal nodes are computed once, views become one, one operator
rotates query and key, and one product stands for several of one operand.

All of it takes what is there already and makes less of it. So it comes last, and costs no fusion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from fa_compiler.op_registry import get, verify
from fa_compiler.op_registry.errors import UnknownVariant
from fa_compiler.op_registry.parser_plugins import plugin_misfit
from fa_compiler.passes.answer.decline import Decline, label
from fa_compiler.passes.answer.report import Around
from fa_compiler.passes.around.equal import equal_nodes
from fa_compiler.passes.around.heads import Heads, head_parts
from fa_compiler.passes.around.lines import declined
from fa_compiler.passes.around.pairs import Pair, pairs
from fa_compiler.passes.around.products import Group, groups
from fa_compiler.passes.around.views import chains
from fa_compiler.passes.emit.build import Builder, Names
from fa_compiler.passes.emit.joined import JoinedTensor
from fa_compiler.passes.ir.nodes import (
    constant_tensor,
    first,
    is_op,
    nodes_of_type,
    operand_at,
    operands,
    without_none,
)
from fa_compiler.passes.ir.surgery import replace_value, restore_order, sweep
from fa_compiler.passes.rewrite.node_view import node_view, registry_node
from fa_compiler.passes.values.facts import Facts

TOGETHER = "ApplyRotaryPosEmb"


def finish(graph: ir.Graph, facts: Facts, names: Names, lines: Sequence[Around]) -> list[Around]:
    """Make less of what was fused in one graph. Returns the lines of the report, of which `lines`
    were known."""
    restore_order(graph)
    finisher = _Finisher(Builder(graph, names, facts.info), facts)
    finisher.drop_idle_casts()
    finisher.share_equal_nodes()
    found = finisher.with_pairs(lines)
    if facts.options.joins_weights:
        found += finisher.joined()
    finisher.split_heads()
    finisher.shorten_chains()
    restore_order(graph)
    return found


@dataclass(frozen=True)
class _Finisher:
    """Finishes one graph."""

    builder: Builder
    facts: Facts

    def drop_idle_casts(self) -> None:
        """Let nobody read a Cast to the type that a value has already. Each is a kernel for
        nothing."""
        info = self.facts.info
        for node in list(nodes_of_type(self.builder.graph, "Cast")):
            source, result = operand_at(node, 0), node.outputs[0]
            is_idle = info.dtype(source) == info.dtype(result) is not None
            if is_idle and not result.is_graph_output():
                replace_value(result, source, rename=False)
                sweep(self.builder.graph, [node])

    def share_equal_nodes(self) -> None:
        """Compute once what several nodes compute alike. What nothing needs any more is removed at
        the end: until then later nodes may turn out to be equal to it."""
        unread = []
        for equal in equal_nodes(self.builder.graph, self.facts.info):
            for old, new in zip(equal.node.outputs, equal.first.outputs, strict=True):
                replace_value(old, new, rename=False)
            unread.append(equal.node)
        sweep(self.builder.graph, unread)

    def shorten_chains(self) -> None:
        """Put one Reshape in the place of several views, and of a Transpose that moves nothing."""
        for chain in chains(self.builder.graph, self.facts.info):
            new = chain.source
            if chain.target is not None:
                new = self.builder.op("Reshape", [new, self.builder.ints(chain.target)], stays=True)
            replace_value(chain.nodes[0].outputs[0], new, rename=False)
            sweep(self.builder.graph, list(chain.nodes[:1]))

    def with_pairs(self, lines: Sequence[Around]) -> list[Around]:
        """The lines, in which one stands for the two rotations of a pair."""
        places = {line.node: place for place, line in enumerate(lines) if line.status == "fused"}
        found: list[Around | None] = [*lines]
        for pair in pairs(self.builder.graph, self.facts.info, self.facts.options):
            known = sorted(
                places[node.name] for node in (pair.query, pair.key) if node.name in places
            )
            node = self._together(pair) if len(known) == 2 else None
            if node is None:
                continue
            first, second = (lines[place] for place in known)
            both = replace(
                first, op=TOGETHER, node=node.name, replaced=first.replaced + second.replaced
            )
            both = replace(
                both, added=first.added + second.added - 1, rounded=first.rounded or second.rounded
            )
            found[known[0]], found[known[1]] = both, None
        return without_none(found)

    def _together(self, pair: Pair) -> ir.Node | None:
        """The operator in the place of two rotations; None where the product does not take it."""
        builder, options, place = self.builder, self.facts.options, self.builder.place
        if options.parser_plugins and plugin_misfit(TOGETHER, {}, options.cann) is not None:
            return None
        try:
            spec = get(TOGETHER, options.cann)
        except UnknownVariant:
            return None
        inputs: dict[str, Any] = dict(
            zip(("query", "cos", "sin"), operands(pair.query), strict=False)
        )
        node = registry_node(spec, {**inputs, "key": operand_at(pair.key, 0)}, {}, builder)
        for output in node.outputs:
            output.name = builder.names.new(f"{node.name}_output")
        self.facts.info.infer_node(node)
        view = node_view(node, self.facts.info)
        if verify(view, options.platform, options.cann):
            builder.go_back(place)
            return None
        builder.graph.append(node)
        for old, new in zip((pair.query, pair.key), node.outputs, strict=True):
            value = old.outputs[0]
            replace_value(value, new, rename=value.is_graph_output())
            sweep(builder.graph, [old])
        return node

    def joined(self) -> list[Around]:
        """Join the products of one operand. Returns a line for each group."""
        found = list(groups(self.builder.graph, self.facts.info, self.facts.options))
        weights: dict[tuple[ir.Value, ...], ir.Value] = {}
        return [
            declined(each.culprit, each)
            if isinstance(each, Decline)
            else self._joined(each, weights)
            for each in found
        ]

    def _joined(self, group: Group, weights: dict[tuple[ir.Value, ...], ir.Value]) -> Around:
        """One product in the place of a group. `weights` are those that are joined already."""
        node, mark = group.parts[0].node, self.builder.mark
        if group.weights not in weights:
            weights[group.weights] = self._weight(group)
        whole = self._product(group, weights[group.weights])
        if group.whole is not None:
            replaced = [group.whole]
            self.builder.replace(group.whole.outputs[0], whole)
        else:
            replaced = [each.node for each in group.heads]
            self._divide(group, whole)
        nodes = [*replaced, *(one for part in group.parts for one in part.nodes[::-1])]
        made = self.builder.nodes_since(mark)
        swept = sweep(self.builder.graph, nodes)
        name = label(whole.producer())
        return Around(label(node), "fused", node.op_type, name, len(swept.nodes), len(made))

    def _weight(self, group: Group) -> ir.Value:
        """The joined weight, which is read when it is written."""
        tensors = without_none(constant_tensor(weight) for weight in group.weights)
        tensor = JoinedTensor(
            tensors, 0 if group.is_transposed else 1, self.builder.names.new("fa_weight")
        )
        value = ir.Value(name=tensor.name, const_value=tensor)
        value.dtype, value.shape = tensor.dtype, tensor.shape
        self.builder.graph.register_initializer(value)
        return value

    def _product(self, group: Group, weight: ir.Value) -> ir.Value:
        """The product of the operand and the joined weight, with the joined bias."""
        first = group.parts[0]
        bias, x = self._bias(group), operand_at(first.node, 0)
        if is_op(first.node, "Gemm"):
            inputs = [x, weight] if bias is None else [x, weight, bias]
            return self.builder.op("Gemm", inputs, {"transB": int(group.is_transposed)})
        whole = self.builder.matmul(x, weight)
        return whole if bias is None else self.builder.add(whole, bias)

    def _bias(self, group: Group) -> ir.Value | None:
        """The joined bias: -0 where a part has none, which changes nothing that it is added to."""
        biases = [part.bias for part in group.parts]
        known = first(biases)
        if known is None:
            return None
        columns = [
            np.full(part.columns, -0.0, known.dtype) if part.bias is None else part.bias
            for part in group.parts
        ]
        return self.builder.constant(np.concatenate(columns), "bias")

    def _divide(self, group: Group, whole: ir.Value) -> None:
        """Let the readers of each part read it from a Split of the joined product, in heads if all
        are in heads."""
        last = len(self.facts.info.sizes(group.parts[0].result)) - 1
        if group.heads:
            self._split_heads(whole, last, group.heads)
            return
        parts = self.builder.split(whole, last, [part.columns for part in group.parts])
        for part, new in zip(group.parts, parts, strict=True):
            replace_value(part.result, new, rename=False)

    def _split_heads(self, whole: ir.Value, last: int, heads: Sequence[Heads]) -> None:
        """Let the readers of heads read them from a Split of a tensor whose last axis is cut into
        heads."""
        counts = [each.count for each in heads]
        shape = self.builder.ints([0] * last + [sum(counts), heads[0].size])
        cut = self.builder.op("Reshape", [whole, shape], stays=True)
        for each, new in zip(heads, self.builder.split(cut, last, counts), strict=True):
            replace_value(each.node.outputs[0], new, rename=False)

    def split_heads(self) -> None:
        """Cut tensors into heads once, and not part by part."""
        for found in head_parts(self.builder.graph, self.facts.info):
            self._split_heads(found.whole, found.axis, found.parts)
            sweep(self.builder.graph, [each.node for each in found.parts])
