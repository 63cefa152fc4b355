"""A linear attention by its operands, as LinearAttention takes them: a ready-made operator, or
plain operators that are proven to compute one (passes/linear)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.attention_ops.direct import INPUTS, Attributes, left, rule_in_words
from fa_compiler.passes.ir.nodes import input_of, int_attr, is_read, text_attr
from fa_compiler.passes.values.shapes import ShapeInfo


@dataclass(frozen=True)
class LinearCall:
    """What a linear attention computes of which values."""

    node: ir.Node
    """The node that the report names: the ready-made operator, or what makes the output."""
    inputs: Mapping[str, ir.Value]
    """By the names in LinearAttention; absent ones are missing."""
    heads: tuple[int, int]
    """q_num_heads and kv_num_heads."""
    rule: str
    scale: float
    """0 for the default."""
    has_present: bool
    """Does something read the last states?"""
    is_ready_made: bool = False

    @classmethod
    def of(cls, node: ir.Node) -> LinearCall:
        """Of a LinearAttention."""
        scale, present = node.attributes.get("scale"), node.outputs[1:2]
        return cls(
            node,
            {
                name: value
                for index, name in enumerate(INPUTS)
                if (value := input_of(node, index)) is not None
            },
            (int_attr(node, "q_num_heads", 0), int_attr(node, "kv_num_heads", 0)),
            text_attr(node, "update_rule", "gated_delta"),
            0.0 if scale is None else scale.as_float(),
            any(map(is_read, present)),
            is_ready_made=True,
        )

    @property
    def attributes(self) -> Attributes:
        """The attributes of LinearAttention and FlashLinearAttention."""
        q_heads, heads = self.heads
        return {
            "q_num_heads": q_heads,
            "kv_num_heads": heads,
            "update_rule": self.rule,
            "scale": self.scale,
        }

    def words(self, info: ShapeInfo) -> str:
        """The rule, and what decays."""
        decay, heads = self.inputs.get("decay"), self.heads[1]
        if decay is None:
            return rule_in_words(self.rule, None, heads)
        shape = info.shape(decay)
        return rule_in_words(self.rule, heads if shape is None else shape[-1].const, heads)

    def decline(self, reason: str, hint: str | None = None, code: Code = Code.RUNTIME) -> Decline:
        """A Decline, to be raised: with the code of ready-made operators for one, and with this
        code for plain operators."""
        if self.is_ready_made:
            return left(self.node, reason, hint)
        return Decline(
            code,
            f"this linear attention stays in plain operators: {reason}",
            self.node,
            hint or None,
        )
