"""GatedDeltaNet of com.microsoft: linear attention to packed tokens, with its gates and norms
inside.

    output, final_state = GatedDeltaNet(query, key, value, cu_seqlens, decay, beta, initial_state,
    a_log, dt_bias)

    1  query, key, value    [T, H, D] or [B, S, H, D]. Query and key have Hq heads, value has Hv, a
                            multiple of them. Without key and value, query is all three, one behind
                            the other, [T, C] or [B, S, C] with
                            C = 2 Hq Dk + Hv Dv; initial_state is then given, and tells the sizes
    2  sequences            with cu_seqlens [N + 1] those that it divides the T tokens into;
                            otherwise as many of equal length as initial_state has entries, or those
                            of the batch
    3  states               [N, Hv, Dv, Dk] in float32, so they are transposed before and behind
                            FlashLinearAttention
    4  decay                [.., Hv] or [.., Hv, Dk]. gate_activation makes of it, in float32:
                            softplus (qwen): -exp(a_log) Softplus(decay + dt_bias)
                            sigmoid (kda):   gate_lower_bound Sigmoid(exp(a_log) (decay + dt_bias))
    5  beta                 [.., Hv]; with beta_activation sigmoid its Sigmoid
    6  qk_l2_norm           query and key are divided by the root of the sum of their squares and
                            1e-12

It becomes FlashLinearAttention on the target ort. Where 4 to 6 compute something, all tensors must
be float32: the operator computes its gates in float32, whatever the type of query is.

Refused: state_update_capacity, which keeps the changes of several tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.algebra.symbolic import Dim, consts
from fa_compiler.passes.attention_ops.direct import (
    TURNED,
    Attributes,
    Direct,
    DirectConversion,
    Outputs,
    rule_in_words,
)
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.ir.nodes import all_known, input_of, int_attr, text_attr
from fa_compiler.passes.ir.signatures import unknown_part
from fa_compiler.passes.values.facts import Facts

FLOAT = ir.DataType.FLOAT
UNKNOWN_SIZES = "its heads and their sizes are not known before the model runs"
NORM_EPSILON = 1e-12
"""Measured with ONNX Runtime 1.32: the sum of squares of 6.3e-8 is changed by this much."""


def convert_gated_delta_net(node: ir.Node, facts: Facts, builder: Builder) -> Direct:
    """Replace a GatedDeltaNet by FlashLinearAttention, on the target ort. Raises Decline."""
    return _Conversion(node, facts, builder).converted()


@dataclass(frozen=True)
class _Sizes:
    """Heads and sizes, and what stands in front of the width in the shapes that the operator's
    tensors get."""

    q_heads: int
    heads: int
    size: int
    width: int
    lead: tuple[int, int]


@dataclass(frozen=True)
class _Conversion(DirectConversion):
    def converted(self) -> Direct:
        """The FlashLinearAttention that takes the operator's place."""
        node = self.node
        if self.facts.options.target != "ort":
            raise self.decline("the target has no operator with its gates")
        if (unknown := unknown_part(node)) is not None:
            raise self.decline(f"it has {unknown}, and what it means is not known here")
        if int_attr(node, "state_update_capacity", 0) != 0:
            raise self.decline("its state_update_capacity is not 0")
        sizes, rule = self._sizes(), text_attr(node, "update_rule", "gated_delta")
        decay, beta = self._decay(sizes), self._beta()
        state = input_of(node, 6)
        inputs = {
            "query": self._merged(self._normed(0), sizes.lead, sizes.q_heads * sizes.size),
            "key": self._merged(self._normed(1), sizes.lead, sizes.q_heads * sizes.size),
            "value": self._merged(self._operand(2), sizes.lead, sizes.heads * sizes.width),
            "past_state": if_known(self._swapped, state),  # (3)
            "decay": decay and self._merged(decay, sizes.lead, self._gate_width(sizes)),
            "beta": beta and self._merged(beta, sizes.lead, sizes.heads),
            "cu_seqlens": input_of(node, 3),
        }
        scale = node.attributes.get("scale")
        attrs: Attributes = {
            "q_num_heads": sizes.q_heads,
            "kv_num_heads": sizes.heads,
            "update_rule": rule,
            "scale": 0.0 if scale is None else scale.as_float(),
        }
        made = self.registered("FlashLinearAttention", inputs, attrs)
        self.builder.graph.append(made)
        outputs = self._outputs(made, sizes)
        words = rule_in_words(rule, None if decay is None else self._gate_width(sizes), sizes.heads)
        return Direct(made, outputs, "BSH", (sizes.q_heads, sizes.heads), rule=words)

    def _outputs(self, made: ir.Node, sizes: _Sizes) -> Outputs:
        """The results of the new node in the shapes and types of the operator's."""
        out, present = made.outputs
        query, state = self._operand(0), input_of(self.node, 6)
        dtype = self._dtype(query)
        if dtype is None:
            raise self.decline("the type of query is unknown")
        out.dtype, present.dtype = dtype, dtype if state is None else FLOAT
        shape = (
            [-1, sizes.heads, sizes.width]
            if self._rank(query) == 3
            else [0, 0, sizes.heads, sizes.width]
        )
        output = self.node.outputs[0], self.builder.reshape(out, shape)
        if len(self.node.outputs) == 1:
            return (output,)
        last = self._swapped(present)
        if present.dtype != FLOAT:
            last = self.builder.op("Cast", [last], {"to": int(FLOAT)})
        return output, (self.node.outputs[1], last)

    def _sizes(self) -> _Sizes:
        query, key, value = (self.facts.info.shape(self._operand(index)) for index in range(3))
        if query is None or key is None or value is None or len(query) not in (3, 4):
            raise self.decline("the shapes of query, key and value are not known")
        q_heads, heads, size, width = self._known(query[-2], value[-2], query[-1], value[-1])
        if key[-2] != query[-2]:
            raise self.decline(UNKNOWN_SIZES)
        return _Sizes(q_heads, heads, size, width, self._lead(len(query)))  # (1)

    def _known(self, *sizes: Dim) -> list[int]:
        """Sizes that are numbers. Raises Decline where one is not."""
        known = all_known(consts(sizes))
        if known is None:
            raise self.decline(UNKNOWN_SIZES)
        return known

    def _lead(self, rank: int) -> tuple[int, int]:
        """Batch and tokens of the tensors that FlashLinearAttention gets."""
        if rank == 4:
            return 0, 0
        if input_of(self.node, 3) is not None:  # (2)
            return 1, -1
        state = input_of(self.node, 6)
        shape = self.facts.info.shape(state)
        if not shape or not shape[0].const:
            raise self.decline("the number of its sequences is not known before the model runs")
        return shape[0].const, -1

    def _operand(self, index: int) -> ir.Value:
        return self._operands[index]

    @cached_property
    def _operands(self) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Query, key and value, [.., H, D]. Raises Decline."""
        query, key, value = (input_of(self.node, index) for index in range(3))
        if query is not None and key is None and value is None:
            return self._parts(query)
        if query is None or key is None or value is None:
            raise self.decline("one of query, key and value is missing")
        return query, key, value

    def _parts(self, whole: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Query, key and value out of one tensor (1)."""
        shape, state = self.facts.info.shape(whole), input_of(self.node, 6)
        states = self.facts.info.shape(state)
        if not shape or states is None or len(states) != 4:
            raise self.decline("the shapes of query and initial_state are not known")
        total, heads, width, size = self._known(shape[-1], *states[1:])
        q_heads, rest = divmod(total - heads * width, 2 * size)
        if rest or q_heads < 1:
            raise self.decline(
                f"its {total} columns are no query, key and value of the sizes of initial_state"
            )
        columns = (q_heads * size, q_heads * size, heads * width)
        parts = self.builder.split(whole, len(shape) - 1, columns)
        lead = [0] * (len(shape) - 1)
        query, key = (self.builder.reshape(part, [*lead, q_heads, size]) for part in parts[:2])
        return query, key, self.builder.reshape(parts[2], [*lead, heads, width])

    def _normed(self, index: int) -> ir.Value:
        """Query or key after its norm."""
        value = self._operand(index)
        if not int_attr(self.node, "qk_l2_norm", 0):
            return value
        self._check_float(value, "qk_l2_norm")  # (6)
        squares = self.builder.reduce("ReduceSumSquare", value, [-1])
        epsilon = self.builder.constant(np.array(NORM_EPSILON, np.float32))
        root = self.builder.sqrt(self.builder.add(squares, epsilon))
        return self.builder.div(value, root)

    def _decay(self, sizes: _Sizes) -> ir.Value | None:
        """The gate in the log."""
        decay, activation = input_of(self.node, 4), text_attr(self.node, "gate_activation", "none")
        if decay is None or activation == "none":
            return decay
        self._check_float(decay, "gate_activation")  # (4)
        per_key = self._gate_width(sizes) != sizes.heads
        shifted, bias = decay, input_of(self.node, 8)
        if bias is not None:
            shifted = self.builder.add(decay, self._gate_bias(bias, per_key, sizes))
        a_log = input_of(self.node, 7)
        if a_log is None or activation not in ("softplus", "qwen", "sigmoid", "kda"):
            raise self.decline(
                f"its gate_activation is {activation!r}{'' if a_log else ' without a_log'}"
            )
        rate = self.builder.exp(
            self.builder.reshape(a_log, [sizes.heads, 1] if per_key else [sizes.heads])
        )
        if activation in ("softplus", "qwen"):
            soft = self.builder.op("Softplus", [shifted])
            return self.builder.mul(self.builder.neg(rate), soft)
        bound = self.node.attributes.get("gate_lower_bound")
        lowest = self.builder.constant(
            np.array(-5.0 if bound is None else bound.as_float(), np.float32)
        )
        share = self.builder.sigmoid(self.builder.mul(rate, shifted))
        return self.builder.mul(lowest, share)

    def _gate_bias(self, bias: ir.Value, per_key: bool, sizes: _Sizes) -> ir.Value:
        """dt_bias with one number for each head or for each key dimension, as it broadcasts to
        decay."""
        shape = self.facts.info.shape(bias)
        count = None if shape is None else int(np.prod([size.const or 0 for size in shape]))
        if count == sizes.heads:
            return self.builder.reshape(bias, [sizes.heads, 1] if per_key else [sizes.heads])
        if per_key and count == sizes.heads * sizes.size:
            return self.builder.reshape(bias, [sizes.heads, sizes.size])
        raise self.decline(
            "dt_bias has neither one number for each head nor for each key dimension"
        )

    def _beta(self) -> ir.Value | None:
        beta, activation = input_of(self.node, 5), text_attr(self.node, "beta_activation", "none")
        if beta is None or activation == "none":
            return beta
        self._check_float(beta, "beta_activation")  # (5)
        if activation != "sigmoid":
            raise self.decline(f"its beta_activation is {activation!r}")
        return self.builder.sigmoid(beta)

    def _gate_width(self, sizes: _Sizes) -> int:
        """How many numbers the gate of a token has."""
        decay = input_of(self.node, 4)
        rank = if_known(self._rank, decay)
        if decay is not None and rank is None:
            raise self.decline("the rank of decay is unknown")
        return sizes.heads * (sizes.size if rank == self._rank(self._operand(0)) else 1)

    def _check_float(self, value: ir.Value, name: str) -> None:
        types = {self._dtype(value), self._dtype(self._operand(0))}
        if types != {FLOAT}:
            raise self.decline(f"its {name} is computed in float32, and its tensors are of 16 bits")

    def _merged(self, value: ir.Value, lead: tuple[int, int], width: int) -> ir.Value:
        return self.builder.reshape(value, [*lead, width])

    def _swapped(self, state: ir.Value) -> ir.Value:
        return self.builder.transpose(state, TURNED)

    def _dtype(self, value: ir.Value) -> ir.DataType | None:
        return self.facts.info.dtype(value)

    def _rank(self, value: ir.Value) -> int | None:
        shape = self.facts.info.shape(value)
        return if_known(len, shape)
