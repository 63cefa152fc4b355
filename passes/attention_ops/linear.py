"""Ready-made linear attention and causal convolution: the operators of ai.onnx 27 and of
com.microsoft.

    output, present_state = LinearAttention(query, key, value, past_state, decay, beta)
    output, present_state = CausalConvWithState(input, weight, bias, past_state)

On the target ort they become FlashLinearAttention and ShortConvolution, which have their inputs,
attributes and results. What differs, by number:

    1  LinearAttention of com.microsoft: a state_window other than 0 keeps the states of several
       tokens. Declined.
    2  CausalConvWithState of com.microsoft: other values than the defaults of ndim, dilation,
       state_channels_last, state_window, state_length, state_update_capacity, input_channels and
       input_channel_offset, and the output state_update, are for other convolutions. Declined.
    3  The same with channels_last: its states are [B,K-1,C], and are transposed.
    4  The activation swish is silu.

On the targets contrib and onnx, one of the two LinearAttentions becomes the other:

    5  contrib: that of ai.onnx, with tensors of float32. ONNX Runtime has a CPU kernel for no other
       type.
    6  onnx: that of com.microsoft where key and value have one number of heads that divides the
       query's, in a model of opset 27. ai.onnx has no other numbers of heads.
    8  both: neither has a correction of rank one other than that of the delta rules (general,
       dplr).
    7  a runtime that is named: of those of ai.onnx none is known to have a kernel, of those of
       com.microsoft ONNX Runtime's for the CPU, for CUDA and for WebGPU (1.32). Declined for the
       others.

On Ascend a LinearAttention of the delta rules becomes an operator of CANN (delta_rule.py). The
convolution stays as it is. Linear attention in plain operators (passes/linear) becomes the same
operators, with the limits 5 to 7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.op_registry.ops.flash_linear_attention import LOW_RANK
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.attention_ops import delta_rule
from fa_compiler.passes.attention_ops.direct import (
    INPUTS,
    Attributes,
    Direct,
    DirectConversion,
    Outputs,
)
from fa_compiler.passes.attention_ops.linear_call import LinearCall
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.ir.nodes import input_of, int_attr, is_read
from fa_compiler.passes.ir.signatures import unknown_part
from fa_compiler.passes.values.facts import Facts

CONTRIB = "com.microsoft"
ATTENTION = "LinearAttention"
FIRST = 27
"""The first opset of ai.onnx that has both operators."""
DEFAULTS: Mapping[str, int] = {
    "ndim": 1,
    "dilation": 1,
    "state_channels_last": -1,
    "state_window": 0,
    "state_length": 0,
    "state_update_capacity": 0,
    "input_channels": 0,
    "input_channel_offset": 0,
}
"""The attributes of com.microsoft whose other values are not known here."""


def convert_linear(node: ir.Node, facts: Facts, builder: Builder) -> Direct:
    """Replace a LinearAttention by the operator of the target. Raises Decline."""
    return _Conversion(node, facts, builder).attention()


def convert_convolution(node: ir.Node, facts: Facts, builder: Builder) -> Direct:
    """Replace a CausalConvWithState by ShortConvolution, on the target ort. Raises Decline."""
    return _Conversion(node, facts, builder).convolution()


def operator_of(call: LinearCall, facts: Facts, builder: Builder) -> LinearOperator:
    """Add the target's operator for a linear attention to the graph. Raises Decline."""
    if facts.options.target == "ascend":
        made = delta_rule.convert(call, facts, builder)
        return LinearOperator(made.node, made.output, made.present_state, "TND", made.assumed)
    operators = _Operators(call.node, facts, builder, call)
    make: Callable[[], ir.Node] = {
        "ort": operators.flash,
        "contrib": operators.contrib,
        "onnx": operators.standard,
    }[facts.options.target]
    node = make()
    builder.graph.append(node)
    return LinearOperator(node, node.outputs[0], node.outputs[1], "BSH")


@dataclass(frozen=True)
class LinearOperator:
    """The operator of a target, which is in the graph, and its results; None for states that
    nothing reads."""

    node: ir.Node
    output: ir.Value
    present_state: ir.Value | None
    layout: str
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Operators(DirectConversion):
    """The operators of the targets but Ascend, for one call."""

    call: LinearCall

    def flash(self) -> ir.Node:
        """FlashLinearAttention."""
        return self.registered("FlashLinearAttention", self.call.inputs, self.call.attributes)

    def contrib(self) -> ir.Node:
        """LinearAttention of com.microsoft."""
        if self.call.node.domain == CONTRIB and self.call.is_ready_made:
            raise Decline(
                Code.ALREADY_FUSED, f"{ATTENTION} is an operator of the target already", self.node
            )
        self._check_runtime(("ort-cpu", "ort-cuda", "ort-webgpu"))
        self._check_rule()
        types = {self.facts.info.dtype(value) for value in self.call.inputs.values()}
        if types != {ir.DataType.FLOAT}:  # (5)
            raise self.call.decline("ONNX Runtime's CPU kernel takes float32 only")
        return self._bare(CONTRIB)

    def standard(self) -> ir.Node:
        """LinearAttention of ai.onnx."""
        if self.call.node.domain != CONTRIB and self.call.is_ready_made:
            raise Decline(
                Code.ALREADY_FUSED, f"{ATTENTION} is an operator of the target already", self.node
            )
        self._check_runtime(())
        self._check_rule()
        if self.builder.opset < FIRST:
            raise self.call.decline(
                f"ai.onnx has the operator from opset {FIRST} on", f"--opset {FIRST}"
            )
        q_heads, heads = self.call.heads
        if q_heads % heads or not self._has_one_key_head_for_each(q_heads):  # (6)
            raise self.call.decline(
                "in ai.onnx the heads of query are a multiple of those of key and value"
            )
        return self._bare("")

    def _check_runtime(self, known: tuple[str, ...]) -> None:
        """Decline a runtime that is named and is not among those that are known to have a
        kernel."""
        runtime = self.facts.options.runtime
        if runtime is not None and runtime.name not in known:  # (7)
            raise self.call.decline(
                f"{runtime.name} is not known to have a kernel for the operator of the target"
            )

    def _check_rule(self) -> None:
        """Decline a rule that LinearAttention lacks."""
        if self.call.rule in LOW_RANK:  # (8)
            raise self.call.decline(f"{ATTENTION} has no rule for its correction of rank one")

    def _has_one_key_head_for_each(self, q_heads: int) -> bool:
        """Whether key has as many heads as there are states."""
        query, key = (self.facts.info.shape(self.call.inputs[name]) for name in ("query", "key"))
        if query is None or key is None:
            return False
        size = query[-1].exact_div(q_heads)
        return size is not None and key[-1] == size * self.call.heads[1]

    def _bare(self, domain: str) -> ir.Node:
        inputs = [self.call.inputs.get(name) for name in INPUTS]
        while inputs[-1] is None:
            inputs.pop()
        name = self.builder.fused_name(ATTENTION)
        node = ir.node(
            ATTENTION, inputs, self.call.attributes, domain=domain, num_outputs=2, name=name
        )
        return self.builder.lone(node)


@dataclass(frozen=True)
class _Conversion(DirectConversion):
    def attention(self) -> Direct:
        """The LinearAttention of the target."""
        self._check_known()
        if int_attr(self.node, "state_window", 0) != 0:  # (1)
            raise self.decline("with a state_window it keeps the states of several tokens")
        call = LinearCall.of(self.node)
        made = operator_of(call, self.facts, self.builder)
        pairs = zip(self.node.outputs, (made.output, made.present_state), strict=False)
        outputs = tuple((old, new) for old, new in pairs if new is not None)
        if self.facts.options.target != "ascend":
            outputs = self._outputs(made.node)
        words = call.words(self.facts.info)
        return Direct(made.node, outputs, made.layout, call.heads, rule=words, assumed=made.assumed)

    def convolution(self) -> Direct:
        """The ShortConvolution. Raises Decline."""
        self._check_known()
        node = self.node
        if self.facts.options.target != "ort":
            raise Decline(
                Code.ALREADY_FUSED,
                "the target has no better operator for a causal convolution",
                node,
            )
        for name, default in DEFAULTS.items():  # (2)
            if int_attr(node, name, default) != default:
                raise self.decline(f"its {name} is {int_attr(node, name, default)}")
        if any(map(is_read, node.outputs[2:])):
            raise self.decline("its output state_update is read")
        activation = node.attributes.get("activation")
        word = "none" if activation is None else activation.as_string()
        last = int_attr(node, "channels_last", 0) != 0
        inputs = {
            name: input_of(node, index)
            for index, name in enumerate(("input", "weight", "bias", "past_state"))
        }
        if last and (past := inputs["past_state"]) is not None:
            inputs["past_state"] = self._swapped(past)  # (3)
        # (4)
        attrs: Attributes = {
            "activation": "silu" if word == "swish" else word,
            "channels_last": int(last),
        }
        made = self.registered("ShortConvolution", inputs, attrs)
        self.builder.graph.append(made)
        return Direct(made, self._outputs(made, swapped=last))

    def _check_known(self) -> None:
        if (unknown := unknown_part(self.node)) is not None:
            raise self.decline(f"it has {unknown}, and what it means is not known here")

    def _outputs(self, made: ir.Node, swapped: bool = False) -> Outputs:
        """The outputs of a node of the graph, for the places of the old one's."""
        outputs = []
        for old, new in zip(self.node.outputs, made.outputs, strict=False):
            new.shape = old.shape
            if old.dtype is not None:
                new.dtype = old.dtype
            if swapped and old is not self.node.outputs[0]:
                new.shape = None
                new = self._swapped(new)
            outputs.append((old, new))
        return tuple(outputs)

    def _swapped(self, state: ir.Value) -> ir.Value:
        """A state with its last two dimensions exchanged."""
        return self.builder.transpose(state, (0, 2, 1))
