"""Ready-made linear attention and causal convolution: the operators of ai.onnx 27 and of com.microsoft.

    output, present_state = LinearAttention(query, key, value, past_state, decay, beta)
    output, present_state = CausalConvWithState(input, weight, bias, past_state)

On the target ort they become FlashLinearAttention and ShortConvolution, which have their inputs, attributes and
results. What differs, by number:

    1  LinearAttention of com.microsoft: a state_window other than 0 keeps the states of several tokens. Declined.
    2  CausalConvWithState of com.microsoft: other values than the defaults of ndim, dilation, state_channels_last,
       state_window, state_length, state_update_capacity, input_channels and input_channel_offset, and the output
       state_update, are for other convolutions. Declined.
    3  The same with channels_last: its states are [B,K-1,C], and are transposed.
    4  The activation swish is silu.

On the targets contrib and onnx, one of the two LinearAttentions becomes the other:

    5  contrib: that of ai.onnx, with tensors of float32. ONNX Runtime has a CPU kernel for no other type.
    6  onnx: that of com.microsoft where key and value have one number of heads that divides the query's, in a model of
       opset 27. ai.onnx has no other numbers of heads.
    7  a runtime that is named: of those of ai.onnx none is known to have a kernel, of those of com.microsoft ONNX
       Runtime's for the CPU, for CUDA and for WebGPU (1.32). Declined for the others.

On Ascend a LinearAttention of the delta rules becomes an operator of CANN (delta_rule.py). The convolution stays as it
is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.attention_ops import delta_rule
from fa_compiler.passes.attention_ops.direct import INPUTS, Attributes, Direct, DirectConversion, rule_in_words
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.ir.nodes import input_of, int_attr
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


@dataclass(frozen=True)
class _Conversion(DirectConversion):
    def attention(self) -> Direct:
        """The LinearAttention of the target."""
        self._check_known()
        node, target = self.node, self.facts.options.target
        if int_attr(node, "state_window", 0) != 0:  # (1)
            raise self.decline("with a state_window it keeps the states of several tokens")
        heads = int_attr(node, "q_num_heads", 0), int_attr(node, "kv_num_heads", 0)
        attrs: Attributes = {"q_num_heads": heads[0], "kv_num_heads": heads[1]}
        for name, default in (("update_rule", "gated_delta"), ("scale", 0.0)):
            given = node.attributes.get(name)
            attrs[name] = default if given is None else given.value
        words = rule_in_words(str(attrs["update_rule"]), self._decay_width(heads[1]), heads[1])
        if target == "ascend":
            return self._of_cann(words, str(attrs["update_rule"]), heads)
        make: Callable[[Attributes], ir.Node] = {
            "ort": self._flash,
            "contrib": self._contrib,
            "onnx": self._standard,
        }[target]
        made = make(attrs)
        self._take_place(made)
        return Direct(made, "BSH", heads, rule=words)

    def _of_cann(self, words: str, rule: str, heads: tuple[int, int]) -> Direct:
        """The operator of CANN. Raises Decline."""
        made = delta_rule.convert(self.node, rule, self.facts, self.builder)
        for old, new in zip(self.node.outputs, (made.output, made.present_state), strict=False):
            if new is not None:
                self.builder.replace(old, new)
        return Direct(made.node, "TND", heads, rule=words, assumed=made.assumed)

    def convolution(self) -> Direct:
        """The ShortConvolution. Raises Decline."""
        self._check_known()
        node = self.node
        if self.facts.options.target != "ort":
            raise Decline(Code.ALREADY_FUSED, "the target has no better operator for a causal convolution", node)
        for name, default in DEFAULTS.items():  # (2)
            if int_attr(node, name, default) != default:
                raise self.decline(f"its {name} is {int_attr(node, name, default)}")
        if any(output.uses() or output.is_graph_output() for output in node.outputs[2:]):
            raise self.decline("its output state_update is read")
        activation = node.attributes.get("activation")
        word = "none" if activation is None else activation.as_string()
        last = int_attr(node, "channels_last", 0) != 0
        inputs = {name: input_of(node, index) for index, name in enumerate(("input", "weight", "bias", "past_state"))}
        if last and (past := inputs["past_state"]) is not None:
            inputs["past_state"] = self._swapped(past)  # (3)
        attrs: Attributes = {"activation": "silu" if word == "swish" else word, "channels_last": int(last)}  # (4)
        made = self.registered("ShortConvolution", inputs, attrs)
        self._take_place(made, swapped=last)
        return Direct(made)

    def _check_known(self) -> None:
        if (unknown := unknown_part(self.node)) is not None:
            raise self.decline(f"it has {unknown}, and what it means is not known here")

    def _decay_width(self, heads: int) -> int | None:
        decay = input_of(self.node, 4)
        if decay is None:
            return None
        shape = self.facts.info.shape(decay)
        return heads if shape is None else shape[-1].const

    def _flash(self, attrs: Attributes) -> ir.Node:
        inputs = {name: input_of(self.node, index) for index, name in enumerate(INPUTS)}
        return self.registered("FlashLinearAttention", inputs, attrs)

    def _check_runtime(self, known: tuple[str, ...]) -> None:
        """Decline a runtime that is named and is not among those that are known to have a kernel."""
        runtime = self.facts.options.runtime
        if runtime is not None and runtime.name not in known:  # (7)
            raise self.decline(f"{runtime.name} is not known to have a kernel for the operator of the target")

    def _contrib(self, attrs: Attributes) -> ir.Node:
        if self.node.domain == CONTRIB:
            raise Decline(Code.ALREADY_FUSED, f"{ATTENTION} is an operator of the target already", self.node)
        self._check_runtime(("ort-cpu", "ort-cuda", "ort-webgpu"))
        types = {self.facts.info.dtype(value) for value in self.node.inputs if value is not None}
        if types != {ir.DataType.FLOAT}:  # (5)
            raise self.decline("ONNX Runtime's CPU kernel takes float32 only")
        return self._bare(CONTRIB, attrs)

    def _standard(self, attrs: Attributes) -> ir.Node:
        if self.node.domain != CONTRIB:
            raise Decline(Code.ALREADY_FUSED, f"{ATTENTION} is an operator of the target already", self.node)
        self._check_runtime(())
        if self.builder.opset < FIRST:
            raise self.decline(f"ai.onnx has the operator from opset {FIRST} on", f"--opset {FIRST}")
        q_heads, heads = int(str(attrs["q_num_heads"])), int(str(attrs["kv_num_heads"]))
        if q_heads % heads or not self._has_one_key_head_for_each(q_heads):  # (6)
            raise self.decline("in ai.onnx the heads of query are a multiple of those of key and value")
        return self._bare("", attrs)

    def _has_one_key_head_for_each(self, q_heads: int) -> bool:
        """Whether key has as many heads as there are states."""
        query, key = (self.facts.info.shape(self.node.inputs[index]) for index in (0, 1))
        if query is None or key is None:
            return False
        size, heads = query[-1].exact_div(q_heads), int_attr(self.node, "kv_num_heads", 0)
        return size is not None and key[-1] == size * heads

    def _bare(self, domain: str, attrs: Attributes) -> ir.Node:
        node = ir.node(
            ATTENTION,
            list(self.node.inputs),
            attrs,
            domain=domain,
            num_outputs=2,
            name=self.builder.fused_name(ATTENTION),
        )
        return self.builder.lone(node)

    def _take_place(self, made: ir.Node, swapped: bool = False) -> None:
        """Put the new node and its outputs in the place of the old one's."""
        self.builder.graph.append(made)
        for old, new in zip(self.node.outputs, made.outputs, strict=False):
            new.shape = old.shape
            if old.dtype is not None:
                new.dtype = old.dtype
            if swapped and old is not self.node.outputs[0]:
                new.shape = None
                new = self._swapped(new)
            self.put(old, new)

    def _swapped(self, state: ir.Value) -> ir.Value:
        """A state with its last two dimensions exchanged."""
        return self.builder.op("Transpose", [state], self.facts.info.dtype(state), {"perm": (0, 2, 1)})
