"""Ready-made operators that become one node of the registry as they stand, without a match of their operands."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.op_registry import get, verify
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.ir.nodes import is_read
from fa_compiler.passes.ir.surgery import replace_value
from fa_compiler.passes.rewrite.node_view import node_view, registry_node
from fa_compiler.passes.values.facts import Facts

Attributes = dict[str, int | float | str]
TURNED = (0, 1, 3, 2)
"""A state with its last two dimensions exchanged."""
INPUTS = ("query", "key", "value", "past_state", "decay", "beta")
"""Those of LinearAttention."""


@dataclass(frozen=True)
class Direct:
    """A fused node and what the report says of it."""

    node: ir.Node
    layout: str | None = None
    heads: tuple[int, int] | None = None
    mask: str | None = None
    rule: str | None = None
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class DirectConversion:
    """The conversion of one node. `facts` are those of the model, and `builder` makes nodes in the node's graph."""

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
        """A node of the registry, which it allows. It is not in the graph yet. With `used` it has these outputs only.
        Raises Decline."""
        spec = get(op_type)
        made = registry_node(spec, inputs, attrs, self.builder)
        for output, name in zip(made.outputs, spec.output_names, strict=True):
            has_name = used is None or name in used
            output.name = self.builder.names.new(f"{made.name}_{name}") if has_name else ""
        for violation in verify(node_view(made, self.facts.info), "ort"):
            if violation.extension is None:
                raise Decline(Code.ILLEGAL, f"ort: {violation}", self.node)
        return made

    def put(self, old: ir.Value, new: ir.Value) -> None:
        """Put a value in the place of an output of the node, if something reads it."""
        if is_read(old):
            replace_value(old, new)


def left(node: ir.Node, reason: str, hint: str | None = None) -> Decline:
    """A Decline of a ready-made operator, to be raised."""
    return Decline(Code.READY_MADE, f"{node.op_type} is left as it is: {reason}", node, hint)


def rule_in_words(rule: str, decay: int | None, heads: int) -> str:
    """An update rule, and what decays: each head, or each key dimension. `decay` is the width of the gate, None without
    one."""
    if decay is None:
        return f"rule: {rule}"
    return f"rule: {rule}, a decay for each {'head' if decay == heads else 'key dimension'}"
