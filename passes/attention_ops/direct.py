"""Ready-made operators that become one node of the registry as they stand, without a match of their
operands."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.op_registry import get, verify
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.rewrite.node_view import node_view, registry_node
from fa_compiler.passes.values.facts import Facts

Attributes = dict[str, int | float | str]
Outputs = tuple[tuple[ir.Value, ir.Value], ...]
"""Outputs of a node, each with the value that takes its place."""
TURNED = (0, 1, 3, 2)
"""A state with its last two dimensions exchanged."""
INPUTS = ("query", "key", "value", "past_state", "decay", "beta")
"""Those of LinearAttention."""


@dataclass(frozen=True)
class Direct:
    """A fused node, the values that take the places of the old node's outputs, and what the report
    says of it."""

    node: ir.Node
    outputs: Outputs
    layout: str | None = None
    heads: tuple[int, int] | None = None
    mask: str | None = None
    rule: str | None = None
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class DirectConversion:
    """The conversion of one node. `facts` are those of the model, and `builder` makes nodes in the
    node's graph.

    A conversion replaces no value. It returns the `outputs` of its `Direct`, which are put in their
    places when nothing can decline any more.
    """

    node: ir.Node
    facts: Facts
    builder: Builder

    def decline(self, reason: str, hint: str | None = None) -> Decline:
        """A Decline of this operator, to be raised."""
        return left(self.node, reason, hint)

    def registered(
        self,
        op_type: str,
        inputs: Mapping[str, ir.Value | None],
        attrs: Attributes,
        used: Collection[str] | None = None,
    ) -> ir.Node:
        """A node of the registry, which it allows. It is not in the graph yet. With `used` it has
        these outputs only. Raises Decline."""
        spec = get(op_type)
        made = registry_node(spec, inputs, attrs, self.builder)
        for output, name in zip(made.outputs, spec.output_names, strict=True):
            has_name = used is None or name in used
            output.name = self.builder.names.new(f"{made.name}_{name}") if has_name else ""
        for violation in verify(node_view(made, self.facts.info), "ort"):
            if violation.extension is None:
                raise Decline(Code.ILLEGAL, f"ort: {violation}", self.node)
        return made


def left(node: ir.Node, reason: str, hint: str | None = None) -> Decline:
    """A Decline of a ready-made operator, to be raised."""
    return Decline(Code.READY_MADE, f"{node.op_type} is left as it is: {reason}", node, hint)


def rule_in_words(rule: str, decay: int | None, heads: int) -> str:
    """An update rule, and what decays: each head, or each key dimension. `decay` is the width of
    the gate, None without one."""
    if decay is None:
        return f"rule: {rule}"
    return f"rule: {rule}, a decay for each {'head' if decay == heads else 'key dimension'}"
